"""Both passes of a formula as plans, derived from its nodes; see `formula`."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from anemoi_gt.ops.operator import GradientLayout, Spec
from anemoi_gt.ops.tensors import CallSizes
from anemoi_gt.ops.tree import leaves, tree_of
from anemoi_gt.ops.triton_backend.formula import Key, Node, Program, Value
from anemoi_gt.ops.triton_backend.packing import (
    PackedGradient,
    PackedGradients,
    PackedWeights,
    Piece,
)
from anemoi_gt.ops.triton_backend.plan import Buffer
from anemoi_gt.ops.triton_backend.planned_operator import PlannedOperator
from anemoi_gt.ops.triton_backend.sublayer_builder import NodeSums, SublayerBuilder


class Pass:
    """A pass of a program whose plan is being built.

    Parameters
    ----------
    program : Program
    builder : SublayerBuilder
    tensors : sequence of Buffer or None
        Of the leaves.
    index : NamedTuple
        The constants.
    kept : dict
        Memory of packed parameters and of values, by the names of the kept layout.
    needs : sequence of bool, optional
        Of the leaves, in a backward pass.
    """

    def __init__(
        self,
        program: Program,
        builder: SublayerBuilder,
        tensors: Sequence[Buffer | None],
        index: Any,
        kept: dict[str, Buffer],
        needs: Sequence[bool] | None = None,
    ):
        self.program, self.builder, self.tensors, self.index = program, builder, tensors, index
        self.crossing = program.crossing()
        self.memory = {value: kept[name] for name, value in program.kept().items() if name in kept}
        self.computed: set[Value] = set()  # in this pass, for all rows
        self._prepared: set[Node] = set()
        self.operands: dict[tuple, Buffer] = {}  # rows as products read them
        # of a backward pass
        self.needed = set() if needs is None else program.needed(needs)
        self.needs = needs
        self.parameters: dict[str, Buffer] = {}  # gradients by group
        self.gradients: dict[Value, Buffer] = {}  # of all rows
        self.written: set[Value] = set()  # values whose gradient was written; others are added
        self.residuals: dict[Value, Buffer] = {}  # gradients that wait for the pass of a norm
        self.sums: dict[Node, tuple[NodeSums, int]] = {}  # and the first column of a node
        self.totals: dict[Hashable, Buffer] = {}  # once all rows are summed

        groups: dict[str, list[Piece[Buffer]]] = {}
        for name, pieces in program.packed().items():
            groups[name] = [
                Piece(shape, self.leaf(source), self.leaf(addend), has_one)
                for shape, source, addend, has_one in pieces
            ]
        if needs is None:
            self.weights = builder.pack(groups, kept["packed"])
        else:
            self.weights = PackedWeights.of(groups).views(kept["packed"])

    def leaf(self, value: Value | None) -> Buffer | None:
        """Return the buffer of a leaf; None if it is absent."""
        return None if value is None or value.leaf is None else self.tensors[value.leaf]

    def whole(self, value: Value) -> Buffer | None:
        """Return the memory of all rows of a value; None where it exists for one chunk."""
        if value.leaf is not None:
            return self.tensors[value.leaf]
        is_memory = value.node is None  # of which other values are columns
        if value not in self.memory and (is_memory or value in self.crossing):
            self.memory[value] = self.builder.empty(value.shape, value.dtype)
        return self.memory.get(value)

    def gradient(self, value: Value) -> Buffer | None:
        """Return the memory of the gradient of all rows; None where it exists for one chunk."""
        if value not in self.gradients:
            is_result = value.leaf is not None and self.needs is not None and self.needs[value.leaf]
            if is_result or value in self.crossing or value in self.program.whole_gradients:
                spec = value.gradient or (value.shape, value.dtype)
                self.gradients[value] = self.builder.empty(*spec)
        return self.gradients.get(value)

    def gradient_of(self, value: Value) -> Buffer:
        """Return the gradient of all rows of a value that has one."""
        value = value.in_place_of or value
        if value.base is not None:
            return self.gradient_of(value.base).slice(1, value.first, value.first + value.shape[1])
        found = self.gradient(value)
        assert found is not None
        return found

    def spans(self, nodes: Sequence[Node]) -> Iterator[tuple[int, int]]:
        """Yield the first and the last row of the chunks of a run."""
        loop = nodes[0].loop
        num_rows = nodes[0].out.shape[0]
        is_chunked = loop is not None and loop.is_chunked
        if loop is not None and self.needs is not None:
            is_chunked = loop.is_chunked_backward
        return self.builder.chunks(num_rows) if is_chunked else iter([(0, num_rows)])

    def forward(self) -> None:
        """Add the steps of a forward pass."""
        for nodes in self.program.runs():
            for begin, end in self.spans(nodes):
                run = Run(self, begin, end, is_whole=end - begin == nodes[0].out.shape[0])
                for node in nodes:
                    run.compute(node, run.place(node.out))
            self.computed |= {node.out for node in nodes}

    def prepare(self, node: Node) -> None:
        """Add what comes before the first use of a node."""
        if node not in self._prepared:
            self._prepared.add(node)
            node.prepare(self)

    def is_there(self, value: Value) -> bool:
        """Return whether the memory of a value has been written."""
        node = value.node
        if value.leaf is not None or node is None or value in self.computed:
            return True
        if value.base is not None and value.base.node is node:
            return True  # columns of what its node computes
        return self.needs is not None and not node.is_cheap

    def backward(self) -> None:
        """Add the steps of a backward pass, from the gradient of the output."""
        for nodes in reversed(self.program.runs()):
            differentiated = [node for node in reversed(nodes) if node in self.needed]
            for begin, end in self.spans(nodes) if differentiated else ():
                run = Run(self, begin, end, is_whole=end - begin == nodes[0].out.shape[0])
                for node in differentiated:
                    self.prepare(node)
                    node.backward(run, run.gradient(node.out))
                written = run.written
            if differentiated:
                self.written = written
            for node in differentiated:
                node.finish(self)


class Run:
    """A chunk of rows of a pass: values, and gradients.

    Parameters
    ----------
    call : Pass
    begin, end : int
        The rows.
    is_whole : bool
        Whether these are all.
    """

    def __init__(self, call: Pass, begin: int, end: int, *, is_whole: bool):
        self.call, self.builder = call, call.builder
        self.begin, self.end, self.is_whole = begin, end, is_whole
        self.is_first = begin == 0
        self.values: dict[Value, Buffer] = {}
        self.gradients: dict[Value, Buffer] = {}
        self.written = set(call.written)
        self._deferred: dict[Value, list[Callable[[Buffer], None]]] = {}

    def rows_of(self, whole: Buffer) -> Buffer:
        """Return the rows of this run in a buffer of all rows."""
        return whole if self.is_whole else whole.slice(0, self.begin, self.end)

    def place(self, value: Value) -> Buffer:
        """Return the memory of the rows of a value."""
        if value.base is not None:
            rows = self.value(value.base).slice(1, value.first, value.first + value.shape[1])
        else:
            whole = self.call.whole(value)
            rows = self._scratch(value) if whole is None else self.rows_of(whole)
        self.values[value] = rows
        return rows

    def compute(self, node: Node, out: Buffer) -> None:
        """Compute the output of a node."""
        self.call.prepare(node)
        node.forward(self, out)

    def value(self, value: Value) -> Buffer:
        """Return the rows of a value, computed again in a backward pass unless they are kept."""
        if value not in self.values:
            rows = self.place(value)
            if not self.call.is_there(value) and value.node is not None:
                self.compute(value.node, rows)
                if self.is_whole and self.call.whole(value.base or value) is not None:
                    self.call.computed.add(value)
        return self.values[value]

    def _scratch(self, value: Value) -> Buffer:
        num_rows = value.shape[0] if self.is_whole else self.end - self.begin
        return self.builder.empty((num_rows, *value.shape[1:]), value.dtype)

    def needs(self, value: Value) -> bool:
        """Return whether the gradient of a value is needed."""
        return value in self.call.needed

    def gradient(self, value: Value) -> Buffer:
        """Return the gradient of a value, which later nodes have written."""
        value = value.in_place_of or value
        if value.base is not None:
            return self.write(value)
        if value in self.gradients:
            return self.gradients[value]
        return self.rows_of(self.call.gradients[value])

    def write(self, value: Value) -> Buffer:
        """Return the memory of the gradient of a value, for a node to write or add to."""
        value = value.in_place_of or value
        if value.base is not None:
            return self.write(value.base).slice(1, value.first, value.first + value.shape[1])
        self.written.add(value)
        if value not in self.gradients:
            whole = self.call.gradient(value)
            if whole is None:
                self.gradients[value] = self._scratch(value)
            else:
                self.gradients[value] = self.rows_of(whole)
        return self.gradients[value]

    def when_there(self, value: Value, use: Callable[[Buffer], None]) -> None:
        """Call `use` with the rows of a value, which a node may offer later."""
        node = value.node
        if node is not None and node.offers and node in self.call.needed:
            self._deferred.setdefault(value, []).append(use)
        else:
            use(self.value(value))

    def offer(self, value: Value, rows: Buffer) -> None:
        """Hand rows of a value, computed again, to those that wait for them."""
        for use in self._deferred.pop(value, []):
            use(rows)

    def residual(self, value: Value) -> Buffer | None:
        """Return the gradient that waits for the pass of a norm over this value."""
        whole = self.call.residuals.get(value)
        return None if whole is None else self.rows_of(whole)


class _Gradients(NamedTuple):
    """Where the gradients of a program are."""

    packed: PackedGradients
    where: dict[Key, PackedGradient | int]  # one of them, or the number of a result
    results: dict[int, Value]  # leaves that are rows
    sums: list[dict[Node, dict[Key, int]]]  # columns, of the same number of programs in each

    @classmethod
    def of(cls, program: Program, needs: Sequence[bool]) -> "_Gradients":
        needed = program.needed(needs)
        where: dict[Key, PackedGradient | int] = {}
        groups: dict[str, list[PackedGradient]] = {}
        for node in program.nodes:
            for name, members in node.weights().items():
                keys = [key for shared, _ in members for key in shared if isinstance(key, int)]
                if name in groups or not any(needs[key] for key in keys):
                    continue
                groups[name] = []
                for shared, shape in members:
                    gradient = PackedGradient(tuple(shape))
                    groups[name].append(gradient)
                    where |= dict.fromkeys(shared, gradient)
        sums: dict[str, dict[Node, dict[Key, int]]] = {}
        for node in program.nodes:
            columns = node.sums | {leaf: n for leaf, n in node.bias_sums.items() if needs[leaf]}
            if node in needed and columns:
                sums.setdefault(node.summed_with, {})[node] = columns
        of_sums = []
        for columns_of in sums.values():
            for columns in columns_of.values():
                for key, width in columns.items():
                    gradient = PackedGradient((width,))
                    where[key] = gradient
                    of_sums.append(gradient)
        if of_sums:
            groups["sums"] = of_sums
        results = program.rows()
        where |= {leaf: number for number, leaf in enumerate(results)}
        return cls(PackedGradients.of(groups), where, results, list(sums.values()))


class FormulaOperator(PlannedOperator):
    """An operator that is a formula.

    Parameters
    ----------
    name : str
    formula : callable
        Of a program, the tree of tensors as `Value`s, the constants if there are any, and options;
        returns the output.
    **trees
        As of `Operator`.
    """

    def __init__(self, name: str, formula: Callable[..., Value], **trees: Any):
        self.formula = formula
        super().__init__(name, outputs=("out",), **trees)

    def program(self, tensors: Any, constants: Any, options: Any) -> tuple[Program, Value]:
        """Return the formula for tensors of these shapes, and its output."""
        flat = []
        for number, tensor in enumerate(leaves(tensors)):
            value = None
            if tensor is not None:
                value = Value(tuple(tensor.shape), tensor.dtype, leaf=number)
            flat.append(value)
        program = Program(flat, options.gemm_dtype)
        arguments = [tree_of(self.tensors_form, flat)]
        if self.num_inputs > self.num_tensors:
            arguments.append(constants)
        return program, self.formula(program, *arguments, options)

    def call_sizes(self, tensors: Any, constants: Any, options: Any) -> CallSizes:
        """Return the sizes of a call, for people."""
        program, y = self.program(tensors, constants, options)
        for node in program.nodes:
            found = node.call_sizes()
            if found is not None:
                return found
        x, *_ = program.rows().values()
        sizes = {"rows": x.shape[0], "inputs": x.shape[1], "outputs": y.shape[1]}
        return CallSizes(sizes, program.dtype)

    def forward_specs(self, tensors: Any, constants: Any, options: Any) -> list[Spec]:
        """Return the specs of the output and of the kept bytes."""
        program, out = self.program(tensors, constants, options)
        return [(out.shape, out.dtype), ((program.kept_layout().num_bytes,), torch.uint8)]

    def add_forward(
        self,
        builder: SublayerBuilder,
        tensors: Any,
        constants: Any,
        options: Any,
        *,
        save: bool,
    ) -> list[Buffer]:
        """Add the steps of the forward pass."""
        program, out = self.program(tensors, constants, options)
        layout = program.kept_layout()
        if save:
            kept = builder.empty_tensors(layout, together=True)
        else:
            extras = {value for node in program.nodes for value in node.extras}
            names = [name for name, value in program.kept().items() if value in extras]
            kept = {name: builder.empty(*layout.tensors[name][1:]) for name in ("packed", *names)}
        call = Pass(program, builder, leaves(tensors), constants, kept)
        result = call.memory[out] = builder.empty(out.shape, out.dtype)
        call.forward()
        return [result, builder.whole(kept["packed"])] if save else [result]

    def gradient_layout(
        self, tensors: Any, constants: Any, options: Any, needs: Any
    ) -> GradientLayout:
        """Return the layout of the gradients of rows, and of the packed gradients."""
        flat_needs = leaves(needs)
        program, _ = self.program(tensors, constants, options)
        gradients = _Gradients.of(program, flat_needs)
        whole: list[Spec | None] = []
        for leaf, value in gradients.results.items():
            spec = value.gradient or (value.shape, value.dtype)
            whole.append(spec if flat_needs[leaf] else None)
        whole += [None] * (self.num_results - 1 - len(whole))
        flat = leaves(tensors)
        where = [gradients.where.get(number) for number in range(len(flat))]
        return gradients.packed.layout(whole, where, flat, flat_needs)

    def add_backward(
        self,
        builder: SublayerBuilder,
        tensors: Any,
        constants: Any,
        options: Any,
        kept: Buffer,
        grads: Sequence[Buffer],
        needs: Any,
    ) -> list[Buffer | None]:
        """Add the steps of the backward pass."""
        program, out = self.program(tensors, constants, options)
        flat_needs = leaves(needs)
        buffers = program.kept_layout().buffers(kept)
        call = Pass(program, builder, leaves(tensors), constants, buffers, flat_needs)
        gradients = _Gradients.of(program, flat_needs)
        packed, call.parameters = gradients.packed.allocate(builder)
        groups = []
        for columns_of in gradients.sums:
            widths: dict[Any, int] = {}
            for columns in columns_of.values():
                widths |= columns
            sums = NodeSums(builder, widths, next(iter(columns_of)).programs(builder))
            groups.append(sums)
            for node, columns in columns_of.items():
                call.sums[node] = (sums, sums.columns[next(iter(columns))].start)
        (call.gradients[out],) = grads
        call.backward()
        first = 0
        for sums in groups:
            totals = call.parameters["sums"].slice(0, first, first + sums.width)
            sums.reduce_into(totals)
            for name, span in sums.columns.items():
                call.totals[name] = totals.rows(span)
            first += sums.width
        for node in program.nodes:
            if node in call.needed:
                node.after_sums(call)
        whole = []
        for leaf, value in gradients.results.items():
            whole.append(call.gradient(value) if flat_needs[leaf] else None)
        whole += [None] * (self.num_results - 1 - len(whole))
        return [*whole, packed]
