"""The feed-forward sub-layer: accuracy against float64, operator registration, and saved tensors."""

from functools import partial

import pytest
import torch
from support import sublayers
from support.accuracy import Corpus
from support.nightly import nightly
from support.plans import new_plans

from anemoi_gt.ops.sublayer_tensors import FeedForwardOptions, FeedForwardTensors, NormOptions
from anemoi_gt.ops.tree import leaf_types, leaves
from anemoi_gt.ops.triton_backend.feed_forward_sublayer import (
    feed_forward_sublayer,
    feed_forward_triton,
)

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
SIZES = sublayers.Sizes()
ROWS = SIZES.rows
FEATURES = SIZES.features
HIDDEN = SIZES.hidden
NAMES = list(leaf_types(FeedForwardTensors))
WEIGHTS = ("gate_weight", "hidden_weight", "out_weight")
draw = sublayers.draw_feed_forward


@pytest.fixture(autouse=True)
def small_chunks():
    """Several chunks of rows, the last of another size."""
    with new_plans(chunk=5, programs=3):
        yield


def by_operator(
    named, activation="gelu", dtype=torch.float32, *, keep_hidden=True, norm=sublayers.NORM
):
    options = FeedForwardOptions(norm, activation, dtype, keep_hidden)
    return feed_forward_sublayer(sublayers.fill(FeedForwardTensors, named), options)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", sublayers.CORPUS_DTYPES, ids=str)
def test_corpus_errors_are_at_most_two_and_three_times_plain_pytorchs(dtype, kernel_device):
    corpus = Corpus()
    for seed, case in enumerate(sublayers.FEED_FORWARD_CASES):
        named, grad = draw(kernel_device, seed=seed, **case)
        described = {
            "norm": NormOptions(sublayers.EPS, case["centred"]),
            "activation": case["activation"],
        }
        plainly = partial(sublayers.feed_forward, **described)
        exact = sublayers.results_of(plainly, named, grad, torch.float64)
        with torch.autocast(kernel_device.type, dtype, enabled=dtype != torch.float32):
            plain = sublayers.results_of(plainly, named, grad, torch.float32)
        ours = partial(by_operator, dtype=dtype, **described)
        corpus.add_errors(sublayers.results_of(ours, named, grad, torch.float32), exact, plain)
    assert len(corpus.ours) == 1 + len(leaf_types(FeedForwardTensors))
    corpus.assert_accurate()


@pytest.mark.compiled
@pytest.mark.parametrize("norm", ["both", 4])
@pytest.mark.parametrize("dynamic", [True, *nightly((False,))])
def test_a_compiled_call_gives_the_bits_of_an_eager_one_and_so_does_another(
    norm, dynamic, kernel_device
):
    torch.compiler.reset()
    compiled = torch.compile(by_operator, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (ROWS, 9):
        named, grad = draw(kernel_device, norm, gated=True, sizes=SIZES._replace(rows=rows))
        eager, again, traced = (
            sublayers.results_of(call, named, grad, torch.float32)
            for call in (by_operator, by_operator, compiled)
        )
        for name, expected in eager.items():
            assert torch.equal(again[name], expected), name
            assert torch.equal(traced[name], expected), name


def test_chunks_change_only_rounding(kernel_device):
    named, grad = draw(kernel_device, 4)
    exact = sublayers.results_of(by_operator, named, grad, torch.float32)
    with new_plans(chunk=100, programs=3):
        whole = sublayers.results_of(by_operator, named, grad, torch.float32)
    for name, expected in exact.items():
        torch.testing.assert_close(whole[name], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("norm", "gated", "keep_hidden"),
    [("both", False, False), ("bare", True, True), (4, False, True)],
)
@pytest.mark.usefixtures("filled_padding")
def test_forward_and_backward_operators_pass_opcheck(norm, gated, keep_hidden, kernel_device):
    named, grad = draw(kernel_device, norm, gated=gated)
    options = FeedForwardOptions(sublayers.NORM, "silu", torch.float32, keep_hidden)
    detached = leaves(sublayers.fill(FeedForwardTensors, named))
    inputs = [None if x is None else x.clone().requires_grad_() for x in detached]
    torch.library.opcheck(feed_forward_triton.op, (*inputs, *leaves(options), True))
    save = True
    _, kept = feed_forward_triton.op(*detached, *leaves(options), save)
    for needs in ([x is not None for x in detached], [name == "x" for name in NAMES]):
        arguments = (*detached, *leaves(options), kept, grad, needs)
        torch.library.opcheck(feed_forward_triton.op_backward, arguments)


@pytest.mark.parametrize("gated", [False, True])
def test_x_hidden_features_and_cast_weights_are_kept_and_nothing_else(gated, kernel_device):
    named, _ = draw(kernel_device, 4, gated=gated)
    leaves = {name: tensor.requires_grad_() for name, tensor in named.items()}
    out = by_operator(leaves, dtype=torch.bfloat16)
    inputs = {tensor.data_ptr() for tensor in leaves.values()}
    kept = [x for x in out.grad_fn.saved_tensors if x is not None and x.data_ptr() not in inputs]
    width = (1 + gated) * HIDDEN
    weights = (
        width * FEATURES + width + HIDDEN * FEATURES + FEATURES + 2 * FEATURES * 4 + 2 * FEATURES
    )
    (block,) = kept
    num_bytes = 2 * (ROWS * width + weights)
    assert num_bytes <= block.numel() <= num_bytes + 2 * 512
    out = by_operator(leaves, dtype=torch.bfloat16, keep_hidden=False)
    (block,) = (x for x in out.grad_fn.saved_tensors if x is not None and x.dtype == torch.uint8)
    assert 2 * weights <= block.numel() <= 2 * weights + 512


@pytest.mark.parametrize(("norm", "gated"), [("both", False), ("bare", True), (4, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hidden_layer_computed_again_gives_the_bits_of_one_that_is_kept(
    norm, gated, dtype, kernel_device
):
    named, grad = draw(kernel_device, norm, gated=gated)
    kept, computed_again = (
        sublayers.results_of(
            partial(by_operator, dtype=dtype, keep_hidden=keep_hidden), named, grad, torch.float32
        )
        for keep_hidden in (True, False)
    )
    for name, expected in kept.items():
        assert torch.equal(computed_again[name], expected), name


def test_only_gradients_that_are_needed_are_returned_and_a_second_derivative_is_refused(
    kernel_device,
):
    named, _ = draw(kernel_device)
    x = named["x"].requires_grad_()
    out = by_operator(named)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert named["hidden_weight"].grad is None
    with pytest.raises(RuntimeError, match="double backward is not supported by feed_forward, got"):
        gradient.sum().backward()


def test_frozen_linear_maps_cost_no_product_and_change_no_other_gradient(kernel_device):
    named, grad = draw(kernel_device, 4, gated=True)
    expected = sublayers.results_of(by_operator, named, grad, torch.float32)
    others = [name for name in named if name not in WEIGHTS]
    for name in others:
        named[name].requires_grad_()
    out = by_operator(named)
    gradients = torch.autograd.grad(out, [named[name] for name in others], grad)
    for name, gradient in zip(others, gradients, strict=True):
        assert torch.equal(gradient, expected[f"d{name}"]), name

    options = FeedForwardOptions(sublayers.NORM, "gelu", torch.float32, keep_hidden=True)
    plans = feed_forward_triton.passes(leaves(sublayers.fill(FeedForwardTensors, named)), options)
    trained, _ = plans.backward_plan(tuple(name in named for name in NAMES), (True,))
    frozen, _ = plans.backward_plan(tuple(name in others for name in NAMES), (True,))
    assert len(frozen.steps) == len(trained.steps) - 2 * 3  # two weights in three chunks of rows
