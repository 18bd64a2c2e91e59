"""Reading of a weather graph: the only place of the layers that knows how anemoi-graphs lays out a `HeteroData`."""

import torch
from torch_geometric.data import HeteroData

from anemoi_gt.nn.static_edges import ChunkedEdges, StaticEdges
from anemoi_gt.nn.static_nodes import StaticNodes

DATA, HIDDEN = "data", "hidden"
EDGE_ATTRIBUTES = ("edge_length", "edge_dirs")


def nodes_of(graph: HeteroData, name: str, trainable: int) -> StaticNodes:
    """Return a set of nodes, with so many trained features each.

    Raises
    ------
    ValueError
        When the graph has no such nodes, or they have no positions.
    """
    if not isinstance(graph, HeteroData):
        raise ValueError(f"graph must be a HeteroData, as anemoi_gt.data.graphs makes it, got {type(graph).__name__}")
    if name not in graph.node_types or "x" not in graph[name]:
        raise ValueError(f"graph must have nodes {name!r} with positions x [N, 2], got nodes {graph.node_types}")
    return StaticNodes(graph[name].x, trainable)


def edges_of(graph: HeteroData, source: str, destination: str, trainable: int) -> StaticEdges:
    """Return the edges between two sets of nodes, with so many trained attributes each.

    Raises
    ------
    ValueError
        When the graph has no such edges, or they lack a field or have one of another shape.
    """
    return StaticEdges(*_fields(graph, source, destination), trainable)


def chunked_edges_of(graph: HeteroData, source: str, destination: str, trainable: int, num_chunks: int) -> ChunkedEdges:
    """Return the edges between two sets of nodes as `edges_of` does, in so many pieces of destinations."""
    return ChunkedEdges(*_fields(graph, source, destination), trainable, num_chunks=num_chunks)


def _fields(graph: HeteroData, source: str, destination: str) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """edge_index, given attributes, numbers of nodes."""
    kind = (source, "to", destination)
    if kind not in graph.edge_types:
        raise ValueError(f"graph must have edges {kind}, got edges {graph.edge_types}")
    edges = graph[kind]
    missing = [name for name in ("edge_index", *EDGE_ATTRIBUTES) if name not in edges]
    if missing:
        raise ValueError(f"edges {kind} must have edge_index, edge_length and edge_dirs, missing {', '.join(missing)}")
    for name in ("edge_index", *EDGE_ATTRIBUTES):
        if not isinstance(edges[name], torch.Tensor):
            raise ValueError(f"{name} of edges {kind} must be a tensor, got {type(edges[name]).__name__}")
    if edges.edge_index.dim() != 2 or edges.edge_index.shape[0] != 2:
        raise ValueError(
            f"edge_index of edges {kind} must have shape [2, E], sources and destinations, "
            f"got {tuple(edges.edge_index.shape)}"
        )
    num_edges = edges.edge_index.shape[1]
    for name in EDGE_ATTRIBUTES:
        if edges[name].dim() != 2 or edges[name].shape[0] != num_edges:
            raise ValueError(
                f"{name} of edges {kind} must have shape [{num_edges}, features], one row per edge, "
                f"got {tuple(edges[name].shape)}"
            )
    edge_attr = torch.cat([edges[name] for name in EDGE_ATTRIBUTES], dim=-1)
    return edges.edge_index, edge_attr, (graph[source].x.shape[0], graph[destination].x.shape[0])
