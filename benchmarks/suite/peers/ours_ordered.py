"""anemoi_gt with destinations taken in an order in which neighbours in space come together."""

from collections.abc import Callable

from torch import Tensor

from anemoi_gt import GraphStructure
from suite.operands import Operands
from suite.peers import ours

TITLE = "anemoi_gt, program order"
PACKAGES = ours.PACKAGES
unsupported_reason = ours.unsupported_reason
structure = None  # the order is made beside the structure, once for each graph


def attention(operands: Operands) -> Callable[[], Tensor]:
    """Bind the operation."""
    return ours.attention(operands, GraphStructure.with_dst_schedule)
