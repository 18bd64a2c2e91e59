"""Checks on ranks: attention of a divided graph is that of the whole graph."""

from functools import partial

import torch
import torch.distributed as dist

from anemoi_gt import AttentionConfig
from anemoi_gt.distributed import (
    HaloExchange,
    Partition,
    Ranges,
    attend_after_exchange,
    attend_by_heads,
    attend_overlapped,
    halo,
    heads,
    shard_edges,
    shard_graph,
    start_exchange,
)
from anemoi_gt.distributed import halo_attention as sharded_attention
from anemoi_gt.distributed.heads import head_ranges
from anemoi_gt.distributed.model_shard import ShardedGraph
from anemoi_gt.nn import GraphTransformerProcessorBlock
from distributed.problems import (
    CHANNELS,
    EDGE_DIM,
    GRAPHS,
    HEADS,
    WAYS,
    Problem,
    attend_whole,
    make_problem,
    part_of,
    run,
    run_sharded,
    run_whole,
)
from distributed.ranks import on_ranks, seeded, without_default_device

CONFIG = AttentionConfig(backend="torch")


def compare(verdict, problem, group, way, label="", **partitions):
    """Note where a rank's part of the divided run is not that of the run on one device."""
    whole = run_whole(problem)
    sharded, shard = run_sharded(problem, group, way, **partitions)
    for key, expected in part_of(whole, shard).items():
        verdict.close(f"{label} {way}: {key}", sharded[key], expected)


def each_graph(group, verdict, way):
    for name in GRAPHS:
        compare(verdict, make_problem(name), group, way, name)


@on_ranks(2, 3, 4)
def outputs_loss_and_gradients_are_those_of_one_device_with_overlap(group, verdict):
    each_graph(group, verdict, "edges, overlapped")


@on_ranks(2, 3, 4)
def outputs_loss_and_gradients_are_those_of_one_device_without_overlap(group, verdict):
    each_graph(group, verdict, "edges, after exchange")


@on_ranks(2, 3, 4)
def outputs_loss_and_gradients_are_those_of_one_device_by_heads(group, verdict):
    each_graph(group, verdict, "heads")


@on_ranks(3)
def float32_agrees_to_rounding(group, verdict):
    for name in ("asymmetric", "encoder", "decoder"):
        for way in WAYS:
            compare(verdict, make_problem(name, torch.float32), group, way, name)


@on_ranks(2, 4)
def a_batch_of_three_is_three_runs(group, verdict):
    for name in ("asymmetric", "isolated", "one_end"):
        for way in WAYS:
            compare(verdict, make_problem(name, batch=(3,)), group, way, name)


@on_ranks(2)
def attributes_of_each_sample_travel_too(group, verdict):
    problem = make_problem("encoder", batch=(3,))
    problem.edge_attr = torch.randn(3, *problem.edge_attr.shape, dtype=torch.float64)
    whole = run_whole(problem)
    for way in WAYS:
        strategy, attend = WAYS[way]
        shard = shard_graph(problem.graph, group, strategy)
        own_src, own_dst = shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)
        attr = problem.edge_attr[:, shard.edges].requires_grad_()
        out = problem.layer(
            problem.x_src[:, own_src], problem.x_dst[:, own_dst], attr, partial(attend, shard, config=CONFIG)
        )
        ((out - problem.target[:, own_dst]).square().sum() / problem.graph.num_dst).backward()
        verdict.close(f"{way}: out", out.detach(), whole["out"][:, own_dst])
        verdict.close(f"{way}: edge_attr", attr.grad, whole["edge_attr"][:, shard.edges])


@on_ranks(2, 4)
def one_set_of_nodes_gets_the_gradients_of_both_its_roles(group, verdict):
    for name in ("asymmetric", "symmetric"):
        for way in WAYS:
            compare(verdict, make_problem(name, same_nodes=True), group, way, name)


@on_ranks(3, 4)
def any_cut_of_any_order_of_the_nodes_will_do(group, verdict):
    ranks = dist.get_world_size(group)
    problem = make_problem("encoder")
    orders = [torch.randperm(size, generator=seeded(size)) for size in (41, 17)]
    sources = Partition(Ranges((*(0, 3, 3, 30, 41)[:ranks], 41)), orders[0])  # the second rank owns no source
    destinations = Partition(Ranges((*(0, 0, 12, 13, 17)[:ranks], 17)), orders[1])  # the first no destination
    for way in WAYS:
        compare(verdict, problem, group, way, sources=sources, destinations=destinations)


@on_ranks(4)
def results_repeat_bit_by_bit(group, verdict):
    problem = make_problem("asymmetric", torch.float32, batch=(2,))
    for way in WAYS:
        first, second = (run_sharded(problem, group, way)[0] for _ in range(2))
        for key in first:
            verdict.same(f"{way}: {key}", second[key], first[key])


@on_ranks(3)
def a_rank_may_hold_nothing_but_its_own_edges(group, verdict):
    for name in ("asymmetric", "encoder", "isolated"):
        problem = make_problem(name)
        whole, rank = run_whole(problem), dist.get_rank(group)
        parts = [Partition(Ranges.even(size, 3)) for size in (problem.graph.num_src, problem.graph.num_dst)]
        own = (parts[1].ranges.owner(GRAPHS[name][0][1]) == rank).nonzero().flatten()
        shard = shard_edges(GRAPHS[name][0][:, own], group, sources=parts[0], destinations=parts[1])
        own_src, own_dst = (part.nodes(rank) for part in parts)
        x_src = problem.x_src[own_src].requires_grad_()
        attr = problem.edge_attr[own][shard.edges].requires_grad_()
        out = problem.layer(x_src, problem.x_dst[own_dst], attr, partial(attend_overlapped, shard, config=CONFIG))
        ((out - problem.target[own_dst]).square().sum() / problem.graph.num_dst).backward()
        verdict.close(f"{name}: out", out.detach(), whole["out"][own_dst])
        verdict.close(f"{name}: x_src", x_src.grad, whole["x_src"][own_src])
        verdict.close(f"{name}: edge_attr", attr.grad, whole["edge_attr"][own][shard.edges])


@on_ranks(2, 3)
def dropout_drops_what_one_device_drops(group, verdict):
    problem = make_problem("asymmetric", batch=(2,))
    for way, (strategy, attend) in WAYS.items():
        torch.manual_seed(11)
        call = partial(attend_whole, problem.graph, dropout_p=0.5, config=CONFIG)
        whole, _, expected = run(problem, call, 1.0)
        shard = shard_graph(problem.graph, group, strategy)
        torch.manual_seed(11)
        own = part_of(vars(problem), shard)
        call = partial(attend, shard, dropout_p=0.5, config=CONFIG)
        out, _, gradients = run(Problem(**own), call, 1.0)
        verdict.close(f"{way}: out", out, part_of({"out": whole}, shard)["out"])
        for name, gradient in part_of(expected, shard).items():
            verdict.close(f"{way}: {name}", gradients[name], gradient)


@on_ranks(2)
def edges_may_come_without_attributes_or_embedded(group, verdict):
    problem = make_problem("asymmetric")
    shard = shard_graph(problem.graph, group)
    own_src, own_dst = shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)
    embedded = torch.randn(problem.graph.num_edges, HEADS, CHANNELS, dtype=torch.float64)
    query, key_value = problem.layer.heads(problem.layer.query(problem.x_dst)), problem.layer.key_value
    for attributes in (None, embedded):
        whole = attend_whole(problem.graph, query, problem.x_src, key_value, attributes, config=CONFIG)
        for attend in (attend_overlapped, attend_after_exchange):
            own = None if attributes is None else attributes[shard.edges]
            part = attend(shard, query[own_dst], problem.x_src[own_src], key_value, own, config=CONFIG)
            verdict.close(attend.__name__, part.detach(), whole[own_dst].detach())


def attend_what_was_started(shard, query, x_src, *layer, **options):
    """Attention with its messages sent on their own, as blocks send them."""
    return attend_after_exchange(shard, query, start_exchange(shard, x_src), *layer, **options)


@on_ranks(2, 4)
def a_layer_compiles_as_one_graph_and_gives_the_same(group, verdict):
    torch.compiler.reset()  # what was compiled for fewer ranks has other sizes
    problem = make_problem("encoder", batch=(2,))
    problem.edge_attr.requires_grad_()
    for way, (strategy, attend) in (WAYS | {"started before": ("edges", attend_what_was_started)}).items():
        shard = shard_graph(problem.graph, group, strategy)
        own_src, own_dst = shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)
        attend = partial(attend, shard, config=CONFIG)

        def step(x_src, x_dst, edge_attr, attend=attend):
            return problem.layer(x_src, x_dst, edge_attr, attend).square().sum()

        results = []
        with without_default_device():
            for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
                x_src = problem.x_src[:, own_src].requires_grad_()
                attr = problem.edge_attr.detach()[shard.edges].requires_grad_()
                loss = function(x_src, problem.x_dst[:, own_dst], attr)
                loss.backward()
                results.append((loss.detach(), x_src.grad, attr.grad))
        for name, eager, compiled in zip(("loss", "x_src", "edge_attr"), *results, strict=True):
            verdict.close(f"{way}: {name}", compiled, eager)


@on_ranks(3)
def interior_edges_are_attended_while_rows_travel_forward_and_backward(group, verdict):
    events = []

    def note(name, function):
        def noting(*arguments, **options):
            events.append(name)
            return function(*arguments, **options)

        return noting

    class Noted(torch.autograd.Function):
        """The interior's attention, by when its gradient is computed."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            events.append("interior backward")
            return grad

    problem = make_problem("asymmetric")
    shard = shard_graph(problem.graph, group)
    verdict.that(shard.halo.num_received > 0, "the case must have a halo")
    own_src, own_dst = shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)
    x_src = problem.x_src[own_src].requires_grad_()
    original = sharded_attention.edge_attention

    def attention(query, key, value, graph, *arguments, **options):
        events.append("interior" if graph is shard.interior else "boundary")
        out, lse = original(query, key, value, graph, *arguments, **options)
        return (Noted.apply(out) if graph is shard.interior else out), lse

    names = {"start": "leave", "send_back": "gradients leave", "sum_back": "gradients arrive"}
    kept = {name: getattr(HaloExchange, name) for name in names}
    wait = halo.PendingExchange.wait
    try:
        sharded_attention.edge_attention = attention
        halo.PendingExchange.wait = note("arrive", wait)
        for name, event in names.items():
            setattr(HaloExchange, name, note(event, kept[name]))
        attend = partial(attend_overlapped, shard, config=CONFIG)
        problem.layer(x_src, problem.x_dst[own_dst], problem.edge_attr[shard.edges], attend).sum().backward()
    finally:
        sharded_attention.edge_attention = original
        halo.PendingExchange.wait = wait
        for name, function in kept.items():
            setattr(HaloExchange, name, function)
    forward = ["leave", "interior", "arrive", "boundary"]
    verdict.same("order", events, [*forward, "gradients leave", "interior backward", "gradients arrive"])


@on_ranks(3)
def a_block_computes_what_needs_no_halo_while_it_travels_forward_and_backward(group, verdict):
    events = []
    problem = make_problem("asymmetric")
    shard = shard_graph(problem.graph, group)
    width, own = HEADS * CHANNELS, shard.sources.nodes(shard.rank)
    torch.manual_seed(0)
    sizes = {"in_channels": width, "out_channels": width, "hidden_dim": width, "num_heads": HEADS}
    block = GraphTransformerProcessorBlock(**sizes, edge_dim=EDGE_DIM, config=CONFIG).to(problem.x_src)

    def noting(name):
        def hook(module, inputs, out):
            events.append(name)
            out.register_hook(lambda gradient: events.append(f"{name} backward"))

        return hook

    def note(name, function):
        def noting(*arguments):
            events.append(name)
            return function(*arguments)

        return noting

    for name in ("lin_query", "lin_self", "lin_key"):
        getattr(block, name).register_forward_hook(noting(name))
    names = {"send": "leave", "send_back": "gradients leave", "sum_back": "gradients arrive"}
    kept, wait = {name: getattr(HaloExchange, name) for name in names}, halo.PendingExchange.wait
    try:
        halo.PendingExchange.wait = note("arrive", wait)
        for name, event in names.items():
            setattr(HaloExchange, name, note(event, kept[name]))
        x = torch.randn(problem.graph.num_src, width, generator=seeded(0)).to(problem.x_src)
        out = block(x[own].requires_grad_(), ShardedGraph(shard), problem.edge_attr[shard.edges])
        out.sum().backward()
    finally:
        halo.PendingExchange.wait = wait
        for name, function in kept.items():
            setattr(HaloExchange, name, function)
    verdict.same("forward", events[:5], ["leave", "lin_query", "lin_self", "arrive", "lin_key"])
    backward = ["lin_key backward", "gradients leave", "lin_self backward", "lin_query backward", "gradients arrive"]
    verdict.same("backward", events[5:], backward)


@on_ranks(3)
def under_strategy_heads_attributes_travel_raw(group, verdict):
    problem = make_problem("encoder")
    shard = shard_graph(problem.graph, group, "heads")
    own_src, own_dst = shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)
    sent = []
    functional = halo.functional

    class Counting:
        wait_tensor = functional.wait_tensor

        @staticmethod
        def all_to_all_single(message, *arguments):
            sent.append(message.numel())
            return functional.all_to_all_single(message, *arguments)

    try:
        halo.functional = heads.functional = Counting
        attend = partial(attend_by_heads, shard, config=CONFIG)
        problem.layer(problem.x_src[own_src], problem.x_dst[own_dst], problem.edge_attr[shard.edges], attend)
    finally:
        halo.functional = heads.functional = functional
    inner, own_heads = HEADS * CHANNELS, head_ranges(HEADS, 3).counts[shard.rank]
    expected = {
        "key and value": len(own_src) * 2 * inner,
        "query": len(own_dst) * inner,
        "attributes, to each rank": 3 * len(shard.edges) * EDGE_DIM,
        "out": problem.graph.num_dst * own_heads * CHANNELS,
    }
    verdict.same("numbers sent", sent, list(expected.values()))


@on_ranks(2)
def under_autocast_rows_travel_in_its_dtype_and_the_result_is_that_of_one_device(group, verdict):
    problem = make_problem("asymmetric", torch.float32)
    own_src = shard_graph(problem.graph, group).sources.nodes(dist.get_rank(group))
    send, seen = HaloExchange.send, []

    def noting(exchange, rows):
        seen.append(rows.dtype)
        return send(exchange, rows)

    device_type = problem.x_src.device.type
    try:
        HaloExchange.send = noting
        with torch.autocast(device_type, dtype=torch.bfloat16):
            whole = problem.layer(
                problem.x_src, problem.x_dst, problem.edge_attr, partial(attend_whole, problem.graph, config=CONFIG)
            )
            for attend in (attend_overlapped, attend_after_exchange):
                shard = shard_graph(problem.graph, group)
                call = partial(attend, shard, config=CONFIG)
                out = problem.layer(
                    problem.x_src[own_src], problem.x_dst[own_src], problem.edge_attr[shard.edges], call
                )
                verdict.close(attend.__name__, out.detach().bfloat16(), whole.detach()[own_src].bfloat16())
    finally:
        HaloExchange.send = send
    verdict.same("dtypes", seen, [torch.bfloat16] * 2)


@on_ranks(2)
def a_seed_of_the_caller_is_that_of_every_way_by_edges(group, verdict):
    problem = make_problem("asymmetric")
    shard = shard_graph(problem.graph, group)
    own = shard.sources.nodes(shard.rank)
    results = []
    for attend, seed in ((attend_overlapped, 7), (attend_after_exchange, 7), (attend_overlapped, 8)):
        call = partial(attend, shard, config=CONFIG, dropout_p=0.5, dropout_seed=torch.tensor([seed]))
        out = problem.layer(problem.x_src[own], problem.x_dst[own], problem.edge_attr[shard.edges], call)
        results.append(out.detach())
    verdict.close("overlapped", results[0], results[1])
    verdict.that(not torch.equal(results[0], results[2]), "another seed drops the same")


@on_ranks(3)
def what_cannot_run_says_why(group, verdict):
    problem = make_problem("asymmetric")
    edges, heads = (shard_graph(problem.graph, group, strategy) for strategy in ("edges", "heads"))
    x, attr = problem.x_src[heads.sources.nodes(heads.rank)], problem.edge_attr[heads.edges]
    layer = problem.layer

    def two_heads(x):
        return x.unflatten(-1, (2, 3)), x.unflatten(-1, (2, 3))

    def by_heads(**options):
        return attend_by_heads(heads, layer.query(x).unflatten(-1, (HEADS, CHANNELS)), x, layer.key_value, **options)

    def overlapped(**options):
        return attend_overlapped(edges, layer.query(x).unflatten(-1, (HEADS, CHANNELS)), x, layer.key_value, **options)

    weight = {"edge_weight": layer.edge.weight}
    few = "got 2 heads and 3 ranks"
    verdict.raises(ValueError, few, lambda: attend_by_heads(heads, two_heads(x)[0], x, two_heads))
    verdict.raises(ValueError, "must come raw", lambda: by_heads(edge_attr=attr))
    verdict.raises(ValueError, "one row for each of the", lambda: overlapped(edge_attr=attr[1:], **weight))
    verdict.raises(
        ValueError, "edge_attr must have one row for each", lambda: by_heads(edge_attr=problem.edge_attr, **weight)
    )
    for shard, attend in ((edges, attend_overlapped), (edges, attend_after_exchange), (heads, attend_by_heads)):
        query = layer.query(problem.x_src).unflatten(-1, (HEADS, CHANNELS))
        own = query[shard.destinations.nodes(shard.rank)]
        for nodes, name in (((query, x), "query"), ((own, problem.x_src), "x_src")):
            call = partial(attend, shard, *nodes, layer.key_value)
            verdict.raises(ValueError, f"{name} must have one row for each of the {len(x)} ", call)
    pending, another = start_exchange(edges, x), shard_graph(problem.graph, group)
    for attend in (attend_overlapped, attend_after_exchange):
        call = partial(attend, another, two_heads(x)[0], pending, two_heads)
        verdict.raises(ValueError, "x_src must be started on the shard that attends, got rows started on another", call)
    call = partial(attend_by_heads, heads, two_heads(x)[0], pending, two_heads)
    verdict.raises(ValueError, "x_src must be rows under strategy 'heads', got PendingExchange", call)
    pending.wait()
    verdict.raises(ValueError, "shard must be one of strategy 'edges', got HeadShard", lambda: start_exchange(heads, x))
    layer.float()
    x, triton = x.float(), {"dropout_p": 0.5, "config": AttentionConfig(backend="triton")}
    verdict.raises(ValueError, "'triton', whose kernels count heads from 0", lambda: by_heads(**triton))


@on_ranks(2)
def the_kernels_agree_with_one_device(group, verdict):
    """Interpreted where there is no GPU."""
    problem = make_problem("twenty", torch.float32)
    whole = run_whole(problem)
    sharded, shard = run_sharded(problem, group, "edges, overlapped", backend="triton")
    verdict.that(shard.interior.num_edges and shard.boundary.num_edges, "both parts must have edges")
    for key, expected in part_of(whole, shard).items():
        verdict.close(key, sharded[key], expected)
