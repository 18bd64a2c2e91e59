"""Chunks: ranges of consecutive destinations, so that a layer holds one range at a time.

A destination reads its own in-edges only. Chunk c has the destinations dst_c, their in-edges and
the sources src_c of these; a layer computes the chunks one after the other, and the results are
concatenated:

    y = cat_c layer((x_src[src_c], x_dst[dst_c]), graph_c, edge_attr[edges_c])

The memory for features and hidden layers decreases with the number of chunks: in inference
(`torch.no_grad`), and in training with activation checkpointing. Fields and node features that a
layer concatenates are concatenated by chunks, too. The structures follow from the graph only and
are made once.

A shard of a graph in chunks gets its halo before the first chunk, and returns the gradients of it
after all chunks.

Where a tensor is read chunk by chunk, autograd makes a gradient with all rows for each chunk, zeros
but for the chunk's, and adds them. Here the chunks add their rows to one tensor, in the order of
the backward pass, so results are bitwise the same. With the four chunks of Anemoi's mappers, that
saves 4 of the 104 ms of kernels of a step at N320 (H100, torch 2.11).

x = shared(x)           before the chunks
rows_of(x, rows)        in each chunk
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.structure import check_structure
from anemoi_gt.nn.input_validation import check_rows
from anemoi_gt.option_checks import check_integer
from anemoi_gt.torch_compat import backward_pass, forward_mode_is_active, is_transformed


@dataclass(frozen=True, eq=False)
class RowsWithHalo:
    """Rows of local sources [.., N_local, F] and of a halo [.., R, F], not concatenated."""

    own: Tensor
    halo: Tensor


# several tensors are columns of one, concatenated in each chunk
Rows = Tensor | tuple[Tensor, ...] | None
Pair = tuple[Rows, Rows]  # of sources, of destinations
SourceRows = Rows | RowsWithHalo | tuple[RowsWithHalo, ...]
Conditions = tuple[Tensor | None, Tensor | None]  # of sources, of destinations
RowsT = TypeVar("RowsT", bound=Tensor | None)
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive destinations of a graph, their in-edges, and the sources of these.

    Parameters
    ----------
    graph : GraphStructure
        Edges of the chunk, with its sources and destinations numbered from 0.
    src : Tensor [N_src of the chunk], int64, or None
        Its sources in the whole graph, of a shard the local ones; None: all of them, in order.
    dst : slice
        Its destinations in the whole graph.
    edges : slice
        Its edges in the edge order of the whole graph.
    sizes : (int, int, int)
        Sources, destinations and edges of the whole graph. Of a shard they are this rank's, without
        the halo.
    halo : Tensor [R of chunk], int64, or None
        Its sources in the halo of a shard, which follow the local ones.
    """

    graph: GraphStructure
    src: Tensor | None
    dst: slice
    edges: slice
    sizes: tuple[int, int, int]
    halo: Tensor | None = None

    def sources(self, rows: Tensor | RowsWithHalo) -> Tensor:
        """Select the chunk's rows from the rows [..., N_src, F] of all sources."""
        local = rows.own if isinstance(rows, RowsWithHalo) else rows
        if self.src is not None:
            local = rows_of(local, self.src)
        if not isinstance(rows, RowsWithHalo) or self.halo is None:
            return local
        return torch.cat([local, rows_of(rows.halo, self.halo)], dim=-2)

    def destinations(self, rows: Tensor) -> Tensor:
        """Select the chunk's rows from the rows [..., N_dst, F] of all destinations."""
        return rows_of(rows, self.dst)

    def attributes(self, edge_attr: Tensor | None) -> Tensor | None:
        """Select the chunk's attributes from the attributes [..., E, D] of all edges."""
        return None if edge_attr is None else rows_of(edge_attr, self.edges)

    def apply(
        self,
        layer: Callable[..., Tensor],
        x: tuple[SourceRows, Rows],
        edge_attr: Tensor | None,
        cond: tuple[Tensor | RowsWithHalo | None, Tensor | None],
    ) -> Tensor:
        """Return `layer(x, graph, edge_attr, cond)` on the chunk, from whole-graph inputs."""
        rows = _select(x[0], self.sources), _select(x[1], self.destinations)
        conditions = _select_cond(cond[0], self.sources), _select_cond(cond[1], self.destinations)
        return layer(rows, self.graph, self.attributes(edge_attr), conditions)


class ShardInChunks(Protocol):
    """A shard of a graph in chunks: the halo is exchanged before the first."""

    chunks: Sequence[Chunk]

    def exchange(self, rows: Tensor) -> RowsWithHalo:
        """Return the rows of local sources, and of the halo; collective."""


def split_destinations(graph: GraphStructure, num_chunks: int) -> tuple[Chunk, ...]:
    """Split a graph into chunks of consecutive destinations, equal in number to within one.

    Parameters
    ----------
    graph : GraphStructure
        With edges sorted by destination: `perm` is None.
    num_chunks : int
        1 gives one chunk that holds `graph` itself.

    Returns
    -------
    tuple of Chunk
        With reverse structures, for gradients. Layers accept it instead of the graph.

    Raises
    ------
    ValueError
        When num_chunks is not in 1 .. number of destinations, or the edges are not sorted.

    Examples
    --------
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[2, 0, 2], [0, 1, 1]]), (3, 2))
    >>> [(chunk.src.tolist(), chunk.edges) for chunk in split_destinations(graph, 2)]
    [([2], slice(0, 1, None)), ([0, 2], slice(1, 3, None))]
    """
    check_structure(graph)
    check_integer("num_chunks", num_chunks, least=None)
    if num_chunks == 1:
        sizes = (graph.num_src, graph.num_dst, graph.num_edges)
        return (Chunk(graph, None, slice(0, graph.num_dst), slice(0, graph.num_edges), sizes),)
    if not 1 <= num_chunks <= graph.num_dst:
        raise ValueError(
            f"num_chunks must be in 1 .. {graph.num_dst}, the number of destinations, got "
            f"{num_chunks}"
        )
    if graph.perm is not None:
        raise ValueError(
            "graph must have its edges sorted by destination: build it from a sorted edge_index"
        )
    return make_chunks(graph, num_chunks, graph.num_src)


def make_chunks(graph: GraphStructure, num_chunks: int, num_local: int) -> tuple[Chunk, ...]:
    """Return the chunks of a graph or shard; some may be empty.

    The halo of a shard follows `num_local` sources.
    """
    bounds = [graph.num_dst * i // num_chunks for i in range(num_chunks + 1)]
    return tuple(_make_chunk(graph, slice(*ends), num_local) for ends in pairwise(bounds))


def map_chunks(
    layer: Callable[..., Tensor],
    graph: object,
    x: Pair,
    edge_attr: Tensor | None,
    cond: Conditions = (None, None),
    *,
    call: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return `layer((x_src, x_dst), graph, edge_attr, conditions)` chunk by chunk: [..., N_dst, F].

    `graph` is a graph, or its chunks from `split_destinations`, or a ShardedGraph, in chunks or
    not; `x`, `edge_attr` and `cond` belong to the whole graph, or to a rank's shard. A condition
    has a row per node, or one for all nodes. A side of x may be a tuple of tensors: the layer gets
    a tuple with the rows of its chunk. `call(function, *inputs)`, for activation checkpointing,
    replaces `function(*inputs)` for each chunk. Raise ValueError unless chunks are all chunks of
    one graph in order, or rows do not fit the whole graph.
    """
    call = call or (lambda function, *inputs: function(*inputs))
    if not is_chunked(graph):
        return call(layer, x, graph, edge_attr, cond)
    chunks = graph if isinstance(graph, (tuple, list)) else graph.chunks
    _check_chunks(chunks)
    sizes = chunks[0].sizes
    x_src, x_dst = x
    cond_src, cond_dst = cond
    rows = {"x_src": x_src, "x_dst": x_dst, "edge_attr": edge_attr}
    check_rows(sizes, **rows, cond_src=cond_src, cond_dst=cond_dst)
    sources: SourceRows = x_src
    conditions: Tensor | RowsWithHalo | None = cond_src
    if not isinstance(graph, (tuple, list)):
        sources = _select(x_src, graph.exchange)
        # One row for all becomes one per node: a rank with one source could not distinguish them.
        if cond_src is not None:
            condition = cond_src.expand(*cond_src.shape[:-2], sizes[0], cond_src.shape[-1])
            conditions = graph.exchange(condition)
    sources = _select(sources, _shared_rows)
    x_dst = _select(x_dst, _shared_rows)
    edge_attr = shared(edge_attr)
    conditions = _shared_rows(conditions)
    cond_dst = shared(cond_dst)
    results = []
    for chunk in chunks:
        sides = (sources, x_dst), edge_attr, (conditions, cond_dst)
        results.append(call(chunk.apply, layer, *sides))
    # torch.cat of one tensor copies it
    return torch.cat(results, dim=-2) if len(results) > 1 else results[0]


def is_chunked(graph: object) -> TypeGuard[tuple[Chunk, ...] | list[Chunk] | ShardInChunks]:
    """Return whether `graph` is chunked, a shard in chunks included."""
    if isinstance(graph, GraphStructure):
        return False
    return isinstance(graph, (tuple, list)) or bool(getattr(graph, "chunks", ()))


def _make_chunk(graph: GraphStructure, dst: slice, num_local: int) -> Chunk:
    colptr = graph.colptr[dst.start : dst.stop + 1]
    edges = slice(int(colptr[0]), int(colptr[-1]))
    # ascending, so local sources come before the halo
    src, row = graph.row[edges].unique(return_inverse=True)
    global_edge_id = graph.global_edge_id
    if global_edge_id is not None:
        global_edge_id = global_edge_id[edges]
    structure = GraphStructure(
        colptr - colptr[0],
        row.to(graph.row.dtype),
        torch.empty(src.shape[0], 0, device=graph.device),  # the number of sources, as a shape
        global_edge_id=global_edge_id,
        fixed_in_degree=graph.fixed_in_degree,
        dst_hubs=graph.dst_hubs,
        src_hubs=graph.src_hubs,
    )
    sizes = (num_local, graph.num_dst, graph.num_edges)
    local = int((src < num_local).sum())
    halo = src[local:].long() - num_local
    return Chunk(structure.with_reverse(), src[:local].long(), dst, edges, sizes, halo)


def _check_chunks(chunks: Sequence[Chunk]) -> None:
    """Raise ValueError unless these are all chunks of one graph, in order."""
    wrong = [type(chunk).__name__ for chunk in chunks if not isinstance(chunk, Chunk)]
    if wrong or not chunks:
        raise ValueError(
            "graph must be a GraphStructure, or its chunks from split_destinations, got a "
            f"{type(chunks).__name__} of {', '.join(wrong) or 'no chunk'}; join graphs by "
            "GraphStructure.disjoint"
        )
    sizes = chunks[0].sizes
    bounds = [(chunk.dst.start, chunk.dst.stop) for chunk in chunks]
    starts, ends = zip(*bounds, strict=True)
    if (
        starts != (0, *ends[:-1])
        or ends[-1] != sizes[1]
        or any(chunk.sizes != sizes for chunk in chunks)
    ):
        raise ValueError(
            "graph must hold all chunks of one split_destinations, in order, got destinations "
            f"{bounds} of graphs with sources, destinations and edges {[c.sizes for c in chunks]}"
        )


def _select(rows: SourceRows, select: Callable) -> Any:
    """Return a chunk's rows of a tensor, or of each of a tuple of tensors."""
    return tuple(map(select, rows)) if isinstance(rows, tuple) else select(rows)


def _shared_rows(rows: Tensor | RowsWithHalo | None) -> Tensor | RowsWithHalo | None:
    """Return rows whose gradient the chunks sum into one tensor."""
    if isinstance(rows, RowsWithHalo):
        return RowsWithHalo(shared(rows.own), shared(rows.halo))
    return shared(rows)


def _select_cond(
    cond: Tensor | RowsWithHalo | None, select: Callable[[Any], Tensor]
) -> Tensor | None:
    """Select rows of a condition with one per node; a single row applies to every node."""
    if cond is None or (isinstance(cond, Tensor) and cond.shape[-2] == 1):
        return cond
    return select(cond)


def shared(x: RowsT) -> RowsT:
    """Return x [.., N, F] with a gradient that `rows_of` adds to, where autograd runs eagerly.

    Elsewhere x itself: a compiler fuses the sums and cannot trace a backward pass that writes to
    its context, and torch.func has no rule for it.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return x
    if x is None or type(x) not in _PLAIN or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if is_transformed() or forward_mode_is_active():
        return x
    return _Shared.apply(x)


def rows_of(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Return rows of x [.., N, F]: a range, or distinct indices."""
    # the type of the node, not of the tensor: a view or a cast of x is another tensor of its own
    if not torch.compiler.is_compiling() and type(x.grad_fn) is _Shared._backward_cls:
        return _SelectRows.apply(x, rows, x.grad_fn)
    return _rows(x, rows)


def _rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[..., rows, :] if isinstance(rows, slice) else x.index_select(-2, rows)


def _add(total: Tensor, rows: slice | Tensor, grad: Tensor) -> Tensor:
    """Add a gradient to rows of `total` in place."""
    if isinstance(rows, slice):
        total[..., rows, :].add_(grad)
    else:
        total.index_add_(-2, rows, grad)  # rows are distinct: one addition each
    return total


class _Shared(torch.autograd.Function):
    """The identity; its node holds the sum of the gradients of the rows, of each backward pass.

    A pass through a retained graph may run beside another, or raise before it reaches this node.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.totals = {}
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        # The engine calls this after all chunks, although they return None (torch 2.11, 2.13).
        # `grad` is of a chunk that read all rows.
        total = ctx.totals.pop(backward_pass(), None)
        if total is None:
            return grad
        return total if grad is None else total + grad


class _SelectRows(torch.autograd.Function):
    """Rows of a tensor whose node is a `_Shared`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: slice | Tensor, node: Any) -> Tensor:
        ctx.rows = rows
        ctx.node = node
        ctx.shape = x.shape
        return _rows(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        totals, this_pass = ctx.node.totals, backward_pass()
        # create_graph=True, which sums in place would break
        if torch.is_grad_enabled() or this_pass is None:
            return _add(grad.new_zeros(ctx.shape), ctx.rows, grad), None, None
        if this_pass not in totals:
            totals[this_pass] = grad.new_zeros(ctx.shape)
        _add(totals[this_pass], ctx.rows, grad)
        return None, None, None
