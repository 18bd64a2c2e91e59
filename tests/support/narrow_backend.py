"""A backend of another package: the attention of at most 64 channels, in plain PyTorch."""

import torch
from torch.nn.functional import linear

from anemoi_gt.ops.backend import Backend
from anemoi_gt.refusal import permanent


def why_not(sizes, dtypes, device):
    if sizes.get("channels", 0) > 64:
        return permanent(f"it attends with at most 64 channels, got {sizes['channels']}")
    return None


def attention(operands, graph, seed, options):
    query, key, value, edge_attr, edge_weight, edge_bias = operands
    src, dst = graph.edge_index()
    key, value = key[..., src, :, :], value[..., src, :, :]
    if edge_weight is not None:
        edge_attr = linear(edge_attr, edge_weight, edge_bias).unflatten(-1, query.shape[-2:])
    if edge_attr is not None:
        key, value = key + edge_attr, value + edge_attr
    scores = options.scale * (query[..., dst, :, :] * key).sum(-1)  # [.., E, H]
    weights = scores.exp()
    total = query.new_zeros(query.shape[:-1]).index_add(-2, dst, weights)
    out = torch.zeros_like(query).index_add(-3, dst, weights[..., None] * value)
    return torch.where(total[..., None] > 0, out / total[..., None], 0), total.log()


BACKEND = Backend("narrow", why_not, attention)
