"""Comparison of two computations of the same results, to a fixed tolerance or to the rounding of each dtype."""

import torch

# eps of the dtype, relative to the largest value: sums of up to 20,000 terms in another order
TOLERANCE = 160
LARGEST = 1e-2  # relative size below which a gradient is compared at the scale of the largest one


def assert_same(actual, expected, tolerance=1e-10):
    """Assert that two tensors, or nests of tensors and None, agree; with a tolerance of 0 bitwise."""
    __tracebackhide__ = True
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_numbers(actual, expected, dtype=None):
    """Assert that two tensors, or nests of tensors, agree up to rounding in `dtype`, by default their own."""
    __tracebackhide__ = True
    actual, expected = dict(_named(actual)), dict(_named(expected))
    assert actual.keys() == expected.keys()
    sizes = {}
    for name, tensor in expected.items():
        if tensor is not None and tensor.numel():
            sizes[name] = tensor.abs().max().item()
    largest = max((size for name, size in sizes.items() if name != "out"), default=0.0)
    for name, tensor in expected.items():
        assert (tensor is None) == (actual[name] is None), f"{name}: only one of the two is None"
        if tensor is None:
            continue
        assert actual[name].shape == tensor.shape, f"{name}: shape {tuple(actual[name].shape)}"
        if name not in sizes:
            continue
        eps = torch.finfo(dtype or tensor.dtype).eps if tensor.is_floating_point() else 0
        allowed = TOLERANCE * eps * max(sizes[name], LARGEST * largest)
        error = (actual[name].double() - tensor.double()).abs().max().item()
        assert error <= allowed, f"{name}: off by {error:.1e}, allowed {allowed:.1e}"


def _named(results, prefix=""):
    if results is None or isinstance(results, torch.Tensor):
        yield prefix or "out", results
        return
    items = results.items() if isinstance(results, dict) else enumerate(results)
    for name, result in items:
        yield from _named(result, f"{prefix}.{name}" if prefix else str(name))
