"""Model sharding: `shard_model` where all ranks hold the whole model, `scatter_model` where only rank 0 does.

    nodes       coordinates and trainable features of this rank's nodes
    edges       fixed and trainable attributes of the edges into them; in place of the structure, a `GraphShard`
    the rest    unchanged, the same on all ranks

Every set of nodes is ordered by a Morton curve through its coordinates and split by the cost of its nodes, summed over
all graphs that end in it.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from anemoi_gt.distributed.consensus import check_same, consensus, fingerprint
from anemoi_gt.distributed.grad_sync import AXES, check_mesh
from anemoi_gt.distributed.graph_shard import GraphShard, shard_edges
from anemoi_gt.distributed.partition import Partition, destination_cost
from anemoi_gt.distributed.sharded_checkpoint import ShardedTable
from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.ordering import morton_order
from anemoi_gt.nn import Chunk, EncoderProcessorDecoder, GraphTransformerBaseBlock, StaticEdges
from anemoi_gt.nn.static_graph import HIDDEN

NODE_ROWS, EDGE_ROWS = ("sin_cos_lat_lon", "trainable"), ("edge_attr", "trainable")


@dataclass(frozen=True)
class ModelShard:
    """Sharding of a model, as one rank sees it.

    Attributes
    ----------
    partitions : dict of str to Partition
        Owners of the nodes, by the name of their set.
    rank : int
        This rank among those that share the model: it reads rows `partitions[name].nodes(rank)` of a sample.
    tables : dict of str to ShardedTable
        Rows of the whole table that this rank trains, by the name of the parameter. All other parameters are shared.
    """

    partitions: dict[str, Partition]
    rank: int
    tables: dict[str, ShardedTable]

    def parameters(self, model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that the ranks of a model share, and those of which each rank owns some rows."""
        named = list(model.named_parameters())
        own = [parameter for name, parameter in named if name in self.tables]
        return [parameter for name, parameter in named if name not in self.tables], own


def shard_model(model: EncoderProcessorDecoder, mesh: DeviceMesh) -> ModelShard:
    """Reduce a model that every rank holds to this rank's rows, in place. Collective.

    Parameters
    ----------
    model : EncoderProcessorDecoder
        With the same weights and graphs on all ranks, on the device where it is trained.
    mesh : DeviceMesh
        With axes (data, model).

    Returns
    -------
    ModelShard
        Rows of a sample that the model reads now, and the parameters that are this rank's own.

    Raises
    ------
    ValueError
        On all ranks, when weights, graphs or options are not the same on all of them, or the model cannot be sharded.
    """
    check_mesh(mesh)
    if not isinstance(model, EncoderProcessorDecoder):
        raise ValueError(f"model must be an EncoderProcessorDecoder, got {type(model).__name__}")
    blocks = [module for module in model.modules() if isinstance(module, GraphTransformerBaseBlock)]
    same = {
        "weights": fingerprint(*model.state_dict().values()),
        "graphs": fingerprint(*model.buffers()),
        "heads, dropout and config of the layers": [(block.num_heads, block.dropout, block.config) for block in blocks],
    }
    for axis in AXES:
        check_same(same, mesh.get_group(axis))
    plan = ShardPlan(model, mesh["model"].size())
    return _apply_shard(model, plan.rows(mesh.get_local_rank("model")), mesh)


def scatter_model(
    model: EncoderProcessorDecoder | None, mesh: DeviceMesh, group: dist.ProcessGroup
) -> tuple[EncoderProcessorDecoder, ModelShard]:
    """Give every rank its shard of a model that only the first rank of the mesh holds. Collective.

    Parameters
    ----------
    model : EncoderProcessorDecoder or None
        On the first rank the whole model, on the CPU, which is left unchanged; None on the others.
    mesh : DeviceMesh
        With axes (data, model).
    group : ProcessGroup
        The ranks of the mesh, communicating from the CPU (gloo), with a timeout longer than building the model takes.

    Returns
    -------
    model : EncoderProcessorDecoder
        With this rank's rows, on the device of the mesh.
    shard : ModelShard
        As `shard_model` returns it.

    Raises
    ------
    ValueError
        On all ranks, when the model cannot be sharded, or is not on the first rank only.
    """
    check_mesh(mesh)
    ranks, (data, column) = mesh.mesh.tolist(), mesh.get_coordinate()
    is_first = (data, column) == (0, 0)
    with consensus(group):
        if (model is not None) != is_first:
            raise ValueError("model must be on the first rank of the mesh, and None on the others")
        plan = ShardPlan(model, mesh["model"].size()) if is_first else None
    if is_first:
        bare = strip_sharded_rows(model)
        for other, rank in enumerate(ranks[0][1:], 1):  # one at a time: the first rank holds one shard beside the whole
            dist.send_object_list([bare, plan.rows(other)], dst=rank, group=group)
        received = [bare, plan.rows(0)]
    else:
        received = [None, None]
        dist.recv_object_list(received, src=ranks[0][column] if data else ranks[0][0], group=group)
    if data == 0:
        for row in ranks[1:]:
            dist.send_object_list(received, dst=row[column], group=group)
    own, rows = received
    own = own.to(mesh.device_type)
    return own, _apply_shard(own, rows.to(torch.device(mesh.device_type)), mesh)


class NodeRows(NamedTuple):
    """One rank's nodes of one set."""

    rows: dict[str, Tensor | None]  # [n_own, F], by the names of `NODE_ROWS`
    size: int  # nodes of the whole set


class EdgeRows(NamedTuple):
    """One rank's edges of one graph."""

    global_edge_id: Tensor  # [E_own] int64, sorted ascending
    rows: dict[str, Tensor | None]  # [E_own, D], by the names of `EDGE_ROWS`
    size: int  # edges of the whole graph
    edge_index: Tensor  # [2, E_own] int64, in the node numbers of the whole graph


@dataclass(frozen=True)
class ModelRows:
    """Everything of one rank's model that other ranks do not hold, as values that can be sent."""

    partitions: dict[str, Partition]  # owners of the nodes, by the name of their set; they stay on the CPU
    nodes: dict[str, NodeRows]  # by the name of the set
    edges: dict[str, EdgeRows]  # by the path of their module, as in `edge_modules`

    def to(self, device: torch.device) -> "ModelRows":
        """Return these rows on `device`."""
        move = partial(tree_map, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)
        return ModelRows(self.partitions, move(self.nodes), move(self.edges))


class ShardPlan:
    """Shard plan of a whole model: owners of all nodes and edges, made in one process without communication.

    The model is left unchanged.
    """

    def __init__(self, model: EncoderProcessorDecoder, num_ranks: int):
        self.model, self.edges = model, edge_modules(model)
        layers = {"processor_edges": len(model.processor.proc)}
        graphs = [(module.structure(), dst, layers.get(path, 1)) for path, (module, _, dst) in self.edges.items()]
        positions = {name: _unit_vectors(nodes.sin_cos_lat_lon.cpu()) for name, nodes in model.nodes.items()}
        sizes = {name: len(points) for name, points in positions.items()}
        self.partitions = partition_nodes(sizes, graphs, positions, num_ranks)
        self._edge_ids = {path: self._by_owner(module, dst) for path, (module, _, dst) in self.edges.items()}

    def rows(self, rank: int) -> ModelRows:
        """Return the rows of `rank`."""
        nodes = {}
        for name, module in self.model.nodes.items():
            own = self.partitions[name].nodes(rank, module.sin_cos_lat_lon.device)
            nodes[name] = NodeRows(_select(module, NODE_ROWS, own), len(module))
        return ModelRows(self.partitions, nodes, {path: self._edge_rows(path, rank) for path in self.edges})

    def _by_owner(self, module: nn.Module, destination: str) -> tuple[Tensor, ...]:
        """Return the ids of the edges of each rank, sorted ascending."""
        partition, graph = self.partitions[destination], module.structure()
        owner = partition.ranges.owner(partition.positions(graph.dst))
        ids = graph.global_edge_ids()[torch.argsort(owner, stable=True)]
        return ids.split(torch.bincount(owner, minlength=partition.ranges.num_ranks).tolist())

    def _edge_rows(self, path: str, rank: int) -> EdgeRows:
        module, ids = self.edges[path][0], self._edge_ids[path][rank].clone()  # a view is sent with its whole storage
        graph = module.structure()
        dst = torch.searchsorted(graph.colptr, ids.to(graph.colptr.dtype), right=True) - 1  # ids are CSC positions
        edge_index = torch.stack([graph.row[ids].long(), dst])
        return EdgeRows(ids, _select(module, EDGE_ROWS, ids), graph.num_edges, edge_index)


def edge_modules(model: EncoderProcessorDecoder) -> dict[str, tuple[nn.Module, str, str]]:
    """Return the edges of a model by the path of their module: module, set of sources, set of destinations."""
    found = {f"encoder_edges.{name}": (module, name, HIDDEN) for name, module in model.encoder_edges.items()}
    found["processor_edges"] = (model.processor_edges, HIDDEN, HIDDEN)
    return found | {f"decoder_edges.{name}": (module, HIDDEN, name) for name, module in model.decoder_edges.items()}


def strip_sharded_rows(model: EncoderProcessorDecoder) -> EncoderProcessorDecoder:
    """Return a copy of a model without the rows of its nodes and edges."""
    modules = [*model.nodes.values(), *(module for module, _, _ in edge_modules(model).values())]
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return copy.deepcopy(model, {id(tensor): _emptied(tensor) for tensor in tensors})


def _apply_shard(model: EncoderProcessorDecoder, shard: ModelRows, mesh: DeviceMesh) -> ModelShard:
    """Give a model the rows of a shard, and a `GraphShard` in place of each structure. Collective."""
    rank, tables = mesh.get_local_rank("model"), {}
    for name, module in model.nodes.items():
        nodes = shard.nodes[name]
        if module.trainable is not None:
            own = shard.partitions[name].nodes(rank, module.sin_cos_lat_lon.device)
            tables[f"nodes.{name}.trainable"] = ShardedTable(own, nodes.size, mesh)
        set_rows(module, nodes.rows)
    for path, (module, source, destination) in edge_modules(model).items():
        edges = shard.edges[path]
        owners = {"sources": shard.partitions[source], "destinations": shard.partitions[destination]}
        ids = edges.global_edge_id
        graph = shard_edges(edges.edge_index, mesh.get_group("model"), **owners, global_edge_id=ids)
        if module.trainable is not None:
            tables[f"{path}.trainable"] = ShardedTable(ids[graph.edges], edges.size, mesh)
        set_rows(module, {name: None if rows is None else rows[graph.edges] for name, rows in edges.rows.items()})
        set_graph(module, graph)
    return ModelShard(shard.partitions, rank, tables)


class FixedGraph(nn.Module):
    """Module that returns a graph shard, in place of `StaticStructure`."""

    def __init__(self, graph: GraphShard):
        super().__init__()
        self.graph = graph

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks in which mappers compute; empty if there is one."""
        return self.graph.chunks

    def forward(self) -> GraphShard:
        return self.graph


def set_graph(edges: StaticEdges, graph: GraphShard) -> None:
    """Replace the structure of edges by a shard, in the same number of chunks."""
    edges.structure, edges.chunks = FixedGraph(graph.split(max(1, len(edges.chunks)))), nn.ModuleList()


def set_rows(module: nn.Module, rows: dict[str, Tensor | None]) -> None:
    """Replace buffers and parameters of a module, by name."""
    for name, tensor in rows.items():
        former = getattr(module, name)
        is_parameter = isinstance(former, nn.Parameter)
        setattr(module, name, nn.Parameter(tensor, former.requires_grad) if is_parameter else tensor)


def _select(module: nn.Module, names: tuple[str, ...], rows: Tensor) -> dict[str, Tensor | None]:
    """Return copies of `rows` of the named tensors of a module."""
    tensors = {name: getattr(module, name) for name in names}
    return {name: None if tensor is None else tensor.detach()[rows] for name, tensor in tensors.items()}


def _emptied(tensor: Tensor) -> Tensor:
    empty = tensor.detach().new_empty(0, *tensor.shape[1:])
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def partition_nodes(
    sizes: dict[str, int],
    graphs: Iterable[tuple[GraphStructure, str, int]],
    positions: Mapping[str, Tensor],
    num_ranks: int,
) -> dict[str, Partition]:
    """Split every set of nodes by the cost of its nodes, along a Morton curve through its positions, if it has any.

    `graphs` are structures, the sets that they end in, and how many layers read them.
    """
    costs = {name: torch.ones(size, dtype=torch.int64, device="cpu") for name, size in sizes.items()}
    for structure, destination, times in graphs:
        costs[destination] = costs[destination] + times * destination_cost(structure.colptr.diff().cpu())
    orders = {name: morton_order(points.cpu()) for name, points in positions.items()}
    return {name: Partition.balanced(cost, num_ranks, orders.get(name)) for name, cost in costs.items()}


def _unit_vectors(sin_cos_lat_lon: Tensor) -> Tensor:
    """Return points [N, 3] on the unit sphere from sines and cosines of latitude and longitude."""
    sin_lat, sin_lon, cos_lat, cos_lon = sin_cos_lat_lon.unbind(1)
    return torch.stack([cos_lat * cos_lon, cos_lat * sin_lon, sin_lat], dim=1)
