"""The attention sub-layer: accuracy against float64, operator registration, and saved tensors."""

from functools import partial

import pytest
import torch
from support import sublayers
from support.accuracy import Corpus
from support.nightly import nightly
from support.plans import new_plans

from anemoi_gt.ops.sublayer_tensors import AttentionTensors
from anemoi_gt.ops.tree import leaf_types, leaves
from anemoi_gt.ops.triton_backend.attention_sublayer import (
    attention_sublayer,
    attention_sublayer_triton,
)
from anemoi_gt.ops.triton_backend.sizes import IndexTensors

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
SIZES = sublayers.Sizes()
FEATURES = SIZES.features
WIDTH = SIZES.width
HEADS = SIZES.heads
EDGES = SIZES.edges
SRC = SIZES.num_src
DST = SIZES.num_dst
EDGE_DIM = SIZES.edge_dim
BIASES = sublayers.BIASES
NAMES = list(leaf_types(AttentionTensors))
draw = sublayers.draw_attention


@pytest.fixture(autouse=True)
def small_chunks():
    """Several chunks of rows, the last of another size."""
    with new_plans(chunk=4, programs=3):
        yield


def by_operator(named, graph, options):
    return attention_sublayer(sublayers.fill(AttentionTensors, named), graph, options)


def errors_over(cases, dtype, device):
    """Squared errors of cases, ours and plain PyTorch's."""
    corpus = Corpus()
    for seed, case in enumerate(cases):
        named, grad, graph, edge_index, options = draw(device, seed=seed, dtype=dtype, **case)
        plainly = partial(sublayers.attention, edge_index=edge_index, options=options)
        exact = sublayers.results_of(plainly, named, grad, torch.float64)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            plain = sublayers.results_of(plainly, named, grad, torch.float32)
        ours = partial(by_operator, graph=graph, options=options)
        corpus.add_errors(sublayers.results_of(ours, named, grad, torch.float32), exact, plain)
    return corpus


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", sublayers.CORPUS_DTYPES, ids=str)
def test_corpus_errors_are_at_most_two_and_three_times_plain_pytorchs(dtype, kernel_device):
    corpus = errors_over(sublayers.ATTENTION_CASES, dtype, kernel_device)
    assert len(corpus.ours) == 1 + len(leaf_types(AttentionTensors))
    corpus.assert_accurate()


@pytest.mark.compiled
@pytest.mark.parametrize(("norm", "nodes", "halo"), [("both", "one set", 0), (4, "two sets", 3)])
@pytest.mark.parametrize("dynamic", [True, *nightly((False,))])
def test_a_compiled_call_gives_the_bits_of_an_eager_one_and_so_does_another(
    norm, nodes, halo, dynamic, kernel_device
):
    torch.compiler.reset()
    compiled = torch.compile(by_operator, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    named, grad, graph, _, options = draw(kernel_device, norm, nodes, 2, halo)
    graph = graph.with_reverse()
    eager, again, traced = (
        sublayers.results_of(
            partial(call, graph=graph, options=options), named, grad, torch.float32
        )
        for call in (by_operator, by_operator, compiled)
    )
    for name, expected in eager.items():
        assert torch.equal(again[name], expected), name
        assert torch.equal(traced[name], expected), name


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("norm", "nodes", "halo", "qk_norm", "biases", "dtype"),
    [
        (4, "two sets", 3, "scale", (), torch.float32),
        ("bare", "two sets", 0, "bare", BIASES, torch.bfloat16),
        *nightly(("both", "one set", 0, "none", BIASES, torch.float32)),
    ],
)
@pytest.mark.usefixtures("filled_padding")
def test_forward_and_backward_operators_pass_opcheck(
    norm, nodes, halo, qk_norm, biases, dtype, kernel_device
):
    named, grad, graph, _, options = draw(
        kernel_device, norm, nodes, 2, halo, qk_norm=qk_norm, biases=biases, dtype=dtype
    )
    index = IndexTensors.of(graph.with_reverse())
    detached = leaves(sublayers.fill(AttentionTensors, named))
    inputs = [None if x is None else x.clone().requires_grad_() for x in detached]
    torch.library.opcheck(attention_sublayer_triton.op, (*inputs, *index, *leaves(options), True))
    save = True
    _, kept = attention_sublayer_triton.op(*detached, *index, *leaves(options), save)
    for needs in ([x is not None for x in detached], [name == "x_dst" for name in NAMES]):
        arguments = (*detached, *index, *leaves(options), kept, grad, needs)
        torch.library.opcheck(attention_sublayer_triton.op_backward, arguments)


@pytest.mark.parametrize("norm", ["both", 4])
def test_rows_of_the_attention_and_cast_weights_are_kept_and_no_rows_of_scale_and_shift(
    norm, kernel_device
):
    named, _, graph, _, options = draw(kernel_device, norm, dtype=torch.bfloat16)
    graph = graph.with_reverse()
    inputs = {name: tensor.requires_grad_() for name, tensor in named.items()}
    out = by_operator(inputs, graph, options)
    inputs = {tensor.data_ptr() for tensor in (*inputs.values(), *graph.state_dict().values())}
    kept = [x for x in out.grad_fn.saved_tensors if x is not None and x.data_ptr() not in inputs]
    weights = {
        name: x.numel()
        for name, x in named.items()
        if name.endswith("_weight") and "map" not in name
    }
    # biases: of query, self, key and value, and of edges
    num_weights = sum(weights.values()) + 5 * WIDTH + FEATURES
    if norm == 4:
        num_weights += 2 * (2 * FEATURES * norm + 2 * FEATURES)
    in_16_bits = num_weights + 2 * (DST + SRC) * WIDTH + EDGES * EDGE_DIM  # [q, y] and [k, v]
    in_16_bits += DST * HEADS * 16  # W^T q, padded
    in_32_bits = DST * HEADS + EDGES * HEADS  # 1 / sum of exponentials, exponentials
    num_bytes = 2 * in_16_bits + 4 * in_32_bits
    (block,) = kept
    assert num_bytes <= block.numel() <= num_bytes + 7 * 512


def test_only_gradients_that_are_needed_are_returned_and_a_second_derivative_is_refused(
    kernel_device,
):
    named, _, graph, _, options = draw(kernel_device)
    x = named["x_dst"].requires_grad_()
    out = by_operator(named, graph, options)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert named["query_weight"].grad is None
    with pytest.raises(
        RuntimeError, match="double backward is not supported by attention_sublayer, got"
    ):
        gradient.sum().backward()


def test_frozen_projections_cost_no_product_and_change_no_other_gradient(kernel_device):
    named, grad, graph, _, options = draw(kernel_device, 4)
    graph = graph.with_reverse()
    compute = partial(by_operator, graph=graph, options=options)
    expected = sublayers.results_of(compute, named, grad, torch.float32)
    projections = ("query", "self_term", "key", "value", "projection")
    others = [name for name in named if name not in {f"{x}_weight" for x in projections}]
    for name in others:
        named[name].requires_grad_()
    gradients = torch.autograd.grad(compute(named), [named[name] for name in others], grad)
    for name, gradient in zip(others, gradients, strict=True):
        assert torch.equal(gradient, expected[f"d{name}"]), name

    tensors = leaves(sublayers.fill(AttentionTensors, named))
    plans = attention_sublayer_triton.passes((*tensors, *IndexTensors.of(graph)), options)
    trained, _ = plans.backward_plan(tuple(name in named for name in NAMES), (True,))
    frozen, _ = plans.backward_plan(tuple(name in others for name in NAMES), (True,))
    assert len(frozen.steps) == len(trained.steps) - 3  # of [query, y], [key, value], projection
