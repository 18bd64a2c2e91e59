"""Row kernels against float64 PyTorch: each result is exact but for its rounding and float32 arithmetic."""

import re
from pathlib import Path

import pytest
import torch
from support.compiling import lines_of
from support.ir import narrow_offsets
from support.nightly import nightly
from support.pairwise import pairwise
from support.releases import TRITON
from torch.nn import functional

from anemoi_gt.ops import activations
from anemoi_gt.ops.tensors import NormOptions
from anemoi_gt.ops.triton_backend import row_launches

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = (0, 1, 37)
FEATURES = (1, 24, 67, 1000)
EPS = 1e-5
NORM = NormOptions(EPS)
NORMS = (NORM, NormOptions(EPS, is_centred=False))  # layer norm and RMSNorm
PROGRAMS = 2  # few, so that each has several tiles
FLOAT32 = 64 * torch.finfo(torch.float32).eps  # of float32 sums over a row, relative to their terms

ACTIVATIONS = {name: known.module() for name, known in activations.ACTIVATIONS.items()}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def draw(kernel_device):
    def make(*shape, dtype=torch.float32):
        return torch.randn(*shape, dtype=torch.float32).to(kernel_device, dtype)

    return make


@pytest.fixture
def poisoned(kernel_device):
    def make(*shape, dtype=torch.float32):
        return torch.full(shape, float("nan"), dtype=dtype, device=kernel_device)

    return make


@pytest.fixture
def make_partial(kernel_device):
    return lambda sums: torch.zeros(PROGRAMS, sums, device=kernel_device)


def exact(tensor):
    """Return the same elements in float64, as a leaf that takes a gradient."""
    return None if tensor is None else tensor.detach().double().requires_grad_()


def assert_rounded(name, result, reference, term=0.0):
    """Assert that `result` is `reference` but for one rounding to its dtype and float32 arithmetic.

    `term` is the largest term of a sum in which all may cancel: a fused multiply-add of a GPU leaves
    one rounding of it.
    """
    assert result.shape == reference.shape
    eps = torch.finfo(result.dtype).eps
    size = max(1.0, reference.abs().max().item()) if reference.numel() else 1.0
    torch.testing.assert_close(
        result.double(),
        reference.detach().double(),
        rtol=eps,
        atol=FLOAT32 * size + torch.finfo(torch.float32).eps * term,
        msg=lambda text: f"{name}: {text}",
    )


def normal(x, norm=NORM):
    function = functional.layer_norm if norm.is_centred else functional.rms_norm
    return function(x, x.shape[-1:], eps=EPS)


def largest_term(x, y, n, dy, norm):
    """Return the largest |term| of dx = (dn - mean(dn) - n mean(n dn)) / std(x), where y is a function of n = norm(x)."""
    if not x.numel():
        return 0.0
    (dn,) = torch.autograd.grad(y, n, dy, retain_graph=True)
    centred = x - x.mean(-1, keepdim=True) if norm.is_centred else x
    std = (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    return (dn / std).abs().max().item()


def modulated(n, scale, shift, modulation):
    """Return n scale + shift, with scale and shift [F], absent, or rows of `modulation`."""
    if modulation is not None:
        scale, shift = modulation.chunk(2, dim=-1)
    n = n if scale is None else n * scale
    return n if shift is None else n + shift


def norm_parameters(draw, num_rows, features, form, dtype):
    """Return scale, shift and modulation of one of FORMS; parameters are float32, modulation has `dtype`."""
    scale = draw(features) if form in ("scale and shift", "scale") else None
    shift = draw(features) if form in ("scale and shift", "shift") else None
    modulation = draw(num_rows, 2 * features, dtype=dtype) if form == "modulated" else None
    return {"scale": scale, "shift": shift, "modulation": modulation}


FORMS = ("scale and shift", "scale", "shift", "neither", "modulated")


def pairs(**columns):
    """Parametrise a test over rows in which every two values of two columns meet."""
    cases = [tuple(row[name] for name in columns) for row in pairwise(**columns)]
    return pytest.mark.parametrize(tuple(columns), cases)


of_norms = pairs(num_rows=ROWS, features=FEATURES, form=FORMS, norm=NORMS)


@of_norms
def test_norm_equals_pytorchs(draw, poisoned, num_rows, features, form, norm):
    x = draw(num_rows, features)
    parameters = norm_parameters(draw, num_rows, features, form, torch.float32)
    out = poisoned(num_rows, features)
    row_launches.norm_forward(num_rows, features, norm)(x=x, out=out, **parameters)
    in_float64 = {name: exact(value) for name, value in parameters.items()}
    assert_rounded("out", out, modulated(normal(x.double(), norm), **in_float64))


@pytest.mark.parametrize("form", ["scale and shift", "modulated"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_norm_rounds_once_to_the_dtype_of_its_output(draw, poisoned, form, dtype, out_dtype):
    x, parameters = draw(37, 67, dtype=dtype), norm_parameters(draw, 37, 67, form, out_dtype)
    out = poisoned(37, 67, dtype=out_dtype)
    row_launches.norm_forward(37, 67, NORM)(x=x, out=out, **parameters)
    assert_rounded(
        "out", out, modulated(normal(x.double()), **{k: exact(v) for k, v in parameters.items()})
    )


def test_norm_of_batch_entries_fills_rows_before_the_halo_and_no_others(draw, poisoned):
    x, scale, shift = draw(3 * 7, 24), draw(24), draw(24)
    out = poisoned(3, 9, 24)
    launch = row_launches.norm_forward(21, 24, NORM, batch=3, out_entry_rows=9)
    launch(x=x, scale=scale, shift=shift, modulation=None, out=out)
    assert_rounded(
        "out", out[:, :7].flatten(0, 1), normal(x.double()) * scale.double() + shift.double()
    )
    assert out[:, 7:].isnan().all()


def norm_gradients(x, grad_normed, grad_total, parameters, norm=NORM):
    """Return results of `norm_bwd` by name, in float64, and the largest term of dx."""
    leaves = {name: exact(value) for name, value in parameters.items()}
    x = exact(x)
    n = normal(x, norm)
    y = modulated(n, **leaves)
    dy = grad_normed.double()
    term = largest_term(x, y, n, dy, norm)
    (dx,) = torch.autograd.grad(y, x, dy)
    results = {"largest term": term, "dx": dx, "normed": y, "grad_scale": dy * n}
    results["sums"] = torch.cat([(dy * n).sum(0), dy.sum(0)])
    if grad_total is not None:
        results["dx"] = dx + grad_total.double()
        results["sums"] = torch.cat([results["sums"], grad_total.double().sum(0)])
    return results


def run_norm_backward(
    draw,
    poisoned,
    make_partial,
    num_rows,
    features,
    form,
    dtype,
    residual_dtype,
    total_dtype,
    norm=NORM,
):
    x = draw(num_rows, features, dtype=residual_dtype)
    grad_normed = draw(num_rows, features, dtype=dtype)
    grad_total = None if total_dtype is None else draw(num_rows, features, dtype=total_dtype)
    parameters = norm_parameters(draw, num_rows, features, form, dtype)
    results = {"dx": poisoned(num_rows, features, dtype=residual_dtype)}
    results |= {
        name: poisoned(num_rows, features, dtype=dtype) for name in ("normed", "grad_scale")
    }
    has_total = grad_total is not None
    sums = (3 if has_total else 2) * features
    partial = make_partial(5 + sums + 3)
    launch = row_launches.norm_backward(
        num_rows, features, norm, programs=PROGRAMS, sums=5 + sums + 3, first_sum=5, total=has_total
    )
    launch(
        x=x,
        grad_normed=grad_normed,
        grad_total=grad_total,
        partial=partial,
        **parameters,
        **results,
    )
    reference = norm_gradients(x, grad_normed, grad_total, parameters, norm)
    for name, result in results.items():
        term = reference["largest term"] if name == "dx" else 0.0
        assert_rounded(name, result, reference[name], term)
    assert_rounded("sums", partial.sum(0)[5:-3], reference["sums"])
    assert not partial[:, :5].any()
    assert not partial[:, -3:].any()


@of_norms
def test_gradients_of_a_norm_equal_pytorchs(
    draw, poisoned, make_partial, num_rows, features, form, norm
):
    fixtures = (draw, poisoned, make_partial)
    run_norm_backward(*fixtures, num_rows, features, form, *[torch.float32] * 3, norm)


@pairs(
    form=("scale and shift", "modulated"),
    total_dtype=(None, *DTYPES),
    residual_dtype=(torch.float32, torch.bfloat16),
    dtype=(torch.float16, torch.bfloat16),
)
def test_gradients_of_a_norm_with_any_dtypes(
    draw, poisoned, make_partial, form, total_dtype, residual_dtype, dtype
):
    run_norm_backward(
        draw, poisoned, make_partial, 19, 67, form, dtype, residual_dtype, total_dtype
    )


def test_gradient_of_a_norm_reads_and_writes_rows_before_the_halo(draw, poisoned, make_partial):
    x, scale, wide = draw(3 * 7, 24), draw(24), draw(3, 9, 24)
    normed, dx, partial = poisoned(3, 9, 24), poisoned(21, 24), make_partial(48)
    launch = row_launches.norm_backward(
        21, 24, NORM, programs=PROGRAMS, sums=48, first_sum=0, batch=3, normed_entry_rows=9
    )
    launch(
        x=x,
        grad_normed=wide,
        grad_total=None,
        scale=scale,
        shift=None,
        modulation=None,
        dx=dx,
        normed=normed,
        grad_scale=None,
        partial=partial,
    )
    parameters = {"scale": scale, "shift": None, "modulation": None}
    reference = norm_gradients(x, wide[:, :7].flatten(0, 1), None, parameters)
    assert_rounded("dx", dx, reference["dx"])
    assert_rounded("normed", normed[:, :7].flatten(0, 1), reference["normed"])
    assert_rounded("sums", partial.sum(0), reference["sums"])
    assert normed[:, 7:].isnan().all()


def test_launches_add_to_the_same_sums(draw, poisoned, make_partial):
    partial, total = make_partial(2 * 24), 0.0
    launch = row_launches.norm_backward(9, 24, NORM, programs=PROGRAMS, sums=48, first_sum=0)
    parameters = {"scale": draw(24), "shift": None, "modulation": None}
    for _ in range(2):
        x, grad_normed = draw(9, 24), draw(9, 24)
        launch(
            x=x,
            grad_normed=grad_normed,
            grad_total=None,
            dx=poisoned(9, 24),
            normed=poisoned(9, 24),
            grad_scale=None,
            partial=partial,
            **parameters,
        )
        total = total + norm_gradients(x, grad_normed, None, parameters)["sums"]
    assert_rounded("sums", partial.sum(0), total)


@pytest.mark.parametrize("features", [1025, 3000])
def test_norm_of_more_features_than_a_tile(draw, poisoned, make_partial, features):
    x = draw(5, features)
    parameters = norm_parameters(draw, 5, features, "scale and shift", torch.float32)
    out = poisoned(5, features)
    row_launches.norm_forward(5, features, NORM)(x=x, out=out, **parameters)
    assert_rounded(
        "out", out, modulated(normal(x.double()), **{k: exact(v) for k, v in parameters.items()})
    )
    float32 = torch.float32
    run_norm_backward(
        draw, poisoned, make_partial, 5, features, "modulated", float32, float32, float32
    )


# ----------------------------------------------------------------------------------------------
# norms of heads


@pairs(
    num_rows=ROWS,
    shape=((1, 1), (3, 5), (4, 32), (16, 64), (2, 67)),
    has_scale=(True, False),
    norm=NORMS,
)
def test_head_norm_and_its_gradients(
    draw, poisoned, make_partial, num_rows, shape, has_scale, norm
):
    heads, channels = shape
    width = heads * channels
    stride, columns = 3 * width, slice(width, 2 * width)  # of query, key and value
    key = draw(num_rows, stride)[:, columns]
    scale, out = draw(channels) if has_scale else None, poisoned(num_rows, stride)
    forward = row_launches.head_norm_forward(num_rows, heads, channels, norm, stride=stride)
    forward(x=key, scale=scale, out=out[:, columns])
    x = exact(key.unflatten(-1, (heads, channels)))
    n = normal(x, norm)
    y = n if scale is None else n * scale.double()
    assert_rounded("out", out[:, columns], y.flatten(1))
    assert out[:, :width].isnan().all()
    assert out[:, 2 * width :].isnan().all()

    partial, dx = make_partial(channels), poisoned(num_rows, stride)
    grad_columns = draw(num_rows, stride)[:, columns]
    grad = grad_columns.unflatten(-1, (heads, channels))
    backward = row_launches.head_norm_backward(
        num_rows,
        heads,
        channels,
        norm,
        stride=stride,
        programs=PROGRAMS,
        sums=channels,
        first_sum=0,
    )
    backward(
        x=key,
        grad_normed=grad_columns,
        scale=scale,
        dx=dx[:, columns],
        partial=partial if has_scale else None,
    )
    term = largest_term(x, y, n, grad.double(), norm)
    (exact_dx,) = torch.autograd.grad(y, x, grad.double())
    assert_rounded("dx", dx[:, columns], exact_dx.flatten(1), term)
    assert dx[:, :width].isnan().all()
    assert dx[:, 2 * width :].isnan().all()
    if has_scale:
        assert_rounded("dscale", partial.sum(0), (grad.double() * n).sum((0, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_a_head_norm_may_overwrite_the_incoming_gradient(draw, make_partial, dtype):
    rows, scale, grads = draw(37, 3 * 40, dtype=dtype), draw(10), draw(37, 3 * 40, dtype=dtype)
    partial, before = make_partial(10), grads.clone()
    key, columns = rows[:, 40:80], grads[:, 40:80]
    launch = row_launches.head_norm_backward(
        37,
        4,
        10,
        NORM,
        stride=120,
        programs=PROGRAMS,
        sums=10,
        first_sum=0,
    )
    launch(x=key, grad_normed=columns, scale=scale, dx=columns, partial=partial)
    x, dy = exact(key.reshape(37, 4, 10)), before[:, 40:80].reshape(37, 4, 10).double()
    (dx,) = torch.autograd.grad(normal(x) * scale.double(), x, dy)
    assert_rounded("dx", columns, dx.flatten(1))
    assert_rounded("dscale", partial.sum(0), (dy * normal(x)).sum((0, 1)))
    assert torch.equal(grads[:, :40], before[:, :40])
    assert torch.equal(grads[:, 80:], before[:, 80:])


# ----------------------------------------------------------------------------------------------
# activations


def activate(hidden, activation, gated):
    if not gated:
        return ACTIVATIONS[activation](hidden)
    gate, value = hidden.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * value


def run_activation(draw, poisoned, make_partial, num_rows, features, activation, gated, dtype):
    width = 2 * features if gated else features
    hidden, grad = 3 * draw(num_rows, width, dtype=dtype), draw(num_rows, features, dtype=dtype)
    out = poisoned(num_rows, features, dtype=dtype)
    row_launches.activation_forward(num_rows, features, activation, gated=gated)(
        hidden=hidden, out=out
    )
    h = exact(hidden)
    reference = activate(h, activation, gated)
    assert_rounded("out", out, reference)

    partial, grad_hidden = make_partial(width + 4), poisoned(num_rows, width, dtype=dtype)
    launch = row_launches.activation_backward(
        num_rows, features, activation, gated=gated, programs=PROGRAMS, sums=width + 4, first_sum=3
    )
    activated = poisoned(num_rows, features, dtype=dtype)
    launch(
        hidden=hidden,
        grad_activated=grad,
        activated=activated,
        grad_hidden=grad_hidden,
        partial=partial,
    )
    (dh,) = torch.autograd.grad(reference, h, grad.double())
    assert_rounded("activated", activated, reference)
    assert_rounded("grad_hidden", grad_hidden, dh)
    assert_rounded("sums", partial.sum(0)[3:-1], dh.sum(0))
    assert not partial[:, :3].any()
    assert not partial[:, -1].any()

    in_place, grad_hidden = grad.clone(), torch.full_like(hidden, float("nan"))
    launch(
        hidden=hidden,
        grad_activated=in_place,
        activated=in_place,
        grad_hidden=grad_hidden,
        partial=make_partial(width + 4),
    )
    assert_rounded("activated in place", in_place, reference)
    assert_rounded("grad_hidden in place", grad_hidden, dh)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_and_its_gradient(draw, poisoned, make_partial, activation, gated, dtype):
    run_activation(draw, poisoned, make_partial, 13, 67, activation, gated, dtype)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_activation_of_any_number_of_rows_and_features(
    draw, poisoned, make_partial, num_rows, features, gated
):
    run_activation(draw, poisoned, make_partial, num_rows, features, "silu", gated, torch.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_the_largest_finite_numbers_is_finite(poisoned, kernel_device, activation):
    most = torch.finfo(torch.float32).max
    hidden = torch.tensor(
        [[-most, -1e20, -100.0, -0.0, 0.0, 100.0, 1e20, most]], device=kernel_device
    )
    out, grad_hidden = poisoned(1, 8), poisoned(1, 8)
    row_launches.activation_forward(1, 8, activation, gated=False)(hidden=hidden, out=out)
    launch = row_launches.activation_backward(
        1, 8, activation, gated=False, programs=1, sums=8, first_sum=0
    )
    ones = torch.ones_like(hidden)
    launch(
        hidden=hidden,
        grad_activated=ones,
        activated=poisoned(1, 8),
        grad_hidden=grad_hidden,
        partial=torch.zeros(1, 8, device=kernel_device),
    )
    slope = {"sigmoid": [0, 0, 0, 0.25, 0.25, 0, 0, 0], "relu": [0, 0, 0, 0, 0, 1, 1, 1]}
    slope["mish"] = [0, 0, 0, 0.6, 0.6, 1, 1, 1]
    expected = slope.get(activation, [0, 0, 0, 0.5, 0.5, 1, 1, 1])
    assert torch.isfinite(out).all()
    torch.testing.assert_close(grad_hidden[0].cpu(), torch.tensor(expected, dtype=torch.float32))


def test_relu_passes_nan_as_pytorch_does(poisoned, kernel_device):
    hidden, out = torch.tensor([[float("nan"), 1.0]], device=kernel_device), poisoned(1, 2)
    row_launches.activation_forward(1, 2, "relu", gated=False)(hidden=hidden, out=out)
    assert out[0, 0].isnan()
    assert out[0, 1] == 1


# ----------------------------------------------------------------------------------------------
# launches


def all_launches(num_rows):
    sums = {"programs": PROGRAMS, "sums": 9, "first_sum": 0}
    yield row_launches.norm_forward(num_rows, 512, NORM)
    yield row_launches.norm_backward(num_rows, 512, NORM, **sums)
    yield row_launches.head_norm_forward(num_rows, 16, 32, NORM, stride=512)
    yield row_launches.head_norm_backward(num_rows, 16, 32, NORM, stride=512, **sums)
    yield row_launches.activation_forward(num_rows, 512, "silu", gated=True)
    yield row_launches.activation_backward(num_rows, 512, "silu", gated=True, **sums)


def test_offsets_have_64_bits_where_they_can_pass_2_to_31():
    assert not any(launch.constants["INT64"] for launch in all_launches(2_000_000))
    assert all(launch.constants["INT64"] for launch in all_launches(2**31 // 512))


def test_sizes_of_a_graph_change_nothing_that_is_compiled():
    for few, many in zip(all_launches(1), all_launches(542_080), strict=True):
        assert few.constants == many.constants
        interpreted = getattr(few.kernel, "kwargs", None)
        names = (
            few.kernel.do_not_specialize
            if interpreted is None
            else interpreted["do_not_specialize"]
        )
        assert set(few.scalars) == {*names} | ({"eps"} & set(few.scalars))


def test_without_rows_only_kernels_that_write_sums_are_launched():
    for launch in all_launches(0):
        assert (0 in launch.grid) == ("partial" not in launch.tensors)


def test_names_in_a_profile_contain_kernel_dtype_and_sizes():
    names = [launch.name({"x": "*bf16", "hidden": "*bf16"}) for launch in all_launches(37)]
    assert names == [
        "anemoi_gt_norm_fwd_bf16_f512",
        "anemoi_gt_norm_bwd_bf16_f512",
        "anemoi_gt_head_norm_fwd_bf16_h16_c32",
        "anemoi_gt_head_norm_bwd_bf16_h16_c32",
        "anemoi_gt_activation_fwd_bf16_silu_gated_k512",
        "anemoi_gt_activation_bwd_bf16_silu_gated_k512",
    ]


# ----------------------------------------------------------------------------------------------
# compiled

COMPILE = Path(__file__).with_name("compile_row_kernels.py")
KERNELS = {
    "norm_fwd",
    "norm_bwd",
    "head_norm_fwd",
    "head_norm_bwd",
    "activation_fwd",
    "activation_bwd",
    "edge_ends",  # of graph networks from here
    "gather_activation",
    "residual_norm_fwd",
    "residual_norm_bwd",
    "segment_sum",
    "join_segment_sums",
    "gather_to_edges",
}
GROWING = {  # arguments whose size grows with nodes or edges
    "x",
    "grad_normed",
    "grad_total",
    "modulation",
    "dx",
    "normed",
    "grad_scale",
    "out",
    "hidden",
    "grad_activated",
    "activated",
    "grad_hidden",
    "p",
    "at_dst",
    "at_src",
    "dst",
    "src",
    "row",
    "perm",
    "r",
    "y",
    "dr",
    "grad",
    "segments",
}


# Bytes. In two kernels the assembler of Triton 3.9 keeps one value on the stack, though registers
# are free.
STACK = 8 if TRITON >= (3, 9) else 0
OTHERS = nightly("cuda:80", "cuda:100", "hip:gfx90a", "hip:gfx942")


@pytest.mark.process
@pytest.mark.parametrize("target", ["cuda:90", *OTHERS])
def test_rows_of_512_and_1024_features_spill_nothing(target):
    lines = lines_of(COMPILE, "resources", target)
    assert {line["kernel"] for line in lines} == KERNELS
    for line in lines:
        assert line["stack"] <= STACK, line
        assert line["local"] == 0, line


@pytest.mark.process
def test_compiled_offsets_are_64_bit_where_they_can_pass_2_to_31_and_32_bit_where_they_cannot():
    compiled = {False: set(), True: set()}
    for line in lines_of(COMPILE, "offsets", "cuda:90"):
        narrow = narrow_offsets(line["ir"]) & GROWING
        assert bool(narrow) != line["wide"], f"{line['kernel']}: {narrow}"
        if not line["wide"]:
            assert not re.search(r"\bi64\b", line["ir"]), f"{line['kernel']} computes in 64 bits"
        compiled[line["wide"]].add(line["kernel"])
    assert compiled[False] == compiled[True] == KERNELS
