"""Plain PyTorch through torch.compile, for the sizes of each problem."""

from collections.abc import Callable

import torch
from torch import Tensor

from suite.baselines import eager
from suite.operands import Operands

TITLE = "plain PyTorch, compiled"
PACKAGES = ("torch", "triton")
unsupported_reason = eager.unsupported_reason
structure = None  # it takes edge_index as it is

torch._dynamo.config.recompile_limit = (
    1000  # each problem has its own shapes, and beyond the limit nothing is compiled
)
attend = torch.compile(eager.attend, fullgraph=True, dynamic=False)


def attention(operands: Operands) -> Callable[[], Tensor]:
    """Bind the compiled function."""
    return eager.attention(operands, attend)
