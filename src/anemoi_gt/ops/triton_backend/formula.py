"""Formulas of sub-layers: what they compute, as nodes that know both passes.

A formula is a function of a `Program` and a tree of `Value`s. It runs on shapes, and each call of a
node's class records what to compute:

    normed = p.add(NormNode(t.x, t.norm, o.norm, p.dtype))
    hidden = p.add(LinearNode("hidden", [normed], [t.hidden], p.dtype))

From the nodes follow (`derived_passes`) the outputs, what is kept and what is computed again, the
packed parameters and gradients, sums over rows, chunks, who writes a gradient first, and what is
left out where gradients are not needed.

Consecutive nodes on one set of rows are one loop over chunks (`Loop`); a node that reads whole sets
stands alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar

import torch

from anemoi_gt.ops.operator import Spec
from anemoi_gt.ops.tensors import CallSizes
from anemoi_gt.ops.triton_backend.packing import PackedWeights, Piece
from anemoi_gt.ops.triton_backend.plan import Buffer, MemoryLayout

if TYPE_CHECKING:
    from anemoi_gt.ops.triton_backend.derived_passes import Pass, Run
    from anemoi_gt.ops.triton_backend.sublayer_builder import SublayerBuilder

Key = int | str  # of a gradient: the leaf of its tensor, or a name where that is absent
# of stacked parameters: keys that share a gradient, and its shape
WeightGradients = list[tuple[tuple[Key, ...], tuple[int, ...]]]


@dataclass(eq=False)
class Value:
    """A tensor of a formula, [rows, columns]; of a plan when the formula is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    node: Optional["Node"] = None  # that computes it
    leaf: int | None = None  # its number among the operator's tensors; None if it is computed
    base: Optional["Value"] = None  # a wider value, of which this one is the columns from `first`
    first: int = 0
    spans: tuple["Span", ...] = ()  # the rows of other values that it consists of
    gradient: Spec | None = None  # of a leaf, where its gradient is not like it
    # its gradient takes the place of this value's, which a node then computes in place
    in_place_of: Optional["Value"] = None

    def columns(self, first: int, stop: int) -> "Value":
        """Return a range of columns."""
        return Value((self.shape[0], stop - first), self.dtype, self.node, base=self, first=first)

    def sources(self) -> Iterator["Value"]:
        """Yield the values whose memory this one lies in."""
        if self.spans:
            for span in self.spans:
                yield from span.value.sources()
        elif self.base is not None:
            yield self.base
        else:
            yield self


class Span(NamedTuple):
    """Rows of one value among those of another; None for all."""

    value: Value
    rows: slice | None
    among: slice | None


@dataclass(frozen=True)
class Loop:
    """A set of rows; consecutive nodes on it are computed chunk by chunk, or all rows at once."""

    rows: str
    is_chunked: bool = True
    is_chunked_backward: bool = True


class Node:
    """A step of a formula.

    Parameters
    ----------
    inputs : sequence of Value
    out : Value
        Without a node of its own.
    """

    is_cheap = False  # the backward pass computes `out` again rather than reads it
    offers = False  # the backward pass makes `out` again, for free
    loop: Loop | None = None  # None: it reads whole sets of rows, and stands alone
    summed_with = "rows"  # nodes whose sums have the same number of programs

    def __init__(self, inputs: Sequence[Value], out: Value):
        self.inputs = list(inputs)
        self.out = out
        out.node = self
        self.extras: list[Value] = []  # further results that the backward pass reads
        self.reads: list[Value] = []  # values that the backward pass reads
        self.parameters: list[Value] = []  # leaves besides the inputs
        self.sums: dict[Key, int] = {}  # columns of sums over rows that its backward pass makes
        self.bias_sums: dict[int, int] = {}  # of leaves, by one more pass where needed

    def packed(self) -> Mapping[str, list[Piece[Value]]]:
        """Return the parameters to cast, stacked by group."""
        return {}

    def weights(self) -> Mapping[str, WeightGradients]:
        """Return the gradients of parameters by group."""
        return {}

    def programs(self, builder: "SublayerBuilder") -> int:
        """Return the number of programs that make its sums."""
        return builder.tuning.programs

    def call_sizes(self) -> CallSizes | None:
        """Return the sizes of a formula with this node, for people; None if others say more."""
        return None

    def prepare(self, call: "Pass") -> None:
        """Add what comes before the first use, in either pass."""

    def forward(self, run: "Run", out: Buffer) -> None:
        """Compute `out`."""
        raise NotImplementedError

    def backward(self, run: "Run", grad: Buffer) -> None:
        """Differentiate."""
        raise NotImplementedError

    def finish(self, call: "Pass") -> None:
        """Add what comes after all rows in the backward pass."""

    def after_sums(self, call: "Pass") -> None:
        """Add what reads finished sums."""


NodeT = TypeVar("NodeT", bound=Node)


def key_of(leaf: Value | None, name: str) -> Key:
    """Return the key of the gradient of a leaf, `name` if it is absent."""
    return name if leaf is None or leaf.leaf is None else leaf.leaf


def present(*leaves: Value | None) -> list[Value]:
    """Return the leaves that are there."""
    return [leaf for leaf in leaves if leaf is not None]


class Program:
    """The nodes of a formula in order.

    Parameters
    ----------
    leaves : sequence of Value or None
        Of the operator's tensors.
    dtype : torch.dtype
        Of the operands of matrix products.
    """

    def __init__(self, leaves: Sequence[Value | None], dtype: torch.dtype):
        self.leaves = [leaf for leaf in leaves if leaf is not None]
        self.dtype = dtype
        self.nodes: list[Node] = []
        self.loop = Loop("rows")  # of the nodes to come
        self.whole_gradients: set[Value] = set()  # that a node reads after all rows

    def add(self, node: Node) -> Value:
        """Record a node over the rows of the current loop; return its output."""
        node.loop = self.loop
        self.nodes.append(node)
        return node.out

    def add_alone(self, node: NodeT) -> NodeT:
        """Record a node that reads whole sets of rows; return it."""
        self.nodes.append(node)
        return node

    def runs(self) -> list[list[Node]]:
        """Return consecutive nodes over one set of rows together."""
        runs: list[list[Node]] = []
        for node in self.nodes:
            if runs and node.loop is not None and runs[-1][0].loop == node.loop:
                runs[-1].append(node)
            else:
                runs.append([node])
        return runs

    def crossing(self) -> set[Value]:
        """Return the values that a node of another run reads."""
        numbers: dict[Node, int] = {}
        for number, nodes in enumerate(self.runs()):
            numbers |= dict.fromkeys(nodes, number)
        found = set()
        for node in self.nodes:
            for value in node.inputs:
                for source in value.sources():
                    if source.node is not None and numbers[source.node] != numbers[node]:
                        found.add(source)
        return found

    def rows(self) -> dict[int, Value]:
        """Return the leaves that are rows, not parameters, by their numbers.

        Each of their gradients is a result of its own.
        """
        keys: set[Key] = set()
        for node in self.nodes:
            keys |= node.sums.keys() | node.bias_sums.keys()
            for members in node.weights().values():
                for shared, _ in members:
                    keys |= set(shared)
        rows = {}
        for leaf in self.leaves:
            if leaf.leaf is not None and leaf.leaf not in keys:
                rows[leaf.leaf] = leaf
        return rows

    def packed(self) -> dict[str, list[Piece[Value]]]:
        """Return the parameters to cast, stacked by group; nodes may share one."""
        groups: dict[str, list[Piece[Value]]] = {}
        for node in self.nodes:
            groups |= node.packed()
        return groups

    def kept(self) -> dict[str, Value]:
        """Return the values that the forward pass keeps, named as in `kept_layout`."""
        values: dict[Value, None] = {}
        for node in self.nodes:
            values |= dict.fromkeys(node.extras)
        for node in self.nodes:
            for value in node.reads:
                if value.node is not None and not value.node.is_cheap:
                    values |= dict.fromkeys(value.sources())
        return {f"value{number}": value for number, value in enumerate(values)}

    def kept_layout(self) -> MemoryLayout:
        """Return the layout of what the forward pass keeps: the packed parameters, and values."""
        specs: dict[str, Spec] = {
            "packed": ((PackedWeights.of(self.packed()).num_elements,), self.dtype)
        }
        specs |= {name: (value.shape, value.dtype) for name, value in self.kept().items()}
        return MemoryLayout.of(specs)

    def needed(self, needs: Sequence[bool]) -> set[Any]:
        """Return the nodes and values whose gradients are needed for those of some leaves."""
        found: set[Any] = set()
        for node in self.nodes:
            for value in [*node.parameters, *node.inputs]:
                for source in [span.value for span in value.spans] or [value]:
                    if _is_needed(source, needs, found):
                        found |= {node, source}
        return found


def _is_needed(value: Value, needs: Sequence[bool], nodes: set[Any]) -> bool:
    if value.leaf is not None:
        return bool(needs[value.leaf])
    return value.node in nodes
