"""Checks on ranks: who owns what, what travels, and what is refused before it could hang."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from anemoi_gt import GraphStructure
from anemoi_gt.distributed import (
    HaloExchange,
    Partition,
    Ranges,
    check_finite,
    check_same,
    raise_on_all_ranks,
    shard_edges,
    shard_graph,
)
from anemoi_gt.graph.ordering import morton_order
from distributed.problems import GRAPHS
from distributed.ranks import everywhere, mesh_of, on_all_ranks, on_ranks, seeded, without_default_device


def structure(name):
    edge_index, sizes = GRAPHS[name]
    return GraphStructure.from_edge_index(edge_index, sizes)


@on_ranks(2, 4)
def every_edge_belongs_to_the_owner_of_its_destination_alone(group, verdict):
    for name in GRAPHS:
        for strategy in ("edges", "heads"):
            shard = shard_graph(structure(name), group, strategy)
            owner = shard.destinations.ranges.owner(GRAPHS[name][0][1])
            verdict.same(f"{name}, {strategy}", shard.edges.sort().values, (owner == shard.rank).nonzero().flatten())


@on_ranks(3)
def local_edges_are_those_of_the_caller_in_local_numbers(group, verdict):
    order = torch.randperm(17, generator=seeded(1))
    destinations = Partition(Ranges((0, 4, 11, 17)), order)
    for name in ("encoder", "symmetric"):
        sources = destinations if name == "symmetric" else None
        shard = shard_graph(structure(name), group, sources=sources, destinations=destinations)
        own_src, own_dst = shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)
        line = torch.arange(shard.sources.size) if shard.sources.order is None else shard.sources.order
        foreign = shard.sources.places(GRAPHS[name][0][0][shard.edges])
        outside = (foreign < shard.sources.ranges.of(shard.rank).start) | (
            foreign >= shard.sources.ranges.of(shard.rank).stop
        )
        src = torch.cat([own_src, line[foreign[outside].unique()]])
        local = shard.graph.edge_index()
        verdict.same(name, torch.stack([src[local[0]], own_dst[local[1]]]), GRAPHS[name][0][:, shard.edges])
        verdict.same(f"{name}: numbers", shard.graph.global_edge_id, shard.edges[shard.graph.edge_order().long()])


@on_ranks(2, 4)
def only_the_halo_travels_and_each_row_once(group, verdict):
    for name in ("asymmetric", "encoder", "decoder"):
        shard = shard_graph(structure(name), group)
        src, dst = GRAPHS[name][0]
        src_owner, dst_owner = shard.sources.ranges.owner(src), shard.destinations.ranges.owner(dst)
        for other in range(dist.get_world_size(group)):
            for who, (reader, owner), count in (
                ("from", (shard.rank, other), shard.halo.recv_counts[other]),
                ("to", (other, shard.rank), shard.halo.send_counts[other]),
            ):
                rows = src[(dst_owner == reader) & (src_owner == owner)].unique()
                verdict.same(f"{name}: rows {who} rank {other}", count, len(rows) if reader != owner else 0)


@on_ranks(3)
def interior_edges_read_owned_sources_only(group, verdict):
    shard = shard_graph(structure("asymmetric"), group)
    verdict.same("sources", shard.interior.num_src, len(shard.sources.nodes(shard.rank)))
    verdict.same("halo", shard.boundary.num_src, shard.halo.num_received)
    verdict.same("boundary destinations", shard.boundary_dst, shard.boundary_dst.unique())
    verdict.that(bool((shard.boundary.colptr.diff() > 0).all()), "every boundary destination must read the halo")
    for part in (shard.graph, shard.interior, shard.boundary):
        part.validate()


@on_ranks(3)
def every_structure_of_a_rank_reads_attributes_in_the_order_in_which_it_computes(group, verdict):
    src, dst = GRAPHS["asymmetric"][0]
    shard = shard_graph(structure("asymmetric"), group)
    inner, outer = shard.edges[shard.parted].split([shard.interior.num_edges, shard.boundary.num_edges])
    own = shard.destinations.nodes(shard.rank)
    for name, edges, part, reading in (
        ("all", shard.edges, shard.graph, own),
        ("interior", inner, shard.interior, own),
        ("boundary", outer, shard.boundary, own[shard.boundary_dst]),
    ):
        verdict.that(part.perm is None, f"{name}: attributes must not be looked up")
        verdict.same(f"{name}: destinations", reading[part.dst.long()], dst[edges])
        verdict.same(f"{name}: numbers", part.global_edge_ids(), edges)
    verdict.same("interior: sources", shard.sources.nodes(shard.rank)[shard.interior.row.long()], src[inner])


@on_ranks(4)
def every_rank_has_its_share_of_the_cost_and_at_most_one_node_more(group, verdict):
    degree = torch.randint(0, 300, (97,), generator=seeded(4))
    dst = torch.arange(97).repeat_interleave(degree)
    graph = GraphStructure.from_edge_index(torch.stack([dst % 5, dst]), (5, 97))
    shard = shard_graph(graph, group)
    costs = everywhere(int((graph.colptr.diff().long() + 38)[shard.destinations.ranges.of(shard.rank)].sum()), group)
    verdict.that(max(costs) <= sum(costs) / 4 + 300 + 38, f"costs {costs}")
    verdict.that(len(set(everywhere(len(shard.destinations.nodes(shard.rank)), group))) > 1, "by cost, not by number")


@on_ranks(2)
def a_graph_of_one_edge_is_divided_whatever_its_strides(group, verdict):
    edge_index = torch.tensor([[4, 1, 1], [0, 1, 1]])[:, :1]  # rows of one number, three apart
    graph = GraphStructure.from_edge_index(edge_index, (5, 1))
    graph = replace(graph, row=torch.zeros(3, 3, dtype=torch.int32)[:, 0][:1])
    shard = shard_graph(graph, group)
    verdict.same("edges of all ranks", sum(everywhere(shard.graph.num_edges, group)), 1)


@on_ranks(2)
def what_is_not_divided_as_the_graph_is_is_refused(group, verdict):
    shard = shard_graph(structure("asymmetric"), group)
    own = len(shard.sources.nodes(shard.rank))
    rows = torch.ones(own + 1, 2)
    verdict.raises(ValueError, f"one row for each of the {own} sources of this rank", lambda: shard.exchange(rows))
    verdict.raises(ValueError, "x must be a tensor, got NoneType", lambda: shard.exchange(None))
    verdict.raises(ValueError, "graph must be a GraphStructure, got Tensor", lambda: shard_graph(rows, group))
    nodes = {"sources": torch.arange(3)}
    verdict.raises(
        ValueError, "must be Partitions, got Tensor", lambda: shard_graph(structure("asymmetric"), group, **nodes)
    )


@on_ranks(3)
def what_one_rank_alone_gives_wrong_is_refused_on_all(group, verdict):
    graph, is_wrong = structure("asymmetric"), dist.get_rank(group) == 1
    nodes, edges = Partition(Ranges.even(41, 3)), torch.zeros(2, 0, dtype=torch.int64)
    verdict.raises(
        ValueError,
        "rank 1: graph must be a GraphStructure, got NoneType",
        lambda: shard_graph(None if is_wrong else graph, group),
    )
    verdict.raises(
        ValueError,
        "rank 1: sources and destinations must be Partitions, got Ranges",
        lambda: shard_graph(graph, group, destinations=nodes.ranges if is_wrong else nodes),
    )
    for sources, edge_index, numbers, said in (
        (None, edges, None, "sources and destinations must be Partitions, got NoneType"),
        (nodes, [[], []], None, "edge_index must have shape [2, E], got list"),
        (nodes, edges, [], "numbers must be int64 [0], one for each edge, got list"),
    ):
        given = (sources, edge_index, numbers) if is_wrong else (nodes, edges, None if numbers is None else edges[0])
        call = partial(shard_edges, given[1], group, destinations=nodes, sources=given[0], numbers=given[2])
        verdict.raises(ValueError, f"rank 1: {said}", call)


@on_all_ranks
def what_is_no_group_of_this_rank_is_refused(group, verdict):
    graph, alone = structure("asymmetric"), dist.new_group([0])
    for wrong in (None, mesh_of(1, 2)) + (() if dist.get_rank() == 0 else (alone,)):
        verdict.raises(ValueError, "group must be a ProcessGroup that this rank", partial(shard_graph, graph, wrong))
        call = partial(shard_edges, GRAPHS["asymmetric"][0], wrong, destinations=None, sources=None)
        verdict.raises(ValueError, "group must be a ProcessGroup that this rank", call)


@on_ranks(3)
def the_order_of_programs_is_cut_with_the_nodes(group, verdict):
    graph = structure("asymmetric")
    positions = torch.randn(41, 3, generator=seeded(2))
    shard = shard_graph(graph.with_dst_schedule(positions), group)
    own = shard.destinations.nodes(shard.rank)
    expected = [node for node in morton_order(positions).tolist() if node in own]
    verdict.same("interior", own[shard.interior.dst_schedule.long()].tolist(), expected)
    reading = own[shard.boundary_dst]
    verdict.same(
        "boundary",
        reading[shard.boundary.dst_schedule.long()].tolist(),
        [node for node in expected if node in reading],
    )
    verdict.same("all", shard.graph.dst_schedule, shard.interior.dst_schedule)
    whole = shard_graph(graph.with_dst_schedule(positions), group, "heads")
    verdict.same("heads", whole.graph.dst_schedule.tolist(), morton_order(positions).tolist())


@on_ranks(3)
def rows_arrive_in_the_order_in_which_they_were_asked_for(group, verdict):
    rank, ranges = dist.get_rank(group), Ranges((0, 4, 4, 9))
    wanted = (torch.tensor([1, 3, 8]), torch.arange(9), torch.tensor([], dtype=torch.int64))[rank]
    exchange = HaloExchange.of_requests(wanted, ranges, group)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        table = torch.arange(18.0).reshape(9, 2).to(dtype)
        verdict.same(f"{dtype}", exchange(table[ranges.of(rank)]), table[wanted])
    batch = torch.randn(3, 9, 2, generator=seeded(0))
    verdict.same("batch", exchange(batch[:, ranges.of(rank)]), batch[:, wanted])
    verdict.same("no features", exchange(torch.zeros(ranges.counts[rank], 0)).shape, (len(wanted), 0))
    for own in (batch[0, ranges.of(rank)], batch[:, ranges.of(rank)], batch[:, ranges.of(rank)].flip(0)):
        appended = exchange.append(own)
        verdict.same("behind own rows", appended, torch.cat([own, exchange(own)], dim=-2))
        verdict.that(appended.is_contiguous(), "rows must lie one behind the other")


@on_ranks(4)
def gradients_are_summed_in_order_of_ranks(group, verdict):
    rank, ranges = dist.get_rank(group), Ranges((0, 3, 5, 6, 8))
    exchange = HaloExchange.of_requests(torch.arange(8), ranges, group)
    x = torch.zeros(ranges.counts[rank], 2, requires_grad=True)
    size = torch.tensor([1.0, 1e8, -1e8, 1e-3])[:, None, None]  # in another order another sum
    gradients = torch.randn(8, 2, generator=seeded(0)) * size
    exchange(x).backward(gradients[rank])
    total = torch.zeros(8, 2)
    for gradient in gradients:
        total += gradient
    verdict.same("dx", x.grad, total[ranges.of(rank)])

    x = torch.zeros(2, ranges.counts[rank], 2, requires_grad=True)
    own = torch.randn(2, ranges.counts[rank], 2, generator=seeded(rank))
    begun = own.clone()
    exchange.append(x).backward(torch.cat([begun, gradients[rank].expand(2, 8, 2)], dim=1))
    for gradient in gradients:
        own += gradient[ranges.of(rank)]
    verdict.same("dx behind own rows", x.grad, own)

    x.grad = None
    with without_default_device():
        compiled = torch.compile(exchange.append, fullgraph=True, backend="aot_eager")(x)
        compiled.backward(torch.cat([begun, gradients[rank].expand(2, 8, 2)], dim=1))
    verdict.same("dx behind own rows, compiled", x.grad, own)


@on_ranks(2)
def rows_are_waited_for_once(group, verdict):
    exchange = HaloExchange.of_requests(torch.tensor([0, 1]), Ranges((0, 1, 2)), group)
    pending = exchange.start(torch.ones(1, 2))
    pending.wait()
    for again in (pending.wait, pending.joined):
        verdict.raises(ValueError, "rows must be waited for once, got a second wait: start an exchange", again)


@on_ranks(2)
def anomaly_detection_finds_nothing_in_rows_on_their_way(group, verdict):
    exchange = HaloExchange.of_requests(torch.arange(2000), Ranges((0, 1000, 2000)), group)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)  # fills memory with NaN before anything arrives
        with torch.autograd.detect_anomaly():
            for travel in (exchange, exchange.append):
                x = torch.ones(1000, 16, requires_grad=True)
                travel(x).square().sum().backward()
                verdict.that(bool(x.grad.isfinite().all()), "gradients must be finite")
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


@on_ranks(2)
def a_second_derivative_raises(group, verdict):
    exchange = HaloExchange.of_requests(torch.tensor([0, 1]), Ranges((0, 1, 2)), group)
    x = torch.ones(1, 2, requires_grad=True)
    for travel in (exchange, exchange.append):
        (gradient,) = torch.autograd.grad(travel(x).square().sum(), x, create_graph=True)
        verdict.raises(RuntimeError, "once_differentiable", lambda gradient=gradient: gradient.sum().backward())


@on_ranks(3)
def what_differs_between_ranks_is_found_before_anything_travels(group, verdict):
    rank, graph = dist.get_rank(group), structure("asymmetric")
    other = replace(graph, row=graph.row.flip(0)) if rank == 1 else graph
    verdict.raises(ValueError, "graph must be the same on all ranks, got", lambda: shard_graph(other, group))
    verdict.raises(ValueError, "on rank 1 and", lambda: shard_graph(other, group))
    strategy = "heads" if rank == 2 else "edges"
    verdict.raises(
        ValueError,
        "strategy must be the same on all ranks, got 'heads' on rank 2",
        lambda: shard_graph(graph, group, strategy),
    )
    cut = Partition(Ranges((0, 10 + (rank == 0), 20, 41)))
    verdict.raises(
        ValueError, "destinations must be the same on all ranks", lambda: shard_graph(graph, group, destinations=cut)
    )
    config = {"seed": 0, "model": {"channels": 8 if rank else 16}}
    verdict.raises(ValueError, "on ranks 1, 2 and", lambda: check_same(config, group))
    number = {"rate": 1.0 if rank else 1}
    verdict.raises(ValueError, "got 1.0 on ranks 1, 2 and 1 on rank 0", lambda: check_same(number, group))
    missing = {"rate": None} if rank else {}
    verdict.raises(ValueError, "None on ranks 1, 2 and no such value on rank 0", lambda: check_same(missing, group))
    check_same({"seed": 0, "rate": float("nan")}, group)


@on_ranks(3)
def what_does_not_fit_is_refused_on_every_rank(group, verdict):
    rank, graph = dist.get_rank(group), structure("encoder")
    wrong = Partition(Ranges.even(17, 2))
    verdict.raises(ValueError, "strategy must be one of edges, heads", lambda: shard_graph(graph, group, "nodes"))
    verdict.raises(
        ValueError, "divided among 3 ranks, got a partition of 2", lambda: shard_graph(graph, group, destinations=wrong)
    )
    wrong = Partition(Ranges.even(18, 3))
    verdict.raises(
        ValueError, "must be a partition of 41 nodes, got one of 18", lambda: shard_graph(graph, group, sources=wrong)
    )
    parts = {"sources": Partition(Ranges.even(41, 3)), "destinations": Partition(Ranges.even(17, 3))}
    edges = torch.tensor([[0, 1], [0, 16]])[:, : 2 - (rank > 0)] if rank < 2 else torch.zeros(2, 0, dtype=torch.int64)
    stray = "ranks 0, 1: every edge must end in a node of the rank that holds it, got one into 16, which rank 2 owns"
    verdict.raises(ValueError, stray, lambda: shard_edges(edges, group, **parts))
    beyond = torch.tensor([[41], [0]]) if rank == 0 else torch.zeros(2, 0, dtype=torch.int64)
    verdict.raises(
        ValueError, "rank 0: sources must be in 0 .. 40, got 41", lambda: shard_edges(beyond, group, **parts)
    )
    none, numbers = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(int(rank == 2), dtype=torch.int64)
    verdict.raises(
        ValueError, "rank 2: numbers must be int64 [0], one", lambda: shard_edges(none, group, numbers=numbers, **parts)
    )
    some = none[0] if rank == 1 else None
    verdict.raises(
        ValueError,
        "whether numbers are given must be the same on all ranks, got True on rank 1",
        lambda: shard_edges(none, group, numbers=some, **parts),
    )
    verdict.raises(ValueError, "edge_index must be int32 or int64", lambda: shard_edges(none.float(), group, **parts))
    flat = torch.zeros(4, dtype=torch.int64)
    verdict.raises(ValueError, "edge_index must have shape [2, E]", lambda: shard_edges(flat, group, **parts))


@on_ranks(4)
def one_bad_loss_stops_every_rank(group, verdict):
    rank = dist.get_rank(group)
    check_finite(torch.tensor(1.0), 7, group)
    loss = torch.tensor(float("nan") if rank == 2 else 1.0)
    verdict.raises(
        FloatingPointError, "rank 2: the loss must stay finite, got nan at step 7", lambda: check_finite(loss, 7, group)
    )
    problem = f"trouble on {rank}" if rank in (1, 3) else None
    verdict.raises(OSError, "ranks 1, 3: trouble on 1", lambda: raise_on_all_ranks(problem, group, OSError))
