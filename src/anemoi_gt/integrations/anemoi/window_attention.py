"""Attention within a window of the node order, as the transformers of anemoi-models compute it.

    s_ij = scale * < q_i , k_j >              score of query i and key j
    o_i  = sum_j softmax_j(s_ij) v_j          over the keys with  -left <= j - i' <= right

of N queries and M keys. i' = i + M - N, so that the last query is level with the last key; a query
that reaches no key gets 0. With softcap c, a score is c tanh(s / c); with ALiBi, slope_h |j - i'|
is subtracted from it. These are the definitions of `flash_attn_func` of flash-attn. It is computed
by the first of these that can:

    whole     the window holds every key: PyTorch's scaled_dot_product_attention, without a mask
    kernel    PyTorch's own FlashAttention kernel, which skips the keys outside a window
    blocks    scaled_dot_product_attention of blocks of 256 queries and the keys that they reach,
              some blocks at a time; with softcap or ALiBi, the formulas above

Nothing of size [N, M] is made, and nothing is compiled.
"""

import functools
import logging
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anemoi_gt.ops.dtypes import without_autocast
from anemoi_gt.torch_compat import (
    constant_when_traced,
    flash_attention,
    takes_window_in_flash_attention,
)

_log_once = functools.cache(logging.getLogger(__name__).info)
_capability_of = functools.cache(torch.cuda.get_device_capability)

BLOCK = 256  # queries
GROUP = 2**22  # scores of the blocks that are computed together: a mask of 16 MiB in float32
KERNEL_CHANNELS = 192  # per head; above, the kernel's backward pass runs on A100 and H100 only


class Window(NamedTuple):
    """Keys that a query reaches before and after the one that is level with it; None: no limit."""

    left: int | None
    right: int | None


class Reach(NamedTuple):
    """A window without None: as far as there are keys."""

    left: int
    right: int


class Scores(NamedTuple):
    """What scores are, apart from products of queries and keys."""

    scale: float | None = None  # None: 1 / sqrt(channels per head)
    dropout_p: float = 0.0
    softcap: float = 0.0  # 0: none
    alibi_slopes: Tensor | None = None  # [H] or [B, H]

    @property
    def are_products(self) -> bool:
        """True if scaled_dot_product_attention computes them."""
        return self.softcap == 0 and self.alibi_slopes is None


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, window: Window, scores: Scores
) -> Tensor:
    """Return the attention [B, H, N, C] of queries [B, H, N, C] to keys [B, H, M, C] in a window.

    All have one dtype, in which it is computed also under autocast; scores of 16-bit tensors are
    float32.
    """
    farthest = Reach(key.shape[2] - 1, query.shape[2] - 1)
    reach = Reach(
        farthest.left if window.left is None else min(window.left, farthest.left),
        farthest.right if window.right is None else min(window.right, farthest.right),
    )
    with without_autocast(query.device.type):
        if reach == farthest and scores.are_products:
            return F.scaled_dot_product_attention(
                query, key, value, dropout_p=scores.dropout_p, scale=scores.scale
            )
        reason = _why_not_kernel(query, scores)
        if reason is None:
            info_once("attention within a window: PyTorch's FlashAttention kernel")
            return flash_attention(query, key, value, *reach, scores.dropout_p, scores.scale)
        info_once(
            f"attention within a window: blocks of {BLOCK} queries, because PyTorch's "
            f"FlashAttention kernel cannot run: {reason}"
        )
        return _by_blocks(query, key, value, reach, scores)


@constant_when_traced
def info_once(message: str) -> None:
    """Log at the first call with this message; in compiled code, when it is traced."""
    _log_once(message)


def _why_not_kernel(query: Tensor, scores: Scores) -> str | None:
    """Return why PyTorch's FlashAttention kernel cannot compute a window, or None."""
    channels = query.shape[-1]
    if query.device.type != "cuda":
        return "nodes are not on a GPU"
    if torch.version.hip is not None:
        return "its windows have not been tested on AMD GPUs"
    if _capability(query.device.index) < (8, 0):
        return "the GPU has no compute capability 8.0"
    if not takes_window_in_flash_attention():
        return f"that of PyTorch {torch.__version__} takes no window"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes 16 bits, not {query.dtype}"
    if channels % 8 != 0 or channels > KERNEL_CHANNELS:
        return f"a head has {channels} channels, not a multiple of 8 up to {KERNEL_CHANNELS}"
    if not scores.are_products:
        return "it has no softcap and no ALiBi"
    return None


@constant_when_traced
def _capability(index: int) -> tuple[int, int]:
    return _capability_of(index)


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, reach: Reach, scores: Scores) -> Tensor:
    """Return the attention [B, H, N, C], from blocks of queries and the keys that they reach."""
    batch, heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    level = num_keys - num_queries  # the key that is level with query 0
    width = BLOCK + reach.left + reach.right
    room = GROUP
    if not scores.are_products:  # scores of every head and batch member are made
        room = GROUP // (batch * heads)

    def near(i: Tensor, j: Tensor) -> Tensor:
        is_near = (j >= i - reach.left) & (j <= i + reach.right) & (j >= 0) & (j < num_keys)
        # A softmax of nothing is NaN: a query without a key, or of padding, takes all instead.
        reaches_none = (i + reach.right < 0) | (i - reach.left >= num_keys)
        return (is_near | reaches_none)[:, None]  # [G, 1, S, K]

    outputs = []
    first = 0
    if width >= num_keys:
        j = torch.arange(num_keys, device=query.device)[None, None]  # [1, 1, M]
        for queries in query.split(max(room // num_keys, 1), dim=2):
            last = first + queries.shape[2]
            i = torch.arange(first, last, device=query.device)[None, :, None] + level
            outputs.append(_attend(queries, key, value, i, j, near(i, j), scores))
            first = last
        out = torch.cat(outputs, dim=2)
    else:
        number = -(-num_queries // BLOCK)
        before = reach.left - level  # rows before key 0 that the first block reaches
        after = (number - 1) * BLOCK + width - before - num_keys
        padded = F.pad(query, (0, 0, 0, number * BLOCK - num_queries))
        blocks = [padded.unflatten(2, (number, BLOCK))]  # [B, H, blocks, BLOCK, C]
        for rows in (key, value):
            padded = F.pad(rows, (0, 0, before, after))  # a negative number of rows is removed
            # a view whose blocks overlap, [B, H, blocks, width, C]
            blocks.append(padded.unfold(2, width, BLOCK).transpose(-1, -2))
        query_offsets = torch.arange(BLOCK, device=query.device)[:, None] + level
        key_offsets = torch.arange(width, device=query.device) - before
        together = max(room // (BLOCK * width), 1)
        for group in zip(*[rows.split(together, dim=2) for rows in blocks], strict=True):
            last = first + group[0].shape[2]
            starts = torch.arange(first, last, device=query.device) * BLOCK
            starts = starts.repeat(batch)[:, None, None]  # [G, 1, 1] of G = B (last - first)
            i = starts + query_offsets
            j = starts + key_offsets
            # [G, H, BLOCK, C], [G, H, width, C] twice
            q, k, v = (rows.transpose(1, 2).flatten(0, 1) for rows in group)
            out = _attend(q, k, v, i, j, near(i, j), scores)
            outputs.append(out.unflatten(0, (batch, last - first)).transpose(1, 2))
            first = last
        out = torch.cat(outputs, dim=2).flatten(2, 3)[:, :, :num_queries]
    if level + reach.right < 0:  # with more queries than keys, the first ones may reach none
        reaches_none = torch.arange(num_queries, device=query.device) + level + reach.right < 0
        out = out.masked_fill(reaches_none[:, None], 0)
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    i: Tensor,
    j: Tensor,
    is_near: Tensor,
    scores: Scores,
) -> Tensor:
    """Return the attention [G, H, S, C] of queries at i [G, S, 1] to near keys, of those at j.

    j is [G, 1, K] and `is_near` [G, 1, S, K]; a G of 1 stands for all.
    """
    if scores.are_products:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=is_near,
            dropout_p=scores.dropout_p,
            scale=scores.scale,
        )
    bias = None
    if scores.alibi_slopes is not None:
        slopes = scores.alibi_slopes.to(query.device)
        if slopes.dim() == 2:  # of each batch member, whose blocks follow each other
            slopes = slopes.repeat_interleave(query.shape[0] // slopes.shape[0], dim=0)
        bias = -slopes[..., None, None] * (j - i).abs()[:, None]  # [G, H, S, K]
    attend = functools.partial(_attend_by_formula, is_near=is_near, bias=bias, scores=scores)
    if not torch.is_grad_enabled():
        return attend(query, key, value)
    return checkpoint(  # scores are not kept
        attend,
        query,
        key,
        value,
        use_reentrant=False,
        preserve_rng_state=scores.dropout_p > 0,
    )


def _attend_by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_near: Tensor,
    bias: Tensor | None,
    scores: Scores,
) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scale = scores.scale
    if scale is None:
        scale = query.shape[-1] ** -0.5
    s = scale * (query.to(dtype) @ key.to(dtype).transpose(-1, -2))  # [G, H, S, K]
    if scores.softcap != 0:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    if bias is not None:
        s = s + bias
    p = s.masked_fill(~is_near, float("-inf")).softmax(-1)
    p = F.dropout(p, scores.dropout_p)
    return (p @ value.to(dtype)).to(query.dtype)
