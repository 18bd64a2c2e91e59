"""Attention weights for inspection: plain PyTorch, with gradients."""

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.kernel_config import KernelConfig, check_config
from anemoi_gt.ops.dtypes import accumulator_dtype, cast_operands, without_autocast
from anemoi_gt.ops.tensors import AttentionOperands, check_operands, check_scale


def attention_weights(
    query: Tensor,
    key: Tensor,
    graph: GraphStructure,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    edge_bias: Tensor | None = None,
    *,
    scale: float | None = None,
    config: KernelConfig = KernelConfig(),  # noqa: B008  frozen
) -> Tensor:
    """Return p_e = exp(s_e - lse_i), the weight of each edge before dropout (`edge_attention`).

    Parameters
    ----------
    query, key, graph, edge_attr, edge_weight, edge_bias, scale, config
        As in `edge_attention`. `config.precision` applies; the backend is always plain PyTorch,
        which gathers rows [E, H, C], so this is not for training steps.

    Returns
    -------
    Tensor [E, H] or [B, E, H]
        In the caller's edge order, float32 (float64 for float64 inputs); the in-edges of a
        destination sum to 1.

    Raises
    ------
    ValueError
        If shapes, dtypes or devices are inconsistent.

    Examples
    --------
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2))
    >>> attention_weights(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), graph).flatten().tolist()
    [0.5, 0.5, 1.0]
    """
    check_config(config)
    check_scale(scale)
    # key has the shape of a value
    operands = AttentionOperands(query, key, key, edge_attr, edge_weight, edge_bias)
    check_operands(operands, graph)
    operands, _ = cast_operands(config.precision, operands)
    dtype = accumulator_dtype(operands.query.dtype)
    q, k, _, attr, weight, _ = operands.map(lambda operand: operand.to(dtype))
    src, dst = graph.edge_index()
    heads, channels = query.shape[-2:]
    score = (q[..., dst, :, :] * k[..., src, :, :]).sum(-1)  # [.., E, H]
    if weight is not None:
        with without_autocast(q.device.type):
            projected = torch.einsum("...nhc,hcd->...nhd", q, weight.reshape(heads, channels, -1))
            score = score + torch.einsum("...ehd,...ed->...eh", projected[..., dst, :, :], attr)
    elif attr is not None:
        score = score + (q[..., dst, :, :] * attr).sum(-1)
    score = score * (channels**-0.5 if scale is None else scale)
    return _softmax(score, dst, graph.num_dst)


def _softmax(score: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    """Return the softmax of score [.., E, H] over the edges that share a destination."""
    index = dst[:, None].expand(score.shape)
    row_max = score.new_full((*score.shape[:-2], num_dst, score.shape[-1]), -torch.inf)
    row_max = row_max.scatter_reduce(-2, index, score.detach(), "amax")
    p = torch.exp(score - torch.where(torch.isneginf(row_max), 0.0, row_max)[..., dst, :])
    by_edge = p.movedim(-2, 0)
    denominator = by_edge.new_zeros(num_dst, *by_edge.shape[1:])
    # unlike index_add, index_put sums in a fixed order, also on a GPU
    denominator = denominator.index_put((dst,), by_edge, accumulate=True).movedim(0, -2)
    return p / torch.where(denominator == 0, 1.0, denominator)[..., dst, :]
