"""Graph shard of one rank: its destinations, all edges into them, and its halo of remote sources.

Every rank owns some destinations and all edges into them, so a softmax never crosses ranks. Sources
are numbered

    0 .. n_local - 1    local sources, in the order of the rank's rows
    n_local ..          halo, in the order of owner and position
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from anemoi_gt.distributed.consensus import check_same, consensus, fingerprint
from anemoi_gt.distributed.halo import HaloExchange, PendingExchange, check_unprepared
from anemoi_gt.distributed.partition import Partition, Ranges, destination_cost
from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.checks import check_edge_ids, check_edge_index, check_range, check_shape
from anemoi_gt.nn.chunking import Chunk, RowsWithHalo, make_chunks
from anemoi_gt.nn.input_validation import check_structure
from anemoi_gt.ops.dtypes import cast_for_autocast
from anemoi_gt.option_checks import check_integer


@dataclass(frozen=True, eq=False)
class GraphShard:
    """Graph shard of one rank; blocks accept it as a graph (`anemoi_gt.nn.ShardedGraph`).

    Attributes
    ----------
    rank : int
        In the group that shares the graph.
    sources, destinations : Partition
        Owners of the nodes. This rank's rows of features are `sources.nodes(rank)` and
        `destinations.nodes(rank)`.
    edges : Tensor [E_own], int64
        Positions of this rank's edges in the caller's edge attributes, in the order in which
        `structure` reads them.
    structure : GraphStructure
        Edges from local and halo sources to local destinations, with their reverse structure.
    halo : HaloExchange
        Delivers the halo.
    chunks : tuple of Chunk
        Of `structure`, from `split`; layers compute one after the other. Empty: the structure is
        not split.
    """

    rank: int
    sources: Partition
    destinations: Partition
    edges: Tensor
    structure: GraphStructure
    halo: HaloExchange
    chunks: tuple[Chunk, ...] = ()

    def split(self, num_chunks: int) -> "GraphShard":
        """Return this shard in the same number of chunks on every rank.

        Layers exchange the halo before the first chunk.

        Of a rank with fewer destinations some chunks are empty. Raise ValueError unless num_chunks
        is at least 1.
        """
        check_integer("num_chunks", num_chunks)
        num_local = self.sources.ranges.counts[self.rank]
        return replace(
            self,
            chunks=make_chunks(self.structure, num_chunks, num_local) if num_chunks > 1 else (),
        )

    def exchange(self, x_src: Tensor) -> Tensor | RowsWithHalo:
        """Return local source rows and halo, uncast; on one rank, the rows alone."""
        self._check_sources(x_src)
        if self.sources.ranges.num_ranks == 1:
            return x_src
        pending = self.halo.start(x_src)
        return RowsWithHalo(pending.own, pending.wait_halo())

    def start_exchange(
        self,
        x_src: Tensor,
        prepare: Callable[..., Tensor] | None = None,
        cond: Tensor | None = None,
    ) -> "PendingExchange | LocalRows":
        """Send local source rows, cast for autocast; do not wait. Collective, also backward.

        `wait()` of the result returns local sources concatenated with the halo, [.., n_src + halo,
        F], once. What is computed before hides the messages, and so does its backward. With
        activation checkpointing, start the exchange inside the checkpointed function. `prepare`
        maps the rows that leave [.., F], and with `cond` [.., n_src, K] their conditions, to what
        is sent; then call `wait_halo()` alone: local rows stay as they are, uncast. Raise
        ValueError, before anything is sent, unless `x_src` is [n_src, F] or [B, n_src, F].
        """
        self._check_sources(x_src)
        if self.sources.ranges.num_ranks == 1:
            return LocalRows(x_src, is_prepared=prepare is not None)
        if prepare is None:
            return self.halo.start(cast_for_autocast(x_src))
        return self.halo.start(x_src, prepare, cond)

    def _check_sources(self, x_src: Tensor) -> None:
        count = self.sources.ranges.counts[self.rank]
        wanted = f"[.., {count}, F], one row for each source of this rank"
        check_shape("x_src", x_src, wanted, lambda x: x.dim() >= 2 and x.shape[-2] == count)

    def __deepcopy__(self, memo: dict) -> "GraphShard":
        return self  # immutable: copies of a model share it


@dataclass(frozen=True, eq=False)
class LocalRows:
    """Handle of an exchange on a single rank, where nothing is sent."""

    own: Tensor
    is_prepared: bool = False

    def wait(self) -> Tensor:
        """Return the local rows; raise as `PendingExchange.wait`."""
        check_unprepared(self.is_prepared)
        return self.own

    def wait_halo(self) -> None:
        """Return None: there is no halo."""


def shard_graph(
    graph: GraphStructure,
    group: dist.ProcessGroup,
    *,
    destinations: Partition | None = None,
    sources: Partition | None = None,
) -> GraphShard:
    """Shard a graph that every rank holds. Collective.

    Parameters
    ----------
    graph : GraphStructure
        The same on all ranks, on a device that the group communicates from.
    group : ProcessGroup
        The ranks that share the graph.
    destinations : Partition, optional
        Owners of the destinations. None: ranges of about equal cost (`destination_cost`).
    sources : Partition, optional
        Owners of the sources. None: `destinations` where both sides have the same number of nodes,
        else ranges of equal size. Graphs that follow each other in a model must agree on the nodes
        that they share: pass both there.

    Raises
    ------
    ValueError
        On all ranks, when the graph or a partition differs between them, or a partition does not
        fit the graph.

    Examples
    --------
    On each of 4 ranks, for features x [N, F] and attributes edge_attr [E, D] that every rank could
    read entirely:

        shard = shard_graph(graph, group)
        x, edge_attr = x[shard.sources.nodes(shard.rank)], edge_attr[shard.edges]
        y = block(x, shard, edge_attr)                           # rows of local destinations
    """
    _check_member(group)
    with consensus(group):
        check_structure(graph)
        partitions = {"destinations": destinations, "sources": sources}
        signatures = {
            name: None if nodes is None else _signature(nodes) for name, nodes in partitions.items()
        }
    check_same({"graph": fingerprint(*graph.state_dict().values())} | signatures, group)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    destinations = destinations or Partition.balanced(
        destination_cost(graph.colptr.diff()), num_ranks
    )
    if sources is None:
        is_one_set = graph.num_src == destinations.size
        sources = destinations if is_one_set else Partition(Ranges.even(graph.num_src, num_ranks))
    _check_partitions(sources, destinations, (graph.num_src, graph.num_dst), num_ranks)
    edge_index, positions = in_edges(graph, destinations.nodes(rank, graph.device))
    owners = {"destinations": destinations, "sources": sources}
    shard = shard_edges(
        edge_index, group, **owners, global_edge_id=graph.global_edge_ids()[positions]
    )
    schedule = None
    if graph.dst_schedule is not None:
        schedule = destinations.positions(graph.dst_schedule)
        schedule = (
            schedule[destinations.ranges.owns(rank, schedule)] - destinations.ranges.of(rank).start
        )
        schedule = schedule.to(graph.colptr.dtype)
    edges = graph.edge_order().long()[positions][shard.edges]
    return replace(shard, edges=edges, structure=replace(shard.structure, dst_schedule=schedule))


def in_edges(graph: GraphStructure, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the in-edges [2, E_own], int64, of `nodes`, in node order, and their CSC positions."""
    degree = graph.colptr.diff()[nodes]
    begin = graph.colptr[nodes] - (degree.cumsum(0) - degree)
    positions = begin.repeat_interleave(degree) + torch.arange(
        int(degree.sum()), device=graph.device
    )
    return torch.stack([graph.row[positions].long(), nodes.repeat_interleave(degree)]), positions


def shard_edges(
    edge_index: Tensor,
    group: dist.ProcessGroup,
    *,
    destinations: Partition,
    sources: Partition,
    global_edge_id: Tensor | None = None,
) -> GraphShard:
    """Shard a graph of which every rank holds only the edges into its own destinations. Collective.

    The `edges` of the shard are positions in this rank's own attributes.

    Parameters
    ----------
    edge_index : Tensor [2, E_own], int32 or int64
        This rank's edges, in the node numbers of the whole graph, on a device that the group
        communicates from.
    group : ProcessGroup
        The ranks that share the graph.
    destinations, sources : Partition
        Owners of the nodes; the same on all ranks.
    global_edge_id : Tensor [E_own], int64, optional
        Id of each edge in the whole graph, the key of dropout. None, on all ranks, numbers them in
        the order of ranks.

    Raises
    ------
    ValueError
        On all ranks, when the partitions differ between them, or an edge does not end in its rank's
        own nodes.
    """
    _check_member(group)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    with consensus(group):
        signatures = {"destinations": _signature(destinations), "sources": _signature(sources)}
    check_same(signatures | {"presence of global_edge_id": global_edge_id is not None}, group)
    _check_partitions(sources, destinations, (sources.size, destinations.size), num_ranks)
    with consensus(group):
        _check_own_edges(edge_index, sources, destinations, rank)
        if global_edge_id is not None:
            check_edge_ids(global_edge_id, edge_index)
    if global_edge_id is None:
        counts = [0] * num_ranks
        dist.all_gather_object(counts, edge_index.shape[1], group=group)
        global_edge_id = torch.arange(edge_index.shape[1], device=edge_index.device) + sum(
            counts[:rank]
        )
    src, dst = sources.positions(edge_index[0]), destinations.positions(edge_index[1])
    num_src, is_local = sources.ranges.counts[rank], sources.ranges.owns(rank, src)
    halo, halo_row = torch.unique(src[~is_local], return_inverse=True)
    row = src - sources.ranges.of(rank).start
    row[~is_local] = num_src + halo_row
    sizes = num_src + halo.shape[0], destinations.ranges.counts[rank]
    edge_index = torch.stack([row, dst - destinations.ranges.of(rank).start])
    graph = GraphStructure.from_edge_index(edge_index, sizes, global_edge_id=global_edge_id)
    edges, structure = graph.edge_order().long(), replace(graph, perm=None)
    exchange = HaloExchange.of_requests(halo, sources.ranges, group)
    return GraphShard(rank, sources, destinations, edges, structure, exchange)


def _signature(partition: Partition) -> str:
    """Return a short text that is equal on two ranks when their partitions are."""
    if not isinstance(partition, Partition):
        raise ValueError(
            f"sources and destinations must be Partitions, got {type(partition).__name__}"
        )
    order = "by number" if partition.order is None else f"order {fingerprint(partition.order)}"
    return f"{order}, bounds {partition.ranges.bounds}"


def _check_member(group: dist.ProcessGroup) -> None:
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"group must be a ProcessGroup that this rank belongs to, got {type(group).__name__}; "
            "use "
            "torch.distributed.group.WORLD for all ranks, or mesh.get_group('model') of a mesh"
        )


def _check_partitions(
    sources: Partition, destinations: Partition, sizes: tuple[int, int], num_ranks: int
) -> None:
    for name, partition, size in zip(
        ("sources", "destinations"), (sources, destinations), sizes, strict=True
    ):
        if (got := partition.ranges.num_ranks) != num_ranks:
            raise ValueError(
                f"{name} must be divided among {num_ranks} ranks, got a partition of {got}"
            )
        if partition.size != size:
            raise ValueError(
                f"{name} must be a partition of {size} nodes, got one of {partition.size}"
            )


def _check_own_edges(
    edge_index: Tensor, sources: Partition, destinations: Partition, rank: int
) -> None:
    """Raise unless the edges [2, E] join existing nodes and all end in nodes of `rank`."""
    check_edge_index(edge_index)
    for index, (name, nodes) in zip(
        edge_index, (("sources", sources), ("destinations", destinations)), strict=True
    ):
        check_range(name, index, nodes.size)
    owner = destinations.ranges.owner(destinations.positions(edge_index[1]))
    stray = (owner != rank).nonzero()
    if stray.shape[0]:
        node, other = int(edge_index[1, stray[0, 0]]), int(owner[stray[0, 0]])
        raise ValueError(
            f"every edge must end in a node of this rank, got one into {node}, which rank {other} "
            "owns"
        )
