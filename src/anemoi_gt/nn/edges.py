"""StaticEdges: the edges of one graph that never changes, as a module, with attributes that are given and trained."""

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure


class StaticEdges(nn.Module):
    """One graph's structure, sorted once for both directions, and its edge attributes: they move with the module.

    The structure and the given attributes follow from the graph and stay out of the state dict; `trainable` is in it.

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
        For indices that are not below `num_nodes`, or attributes that are not one row per edge.

    Examples
    --------
    >>> edges = StaticEdges(torch.tensor([[2, 0], [1, 0]]), torch.ones(2, 3), (3, 2), trainable=8)
    >>> graph, edge_attr = edges()
    >>> graph.num_src, graph.num_dst, edge_attr.shape
    (3, 2, torch.Size([2, 11]))
    """

    def __init__(self, edge_index: Tensor, edge_attr: Tensor, num_nodes: tuple[int, int], trainable: int = 0):
        super().__init__()
        graph = GraphStructure.from_edge_index(edge_index, num_nodes).with_reverse()
        if edge_attr.dim() != 2 or edge_attr.shape[0] != graph.num_edges or not edge_attr.is_floating_point():
            raise ValueError(
                f"edge_attr must be floating point of shape [{graph.num_edges}, D], one row per edge, "
                f"got {edge_attr.dtype} {tuple(edge_attr.shape)}"
            )
        if trainable < 0:
            raise ValueError(f"trainable must be a number of attributes >= 0, got {trainable}")
        self._fields = tuple(graph.state_dict())
        for name, tensor in graph.state_dict().items():
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("edge_attr", edge_attr.to(torch.get_default_dtype()), persistent=False)
        self.trainable = nn.Parameter(torch.zeros(graph.num_edges, trainable)) if trainable else None

    @property
    def edge_dim(self) -> int:
        """Number of attributes of each edge, given and trained."""
        return self.edge_attr.shape[1] + (0 if self.trainable is None else self.trainable.shape[1])

    def forward(self) -> tuple[GraphStructure, Tensor]:
        """Return the structure, source side included, and the attributes [E, edge_dim] in the caller's edge order."""
        graph = GraphStructure(**{name: getattr(self, name) for name in self._fields})
        if self.trainable is None:
            return graph, self.edge_attr
        return graph, torch.cat([self.edge_attr, self.trainable], dim=-1)
