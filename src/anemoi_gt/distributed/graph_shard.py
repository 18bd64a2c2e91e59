"""Graph shard of one rank: its destinations, all edges into them, and its halo of remote sources.

Every rank owns some destinations and all edges into them, so a softmax never crosses ranks. Source
indices of a shard are

    0 .. n_local - 1    local sources, in the order of the rank's rows
    n_local ..          halo, ordered by owner and position
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
from anemoi_gt.graph.structure import check_structure
from anemoi_gt.nn.chunking import Chunk, RowsWithHalo, make_chunks
from anemoi_gt.ops.dtypes import cast_for_autocast
from anemoi_gt.option_checks import check_integer


@dataclass(frozen=True, eq=False)
class GraphShard:
    """Graph shard of one rank; blocks accept it as a graph (`anemoi_gt.nn.ShardedGraph`).

    Attributes
    ----------
    rank : int
        This rank in the group that shares the graph.
    sources, destinations : Partition
        Owners of the nodes. This rank's rows of features are `sources.nodes(rank)` and
        `destinations.nodes(rank)`.
    edges : Tensor [E_own], int64
        Positions of this rank's edges in the caller's edge attributes, in the order in which
        `structure` reads them.
    structure : GraphStructure
        Edges from local and halo sources to local destinations, with their reverse structure.
    halo : HaloExchange
        Exchanges the rows of the halo.
    chunks : tuple of Chunk
        Chunks of `structure` from `split`, which layers process one after the other. Empty if the
        structure is not split.
    """

    rank: int
    sources: Partition
    destinations: Partition
    edges: Tensor
    structure: GraphStructure
    halo: HaloExchange
    chunks: tuple[Chunk, ...] = ()

    def split(self, num_chunks: int) -> "GraphShard":
        """Return this shard split into `num_chunks` chunks of destinations.

        Use the same number on every rank; on a rank with fewer destinations some chunks are empty.
        Layers exchange the halo before the first chunk. Raise ValueError if num_chunks is below 1.
        """
        check_integer("num_chunks", num_chunks)
        chunks: tuple[Chunk, ...] = ()
        if num_chunks > 1:
            num_local = self.sources.ranges.counts[self.rank]
            chunks = make_chunks(self.structure, num_chunks, num_local)
        return replace(self, chunks=chunks)

    def exchange(self, x_src: Tensor) -> Tensor | RowsWithHalo:
        """Return local source rows and halo in their dtype; on one rank, only the local rows."""
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
    ) -> "PendingExchange | LocalExchange":
        """Start to send local source rows, cast for autocast. Collective, also backward.

        Call `wait()` of the result once: it returns local sources concatenated with the halo,
        [.., n_src + halo, F]. Work between start and wait overlaps with communication, forward and
        backward. With activation checkpointing, start the exchange inside the checkpointed
        function.

        `prepare` computes the rows to send from rows [.., F], and with `cond` [.., n_src, K] also
        from their conditions. Then call only `wait_halo()`: local rows are neither prepared nor
        cast. Raise ValueError, before anything is sent, unless `x_src` is [n_src, F] or
        [B, n_src, F].
        """
        self._check_sources(x_src)
        if self.sources.ranges.num_ranks == 1:
            return LocalExchange(x_src, is_prepared=prepare is not None)
        if prepare is None:
            return self.halo.start(cast_for_autocast(x_src))
        # not cast: a norm reads float32 rows, and its result has the dtype to be sent
        return self.halo.start(x_src, prepare, cond)

    def _check_sources(self, x_src: Tensor) -> None:
        count = self.sources.ranges.counts[self.rank]
        expected = f"[.., {count}, F], one row for each source of this rank"
        check_shape("x_src", x_src, expected, lambda x: x.dim() >= 2 and x.shape[-2] == count)

    def __deepcopy__(self, memo: dict) -> "GraphShard":
        return self  # immutable, so copies of a model share it


@dataclass(frozen=True, eq=False)
class LocalExchange:
    """Handle of an exchange on a single rank, where nothing is sent."""

    own: Tensor
    is_prepared: bool = False

    def wait(self) -> Tensor:
        """Return the local rows; raise ValueError after `prepare`, as `PendingExchange.wait`."""
        check_unprepared(is_prepared=self.is_prepared)
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
        Owners of the sources. None: `destinations` if the graph has as many sources as
        destinations, otherwise ranges of equal size. Consecutive graphs in a model must have the
        same owners of the nodes that they share: pass both partitions for them.

    Raises
    ------
    ValueError
        On all ranks, if the graph or a partition differs between them, or a partition does not fit
        the graph.

    Examples
    --------
    On each of 4 ranks, with features x [N, F] and attributes edge_attr [E, D] of the whole graph:

        shard = shard_graph(graph, group)
        x, edge_attr = x[shard.sources.nodes(shard.rank)], edge_attr[shard.edges]
        y = block(x, shard, edge_attr)                           # rows of local destinations
    """
    _check_member(group)
    rank = dist.get_rank(group)
    num_ranks = dist.get_world_size(group)
    # Every rank takes part in all collectives below, so errors are raised on all ranks before.
    with consensus(group):
        check_structure(graph)
        if destinations is None:
            destinations = Partition.balanced(destination_cost(graph.colptr.diff()), num_ranks)
        if sources is None:
            if graph.num_src == destinations.size:
                sources = destinations
            else:
                sources = Partition(Ranges.even(graph.num_src, num_ranks))
        _check_partition("sources", sources, graph.num_src, num_ranks)
        _check_partition("destinations", destinations, graph.num_dst, num_ranks)
        edge_index, positions = in_edges(graph, destinations.nodes(rank, graph.device))
    check_same({"graph": fingerprint(*graph.state_dict().values())}, group)
    shard = shard_edges(
        edge_index,
        group,
        destinations=destinations,
        sources=sources,
        global_edge_id=graph.global_edge_ids()[positions],
    )
    edges = graph.edge_order().long()[positions][shard.edges]
    return replace(shard, edges=edges)


def in_edges(graph: GraphStructure, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the in-edges [2, E_own], int64, of `nodes`, in node order, and their CSC positions."""
    degree = graph.colptr.diff()[nodes]
    num_edges = int(degree.sum())
    # shift from the position in the result to the CSC position, constant over a node's edges
    shift = graph.colptr[nodes] - (degree.cumsum(0) - degree)
    positions = shift.repeat_interleave(degree) + torch.arange(num_edges, device=graph.device)
    edge_index = torch.stack([graph.row[positions].long(), nodes.repeat_interleave(degree)])
    return edge_index, positions


def shard_edges(
    edge_index: Tensor,
    group: dist.ProcessGroup,
    *,
    destinations: Partition,
    sources: Partition,
    global_edge_id: Tensor | None = None,
) -> GraphShard:
    """Shard a graph whose edges are held by the owner ranks of their destinations. Collective.

    The `edges` of the shard are positions in the edge attributes of this rank.

    Parameters
    ----------
    edge_index : Tensor [2, E_own], int32 or int64
        This rank's edges, with node indices of the whole graph, on a device that the group
        communicates from.
    group : ProcessGroup
        The ranks that share the graph.
    destinations, sources : Partition
        Owners of the nodes; the same on all ranks.
    global_edge_id : Tensor [E_own], int64, optional
        Id of each edge in the whole graph, which determines dropout. If None on all ranks, ids are
        consecutive by rank.

    Raises
    ------
    ValueError
        On all ranks, if the partitions differ between them, or an edge does not end in a node of
        its rank.
    """
    _check_member(group)
    rank = dist.get_rank(group)
    num_ranks = dist.get_world_size(group)
    same = {
        "destinations": _signature(destinations),
        "sources": _signature(sources),
        "presence of global_edge_id": global_edge_id is not None,
    }
    check_same(same, group)
    with consensus(group):
        _check_partition("sources", sources, sources.size, num_ranks)
        _check_partition("destinations", destinations, destinations.size, num_ranks)
        _check_own_edges(edge_index, sources, destinations, rank)
        if global_edge_id is not None:
            check_edge_ids(global_edge_id, edge_index)
    if global_edge_id is None:
        num_edges = edge_index.shape[1]
        counts = [0] * num_ranks
        dist.all_gather_object(counts, num_edges, group=group)
        global_edge_id = torch.arange(num_edges, device=edge_index.device) + sum(counts[:rank])
    src = sources.positions(edge_index[0])
    dst = destinations.positions(edge_index[1])
    num_local = sources.ranges.counts[rank]
    is_local = sources.ranges.owns(rank, src)
    # sorted by position, and so by owner: ranges of positions ascend with the rank
    halo, halo_row = torch.unique(src[~is_local], return_inverse=True)
    row = src - sources.ranges.of(rank).start
    row[~is_local] = num_local + halo_row
    sizes = num_local + halo.shape[0], destinations.ranges.counts[rank]
    edge_index = torch.stack([row, dst - destinations.ranges.of(rank).start])
    graph = GraphStructure.from_edge_index(edge_index, sizes, global_edge_id=global_edge_id)
    edges = graph.edge_order().long()
    structure = replace(graph, perm=None)
    exchange = HaloExchange.of_requests(halo, sources.ranges, group)
    return GraphShard(rank, sources, destinations, edges, structure, exchange)


def _signature(partition: Partition) -> str:
    """Return a short text that differs between ranks if their partitions do."""
    order = "by number" if partition.order is None else f"order {fingerprint(partition.order)}"
    return f"{order}, bounds {partition.ranges.bounds}"


def _check_member(group: dist.ProcessGroup) -> None:
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"group must be a ProcessGroup that this rank belongs to, got {type(group).__name__}; "
            "use torch.distributed.group.WORLD for all ranks, or mesh.get_group('model') of a mesh"
        )


def _check_partition(name: str, partition: Partition, size: int, num_ranks: int) -> None:
    """Raise ValueError unless a partition divides `size` nodes among `num_ranks` ranks."""
    got = partition.size, partition.ranges.num_ranks
    if got != (size, num_ranks):
        raise ValueError(
            f"{name} must be {size} nodes divided among {num_ranks} ranks, got a partition of "
            f"{got[0]} nodes and {got[1]} ranks"
        )


def _check_own_edges(
    edge_index: Tensor, sources: Partition, destinations: Partition, rank: int
) -> None:
    """Raise ValueError unless all edges [2, E] join existing nodes and end in nodes of `rank`."""
    check_edge_index(edge_index)
    check_range("sources", edge_index[0], sources.size)
    check_range("destinations", edge_index[1], destinations.size)
    owner = destinations.ranges.owner(destinations.positions(edge_index[1]))
    foreign = (owner != rank).nonzero()
    if len(foreign) > 0:
        edge = int(foreign[0])
        raise ValueError(
            "every edge must end in a node of this rank, got one into "
            f"{int(edge_index[1, edge])}, which rank {int(owner[edge])} owns"
        )
