"""Tensors and options of the attention sub-layer of a block, as trees, and of maps and norms.

    attention_sublayer      z_i = x_i + W_proj (edge attention of n + W_self n_i) + b, n = norm(x)

Dimensions: N nodes of a batch entry, B batch entries, F features, H heads of C channels, D edge
attributes, R halo rows, K features of a condition.
"""

from typing import Generic, NamedTuple

import torch

from anemoi_gt.ops.operands import Held


class Linear(NamedTuple, Generic[Held]):
    """y = W x + b."""

    weight: Held = None  # type: ignore[assignment]  # [F_out, F_in]; None without the map
    bias: Held | None = None  # [F_out]


class Norm(NamedTuple, Generic[Held]):
    """n = (x - mean) / sqrt(var + eps), times a scale, plus a shift.

    Without a condition they are [F], None for 1 and 0. With a condition c_i per row, both are
    affine in it:

        scale_i = 1 + W_scale c_i + b_scale        shift_i = W_shift c_i + b_shift
    """

    scale: Held | None = None  # [F]
    shift: Held | None = None  # [F]
    condition: Held | None = None  # [B * N, K]
    scale_map: Linear[Held] = Linear()  # [F, K] and [F], with a condition only
    shift_map: Linear[Held] = Linear()


class NoConstants(NamedTuple):
    """The constants of an operator on rows, which reads no graph."""


class NormOptions(NamedTuple):
    """Options of a norm."""

    eps: float = 0.0  # positive; 0 without a norm of heads or of a linear layer
    is_centred: bool = True  # layer norm; if not, RMSNorm, whose mean is taken as 0

    def constants(self) -> dict[str, bool]:
        """Return what the kernels are compiled for."""
        return {"CENTRED": self.is_centred}


class AttentionTensors(NamedTuple, Generic[Held]):
    """Tensors of an attention sub-layer, or what belongs to each of them.

    x_src is None where sources and destinations are one set of nodes with one norm. The halo
    follows a rank's own sources in each batch entry; its owner ranks normalised it.
    """

    x_src: Held | None  # [B * N_src, F]
    halo: Held | None  # [B * R, F]
    x_dst: Held  # [B * N_dst, F]
    edge_attr: Held  # [E, D] or [B, E, D]
    norm: Norm[Held]  # of destinations
    norm_src: Norm[Held]  # of sources, where x_src is not None
    query: Linear[Held]  # [H * C, F]
    self_term: Linear[Held]  # [H * C, F]
    key: Linear[Held]  # [H * C, F]
    value: Linear[Held]  # [H * C, F]
    edge: Linear[Held]  # [H * C, D]
    projection: Linear[Held]  # [F, H * C]
    query_scale: Held | None  # [C], of the norm of queries
    key_scale: Held | None  # [C], of the norm of keys


class AttentionOptions(NamedTuple):
    """Options of an attention sub-layer."""

    heads: int
    batch: int
    norm: NormOptions
    norm_src: NormOptions
    query_norm: NormOptions
    key_norm: NormOptions
    gemm_dtype: torch.dtype  # of the operands of the attention too
