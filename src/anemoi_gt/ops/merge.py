"""Merging of edge attention over disjoint sets of edges."""

import torch
from torch import Tensor


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge results of `edge_attention` over two disjoint edge sets into one over their union.

        lse = log(exp(lse1) + exp(lse2)),    out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2

    Parameters
    ----------
    out1, out2 : Tensor [..., H, C]
    lse1, lse2 : Tensor [..., H]
        -inf where a set has no edge of the destination.

    Returns
    -------
    out : Tensor [..., H, C], dtype of out1
        0 where both sets are empty.
    lse : Tensor [..., H], dtype of lse1
        -inf where both sets are empty.

    Raises
    ------
    ValueError
        If shapes are inconsistent, or a tensor is not floating point.

    Examples
    --------
    >>> empty, nothing = torch.zeros(1, 1, 2), torch.tensor([[-torch.inf]])
    >>> merge(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.5]]), empty, nothing)
    (tensor([[[1., 2.]]]), tensor([[0.5000]]))
    """
    _check_partial_results(out1=out1, lse1=lse1, out2=out2, lse2=lse2)
    row_max = torch.maximum(lse1, lse2).detach()  # the result does not depend on it
    row_max = torch.where(torch.isneginf(row_max), torch.zeros_like(row_max), row_max)
    exp1, exp2 = torch.exp(lse1 - row_max), torch.exp(lse2 - row_max)
    denominator = exp1 + exp2
    has_edges = denominator != 0  # also True where an infinite logit makes it NaN
    denominator = torch.where(has_edges, denominator, torch.ones_like(denominator))
    out = (exp1 / denominator).unsqueeze(-1) * out1 + (exp2 / denominator).unsqueeze(-1) * out2
    lse = row_max + torch.log(denominator)
    lse = torch.where(has_edges, lse, torch.full_like(row_max, -torch.inf))
    return out.to(out1.dtype), lse.to(lse1.dtype)


def _check_partial_results(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
    out1, lse1, out2, lse2 = (tensor.shape for tensor in tensors.values())
    if not (out1 == out2 and lse1 == lse2 == out1[:-1]):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(
            f"both out must have shape [..., H, C] and both lse [..., H], got {shapes}"
        )
