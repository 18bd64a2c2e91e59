"""What holds for edge attention whatever computes it, on the torch backend."""

import itertools
import logging
import re

import pytest
import torch
from support.graphs import GRAPHS
from support.oracle import make_problem, oracle
from support.run import attend, structure
from torch._dynamo.testing import CompileCounter

from anemoi_gt import AttentionConfig, GraphStructure, attention_weights, edge_attention, merge
from anemoi_gt.ops.dropout import keep_factor

TORCH = AttentionConfig(backend="torch")
F64 = {"rtol": 1e-12, "atol": 1e-12}


def problem_and_graph(name="shuffled", form="raw", dtype=torch.float64, heads=3, channels=4, edge_dim=5):
    return make_problem(GRAPHS[name], heads, channels, edge_dim, form, dtype), structure(GRAPHS[name])


def operands(problem):
    return {name: operand.clone().requires_grad_() for name, operand in problem.operands().items()}


def assert_same(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def test_isolated_destination_gets_zero_and_minus_infinity():
    problem, graph = problem_and_graph("isolated")
    out, lse = edge_attention(**problem.operands(), graph=graph, config=TORCH)
    isolated = graph.colptr.diff() == 0
    assert isolated.sum() == 4
    assert bool((out[isolated] == 0).all()) and bool(torch.isneginf(lse[isolated]).all())
    assert bool(torch.isfinite(lse[~isolated]).all())


@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
def test_order_of_the_edges_does_not_matter(form):
    problem, graph = problem_and_graph(form=form)
    shuffle = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(1))
    shuffled = structure((problem.edge_index[:, shuffle], (graph.num_src, graph.num_dst)))
    base = attend(problem, graph, "torch")
    if problem.edge_attr is not None:
        problem.edge_attr = problem.edge_attr[shuffle]
        base["dedge_attr"] = base["dedge_attr"][shuffle]
    assert_same(attend(problem, shuffled, "torch"), base, **F64)


def test_relabelled_nodes_give_relabelled_results():
    problem, graph = problem_and_graph()
    generator = torch.Generator().manual_seed(2)
    src_new = torch.randperm(graph.num_src, generator=generator)
    dst_new = torch.randperm(graph.num_dst, generator=generator)
    src, dst = problem.edge_index
    relabelled = structure((torch.stack([src_new[src], dst_new[dst]]), (graph.num_src, graph.num_dst)))
    base = attend(problem, graph, "torch")
    for name, new in (
        ("query", dst_new),
        ("grad_out", dst_new),
        ("grad_lse", dst_new),
        ("key", src_new),
        ("value", src_new),
    ):
        setattr(problem, name, torch.empty_like(getattr(problem, name)).index_copy_(0, new, getattr(problem, name)))
    moved = attend(problem, relabelled, "torch")
    for name, new in (("out", dst_new), ("lse", dst_new), ("dquery", dst_new), ("dkey", src_new), ("dvalue", src_new)):
        moved[name] = moved[name][new]
    assert_same(moved, base, **F64)


@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_two_halves_of_the_edges_merge_into_the_whole(form, dropout_p):
    problem, graph = problem_and_graph(form=form)
    sizes = (graph.num_src, graph.num_dst)
    numbers = torch.arange(graph.num_edges)
    halves = [numbers[numbers % 3 == 0], numbers[numbers % 3 != 0]]

    def run(merged):
        leaves = operands(problem)
        shared = {name: leaf for name, leaf in leaves.items() if name != "edge_attr"}

        def part(ids):
            edges = GraphStructure.from_edge_index(problem.edge_index[:, ids], sizes, global_edge_id=ids)
            attr = leaves["edge_attr"][ids] if "edge_attr" in leaves else None
            torch.manual_seed(7)
            return edge_attention(**shared, edge_attr=attr, graph=edges, dropout_p=dropout_p, config=TORCH)

        out, lse = merge(*part(halves[0]), *part(halves[1])) if merged else part(numbers)
        finite = torch.isfinite(lse)
        loss = (out * problem.grad_out).sum() + (lse * problem.grad_lse)[finite].sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return {"out": out, "lse": lse} | dict(zip(leaves, gradients, strict=True))

    assert_same(run(merged=True), run(merged=False), **F64)


def test_merge_of_two_empty_halves_is_empty_with_zero_gradients():
    out, lse = torch.zeros(2, 1, 3, requires_grad=True), torch.full((2, 1), -torch.inf, requires_grad=True)
    merged, merged_lse = merge(out, lse, out, lse)
    assert bool((merged == 0).all()) and bool(torch.isneginf(merged_lse).all())
    gradients = torch.autograd.grad(merged.sum(), (out, lse))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def test_merge_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"both lse \[..., H\]"):
        merge(torch.zeros(2, 1, 3), torch.zeros(2), torch.zeros(2, 1, 3), torch.zeros(2))


def test_raw_attributes_equal_their_embedding():
    problem, graph = problem_and_graph()
    embedded = (problem.edge_attr @ problem.edge_weight.T + problem.edge_bias).view(-1, *problem.query.shape[1:])
    nodes = {"query": problem.query, "key": problem.key, "value": problem.value}
    raw = edge_attention(**problem.operands(), graph=graph, config=TORCH)
    torch.testing.assert_close(edge_attention(**nodes, graph=graph, edge_attr=embedded, config=TORCH), raw, **F64)


@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
@pytest.mark.parametrize("attributes_per_sample", [False, True])
def test_a_batch_equals_its_samples(form, attributes_per_sample):
    samples = [make_problem(GRAPHS["shuffled"], 3, 4, 5, form, torch.float64, seed) for seed in range(3)]
    graph = structure(GRAPHS["shuffled"])
    for sample in samples[1:]:
        sample.edge_weight, sample.edge_bias = samples[0].edge_weight, samples[0].edge_bias
        if not attributes_per_sample:
            sample.edge_attr = samples[0].edge_attr
    results = [attend(sample, graph, "torch") for sample in samples]
    batch = make_problem(GRAPHS["shuffled"], 3, 4, 5, form, torch.float64)
    for name in ("query", "key", "value", "grad_out", "grad_lse"):
        setattr(batch, name, torch.stack([getattr(sample, name) for sample in samples]))
    if attributes_per_sample and form != "none":
        batch.edge_attr = torch.stack([sample.edge_attr for sample in samples])
    summed = {"dedge_weight", "dedge_bias"} | (set() if attributes_per_sample else {"dedge_attr"})
    expected = {
        name: sum(result[name] for result in results) if name in summed else torch.stack([r[name] for r in results])
        for name in results[0]
    }
    assert_same(attend(batch, graph, "torch"), expected, **F64)


def test_disjoint_structure_equals_the_graphs_one_by_one():
    names = ("shuffled", "isolated", "no_edges")
    problems = [
        make_problem(GRAPHS[name], 2, 4, 3, "raw_without_bias", torch.float64, seed) for seed, name in enumerate(names)
    ]
    for problem in problems:
        problem.edge_weight = problems[0].edge_weight
    graphs = [structure(GRAPHS[name]) for name in names]
    parts = [
        edge_attention(**problem.operands(), graph=graph, config=TORCH)
        for problem, graph in zip(problems, graphs, strict=True)
    ]
    joined = {
        name: torch.cat([getattr(problem, name) for problem in problems])
        for name in ("query", "key", "value", "edge_attr")
    }
    out, lse = edge_attention(
        **joined, edge_weight=problems[0].edge_weight, graph=GraphStructure.disjoint(graphs), config=TORCH
    )
    torch.testing.assert_close(out, torch.cat([part[0] for part in parts]), **F64)
    torch.testing.assert_close(lse, torch.cat([part[1] for part in parts]), **F64)


@pytest.mark.parametrize("form", ["raw", "raw_without_bias", "embedded", "none"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("batch", [None, 2])
def test_gradients_pass_gradcheck(form, dropout_p, batch):
    problem, graph = problem_and_graph("isolated", form, heads=2, channels=2, edge_dim=2)
    leaves = operands(problem)
    if batch is not None:
        for name in ("query", "key", "value"):
            leaves[name] = torch.stack([leaves[name].detach() * (b + 1) for b in range(batch)]).requires_grad_()

    def function(*values):
        torch.manual_seed(3)
        named = dict(zip(leaves, values, strict=True))
        out, lse = edge_attention(**named, graph=graph, dropout_p=dropout_p, config=TORCH)
        return out, torch.where(torch.isfinite(lse), lse, 0.0)

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


def test_second_derivative_raises_with_the_remedy():
    problem, graph = problem_and_graph()
    leaves = operands(problem)
    out, _ = edge_attention(**leaves, graph=graph, config=TORCH)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaves["query"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        gradient.sum().backward()


def test_only_asked_gradients_are_computed():
    problem, graph = problem_and_graph()
    for wanted in problem.operands():
        leaves = {name: operand.clone().requires_grad_(name == wanted) for name, operand in problem.operands().items()}
        out, _ = edge_attention(**leaves, graph=graph, config=TORCH)
        out.backward(problem.grad_out)
        assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [wanted]
        problem_out_only = make_problem(GRAPHS["shuffled"], 3, 4, 5, "raw", torch.float64)
        problem_out_only.grad_lse.zero_()
        torch.testing.assert_close(leaves[wanted].grad, oracle(problem_out_only)["d" + wanted], **F64)


def test_gradient_of_lse_alone_is_right():
    problem, graph = problem_and_graph()
    problem.grad_out.zero_()
    leaves = operands(problem)
    _, lse = edge_attention(**leaves, graph=graph, config=TORCH)
    finite = torch.isfinite(lse)
    lse[finite].backward(problem.grad_lse[finite])
    expected = oracle(problem)
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, expected["d" + name], **F64)


def test_source_side_is_built_in_passing_and_only_for_gradients(monkeypatch):
    problem, graph = problem_and_graph()
    built = []
    original = GraphStructure.with_reverse
    monkeypatch.setattr(GraphStructure, "with_reverse", lambda self: built.append(self) or original(self))
    edge_attention(**problem.operands(), graph=graph, config=TORCH)
    with torch.no_grad():
        edge_attention(**operands(problem), graph=graph, config=TORCH)
    assert not built
    edge_attention(**operands(problem), graph=graph, config=TORCH)
    assert built


def test_scale_defaults_to_one_over_root_channels():
    problem, graph = problem_and_graph()
    default = edge_attention(**problem.operands(), graph=graph, config=TORCH)
    torch.testing.assert_close(default, edge_attention(**problem.operands(), graph=graph, scale=0.5, config=TORCH))


def test_same_inputs_give_the_same_bits():
    problem, graph = problem_and_graph("hub", dtype=torch.float32, heads=4, channels=16, edge_dim=11)
    first = attend(problem, graph, "torch")
    for _ in range(3):
        assert all(torch.equal(first[name], tensor) for name, tensor in attend(problem, graph, "torch").items())


def test_strided_and_expanded_inputs_equal_contiguous_ones():
    problem, graph = problem_and_graph(dtype=torch.float32)
    expected = attend(problem, graph, "torch")
    for name in ("query", "key", "value"):
        head_major = getattr(problem, name).permute(1, 2, 0).contiguous().permute(2, 0, 1)
        assert not head_major.is_contiguous()
        setattr(problem, name, head_major)
    problem.edge_attr = problem.edge_attr.T.contiguous().T
    assert_same(attend(problem, graph, "torch"), expected, rtol=0, atol=0)
    expanded = problem.query[:1].expand_as(problem.query)
    out, _ = edge_attention(expanded, problem.key, problem.value, graph, config=TORCH)
    torch.testing.assert_close(
        out, edge_attention(expanded.clone(), problem.key, problem.value, graph, config=TORCH)[0]
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precision_casts_in_and_the_output_back(precision):
    problem, graph = problem_and_graph(dtype=torch.float32)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    config = AttentionConfig("torch", precision)
    out, lse = edge_attention(**problem.operands(), graph=graph, config=config)
    cast_in, cast_lse = edge_attention(**problem.to(dtype).operands(), graph=graph, config=TORCH)
    assert out.dtype == torch.float32 and lse.dtype == torch.float32
    assert torch.equal(out, cast_in.float()) and torch.equal(lse, cast_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_chooses_the_dtype_and_gradients_return_to_that_of_the_leaves(dtype):
    problem, graph = problem_and_graph(dtype=torch.float32)
    leaves = operands(problem)
    with torch.autocast("cpu", dtype=dtype):
        out, lse = edge_attention(**leaves, graph=graph, config=TORCH)
    assert out.dtype == dtype and lse.dtype == torch.float32
    out.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves.values())
    assert torch.equal(out, edge_attention(**problem.to(dtype).operands(), graph=graph, config=TORCH)[0])


def test_autocast_leaves_float64_alone():
    problem, graph = problem_and_graph()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = edge_attention(**problem.operands(), graph=graph, config=TORCH)
    assert out.dtype == lse.dtype == torch.float64


def test_mixed_dtypes_follow_query():
    problem, graph = problem_and_graph(dtype=torch.float32)
    mixed = problem.operands() | {"query": problem.query.bfloat16(), "edge_attr": problem.edge_attr.double()}
    out, _ = edge_attention(**mixed, graph=graph, config=TORCH)
    same = edge_attention(**problem.to(torch.bfloat16).operands(), graph=graph, config=TORCH)[0]
    assert out.dtype == torch.bfloat16 and torch.equal(out, same)


@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
def test_attention_weights_rebuild_the_output_in_the_callers_edge_order(form):
    problem, graph = problem_and_graph(form=form)
    edges = {name: operand for name, operand in problem.operands().items() if name.startswith("edge")}
    p = attention_weights(problem.query, problem.key, graph, **edges)
    src, dst = problem.edge_index
    value = problem.value[src]
    if form == "raw":
        value = value + (problem.edge_attr @ problem.edge_weight.T + problem.edge_bias).view_as(value)
    elif form == "embedded":
        value = value + problem.edge_attr
    out = torch.zeros_like(problem.query).index_add(0, dst, p[..., None] * value)
    torch.testing.assert_close(out, edge_attention(**problem.operands(), graph=graph, config=TORCH)[0], **F64)


def test_attention_weights_of_a_batch_equal_those_of_its_samples():
    problem, graph = problem_and_graph()
    query = torch.stack([problem.query, -problem.query])
    key = torch.stack([problem.key, problem.key * 2])
    p = attention_weights(query, key, graph, problem.edge_attr, problem.edge_weight)
    for b in range(2):
        torch.testing.assert_close(
            p[b], attention_weights(query[b], key[b], graph, problem.edge_attr, problem.edge_weight), **F64
        )


def test_an_infinite_logit_stays_in_its_destination():
    problem, graph = problem_and_graph(dtype=torch.float32)
    problem.query[3] = torch.inf
    result = attend(problem, graph, "torch")
    others = torch.arange(graph.num_dst) != 3
    assert bool(torch.isfinite(result["out"][others]).all()) and bool(torch.isfinite(result["dquery"][others]).all())


def test_logits_of_minus_infinity_give_zero_like_no_edge():
    graph = structure(GRAPHS["one_edge"])
    key = torch.zeros(3, 1, 1)
    key[2] = -torch.inf
    out, lse = edge_attention(torch.ones(2, 1, 1), key, torch.ones(3, 1, 1), graph, config=TORCH)
    assert out.flatten().tolist() == [0.0, 0.0] and bool(torch.isneginf(lse).all())


@pytest.mark.parametrize("logit", [1e2, 1e4, 1e6])
def test_gradients_of_sharp_softmax_over_equal_values_are_of_rounding_size(logit):
    problem, graph = problem_and_graph("hub", "none", torch.float32, heads=2, channels=8)
    problem.query *= logit
    problem.value[:] = problem.value[0]
    problem.grad_lse.zero_()
    result = attend(problem, graph, "torch")
    bound = 16 * torch.finfo(torch.float32).eps
    dp = (problem.grad_out[..., None, :, :] * problem.value[0]).sum(-1).abs().max() * problem.scale
    assert result["dquery"].abs().max() <= bound * dp * problem.key.abs().max() * graph.num_edges
    assert result["dkey"].abs().max() <= bound * dp * problem.query.abs().max() * graph.num_edges


def test_large_offset_in_all_logits_changes_nothing_but_lse():
    problem, graph = problem_and_graph("hub", "none", torch.float64, heads=1, channels=2)
    shift = torch.zeros_like(problem.key)
    base, base_lse = edge_attention(**problem.operands(), graph=graph, scale=1.0, config=TORCH)
    shift[..., 0] = 1000.0
    problem.query[..., 0] = 1.0
    base, base_lse = edge_attention(**problem.operands(), graph=graph, scale=1.0, config=TORCH)
    problem.key = problem.key + shift
    moved, moved_lse = edge_attention(**problem.operands(), graph=graph, scale=1.0, config=TORCH)
    torch.testing.assert_close(moved, base, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(moved_lse, base_lse + 1000.0, rtol=1e-10, atol=1e-10)


class TestDropout:
    def factors(self, seed, graph, heads, rate, sample=0):
        return torch.stack(
            [keep_factor(seed, sample, graph.global_edge_ids(), h, rate, torch.float64) for h in range(heads)], 1
        )

    def test_matches_the_oracle_with_the_generated_mask(self):
        problem, graph = problem_and_graph()
        torch.manual_seed(5)
        seed = torch.randint(2**62, (1,))
        torch.manual_seed(5)
        result = attend(problem, graph, "torch", dropout_p=0.3)
        mask = self.factors(seed, graph, 3, 0.3)
        problem.keep = torch.empty_like(mask).index_copy_(0, graph.edge_order().long(), mask)
        assert_same(result, oracle(problem), **F64)

    def test_philox_gives_the_published_values(self):
        from anemoi_gt.ops.dropout import philox

        zero = tuple(torch.zeros(1, dtype=torch.int64) for _ in range(4))
        ones = tuple(torch.full((1,), 0xFFFFFFFF) for _ in range(4))
        assert [int(word) for word in philox(zero, torch.zeros(1, dtype=torch.int64))] == [
            0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8,
        ]  # fmt: skip
        assert [int(word) for word in philox(ones, torch.full((1,), -1))] == [
            0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD,
        ]  # fmt: skip

    @pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
    def test_rate_is_met_and_survivors_keep_the_mean(self, rate):
        edges = torch.arange(200_000)
        factor = keep_factor(torch.tensor([9]), 0, edges, 0, rate, torch.float64)
        five_sigma = 5 * (rate * (1 - rate) / len(edges)) ** 0.5
        assert abs((factor == 0).double().mean() - rate) < five_sigma
        assert abs(factor.mean() - 1) < five_sigma / (1 - rate)

    def test_masks_of_samples_heads_and_seeds_differ(self):
        edges = torch.arange(1000)
        masks = [
            keep_factor(torch.tensor([seed]), sample, edges, head, 0.5, torch.float64)
            for seed, sample, head in itertools.product((0, 1, 2**40), (0, 1), (0, 1))
        ]
        for left, right in itertools.combinations(masks, 2):
            assert 0.4 < (left == right).double().mean() < 0.6

    def test_edges_beyond_32_bit_numbers_have_masks_of_their_own(self):
        low = torch.arange(1000)
        masks = [keep_factor(torch.tensor([0]), 0, edges, 0, 0.5, torch.float64) for edges in (low, low + 2**32)]
        assert 0.4 < (masks[0] == masks[1]).double().mean() < 0.6

    def test_manual_seed_repeats_it_and_lse_is_not_dropped(self):
        problem, graph = problem_and_graph()
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(edge_attention(**problem.operands(), graph=graph, dropout_p=0.5, config=TORCH))
        assert torch.equal(results[0][0], results[1][0]) and not torch.equal(results[0][0], results[2][0])
        assert torch.equal(results[0][1], edge_attention(**problem.operands(), graph=graph, config=TORCH)[1])

    def test_rate_one_drops_everything(self):
        problem, graph = problem_and_graph()
        out, _ = edge_attention(**problem.operands(), graph=graph, dropout_p=1.0, config=TORCH)
        assert bool((out == 0).all())

    def test_activation_checkpointing_sees_the_same_mask(self):
        problem, graph = problem_and_graph()
        gradients = []
        for use in (lambda f, *a: f(*a), lambda f, *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False)):
            torch.manual_seed(11)
            leaves = operands(problem)
            names = list(leaves)

            def run(*values, names=names):
                return edge_attention(
                    **dict(zip(names, values, strict=True)), graph=graph, dropout_p=0.5, config=TORCH
                )[0]

            use(run, *leaves.values()).backward(problem.grad_out)
            gradients.append([leaf.grad for leaf in leaves.values()])
        assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


@pytest.mark.parametrize("form", ["raw", "raw_without_bias", "embedded", "none"])
@pytest.mark.parametrize("name", ["shuffled", "no_edges", "isolated"])
def test_forward_and_backward_operators_pass_opcheck(form, name):
    problem, graph = problem_and_graph(name, form, torch.float32)
    graph = graph.with_reverse()
    every = [None if getattr(problem, key) is None else getattr(problem, key) for key in problem.names]
    batched = [operand.unsqueeze(0).requires_grad_() for operand in every[:3]]
    attr = None if every[3] is None else every[3].unsqueeze(0).requires_grad_()
    rest = [None if operand is None else operand.clone().requires_grad_() for operand in every[4:]]
    index = [graph.colptr, graph.row, graph.perm, None, graph.rowptr, graph.col, graph.csr_to_csc]
    arguments = [*batched, attr, *rest, *index, torch.tensor([3]), 0.5, 0.2]
    torch.library.opcheck(torch.ops.anemoi_gt.edge_attention_torch.default, arguments)
    needs = [operand is not None for operand in arguments[:6]]
    detached = [argument.detach() if torch.is_tensor(argument) else argument for argument in arguments]
    gradients = [problem.grad_out.unsqueeze(0), problem.grad_lse.unsqueeze(0)]
    torch.library.opcheck(torch.ops.anemoi_gt.edge_attention_torch_backward.default, [*gradients, *detached, needs])


def test_compiled_attention_equals_eager_and_never_recompiles():
    torch._dynamo.reset()
    counter = CompileCounter()

    def loss(graph, query, key, value, *edge_operands):
        out, lse = edge_attention(query, key, value, graph, *edge_operands, config=TORCH)
        return out.square().sum() + torch.where(torch.isfinite(lse), lse, 0.0).sum()

    step = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)

    for name in ("shuffled", "many_to_few", "few_to_many"):
        problem, graph = make_problem(GRAPHS[name], 3, 6, 5), structure(GRAPHS[name]).with_reverse()
        compiled, eager = operands(problem), operands(problem)
        step(graph, *compiled.values()).backward()
        loss(graph, *eager.values()).backward()
        assert_same({n: leaf.grad for n, leaf in compiled.items()}, {n: leaf.grad for n, leaf in eager.items()})
    assert counter.frame_count == 1


def test_no_tensor_of_edges_by_heads_by_channels_is_made_in_training():
    generator = torch.Generator().manual_seed(0)
    nodes, edges, heads, channels, edge_dim = 200, 20_000, 8, 32, 11
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    graph = (edge_index, (nodes, nodes))
    problem = make_problem(graph, heads, channels, edge_dim)
    structured = structure(graph).with_reverse()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(problem, structured, "torch")
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < edges * heads * channels * 4 / 4, f"one operator held {largest} bytes"


def test_explicit_backend_that_cannot_run_raises_with_the_reason():
    problem, graph = problem_and_graph()
    with pytest.raises(ValueError, match="attention backend 'triton' cannot run here: "):
        edge_attention(**problem.operands(), graph=graph, config=AttentionConfig(backend="triton"))


def test_auto_says_at_debug_level_what_it_chose(caplog):
    problem, graph = problem_and_graph()
    with caplog.at_level(logging.DEBUG, logger="anemoi_gt"):
        edge_attention(**problem.operands(), graph=graph)
    assert "auto: torch; passed over: {'triton': " in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [({"backend": "cuda"}, "backend must be one of auto, triton, torch, got 'cuda'"),
     ({"precision": "bf32"}, "precision must be one of None, fp32, bf16, fp16, got 'bf32'"),
     ({"fixed_degree_kernels": 1}, "fixed_degree_kernels must be True or False, got 1"),
     *(({"tile": tile}, f"tile must be such as 'unroll=1,num_warps=4' .*, got {re.escape(repr(tile))}")
       for tile in ("unroll", "edges=1", "heads=3", "unroll=1;num_warps=4", 4))],
)  # fmt: skip
def test_unknown_configuration_raises(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": zeros(13, 12)}, r"query must have shape \[N_dst, H, C\]"),
        ({"query": zeros(12, 3, 4)}, "query must have 13 rows, one per destination node, got"),
        ({"key": zeros(13, 3, 4)}, "key must have 11 rows, one per source node, got"),
        ({"value": zeros(11, 2, 4)}, "value must have the batch, heads and channels of query"),
        ({"value": zeros(1, 11, 3, 4)}, "value must have the 3 dimensions of query"),
        ({"key": zeros(11, 3, 4).long()}, "key must be floating point, got torch.int64"),
        ({"key": [1.0]}, "key must be a tensor, got list"),
        ({"query": None}, "query must be a tensor, got NoneType"),
        ({"value": None}, "value must be a tensor, got NoneType"),
        ({"value": torch.zeros(11, 3, 4, device="meta")}, "value must be on the device of the graph, cpu, got meta"),
        ({"edge_attr": zeros(64, 4)}, r"edge_attr must have shape \[E, D\].*= \(64, 5\), got \(64, 4\)"),
        ({"edge_attr": zeros(2, 64, 5)}, r"edge_attr must have shape"),
        ({"edge_attr": None}, "edge_weight must come with edge_attr"),
        ({"edge_weight": None}, "edge_bias must come with edge_weight"),
        ({"edge_weight": None, "edge_bias": None}, r"raw attributes \[E, D\] need edge_weight"),
        ({"edge_weight": zeros(5, 12)}, r"edge_weight must have shape .* = \[12, D >= 1\], got \(5, 12\)"),
        ({"edge_bias": zeros(3, 4)}, r"edge_bias must have shape \[12\], got \(3, 4\)"),
        ({"dropout_p": 1.5}, "dropout_p must be a probability in 0 .. 1, got 1.5"),
        ({"graph": torch.zeros(2, 64)}, "graph must be a GraphStructure, got Tensor; make one"),
    ],
)  # fmt: skip
def test_bad_operands_are_named(change, message):
    problem, graph = problem_and_graph()
    with pytest.raises(ValueError, match=message):
        edge_attention(**{**problem.operands(), "graph": graph, **change})


def test_empty_heads_or_channels_raise():
    graph = structure(GRAPHS["one_edge"])
    with pytest.raises(ValueError, match="heads and channels must be at least 1"):
        edge_attention(torch.zeros(2, 0, 4), torch.zeros(3, 0, 4), torch.zeros(3, 0, 4), graph)
