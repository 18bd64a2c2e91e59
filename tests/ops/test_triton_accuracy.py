"""The Triton kernels against the float64 oracle, in memory that is filled with NaN."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.accuracy import Corpus, assert_accurate
from support.cases import COLUMNS, Case, full_cases, judge, pairwise_cases, run
from support.graphs import GRAPHS, HUBS
from support.oracle import make_problem, plain
from support.plans import new_plans
from support.poison import poisoned_memory
from support.run import attend, structure, with_hubs
from support.same_numbers import assert_same

# gradients of features that samples share are float32, though rows are read as pairs of bfloat16
SUMMED = [
    Case(shape, 1, torch.bfloat16, "embedded", "batch_shares_attributes", "shuffled")
    for shape in ((4, 16), (6, 10))
]
CASES = full_cases() if torch.cuda.is_available() else pairwise_cases() + SUMMED
# channels of the contractions in three pieces, the last not full
# with the bias: all a program holds, more
BEYOND_A_TILE = (  # graph, dtype; heads, channels, edge_dim
    ("isolated", torch.bfloat16, (20, 64, 3)),  # heads in two programs, the second not full
    (
        "isolated",
        torch.bfloat16,
        (3, 130, 5),
    ),
    ("isolated", torch.bfloat16, (1, 1100, 2)),  # a row longer than a program of one warp holds
    ("isolated", torch.bfloat16, (2, 4, 70)),  # attributes that outnumber the channels
    *(("many_to_few", torch.float32, (2, 8, n)) for n in (255, 256, 300)),
)
# numpy's, of the interpreter
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


@pytest.fixture(autouse=True)
def poison(kernel_device):
    with poisoned_memory():
        assert bool(torch.empty(3, device=kernel_device).isnan().all())
        assert bool(torch.ones(3, device=kernel_device).new_empty(2).isnan().all())
        yield


def test_the_pairwise_table_holds_every_pair_and_every_graph_twice():
    cases = pairwise_cases()
    for left in COLUMNS:
        for right in set(COLUMNS) - {left}:
            pairs = {(getattr(case, left), getattr(case, right)) for case in cases}
            assert len(pairs) == len(COLUMNS[left]) * len(COLUMNS[right])
    assert min(Counter(case.graph for case in cases).values()) >= 2
    assert {case.graph for case in cases} == set(GRAPHS)


@pytest.mark.parametrize("dtype", COLUMNS["dtype"], ids=str)
def test_errors_of_each_case_and_of_the_corpus_meet_the_criterion(dtype, kernel_device):
    corpus = Corpus()
    for case in CASES:
        if case.dtype == dtype:
            judged = run(case, "triton", kernel_device)
            judge(case, judged)
            corpus.add_errors(judged.result, judged.exact, judged.plain)
    assert set(corpus.ours) >= {
        "out",
        "lse",
        "dquery",
        "dkey",
        "dvalue",
        "dedge_attr",
        "dedge_weight",
        "dedge_bias",
    }
    corpus.assert_accurate()


@pytest.mark.parametrize(("name", "dtype", "shape"), BEYOND_A_TILE, ids=str)
def test_shapes_beyond_one_tile_are_as_accurate(name, dtype, shape, kernel_device):
    problem = make_problem(GRAPHS[name], *shape, dtype=dtype)
    assert_accurate(
        attend(problem, structure(GRAPHS[name], kernel_device), "triton"), problem, dtype
    )


@pytest.mark.parametrize(
    ("name", "segment", "form"), [("isolated", None, "embedded"), ("both", 2, "raw")]
)
def test_another_run_and_64_bit_offsets_and_indices_give_the_same_bits(
    name, segment, form, kernel_device
):
    edges = (GRAPHS | HUBS)[name]
    problem = make_problem(edges, 3, 5, 4, form)
    graph = structure(edges, kernel_device).with_reverse()
    graph = with_hubs(graph, segment)
    expected = attend(problem, graph, "triton")
    assert_same(attend(problem, graph, "triton"), expected, 0)
    long = replace(
        graph,
        **{name: index.long() for name, index in graph.state_dict().items() if name != "sources"},
    )
    assert_same(attend(problem, long, "triton"), expected, 0)
    with new_plans(int32_limit=0):
        for structured in (graph, long):
            assert_same(attend(problem, structured, "triton"), expected, 0)


@pytest.mark.parametrize("form", ["raw", "none"])
@pytest.mark.parametrize("name", ["hub", "isolated", "nearest"])
def test_float16_gradients_are_accurate_at_every_loss_scale_at_which_plain_pytorch_is_finite(
    name, form, kernel_device
):
    base = make_problem(GRAPHS[name], 2, 16, 11, form)

    def scaled(loss_scale):
        problem = replace(base, grad_out=base.grad_out * loss_scale).to(torch.float16)
        return replace(problem, grad_lse=base.grad_lse * loss_scale)

    def overflows(problem):
        return not all(
            bool(tensor.isfinite().all())
            for name, tensor in plain(problem).items()
            if name != "lse"
        )

    largest = max(scale for scale in (2.0**n for n in range(8, 18)) if not overflows(scaled(scale)))
    assert overflows(scaled(2 * largest))
    result = attend(scaled(largest), structure(GRAPHS[name], kernel_device), "triton")
    assert_accurate(result, scaled(largest), torch.float16)
