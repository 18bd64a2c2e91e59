"""What one rank holds of a graph: `shard_graph`. The only place that divides edges among ranks.

Every rank owns some of the destinations and all edges into them, so a softmax never crosses ranks. With the strategy "edges" it
computes its own destinations, and reads rows of sources that others own, its halo:

    edges of a rank     interior: their sources are owned too            boundary: their sources are halo
    numbering of        0 .. n_owned - 1 owned sources, then the halo, by owner and place

With the strategy "heads" every rank computes some heads of all destinations, over the whole graph; it owns attributes of edges and rows
of nodes as before, which travel there and back.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from anemoi_gt.distributed.consensus import agreed, check_same, fingerprint, raise_on_all_ranks
from anemoi_gt.distributed.halo import HaloExchange, PendingExchange
from anemoi_gt.distributed.partition import Partition, Ranges, destination_cost
from anemoi_gt.distributed.positioned_edges import PlacedEdges, joined, renumbered, structure, within
from anemoi_gt.distributed.shard_validation import (
    check_member,
    check_own_rows,
    check_partitions,
    describe,
    misnumbered,
    misplaced,
)
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.input_validation import check_structure

STRATEGIES = ("edges", "heads")


@dataclass(frozen=True, eq=False)
class GraphShard:
    """One rank's part of a graph.

    Attributes
    ----------
    rank : int
        In the group that the graph is divided among.
    sources, destinations : Partition
        Who owns which nodes. This rank's rows of features are `sources.nodes(rank)` and `destinations.nodes(rank)`.
    edges : Tensor [E_own], int64
        The edges whose attributes this rank holds, in this order: places in the caller's edge attributes.
    graph : GraphStructure
        What this rank computes.
    """

    rank: int
    sources: Partition
    destinations: Partition
    edges: Tensor
    graph: GraphStructure


@dataclass(frozen=True, eq=False)
class EdgeShard(GraphShard):
    """A part by edges: `graph` goes from owned and halo sources to owned destinations, and reads attributes in the order of `edges`.

    Attributes
    ----------
    interior : GraphStructure
        Edges whose sources are owned: from owned sources to owned destinations.
    boundary : GraphStructure
        All others: from the halo to those owned destinations that read it.
    parted : Tensor [E_own], int64
        Places in `edges` of the interior's edges, then of the boundary's, in the order in which these two read attributes.
    boundary_dst : Tensor [n], int64
        Which owned destinations those are.
    halo : HaloExchange
        Brings the halo.
    """

    interior: GraphStructure
    boundary: GraphStructure
    parted: Tensor
    boundary_dst: Tensor
    halo: HaloExchange

    def exchange(self, x: Tensor) -> Tensor:
        """Return the rows of every source that the edges of `graph` read. Collective, and so is its backward.

        Parameters
        ----------
        x : Tensor [N, F] or [B, N, F]
            Owned sources.

        Returns
        -------
        Tensor [N + halo, F] or [B, N + halo, F]
            Owned sources, then the halo.

        Raises
        ------
        ValueError
            When `x` has not one row for each owned source.
        """
        self._check_owned(x)
        return self.halo.append(x)

    def start(self, x: Tensor) -> PendingExchange:
        """Send owned sources to the ranks that read them and go on; takes what `exchange` takes, and raises what it does. Collective."""
        self._check_owned(x)
        return self.halo.start(x)

    def _check_owned(self, x: Tensor) -> None:
        check_own_rows("x", x, -2, self.sources.ranges.counts[self.rank], "sources")


@dataclass(frozen=True, eq=False)
class HeadShard(GraphShard):
    """A part by heads: `graph` is the whole, with nodes numbered by place, and reads attributes in the order in which ranks hold them.

    Attributes
    ----------
    group_name : str
        Of the process group.
    attributes : HaloExchange
        Brings the attributes of all edges.
    """

    group_name: str
    attributes: HaloExchange


def shard_graph(
    graph: GraphStructure,
    group: dist.ProcessGroup,
    strategy: str = "edges",
    *,
    destinations: Partition | None = None,
    sources: Partition | None = None,
) -> GraphShard:
    """Divide a graph that every rank holds. Collective.

    Parameters
    ----------
    graph : GraphStructure
        The same on all ranks, on a device that the group communicates from.
    group : ProcessGroup
        The ranks that share the graph.
    strategy : {"edges", "heads"}
        Who computes what.
    destinations : Partition, optional
        Who owns which destinations. None: ranges of their numbers that cost about the same (`destination_cost`).
    sources : Partition, optional
        Who owns which sources. None: `destinations` where both sides have as many nodes, else ranges of equal size. Graphs that follow
        each other in a model must agree on the nodes that they share, so there both are given.

    Returns
    -------
    EdgeShard or HeadShard
        What this rank holds; its structures have their source sides.

    Raises
    ------
    ValueError
        On all ranks, when the graph, the strategy or a partition is not the same on all of them, or a partition does not fit the graph.

    Examples
    --------
    On each of 4 ranks, for features x [N, F] and attributes edge_attr [E, D] that every rank could read whole:

        shard = shard_graph(graph, group)
        x, edge_attr = x[shard.sources.nodes(shard.rank)], edge_attr[shard.edges]
        y = block(x, shard.graph, edge_attr, exchange=shard.exchange)      # rows of owned destinations
    """
    check_member(group)
    with agreed(group):
        check_structure(graph)
        partitions = {"destinations": destinations, "sources": sources}
        given = {name: None if nodes is None else describe(nodes) for name, nodes in partitions.items()}
    check_same({"strategy": strategy, "graph": fingerprint(*graph.state_dict().values())} | given, group)
    parts = dist.get_world_size(group)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    destinations = destinations or Partition.balanced(destination_cost(graph.colptr.diff()), parts)
    sources = sources or _default_sources(graph.num_src, destinations)
    check_partitions(sources, destinations, (graph.num_src, graph.num_dst), parts)
    divide = _shard_by_edges if strategy == "edges" else _shard_by_heads
    return divide(PlacedEdges.of_graph(graph, sources, destinations), group, sources, destinations)


def shard_edges(
    edge_index: Tensor,
    group: dist.ProcessGroup,
    *,
    destinations: Partition,
    sources: Partition,
    numbers: Tensor | None = None,
) -> EdgeShard:
    """Divide a graph of which every rank holds only the edges into its own destinations; none holds the whole. Collective.

    Parameters
    ----------
    edge_index : Tensor [2, E_own], int32 or int64
        This rank's edges, in the numbering of the whole graph, on a device that the group communicates from.
    group : ProcessGroup
        The ranks that share the graph.
    destinations, sources : Partition
        Who owns which nodes; the same on all ranks.
    numbers : Tensor [E_own], int64, optional
        Number of each edge in the whole graph, which keys dropout. None, on all ranks, numbers the edges in order of ranks.

    Returns
    -------
    EdgeShard
        As `shard_graph` makes it with the strategy "edges"; `edges` are places in this rank's own attributes.

    Raises
    ------
    ValueError
        On all ranks, when the partitions are not the same on all of them, or a rank has an edge that does not end in its own nodes.
    """
    check_member(group)
    rank, parts = dist.get_rank(group), dist.get_world_size(group)
    with agreed(group):
        given = {"destinations": describe(destinations), "sources": describe(sources)}
    check_same(given | {"whether numbers are given": numbers is not None}, group)
    check_partitions(sources, destinations, (sources.size, destinations.size), parts)
    raise_on_all_ranks(misplaced(edge_index, sources, destinations, rank) or misnumbered(edge_index, numbers), group)
    own = torch.arange(edge_index.shape[1], device=edge_index.device)
    counts = [0] * parts
    dist.all_gather_object(counts, own.shape[0], group=group)
    edges = PlacedEdges(
        src=sources.places(edge_index[0]),
        dst=destinations.places(edge_index[1]),
        position=own,
        number=own + sum(counts[:rank]) if numbers is None else numbers,
        dst_schedule=None,
    )
    return _shard_by_edges(edges, group, sources, destinations)


def _shard_by_edges(
    edges: PlacedEdges, group: dist.ProcessGroup, sources: Partition, destinations: Partition
) -> EdgeShard:
    rank = dist.get_rank(group)
    own_src, own_dst = sources.ranges.of(rank), destinations.ranges.of(rank)
    num_src, num_dst = own_src.stop - own_src.start, own_dst.stop - own_dst.start
    edges = edges.at((edges.dst >= own_dst.start) & (edges.dst < own_dst.stop))
    edges = edges._replace(dst=edges.dst - own_dst.start, dst_schedule=within(edges.dst_schedule, own_dst))
    is_owned = (edges.src >= own_src.start) & (edges.src < own_src.stop)

    interior_edges, interior = structure(edges.at(is_owned), edges.src[is_owned] - own_src.start, (num_src, num_dst))
    outer = edges.at(~is_owned)
    wanted, halo_number = torch.unique(outer.src, return_inverse=True)
    boundary_dst, compact = torch.unique(outer.dst, return_inverse=True)
    order = renumbered(edges.dst_schedule, boundary_dst)
    boundary_edges, boundary = structure(
        outer._replace(dst=compact, dst_schedule=order), halo_number, (len(wanted), len(boundary_dst))
    )
    halo = HaloExchange.of_requests(wanted, sources.ranges, group)
    order, graph = joined(interior, boundary, boundary_dst)
    return EdgeShard(
        rank=rank,
        sources=sources,
        destinations=destinations,
        edges=torch.cat([interior_edges, boundary_edges])[order],
        graph=graph,
        interior=interior,
        boundary=boundary,
        parted=torch.argsort(order),
        boundary_dst=boundary_dst,
        halo=halo,
    )


def _shard_by_heads(
    edges: PlacedEdges, group: dist.ProcessGroup, sources: Partition, destinations: Partition
) -> HeadShard:
    rank = dist.get_rank(group)
    positions, graph = structure(edges, edges.src, (sources.size, destinations.size))
    ends = torch.tensor(destinations.ranges.bounds, device=graph.device)
    held = Ranges(tuple(graph.colptr[ends].tolist()))
    return HeadShard(
        rank=rank,
        sources=sources,
        destinations=destinations,
        edges=positions[held.of(rank)],
        graph=graph,
        group_name=group.group_name,
        attributes=HaloExchange.of_everything(held, group, graph.device),
    )


def _default_sources(num_src: int, destinations: Partition) -> Partition:
    if num_src == destinations.size:
        return destinations
    return Partition(Ranges.even(num_src, destinations.ranges.parts))
