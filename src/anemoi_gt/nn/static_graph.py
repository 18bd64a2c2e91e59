"""Static graphs as modules: node features, edge structure, fixed and trainable edge attributes.

    node features    [sin lat, sin lon, cos lat, cos lon | trainable]          StaticNodes
    edge attributes  [fixed | trainable], sorted by destination                StaticEdges

`nodes_of` and `edges_of` read them from a `HeteroData` in the layout of anemoi-graphs.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData

from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.checks import check_shape
from anemoi_gt.nn.chunking import Chunk, split_destinations
from anemoi_gt.option_checks import check_integer
from anemoi_gt.torch_compat import num_dispatch_modes

DATA, HIDDEN = "data", "hidden"
EDGE_ATTRIBUTES = ("edge_length", "edge_dirs")


class StaticNodes(nn.Module):
    """Features of static nodes: sine and cosine of latitude and longitude, and trainable features.

    The positions follow from the graph and are not part of the state dict; `trainable` is.

    Parameters
    ----------
    positions : Tensor [N, 2], floating point
        Latitude and longitude in radians.
    trainable : int
        Number of trainable features of each node, initialised to 0.

    Raises
    ------
    ValueError
        When positions are not [N, 2] or not finite, or a latitude is beyond a pole, as in degrees.

    Examples
    --------
    >>> StaticNodes(torch.zeros(5, 2), trainable=8)().shape
    torch.Size([5, 12])
    """

    sin_cos_lat_lon: Tensor  # a buffer

    def __init__(self, positions: Tensor, trainable: int = 0):
        super().__init__()
        wanted = "[N, 2], latitude and longitude in radians"
        check_shape("positions", positions, wanted, lambda x: x.dim() == 2 and x.shape[1] == 2)
        _check_finite("positions", positions)
        # float32 may round a pole to beyond pi / 2
        if not bool((positions[:, 0].abs() <= math.pi / 2 + 1e-4).all()):
            raise ValueError(
                "latitudes must lie within +-pi/2 radians, got up to "
                f"{float(positions[:, 0].abs().max()):g}; convert degrees with torch.deg2rad"
            )
        sin_cos_lat_lon = torch.cat([positions.sin(), positions.cos()], dim=-1).to(
            torch.get_default_dtype()
        )
        self.register_buffer("sin_cos_lat_lon", sin_cos_lat_lon, persistent=False)
        self.trainable = _trainable(positions.shape[0], trainable, "features of a node")

    def __len__(self) -> int:
        return self.num_nodes

    @property
    def num_nodes(self) -> int:
        """Number of nodes, which stays dynamic in an export, unlike `len`."""
        return self.sin_cos_lat_lon.shape[0]

    @property
    def channels(self) -> int:
        """Number of features of each node, fixed and trainable."""
        return self.sin_cos_lat_lon.shape[1] + (
            0 if self.trainable is None else self.trainable.shape[1]
        )

    def forward(self) -> Tensor:
        """Return features [N, channels]: sin lat, sin lon, cos lat, cos lon, trainable features."""
        return torch.cat(self.columns(), dim=-1)

    def columns(self) -> tuple[Tensor, ...]:
        """Return fixed and trainable features, [N, F] each, which `forward` concatenates."""
        if self.trainable is None:
            return (self.sin_cos_lat_lon,)
        return (self.sin_cos_lat_lon, self.trainable)


class IndexBuffers(nn.Module):
    """Indices in buffers, which move with the module but are not part of the state dict.

    An average of a model with its buffers (`AveragedModel(use_buffers=True)`) truncates integers
    and would make another graph of them, so they are compared when they have been written into.
    """

    def __init__(self, indices: Mapping[str, Tensor | None]):
        super().__init__()
        for name, tensor in indices.items():
            self.register_buffer(name, tensor, persistent=False)
        self._checksums = {name: _checksum(tensor) for name, tensor in self._buffers.items()}
        self._versions = self._sum_of_versions()

    def check_unchanged(self) -> None:
        """Raise ValueError if indices have been changed; synchronises if they have been written."""
        # a mode may make tensors without data: the next call outside of it compares
        if torch.compiler.is_compiling() or num_dispatch_modes():
            return
        versions = self._sum_of_versions()
        if versions == self._versions:
            return
        for name, tensor in self._buffers.items():
            checksum = self._checksums[name]
            if checksum is not None and _checksum(tensor) not in (None, checksum):
                raise ValueError(
                    f"the indices of a graph must stay as they are, got another {name}: an "
                    "average of a model must not average its buffers, which has no effect on "
                    "what is trained; use use_buffers=False"
                )
        self._versions = versions

    # A write in place increases the version of a tensor, except through `.data`.
    def _sum_of_versions(self) -> int:
        tensors = [tensor for tensor in self._buffers.values() if tensor is not None]
        return sum(tensor._version for tensor in tensors if not tensor.is_inference())


def _checksum(indices: Tensor | None) -> tuple[int, int] | None:
    """Return two sums of integers that depend on their order; None without integers to read."""
    if indices is None or indices.is_meta or indices.is_floating_point():
        return None
    # two sums: a shift of all indices changes the first, a permutation the second
    values = indices.detach().flatten().long()
    positions = torch.arange(1, values.numel() + 1, device=values.device)
    return int(values.sum()), int((values * positions).sum())


class StaticStructure(IndexBuffers):
    """Graph structure in buffers."""

    def __init__(self, graph: GraphStructure):
        super().__init__(graph.state_dict())
        self._fields = tuple(graph.state_dict())

    def forward(self) -> GraphStructure:
        """Return the structure."""
        self.check_unchanged()
        return GraphStructure(**{name: getattr(self, name) for name in self._fields})

    def keep_for_inference(self) -> None:
        """Drop what inference with other edges must not use: reverse, fixed in-degree, hubs."""
        dropped = ("rowptr", "col", "csr_to_csc", "fixed_in_degree", "dst_hubs", "src_hubs")
        self._fields = tuple(name for name in self._fields if name not in dropped)
        self._buffers = {name: self._buffers[name] for name in self._fields}


class StaticEdges(nn.Module):
    """Structure of one graph, sorted once, and its edge attributes, as buffers of a module.

    Edges are stably sorted by destination, and with them the attributes, fixed and trainable, as in
    Anemoi's models. The structure and the fixed attributes follow from the graph and are not part
    of the state dict; `trainable` is.

    Parameters
    ----------
    edge_index : Tensor [2, E], int32 or int64
        Row 0 holds sources, row 1 destinations.
    edge_attr : Tensor [E, D], floating point
        Fixed attributes; cast to PyTorch's default dtype.
    num_nodes : (int, int)
        Sources and destinations.
    trainable : int
        Number of trainable attributes of each edge, initialised to 0.
    num_chunks : int
        Number of chunks of destinations, for mappers whose features do not fit into memory at once.
        The state dict does not depend on it.

    Raises
    ------
    ValueError
        For indices outside `num_nodes`, attributes that are not finite or not one row per edge, or
        num_chunks not in 1 .. number of destinations.

    Examples
    --------
    >>> edges = StaticEdges(torch.tensor([[2, 0], [1, 0]]), torch.ones(2, 3), (3, 2), trainable=8)
    >>> graph, edge_attr = edges()
    >>> graph.num_src, graph.num_dst, edge_attr.shape
    (3, 2, torch.Size([2, 11]))
    """

    structure: nn.Module  # returns the structure; in a sharded model, this rank's shard of it
    chunks: Any  # ModuleList of _StaticChunk, empty for the whole graph
    edge_attr: Tensor  # a buffer

    def __init__(
        self,
        edge_index: Tensor,
        edge_attr: Tensor,
        num_nodes: tuple[int, int],
        trainable: int = 0,
        *,
        num_chunks: int = 1,
    ):
        super().__init__()
        graph = GraphStructure.from_edge_index(edge_index, num_nodes)
        wanted = f"[{graph.num_edges}, D], one row per edge"
        check_shape(
            "edge_attr", edge_attr, wanted, lambda x: x.dim() == 2 and len(x) == graph.num_edges
        )
        _check_finite("edge_attr", edge_attr)
        edge_attr = edge_attr[graph.edge_order().long()].to(torch.get_default_dtype())
        self.structure = StaticStructure(replace(graph, perm=None))
        self.split(num_chunks)
        self.register_buffer("edge_attr", edge_attr, persistent=False)
        self.trainable = _trainable(graph.num_edges, trainable, "attributes of an edge")

    @property
    def edge_dim(self) -> int:
        """Number of attributes of each edge, fixed and trainable."""
        return self.edge_attr.shape[1] + (0 if self.trainable is None else self.trainable.shape[1])

    def split(self, num_chunks: int) -> None:
        """Split the graph into another number of chunks of destinations; 1 is the whole graph."""
        chunks = split_destinations(self.structure(), num_chunks)
        # one chunk would be the whole graph, which `structure` holds
        self.chunks = nn.ModuleList(_StaticChunk(chunk) for chunk in chunks if num_chunks > 1)

    def attributes(self) -> Tensor:
        """Return the attributes [E, edge_dim], sorted by destination."""
        if self.trainable is None:
            return self.edge_attr
        return torch.cat([self.edge_attr, self.trainable], dim=-1)

    def forward(self) -> tuple[GraphStructure | tuple[Chunk, ...], Tensor]:
        """Return the structure with its reverse, or chunks, and attributes [E, edge_dim]."""
        return tuple(chunk() for chunk in self.chunks) or self.structure(), self.attributes()


class _StaticChunk(IndexBuffers):
    """Chunk in buffers."""

    src: Tensor | None  # a buffer

    def __init__(self, chunk: Chunk):
        super().__init__({"src": chunk.src})
        self.dst, self.edges, self.sizes = chunk.dst, chunk.edges, chunk.sizes
        self.structure = StaticStructure(chunk.graph)

    def forward(self) -> Chunk:
        self.check_unchanged()
        return Chunk(self.structure(), self.src, self.dst, self.edges, self.sizes)


def _trainable(rows: int, number: int, kind: str) -> nn.Parameter | None:
    """Return trainable features [rows, number], initialised to 0; None for a number of 0."""
    check_integer("trainable", number, least=0, note=f", the number of trainable {kind}")
    return nn.Parameter(torch.zeros(rows, number)) if number else None


def _check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity")


def nodes_of(graph: HeteroData, name: str, trainable: int) -> StaticNodes:
    """Return the nodes `name` of a graph with `trainable` trainable features each.

    Raise ValueError when the graph does not have these nodes, or they have no positions.
    """
    if name not in graph.node_types or "x" not in graph[name]:
        raise ValueError(
            f"graph must have nodes {name!r} with positions x [N, 2], got nodes {graph.node_types}"
        )
    return StaticNodes(graph[name].x, trainable)


def edges_of(
    graph: HeteroData, source: str, destination: str, trainable: int, num_chunks: int = 1
) -> StaticEdges:
    """Return the edges between two node sets, with `trainable` trainable attributes, in chunks.

    Raise ValueError if the graph does not have these edges or one of their fields, and as
    `StaticEdges`.
    """
    kind = (source, "to", destination)
    if kind not in graph.edge_types:
        raise ValueError(f"graph must have edges {kind}, got edges {graph.edge_types}")
    edges = graph[kind]
    missing = [name for name in ("edge_index", *EDGE_ATTRIBUTES) if name not in edges]
    if missing:
        names = ", ".join(missing)
        raise ValueError(
            f"edges {kind} must have edge_index, edge_length and edge_dirs, missing {names}"
        )
    edge_attr = torch.cat([edges[name] for name in EDGE_ATTRIBUTES], dim=-1)
    sizes = graph[source].x.shape[0], graph[destination].x.shape[0]
    return StaticEdges(edges.edge_index, edge_attr, sizes, trainable, num_chunks=num_chunks)
