"""Joining attention over parts of the edges."""

import torch
from torch import Tensor

from anemoi_gt.ops.operands import check_parts


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Join two results of `edge_attention` over disjoint sets of edges into the result over all of them.

        lse = log(exp(lse1) + exp(lse2)),    out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2

    Parameters
    ----------
    out1, out2 : Tensor [..., H, C]
    lse1, lse2 : Tensor [..., H]
        -inf where the part holds no edge of the destination.

    Returns
    -------
    out : Tensor [..., H, C], dtype of out1
        0 where both parts are empty.
    lse : Tensor [..., H], dtype of lse1
        -inf where both parts are empty.

    Raises
    ------
    ValueError
        When shapes or devices do not fit together, or one of them is no floating-point tensor.

    Examples
    --------
    >>> empty, nothing = torch.zeros(1, 1, 2), torch.tensor([[-torch.inf]])
    >>> merge(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.5]]), empty, nothing)
    (tensor([[[1., 2.]]]), tensor([[0.5000]]))
    """
    check_parts(out1=out1, lse1=lse1, out2=out2, lse2=lse2)
    if not out1.shape == out2.shape or not lse1.shape == lse2.shape == out1.shape[:-1]:
        raise ValueError(
            "both out must have shape [..., H, C] and both lse [..., H], got out "
            f"{tuple(out1.shape)}, {tuple(out2.shape)} and lse {tuple(lse1.shape)}, {tuple(lse2.shape)}"
        )
    high = torch.maximum(lse1, lse2).detach()  # the result does not depend on it
    high = torch.where(torch.isneginf(high), torch.zeros_like(high), high)
    share1, share2 = torch.exp(lse1 - high), torch.exp(lse2 - high)
    total = share1 + share2
    occupied = total != 0  # NaN of an infinite logit is no empty part
    total = torch.where(occupied, total, torch.ones_like(total))
    out = (share1 / total).unsqueeze(-1) * out1 + (share2 / total).unsqueeze(-1) * out2
    lse = torch.where(occupied, high + torch.log(total), torch.full_like(high, -torch.inf))
    return out.to(out1.dtype), lse.to(lse1.dtype)
