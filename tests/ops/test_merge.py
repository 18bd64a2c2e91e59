"""Merging of partial results: dtypes, logits that are not finite, derivatives. Values are in test_edge_attention.py."""

import pytest
import torch

from anemoi_gt import merge


def partial(out, lse, dtype=torch.float32, lse_dtype=torch.float32):
    return torch.full((1, 1, 2), out, dtype=dtype), torch.full((1, 1), lse, dtype=lse_dtype)


@pytest.mark.parametrize("logit", [torch.inf, torch.nan])
@pytest.mark.parametrize("first", [True, False])
def test_a_result_with_a_logit_that_is_not_finite_is_not_treated_as_empty(logit, first):
    broken, whole = partial(torch.nan, logit), partial(1.0, 0.0)
    out, lse = merge(*broken, *whole) if first else merge(*whole, *broken)
    assert bool(out.isnan().all()), lse
    assert bool(lse.isnan().all()), lse


def test_two_empty_results_are_empty_with_finite_gradients():
    out = torch.zeros(2, 1, 3, requires_grad=True)
    lse = torch.full((2, 1), -torch.inf, requires_grad=True)
    merged, merged_lse = merge(out, lse, out, lse)
    assert bool((merged == 0).all())
    assert bool(torch.isneginf(merged_lse).all())
    assert all(
        bool(gradient.isfinite().all())
        for gradient in torch.autograd.grad(merged.sum(), (out, lse))
    )


DTYPES = [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_dtypes_follow_the_first_result(dtypes):
    for other in (partial(1.0, 0.0), partial(1.0, 0.0, torch.float64, torch.float64)):
        out, lse = merge(*partial(1.0, 0.0, *dtypes), *other)
        assert (out.dtype, lse.dtype) == dtypes
        assert out.flatten().tolist() == [1.0, 1.0]
        assert lse.item() == pytest.approx(0.6931472)


def test_first_and_second_derivatives_are_right():
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2, 2), (3, 2)) * 2
    operands = [
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]
    assert torch.autograd.gradcheck(merge, operands)
    assert torch.autograd.gradgradcheck(merge, operands)


@pytest.mark.compiled
def test_it_compiles_for_any_sizes():
    compiled = torch.compile(merge, fullgraph=True, dynamic=True, backend="eager")
    for nodes in (3, 7):
        results = (torch.randn(nodes, 2, 4), torch.randn(nodes, 2)) * 2
        torch.testing.assert_close(compiled(*results), merge(*results))
