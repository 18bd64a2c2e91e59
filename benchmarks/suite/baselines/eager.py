"""Plain PyTorch: what anybody would write, with embedded edges and a softmax by scattering.

Batches are one large graph, with the attributes repeated for each sample.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from suite.operands import Operands
from suite.problems import Problem

TITLE = "plain PyTorch"
PACKAGES = ("torch",)
structure = None  # it takes edge_index as it is


def unsupported_reason(problem: Problem, device: str) -> str | None:
    """Supports every problem that fits into memory."""
    return None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attributes: Tensor,
    weight: Tensor,
    bias: Tensor,
    edge_index: Tensor,
) -> Tensor:
    """Attention of every destination over its in-edges, edge by edge."""
    src, dst = edge_index
    nodes, heads, channels = query.shape
    x = linear(attributes, weight, bias).view(-1, heads, channels)
    score = (query[dst] * (key[src] + x)).sum(-1) * channels**-0.5  # [E, H]
    into = dst[:, None].expand_as(score)
    high = (
        score.detach()
        .new_full((nodes, heads), -torch.inf)
        .scatter_reduce(0, into, score.detach(), "amax")
    )
    p = (score - high[dst]).exp()
    total = p.new_zeros(nodes, heads).index_add(0, dst, p)
    p = p / total[dst]
    return torch.zeros_like(query).index_add(0, dst, p[..., None] * (value[src] + x))


def attention(operands: Operands, function: Callable[..., Tensor] = attend) -> Callable[[], Tensor]:
    """Bind `attend`, or a function that stands for it."""
    o, edge_index = operands, operands.side_by_side().coo.edge_index

    def call() -> Tensor:
        out = function(*o.nodes(), o.attributes(), o.edge_weight, o.edge_bias, edge_index)
        return out.view(o.grad_out.shape)

    return call
