"""Edge attention on either backend, on the device of the kernels: what no backend may do differently."""

from dataclasses import replace

import pytest
import torch
from support.accuracy import assert_accurate
from support.compiled import assert_compiled_attention_is_eager
from support.dropout import keep_of
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import attend, leaves_of, result_of, scalar, structure
from support.same_numbers import assert_same

from anemoi_gt import GraphStructure, KernelConfig, edge_attention, merge

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRECISIONS = dict(zip(("fp32", "bf16", "fp16"), DTYPES, strict=True))
# of the interpreter
pytestmark = [
    pytest.mark.parametrize("backend", ["torch", "triton"]),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"),
]


def test_isolated_destination_gets_zero_and_minus_infinity(problem_and_graph, backend):
    problem, graph = problem_and_graph("isolated")
    result, isolated = attend(problem, graph, backend), (graph.colptr.diff() == 0).cpu()
    assert int(isolated.sum()) == 4
    assert not bool(result["out"][isolated].any())
    assert bool(torch.isneginf(result["lse"][isolated]).all())
    assert not bool(result["dquery"][isolated].any())
    assert bool(torch.isfinite(result["lse"][~isolated]).all())


@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_chunks_of_the_edges_merge_into_the_whole_with_gradients(
    problem_and_graph, backend, form, dropout_p
):
    dtype = torch.float64 if backend == "torch" else torch.float32
    problem, graph = problem_and_graph("self_loops", form, dtype)
    numbers = torch.arange(graph.num_edges)
    sizes = (graph.num_src, graph.num_dst)
    leaves = leaves_of(problem, graph)

    def chunk(ids):
        ids = ids.to(graph.device)
        chunk = GraphStructure.from_edge_index(
            problem.edge_index.to(graph.device)[:, ids], sizes, global_edge_id=ids
        )
        operands = leaves | (
            {"edge_attr": leaves["edge_attr"][ids]} if "edge_attr" in leaves else {}
        )
        torch.manual_seed(7)
        return edge_attention(
            **operands, graph=chunk, dropout_p=dropout_p, config=KernelConfig(backend)
        )

    out, lse = merge(*chunk(numbers[numbers % 3 == 0]), *chunk(numbers[numbers % 3 != 0]))
    problem.keep = keep_of(graph, 3, dropout_p, manual_seed=7) if dropout_p else None
    assert_accurate(result_of(problem, out, lse, leaves), problem, dtype)


def test_dropout_of_rate_one_drops_everything_and_never_touches_lse(problem_and_graph, backend):
    dropped, kept = (attend(*problem_and_graph(), backend, dropout_p=rate) for rate in (1.0, 0.0))
    assert not bool(dropped["out"].any())
    assert not bool(dropped["dvalue"].any())
    assert torch.equal(dropped["lse"], kept["lse"])


def test_activation_checkpointing_gives_the_same_bits_with_dropout(problem_and_graph, backend):
    problem, graph = problem_and_graph()
    graph, gradients, config = graph.with_reverse(), [], KernelConfig(backend)
    for use in (
        lambda f, *a: f(*a),
        lambda f, *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False),
    ):
        torch.manual_seed(11)
        leaves = leaves_of(problem, graph)

        def run(*values, names=tuple(leaves)):
            return edge_attention(
                **dict(zip(names, values, strict=True)), graph=graph, dropout_p=0.5, config=config
            )[0]

        use(run, *leaves.values()).backward(problem.grad_out.to(graph.device))
        gradients.append([leaf.grad for leaf in leaves.values()])
    assert_same(*gradients, 0)


@pytest.mark.parametrize("why", ["no_grad", "no leaf needs it"])
def test_nothing_is_kept_and_no_source_side_is_made_without_a_gradient(
    problem_and_graph, monkeypatch, backend, why
):
    problem, graph = problem_and_graph()
    sizes, made, make = (graph.num_src, graph.num_dst), [], GraphStructure.with_reverse
    graph = GraphStructure.from_edge_index(graph.edge_index(), sizes, reverse=False)

    def record(self, **options):
        made.append(self)
        return make(self, **options)

    monkeypatch.setattr(GraphStructure, "with_reverse", record)
    leaves, config = leaves_of(problem, graph), KernelConfig(backend)
    given = leaves
    if why == "no leaf needs it":
        given = {name: leaf.detach() for name, leaf in leaves.items()}
    with torch.set_grad_enabled(why != "no_grad"):
        out, lse = edge_attention(**given, graph=graph, config=config)
    assert out.grad_fn is None
    assert lse.grad_fn is None
    assert not made
    edge_attention(**leaves, graph=graph, config=config)
    assert made


@pytest.mark.parametrize("form", ["raw", "embedded"])
def test_only_asked_gradients_are_computed_and_they_are_the_same(problem_and_graph, backend, form):
    problem, graph = problem_and_graph(form=form)
    expected, config = attend(problem, graph, backend), KernelConfig(backend)
    for wanted in problem.operands():
        leaves = {
            name: leaf.requires_grad_(name == wanted)
            for name, leaf in leaves_of(problem, graph).items()
        }
        out, lse = edge_attention(**leaves, graph=graph, scale=problem.scale, config=config)
        scalar(problem, out, lse).backward()
        assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [wanted]
        assert torch.equal(leaves[wanted].grad.cpu(), expected["d" + wanted]), wanted


@pytest.mark.compiled
def test_compiled_attention_equals_eager_and_never_recompiles(backend, kernel_device):
    form = {"torch": "raw", "triton": "embedded"}[backend]  # raw with hubs: test_triton_hubs
    cases = []
    # no two sizes are equal
    for num_src, num_dst, num_edges in ((7, 11, 29), (19, 17, 23)):
        edge_index = torch.stack(
            [torch.arange(num_edges) % num_src, torch.arange(num_edges) * 3 % num_dst]
        )
        edges = (edge_index, (num_src, num_dst))
        cases.append(
            (make_problem(edges, 2, 13, 4, form), structure(edges, kernel_device).with_reverse())
        )
    assert_compiled_attention_is_eager(KernelConfig(backend), cases)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_casts_inputs_and_casts_the_output_back(problem_and_graph, backend, precision):
    problem, graph = problem_and_graph("shuffled")
    out, lse = edge_attention(
        **leaves_of(problem, graph), graph=graph, config=KernelConfig(backend, precision)
    )
    cast = leaves_of(problem.to(PRECISIONS[precision]), graph)
    cast_out, cast_lse = edge_attention(**cast, graph=graph, config=KernelConfig(backend))
    assert out.dtype == lse.dtype == torch.float32
    assert torch.equal(out, cast_out.float())
    assert torch.equal(lse, cast_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_decides_the_dtype_and_gradients_keep_the_dtype_of_the_leaves(
    problem_and_graph, backend, dtype
):
    problem, graph = problem_and_graph()
    leaves, cast = leaves_of(problem, graph), replace(problem.to(dtype), grad_lse=problem.grad_lse)
    with torch.autocast(graph.device.type, dtype=dtype):
        out, lse = edge_attention(
            **leaves, graph=graph, scale=problem.scale, config=KernelConfig(backend)
        )
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    result = result_of(problem, out, lse, leaves)
    assert all(result[f"d{name}"].dtype == torch.float32 for name in leaves)
    assert torch.equal(result["out"], attend(cast, graph, backend)["out"])
    assert_accurate(result, cast, dtype)


def test_mixed_dtypes_follow_query(problem_and_graph, backend):
    problem, graph = problem_and_graph()
    cast = problem.to(torch.bfloat16)
    same = attend(cast, graph, backend)
    mixed = replace(
        cast,
        edge_attr=cast.edge_attr.double(),
        key=cast.key.half(),
        edge_weight=cast.edge_weight.float(),
    )
    result = attend(mixed, graph, backend)
    assert result["out"].dtype == torch.bfloat16
    assert torch.equal(result["out"], same["out"])
    for name, dtype in {
        "dedge_attr": torch.float64,
        "dkey": torch.float16,
        "dedge_weight": torch.float32,
    }.items():
        assert result[name].dtype == dtype, name
        assert torch.equal(result[name], same[name].to(dtype)), name


@pytest.mark.parametrize("form", ["raw", "embedded"])
def test_an_infinite_logit_stays_in_its_destination(problem_and_graph, backend, form):
    problem, graph = problem_and_graph("shuffled", form)
    expected = attend(problem, graph, backend)
    problem.query[3] = torch.inf
    result = attend(problem, graph, backend)
    others = torch.arange(graph.num_dst) != 3
    assert not bool(torch.isfinite(result["out"][3]).any())
    for name in ("out", "lse", "dquery"):
        assert torch.equal(result[name][others], expected[name][others]), name
    unreached = torch.ones(graph.num_src, dtype=torch.bool)
    unreached[problem.edge_index[0, problem.edge_index[1] == 3]] = False
    assert 0 < int(unreached.sum()) < graph.num_src
    for name in ("dkey", "dvalue"):
        assert torch.equal(result[name][unreached], expected[name][unreached]), name


@pytest.mark.parametrize("form", ["raw", "none"])
def test_logits_of_minus_infinity_give_zero_like_no_edge(problem_and_graph, backend, form):
    problem, graph = problem_and_graph("duplicates", form, heads=1, channels=2, edge_dim=3)
    problem.query[:] = 1.0
    problem.key[0] = -torch.inf  # destination 0 keeps source 1; destination 1 reads only source 1
    mixed = attend(problem, graph, backend)
    assert bool(torch.isfinite(mixed["out"]).all())
    assert bool(torch.isfinite(mixed["lse"]).all())
    problem.key[:] = -torch.inf
    result = attend(problem, graph, backend)
    assert bool(torch.isneginf(result["lse"]).all())
    assert not bool(result["out"].any())
    assert not bool(result["dvalue"].any())


@pytest.mark.parametrize(
    ("form", "dtype"), [("raw", DTYPES[0]), ("raw", DTYPES[1]), ("none", DTYPES[0])], ids=str
)
@pytest.mark.parametrize("logit", [1e2, 1e4, 1e6])
def test_gradients_of_sharp_softmax_over_equal_values_are_of_rounding_size(
    logit, form, dtype, backend, kernel_device
):
    problem = make_problem(GRAPHS["hub"], 2, 8, 3, form, dtype)
    problem.query *= logit
    problem.value[:] = problem.value[0]
    problem.grad_lse.zero_()
    terms = [problem.value]
    if form == "raw":  # equal attributes too, so that every edge has the same value
        problem.edge_attr[:] = problem.edge_attr[0]
        terms.append((problem.edge_attr @ problem.edge_weight.T)[0].view(1, 2, 8))
        terms.append(problem.edge_bias.view(1, 2, 8))
    result = attend(problem, structure(GRAPHS["hub"], kernel_device), backend)
    dp = problem.scale * sum(
        (problem.grad_out[2].abs() * term[0].abs()).sum(-1).max() for term in terms
    )
    # 40 edges arrive; whatever the dtype, ds is made in float32
    bound = 16 * torch.finfo(torch.float32).eps * dp * 40
    key = problem.key.abs().max() + sum(term.abs().max() for term in terms[1:])
    assert result["dquery"].abs().max() <= bound * key
    assert result["dkey"].abs().max() <= bound * problem.query.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_offset_in_all_logits_moves_lse_and_nothing_else(dtype, backend, kernel_device):
    problem = make_problem(GRAPHS["hub"], 2, 4, 3, "none", dtype)
    graph = structure(GRAPHS["hub"], kernel_device)
    problem.scale = 1.0
    problem.query[..., 0] = 1.0
    problem.key[..., 0] = 0.0
    base = attend(problem, graph, backend)
    problem.key[..., 0] = 1024.0
    moved = attend(problem, graph, backend)
    finite = torch.isfinite(base["lse"])
    rounding = 1024.0 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        moved["lse"][finite], base["lse"][finite] + 1024.0, rtol=0, atol=4 * rounding
    )
    for name in ("out", "dvalue"):  # p moves by the rounding of the logits
        size = base[name].abs().max().item()
        atol = 16 * size * (rounding + torch.finfo(dtype).eps)
        torch.testing.assert_close(moved[name], base[name], rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sharp_softmax_is_as_accurate_as_plain_pytorch(dtype, backend, kernel_device):
    problem = make_problem(GRAPHS["many_to_few"], 2, 8, 3, "raw", dtype)
    problem.query *= 30.0
    assert_accurate(
        attend(problem, structure(GRAPHS["many_to_few"], kernel_device), backend), problem, dtype
    )


def test_nan_in_a_key_reaches_the_destinations_that_read_it_and_no_other(backend, kernel_device):
    problem = make_problem(GRAPHS["shuffled"], 3, 4, 5)
    graph = structure(GRAPHS["shuffled"], kernel_device)
    problem.key[2, 1, 3] = torch.nan
    out = attend(problem, graph, backend)["out"]
    reads = torch.zeros(graph.num_dst, dtype=torch.bool)
    reads[problem.edge_index[1, problem.edge_index[0] == 2]] = True
    assert torch.equal(
        out.isnan().any(-1),
        torch.stack([torch.zeros_like(reads), reads, torch.zeros_like(reads)], 1),
    )
