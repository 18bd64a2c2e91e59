"""Sharding of any module made of this library's layers: `shard_module`.

    graphs      a `GraphShard` replaces each structure, in calls and in `StaticEdges`
    tables      parameters and buffers with one row per node or edge keep the rows of this rank
    others      unchanged, the same on all ranks

Parameters stay the same objects, so existing optimisers train the remaining rows, and tied
parameters stay tied.

A node set has the same partition in all graphs. It is balanced by the cost of the nodes, summed
over all graphs in which they are destinations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.distributed.consensus import check_same, consensus, fingerprint
from anemoi_gt.distributed.graph_shard import GraphShard, shard_graph
from anemoi_gt.distributed.partition import Partition, destination_cost
from anemoi_gt.distributed.process_group import AXES, check_mesh
from anemoi_gt.distributed.sharded_checkpoint import ShardedTable
from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.ordering import morton_order
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn import (
    GraphTransformerBaseBlock,
    GraphTransformerConv,
    InteractionBlock,
    InteractionConv,
    StaticEdges,
)

EDGE_ROWS = ("edge_attr", "trainable")
# libraries whose layers have no rank-specific attributes
LIBRARIES = ("anemoi_gt", "torch", "torch_geometric")
LAYERS = (GraphTransformerBaseBlock, GraphTransformerConv, InteractionBlock, InteractionConv)
OPTION_TYPES = (bool, int, float, str, tuple, KernelConfig)
Kind = tuple[str, str]  # node sets of sources and destinations
Graphs = Mapping[Kind, GraphStructure | StaticEdges]


@dataclass(frozen=True)
class ModuleShard:
    """Sharding of a module on one rank.

    Attributes
    ----------
    partitions : dict of str to Partition
        Owners of the nodes, by node set.
    rank : int
        This rank in the group that shares the module. It reads rows
        `partitions[name].nodes(rank)` of a sample.
    tables : dict of str to ShardedTable
        Rows of each table that this rank holds, by the name of the parameter or buffer. Tied
        parameters are listed under all their names, buffers only if they are in the state dict. All
        other parameters are shared.
    graphs : dict of (str, str) to GraphShard
        Shards by node sets (sources, destinations); layers accept them instead of structures.
    """

    partitions: dict[str, Partition]
    rank: int
    tables: dict[str, ShardedTable]
    graphs: dict[Kind, GraphShard]

    def parameters(self, module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters shared by the ranks of a module, and those sharded by rows."""
        shared: list[nn.Parameter] = []
        sharded: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():  # tied ones once, by their first name
            if name in self.tables:
                sharded.append(parameter)
            else:
                shared.append(parameter)
        return shared, sharded

    def nodes(self, name: str, rows: Tensor) -> Tensor:
        """Select this rank's rows [.., n, F] from the rows [.., N, F] of a node set."""
        return rows.index_select(-2, self.partitions[name].nodes(self.rank, rows.device))

    def edges(self, kind: Kind, rows: Tensor) -> Tensor:
        """Select this rank's rows [.., E_own, D] from the edge rows [.., E, D] of a graph."""
        return rows.index_select(-2, self.graphs[kind].edges.to(rows.device))


def shard_module(
    module: nn.Module,
    graphs: Graphs,
    mesh: DeviceMesh,
    *,
    tables: Mapping[str, str | Kind] | None = None,
    positions: Mapping[str, Tensor] | None = None,
) -> ModuleShard:
    """Cut a replicated module down to this rank's nodes and edges, in place. Collective.

    Parameters
    ----------
    module : torch.nn.Module
        A module made of this library's convolutions, blocks, mappers and processors, graph networks
        included, and of layers that process each node or edge independently; no other layer may
        combine nodes. It has the same weights on all ranks, and is on the device where it is
        trained.
    graphs : mapping of (str, str) to GraphStructure or StaticEdges
        All graphs, by node sets (sources, destinations). For a `StaticEdges` of the module,
        structure and attributes are replaced.
    mesh : DeviceMesh
        With axes (data, model).
    tables : mapping of str to str or (str, str), optional
        The node set or graph of each parameter or buffer that has one row per node or edge, such as
        the weight of a node embedding, by the name of the tensor. These tensors keep the rows of
        this rank. One name of a tied parameter is enough.
    positions : mapping of str to Tensor [N, 3], optional
        Coordinates of the nodes, by node set. The nodes are ordered along a Morton curve, which
        makes halos small. Other node sets are ordered by index.

    Returns
    -------
    ModuleShard
        Partitions, tables and graph shards of this rank.

    Raises
    ------
    ValueError
        On all ranks, if weights, graphs or options of layers differ between ranks or are
        inconsistent, or a parameter has a gradient, which would still cover all rows.
    """
    check_mesh(mesh)
    with consensus(mesh.get_group("model")):
        module_partition = ModulePartition(
            module, graphs, mesh["model"].size(), tables or {}, positions or {}
        )
    return module_partition.apply(mesh)


class ModulePartition:
    """Partition of a whole module: the owner ranks of all nodes and edges, without communication.

    Parameters are as for `shard_module`; `num_layers` is the number of layers that use each graph,
    by default 1. The module is left unchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        graphs: Graphs,
        num_ranks: int,
        tables: Mapping[str, str | Kind],
        positions: Mapping[str, Tensor],
        num_layers: Mapping[Kind, int] | None = None,
    ):
        self.module = module
        self.graphs = graphs
        self.positions = positions
        self.structures = {kind: _structure(kind, edges) for kind, edges in graphs.items()}
        sizes = _sizes(self.structures)
        rows: dict[Any, int] = dict(sizes)
        for kind, structure in self.structures.items():
            rows[kind] = structure.num_edges
        _check_no_gradients(module)
        self.tables = _tables(module, {**tables, **_rows_of_static_edges(module, graphs)}, rows)
        costs = {}
        for name, size in sizes.items():
            costs[name] = torch.ones(size, dtype=torch.int64, device="cpu")
        num_layers = num_layers or {}
        for kind, structure in self.structures.items():
            cost = destination_cost(structure.colptr.diff().cpu())
            costs[kind[1]] += num_layers.get(kind, 1) * cost
        orders = {name: morton_order(points.cpu()) for name, points in positions.items()}
        self.partitions = {
            name: Partition.balanced(cost, num_ranks, orders.get(name))
            for name, cost in costs.items()
        }

    def apply(self, mesh: DeviceMesh) -> ModuleShard:
        """Cut the replicated module down to this rank's rows, in place. Collective.

        Raise ValueError on all ranks if module or graphs differ between them.
        """
        indices: list[Tensor] = []
        for structure in self.structures.values():
            indices += structure.state_dict().values()
        same = {
            "weights": fingerprint(*self.module.state_dict().values()),
            "graphs": fingerprint(*indices, *self.module.buffers()),
            **_options(self.module),
            "positions": {name: fingerprint(points) for name, points in self.positions.items()},
            "tables": self.tables,
        }
        for axis in AXES:
            check_same(same, mesh.get_group(axis))
        group = mesh.get_group("model")
        shards = {}
        for (src, dst), structure in self.structures.items():
            shards[src, dst] = shard_graph(
                structure, group, sources=self.partitions[src], destinations=self.partitions[dst]
            )
        edges = {kind: shard.edges for kind, shard in shards.items()}
        rows = self.rows(mesh.get_local_rank("model"), edges)
        rows.cut(self.module, self.module)
        return rows.attach(self.module, self.graphs, shards, mesh)

    def rows(self, rank: int, edges: Mapping[Kind, Tensor]) -> "LocalTables":
        """Return the table rows of a rank, given its edges [E_own] of each graph."""
        local_rows: dict[Any, Tensor] = dict(edges)
        for name, partition in self.partitions.items():
            # cloned, because a view would be sent with its whole storage
            local_rows[name] = partition.nodes(rank).clone()
        tables = {name: (local_rows[owner], size) for name, (owner, size) in self.tables.items()}
        return LocalTables(rank, self.partitions, tables)


@dataclass(frozen=True)
class LocalTables:
    """The table rows of one rank, as values that can be sent to it."""

    rank: int
    partitions: dict[str, Partition]  # they stay on the CPU
    tables: dict[str, tuple[Tensor, int]]  # local rows [n], int64, and size of the whole table

    def cut(self, whole: nn.Module, module: nn.Module) -> None:
        """Set a module's tables to these rows of the whole module's tables; both may be the same.

        Parameters stay the same objects, because optimisers hold them and other layers may be tied
        to them. Buffers are replaced, because the caller may still use the original tensors.
        """
        rows_of_tensor = {}  # by the id of the whole tensor, which tied names share
        for name, (index, _) in self.tables.items():
            path, _, attribute = name.rpartition(".")
            tensor = getattr(whole.get_submodule(path), attribute)
            submodule = module.get_submodule(path)
            if id(tensor) not in rows_of_tensor:
                rows = tensor.detach()[index.to(tensor.device)]
                if isinstance(tensor, nn.Parameter):
                    _set_rows(getattr(submodule, attribute), rows)
                rows_of_tensor[id(tensor)] = rows
            if not isinstance(tensor, nn.Parameter):
                setattr(submodule, attribute, rows_of_tensor[id(tensor)])

    def attach(
        self, module: nn.Module, graphs: Graphs, shards: dict[Kind, GraphShard], mesh: DeviceMesh
    ) -> ModuleShard:
        """Replace the structures of a module's `StaticEdges` by graph shards. Collective."""
        for kind, edges in graphs.items():
            if isinstance(edges, StaticEdges):
                num_chunks = max(1, len(edges.chunks))
                edges.structure = FixedGraph(shards[kind].split(num_chunks))
                edges.chunks = nn.ModuleList()
        state = module.state_dict()
        tables = {}
        for name, (index, size) in self.tables.items():
            if name in state:
                tables[name] = ShardedTable(index.to(state[name].device), size, mesh)
        return ModuleShard(self.partitions, self.rank, tables, shards)


class FixedGraph(nn.Module):
    """Module that returns a graph shard; it replaces a `StaticStructure`."""

    def __init__(self, graph: GraphShard):
        super().__init__()
        self.graph = graph

    def forward(self) -> GraphShard:
        return self.graph


def _structure(kind: Kind, edges: GraphStructure | StaticEdges) -> GraphStructure:
    """Return the structure of a graph; raise ValueError for an invalid key."""
    is_pair = isinstance(kind, tuple) and len(kind) == 2
    if not is_pair or not all(isinstance(name, str) for name in kind):
        raise ValueError(
            f"graphs must have keys (sources, destinations), names of sets of nodes, got {kind!r}"
        )
    if isinstance(edges, StaticEdges):
        return edges.structure()
    return edges


def _sizes(structures: Mapping[Kind, GraphStructure]) -> dict[str, int]:
    """Return the number of nodes of each node set."""
    sizes: dict[str, int] = {}
    for kind, structure in structures.items():
        for name, size in zip(kind, (structure.num_src, structure.num_dst), strict=True):
            if sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"all graphs must have the same number of {name}, got {sizes[name]} and {size} "
                    f"in {kind}"
                )
    return sizes


def _rows_of_static_edges(module: nn.Module, graphs: Graphs) -> dict[str, Kind]:
    """Return the graph of each edge table of the module's `StaticEdges`, by tensor name."""
    paths = {id(submodule): path for path, submodule in module.named_modules()}
    kinds: dict[str, Kind] = {}
    for kind, edges in graphs.items():
        if not isinstance(edges, StaticEdges):
            continue
        path = paths.get(id(edges))
        if path is None:
            raise ValueError(f"StaticEdges must be part of the module, got others for {kind}")
        for name in EDGE_ROWS:
            if getattr(edges, name) is not None:
                kinds[f"{path}.{name}" if path else name] = kind
    return kinds


def _tables(
    module: nn.Module, owners: Mapping[str, str | Kind], rows: Mapping[str | Kind, int]
) -> dict[str, tuple[str | Kind, int]]:
    """Return owner and number of rows of tables, under every name of a tied parameter or buffer.

    Raise ValueError if a table does not have the `rows` of its owner, or ties disagree.
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    tables: dict[str, tuple[str | Kind, int]] = {}
    for name, owner in owners.items():
        size = rows[owner]
        shape = tuple(tensors[name].shape)
        if shape[:1] != (size,):
            raise ValueError(
                f"{name} must have one row for each of the {size} of {owner}, got {shape}"
            )
        for tied_name in names[id(tensors[name])]:
            other, _ = tables.setdefault(tied_name, (owner, size))
            if other != owner:
                raise ValueError(
                    f"tied tables must have the same rows, got {other!r} and {owner!r} for "
                    f"{tied_name}"
                )
    return tables


def _set_rows(parameter: nn.Parameter, rows: Tensor) -> None:
    """Replace the data of a parameter, which stays the same object."""
    # While an output of the whole module is alive, the parameter has an autograd node that expects
    # gradients of the old shape. PyTorch (2.13, `VariableHooks::set_data`) drops this node when the
    # dtype changes, but not when the shape does.
    other_dtype = torch.float32 if rows.dtype != torch.float32 else torch.float64
    parameter.data = rows.new_empty(0, dtype=other_dtype)
    parameter.data = rows


def _check_no_gradients(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                "parameters must have no gradient when their module is sharded, got one of "
                f"{name}, of the whole module: call optimizer.zero_grad() before"
            )


def _options(module: nn.Module) -> dict[str, Any]:
    """Return the options (plain public attributes) of a module's layers, by name.

    Only layers of `LIBRARIES` and subclasses of this library's layers count, because a user's layer
    may store its rank in an attribute.
    """
    options = {}
    for path, layer in module.named_modules():
        library = type(layer).__module__.partition(".")[0]
        if library not in LIBRARIES and not isinstance(layer, LAYERS):
            continue
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, OPTION_TYPES):
                options[f"{path}.{name}" if path else name] = value
    return options
