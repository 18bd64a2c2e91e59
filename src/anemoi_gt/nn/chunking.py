"""Chunks: the destinations of a graph in pieces, each with a structure of its own. The only place that cuts a graph in one process.

A destination reads its own in-edges alone, so pieces of destinations are computed one after the other, each with the
sources that it reads, and the results laid side by side. Memory for features and hidden layers falls with the number of
pieces. The structures of the pieces follow from the graph alone and are made once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.input_validation import check_rows, check_structure
from anemoi_gt.ops import edge_attention
from anemoi_gt.option_checks import check_integer


@dataclass(frozen=True, eq=False)
class SeededGraph:
    """A part of a graph whose dropout has the seed of the whole: it takes the place of the part's structure in a block.

    Dropout is a function of a seed and of the edge's number in the whole graph. When every part has one seed, their masks
    are those of the whole.

    Parameters
    ----------
    graph : GraphStructure
    seed : Tensor [1], int64
    """

    graph: GraphStructure
    seed: Tensor

    def start(self, src: Tensor) -> Tensor:
        """Return the sources: they are all here."""
        return src

    def attend(
        self,
        query: Tensor,
        src: Tensor,
        key_value: Callable[[Tensor], tuple[Tensor, Tensor]],
        *edges: Tensor,
        **options,
    ) -> Tensor:
        """Attend as a block does on a structure; see `GraphTransformerBaseBlock.attend`."""
        return edge_attention(query, *key_value(src), self.graph, *edges, dropout_seed=self.seed, **options)[0]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A piece of a graph: consecutive destinations, their in-edges, and the sources that these have.

    Parameters
    ----------
    graph : GraphStructure or SeededGraph
        The edges of the piece, its sources and destinations numbered from 0.
    src : Tensor [N_src of the piece], int64, or None
        Which sources of the whole graph it has; None: all, in their order.
    dst : slice
        Its destinations in the whole graph.
    edges : slice
        Its edges in the order of the whole graph's.
    sizes : (int, int, int) or None
        Sources, destinations and edges of the whole graph; None: the piece is all of it.
    """

    graph: GraphStructure | SeededGraph
    src: Tensor | None
    dst: slice
    edges: slice
    sizes: tuple[int, int, int] | None

    @classmethod
    def whole(cls, graph: GraphStructure) -> "Chunk":
        """Return the piece that is all of the graph."""
        return cls(graph, None, slice(None), slice(None), None)

    def check_rows(self, **rows: Tensor | None) -> None:
        """Raise ValueError as `anemoi_gt.nn.input_validation.check_rows` does; not for a piece that is all of its graph, as attention does."""
        if self.sizes is not None:
            check_rows(self.sizes, **rows)

    def seeded(self, seed: Tensor) -> "Chunk":
        """Return this piece with a seed [1] for its dropout; with one for all, pieces drop what the whole would."""
        return replace(self, graph=SeededGraph(self.graph, seed))

    def sources(self, rows: Tensor) -> Tensor:
        """Return those of the whole graph's source rows [..., N_src, F] that the piece has."""
        return rows if self.src is None else rows.index_select(-2, self.src)

    def destinations(self, rows: Tensor) -> Tensor:
        """Return those of the whole graph's destination rows [..., N_dst, F] that the piece has."""
        return rows if self.sizes is None else rows[..., self.dst, :]

    def attributes(self, edge_attr: Tensor) -> Tensor:
        """Return those of the whole graph's attributes [..., E, D] that the piece has."""
        return edge_attr if self.sizes is None else edge_attr[..., self.edges, :]


def split_destinations(graph: GraphStructure, num_chunks: int) -> tuple[Chunk, ...]:
    """Cut a graph into pieces of equally many consecutive destinations, to within one.

    Parameters
    ----------
    graph : GraphStructure
        Its edges come sorted by destination: `perm` is None.
    num_chunks : int
        1 gives one piece that is `graph` itself.

    Returns
    -------
    tuple of Chunk
        Their structures have their source sides. Edges keep their numbers, which key dropout.

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
        return (Chunk.whole(graph),)
    if not 1 <= num_chunks <= graph.num_dst:
        raise ValueError(f"num_chunks must be in 1 .. {graph.num_dst}, the number of destinations, got {num_chunks}")
    if graph.perm is not None:
        raise ValueError("graph must hold its edges sorted by destination: build it from a sorted edge_index")
    bounds = [graph.num_dst * i // num_chunks for i in range(num_chunks + 1)]
    return tuple(_piece(graph, slice(*ends)) for ends in pairwise(bounds))


def _piece(graph: GraphStructure, dst: slice) -> Chunk:
    colptr = graph.colptr[dst.start : dst.stop + 1]
    edges = slice(int(colptr[0]), int(colptr[-1]))
    src, row = graph.row[edges].unique(return_inverse=True)
    structure = GraphStructure(
        colptr - colptr[0],
        row.to(graph.row.dtype),
        torch.empty(src.shape[0], 0, device=graph.device),
        global_edge_id=graph.global_edge_ids()[edges],
        fixed_in_degree=graph.fixed_in_degree,
    )
    return Chunk(structure.with_reverse(), src.long(), dst, edges, (graph.num_src, graph.num_dst, graph.num_edges))
