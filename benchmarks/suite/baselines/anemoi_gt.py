"""anemoi_gt: the operation with its structure made once, outside what is timed."""

from collections.abc import Callable

from torch import Tensor

from anemoi_gt import GraphStructure, edge_attention
from suite.operands import Operands
from suite.problems import Problem

TITLE = "anemoi_gt"
PACKAGES = ("torch", "triton")


def unsupported_reason(problem: Problem, device: str) -> str | None:
    """Supports every problem."""
    return None


def attention(operands: Operands) -> Callable[[], Tensor]:
    """Bind the operation."""
    o, graph = operands, GraphStructure.from_edge_index(*operands.coo)
    return lambda: edge_attention(
        o.query, o.key, o.value, graph, o.edge_attr, o.edge_weight, o.edge_bias
    )[0]
