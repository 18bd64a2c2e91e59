"""The Triton backend as an operator of PyTorch: schemas, and an autograd that computes only the requested gradients."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.opcheck import check_registration
from support.operators import Operators
from support.oracle import make_problem
from support.run import attend, head_major, leaves_of, scalar, structure
from torch.utils.checkpoint import checkpoint

from anemoi_gt import KernelConfig, edge_attention
from anemoi_gt.ops.tensors import EdgeAttentionOptions
from anemoi_gt.ops.triton_backend.edge_attention_triton import edge_attention_triton

TRITON = KernelConfig(backend="triton")
# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def operator_arguments(problem, graph):
    """Arguments of the forward operator, from the problem's operands as they are laid out in memory."""
    operands = [getattr(problem, name) for name in problem.names]
    batched = [
        None if operand is None else operand.to(graph.device)[None] for operand in operands[:4]
    ]
    embedding = [None if operand is None else operand.to(graph.device) for operand in operands[4:]]
    leaves = [
        None if operand is None else operand.requires_grad_() for operand in (*batched, *embedding)
    ]
    index = [
        graph.colptr,
        graph.row,
        graph.perm,
        graph.global_edge_id,
        graph.fixed_in_degree,
    ]
    seed = torch.tensor([3], device=graph.device)
    reverse = [graph.rowptr, graph.col, graph.csr_to_csc, graph.dst_hubs, graph.src_hubs]
    options = EdgeAttentionOptions(0.5, 0.2, replay=True)
    options = edge_attention_triton.option_arguments(options)
    return [*leaves, *index, *reverse, seed, *options, True]


@pytest.mark.parametrize(
    ("name", "form", "shape", "has_batch"),
    [
        ("isolated", "raw", (2, 4, 3), True),
        ("isolated", "embedded", (6, 10, 3), False),
        ("one_edge", "none", (3, 5, 1), True),
        ("no_destinations", "raw", (1, 1, 1), False),
        ("duplicates", "raw_without_bias", (1, 1, 1), False),
        ("one_each", "raw", (2, 3, 5), True),
        ("no_edges", "raw", (2, 2, 2), True),
    ],
)
@pytest.mark.usefixtures("filled_padding")
def test_forward_and_backward_operators_are_registered(
    problem_and_graph, name, form, shape, has_batch
):
    problem, graph = problem_and_graph(name, form, torch.float32, *shape)
    for operand in ("query", "key", "value"):
        setattr(problem, operand, head_major(getattr(problem, operand)))
    arguments = operator_arguments(problem, graph.with_reverse())
    grads = [head_major(problem.grad_out), problem.grad_lse.T.contiguous().T]
    grads = [grad.to(graph.device)[None] for grad in grads]
    if not has_batch:
        arguments[:4] = [x if x is None else x.detach()[0].requires_grad_() for x in arguments[:4]]
        grads = [grad[0] for grad in grads]
    operators = torch.ops.anemoi_gt
    check_registration(operators.edge_attention_triton.default, arguments)
    *inputs, save = [x.detach() if torch.is_tensor(x) else x for x in arguments]
    _, _, kept = operators.edge_attention_triton(*inputs, save)
    needs = [operand is not None for operand in arguments[:6]]
    for grad_out, needed in ((grads[0], needs), (None, [True] + [False] * 5)):
        backward = [*inputs, kept, grad_out, grads[1], needed]
        check_registration(operators.edge_attention_triton_backward.default, backward)


def test_one_sample_costs_autograd_no_node_but_the_operator(problem_and_graph):
    problem, graph = problem_and_graph()
    out, lse = edge_attention(**leaves_of(problem, graph), graph=graph, config=TRITON)
    arriving = [type(node).__name__ for node, _ in out.grad_fn.next_functions if node is not None]
    assert out.grad_fn is lse.grad_fn
    assert arriving == ["AccumulateGrad"] * 6


def test_a_dispatch_mode_sees_both_operators(problem_and_graph):
    problem, graph = problem_and_graph("one_edge")
    with Operators() as operators:
        edge_attention(**leaves_of(problem, graph), graph=graph, config=TRITON)[0].sum().backward()
    ours = [name for name in operators.names if name.startswith("anemoi_gt.")]
    assert ours == [
        "anemoi_gt.edge_attention_triton.default",
        "anemoi_gt.edge_attention_triton_backward.default",
    ]


@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
def test_a_checkpointed_pass_may_be_watched_or_recorded_in_one_direction_only(
    problem_and_graph, form
):
    problem, graph = problem_and_graph("one_edge", form)
    leaves = leaves_of(problem, graph)
    attend = partial(edge_attention, **leaves, graph=graph, config=TRITON)

    def gradients(watch, create_graph):
        out, _ = checkpoint(attend, use_reentrant=False)
        with watch():
            return torch.autograd.grad(out.sum(), list(leaves.values()), create_graph=create_graph)

    expected = gradients(nullcontext, create_graph=False)
    observed = gradients(Operators, create_graph=False)
    with_graph = gradients(nullcontext, create_graph=True)
    assert all(map(torch.equal, observed, expected))
    assert all(map(torch.equal, with_graph, expected))


def test_caches_between_calls_hold_no_tensor(problem_and_graph):
    problem, graph = problem_and_graph("one_edge")
    leaves = leaves_of(problem, graph)
    edge_attention(**leaves, graph=graph, config=TRITON)[0].sum().backward()
    tensors = [weakref.ref(tensor) for tensor in (*leaves.values(), *graph.state_dict().values())]
    del leaves, graph
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)


def test_extra_outputs_take_no_gradient(problem_and_graph):
    problem, graph = problem_and_graph("one_edge")
    arguments = operator_arguments(problem, graph.with_reverse())
    out, lse, *extra = torch.ops.anemoi_gt.edge_attention_triton(*arguments)
    assert out.requires_grad
    assert lse.requires_grad
    assert not any(output.requires_grad for output in extra)


@pytest.mark.parametrize("form", ["raw", "embedded"])
def test_raw_attributes_materialise_no_edges_by_heads_by_channels_tensor(form, kernel_device):
    nodes, edges, heads, channels = (
        (3, 100, 4, 64) if kernel_device.type == "cpu" else (200, 40_000, 16, 64)
    )
    edge_index = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
    problem = make_problem((edge_index, (nodes, nodes)), heads, channels, 3, form, torch.bfloat16)
    graph = structure((edge_index, (nodes, nodes)), kernel_device).with_reverse()
    bound = edges * heads * channels * 2 / 2
    if kernel_device.type == "cpu":
        with torch.profiler.profile(
            profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profile:
            attend(problem, graph, "triton")
        peak = max(event.cpu_memory_usage for event in profile.events())
    else:
        leaves = leaves_of(problem, graph)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, lse = edge_attention(**leaves, graph=graph, config=TRITON)
        scalar(problem, out, lse).backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert (peak < bound) == (form == "raw"), f"the peak is {peak} bytes, the bound {bound}"
