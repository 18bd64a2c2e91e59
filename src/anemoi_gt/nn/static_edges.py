"""StaticEdges: the edges of one graph that never changes, as a module, with attributes that are given and trained."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.chunking import Chunk, split_destinations
from anemoi_gt.option_checks import check_integer


class StaticStructure(nn.Module):
    """A graph structure that moves with the module it is a part of, outside the state dict.

    Parameters
    ----------
    graph : GraphStructure
    """

    def __init__(self, graph: GraphStructure):
        super().__init__()
        self._fields = tuple(graph.state_dict())
        for name, tensor in graph.state_dict().items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self) -> GraphStructure:
        """Return the structure."""
        return GraphStructure(**{name: getattr(self, name) for name in self._fields})

    def keep_for_inference(self) -> None:
        """Forget the source side, which gradients alone need, and what holds for this graph but not for one of other edges."""
        forgotten = ("rowptr", "col", "csr_to_csc", "fixed_in_degree")
        self._fields = tuple(name for name in self._fields if name not in forgotten)
        self._buffers = {name: self._buffers[name] for name in self._fields}


class StaticEdges(nn.Module):
    """One graph's structure, sorted once for both directions, and its edge attributes: they move with the module.

    The edges are kept sorted by destination, those of a destination in the order in which they came; so are the
    attributes, given and trained, as in Anemoi's models. The structure and the given attributes follow from the graph and
    stay out of the state dict; `trainable` is in it.

    Parameters
    ----------
    edge_index : Tensor [2, E], int32 or int64
        Row 0 holds sources, row 1 destinations.
    edge_attr : Tensor [E, D], floating point
        Given attributes; kept in PyTorch's default dtype.
    num_nodes : (int, int)
        Sources and destinations.
    trainable : int
        Number of trained attributes of each edge; they begin at 0.

    Raises
    ------
    ValueError
        For indices that are not below `num_nodes`, or attributes that are not finite or not one row per edge.

    Examples
    --------
    >>> edges = StaticEdges(torch.tensor([[2, 0], [1, 0]]), torch.ones(2, 3), (3, 2), trainable=8)
    >>> graph, edge_attr = edges()
    >>> graph.num_src, graph.num_dst, edge_attr.shape
    (3, 2, torch.Size([2, 11]))
    """

    def __init__(self, edge_index: Tensor, edge_attr: Tensor, num_nodes: tuple[int, int], trainable: int = 0):
        super().__init__()
        graph = GraphStructure.from_edge_index(edge_index, num_nodes)
        if not isinstance(edge_attr, Tensor):
            raise ValueError(f"edge_attr must be a tensor [{graph.num_edges}, D], got {type(edge_attr).__name__}")
        if edge_attr.dim() != 2 or edge_attr.shape[0] != graph.num_edges or not edge_attr.is_floating_point():
            raise ValueError(
                f"edge_attr must be floating point of shape [{graph.num_edges}, D], one row per edge, "
                f"got {edge_attr.dtype} {tuple(edge_attr.shape)}"
            )
        if not bool(edge_attr.isfinite().all()):
            raise ValueError("edge_attr must be finite, got NaN or infinity")
        check_integer("trainable", trainable, least=0, note=", the number of trained attributes of an edge")
        edge_attr = edge_attr[graph.edge_order().long()].to(torch.get_default_dtype())
        self.structure = StaticStructure(replace(graph, perm=None).with_reverse())
        self.register_buffer("edge_attr", edge_attr, persistent=False)
        self.trainable = nn.Parameter(torch.zeros(graph.num_edges, trainable)) if trainable else None

    @property
    def edge_dim(self) -> int:
        """Number of attributes of each edge, given and trained."""
        return self.edge_attr.shape[1] + (0 if self.trainable is None else self.trainable.shape[1])

    def attributes(self) -> Tensor:
        """Return the attributes [E, edge_dim], by destination."""
        return self.edge_attr if self.trainable is None else torch.cat([self.edge_attr, self.trainable], dim=-1)

    def forward(self) -> tuple[GraphStructure, Tensor]:
        """Return the structure, source side included, and the attributes [E, edge_dim], by destination."""
        return self.structure(), self.attributes()


class ChunkedEdges(StaticEdges):
    """Static edges in pieces of destinations, for mappers whose features would not fit into memory at once.

    The state dict does not depend on the number of pieces.

    Parameters
    ----------
    edge_index, edge_attr, num_nodes, trainable
        As for `StaticEdges`.
    num_chunks : int
        Number of pieces.

    Raises
    ------
    ValueError
        As `StaticEdges`, and when num_chunks is not in 1 .. number of destinations.
    """

    def __init__(
        self,
        edge_index: Tensor,
        edge_attr: Tensor,
        num_nodes: tuple[int, int],
        trainable: int = 0,
        *,
        num_chunks: int = 1,
    ):
        super().__init__(edge_index, edge_attr, num_nodes, trainable)
        self.pieces = nn.ModuleList(_StaticChunk(chunk) for chunk in split_destinations(self.structure(), num_chunks))

    def forward(self) -> tuple[tuple[Chunk, ...], Tensor]:
        """Return the pieces, and the attributes [E, edge_dim] of the whole graph, by destination."""
        return tuple(piece() for piece in self.pieces), self.attributes()


class _StaticChunk(nn.Module):
    """A chunk that moves with the module it is a part of."""

    def __init__(self, chunk: Chunk):
        super().__init__()
        self.dst, self.edges, self.sizes = chunk.dst, chunk.edges, chunk.sizes
        self.structure = StaticStructure(chunk.graph)
        self.register_buffer("src", chunk.src, persistent=False)

    def forward(self) -> Chunk:
        return Chunk(self.structure(), self.src, self.dst, self.edges, self.sizes)
