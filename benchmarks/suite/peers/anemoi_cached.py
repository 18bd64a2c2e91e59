"""anemoi-models with the conversion of the graph made once, which its block does not do: what its kernels alone take."""

from collections.abc import Callable

from torch import Tensor

from suite.operands import Operands
from suite.peers import anemoi

TITLE = "anemoi-models, structure kept"
PACKAGES = anemoi.PACKAGES
unsupported_reason = anemoi.unsupported_reason
structure = None  # kept


def attention(operands: Operands) -> Callable[[], Tensor]:
    """Bind embedding and operator."""
    sides = anemoi.convert(operands.side_by_side().coo)
    return lambda: anemoi.attend(operands, *sides)
