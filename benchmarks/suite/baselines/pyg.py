"""PyTorch Geometric: the message passing of `TransformerConv`.

Its projections of nodes are left out, as for all baselines; the edge embedding is inside its
`message`. Its linear layer there has no bias, and here gets one. Batches are one large graph, with
the attributes repeated for each sample.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from suite.baselines import missing
from suite.operands import Operands
from suite.problems import Problem

TITLE = "PyG TransformerConv"
PACKAGES = ("torch-geometric", "torch")


class Embedding(torch.nn.Module):
    """A linear layer on tensors that are leaves of the benchmark."""

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, attributes: Tensor) -> Tensor:
        """Embed [E, D] as [E, H * C]."""
        return linear(attributes, self.weight, self.bias)


def unsupported_reason(problem: Problem, device: str) -> str | None:
    """Supports every problem that fits into memory."""
    return missing("torch_geometric", "torch-geometric")


def attention(operands: Operands) -> Callable[[], Tensor]:
    """Bind the propagation of messages."""
    from torch_geometric.nn import TransformerConv

    o, edge_index = operands, operands.side_by_side().coo.edge_index
    heads, channels = o.query.shape[-2:]
    conv = TransformerConv(
        1, channels, heads=heads, edge_dim=o.edge_attr.shape[1], root_weight=False
    )
    conv.lin_edge = Embedding(o.edge_weight, o.edge_bias)

    def call() -> Tensor:
        query, key, value = o.nodes()
        out = conv.propagate(
            edge_index, query=query, key=key, value=value, edge_attr=o.attributes()
        )
        return out.view(o.grad_out.shape)

    return call
