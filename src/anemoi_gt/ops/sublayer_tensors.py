"""Tensors and options of the two fused sub-layers of a block, by name.

    attention_sublayer      z_i = x_i + W_proj (edge attention of n + W_self n_i) + b, n = norm(x)
    feed_forward_sublayer   y_i = x_i + W_out act(W_in norm(x_i) + b) + b

A norm is one description: n = (x - mean) / sqrt(var + eps), times a scale, plus a shift. Without a
condition scale and shift are [F], None for 1 and 0. With a condition c_i of K channels per row they
are affine in it,

    scale_i = 1 + W_scale c_i + b_scale        shift_i = W_shift c_i + b_shift

where `norm_scale` is W_scale [F, K] and `norm_scale_bias` is b_scale [F].

Dimensions: N nodes of a batch entry, B batch entries, F features, K_h hidden features, H heads of C
channels, D edge attributes, R halo rows.
"""

from typing import Generic, NamedTuple

import torch

from anemoi_gt.ops.operands import Held


class FeedForwardTensors(NamedTuple, Generic[Held]):
    """Tensors of a feed-forward sub-layer; or their gradients, None where none is needed."""

    x: Held  # [N, F]
    norm_scale: Held | None  # [F], or [F, K] with a condition
    norm_shift: Held | None
    norm_scale_bias: Held | None  # [F], with a condition alone
    norm_shift_bias: Held | None
    condition: Held | None  # [N, K]
    weight_gate: Held | None  # [K_h, F] of a gated network
    bias_gate: Held | None  # [K_h]
    weight_in: Held  # [K_h, F]
    bias_in: Held | None  # [K_h]
    weight_out: Held  # [F, K_h]
    bias_out: Held | None  # [F]


class FeedForwardOptions(NamedTuple):
    """Options of a feed-forward sub-layer."""

    eps: float
    activation: (
        str  # of the hidden layer, or of the gate: "gelu", "gelu_tanh", "silu", "relu", "sigmoid"
    )
    dtype: torch.dtype  # of the products
    keep_hidden: bool  # for the backward pass; if not, that pass computes the hidden layer again


class AttentionTensors(NamedTuple, Generic[Held]):
    """Tensors of an attention sub-layer; or their gradients, None where none is needed.

    x_src is None where sources and destinations are one set of nodes with one norm. The halo
    follows a rank's own sources in each batch entry; its owners normed it.
    """

    x_src: Held | None  # [B * N_src, F]
    halo: Held | None  # [B * R, F]
    x_dst: Held  # [B * N_dst, F]
    edge_attr: Held  # [E, D] or [B, E, D]
    norm_scale: Held | None  # of destinations: [F], or [F, K] with a condition
    norm_shift: Held | None
    norm_scale_bias: Held | None  # [F], with a condition alone
    norm_shift_bias: Held | None
    condition: Held | None  # [B * N_dst, K]
    norm_src_scale: Held | None  # of sources, where x_src is not None
    norm_src_shift: Held | None
    norm_src_scale_bias: Held | None
    norm_src_shift_bias: Held | None
    condition_src: Held | None  # [B * N_src, K]
    query_weight: Held  # [H * C, F]
    query_bias: Held | None  # [H * C]
    self_weight: Held  # [H * C, F]
    self_bias: Held | None
    key_weight: Held  # [H * C, F]
    key_bias: Held | None
    value_weight: Held  # [H * C, F]
    value_bias: Held | None
    edge_weight: Held  # [H * C, D]
    edge_bias: Held | None
    projection_weight: Held  # [F, H * C]
    projection_bias: Held | None
    query_norm_scale: Held | None  # [C]
    key_norm_scale: Held | None


class AttentionOptions(NamedTuple):
    """Options of an attention sub-layer."""

    heads: int
    batch: int
    norm_eps: float
    norm_src_eps: float
    query_norm_eps: float  # 0.0 without a norm of queries; so for keys
    key_norm_eps: float
    dtype: torch.dtype  # of the products and the attention
