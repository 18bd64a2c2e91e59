"""The sub-layers of a block of this library, fused if possible and faster; decided per call.

path = BlockPath.of(block, x_dst, cond, config)    parts of fused sub-layers, or reasons
z = attention(path.attention, ...)                 where they are parts
y = feed_forward(path.feed_forward, ...)
"""

from typing import Any, NamedTuple

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


def pays(x: Tensor, config: AttentionConfig) -> bool:
    """Return whether fused sub-layers are faster for x: 16-bit autocast on backend `triton`."""
    is_16_bit = autocast_is_active(x.device.type) and autocast_dtype(x) in (
        torch.float16,
        torch.bfloat16,
    )
    return is_16_bit and runs_on_triton(x, config)


def runs_on_triton(x: Tensor, config: AttentionConfig) -> bool:
    """Return whether backend `triton` computes attention over x. Raise like `edge_attention`."""
    return (
        choose_backend(config.backend, x.new_empty(0, dtype=autocast_dtype(x)))
        is BACKENDS["triton"]
    )


# (sources, destinations); sources are None on one set of nodes
Nodes = tuple[Tensor | None, Tensor]
Conditions = tuple[Tensor | None, Tensor | None]  # of sources and of destinations


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
        if not pays(x, config):
            return cls.by_modules("sub-layers are fused under 16-bit autocast, on backend triton")
        destinations = feed_forward_parts(block.layer_norm_mlp_dst, block.node_dst_mlp)
        sources: FeedForwardParts | str = "its sources are not updated"
        if getattr(block, "update_src_nodes", False):
            names = {"norm_name": "layer_norm_mlp_src", "mlp_name": "node_src_mlp"}
            sources = feed_forward_parts(block.layer_norm_mlp_src, block.node_src_mlp, **names)
        return cls(
            attention_path(attention_parts(block), x, cond, config),
            feed_forward_path(destinations, x, cond),
            feed_forward_path(sources, x, cond),
        )


def attention_path(
    parts: AttentionParts | str, x: Tensor, cond: Tensor | tuple | None, config: AttentionConfig
) -> AttentionParts | str:
    """Return the parts, or why a call with this condition on x cannot use them."""
    if isinstance(parts, str):
        return parts
    if config.precision is not None:
        return "the precision of its attention is set"
    if parts.has_condition != (cond is not None):
        return "its norms and the call differ in whether there is a condition"
    return _dtype_mismatch(x, parts.query_weight) or parts


def feed_forward_path(
    parts: FeedForwardParts | str, x: Tensor, cond: Tensor | tuple | None
) -> FeedForwardParts | str:
    """Return the parts, or why a call on rows like x with this condition cannot use them."""
    if isinstance(parts, str):
        return parts
    if parts.has_condition != (cond is not None):
        return "its norm and the call differ in whether there is a condition"
    return _dtype_mismatch(x, parts.weight_in) or parts


def _dtype_mismatch(x: Tensor, weight: Tensor) -> str | None:
    if x.dtype == weight.dtype or autocast_is_active(x.device.type):
        return None
    return f"its features are {x.dtype} and its parameters {weight.dtype}, without autocast"


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
    tensors = parts.tensors(
        _optional_rows(x_src),
        _optional_rows(halo),
        _rows(x_dst),
        edge_attr,
        row_conditions(cond[1], x_dst),
        _source_conditions(x, cond),
    )
    z = attention_sublayer(tensors, graph, parts.options(batch, autocast_dtype(x_dst)))
    return z.view(x_dst.shape)


def feed_forward(parts: FeedForwardParts, x: Tensor, cond: Tensor | None) -> Tensor:
    """Return rows [.., N, F] after the feed-forward sub-layer."""
    tensors = parts.tensors(_rows(x), row_conditions(cond, x))
    return feed_forward_sublayer(tensors, parts.options(autocast_dtype(x))).view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """Return features [.., N, F] as rows [B * N, F]."""
    return x.reshape(-1, x.shape[-1])


def _optional_rows(x: Tensor | None) -> Tensor | None:
    """Return features as rows, None where there are none."""
    return None if x is None else _rows(x)


def row_conditions(cond: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a condition [.., N or 1, K] as one row per node of x [.., N, F]: [B * N, K]."""
    if cond is None:
        return None
    return cond.expand(*x.shape[:-1], cond.shape[-1]).reshape(-1, cond.shape[-1])


def _source_conditions(x: Nodes, cond: Conditions) -> Tensor | None:
    """Return the conditions of the sources, or None to use the destinations' conditions."""
    return None if x[0] is None else row_conditions(cond[0], x[0])


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
