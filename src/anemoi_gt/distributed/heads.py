"""Nodes to heads and back: features of a rank's own nodes, all heads, become features of all nodes, some heads.

    [n_own, H, C]  on each of P ranks   <->   [N, H_own, C]  on each of P ranks

Heads are divided as evenly as whole heads can be; the first ranks take one more. A permutation of numbers, so nothing is summed.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from anemoi_gt.distributed.halo import functional
from anemoi_gt.distributed.partition import Ranges


def head_ranges(heads: int, parts: int) -> Ranges:
    """Which heads each rank computes.

    Raises
    ------
    ValueError
        When there are fewer heads than ranks: a rank without heads would hold the whole graph and idle.
    """
    if heads < parts:
        raise ValueError(
            f"strategy 'heads' must have at least one head for each rank, got {heads} heads and {parts} ranks; "
            "use strategy 'edges', or fewer ranks for one model"
        )
    return Ranges.even(heads, parts)


def to_heads(x: Tensor, nodes: Ranges, heads: Ranges, rank: int, group_name: str) -> Tensor:
    """Bring together all nodes of this rank's heads. Collective, and so is its backward.

    Parameters
    ----------
    x : Tensor [n_own, H, C] or [B, n_own, H, C]
        Rows of this rank's nodes.
    nodes, heads : Ranges
        Who owns which.
    rank : int
    group_name : str

    Returns
    -------
    Tensor [N, H_own, C] or [B, N, H_own, C]
    """
    blocks = x.movedim(-2, 0).split(heads.counts)  # [heads of p, (B,) n_own, C] for each rank p
    rows = torch.cat([block.movedim(-2, 0).flatten(0, 1) for block in blocks])  # [n_own * heads of p, (B,) C]
    own_heads, own_nodes = heads.counts[rank], nodes.counts[rank]
    sends = [own_nodes * count for count in heads.counts]
    recvs = [count * own_heads for count in nodes.counts]
    received = _Exchange.apply(rows, recvs, sends, group_name)
    return received.unflatten(0, (nodes.size, own_heads)).movedim((0, 1), (-3, -2))


def to_nodes(x: Tensor, nodes: Ranges, heads: Ranges, rank: int, group_name: str) -> Tensor:
    """Bring back all heads of this rank's nodes: the inverse of `to_heads`, with its parameters."""
    own_heads, own_nodes = heads.counts[rank], nodes.counts[rank]
    rows = x.movedim((-3, -2), (0, 1)).flatten(0, 1)  # [N * own_heads, (B,) C], by owner of the node
    sends = [count * own_heads for count in nodes.counts]
    recvs = [own_nodes * count for count in heads.counts]
    received = _Exchange.apply(rows, recvs, sends, group_name)
    blocks = received.split(recvs)
    blocks = [b.unflatten(0, (own_nodes, count)) for b, count in zip(blocks, heads.counts, strict=True)]
    return torch.cat(blocks, dim=1).movedim((0, 1), (-3, -2))


class _Exchange(torch.autograd.Function):
    """Blocks of rows, one for each rank; backward sends them back."""

    @staticmethod
    def forward(ctx, rows, recvs, sends, group_name):
        ctx.way_back = sends, recvs, group_name
        return functional.wait_tensor(functional.all_to_all_single(rows.contiguous(), recvs, sends, group_name))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return functional.wait_tensor(functional.all_to_all_single(grad.contiguous(), *ctx.way_back)), None, None, None
