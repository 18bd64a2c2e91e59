"""Joining parts of the edges: dtypes that differ, and logits that are not finite."""

import pytest
import torch

from anemoi_gt import merge


def part(out, lse, dtype=torch.float32, lse_dtype=torch.float32):
    return torch.full((1, 1, 2), out, dtype=dtype), torch.full((1, 1), lse, dtype=lse_dtype)


@pytest.mark.parametrize("logit", [torch.inf, torch.nan])
@pytest.mark.parametrize("first", [True, False])
def test_a_part_with_a_logit_that_is_not_finite_is_not_taken_for_an_empty_one(logit, first):
    broken, whole = part(torch.nan, logit), part(1.0, 0.0)
    out, lse = merge(*broken, *whole) if first else merge(*whole, *broken)
    assert bool(out.isnan().all()) and bool(lse.isnan().all()), lse


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2], ids=str
)
def test_dtypes_are_those_of_the_first_part(dtypes):
    for other in (part(1.0, 0.0), part(1.0, 0.0, torch.float64, torch.float64)):
        out, lse = merge(*part(1.0, 0.0, *dtypes), *other)
        assert (out.dtype, lse.dtype) == dtypes
        assert out.flatten().tolist() == [1.0, 1.0] and lse.item() == pytest.approx(0.6931472)


def test_derivatives_of_first_and_second_order_are_right():
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2, 2), (3, 2), (3, 2, 2), (3, 2))
    parts = [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(merge, parts) and torch.autograd.gradgradcheck(merge, parts)
