"""The Triton backend: layouts, batches, parts of graphs, dropout, precision, and errors for what it does not support."""

from dataclasses import replace
from importlib import import_module
from unittest.mock import Mock

import pytest
import torch
from support.accuracy import assert_accurate, assert_within
from support.batch import run_batch, share, stack
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import attend, head_major, leaves_of, scalar, structure
from support.same_numbers import assert_same

from anemoi_gt import GraphStructure, KernelConfig, edge_attention, explain_attention
from anemoi_gt.ops.backend import Dtypes
from anemoi_gt.ops.backends import unsupported_reason
from anemoi_gt.ops.triton_backend import device
from anemoi_gt.ops.triton_backend.tiles import MAX_ATTRIBUTES
from anemoi_gt.refusal import RefusalKind

TRITON = KernelConfig(backend="triton")
op = import_module("anemoi_gt.ops.triton_backend.edge_attention_triton")
# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def at_an_odd_address(rows):
    return torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view(rows.shape)


ODD = [(at_an_odd_address, name, torch.bfloat16) for name in ("nearest", "shuffled")]


@pytest.mark.parametrize(
    ("layout", "name", "dtype"), [(head_major, "isolated", torch.float32), *ODD]
)
def test_operands_and_gradients_in_another_layout_give_the_same_bits(
    problem_and_graph, layout, name, dtype
):
    problem, graph = problem_and_graph(name, dtype=dtype)
    graph, laid_out = graph.with_reverse(), layout(problem.query)

    def run(layout):
        leaves = {
            name: layout(leaf.detach()).requires_grad_()
            for name, leaf in leaves_of(problem, graph).items()
        }
        out, lse = edge_attention(**leaves, graph=graph, config=TRITON)
        arriving = [
            layout(gradient.to(graph.device)) for gradient in (problem.grad_out, problem.grad_lse)
        ]
        gradients = torch.autograd.grad(
            (out, lse.where(lse.isfinite(), 0.0)), list(leaves.values()), arriving
        )
        return {"out": out, "lse": lse} | dict(zip(leaves, gradients, strict=True))

    assert laid_out.stride() == (4, 24, 1) if layout is head_major else laid_out.data_ptr() % 4 == 2
    assert_same(run(layout), run(torch.clone), 0)


def test_a_structure_of_strided_tensors_is_read_as_it_is(problem_and_graph):
    problem, graph = problem_and_graph("self_loops")
    graph = graph.with_reverse()
    state = {name: tensor for name, tensor in graph.state_dict().items() if tensor.dim() == 1}
    strided = {
        name: torch.stack([tensor, tensor + 2**30], 1)[:, 0] for name, tensor in state.items()
    }
    assert {"rowptr", "col", "csr_to_csc", "perm"} <= strided.keys()
    assert_same(
        attend(problem, replace(graph, **strided), "triton"), attend(problem, graph, "triton"), 0
    )


def test_expanded_inputs_get_the_summed_gradient(problem_and_graph):
    problem, graph = problem_and_graph()
    for name in ("query", "key", "value", "edge_attr", "edge_bias"):
        setattr(problem, name, getattr(problem, name)[:1].expand_as(getattr(problem, name)))
    expected = attend(problem, graph, "triton")  # of copies
    leaves = {name: operand.to(graph.device) for name, operand in problem.operands().items()}
    narrow = {
        name: leaf[:1].clone().requires_grad_()
        for name, leaf in leaves.items()
        if name != "edge_weight"
    }
    expanded = leaves | {name: leaf.expand_as(leaves[name]) for name, leaf in narrow.items()}
    out, lse = edge_attention(**expanded, graph=graph, scale=problem.scale, config=TRITON)
    assert torch.equal(out.cpu(), expected["out"])
    scalar(problem, out, lse).backward()
    for name, leaf in narrow.items():
        torch.testing.assert_close(leaf.grad.cpu(), expected["d" + name].sum(0, keepdim=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_a_batch_over_graphs_side_by_side_equals_the_oracle(kernel_device, dropout_p):
    names = ("self_loops", "no_edges", "isolated")
    joined = GraphStructure.disjoint([structure(GRAPHS[name], kernel_device) for name in names])
    assert joined.perm is not None
    edges = (joined.edge_index().cpu(), (joined.num_src, joined.num_dst))
    samples = share(
        [make_problem(edges, 2, 4, 3, seed=seed) for seed in range(2)], "edge_weight", "edge_bias"
    )
    assert_within(*run_batch(samples, joined, "triton", dropout_p=dropout_p, seed=3), torch.float32)


@pytest.mark.parametrize("form", ["raw", "none"])
def test_dropout_mask_equals_the_torch_backends(problem_and_graph, form):
    samples = [make_problem(GRAPHS["self_loops"], 3, 4, 5, form, seed=seed) for seed in range(2)]
    problem = stack(share(samples, "edge_weight", "edge_bias"))
    (_, graph), results = problem_and_graph("self_loops"), []
    numbers = torch.tensor([5, 2**33, 2**32 + 7, 3, 2**40, 1, 5 + 2**32], device=graph.device)
    graph = replace(graph, global_edge_id=numbers)  # a part of a large graph
    for backend in ("triton", "torch"):
        torch.manual_seed(5)
        results.append(attend(problem, graph, backend, dropout_p=0.5))
    torch.testing.assert_close(*results)


def test_precision_holds_inside_autocast_for_attributes_that_are_embedded_first(problem_and_graph):
    problem, graph = problem_and_graph("one_edge", edge_dim=MAX_ATTRIBUTES)
    operands = {name: operand.to(graph.device) for name, operand in problem.operands().items()}
    config = KernelConfig("triton", "fp32")
    expected = edge_attention(**operands, graph=graph, config=config)
    with torch.autocast(graph.device.type, dtype=torch.bfloat16):
        result = edge_attention(**operands, graph=graph, config=config)
    assert_same(result, expected, 0)


CHOICE = {  # degree, heads, channels, edge_dim, bias: whether attributes are embedded first
    "few edges, many attributes": ((1, 2, 4, 40, True), True),
    "many edges": ((60, 4, 8, 11, True), False),
    "more channels than attributes": ((1, 2, 16, 11, True), False),
    "more than a program holds": ((60, 2, 4, 256, True), True),
}


@pytest.mark.parametrize("case", CHOICE)
@pytest.mark.parametrize("training", [True, False])
def test_attributes_are_embedded_first_if_that_moves_fewer_bytes(case, training, kernel_device):
    (degree, heads, channels, edge_dim, bias), expected = CHOICE[case]
    numbers = torch.arange(3 * degree)
    edges = (torch.stack([numbers % 3, numbers % 3]), (3, 3))
    problem = make_problem(edges, heads, channels, edge_dim, "raw" if bias else "raw_without_bias")
    graph = structure(edges, kernel_device).with_reverse()
    operands = {name: operand.to(kernel_device) for name, operand in problem.operands().items()}
    operands = leaves_of(problem, graph) if training else operands
    query, key, value, *rest = operands.values()
    explanation = explain_attention(query, key, value, graph, *rest, config=TRITON)
    assert explanation.layers[0].features == ("embedded" if expected else "raw")
    assert ("embedded edges" in str(explanation)) == expected


@pytest.mark.parametrize("form", ["raw", "raw_without_bias"])
def test_embedded_and_factored_attributes_give_the_same(form, kernel_device, monkeypatch):
    problem = make_problem(GRAPHS["nearest"], 2, 3, 20, form)
    graph = structure(GRAPHS["nearest"], kernel_device)
    results = []
    for first in (True, False):
        monkeypatch.setattr(op, "embeds_first", Mock(return_value=first))
        results.append(attend(problem, graph, "triton"))
        assert_accurate(results[-1], problem, torch.float32)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


class TestAvailability:
    def call(self, dtype=torch.float32):
        return {}, Dtypes(dtype), torch.device("cpu")

    def test_float64_is_refused_with_the_remedy(self):
        assert "use backend 'torch'" in unsupported_reason("triton", *self.call(torch.float64))

    def test_a_missing_package_is_named_with_its_extra(self, monkeypatch):
        monkeypatch.setattr(device, "find_spec", lambda _: None)
        reason = unsupported_reason("triton", *self.call())
        assert reason == "the package triton is missing; pip install 'anemoi-gt[triton]'"

    def test_tensors_on_a_cpu_are_refused_where_kernels_are_compiled(self, monkeypatch):
        monkeypatch.setattr(device, "interpreted", lambda: False)
        assert unsupported_reason("triton", *self.call()).startswith(
            "its kernels run on a GPU, got tensors on cpu"
        )

    def test_the_interpreter_must_be_asked_for(self, monkeypatch):
        monkeypatch.setattr(device, "interpreted", lambda: True)
        assert unsupported_reason("triton", *self.call()) is None
        refusal = device.why_not(*self.call())
        assert refusal.kind is RefusalKind.NOT_FASTER
        assert refusal.text.startswith("its kernels run on a GPU")
