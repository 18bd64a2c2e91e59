"""Checks on ranks: attention of a sharded graph equals attention of the whole graph."""

from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

from anemoi_gt.distributed import (
    HaloExchange,
    Partition,
    PendingExchange,
    Ranges,
    shard_edges,
    shard_graph,
)
from anemoi_gt.nn import GraphTransformerProcessorBlock
from distributed import problems
from distributed.problems import (
    CHANNELS,
    CONFIG,
    EDGE_DIM,
    GRAPHS,
    HEADS,
    attend_sharded,
    attend_whole,
    make_problem,
)
from distributed.ranks import on_ranks, seeded, without_default_device


def compare(verdict, label, problem, group, shard=None, **options):
    """Compare the results of a rank with one device."""
    torch.manual_seed(11)
    whole = problems.run_whole(problem, **options)
    torch.manual_seed(11)
    sharded, shard = problems.run_sharded(problem, group, shard, **options)
    for key, expected in problems.part_of(whole, shard).items():
        verdict.close(f"{label}: {key}", sharded[key], expected)


@on_ranks(1, 2, 3, 4)
def output_loss_and_gradients_match_one_device(group, verdict):
    for name in GRAPHS:
        compare(verdict, name, make_problem(name), group)


@on_ranks(2, 3)
def results_match_one_device_for_any_dtype_batch_node_set_and_dropout(group, verdict):
    cases = [
        ("encoder", {"dtype": torch.float32}),
        ("asymmetric", {"batch": (3,)}),
        ("isolated", {"batch": (3,)}),
        ("encoder", {"batch": (3,), "attr_batch": (3,)}),
        ("asymmetric", {"same_nodes": True}),
        ("symmetric", {"same_nodes": True}),
    ]
    for name, options in cases:
        compare(verdict, f"{name} {options}", make_problem(name, **options), group)
    compare(verdict, "dropout", make_problem("asymmetric", batch=(2,)), group, dropout_p=0.5)


@on_ranks(3, 4)
def results_match_one_device_for_any_partition_and_node_order(group, verdict):
    ranks = dist.get_world_size(group)
    problem = make_problem("encoder")
    orders = [torch.randperm(size, generator=seeded(size)) for size in (41, 17)]
    # the second rank owns no source, the first no destination
    source_bounds = (*(0, 3, 3, 30, 41)[:ranks], 41)
    destination_bounds = (*(0, 0, 12, 13, 17)[:ranks], 17)
    sources = Partition(Ranges(source_bounds), orders[0])
    destinations = Partition(Ranges(destination_bounds), orders[1])
    shard = shard_graph(problem.graph, group, sources=sources, destinations=destinations)
    compare(verdict, "encoder", problem, group, shard)


@on_ranks(2)
def the_kernels_agree_with_one_device(group, verdict):
    """Kernels are interpreted if there is no GPU."""
    problem = make_problem("twenty", torch.float32)
    sharded, shard = problems.run_sharded(problem, group, config=type(CONFIG)(backend="triton"))
    verdict.that(shard.halo.num_received > 0, "the case must have a halo")
    for key, expected in problems.part_of(problems.run_whole(problem), shard).items():
        verdict.close(key, sharded[key], expected)


@on_ranks(4)
def results_are_bitwise_reproducible(group, verdict):
    problem = make_problem("asymmetric", torch.float32, batch=(2,))
    first, second = (problems.run_sharded(problem, group)[0] for _ in range(2))
    for key in first:
        verdict.same(key, second[key], first[key])


@on_ranks(3)
def a_rank_may_hold_only_its_own_edges(group, verdict):
    for name in ("asymmetric", "encoder", "isolated"):
        problem = make_problem(name)
        edge_index, (num_src, num_dst) = GRAPHS[name]
        sources = Partition(Ranges.even(num_src, 3))
        destinations = Partition(Ranges.even(num_dst, 3))
        owner = destinations.ranges.owner(edge_index[1])
        local_edges = (owner == dist.get_rank(group)).nonzero().flatten()
        local_edge_index = edge_index[:, local_edges]
        shard = shard_edges(local_edge_index, group, sources=sources, destinations=destinations)
        whole = problems.run_whole(problem)
        # `shard.edges` numbers the edges that were passed, which are the local ones
        problem.edge_attr = problem.edge_attr[local_edges]
        whole["edge_attr"] = whole["edge_attr"][local_edges]
        results, _ = problems.run_sharded(problem, group, shard)
        for key, expected in problems.part_of(whole, shard).items():
            verdict.close(f"{name}: {key}", results[key], expected)


@on_ranks(2)
def edges_may_come_without_attributes_or_embedded(group, verdict):
    problem = make_problem("asymmetric")
    shard = shard_graph(problem.graph, group)
    nodes = shard.sources.nodes(shard.rank)
    query = problem.layer.query(problem.x_dst).unflatten(-1, (HEADS, CHANNELS))
    key_value = problem.layer.key_value
    embedded = torch.randn(problem.graph.num_edges, HEADS, CHANNELS, dtype=torch.float64)
    for attributes in ((), (embedded,)):
        local_attributes = [attribute[shard.edges] for attribute in attributes]
        whole = attend_whole(problem.graph, query, problem.x_src, key_value, *attributes)
        local = attend_sharded(
            shard, query[nodes], problem.x_src[nodes], key_value, *local_attributes
        )
        verdict.close(f"{len(attributes)} attributes", local.detach(), whole[nodes].detach())


@on_ranks(1, 2)
def a_layer_compiles_as_one_graph_and_gives_the_same(group, verdict):
    torch.compiler.reset()  # shards have other sizes on other numbers of ranks
    problem = make_problem("encoder", batch=(2,))
    shard = shard_graph(problem.graph, group)
    rows = problems.rows_of(shard)

    def step(x_src, x_dst, edge_attr):
        return problem.layer(x_src, x_dst, edge_attr, partial(attend_sharded, shard)).square().sum()

    results = []
    with without_default_device():
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            x_src = problem.x_src[:, rows["x_src"]].requires_grad_()
            attr = problem.edge_attr[shard.edges].requires_grad_()
            loss = function(x_src, problem.x_dst[:, rows["x_dst"]], attr)
            loss.backward()
            results.append((loss.detach(), x_src.grad, attr.grad))
    for name, eager, compiled in zip(("loss", "x_src", "edge_attr"), *results, strict=True):
        verdict.close(name, compiled, eager)


def recorded(events, name, function):
    """Wrap `function` so that each call is recorded in `events`."""

    def record(*arguments):
        events.append(name)
        return function(*arguments)

    return record


@on_ranks(3)
def a_block_computes_query_and_skip_while_the_exchange_is_pending_forward_and_backward(
    group, verdict
):
    problem = make_problem("asymmetric")
    shard = shard_graph(problem.graph, group)
    nodes = shard.sources.nodes(shard.rank)
    events = []
    width = HEADS * CHANNELS
    sizes = {"in_channels": width, "out_channels": width, "hidden_dim": width, "num_heads": HEADS}
    block = GraphTransformerProcessorBlock(**sizes, edge_dim=EDGE_DIM, config=CONFIG)
    block = block.to(problem.x_src)

    def record_both_passes(name, module, inputs, out):
        events.append(name)
        out.register_hook(lambda gradient: events.append(f"{name} backward"))

    for name in ("lin_query", "lin_self", "lin_key"):
        getattr(block, name).register_forward_hook(partial(record_both_passes, name))
    names = {"send": "send", "send_reverse": "send gradients", "scatter_add": "add gradients"}
    changes = {}
    for name, event in names.items():
        changes[name] = recorded(events, event, getattr(HaloExchange, name))
    waiting = recorded(events, "wait", PendingExchange.wait)
    with patch.multiple(HaloExchange, **changes), patch.object(PendingExchange, "wait", waiting):
        x = torch.randn(problem.graph.num_src, width, generator=seeded(0)).to(problem.x_src)
        block(x[nodes].requires_grad_(), shard, problem.edge_attr[shard.edges]).sum().backward()
    verdict.same("forward", events[:5], ["send", "lin_query", "lin_self", "wait", "lin_key"])
    backward = [
        "lin_key backward",
        "send gradients",
        "lin_self backward",
        "lin_query backward",
        "add gradients",
    ]
    verdict.same("backward", events[5:], backward)


@on_ranks(2)
def under_autocast_the_halo_has_its_dtype_and_the_result_matches_one_device(group, verdict):
    problem = make_problem("asymmetric", torch.float32)
    shard = shard_graph(problem.graph, group)
    send = HaloExchange.send
    sent_dtypes = []
    part = problems.part_of(vars(problem), shard)

    def sending(exchange, rows):
        sent_dtypes.append(rows.dtype)
        return send(exchange, rows)

    with (
        torch.autocast(problem.x_src.device.type, dtype=torch.bfloat16),
        patch.object(HaloExchange, "send", sending),
    ):
        attend = partial(attend_whole, problem.graph)
        whole = problem.layer(problem.x_src, problem.x_dst, problem.edge_attr, attend)
        attend = partial(attend_sharded, shard)
        out = problem.layer(part["x_src"], part["x_dst"], part["edge_attr"], attend)
    expected = problems.part_of({"out": whole.detach()}, shard)["out"]
    verdict.close("out", out.detach().bfloat16(), expected.bfloat16())
    verdict.same("dtypes", sent_dtypes, [torch.bfloat16])
