"""Sharding of any module made of this library's layers: `shard_module`.

    graphs      a `GraphShard` takes the place of each structure, in calls and in `StaticEdges`
    tables      parameters and buffers with a row for each node or edge keep the rows of this rank
    the rest    unchanged, the same on all ranks

Parameters stay the same objects, so an optimiser made before trains the rows that they hold now,
and ties stay ties.

A set of nodes has one partition in all graphs, balanced by the cost of its nodes over all graphs
that end in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.distributed.consensus import check_same, consensus, fingerprint
from anemoi_gt.distributed.graph_shard import GraphShard, shard_graph
from anemoi_gt.distributed.partition import Partition, destination_cost
from anemoi_gt.distributed.process_group import AXES, check_mesh
from anemoi_gt.distributed.sharded_checkpoint import ShardedTable
from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.ordering import morton_order
from anemoi_gt.nn import GraphTransformerBaseBlock, GraphTransformerConv, StaticEdges

EDGE_ROWS = ("edge_attr", "trainable")
# their layers have no rank-specific attributes
LIBRARIES = (
    "anemoi_gt",
    "torch",
    "torch_geometric",
)
Kind = tuple[str, str]  # sets of sources and of destinations
Graphs = Mapping[Kind, GraphStructure | StaticEdges]


@dataclass(frozen=True)
class ModuleShard:
    """Sharding of a module on one rank; its `repr` lists what this rank holds.

    Attributes
    ----------
    partitions : dict of str to Partition
        Owners of the nodes, by the name of their set.
    rank : int
        This rank among those that share the module: it reads rows `partitions[name].nodes(rank)` of
        a sample.
    tables : dict of str to ShardedTable
        Rows of the whole table that this rank holds, by the name of the parameter or buffer, under
        each name of a tied one; of buffers only those in the state dict. All other parameters are
        shared.
    graphs : dict of (str, str) to GraphShard
        By the names of the sets of sources and destinations; layers accept them instead of
        structures.
    """

    partitions: dict[str, Partition]
    rank: int
    tables: dict[str, ShardedTable]
    graphs: dict[Kind, GraphShard]

    def parameters(self, module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters shared by the ranks of a module, and those sharded by rows."""
        shared: list[nn.Parameter] = []
        sharded: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():  # a tied one once, by its first name
            (sharded if name in self.tables else shared).append(parameter)
        return shared, sharded

    def nodes(self, name: str, rows: Tensor) -> Tensor:
        """Return this rank's nodes [.., n, F] of rows [.., N, F] of a set of nodes."""
        return rows.index_select(-2, self.partitions[name].nodes(self.rank, rows.device))

    def edges(self, kind: Kind, rows: Tensor) -> Tensor:
        """Select this rank's edge rows [.., E_own, D] from the edge rows [.., E, D] of a graph."""
        return rows.index_select(-2, self.graphs[kind].edges.to(rows.device))

    def __str__(self) -> str:
        ranks = next(iter(self.partitions.values())).ranges.num_ranks
        lines = [f"rank {self.rank} of {ranks}"]
        for name, partition in self.partitions.items():
            lines.append(f"{partition.ranges.counts[self.rank]} of {partition.size} nodes {name}")
        for (source, destination), graph in self.graphs.items():
            halo = f"halo of {graph.halo.num_received} rows, {graph.halo.num_sent} rows sent"
            lines.append(f"{len(graph.edges)} edges {source} to {destination}, {halo}")
        lines += [
            f"{len(table.index)} of {table.size} rows of {name}"
            for name, table in self.tables.items()
        ]
        return "\n".join(lines)


def shard_module(
    module: nn.Module,
    graphs: Graphs,
    mesh: DeviceMesh,
    *,
    tables: Mapping[str, str | Kind] | None = None,
    positions: Mapping[str, Tensor] | None = None,
) -> ModuleShard:
    """Reduce a module that every rank holds to this rank's nodes and edges, in place. Collective.

    Parameters
    ----------
    module : torch.nn.Module
        Of convolutions, blocks, mappers and processors of this library, and of layers that compute
        every node for itself; with the same weights on all ranks, on the device where it is
        trained. No other layer may read nodes of other ranks.
    graphs : mapping of (str, str) to GraphStructure or StaticEdges
        All graphs, by the names of the sets of sources and destinations. Of a `StaticEdges` of the
        module structure and attributes are replaced.
    mesh : DeviceMesh
        With axes (data, model).
    tables : mapping of str to str or (str, str), optional
        Parameters and buffers with one row for each node of a set or edge of a graph, such as the
        weight of an embedding of nodes, by their name: the set or the graph. They keep the rows of
        this rank. One name of a tied parameter is enough.
    positions : mapping of str to Tensor [N, 3], optional
        Points of a set of nodes. They are ordered along a Morton curve, which makes halos small;
        others by number.

    Returns
    -------
    ModuleShard
        Shards that replace structures, features and attributes, and the names of the shared
        parameters.

    Raises
    ------
    ValueError
        On all ranks, when weights, graphs or options of layers are not the same on all of them, or
        do not fit together, or a parameter has a gradient, which would be of the whole module.
    """
    check_mesh(mesh)
    with consensus(mesh.get_group("model")):
        plan = ShardPlan(module, graphs, mesh["model"].size(), tables or {}, positions or {})
    return plan.apply(mesh)


class ShardPlan:
    """Shard plan of a whole module: owners of all nodes and edges, made without communication.

    Parameters as for `shard_module`, plus the number of layers that read a graph where it is not 1.
    The module is left unchanged.
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
        self.module, self.graphs, self.positions = module, graphs, positions
        self.structures = {kind: _structure(kind, edges) for kind, edges in graphs.items()}
        sizes = _sizes(self.structures)
        _check_no_gradients(module)
        tables = _with_tied_names(module, {**tables, **_rows_of_static_edges(module, graphs)})
        rows: dict[Any, int] = dict(sizes)
        for kind, structure in self.structures.items():
            rows[kind] = structure.num_edges
        self.tables = {
            name: (of, _table_size(module, name, of, rows)) for name, of in tables.items()
        }
        costs = {
            name: torch.ones(size, dtype=torch.int64, device="cpu") for name, size in sizes.items()
        }
        for kind, structure in self.structures.items():
            costs[kind[1]] += (num_layers or {}).get(kind, 1) * destination_cost(
                structure.colptr.diff().cpu()
            )
        orders = {name: morton_order(points.cpu()) for name, points in positions.items()}
        self.partitions = {
            name: Partition.balanced(cost, num_ranks, orders.get(name))
            for name, cost in costs.items()
        }

    def apply(self, mesh: DeviceMesh) -> ModuleShard:
        """Reduce the module, which all ranks hold, to this rank's rows, in place. Collective.

        Raise ValueError on all ranks when they do not hold the same.
        """
        structures = (
            tensor
            for structure in self.structures.values()
            for tensor in structure.state_dict().values()
        )
        same = {
            "weights": fingerprint(*self.module.state_dict().values()),
            "graphs": fingerprint(*structures, *self.module.buffers()),
            **_options(self.module),
            "positions": {name: fingerprint(points) for name, points in self.positions.items()},
            "tables": self.tables,
        }
        for axis in AXES:
            check_same(same, mesh.get_group(axis))
        group, shards = mesh.get_group("model"), {}
        for (src, dst), structure in self.structures.items():
            owners = {"sources": self.partitions[src], "destinations": self.partitions[dst]}
            shards[src, dst] = shard_graph(structure, group, **owners)
        rows = self.rows(
            mesh.get_local_rank("model"), {kind: graph.edges for kind, graph in shards.items()}
        )
        rows.cut(self.module, self.module)
        return rows.attach(self.module, self.graphs, shards, mesh)

    def rows(self, rank: int, edges: Mapping[Kind, Tensor]) -> "OwnRows":
        """Return the rows of a rank, from the edges [E_own] that it reads of each graph."""
        nodes = {name: partition.nodes(rank).clone() for name, partition in self.partitions.items()}
        local_rows: dict[Any, Tensor] = dict(nodes)  # clones: a view is sent with its whole storage
        local_rows.update(edges)
        return OwnRows(
            rank,
            self.partitions,
            {name: (local_rows[of], size) for name, (of, size) in self.tables.items()},
        )


@dataclass(frozen=True)
class OwnRows:
    """Rows that one rank keeps, as values that can be sent."""

    rank: int
    partitions: dict[str, Partition]  # they stay on the CPU
    # rows of each table [n], int64, and how many the whole has
    tables: dict[str, tuple[Tensor, int]]

    def cut(self, whole: nn.Module, module: nn.Module) -> None:
        """Set a module's tables to these rows of the whole module's tables; both may be one module.

        Parameters stay the objects that they are: optimisers hold them, and other layers are tied
        to them. Buffers are replaced: a caller may go on to use the tensor that became one.
        """
        cut = {}  # rows by the id of the whole tensor, which tied names share
        for name, (index, _) in self.tables.items():
            path, _, attribute = name.rpartition(".")
            tensor = getattr(whole.get_submodule(path), attribute)
            part = module.get_submodule(path)
            if id(tensor) not in cut:
                rows = tensor.detach()[index.to(tensor.device)]
                if isinstance(tensor, nn.Parameter):
                    _set_rows(getattr(part, attribute), rows)
                cut[id(tensor)] = rows
            if not isinstance(tensor, nn.Parameter):
                setattr(part, attribute, cut[id(tensor)])

    def attach(
        self, module: nn.Module, graphs: Graphs, shards: dict[Kind, GraphShard], mesh: DeviceMesh
    ) -> ModuleShard:
        """Replace the `StaticEdges` of a module with these rows by their shards. Collective."""
        for kind, edges in graphs.items():
            if isinstance(edges, StaticEdges):  # in the same number of chunks
                edges.structure = FixedGraph(shards[kind].split(max(1, len(edges.chunks))))
                edges.chunks = nn.ModuleList()
        saved, tables = module.state_dict(), {}
        for name, (index, size) in self.tables.items():
            if name in saved:
                tables[name] = ShardedTable(index.to(saved[name].device), size, mesh)
        return ModuleShard(self.partitions, self.rank, tables, shards)


class FixedGraph(nn.Module):
    """Module that returns a graph shard, replacing `StaticStructure`."""

    def __init__(self, graph: GraphShard):
        super().__init__()
        self.graph = graph

    def forward(self) -> GraphShard:
        return self.graph


def _structure(kind: Kind, edges: GraphStructure | StaticEdges) -> GraphStructure:
    """Return the structure of the edges of a graph, checked."""
    if (
        not isinstance(kind, tuple)
        or len(kind) != 2
        or not all(isinstance(name, str) for name in kind)
    ):
        raise ValueError(
            f"graphs must have keys (sources, destinations), names of sets of nodes, got {kind!r}"
        )
    if isinstance(edges, StaticEdges):
        edges = edges.structure()
    if not isinstance(edges, GraphStructure):
        raise ValueError(
            f"graphs must be GraphStructures or StaticEdges, got {type(edges).__name__} for {kind}"
        )
    return edges


def _sizes(structures: Mapping[Kind, GraphStructure]) -> dict[str, int]:
    """Return the number of nodes of each set."""
    if not structures:
        raise ValueError("graphs must have at least one graph, got none")
    sizes: dict[str, int] = {}
    for kind, structure in structures.items():
        for name, size in zip(kind, (structure.num_src, structure.num_dst), strict=True):
            if sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"all graphs must have the same number of {name}, got {sizes[name]} and "
                    f"{size} in {kind}"
                )
    return sizes


def _rows_of_static_edges(module: nn.Module, graphs: Graphs) -> dict[str, Kind]:
    """Return the tensors of the `StaticEdges` of a module, by name, with their graph."""
    paths = {id(part): path for path, part in module.named_modules()}
    kinds: dict[str, Kind] = {}
    for kind, edges in graphs.items():
        if isinstance(edges, StaticEdges):
            if id(edges) not in paths:
                raise ValueError(f"StaticEdges must be part of the module, got others for {kind}")
            prefix = f"{paths[id(edges)]}." if paths[id(edges)] else ""
            kinds |= {
                f"{prefix}{name}": kind for name in EDGE_ROWS if getattr(edges, name) is not None
            }
    return kinds


def _with_tied_names(module: nn.Module, tables: Mapping[str, str | Kind]) -> dict[str, str | Kind]:
    """Return tables under every name that a module has for the same parameter or buffer."""
    names: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    tied: dict[str, str | Kind] = {}
    for name, of in tables.items():
        for other in names[id(tensors[name])] if name in tensors else [name]:
            if tied.setdefault(other, of) != of:
                raise ValueError(
                    f"tied tables must have the same rows, got {tied[other]!r} and {of!r} for "
                    f"{other}"
                )
    return tied


def _set_rows(parameter: nn.Parameter, rows: Tensor) -> None:
    """Set a parameter to other rows, in place: it stays the same object."""
    # While a result of the whole module is alive, the parameter has a node that expects gradients
    # of its former shape. PyTorch (2.13, `VariableHooks::set_data`) forgets it when the dtype
    # changes, but not when the shape does.
    other = torch.float32 if rows.dtype != torch.float32 else torch.float64
    parameter.data = rows.new_empty(0, dtype=other)
    parameter.data = rows


def _check_no_gradients(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                "parameters must have no gradient when their module is sharded, got one of "
                f"{name}, of the whole "
                "module: call optimizer.zero_grad() before"
            )


def _options(module: nn.Module) -> dict[str, Any]:
    """Return the options of each layer of a module, plain attributes other than weights, by name.

    Only of layers of `LIBRARIES` and those derived from ours: a layer of the user may keep its rank
    in an attribute.
    """
    options = {}
    for path, layer in module.named_modules():
        is_ours = isinstance(layer, (GraphTransformerBaseBlock, GraphTransformerConv))
        if is_ours or type(layer).__module__.partition(".")[0] in LIBRARIES:
            for name, value in vars(layer).items():
                if not name.startswith("_") and isinstance(
                    value, (bool, int, float, str, tuple, AttentionConfig)
                ):
                    options[f"{path}.{name}" if path else name] = value
    return options


def _table_size(
    module: nn.Module, name: str, of: str | Kind, rows: Mapping[str | Kind, int]
) -> int:
    """Return the number of rows of a table, checked against its set of nodes or graph."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    if name not in tensors:
        raise ValueError(f"tables must name parameters or buffers of the module, got {name!r}")
    if of not in rows:
        raise ValueError(
            f"tables must name a set of nodes or a graph, one of {[*rows]}, got {of!r}"
        )
    shape = tuple(tensors[name].shape)
    if shape[:1] != (rows[of],):
        raise ValueError(
            f"{name} must have one row for each of the {rows[of]} of {of}, got {shape}"
        )
    return rows[of]
