"""Comparisons of two computations of the same numbers: a tolerance for float64, or for each dtype in another order."""

import torch

# eps of the dtype, relative to the largest value: sums of up to 20,000 terms in another order
TOLERANCE = 160
LARGEST = 1e-2  # a gradient that vanishes but for rounding is judged by the largest of its model


def assert_same(actual, expected, tolerance=1e-10):
    """Assert that two tensors, or nests of tensors and None, agree; with a tolerance of 0 bitwise."""
    __tracebackhide__ = True
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_numbers(actual, expected, dtype=None):
    """Assert that two tensors, or nests of tensors, are equal but for rounding in `dtype`, their own by default."""
    __tracebackhide__ = True
    actual, expected = dict(_named(actual)), dict(_named(expected))
    assert actual.keys() == expected.keys()
    sizes = {
        name: each.abs().max().item()
        for name, each in expected.items()
        if each is not None and each.numel()
    }
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
