"""The sub-layers of a block of this library, fused if possible and faster; decided per call.

path = BlockPath.of(block, x_dst, cond, config)    parts of fused sub-layers, or reasons
z = attention(path.attention, ...)                 where they are parts
y = feed_forward(path.feed_forward, ...)
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.sublayers import (
    AttentionParts,
    FeedForwardParts,
    attention_parts,
    feed_forward_parts,
)
from anemoi_gt.ops.backends import BACKENDS, choose_backend
from anemoi_gt.ops.dtypes import autocast_dtype, autocast_is_active
from anemoi_gt.ops.operands import AttentionOperands, check_operands
from anemoi_gt.ops.triton_backend.attention_sublayer import attention_sublayer
from anemoi_gt.ops.triton_backend.feed_forward_sublayer import feed_forward_sublayer
from anemoi_gt.torch_compat import is_exporting


class Computation(NamedTuple):
    """Dtype and kept tensors of a call, decided once from its features and settings."""

    dtype: torch.dtype  # of the operands of products
    is_autocast: bool  # whether autocast is active
    is_faster_fused: bool  # whether fused sub-layers are faster: 16-bit autocast, on triton
    keep_hidden: bool  # whether fused feed-forward sub-layers keep their hidden layer

    @classmethod
    def of(cls, x: Tensor, config: AttentionConfig, *, keep_hidden: bool = True) -> "Computation":
        """Read dtype, autocast and backend for features like x. Raise like `edge_attention`."""
        dtype = autocast_dtype(x)
        is_autocast = autocast_is_active(x.device.type)
        is_16_bit = is_autocast and dtype in (torch.float16, torch.bfloat16)
        is_faster_fused = is_16_bit and runs_on_triton(x, dtype, config)
        return cls(dtype, is_autocast, is_faster_fused, keep_hidden)


def runs_on_triton(x: Tensor, dtype: torch.dtype, config: AttentionConfig) -> bool:
    """Return whether backend `triton` attends over x in `dtype`. Raise like `edge_attention`."""
    query = x.new_empty(0, dtype=dtype)
    return choose_backend(config.backend, query) is BACKENDS["triton"]


# (sources, destinations); sources are None on one set of nodes
Nodes = tuple[Tensor | None, Tensor]
Conditions = tuple[Tensor | None, Tensor | None]  # of sources and of destinations


class ReasonsAgainst(NamedTuple):
    """Reasons why sub-layers cannot be fused that are not in their modules; None where none."""

    attention: str | None
    feed_forward: str | None
    source_feed_forward: str | None


NO_REASONS = ReasonsAgainst(None, None, None)
NO_SOURCES = "its sources are not updated"


class BlockPath(NamedTuple):
    """The path of each sub-layer in one call: parts if fused, else the reason."""

    attention: AttentionParts | str
    feed_forward: FeedForwardParts | str
    source_feed_forward: FeedForwardParts | str  # of a mapper that updates its sources

    @classmethod
    def by_modules(cls, reason: str) -> "BlockPath":
        """Return the path of a block whose own modules compute everything."""
        return cls(reason, reason, reason)

    @classmethod
    def of(cls, block: Any, x: Tensor, cond: Tensor | None, config: AttentionConfig) -> "BlockPath":
        """Decide for a block of this library, destinations like x, and any condition."""
        if is_exporting():
            return cls.by_modules("an exported program has no operators of this library")
        computation = Computation.of(x, config)
        if not computation.is_faster_fused:
            return cls.by_modules("sub-layers are fused under 16-bit autocast, on backend triton")
        return cls.of_modules(block, x, cond, config, computation, NO_REASONS)

    @classmethod
    def of_modules(
        cls,
        block: Any,
        x: Tensor,
        cond: Tensor | tuple | None,
        config: AttentionConfig,
        computation: Computation,
        reasons: ReasonsAgainst,
    ) -> "BlockPath":
        """Decide by the modules of a block of this library or of Anemoi, on backend triton.

        `reasons` are against sub-layers that its integration or the call rules out.
        """
        attention: AttentionParts | str | None = reasons.attention
        if attention is None and config.precision is not None:
            attention = "the precision of its attention is set"
        if attention is None:
            attention = for_call(attention_parts(block), x, cond, computation)
        feed_forward: FeedForwardParts | str | None = reasons.feed_forward
        if feed_forward is None:
            parts = feed_forward_parts(block.layer_norm_mlp_dst, block.node_dst_mlp)
            feed_forward = for_call(parts, x, cond, computation)
        sources: FeedForwardParts | str = NO_SOURCES
        if getattr(block, "update_src_nodes", False):
            if reasons.source_feed_forward is not None:
                sources = reasons.source_feed_forward
            else:
                names = {"norm_name": "layer_norm_mlp_src", "mlp_name": "node_src_mlp"}
                parts = feed_forward_parts(block.layer_norm_mlp_src, block.node_src_mlp, **names)
                sources = for_call(parts, x, cond, computation)
        return cls(attention, feed_forward, sources)


Parts = TypeVar("Parts", AttentionParts, FeedForwardParts)


def for_call(
    parts: Parts | str, x: Tensor, cond: Tensor | tuple | None, computation: Computation
) -> Parts | str:
    """Return the parts for a call on rows like x with this condition, or why it cannot use them."""
    if isinstance(parts, str):
        return parts
    if parts.has_condition != (cond is not None):
        return "its norms and the call differ in whether there is a condition"
    if x.dtype != parts.dtype and not computation.is_autocast:
        return f"its features are {x.dtype} and its parameters {parts.dtype}, without autocast"
    if isinstance(parts, AttentionParts):
        return parts._replace(product_dtype=computation.dtype)
    return parts._replace(product_dtype=computation.dtype, keep_hidden=computation.keep_hidden)


def attention(
    parts: AttentionParts,
    x: Nodes,
    graph: GraphStructure,
    edge_attr: Tensor,
    cond: Conditions,
    halo: Tensor | None = None,
) -> Tensor:
    """Return destinations [.., N_dst, F] after the attention sub-layer.

    `x` is (x_src, x_dst), with x_src None on one set of nodes with one norm; `halo`
    [.., R, F] are normed sources, numbered after the local ones; `edge_attr` is [E, D] or [.., E,
    D], after `edge_pre_mlp`.
    """
    x_src, x_dst = x
    batch = x_dst.shape[0] if x_dst.dim() == 3 else 1
    _check(parts, x, graph, edge_attr, halo)
    if batch == 1 and edge_attr.dim() == 3:
        edge_attr = edge_attr.squeeze(0)
    cond_src, cond_dst = row_conditions_of(x, cond)
    tensors = parts.tensors(
        _optional_rows(x_src), _optional_rows(halo), _rows(x_dst), edge_attr, cond_dst, cond_src
    )
    z = attention_sublayer(tensors, graph, parts.options(batch))
    return z.view(x_dst.shape)


def feed_forward(parts: FeedForwardParts, x: Tensor, cond: Tensor | None) -> Tensor:
    """Return rows [.., N, F] after the feed-forward sub-layer."""
    rows = x.reshape(-1, x.shape[-1])
    condition = None if cond is None else row_conditions(cond, x)
    tensors = parts.tensors(rows, condition)
    return feed_forward_sublayer(tensors, parts.options()).view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """Return features [.., N, F] as rows [B * N, F]."""
    return x.reshape(-1, x.shape[-1])


def _optional_rows(x: Tensor | None) -> Tensor | None:
    """Return features as rows, None where there are none."""
    return None if x is None else _rows(x)


def row_conditions(cond: Tensor, x: Tensor) -> Tensor:
    """Return a condition [.., N or 1, K] as one row per node of x [.., N, F]: [B * N, K]."""
    return cond.expand(*x.shape[:-1], cond.shape[-1]).reshape(-1, cond.shape[-1])


def row_conditions_of(x: Nodes, cond: Conditions) -> Conditions:
    """Return the conditions of sources and destinations as rows; None where there are none.

    Sources that are the destinations have theirs.
    """
    cond_src, cond_dst = cond
    if cond_src is not None:
        cond_src = None if x[0] is None else row_conditions(cond_src, x[0])
    if cond_dst is not None:
        cond_dst = row_conditions(cond_dst, x[1])
    return cond_src, cond_dst


def _check(
    parts: AttentionParts, x: Nodes, graph: GraphStructure, edge_attr: Tensor, halo: Tensor | None
) -> None:
    """Raise ValueError as `edge_attention` would, for stand-ins of query and key without memory."""
    x_src, x_dst = x
    num_src = (x_dst if x_src is None else x_src).shape[-2]
    if halo is not None:
        num_src = num_src + halo.shape[-2]
    width = parts.query_weight.shape[0]
    heads = (parts.heads, width // parts.heads)
    query = x_dst.new_empty(()).expand(*x_dst.shape[:-1], *heads)
    key = x_dst.new_empty(()).expand(*x_dst.shape[:-2], num_src, *heads)
    edge_bias = parts.edge_bias
    check_operands(
        AttentionOperands(query, key, key, edge_attr, parts.edge_weight, edge_bias), graph
    )
