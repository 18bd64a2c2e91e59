"""Chunks: ranges of consecutive destinations, so that a layer holds the features of one range at a time.

A destination reads its own in-edges only. Chunk c has the destinations dst_c, their in-edges and the sources src_c of
these; a layer computes the chunks one after the other, and the results are concatenated:

    y = cat_c layer((x_src[src_c], x_dst[dst_c]), graph_c, edge_attr[edges_c])

The memory for features and hidden layers decreases with the number of chunks: in inference (`torch.no_grad`), and in
training with activation checkpointing. Fields and node features that a layer concatenates are concatenated by chunks,
too. The structures follow from the graph alone and are made once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.input_validation import check_rows, check_structure
from anemoi_gt.option_checks import check_integer

Rows = Tensor | tuple[Tensor, ...] | None  # several tensors are columns of one, concatenated in each chunk
Pair = tuple[Rows, Rows]  # of sources, of destinations


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive destinations of a graph, their in-edges, and the sources of these.

    Parameters
    ----------
    graph : GraphStructure
        Edges of the chunk, with its sources and destinations numbered from 0.
    src : Tensor [N_src of the chunk], int64, or None
        Its sources in the whole graph; None: all of them, in order.
    dst : slice
        Its destinations in the whole graph.
    edges : slice
        Its edges in the edge order of the whole graph.
    sizes : (int, int, int) or None
        Sources, destinations and edges of the whole graph; None: the chunk is the whole graph.
    """

    graph: GraphStructure
    src: Tensor | None
    dst: slice
    edges: slice
    sizes: tuple[int, int, int] | None

    def sources(self, rows: Tensor) -> Tensor:
        """Return the rows of the chunk's sources from those of all sources [..., N_src, F]."""
        return rows if self.src is None else rows.index_select(-2, self.src)

    def destinations(self, rows: Tensor) -> Tensor:
        """Return the rows of the chunk's destinations from those of all destinations [..., N_dst, F]."""
        return rows if self.sizes is None else rows[..., self.dst, :]

    def attributes(self, edge_attr: Tensor | None) -> Tensor | None:
        """Return the attributes of the chunk's edges from those of all edges [..., E, D]."""
        return edge_attr if self.sizes is None or edge_attr is None else edge_attr[..., self.edges, :]

    def apply(self, layer: Callable[..., Tensor], x: Pair, edge_attr: Tensor | None, cond: Pair) -> Tensor:
        """Return `layer(x, graph, edge_attr, cond)` on the chunk, from what belongs to the whole graph."""
        x = _select(x[0], self.sources), _select(x[1], self.destinations)
        cond = _select_cond(cond[0], self.sources), _select_cond(cond[1], self.destinations)
        return layer(x, self.graph, self.attributes(edge_attr), cond)


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
        With reverse structures, for gradients. Layers take it in place of the graph.

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
        return (Chunk(graph, None, slice(None), slice(None), None),)
    if not 1 <= num_chunks <= graph.num_dst:
        raise ValueError(f"num_chunks must be in 1 .. {graph.num_dst}, the number of destinations, got {num_chunks}")
    if graph.perm is not None:
        raise ValueError("graph must have its edges sorted by destination: build it from a sorted edge_index")
    bounds = [graph.num_dst * i // num_chunks for i in range(num_chunks + 1)]
    return tuple(_make_chunk(graph, slice(*ends)) for ends in pairwise(bounds))


def map_chunks(
    layer: Callable[..., Tensor],
    graph: GraphStructure | Sequence[Chunk],
    x: Pair,
    edge_attr: Tensor | None,
    cond: Pair = (None, None),
    *,
    call: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Apply a layer to a graph, or to its chunks one after the other.

    Parameters
    ----------
    layer : callable
        Takes (x_src, x_dst), graph, edge_attr, (cond_src, cond_dst) to features of the destinations [..., N_dst, F].
    graph : GraphStructure, or its chunks from `split_destinations`
    x, edge_attr, cond
        Of the whole graph; a condition has a row per node, or one for all nodes. A side of x may be a tuple of tensors:
        the layer gets a tuple with the rows of its chunk.
    call : callable, optional
        Called as call(function, *inputs) instead of function(*inputs), for each chunk: activation checkpointing.

    Returns
    -------
    Tensor [..., N_dst, F]

    Raises
    ------
    ValueError
        When chunks are not all those of one graph in order, or rows do not fit the whole graph.
    """
    call = call or (lambda function, *inputs: function(*inputs))
    if not is_chunked(graph):
        return call(layer, x, graph, edge_attr, cond)
    _check_chunks(graph)
    if graph[0].sizes is not None:
        rows = {"x_src": x[0], "x_dst": x[1], "edge_attr": edge_attr, "cond_src": cond[0], "cond_dst": cond[1]}
        check_rows(graph[0].sizes, **rows)
    results = [call(chunk.apply, layer, x, edge_attr, cond) for chunk in graph]
    return torch.cat(results, dim=-2) if len(results) > 1 else results[0]


def is_chunked(graph: object) -> bool:
    """Tell whether chunks were passed in place of a graph."""
    return isinstance(graph, (tuple, list))


def _make_chunk(graph: GraphStructure, dst: slice) -> Chunk:
    colptr = graph.colptr[dst.start : dst.stop + 1]
    edges = slice(int(colptr[0]), int(colptr[-1]))
    src, row = graph.row[edges].unique(return_inverse=True)
    schedule = graph.dst_schedule
    if schedule is not None:
        schedule = schedule[(schedule >= dst.start) & (schedule < dst.stop)] - dst.start
    kept = {name: getattr(graph, name) for name in ("fixed_in_degree", "dst_hubs", "src_hubs")}
    kept["dst_schedule"] = schedule
    sources = torch.empty(src.shape[0], 0, device=graph.device)
    structure = GraphStructure(colptr - colptr[0], row.to(graph.row.dtype), sources, **kept)
    return Chunk(structure.with_reverse(), src.long(), dst, edges, (graph.num_src, graph.num_dst, graph.num_edges))


def _check_chunks(chunks: Sequence[Chunk]) -> None:
    """Raise unless these are all chunks of one graph, in order: their results are concatenated."""
    wrong = [type(chunk).__name__ for chunk in chunks if not isinstance(chunk, Chunk)]
    if wrong or not chunks:
        raise ValueError(
            "graph must be a GraphStructure, or its chunks from split_destinations, "
            f"got a {type(chunks).__name__} of {', '.join(wrong) or 'no chunk'}; join graphs by GraphStructure.disjoint"
        )
    sizes, bounds = chunks[0].sizes, [(chunk.dst.start, chunk.dst.stop) for chunk in chunks]
    if sizes is None:
        are_all = len(chunks) == 1
    else:
        starts, ends = zip(*bounds, strict=True)
        are_all = starts == (0, *ends[:-1]) and ends[-1] == sizes[1] and all(chunk.sizes == sizes for chunk in chunks)
    if not are_all:
        raise ValueError(
            "graph must hold all chunks of one split_destinations, in order, "
            f"got destinations {bounds} of graphs with sources, destinations and edges {[c.sizes for c in chunks]}"
        )


def _select(rows: Rows, select: Callable[[Tensor], Tensor]) -> Rows:
    """Return a chunk's rows of a tensor, or of each of a tuple of tensors."""
    return tuple(map(select, rows)) if isinstance(rows, tuple) else select(rows)


def _select_cond(cond: Tensor | None, select: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the rows of a condition that has one per node; one row is that of every node."""
    return cond if cond is None or cond.shape[-2] == 1 else select(cond)
