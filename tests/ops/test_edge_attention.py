"""Edge attention on the torch backend, mostly in float64: values, derivatives, and what is refused."""

import logging

import pytest
import torch
from support.accuracy import Corpus, assert_within
from support.batch import combine, share, shared_names, stack
from support.corpus import DTYPES, SHAPES
from support.graphs import GRAPHS
from support.opcheck import check_registration
from support.oracle import magnitude, make_problem, oracle, plain
from support.pairwise import pairwise
from support.refusals import raises, refused
from support.run import attend, structure
from support.same_numbers import assert_same

from anemoi_gt import KernelConfig, edge_attention
from anemoi_gt.ops.tensors import EdgeAttentionOptions, IndexTensors
from anemoi_gt.ops.torch_backend.edge_attention_torch import edge_attention_torch

TORCH = KernelConfig(backend="torch")
F64 = 1e-12
FORMS = ("raw", "embedded", "none")
PROBLEMS = pairwise(graph=tuple(GRAPHS), form=(*FORMS, "raw_without_bias"), shape=SHAPES)


def problem_and_graph(
    name="shuffled", form="raw", dtype=torch.float64, heads=3, channels=4, edge_dim=5
):
    return make_problem(GRAPHS[name], heads, channels, edge_dim, form, dtype), structure(
        GRAPHS[name]
    )


def run(problem, graph, config=TORCH, **options):
    return edge_attention(**problem.operands(), graph=graph, config=config, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shared", [("edge_weight", "edge_bias"), ("edge_weight", "edge_bias", "edge_attr")], ids=len
)
def test_a_batch_equals_its_elements(form, shared):
    elements = [
        make_problem(GRAPHS["shuffled"], 3, 4, 5, form, torch.float64, seed) for seed in range(3)
    ]
    elements, graph = share(elements, *shared), structure(GRAPHS["shuffled"])
    expected = combine(
        [attend(element, graph, "torch") for element in elements], shared_names(elements)
    )
    assert_same(attend(stack(elements), graph, "torch"), expected, F64)


def test_gradient_of_only_lse_is_right():
    problem, graph = problem_and_graph()
    problem.grad_out.zero_()
    expected = oracle(problem)
    problem.grad_out = None
    assert_same(attend(problem, graph, "torch"), expected, F64)


@pytest.mark.parametrize(
    "options",
    [{}, {"dropout_p": 0.5}, {"scale": 2.0}, {"config": KernelConfig("torch")}],
    ids=str,
)
def test_an_edge_index_is_refused_before_anything_else(options, monkeypatch):
    monkeypatch.setattr(
        "anemoi_gt.ops.attention.draw_seed", lambda device: pytest.fail("a seed was drawn")
    )
    rows, edge_index = torch.zeros(3, 2, 4, requires_grad=True), torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(
        ValueError, match="graph must be a GraphStructure, got Tensor; build it once"
    ):
        edge_attention(rows, rows, rows, edge_index, **options)


def test_scale_defaults_to_one_over_root_channels():
    problem, graph = problem_and_graph()
    torch.testing.assert_close(run(problem, graph), run(problem, graph, scale=0.5))


def test_strided_and_expanded_inputs_equal_contiguous_ones():
    problem, graph = problem_and_graph(dtype=torch.float32)
    expected = attend(problem, graph, "torch")
    for name in ("query", "key", "value"):
        head_major = getattr(problem, name).permute(1, 2, 0).contiguous().permute(2, 0, 1)
        assert not head_major.is_contiguous()
        setattr(problem, name, head_major)
    problem.edge_attr = problem.edge_attr.T.contiguous().T
    assert_same(attend(problem, graph, "torch"), expected, 0)
    expanded = problem.query[:1].expand_as(problem.query)
    rows = (problem.key, problem.value, graph)
    strided, contiguous = (
        edge_attention(query, *rows, config=TORCH)[0] for query in (expanded, expanded.clone())
    )
    torch.testing.assert_close(strided, contiguous)


def test_autocast_leaves_float64_unchanged():
    problem, graph = problem_and_graph()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = run(problem, graph)
    assert out.dtype == lse.dtype == torch.float64


@pytest.mark.parametrize("form", ["raw", "raw_without_bias", "embedded", "none"])
@pytest.mark.parametrize("name", ["isolated", "shuffled", "no_edges"])
def test_forward_and_backward_operators_are_registered(form, name):
    problem, graph = problem_and_graph(name, form, torch.float32)
    graph = graph.with_reverse()
    operators = torch.ops.anemoi_gt
    every = [getattr(problem, name) for name in problem.names]
    every[:4] = [None if operand is None else operand.unsqueeze(0) for operand in every[:4]]
    every = [None if operand is None else operand.clone().requires_grad_() for operand in every]
    options = EdgeAttentionOptions(0.5, 0.2, replay=True)
    options = edge_attention_torch.option_arguments(options)
    rest = [*IndexTensors.of(graph), torch.tensor([3]), *options, True]
    check_registration(operators.edge_attention_torch.default, [*every, *rest])
    needs = [operand is not None for operand in every]
    detached = [None if operand is None else operand.detach() for operand in every]
    gradients = [problem.grad_out.unsqueeze(0), problem.grad_lse.unsqueeze(0)]
    _, _, p = operators.edge_attention_torch(*detached, *rest)
    arguments = [*detached, *rest[:-1], p, *gradients, needs]
    check_registration(operators.edge_attention_torch_backward.default, arguments)


def test_no_tensor_of_edges_by_heads_by_channels_is_made_in_training():
    nodes, edges, heads, channels = 200, 20_000, 8, 32
    edge_index = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
    problem = make_problem((edge_index, (nodes, nodes)), heads, channels, 11)
    graph = structure((edge_index, nodes)).with_reverse()
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        attend(problem, graph, "torch")
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < edges * heads * channels * 4 / 4, f"one operator allocated {largest} bytes"


def test_auto_logs_its_choice_at_debug_level(caplog):
    problem, graph = problem_and_graph()
    with caplog.at_level(logging.DEBUG, logger="anemoi_gt"):
        edge_attention(**problem.operands(), graph=graph)
    assert "auto: torch; rejected: {'triton': " in caplog.text


def changed(**change):
    problem, graph = problem_and_graph()
    return edge_attention(**{**problem.operands(), "graph": graph, **change})


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


EMPTY = {"query": zeros(13, 0, 4), "key": zeros(11, 0, 4), "value": zeros(11, 0, 4)}


@refused(
    (lambda: changed(query=zeros(13, 12)), r"query must have shape \[N_dst, H, C\]"),
    (
        lambda: changed(query=zeros(12, 3, 4)),
        "query must have 13 rows, one per destination node, got",
    ),
    (lambda: changed(key=zeros(13, 3, 4)), "key must have 11 rows, one per source node, got"),
    (
        lambda: changed(value=zeros(11, 2, 4)),
        "value must have the batch, heads and channels of query",
    ),
    (lambda: changed(value=zeros(1, 11, 3, 4)), "value must have the 3 dimensions of query"),
    (lambda: changed(**EMPTY), "heads and channels must be at least 1"),
    (lambda: changed(key=zeros(11, 3, 4).long()), "key must be floating point, got torch.int64"),
    (lambda: changed(key=[1.0]), "key must be a tensor, got list"),
    (lambda: changed(query=None), "query must be a tensor, got NoneType"),
    (lambda: changed(value=None), "value must be a tensor, got NoneType"),
    (
        lambda: changed(value=zeros(11, 3, 4).to("meta")),
        "value must be on the device of the graph, cpu, got meta",
    ),
    (
        lambda: changed(edge_attr=zeros(64, 4)),
        r"edge_attr must have shape \[E, D\].*= \(64, 5\), got \(64, 4\)",
    ),
    (lambda: changed(edge_attr=zeros(2, 64, 5)), "edge_attr must have shape"),
    (lambda: changed(edge_attr=None), "edge_weight must come with edge_attr"),
    (lambda: changed(edge_weight=None), "edge_bias must come with edge_weight"),
    (
        lambda: changed(edge_weight=None, edge_bias=None),
        r"raw attributes \[E, D\] need edge_weight",
    ),
    (
        lambda: changed(edge_weight=zeros(5, 12)),
        r"edge_weight must have shape .* = \[12, D >= 1\], got \(5, 12\)",
    ),
    (lambda: changed(edge_bias=zeros(3, 4)), r"edge_bias must have shape \[12\], got \(3, 4\)"),
    (lambda: changed(dropout_p=1.5), "dropout_p must be a probability in 0 .. 1, got 1.5"),
    (
        lambda: changed(config=KernelConfig("triton")),
        "attention backend 'triton' cannot run here: ",
    ),
    (lambda: KernelConfig(stable_sort=None), "stable_sort must be True or False, got None"),
    (lambda: KernelConfig("cuda"), "backend must be one of auto, triton, torch, got 'cuda'"),
    (
        lambda: KernelConfig(precision="bf32"),
        "precision must be one of None, fp32, bf16, fp16, got 'bf32'",
    ),
)
def test_wrong_operands_and_options_are_refused_with_the_reason(wrong, message):
    raises(wrong, message)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
def test_errors_of_each_problem_and_of_the_corpus_meet_the_criterion(dtype):
    judged = Corpus()
    for seed, row in enumerate(PROBLEMS):
        edges = GRAPHS[row["graph"]]
        problem = make_problem(edges, *row["shape"], row["form"], dtype, seed)
        result = attend(problem, structure(edges), "torch")
        exact, baseline = oracle(problem), plain(problem)
        assert_within(result, exact, baseline, magnitude(problem), dtype)
        judged.add_errors(result, exact, baseline)
    gradients = {f"d{name}" for name in problem.names}
    assert set(judged.ours) == {"out", "lse"} | gradients
    judged.assert_accurate()


@pytest.mark.parametrize("batch", ((), (1,), (3,)), ids=str)
def test_the_result_takes_in_place_operations(batch):
    graph = structure(GRAPHS["shuffled"])
    sizes = {"query": graph.num_dst, "key": graph.num_src, "value": graph.num_src}
    leaves = {
        name: torch.randn(*batch, rows, 2, 4, requires_grad=True) for name, rows in sizes.items()
    }
    expected, _ = edge_attention(**leaves, graph=graph, config=TORCH)
    assert not expected._is_view()
    gradients = torch.autograd.grad(expected.flatten(-2).relu().sum(), leaves.values())
    out, _ = edge_attention(**leaves, graph=graph, config=TORCH)
    actual = torch.autograd.grad(
        torch.nn.functional.relu(out.flatten(-2), inplace=True).sum(), leaves.values()
    )
    for gradient, other in zip(gradients, actual, strict=True):
        torch.testing.assert_close(other, gradient)
