"""Replacements in the attention wrappers of Anemoi's transformers, without flash-attn.

`SDPAAttentionWrapper` keeps a mask of all pairs of nodes; its attention is computed within the
window instead. `FlashAttentionWrapper` needs flash-attn; where that cannot be imported, it gets the
stand-in, and its own `forward` is called in the precision of the settings. Projections, norms of
queries and keys, and the exchange of heads between ranks stay in Anemoi's `MultiHeadSelfAttention`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from anemoi_gt.integrations.anemoi import report
from anemoi_gt.integrations.anemoi.settings import SETTINGS, Settings
from anemoi_gt.integrations.anemoi.upstream import replaces, wraps_any
from anemoi_gt.integrations.anemoi.window_attention import Scores, Window, window_attention
from anemoi_gt.integrations.anemoi.without_flash_attn import (
    flash_attn_2_stand_in,
    flash_attn_imports,
    is_stand_in,
)
from anemoi_gt.nn.plain import ANEMOI_WINDOW, why_not_plain
from anemoi_gt.ops.dtypes import DTYPES, autocast_dtype, without_autocast
from anemoi_gt.refusal import Refusal, permanent, transient
from anemoi_gt.torch_compat import constant_when_traced, is_exporting

MASK_ROWS = 512  # compared at a time
MASKS = ("mask", "attn_mask")  # before 0.13, and since
NO_FLOAT32 = permanent("flash-attn does not compute in precision 'fp32'")


class Call(NamedTuple):
    """The arguments of the wrapper's forward."""

    query: Tensor
    key: Tensor
    value: Tensor
    batch_size: int
    causal: bool = False
    window_size: Any = None  # None, a number of nodes, or (before, after) with -1 for no limit
    dropout_p: float = 0.0
    softcap: float | None = None
    alibi_slopes: Tensor | None = None


@replaces
def sdpa_wrapper(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the attention of `SDPAAttentionWrapper` without a mask of all pairs of nodes."""
    settings = SETTINGS.of(self)
    if settings is None:
        return upstream(self, *args, **kwargs)
    call = Call(*args, **kwargs)
    window = _window_of(self, call)
    if not torch.compiler.is_compiling():
        report.record_layer(self, window.text if isinstance(window, Refusal) else None)
    if isinstance(window, Refusal):
        _leave_to_anemoi(settings, window)
        return upstream(self, *args, **kwargs)
    precision = settings.config.precision
    dtype = autocast_dtype(call.query) if precision is None else DTYPES[precision]
    query, key, value = (operand.to(dtype) for operand in (call.query, call.key, call.value))
    out = window_attention(query, key, value, window, Scores(dropout_p=call.dropout_p))
    return out if precision is None else out.to(call.query.dtype)


def _leave_to_anemoi(settings: Settings, refusal: Refusal) -> None:
    """Log why Anemoi's own code computes an attention; raise ValueError for a named backend."""
    attention, fallback = "the attention of this transformer", "runs Anemoi's own code there"
    refusal.raise_if_named(settings.config.backend, attention, fallback)
    report.warn_once(f"the attention of a transformer is left to Anemoi: {refusal.text}")


def _window_of(wrapper: Any, call: Call) -> Window | Refusal:
    """Return the window of a call, or why Anemoi's own code computes it."""
    if torch.jit.is_tracing():
        return transient("torch.jit.trace records it, which would make constants of sizes")
    if is_exporting():
        return transient("it is exported")
    refusal = why_not_plain(("", wrapper, (ANEMOI_WINDOW,)))
    if refusal is not None:
        return refusal
    if wrapper.attention is not F.scaled_dot_product_attention:
        return permanent("its `attention` is not PyTorch's scaled_dot_product_attention")
    if call.causal:
        return permanent("it is causal, which versions of anemoi-models treat differently")
    if call.softcap:
        return permanent("it has a softcap, which anemoi-models computes with flash-attn only")
    if call.alibi_slopes is not None:
        return permanent("it has ALiBi, which anemoi-models computes with flash-attn only")
    pair = call.window_size
    if pair is None:
        pair = (-1, -1)
    elif isinstance(pair, int) and pair >= 0:
        pair = (pair, pair)
    if not _is_pair(pair):
        return permanent(f"its window must be None, or a number of nodes, got {call.window_size!r}")
    window = Window(*[None if size == -1 else size for size in pair])
    if call.window_size is not None and call.query.shape[2] != call.key.shape[2]:
        return permanent("its window is over two sets of nodes")
    for attribute in MASKS:
        mask = getattr(wrapper, attribute, None)
        if mask is not None and not _is_of_window(mask, *window):
            return permanent(f"its `{attribute}` is not that of its window")
    return window


def _is_pair(sizes: Any) -> bool:
    """Return whether these are numbers of nodes before and after a node, or -1 for no limit."""
    return (
        isinstance(sizes, (tuple, list))  # PyTorch 2.9 traces no union
        and len(sizes) == 2
        and all(isinstance(size, int) and size >= -1 for size in sizes)
    )


# by mask: its version, the window, and whether they are equal
_COMPARED = WeakTensorKeyDictionary()


@constant_when_traced
def _is_of_window(mask: Tensor, left: int | None, right: int | None) -> bool:
    """Return whether a mask that Anemoi kept [N, N] holds this window; compare it once."""
    number = mask.shape[0]
    if mask.dtype != torch.bool or mask.shape != (number, number):
        return False
    version = 0 if mask.is_inference() else mask._version  # inference tensors count none
    asked = version, left, right
    if _COMPARED.get(mask, (None,))[:3] != asked:
        j = torch.arange(number, device=mask.device)
        is_equal = True
        for first in range(0, number, MASK_ROWS):
            i = j[first : first + MASK_ROWS, None]
            expected = torch.ones_like(mask[first : first + MASK_ROWS])
            if left is not None:
                expected &= j >= i - left
            if right is not None:
                expected &= j <= i + right
            is_equal = is_equal and torch.equal(mask[first : first + MASK_ROWS], expected)
        _COMPARED[mask] = (*asked, is_equal)
    return _COMPARED[mask][3]


@wraps_any
def flash_wrapper(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a `FlashAttentionWrapper`, with the stand-in where no flash-attn can be imported."""
    if SETTINGS.everywhere is None or flash_attn_imports():
        return upstream(self, *args, **kwargs)
    with flash_attn_2_stand_in():
        return upstream(self, *args, **kwargs)


@wraps_any
def flash_attention(
    upstream: Callable,
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Compute the attention of `FlashAttentionWrapper` in the precision of the settings."""
    settings = SETTINGS.of(self)
    if settings is None or settings.config.precision is None:
        return upstream(self, query, key, value, *args, **kwargs)
    dtype = DTYPES[settings.config.precision]
    if dtype == torch.float32 and not is_stand_in(self.attention):
        _leave_to_anemoi(settings, NO_FLOAT32)
        return upstream(self, query, key, value, *args, **kwargs)
    operands = [operand.to(dtype) for operand in (query, key, value)]
    with without_autocast(query.device.type):
        out = upstream(self, *operands, *args, **kwargs)
    return out.to(query.dtype)
