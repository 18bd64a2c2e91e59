"""Backend: which formulas an implementation computes, and which calls it takes.

A backend is one value that its package exports, as `torch_backend.BACKEND`. It serves any subset of
the formulas in `ops.tensors`; modules compute the others, as they do a call that it refuses.
"""

import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.refusal import Refusal

Sizes = Mapping[str, int]  # by name, as in `CallSizes`


class Dtypes(NamedTuple):
    """The dtypes of a call."""

    products: torch.dtype  # of the operands of matrix products and of the attention
    is_autocast: bool = False  # whether autocast casts them in the call


def runs_anywhere(sizes: Sizes, dtypes: Dtypes, device: torch.device) -> None:
    """Refuse no call."""


class Backend(NamedTuple):
    """An implementation of some formulas.

    `why_not(sizes, dtypes, device)` refuses a call that it cannot compute, or is "not faster" for
    one that `auto` gives to another backend. An attention is asked with all sizes
    of `CallSizes`; before a layer reads its modules, only "features" of its rows are known.
    """

    name: str
    why_not: Callable[[Sizes, Dtypes, torch.device], Refusal | None] = runs_anywhere
    # of checked operands, the graph, a seed and `EdgeAttentionOptions`: out and lse
    attention: Callable[..., tuple[Tensor, Tensor]] | None = None
    # of the tree of its tensors, the graph if it has one, and options
    attention_sublayer: Callable[..., Tensor] | None = None
    network: Callable[..., Tensor] | None = None
    edge_update: Callable[..., Tensor] | None = None  # with `edge_sums`
    edge_sums: Callable[..., Tensor] | None = None  # of edges, the graph and the batch size
    # whether sub-layers and networks are faster than modules with the backend's attention; None:
    # always
    is_faster_fused: Callable[[Dtypes], bool] | None = None
    max_features: int = sys.maxsize  # of a row of a sub-layer or network
    max_attributes: int = sys.maxsize  # of an edge in a sub-layer

    @property
    def has_sublayers(self) -> bool:
        """Whether it has more formulas than the attention."""
        formulas = (self.attention_sublayer, self.network, self.edge_update)
        return formulas != (None, None, None)

    def is_faster(self, dtypes: Dtypes) -> bool:
        """Return whether it has more than the attention, and is faster with it."""
        if not self.has_sublayers:
            return False
        return self.is_faster_fused is None or self.is_faster_fused(dtypes)
