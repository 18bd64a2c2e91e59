"""The linear layer: accuracy against float64, operator registration, padding, needs, what is kept."""

from functools import partial

import pytest
import torch
from support import sublayers
from support.accuracy import Corpus
from support.plans import new_plans

from anemoi_gt.ops.sublayer_tensors import NormLinearOptions, NormLinearTensors, NormOptions
from anemoi_gt.ops.tree import leaf_types, leaves
from anemoi_gt.ops.triton_backend import sublayer_steps
from anemoi_gt.ops.triton_backend.norm_linear import norm_linear, norm_linear_triton

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
NAMES = list(leaf_types(NormLinearTensors))
NO_NORM = NormOptions()
draw = sublayers.draw_norm_linear


@pytest.fixture(autouse=True)
def small_chunks():
    """Several chunks of rows, the last of another size."""
    with new_plans(chunk=5, programs=3):
        yield


def norm_of(case):
    return NO_NORM if case["norm"] is None else NormOptions(sublayers.EPS, case["centred"])


def by_operator(named, norm=sublayers.NORM, dtype=torch.float32):
    tensors = sublayers.fill(NormLinearTensors, named)
    return norm_linear(tensors, NormLinearOptions(norm, dtype))


def steps_of(named, needs, norm, dtype=torch.bfloat16):
    """Return the functions and kernels of the backward plan for gradients of these names."""
    flat = leaves(sublayers.fill(NormLinearTensors, named))
    plans = norm_linear_triton.passes(flat, NormLinearOptions(norm, dtype))
    plan, _ = plans.backward_plan(tuple(name in needs for name in NAMES), (True,))
    return [
        getattr(step, "function", None) or step.launch.kernel.fn.__name__ for step in plan.steps
    ]


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", sublayers.DTYPES, ids=str)
def test_corpus_errors_are_at_most_two_and_three_times_plain_pytorchs(dtype, kernel_device):
    corpus = Corpus()
    for seed, case in enumerate(sublayers.NORM_LINEAR_CASES):
        named, grad = draw(kernel_device, seed=seed, **case)
        norm = norm_of(case)
        plainly = partial(sublayers.norm_linear, norm=norm)
        exact = sublayers.results_of(plainly, named, grad, torch.float64)
        with torch.autocast(kernel_device.type, dtype, enabled=dtype != torch.float32):
            plain = sublayers.results_of(plainly, named, grad, torch.float32)
        ours = sublayers.results_of(
            partial(by_operator, norm=norm, dtype=dtype), named, grad, torch.float32
        )
        assert ours["out"].dtype == plain["out"].dtype == dtype
        corpus.add_errors(ours, exact, plain)
    assert len(corpus.ours) == 1 + len(NAMES)
    corpus.assert_accurate()


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [sublayers.NORM, NO_NORM], ids=["norm", "no norm"])
def test_a_gradient_has_the_dtype_of_its_tensor_and_no_rows_give_zeros(
    norm, x_dtype, kernel_device
):
    named, grad = draw(kernel_device, "both" if norm.eps else None, columns=11, rows=0)
    inputs = {name: tensor.requires_grad_() for name, tensor in named.items()}
    x = named["x"].detach().to(x_dtype).requires_grad_()
    out = by_operator(inputs | {"x": x}, norm, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    out.backward(grad.to(out.dtype))
    assert x.grad.dtype == x_dtype
    for name, tensor in inputs.items():
        if name != "x":
            assert torch.equal(tensor.grad, torch.zeros_like(tensor)), name


@pytest.mark.compiled
@pytest.mark.parametrize("norm", [sublayers.NORM, NO_NORM], ids=["norm", "no norm"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_gives_the_bits_of_an_eager_one_and_so_does_another(
    norm, dynamic, kernel_device
):
    torch.compiler.reset()
    call = partial(by_operator, norm=norm, dtype=torch.bfloat16)
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (13, 9):
        named, grad = draw(kernel_device, "both" if norm.eps else None, columns=11, rows=rows)
        eager, again, traced = (
            sublayers.results_of(one, named, grad, torch.float32) for one in (call, call, compiled)
        )
        for name, expected in eager.items():
            assert torch.equal(again[name], expected), name
            assert torch.equal(traced[name], expected), name


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("norm", "bias", "dtype"),
    [
        ("both", True, torch.float32),
        ("bare", False, torch.bfloat16),
        (None, True, torch.bfloat16),
        (None, False, torch.float32),
    ],
)
@pytest.mark.usefixtures("filled_padding")
def test_forward_and_backward_operators_pass_opcheck(norm, bias, dtype, kernel_device):
    named, grad = draw(kernel_device, norm, bias=bias, columns=11)
    options = NormLinearOptions(sublayers.NORM if norm else NO_NORM, dtype)
    detached = leaves(sublayers.fill(NormLinearTensors, named))
    inputs = [None if x is None else x.clone().requires_grad_() for x in detached]
    torch.library.opcheck(norm_linear_triton.op, (*inputs, *leaves(options), True))
    save = True
    _, kept = norm_linear_triton.op(*detached, *leaves(options), save)
    every = [x is not None for x in detached]
    for needs in (every, *([name == one for name in NAMES] for one in ("x", "linear_weight"))):
        arguments = (*detached, *leaves(options), kept, grad.to(dtype), needs)
        torch.library.opcheck(norm_linear_triton.op_backward, arguments)


@pytest.mark.parametrize("columns", [8, 11])
@pytest.mark.parametrize("out_columns", [8, 13])
def test_products_of_16_bits_read_and_write_rows_of_multiples_of_16_bytes(
    columns, out_columns, kernel_device
):
    named, _ = draw(kernel_device, None, columns=columns, out_columns=out_columns)
    flat = leaves(sublayers.fill(NormLinearTensors, named))
    plans = norm_linear_triton.passes(flat, NormLinearOptions(NO_NORM, torch.bfloat16))
    every = tuple(name in named for name in NAMES)
    for plan in (plans.forward_plan(save=True), plans.backward_plan(every, (True,))[0]):
        for step in plan.steps:
            if not hasattr(step, "function"):
                continue
            views = [plan.viewed[number].buffer for number in (*step.views, step.out or 0)]
            for view in views:
                if view.dtype == torch.bfloat16 and len(view.shape) == 2:
                    assert max(view.stride) % 8 == 0, (step.function, view)


def test_only_gradients_that_are_needed_cost_steps(kernel_device):
    named, _ = draw(kernel_device, "both", rows=4)
    with_norm = partial(steps_of, named, norm=sublayers.NORM)
    assert "norm_bwd" in with_norm(["scale"])
    assert "norm_bwd" not in with_norm(["linear_weight", "linear_bias"])
    assert "sum_columns" not in with_norm(["x", "scale", "linear_weight"])

    named, _ = draw(kernel_device, None, columns=11, out_columns=8, rows=4)
    without = partial(steps_of, named, norm=NO_NORM)
    assert without(["x"]) == [torch.mm, "resize"]
    assert without(["linear_bias"]) == [sublayer_steps.zero, "sum_columns", "sum_partial"]
    assert torch.mm not in without(["linear_weight", "linear_bias"])


def test_a_second_derivative_is_refused(kernel_device):
    named, _ = draw(kernel_device)
    x = named["x"].requires_grad_()
    (gradient,) = torch.autograd.grad(by_operator(named).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported by norm_linear, got"):
        gradient.sum().backward()


@pytest.mark.parametrize("norm", [sublayers.NORM, NO_NORM], ids=["norm", "no norm"])
def test_x_and_cast_weights_are_kept_and_nothing_else(norm, kernel_device):
    named, _ = draw(kernel_device, None)
    inputs = {name: tensor.requires_grad_() for name, tensor in named.items()}
    out = by_operator(inputs, norm, torch.bfloat16)
    addresses = {tensor.data_ptr() for tensor in inputs.values()}
    (kept,) = (
        x for x in out.grad_fn.saved_tensors if x is not None and x.data_ptr() not in addresses
    )
    num_bytes = 2 * 16 * (24 + 1)  # 13 rows of the weight and a bias, padded to 16
    assert num_bytes <= kept.numel() <= num_bytes + 2 * 512


def test_chunks_change_only_rounding(kernel_device):
    named, grad = draw(kernel_device)
    exact = sublayers.results_of(by_operator, named, grad, torch.float32)
    with new_plans(chunk=100, programs=3):
        whole = sublayers.results_of(by_operator, named, grad, torch.float32)
    for name, expected in exact.items():
        torch.testing.assert_close(whole[name], expected, rtol=1e-4, atol=1e-4)
