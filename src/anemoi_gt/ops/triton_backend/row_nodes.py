"""Nodes of formulas on rows: norm, linear map, activation, residual connection.

Each states its equation, and its gradients where they are not those of a textbook.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from anemoi_gt.ops.tensors import Linear, Norm, NormOptions
from anemoi_gt.ops.triton_backend import row_launches, tiles
from anemoi_gt.ops.triton_backend.derived_passes import Pass, Run
from anemoi_gt.ops.triton_backend.formula import (
    Key,
    Node,
    Span,
    Value,
    WeightGradients,
    key_of,
    present,
)
from anemoi_gt.ops.triton_backend.packing import Piece, aligned_columns, stacked
from anemoi_gt.ops.triton_backend.plan import Buffer
from anemoi_gt.ops.triton_backend.sublayer_builder import SublayerBuilder, as_row


class Halo(NamedTuple):
    """Rows of other ranks that follow the own rows of each batch entry."""

    rows: Value  # [B * R, F]
    batch: int


class NormNode(Node):
    """n = norm(x), see `Norm`; rows of a halo follow as they are.

    Its backward pass reads x and writes dx, n and the sums for scale and shift. The gradient that
    reaches x past a residual connection is added to dx, and summed if `total` names that sum.
    """

    is_cheap = offers = True

    def __init__(
        self,
        x: Value,
        norm: Norm[Value],
        options: NormOptions,
        dtype: torch.dtype,
        name: str = "norm",
        halo: Halo | None = None,
    ):
        self.norm, self.options, self.name, self.halo = norm, options, name, halo
        self.has_condition = norm.condition is not None
        self.total: Key | None = None
        num_rows, features = x.shape
        if halo is not None:
            num_rows = num_rows + halo.rows.shape[0]
        inputs = [x] if halo is None else [x, halo.rows]
        super().__init__(inputs, Value((num_rows, features), dtype))
        self.reads = [x]
        scale, shift = norm.scale, norm.shift
        if norm.condition is not None:
            norm.condition.gradient = (norm.condition.shape, dtype)
            scale, shift = norm.scale_map.bias, norm.shift_map.bias
            self.parameters += [norm.scale_map.weight, norm.shift_map.weight, norm.condition]
        self.parameters += present(scale, shift)
        for parameter, which in ((scale, "scale"), (shift, "shift")):
            self.sums[key_of(parameter, f"{name}_{which}")] = features

    def sum_total(self, bias: Value | None) -> None:
        """Sum the gradient that waits for this node: that of a bias."""
        self.total = key_of(bias, f"{self.name}_total")
        self.sums[self.total] = self.out.shape[1]
        self.parameters += present(bias)

    def packed(self) -> dict[str, list[Piece[Value]]]:
        """Return the maps of a condition: W [2 F, K] and b [2 F], with 1 in b of the scale."""
        if not self.has_condition:
            return {}
        scale, shift = self.norm.scale_map, self.norm.shift_map
        assert scale.bias is not None
        scale_bias = Piece(scale.bias.shape, scale.bias, has_one=True)
        return {
            f"{self.name}_map": stacked(scale.weight, shift.weight),
            f"{self.name}_map_bias": [scale_bias, *stacked(shift.bias)],
        }

    def weights(self) -> dict[str, WeightGradients]:
        """Return the weights of the maps of a condition."""
        if not self.has_condition:
            return {}
        maps = (self.norm.scale_map, self.norm.shift_map)
        return {f"{self.name}_map": [((key_of(m.weight, ""),), m.weight.shape) for m in maps]}

    def prepare(self, call: Pass) -> None:
        """Cast the condition."""
        condition = call.leaf(self.norm.condition)
        if condition is not None:
            self.condition = call.builder.cast(condition, self.out.dtype)

    def forward(self, run: Run, out: Buffer) -> None:
        """Normalise rows; scale and shift that a condition makes exist for a chunk at a time."""
        x = run.value(self.inputs[0])
        entry_rows = self._entry_rows()
        chunks = [(0, x.shape[0])]
        if self.has_condition and entry_rows is None:
            chunks = list(run.builder.chunks(x.shape[0]))
        for begin, end in chunks:
            launch = row_launches.norm_forward(
                end - begin,
                out.shape[1],
                self.options,
                batch=1 if entry_rows is None or self.halo is None else self.halo.batch,
                out_entry_rows=entry_rows,
            )
            run.builder.launch(
                launch,
                x=x.slice(0, begin, end),
                scale=run.call.leaf(self.norm.scale),
                shift=run.call.leaf(self.norm.shift),
                modulation=self._modulation(run, begin, end),
                out=out if entry_rows is not None else out.slice(0, begin, end),
            )
        self._copy_halo(run, out)

    def backward(self, run: Run, grad: Buffer) -> None:
        """Write dx, and offer n."""
        builder = run.builder
        x_value = self.inputs[0]
        x, dx, total = run.value(x_value), run.write(x_value), run.residual(x_value)
        entry_rows = self._entry_rows()
        normed = builder.empty_like(grad)
        chunks = [(0, x.shape[0])]
        if self.has_condition and entry_rows is None:
            chunks = list(builder.chunks(x.shape[0]))
        for begin, end in chunks:
            grad_rows, normed_rows = grad, normed
            if entry_rows is None:
                grad_rows, normed_rows = grad.slice(0, begin, end), normed.slice(0, begin, end)
            self._differentiate(
                run,
                begin,
                end,
                entry_rows,
                x=x.slice(0, begin, end),
                grad_normed=grad_rows,
                grad_total=None if total is None else total.slice(0, begin, end),
                dx=dx.slice(0, begin, end),
                normed=normed_rows,
            )
        self._copy_halo(run, normed)
        if self.halo is not None and run.needs(self.halo.rows):
            dhalo = run.write(self.halo.rows)
            entries = (self.halo.batch, dhalo.shape[0] // self.halo.batch)
            builder.copy(self._halo_of(grad), dhalo.unflatten(0, entries))
        run.offer(self.out, normed)

    def _differentiate(
        self, run: Run, begin: int, end: int, entry_rows: int | None, **buffers: Buffer | None
    ) -> None:
        builder = run.builder
        sums, first_sum = run.call.sums[self]
        num_rows, features = end - begin, self.out.shape[1]
        is_first = run.begin + begin == 0
        batch = 1 if entry_rows is None or self.halo is None else self.halo.batch
        launch = row_launches.norm_backward(
            num_rows,
            features,
            self.options,
            programs=sums.programs,
            sums=sums.width,
            first_sum=first_sum,
            is_first=is_first,
            total=self.total is not None,
            batch=batch,
            normed_entry_rows=entry_rows,
        )
        grad_scale = None
        if self.has_condition:
            grad_scale = builder.empty((num_rows, features), self.out.dtype)
        builder.launch(
            launch,
            **buffers,
            scale=run.call.leaf(self.norm.scale),
            shift=run.call.leaf(self.norm.shift),
            modulation=self._modulation(run, begin, end),
            grad_scale=grad_scale,
            partial=sums.partial,
        )
        if grad_scale is None:
            return
        grad_shift = buffers["grad_normed"]
        assert grad_shift is not None
        if entry_rows is not None:  # without the halo's rows, which have no condition
            entries = (batch, num_rows // batch)
            own = grad_shift.unflatten(0, (batch, entry_rows)).slice(1, 0, entries[1])
            grad_shift = builder.empty((num_rows, features), self.out.dtype)
            builder.copy(own, grad_shift.unflatten(0, entries))
        condition = self._rows_of_condition(run, begin, end)
        halves = (slice(0, features), slice(features, 2 * features))
        grad_map = run.call.parameters.get(f"{self.name}_map")
        if grad_map is not None:
            for gradient, half in zip((grad_scale, grad_shift), halves, strict=True):
                builder.outer_product(gradient, condition, grad_map.rows(half), is_first=is_first)
        value = self.norm.condition
        if value is not None and run.call.gradient(value) is not None:
            whole = run.call.gradient_of(value)
            grad_condition = whole.slice(0, run.begin + begin, run.begin + end)
            weight = run.call.weights[f"{self.name}_map"]
            builder.multiply(grad_scale, weight.rows(halves[0]), grad_condition)
            builder.multiply(grad_shift, weight.rows(halves[1]), grad_condition, adds=True)

    def _rows_of_condition(self, run: Run, begin: int, end: int) -> Buffer:
        return self.condition.slice(0, run.begin + begin, run.begin + end)

    def _modulation(self, run: Run, begin: int, end: int) -> Buffer | None:
        """Return scale and shift of rows [N, 2 F]; None without a condition."""
        if not self.has_condition:
            return None
        weights = run.call.weights
        weight, bias = weights[f"{self.name}_map"], weights[f"{self.name}_map_bias"]
        condition = self._rows_of_condition(run, begin, end)
        return run.builder.linear(condition, weight, bias)

    def _entry_rows(self) -> int | None:
        """Return the rows of a batch entry where rows of a halo lie between those of entries."""
        if self.halo is None or self.halo.batch == 1:
            return None
        return self.out.shape[0] // self.halo.batch

    def _halo_of(self, rows: Buffer) -> Buffer:
        """Return the rows of the halo [B, R, F] among all rows."""
        assert self.halo is not None
        batch = self.halo.batch
        entries = rows.unflatten(0, (batch, rows.shape[0] // batch))
        return entries.slice(1, self.inputs[0].shape[0] // batch, entries.shape[1])

    def _copy_halo(self, run: Run, out: Buffer) -> None:
        if self.halo is None:
            return
        halo = run.call.leaf(self.halo.rows)
        assert halo is not None
        batch = self.halo.batch
        run.builder.copy(halo.unflatten(0, (batch, halo.shape[0] // batch)), self._halo_of(out))


def joined(own: Value, halo: Value | None, batch: int) -> Value:
    """Return own rows, each batch entry followed by its rows of a halo."""
    if halo is None or not halo.shape[0]:
        return own
    spans = []
    first = 0
    for entry in range(batch):
        for value in (own, halo):
            number = value.shape[0] // batch
            rows = slice(entry * number, (entry + 1) * number)
            spans.append(Span(value, rows, slice(first, first + number)))
            first += number
    return Value((first, *own.shape[1:]), own.dtype, spans=tuple(spans))


def own_rows(rows: Value, number: int, batch: int) -> Value:
    """Return the `number` own rows among rows that a halo follows in each batch entry."""
    own, all_rows = number // batch, rows.shape[0] // batch
    spans = []
    for entry in range(batch):
        first, first_own = entry * all_rows, entry * own
        of_entry, among = slice(first, first + own), slice(first_own, first_own + own)
        spans.append(Span(rows, of_entry, among))
    return Value((number, *rows.shape[1:]), rows.dtype, spans=tuple(spans))


class LinearNode(Node):
    """y = W [x_1, x_2, ..] + b, for the columns of W from `first_column`, and its `weight_rows`.

    The maps of `layers` are stacked. Nodes of one name share W. Equal inputs share one product, by
    the sum of their columns of W. An input may consist of rows of other values.

    The gradient of b is a sum of columns of dy, made by the node that writes dy, or by this one.

    Parameters
    ----------
    has_bias : bool
        Whether this node adds b.
    pads_input, pads_output : bool
        Whether columns are a model's variables, not its channels, and padded (`aligned_columns`).
    is_cheap : bool
        Whether the backward pass computes y again.
    summed : sequence of Linear
        The layers whose bias gradients this node sums.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[Value],
        layers: Sequence[Linear[Value]],
        dtype: torch.dtype,
        *,
        out_dtype: torch.dtype | None = None,
        weight_rows: slice | None = None,
        first_column: int = 0,
        has_bias: bool = True,
        pads_input: bool = False,
        pads_output: bool = False,
        is_cheap: bool = False,
        summed: Sequence[Linear[Value]] = (),
    ):
        self.name, self.layers, self.dtype = name, list(layers), dtype
        self.weight_rows = weight_rows or slice(0, sum(layer.weight.shape[0] for layer in layers))
        self.first_column, self.has_bias = first_column, has_bias
        self.is_cheap = is_cheap
        width = self.weight_rows.stop - self.weight_rows.start
        self.is_folded = len(inputs) == 2 and inputs[0] is inputs[1]
        inputs = inputs[:1] if self.is_folded else inputs
        super().__init__(inputs, Value((inputs[0].shape[0], width), out_dtype or dtype))
        self.reads = list(inputs)
        self.parameters = [layer.weight for layer in layers]
        if has_bias:
            self.parameters += present(*(layer.bias for layer in layers))
        self.width = aligned_columns(width, dtype) if pads_output else width
        columns = inputs[0].shape[1]
        self.columns = aligned_columns(columns, dtype) if pads_input else columns
        self.is_padded = self.width != width or self.columns != columns
        for bias in present(*(layer.bias for layer in summed)):
            if bias.leaf is not None:
                self.bias_sums[bias.leaf] = bias.shape[0]

    def packed(self) -> dict[str, list[Piece[Value]]]:
        """Return the weights, and the biases if there are any."""
        groups = {self.name: stacked(*(layer.weight for layer in self.layers))}
        biases = [layer.bias for layer in self.layers]
        if any(bias is not None for bias in biases):
            widths = [layer.weight.shape[0] for layer in self.layers]
            groups[f"{self.name}_bias"] = [
                Piece((width,), bias) for width, bias in zip(widths, biases, strict=True)
            ]
        return groups

    def weights(self) -> dict[str, WeightGradients]:
        """Return the weights."""
        return {self.name: [((key_of(m.weight, ""),), m.weight.shape) for m in self.layers]}

    def prepare(self, call: Pass) -> None:
        """Take the rows of W and b; pad, or fold, their columns."""
        builder = call.builder
        self.weight = call.weights[self.name].rows(self.weight_rows)
        self.bias = None
        if self.has_bias and f"{self.name}_bias" in call.weights:
            self.bias = call.weights[f"{self.name}_bias"].rows(self.weight_rows)
        if self.is_folded:
            columns = self.inputs[0].shape[1]
            halves = (self.weight.slice(1, 0, columns), self.weight.slice(1, columns, 2 * columns))
            self.weight = builder.empty(halves[0].shape, self.dtype)
            builder.compute_into(self.weight, torch.add, *halves)
        if self.is_padded:
            padded = builder.empty((self.width, self.columns), self.dtype)
            builder.resize(self.weight, padded)
            self.weight = padded
        if self.bias is not None and self.width != self.bias.shape[0]:
            padded = builder.empty((self.width,), self.dtype)
            builder.resize(as_row(self.bias), as_row(padded))
            self.bias = padded
        self.grad_weight = call.parameters.get(self.name)
        if self.grad_weight is not None:
            self.grad_weight = self.grad_weight.rows(self.weight_rows)
            if self.is_padded:
                self.grad_weight = builder.empty(self.weight.shape, torch.float32)

    def forward(self, run: Run, out: Buffer) -> None:
        """Multiply in the dtype of the products; cast and cut the result."""
        builder = run.builder
        y = out
        if self.width != out.shape[1] or out.dtype != self.dtype:
            y = builder.empty((out.shape[0], self.width), self.dtype)
        for number, (value, weight) in enumerate(self._blocks(self.weight)):
            for span in spans_of(value):
                rows, into = self._operand(run, span), rows_at(y, span.among)
                if number == 0:
                    builder.linear(rows, weight, self.bias, into)
                else:
                    builder.multiply(rows, weight.transposed(), into, adds=True)
        if y != out:
            builder.resize(y, out)

    def backward(self, run: Run, grad: Buffer) -> None:
        """Write dx, or add to what other nodes wrote, and the gradient of W."""
        if self in run.call.sums:
            self._sum_biases(run, grad)
        dy = grad
        if grad.shape[1] != self.width or grad.dtype != self.dtype:
            dy = run.builder.empty((grad.shape[0], self.width), self.dtype)
            run.builder.resize(grad, dy)
        for value, weight in reversed(self._blocks(self.weight)):
            written = set(run.written)
            for span in spans_of(value):
                if run.needs(span.value):
                    dx = rows_at(run.write(span.value), span.rows)
                    adds = span.value in written
                    self._differentiate_input(run, rows_at(dy, span.among), weight, dx, adds=adds)
        if self.grad_weight is None:
            return
        for value, total in self._blocks(self.grad_weight):
            is_first = run.is_first
            for span in spans_of(value):
                use = partial(
                    self._differentiate_weight,
                    run,
                    span,
                    rows_at(dy, span.among),
                    total,
                    is_first=is_first,
                )
                run.when_there(span.value, use)
                is_first = False

    def _sum_biases(self, run: Run, grad: Buffer) -> None:
        sums, _ = run.call.sums[self]
        whole = run.call.gradients.get(self.out)
        if whole is not None:  # one launch, not one a chunk
            if not run.is_first:
                return
            grad = whole
        first = -self.weight_rows.start
        for layer in self.layers:
            stop = first + layer.weight.shape[0]
            if layer.bias is not None and layer.bias.leaf in sums.columns.keys() & self.bias_sums:
                columns = grad.slice(1, first, stop)
                sums.sum_rows(layer.bias.leaf, columns, is_first=run.is_first)
            first = stop

    def _differentiate_input(
        self, run: Run, dy: Buffer, weight: Buffer, dx: Buffer, *, adds: bool
    ) -> None:
        if dx.shape[1] == weight.shape[1]:
            run.builder.multiply(dy, weight, dx, adds=adds)
            return
        assert not adds  # nothing else reads an input that is padded
        padded = run.builder.empty((dy.shape[0], weight.shape[1]), self.dtype)
        run.builder.multiply(dy, weight, padded)
        run.builder.resize(padded, dx)

    def _differentiate_weight(
        self, run: Run, span: Span, dy: Buffer, total: Buffer, rows: Buffer, *, is_first: bool
    ) -> None:
        operand = self._operand(run, span, rows)
        run.builder.outer_product(dy, operand, total, is_first=is_first)

    def finish(self, call: Pass) -> None:
        """Cut the padding off the gradient of W, and copy what is folded."""
        gradient = call.parameters.get(self.name)
        if gradient is not None and self.is_padded:
            assert self.grad_weight is not None
            call.builder.resize(self.grad_weight, gradient.rows(self.weight_rows))
        if gradient is not None and self.is_folded:
            columns = self.inputs[0].shape[1]
            halves = (gradient.slice(1, 0, columns), gradient.slice(1, columns, 2 * columns))
            call.builder.copy(*halves)

    def _blocks(self, weight: Buffer) -> list[tuple[Value, Buffer]]:
        """Return each input with its columns of W, or of its gradient."""
        blocks = []
        first = self.first_column
        for value in self.inputs:
            columns = self._columns_of(value)
            blocks.append((value, weight.slice(1, first, first + columns)))
            first += columns
        return blocks

    def _columns_of(self, value: Value) -> int:
        return self.columns if value is self.inputs[0] else value.shape[1]

    def _operand(self, run: Run, span: Span, rows: Buffer | None = None) -> Buffer:
        """Return rows of an input as products read them: in their dtype, padded if W is."""
        if rows is None:
            rows = run.value(span.value)
        columns = rows.shape[1] if span.rows else self._columns_of(span.value)
        if rows.dtype != self.dtype or rows.shape[1] != columns:
            key = (span.value, run.begin, columns)
            if key not in run.call.operands:
                run.call.operands[key] = run.builder.empty((rows.shape[0], columns), self.dtype)
                run.builder.resize(rows, run.call.operands[key])
            rows = run.call.operands[key]
        return rows_at(rows, span.rows)


def spans_of(value: Value) -> Sequence[Span]:
    """Return the spans of a value: its own rows, unless it consists of others'."""
    return value.spans or (Span(value, None, None),)


def rows_at(buffer: Buffer, rows: slice | None) -> Buffer:
    """Return a range of the rows of a buffer, or all with None."""
    return buffer if rows is None else buffer.rows(rows)


class ActivationNode(Node):
    """a = act(h), or for two layers in h the gated act(h_gate) h_value.

    Its backward pass offers a, and sums the columns of dh, the gradients of the biases in h.
    """

    is_cheap = offers = True

    def __init__(self, hidden: Value, activation: str):
        assert isinstance(hidden.node, LinearNode)
        layers = hidden.node.layers
        self.activation, self.is_gated = activation, len(layers) == 2
        features = layers[-1].weight.shape[0]
        super().__init__([hidden], Value((hidden.shape[0], features), hidden.dtype))
        self.reads = [hidden]
        for number, layer in enumerate(layers):
            self.sums[key_of(layer.bias, f"{hidden.node.name}_{number}")] = features

    def forward(self, run: Run, out: Buffer) -> None:
        """Activate rows."""
        launch = row_launches.activation_forward(
            out.shape[0], out.shape[1], self.activation, gated=self.is_gated
        )
        run.builder.launch(launch, hidden=run.value(self.inputs[0]), out=out)

    def backward(self, run: Run, grad: Buffer) -> None:
        """Write dh, and offer a."""
        hidden = self.inputs[0]
        sums, first_sum = run.call.sums[self]
        launch = row_launches.activation_backward(
            grad.shape[0],
            grad.shape[1],
            self.activation,
            gated=self.is_gated,
            programs=sums.programs,
            sums=sums.width,
            first_sum=first_sum,
            is_first=run.is_first,
        )
        activated = run.builder.empty_like(grad)
        run.builder.launch(
            launch,
            hidden=run.value(hidden),
            grad_activated=grad,
            activated=activated,
            grad_hidden=run.write(hidden),
            partial=sums.partial,
        )
        run.offer(self.out, activated)


class AddNode(Node):
    """y = x + d, of a normalised x; dy waits for the pass of its norm, which adds and sums it."""

    def __init__(self, x: Value, delta: Value, norm: NormNode):
        out = Value(x.shape, torch.promote_types(x.dtype, delta.dtype))
        super().__init__([x, delta], out)
        if isinstance(delta.node, LinearNode):
            (layer,) = delta.node.layers
            norm.sum_total(layer.bias)

    def forward(self, run: Run, out: Buffer) -> None:
        """Add rows."""
        x, delta = self.inputs
        run.builder.add(run.value(x), run.value(delta), out)

    def backward(self, run: Run, grad: Buffer) -> None:
        """Cast dy."""
        x, delta = self.inputs
        run.call.residuals[x] = run.call.gradient_of(self.out)
        run.gradients[delta] = run.builder.cast(grad, delta.dtype)


class ResidualNormNode(Node):
    """y = x + norm(r), without x, or without the norm.

    Its backward pass sums the columns of dr, the gradient of the bias in r.
    """

    def __init__(
        self,
        x: Value | None,
        r: Value,
        norm: Norm[Value],
        options: NormOptions,
        out_dtype: torch.dtype,
    ):
        self.norm, self.options, self.has_norm = norm, options, bool(options.eps)
        dtype = out_dtype if x is None else torch.promote_types(x.dtype, out_dtype)
        super().__init__([r, *present(x)], Value(r.shape, dtype))
        self.reads = [r] if self.has_norm else []
        self.parameters = present(norm.scale, norm.shift)
        bias = r.node.layers[0].bias if isinstance(r.node, LinearNode) else None
        keys = [(norm.scale, "out_scale"), (norm.shift, "out_shift"), (bias, "out_bias")]
        for leaf, name in keys:
            self.sums[key_of(leaf, name)] = r.shape[1]
        self.summed_with = f"residual norm of {r.shape[1]}"

    def programs(self, builder: SublayerBuilder) -> int:
        """Return the number of programs that make its sums."""
        return tiles.residual_norm_programs(self.out.shape[1], builder.tuning)

    def forward(self, run: Run, out: Buffer) -> None:
        """Normalise, and add x."""
        r, x = run.value(self.inputs[0]), None
        if len(self.inputs) > 1:
            x = run.value(self.inputs[1])
        if not self.has_norm:
            run.builder.add(r, x, out)
            return
        launch = row_launches.residual_norm_forward(out.shape[0], out.shape[1], self.options)
        run.builder.launch(
            launch,
            r=r,
            x=x,
            scale=run.call.leaf(self.norm.scale),
            shift=run.call.leaf(self.norm.shift),
            y=out,
        )

    def backward(self, run: Run, grad: Buffer) -> None:
        """Write dr, and dx."""
        r, *x = self.inputs
        dr = run.write(r)
        dx = run.write(x[0]) if x and run.needs(x[0]) else None
        sums, first_sum = run.call.sums[self]
        launch = row_launches.residual_norm_backward(
            dr.shape[0],
            dr.shape[1],
            self.options,
            programs=sums.programs,
            sums=sums.width,
            first_sum=first_sum,
            is_first=run.is_first,
        )
        run.builder.launch(
            launch,
            r=run.value(r) if self.has_norm else None,
            grad=grad,
            scale=run.call.leaf(self.norm.scale),
            dr=dr,
            dx=dx,
            partial=sums.partial,
        )
