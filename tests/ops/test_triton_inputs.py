"""What the Triton backend accepts: layouts, batches, parts of graphs, dtypes, dropout; and where it says that it cannot run."""

from dataclasses import replace

import pytest
import torch
from support.accuracy import assert_accurate, assert_within
from support.batch import run_batch, share, stack
from support.dropout import keep_of
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import attend, scalar, structure

from anemoi_gt import AttentionConfig, GraphStructure, edge_attention, merge
from anemoi_gt.ops.backends import unsupported_reason
from anemoi_gt.ops.triton_backend import device
from anemoi_gt.ops.triton_backend.tiles import MOST_ATTRIBUTES

TRITON = AttentionConfig(backend="triton")
HALF = (torch.bfloat16, torch.float16)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of the interpreter


@pytest.fixture
def problem_and_graph(kernel_device):
    def make(name="isolated", form="raw", dtype=torch.float32, heads=3, channels=4, edge_dim=5):
        return make_problem(GRAPHS[name], heads, channels, edge_dim, form, dtype), structure(
            GRAPHS[name], kernel_device
        )

    return make


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def head_major(rows):
    """The same rows [.., H, C] with the nodes inside the heads, as a sharding over heads leaves them."""
    return rows.transpose(0, 1).contiguous().transpose(0, 1)


def test_head_major_inputs_and_gradients_equal_contiguous_ones(problem_and_graph):
    problem, graph = problem_and_graph()
    graph = graph.with_reverse()

    def run(layout):
        leaves = {name: operand.to(graph.device).requires_grad_() for name, operand in problem.operands().items()}
        laid_out = {name: layout(leaf) if leaf.dim() == 3 else leaf for name, leaf in leaves.items()}
        laid_out["edge_attr"] = layout(leaves["edge_attr"])
        out, lse = edge_attention(**laid_out, graph=graph, config=TRITON)
        arriving = [layout(gradient.to(graph.device)) for gradient in (problem.grad_out, problem.grad_lse)]
        occupied = torch.isfinite(lse)[..., None]
        torch.autograd.backward((out, lse.where(occupied[..., 0], 0.0)), arriving)
        return {"out": out, "lse": lse} | {name: leaf.grad for name, leaf in leaves.items()}

    assert not head_major(problem.query).is_contiguous() and head_major(problem.query).stride() == (4, 24, 1)
    assert_equal(run(head_major), run(lambda rows: rows))


@pytest.mark.parametrize("name", ["nearest", "shuffled"])
def test_rows_at_odd_addresses_equal_those_at_even_ones(problem_and_graph, name):
    problem, graph = problem_and_graph(name, dtype=torch.bfloat16)
    graph = graph.with_reverse()

    def odd(rows):
        return torch.cat([rows.new_zeros(1), rows.detach().flatten()])[1:].view(rows.shape)

    def run(layout):
        leaves = {
            name: layout(operand.to(graph.device)).requires_grad_() for name, operand in problem.operands().items()
        }
        out, _ = edge_attention(**leaves, graph=graph, config=TRITON)
        gradients = torch.autograd.grad(out, list(leaves.values()), layout(problem.grad_out.to(graph.device)))
        return {"out": out} | dict(zip(leaves, gradients, strict=True))

    assert odd(problem.query).data_ptr() % 4 == 2
    assert_equal(run(odd), run(lambda rows: rows.detach().clone()))


def test_a_structure_of_strided_tensors_is_read_as_it_is(problem_and_graph):
    problem, graph = problem_and_graph("self_loops")
    graph = graph.with_reverse().with_dst_schedule()
    state = {name: tensor for name, tensor in graph.state_dict().items() if tensor.dim() == 1}
    strided = {name: torch.stack([tensor, tensor + 2**30], 1)[:, 0] for name, tensor in state.items()}
    assert {"rowptr", "col", "csr_to_csc", "perm", "dst_schedule"} <= strided.keys()
    assert_equal(attend(problem, replace(graph, **strided), "triton"), attend(problem, graph, "triton"))


def test_expanded_inputs_get_the_summed_gradient(problem_and_graph):
    problem, graph = problem_and_graph()
    for name in ("query", "key", "value", "edge_attr", "edge_bias"):
        setattr(problem, name, getattr(problem, name)[:1].expand_as(getattr(problem, name)))
    expected = attend(problem, graph, "triton")  # of copies
    leaves = {name: operand.to(graph.device) for name, operand in problem.operands().items()}
    narrow = {name: leaf[:1].clone().requires_grad_() for name, leaf in leaves.items() if name != "edge_weight"}
    expanded = leaves | {name: leaf.expand_as(leaves[name]) for name, leaf in narrow.items()}
    out, lse = edge_attention(**expanded, graph=graph, scale=problem.scale, config=TRITON)
    assert torch.equal(out.cpu(), expected["out"])
    scalar(problem, out, lse).backward()
    for name, leaf in narrow.items():
        torch.testing.assert_close(leaf.grad.cpu(), expected["d" + name].sum(0, keepdim=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_a_batch_over_graphs_side_by_side_equals_the_oracle(kernel_device, dropout_p):
    names = ("self_loops", "no_edges", "isolated")
    graphs = [structure(GRAPHS[name], kernel_device) for name in names]
    joined = GraphStructure.disjoint(graphs)
    assert joined.perm is not None
    edges = (joined.edge_index().cpu(), (joined.num_src, joined.num_dst))
    samples = share([make_problem(edges, 2, 4, 3, seed=seed) for seed in range(2)], "edge_weight", "edge_bias")
    assert_within(*run_batch(samples, joined, "triton", dropout_p=dropout_p, seed=3), torch.float32)


@pytest.mark.parametrize("form", ["raw", "embedded"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_two_halves_of_the_edges_merge_into_the_whole_with_gradients(problem_and_graph, form, dropout_p):
    problem, graph = problem_and_graph("self_loops", form)
    numbers, sizes = torch.arange(graph.num_edges), (graph.num_src, graph.num_dst)
    leaves = {name: operand.to(graph.device).requires_grad_() for name, operand in problem.operands().items()}
    shared = {name: leaf for name, leaf in leaves.items() if name != "edge_attr"}

    def part(ids):
        ids = ids.to(graph.device)
        edges = problem.edge_index.to(graph.device)[:, ids]
        torch.manual_seed(7)
        return edge_attention(
            **shared, edge_attr=leaves["edge_attr"][ids], dropout_p=dropout_p, config=TRITON,
            graph=GraphStructure.from_edge_index(edges, sizes, global_edge_id=ids),
        )  # fmt: skip

    out, lse = merge(*part(numbers[numbers % 3 == 0]), *part(numbers[numbers % 3 != 0]))
    gradients = torch.autograd.grad(scalar(problem, out, lse), list(leaves.values()))
    result = {"out": out.detach().cpu(), "lse": lse.detach().cpu()}
    result |= {"d" + name: gradient.cpu() for name, gradient in zip(leaves, gradients, strict=True)}
    problem.keep = keep_of(graph, 3, dropout_p, manual_seed=7) if dropout_p else None
    assert_accurate(result, problem, torch.float32)


@pytest.mark.parametrize("form", ["raw", "none"])
def test_dropout_drops_what_the_torch_backend_drops(problem_and_graph, form):
    samples = [make_problem(GRAPHS["self_loops"], 3, 4, 5, form, seed=seed) for seed in range(2)]
    problem = stack(share(samples, "edge_weight", "edge_bias"))
    (_, graph), results = problem_and_graph("self_loops"), []
    numbers = torch.tensor([5, 2**33, 2**32 + 7, 3, 2**40, 1, 5 + 2**32], device=graph.device)
    graph = replace(graph, global_edge_id=numbers)  # a part of a large graph
    for backend in ("triton", "torch"):
        torch.manual_seed(5)
        results.append(attend(problem, graph, backend, dropout_p=0.5))
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], msg=lambda text, name=name: f"{name}: {text}")


def test_dropout_of_rate_one_drops_everything_and_never_touches_lse(problem_and_graph):
    problem, graph = problem_and_graph()
    dropped, kept = (attend(problem, graph, "triton", dropout_p=rate) for rate in (1.0, 0.0))
    assert not bool(dropped["out"].any()) and not bool(dropped["dvalue"].any())
    assert torch.equal(dropped["lse"], kept["lse"])


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_chooses_the_dtype_and_gradients_return_to_that_of_the_leaves(problem_and_graph, dtype):
    problem, graph = problem_and_graph()
    leaves = {name: operand.to(graph.device).requires_grad_() for name, operand in problem.operands().items()}
    with torch.autocast(graph.device.type, dtype=dtype):
        out, lse = edge_attention(**leaves, graph=graph, scale=problem.scale, config=TRITON)
    assert out.dtype == dtype and lse.dtype == torch.float32
    scalar(problem, out, lse).backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves.values())
    result = {"out": out.detach().cpu(), "lse": lse.detach().cpu()} | {
        "d" + n: leaf.grad.cpu() for n, leaf in leaves.items()
    }
    cast = problem.to(dtype)
    assert_accurate(result, replace(cast, grad_lse=problem.grad_lse), dtype)


def test_mixed_dtypes_follow_query(problem_and_graph):
    problem, graph = problem_and_graph()
    same = attend(problem.to(torch.bfloat16), graph, "triton")
    mixed = problem.to(torch.bfloat16)
    mixed.edge_attr, mixed.key = mixed.edge_attr.double(), mixed.key.half()
    mixed.edge_weight = mixed.edge_weight.float()
    result = attend(mixed, graph, "triton")
    assert result["out"].dtype == torch.bfloat16 and torch.equal(result["out"], same["out"])
    for name, dtype in {"dedge_attr": torch.float64, "dkey": torch.float16, "dedge_weight": torch.float32}.items():
        assert result[name].dtype == dtype and torch.equal(result[name], same[name].to(dtype)), name


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_precision_casts_in_and_the_output_back(problem_and_graph, dtype):
    problem, graph = problem_and_graph("one_edge")
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    operands = {name: operand.to(graph.device) for name, operand in problem.operands().items()}
    out, lse = edge_attention(**operands, graph=graph, config=AttentionConfig("triton", name))
    expected = edge_attention(**{n: o.to(dtype) for n, o in operands.items()}, graph=graph, config=TRITON)
    assert out.dtype == torch.float32 and torch.equal(out, expected[0].float()) and torch.equal(lse, expected[1])


def test_precision_holds_inside_autocast_for_attributes_that_are_embedded_first(problem_and_graph):
    problem, graph = problem_and_graph("one_edge", edge_dim=MOST_ATTRIBUTES)
    operands = {name: operand.to(graph.device) for name, operand in problem.operands().items()}
    config = AttentionConfig("triton", "fp32")
    expected = edge_attention(**operands, graph=graph, config=config)
    with torch.autocast(graph.device.type, dtype=torch.bfloat16):
        result = edge_attention(**operands, graph=graph, config=config)
    assert all(torch.equal(left, right) for left, right in zip(result, expected, strict=True))


class TestAvailability:
    def query(self, dtype=torch.float32):
        return torch.zeros(1, 1, 1, 1, dtype=dtype)

    def test_float64_is_refused_with_the_remedy(self):
        assert "use backend 'torch'" in unsupported_reason("triton", self.query(torch.float64))

    def test_a_missing_package_is_named_with_its_extra(self, monkeypatch):
        monkeypatch.setattr(device, "find_spec", lambda _: None)
        assert (
            unsupported_reason("triton", self.query())
            == "the package triton is missing; pip install 'anemoi-gt[triton]'"
        )

    def test_tensors_on_a_cpu_are_refused_where_kernels_are_compiled(self, monkeypatch):
        monkeypatch.setattr(device, "interpreted", lambda: False)
        assert unsupported_reason("triton", self.query()).startswith("its kernels run on a GPU, got tensors on cpu")

    def test_the_interpreter_must_be_asked_for(self, monkeypatch):
        monkeypatch.setattr(device, "interpreted", lambda: True)
        assert unsupported_reason("triton", self.query()) is None
        assert device.auto_unsupported_reason(self.query()).startswith("its kernels run on a GPU")
