"""Sharding of any module made of this library's layers: `shard_module`.

    graphs      a `GraphShard` takes the place of each structure, in calls and in `StaticEdges`
    tables      parameters and buffers with a row for each node or edge keep the rows of this rank
    the rest    unchanged, the same on all ranks

A set of nodes has one partition in all graphs, balanced by the cost of its nodes over all graphs that end in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.distributed.consensus import check_same, consensus, fingerprint
from anemoi_gt.distributed.grad_sync import AXES, check_mesh
from anemoi_gt.distributed.graph_shard import GraphShard, shard_graph
from anemoi_gt.distributed.model_shard import EDGE_ROWS, ModelShard, partition_nodes, set_graph, set_rows
from anemoi_gt.distributed.sharded_checkpoint import ShardedTable
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn import StaticEdges

Kind = tuple[str, str]  # sets of sources and of destinations


@dataclass(frozen=True)
class ModuleShard(ModelShard):
    """Sharding of a module, as one rank sees it; printed, it says what this rank holds.

    Attributes
    ----------
    partitions, rank, tables
        As of a `ModelShard`.
    graphs : dict of (str, str) to GraphShard
        By the names of the sets of sources and destinations; layers take them in place of structures.
    """

    graphs: dict[Kind, GraphShard]

    def nodes(self, name: str, rows: Tensor) -> Tensor:
        """Return this rank's nodes [.., n, F] of rows [.., N, F] of a set of nodes."""
        return rows.index_select(-2, self.partitions[name].nodes(self.rank, rows.device))

    def edges(self, kind: Kind, rows: Tensor) -> Tensor:
        """Return the edges [.., E_own, D] of rows [.., E, D] of a graph that this rank's shard reads, in its order."""
        return rows.index_select(-2, self.graphs[kind].edges.to(rows.device))

    def __str__(self) -> str:
        ranks = next(iter(self.partitions.values())).ranges.num_ranks
        lines = [f"rank {self.rank} of {ranks}"]
        for name, partition in self.partitions.items():
            lines.append(f"{partition.ranges.counts[self.rank]} of {partition.size} nodes {name}")
        for (source, destination), graph in self.graphs.items():
            halo = f"halo of {graph.halo.num_received} rows, {graph.halo.num_sent} rows sent"
            lines.append(f"{len(graph.edges)} edges {source} to {destination}, {halo}")
        lines += [f"{len(table.index)} of {table.size} rows of {name}" for name, table in self.tables.items()]
        return "\n".join(lines)


def shard_module(
    module: nn.Module,
    graphs: Mapping[Kind, GraphStructure | StaticEdges],
    mesh: DeviceMesh,
    *,
    tables: Mapping[str, str | Kind] | None = None,
    positions: Mapping[str, Tensor] | None = None,
) -> ModuleShard:
    """Reduce a module that every rank holds to this rank's nodes and edges, in place. Collective.

    Parameters
    ----------
    module : torch.nn.Module
        Of convolutions, blocks, mappers and processors of this library, and of layers that compute every node for
        itself; with the same weights on all ranks, on the device where it is trained. No other layer may read nodes of
        other ranks.
    graphs : mapping of (str, str) to GraphStructure or StaticEdges
        All graphs, by the names of the sets of sources and destinations. Of a `StaticEdges` of the module structure and
        attributes are replaced.
    mesh : DeviceMesh
        With axes (data, model).
    tables : mapping of str to str or (str, str), optional
        Parameters and buffers with one row for each node of a set or edge of a graph, such as the weight of an
        embedding of nodes, by their name: the set or the graph. They keep the rows of this rank.
    positions : mapping of str to Tensor [N, 3], optional
        Points of a set of nodes. They are ordered along a Morton curve, which makes halos small; others by number.

    Returns
    -------
    ModuleShard
        Shards that replace structures, features and attributes, and the names of the shared parameters.

    Raises
    ------
    ValueError
        On all ranks, when weights or graphs are not the same on all of them, or do not fit together.
    """
    check_mesh(mesh)
    tables, positions = dict(tables or {}), dict(positions or {})
    group, rank = mesh.get_group("model"), mesh.get_local_rank("model")
    with consensus(group):
        structures = {kind: _structure(kind, edges) for kind, edges in graphs.items()}
        sizes = _sizes(structures)
        tables |= _rows_of_static_edges(module, graphs)
        for name, of in tables.items():
            _check_table(module, name, of, sizes, structures)
    same = {"weights": fingerprint(*module.state_dict().values())}
    same["positions"] = {name: fingerprint(points) for name, points in positions.items()}
    same["tables"] = tables
    for axis in AXES:
        check_same(same, mesh.get_group(axis))

    edges = [(structure, destination, 1) for (_, destination), structure in structures.items()]
    partitions = partition_nodes(sizes, edges, positions, mesh["model"].size())
    shards = {
        (src, dst): shard_graph(structure, group, sources=partitions[src], destinations=partitions[dst])
        for (src, dst), structure in structures.items()
    }
    found = {}
    for name, of in tables.items():
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        tensor = getattr(owner, attribute)
        own = shards[of].edges if of in shards else partitions[of].nodes(rank, tensor.device)
        if isinstance(tensor, nn.Parameter):
            found[name] = ShardedTable(own, tensor.shape[0], mesh)
        set_rows(owner, {attribute: tensor.detach()[own]})
    for kind, edges in graphs.items():
        if isinstance(edges, StaticEdges):
            set_graph(edges, shards[kind])
    return ModuleShard(partitions, rank, found, shards)


def _structure(kind: Kind, edges: GraphStructure | StaticEdges) -> GraphStructure:
    """Return the structure of the edges of a graph, checked."""
    if not isinstance(kind, tuple) or len(kind) != 2 or not all(isinstance(name, str) for name in kind):
        raise ValueError(f"graphs must have keys (sources, destinations), names of sets of nodes, got {kind!r}")
    if isinstance(edges, StaticEdges):
        edges = edges.structure()
    if not isinstance(edges, GraphStructure):
        raise ValueError(f"graphs must be GraphStructures or StaticEdges, got {type(edges).__name__} for {kind}")
    return edges


def _sizes(structures: Mapping[Kind, GraphStructure]) -> dict[str, int]:
    """Return the number of nodes of each set."""
    if not structures:
        raise ValueError("graphs must have at least one graph, got none")
    sizes = {}
    for kind, structure in structures.items():
        for name, size in zip(kind, (structure.num_src, structure.num_dst), strict=True):
            if sizes.setdefault(name, size) != size:
                raise ValueError(f"nodes {name} must be as many in all graphs, got {sizes[name]} and {size} in {kind}")
    return sizes


def _rows_of_static_edges(module: nn.Module, graphs: Mapping[Kind, GraphStructure | StaticEdges]) -> dict[str, Kind]:
    """Return the tensors of the `StaticEdges` of a module, by name, with their graph."""
    paths = {id(part): path for path, part in module.named_modules()}
    found = {}
    for kind, edges in graphs.items():
        if isinstance(edges, StaticEdges):
            if id(edges) not in paths:
                raise ValueError(f"StaticEdges must be part of the module, got others for {kind}")
            prefix = f"{paths[id(edges)]}." if paths[id(edges)] else ""
            found |= {f"{prefix}{name}": kind for name in EDGE_ROWS if getattr(edges, name) is not None}
    return found


def _check_table(
    module: nn.Module, name: str, of: str | Kind, sizes: dict[str, int], structures: Mapping[Kind, GraphStructure]
) -> None:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if name not in tensors:
        raise ValueError(f"tables must name parameters or buffers of the module, got {name!r}")
    if of not in sizes and of not in structures:
        raise ValueError(f"tables must name a set of nodes or a graph, one of {[*sizes, *structures]}, got {of!r}")
    size = sizes[of] if of in sizes else structures[of].num_edges
    if tensors[name].dim() < 1 or tensors[name].shape[0] != size:
        raise ValueError(f"{name} must have one row for each of the {size} of {of}, got {tuple(tensors[name].shape)}")
