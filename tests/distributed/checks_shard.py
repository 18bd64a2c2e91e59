"""Checks on ranks: ownership of edges, contents of the halo, errors raised before a collective could hang."""

import pickle
from dataclasses import replace
from functools import partial, reduce
from unittest import mock

import torch
import torch.distributed as dist

from anemoi_gt import GraphStructure
from anemoi_gt.distributed import HaloExchange, Partition, Ranges, shard_edges, shard_graph
from anemoi_gt.distributed.consensus import check_finite, check_same, raise_on_all_ranks
from distributed.problems import GRAPHS, structure
from distributed.ranks import (
    device_type,
    everywhere,
    mesh_of,
    on_all_ranks,
    on_ranks,
    seeded,
    without_default_device,
)

NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)


def rows_with_halo(exchange, x):
    """Return the local rows concatenated with the halo."""
    return exchange.start(x).wait()


@on_ranks(2, 4)
def every_edge_belongs_to_the_owner_of_its_destination_only(group, verdict):
    for name in GRAPHS:
        shard = shard_graph(structure(name), group)
        owner = shard.destinations.ranges.owner(GRAPHS[name][0][1])
        verdict.same(name, shard.edges.sort().values, (owner == shard.rank).nonzero().flatten())


@on_ranks(3)
def the_structure_of_a_rank_holds_its_edges_in_the_order_of_its_attributes(group, verdict):
    destinations = Partition(Ranges((0, 4, 11, 17)), torch.randperm(17, generator=seeded(1)))
    for name in ("encoder", "symmetric"):
        sources = destinations if name == "symmetric" else None
        shard = shard_graph(structure(name), group, sources=sources, destinations=destinations)
        local_src = shard.sources.nodes(shard.rank)
        local_dst = shard.destinations.nodes(shard.rank)
        src, dst = GRAPHS[name][0][:, shard.edges]
        halo = shard.sources.positions(src[~torch.isin(src, local_src)]).unique()
        order = shard.sources.order
        if order is None:
            order = torch.arange(shard.sources.size)
        graph = shard.structure.validate()
        verdict.that(graph.perm is None, f"{name}: attributes must not be permuted")
        verdict.that(graph.has_reverse, f"{name}: the structure must have its reverse")
        src_with_halo = torch.cat([local_src, order[halo]])
        verdict.same(f"{name}: sources", src_with_halo[graph.row.long()], src)
        verdict.same(f"{name}: destinations", local_dst[graph.dst.long()], dst)
        verdict.same(f"{name}: global edge ids", graph.global_edge_id, shard.edges)


@on_ranks(2, 4)
def only_the_halo_is_sent_and_each_row_once(group, verdict):
    for name in ("asymmetric", "encoder", "decoder"):
        shard = shard_graph(structure(name), group)
        src, dst = GRAPHS[name][0]
        src_owner = shard.sources.ranges.owner(src)
        dst_owner = shard.destinations.ranges.owner(dst)
        for other in range(dist.get_world_size(group)):
            received = src[(dst_owner == shard.rank) & (src_owner == other)].unique()
            sent = src[(dst_owner == other) & (src_owner == shard.rank)].unique()
            num_received = 0 if other == shard.rank else len(received)
            num_sent = 0 if other == shard.rank else len(sent)
            label = f"{name}: rows of rank {other}"
            verdict.same(f"{label}, received", shard.halo.recv_counts[other], num_received)
            verdict.same(f"{label}, sent", shard.halo.send_counts[other], num_sent)


@on_ranks(4)
def every_rank_has_its_share_of_the_cost_and_at_most_one_node_more(group, verdict):
    dst = torch.arange(97).repeat_interleave(torch.randint(0, 300, (97,), generator=seeded(4)))
    graph = GraphStructure.from_edge_index(torch.stack([dst % 5, dst]), (5, 97))
    shard = shard_graph(graph, group)
    cost_of_nodes = graph.colptr.diff().long() + 38
    cost = int(cost_of_nodes[shard.destinations.ranges.of(shard.rank)].sum())
    costs = everywhere(cost, group)
    verdict.that(max(costs) <= sum(costs) / 4 + 300 + 38, f"costs {costs}")
    numbers = everywhere(len(shard.destinations.nodes(shard.rank)), group)
    verdict.that(len(set(numbers)) > 1, "nodes must be divided by cost, not by number")


@on_ranks(2)
def a_graph_of_one_edge_is_sharded_whatever_its_strides(group, verdict):
    edge_index = torch.tensor([[4, 1, 1], [0, 1, 1]])[:, :1]  # rows of one element, three apart
    graph = GraphStructure.from_edge_index(edge_index, (5, 1))
    graph = replace(graph, row=torch.zeros(3, 3, dtype=torch.int32)[:, 0][:1])
    shard = shard_graph(graph, group)
    verdict.same("edges of all ranks", sum(everywhere(shard.structure.num_edges, group)), 1)


@on_ranks(3)
def rows_arrive_in_the_order_of_the_request(group, verdict):
    rank = dist.get_rank(group)
    ranges = Ranges((0, 4, 4, 9))
    requests = [torch.tensor([1, 3, 8]), torch.arange(9), torch.tensor([], dtype=torch.int64)]
    requested = requests[rank]
    exchange = HaloExchange.of_requests(requested, ranges, group)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        table = torch.arange(18.0).reshape(9, 2).to(dtype)
        verdict.same(f"{dtype}", exchange(table[ranges.of(rank)]), table[requested])
    batch = torch.randn(3, 9, 2, generator=seeded(0))
    verdict.same("batch", exchange(batch[:, ranges.of(rank)]), batch[:, requested])
    without_features = exchange(torch.zeros(ranges.counts[rank], 0))
    verdict.same("no features", without_features.shape, (len(requested), 0))
    local_batch = batch[:, ranges.of(rank)]
    for local in (local_batch[0], local_batch, local_batch.flip(0)):
        rows = rows_with_halo(exchange, local)
        verdict.same("after local rows", rows, torch.cat([local, exchange(local)], dim=-2))
        verdict.that(rows.is_contiguous(), "rows must be contiguous")


@on_ranks(4)
def gradients_are_summed_in_the_order_of_ranks(group, verdict):
    rank = dist.get_rank(group)
    ranges = Ranges((0, 3, 5, 6, 8))
    exchange = HaloExchange.of_requests(torch.arange(8), ranges, group)
    x = torch.zeros(ranges.counts[rank], 2, requires_grad=True)
    size = torch.tensor([1.0, 1e8, -1e8, 1e-3])[:, None, None]  # the sum depends on the order
    gradients = torch.randn(8, 2, generator=seeded(0)) * size
    exchange(x).backward(gradients[rank])
    verdict.same("dx", x.grad, reduce(torch.add, gradients)[ranges.of(rank)])
    local = torch.randn(2, ranges.counts[rank], 2, generator=seeded(rank))
    upstream = torch.cat([local, gradients[rank].expand(2, 8, 2)], dim=1)
    total = reduce(torch.add, gradients[:, ranges.of(rank)], local)
    compiled = torch.compile(rows_with_halo, fullgraph=True, backend="aot_eager")
    for label, function in {"eager": rows_with_halo, "compiled": compiled}.items():
        x = torch.zeros(2, ranges.counts[rank], 2, requires_grad=True)
        with without_default_device():
            function(exchange, x).backward(upstream)
        verdict.same(f"dx with local use, {label}", x.grad, total)


@on_ranks(2)
def anomaly_detection_accepts_a_pending_exchange(group, verdict):
    exchange = HaloExchange.of_requests(torch.arange(2000), Ranges((0, 1000, 2000)), group)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(mode=True)  # fills receive buffers with NaN
        with torch.autograd.detect_anomaly():
            for rows_of in (exchange, partial(rows_with_halo, exchange)):
                x = torch.ones(1000, 16, requires_grad=True)
                rows_of(x).square().sum().backward()
                verdict.that(bool(x.grad.isfinite().all()), "gradients must be finite")
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


@on_ranks(2)
def an_exchange_is_completed_once_and_double_backward_raises(group, verdict):
    exchange = HaloExchange.of_requests(torch.tensor([0, 1]), Ranges((0, 1, 2)), group)
    pending = exchange.start(torch.ones(1, 2))
    pending.wait()
    for wait in (pending.wait, pending.wait_halo):
        verdict.raises(ValueError, "exchange already completed: start one for each use", wait)
    prepared = exchange.start(torch.ones(1, 2), torch.neg)
    verdict.raises(ValueError, "prepared rows must be awaited by wait_halo", prepared.wait)
    expected = -torch.ones(1, 2).expand(len(exchange.send_rows), 2)
    verdict.same("prepared", prepared.wait_halo(), expected)
    x = torch.ones(1, 2, requires_grad=True)
    for rows_of in (exchange, partial(rows_with_halo, exchange)):
        (gradient,) = torch.autograd.grad(rows_of(x).square().sum(), x, create_graph=True)
        verdict.raises(RuntimeError, "once_differentiable", gradient.sum().backward)


@on_ranks(3)
def values_that_differ_between_ranks_are_named_on_all_ranks(group, verdict):
    rank = dist.get_rank(group)
    graph = structure("asymmetric")
    other = replace(graph, row=graph.row.flip(0)) if rank == 1 else graph
    partition = Partition(Ranges((0, 11 if rank == 0 else 10, 20, 41)))
    config = {"seed": 0, "model": {"channels": 8 if rank else 16}}
    rate = {"rate": 1.0 if rank else 1}
    optional = {"a": None} if rank else {}
    shard_other = partial(shard_graph, other, group)
    shard_by_partition = partial(shard_graph, graph, group, destinations=partition)
    calls = {
        "graph must be the same on all ranks, got": shard_other,
        "on rank 1 and": shard_other,
        "destinations must be the same on all ranks": shard_by_partition,
        "on ranks 1, 2 and": partial(check_same, config, group),
        "got 1.0 on ranks 1, 2 and 1 on rank 0": partial(check_same, rate, group),
        "None on ranks 1, 2 and no such value on rank 0": partial(check_same, optional, group),
    }
    for message, call in calls.items():
        verdict.raises(ValueError, message, call)
    check_same({"seed": 0, "rate": float("nan")}, group)


@on_ranks(3)
def wrong_graphs_and_partitions_are_refused_on_all_ranks(group, verdict):
    graph = structure("asymmetric")
    encoder = structure("encoder")
    is_wrong = dist.get_rank(group) == 1
    nodes = Partition(Ranges.even(41, 3))

    def refused(message, graph, **partitions):
        verdict.raises(ValueError, message, partial(shard_graph, graph, group, **partitions))

    refused("rank 1: graph must be a GraphStructure, got NoneType", None if is_wrong else graph)
    refused(
        "destinations must be the same on all ranks, got ",
        graph,
        destinations=nodes if is_wrong else None,
    )
    refused(
        "17 nodes divided among 3 ranks, got a partition of 17 nodes and 2 ranks",
        encoder,
        destinations=Partition(Ranges.even(17, 2)),
    )
    refused(
        "41 nodes divided among 3 ranks, got a partition of 18 nodes and 3 ranks",
        encoder,
        sources=Partition(Ranges.even(18, 3)),
    )


@on_ranks(3)
def wrong_edges_of_any_rank_are_refused_on_all(group, verdict):
    rank = dist.get_rank(group)
    nodes = {
        "sources": Partition(Ranges.even(41, 3)),
        "destinations": Partition(Ranges.even(17, 3)),
    }
    out_of_range = torch.tensor([[41], [0]])

    def refused(message, edge_index=NO_EDGES, **options):
        options = nodes | options
        verdict.raises(ValueError, message, partial(shard_edges, edge_index, group, **options))

    strays = NO_EDGES
    if rank == 0:
        strays = torch.tensor([[0, 1], [0, 16]])
    elif rank == 1:
        strays = torch.tensor([[0], [0]])
    refused(
        "ranks 0, 1: every edge must end in a node of this rank, got one into 16, which rank 2 "
        "owns",
        strays,
    )
    refused(
        "rank 0: sources must hold values in 0 .. 40, one for each of 41 nodes, got values from "
        "41 to 41",
        NO_EDGES if rank else out_of_range,
    )
    refused("edge_index must have dtype int32 or int64", NO_EDGES.float())
    refused("edge_index must have shape [2, E] (sources, destinations), got (0,)", NO_EDGES[0])
    refused(
        "rank 1: edge_index must be a tensor [2, E] (sources, destinations), got list",
        [[], []] if rank == 1 else NO_EDGES,
    )
    refused(
        "rank 1: global_edge_id must have 0 entries, one",
        global_edge_id=torch.zeros(int(rank == 1)).long(),
    )
    refused("global_edge_id must be a tensor, got list", global_edge_id=[])
    ids = {"global_edge_id": NO_EDGES[0] if rank == 1 else None}
    refused("presence of global_edge_id must be the same on all ranks, got True on rank 1", **ids)


@on_ranks(2)
def rows_of_other_ranks_are_refused_before_anything_is_sent(group, verdict):
    shard = shard_graph(structure("asymmetric"), group)
    num_local = len(shard.sources.nodes(shard.rank))
    rows = f"[.., {num_local}, F], one row for each source of this rank"
    message = f"x_src must have shape {rows}, got ({num_local + 1}, 2)"
    wrong = torch.ones(num_local + 1, 2)
    verdict.raises(ValueError, message, partial(shard.start_exchange, wrong))
    message = f"x_src must be a tensor {rows}, got NoneType"
    verdict.raises(ValueError, message, partial(shard.start_exchange, None))


@on_all_ranks
def a_group_without_this_rank_is_refused(group, verdict):
    graph = structure("asymmetric")
    wrong_groups = [None, mesh_of(1, 2)]
    only_first = dist.new_group([0])
    if dist.get_rank() != 0:
        wrong_groups.append(only_first)
    message = "group must be a ProcessGroup that this rank"
    for wrong in wrong_groups:
        verdict.raises(ValueError, message, partial(shard_graph, graph, wrong))
        call = partial(shard_edges, GRAPHS["asymmetric"][0], wrong, destinations=None, sources=None)
        verdict.raises(ValueError, message, call)


@on_ranks(4)
def one_bad_loss_stops_every_rank(group, verdict):
    rank = dist.get_rank(group)
    check_finite(torch.tensor(1.0), 7, group)
    loss = torch.tensor(float("nan") if rank == 2 else 1.0)
    message = "rank 2: the loss must stay finite, got nan at step 7"
    verdict.raises(FloatingPointError, message, partial(check_finite, loss, 7, group))
    problem = f"trouble on {rank}" if rank in (1, 3) else None
    call = partial(raise_on_all_ranks, problem, group, OSError)
    verdict.raises(OSError, "ranks 1, 3: trouble on 1", call)


@on_ranks(2)
def rows_are_compared_in_the_first_exchange_of_a_shard_and_not_again(group, verdict):
    is_last = dist.get_rank(group) == 1
    shard = shard_graph(structure("symmetric"), group)
    number = shard.sources.ranges.counts[shard.rank]
    x = torch.randn(2, number, 4)
    others = {
        "batch size of the rows that ranks exchange must be the same on all ranks, got (3,) on "
        "rank 1": x.new_zeros(3, number, 4),
        "features of the rows that ranks exchange": x.new_zeros(2, number, 5),
        "dtype (of the input, or by autocast) of the rows that ranks exchange": x.double(),
        "requires_grad of the rows that ranks exchange": x.clone().requires_grad_(),
    }
    for message, other in others.items():
        rows = other if is_last else x
        verdict.raises(ValueError, message, partial(shard.start_exchange, rows))
        verdict.raises(ValueError, message, partial(shard.split(3).exchange, rows))
    with torch.autocast(device_type(), torch.bfloat16, enabled=is_last):
        verdict.raises(ValueError, "by autocast", partial(shard.start_exchange, x))
    shard.start_exchange(x).wait()
    with mock.patch.object(dist, "all_gather_object") as gathered:
        shard.start_exchange(x).wait()
        shard.split(3).exchange(x.double())
    verdict.same("collectives after the first", gathered.call_count, 0)


@on_ranks(2)
def a_pickled_shard_exchanges_the_same_rows(group, verdict):
    shard = shard_graph(structure("symmetric"), group)
    x = torch.randn(shard.sources.ranges.counts[shard.rank], 4)
    copied = pickle.loads(pickle.dumps(shard))
    verdict.same("rows", copied.start_exchange(x).wait(), shard.start_exchange(x).wait())
