"""Sub-layers of a block and linear layers of a mapper, fused if possible and faster.

Decided per call:

fused = FusedParts.of(block, x_dst, cond, config)    parts of fused sub-layers, or refusals
z = attention(fused.attention, ...)                  where they are parts
y = feed_forward(fused.feed_forward, ...)

parts = linear_layer_parts(layer, name, x, computation)
y = linear(parts, x)                                 where it has parts
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn.plain import why_not_plain_tensor
from anemoi_gt.nn.sublayers import (
    AttentionParts,
    Conditions,
    FeedForwardParts,
    LinearParts,
    Nodes,
    attention_parts,
    feed_forward_parts,
    linear_parts,
)
from anemoi_gt.ops.backends import Sublayers, choose_backend
from anemoi_gt.ops.dtypes import autocast_dtype, autocast_is_active
from anemoi_gt.ops.operands import AttentionOperands, check_operands
from anemoi_gt.refusal import Refusal, not_faster, permanent, transient
from anemoi_gt.torch_compat import is_exporting

NO_SUBLAYERS = permanent("the backend of its attention has no fused sub-layers")
NO_SOURCES = not_faster("its sources are not updated")
NOT_FASTER = not_faster(
    "sub-layers are fused under 16-bit autocast where the backend of the attention has them"
)

FUSED_BY_COMPILER = not_faster("compiled code fuses casts and norms, and pads rows")
NO_LAYER = not_faster("it is no layer")


SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def is_16_bit_autocast(x: Tensor) -> bool:
    """Return whether features like x are read under autocast to 16 bits."""
    return autocast_is_active(x.device.type) and autocast_dtype(x) in SIXTEEN_BITS


class Computation(NamedTuple):
    """Dtype, backend and kept tensors of a call, decided once from its features and settings."""

    gemm_dtype: torch.dtype
    is_autocast: bool  # whether autocast is active
    sublayers: Sublayers | None  # of the backend of the attention, None if it has none
    keep_hidden: bool  # whether fused feed-forward sub-layers keep their hidden layer

    @classmethod
    def of(cls, x: Tensor, config: KernelConfig, *, keep_hidden: bool = True) -> "Computation":
        """Read dtype, autocast and backend for features like x. Raise like `edge_attention`."""
        dtype = autocast_dtype(x)
        # an empty tensor: the choice depends on device and dtype
        backend = choose_backend(config.backend, x.new_empty(0, dtype=dtype))
        is_autocast = autocast_is_active(x.device.type)
        return cls(dtype, is_autocast, backend.sublayers, keep_hidden)

    @property
    def is_faster_fused(self) -> bool:
        """Whether fused sub-layers are faster: under 16-bit autocast."""
        return self.sublayers is not None and self.is_autocast and self.gemm_dtype in SIXTEEN_BITS


class FusedParts(NamedTuple):
    """The parts of each sub-layer in one call if it is fused, else the refusal."""

    attention: AttentionParts | Refusal
    feed_forward: FeedForwardParts | Refusal
    source_feed_forward: FeedForwardParts | Refusal  # of a mapper that updates its sources

    @classmethod
    def by_modules(cls, refusal: Refusal) -> "FusedParts":
        """Return the refusals of a block whose own modules compute everything."""
        return cls(refusal, refusal, refusal)

    @classmethod
    def of(cls, block: Any, x: Tensor, cond: Tensor | None, config: KernelConfig) -> "FusedParts":
        """Decide for a block of this library, destinations like x, and any condition."""
        if is_exporting():
            return cls.by_modules(permanent("an exported program has no operators of this library"))
        computation = Computation.of(x, config)
        if not computation.is_faster_fused:
            return cls.by_modules(NOT_FASTER)
        return cls.of_modules(block, x, cond, config, computation)

    @classmethod
    def of_modules(
        cls,
        block: Any,
        x: Tensor,
        cond: Tensor | tuple | None,
        config: KernelConfig,
        computation: Computation,
        refused: tuple[Refusal | None, Refusal | None, Refusal | None] = (None, None, None),
    ) -> "FusedParts":
        """Decide by the modules of a block of this library or of Anemoi.

        `refused` are the caller's refusals of its sub-layers; None if there is none.
        """
        sublayers = computation.sublayers
        if sublayers is None:
            return cls.by_modules(NO_SUBLAYERS)
        refused_attention, refused_feed_forward, refused_sources = refused
        attention: AttentionParts | Refusal
        if refused_attention is not None:
            attention = refused_attention
        elif config.precision is not None:  # sub-layers have one dtype for all their operands
            attention = permanent("the precision of its attention is set")
        else:
            attention = for_call(attention_parts(block, sublayers), x, cond, computation)
        feed_forward: FeedForwardParts | Refusal
        if refused_feed_forward is not None:
            feed_forward = refused_feed_forward
        else:
            parts = feed_forward_parts(block.layer_norm_mlp_dst, block.node_dst_mlp, sublayers)
            feed_forward = for_call(parts, x, cond, computation)
        sources: FeedForwardParts | Refusal = NO_SOURCES
        if refused_sources is not None:
            sources = refused_sources
        elif getattr(block, "update_src_nodes", False):
            names = {"norm_name": "layer_norm_mlp_src", "mlp_name": "node_src_mlp"}
            modules = block.layer_norm_mlp_src, block.node_src_mlp
            sources = for_call(
                feed_forward_parts(*modules, sublayers, **names), x, cond, computation
            )
        return cls(attention, feed_forward, sources)


Parts = TypeVar("Parts", AttentionParts, FeedForwardParts, LinearParts)


def for_call(
    parts: Parts | Refusal, x: Tensor, cond: Tensor | tuple | None, computation: Computation
) -> Parts | Refusal:
    """Return the parts for a call on rows like x with this condition, or why it cannot use them."""
    if isinstance(parts, Refusal):
        return parts
    if type(x) is not Tensor:
        refusal = why_not_plain_tensor("its features are", x)
        if refusal is not None:
            return refusal
    if parts.has_condition != (cond is not None):
        return permanent("its norms expect a condition, and the call passes none (or the reverse)")
    if x.dtype != parts.dtype and not computation.is_autocast:
        return permanent(
            f"its features are {x.dtype} and its parameters {parts.dtype}, without autocast"
        )
    # What torch_compat.replace_fields does and gives the reason for; inlined, because all
    # sub-layers are decided here in every forward pass.
    fields = parts._asdict()
    fields["gemm_dtype"] = computation.gemm_dtype
    if isinstance(parts, FeedForwardParts):
        fields["keep_hidden"] = computation.keep_hidden
    return type(parts)(**fields)


def linear_layer_parts(
    layer: Any, name: str, x: Tensor, computation: Computation
) -> LinearParts | Refusal:
    """Decide for a linear layer on features like x, called `name` in its mapper.

    It may be a Sequential of a norm and a linear map.
    """
    if torch.compiler.is_compiling():
        return FUSED_BY_COMPILER
    if torch.jit.is_tracing():
        return transient("torch.jit.trace records it")
    if computation.sublayers is None:
        return NO_SUBLAYERS
    if type(layer) is nn.Identity:
        return NO_LAYER
    parts = for_call(linear_parts(layer, name, computation.sublayers), x, None, computation)
    if isinstance(parts, Refusal):
        return parts
    features = parts.linear.weight.shape[1]
    if x.shape[-1] != features:
        return permanent(f"its {name} takes {features} features, got {x.shape[-1]}")
    return parts


def linear(parts: LinearParts, x: Tensor) -> Tensor:
    """Return rows [.., N, F_out] of a linear layer."""
    y = parts.sublayer.compute(parts.tensors(_rows(x)), parts.options())
    return y.view(*x.shape[:-1], y.shape[-1])


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
    # a batch of one reads attributes as one graph does: no batch stride in the kernels
    if batch == 1 and edge_attr.dim() == 3:
        edge_attr = edge_attr.squeeze(0)
    rows = (_optional_rows(x_src), _rows(x_dst))
    tensors = parts.tensors(rows, edge_attr, row_conditions_of(x, cond), _optional_rows(halo))
    z = parts.sublayer.compute(tensors, graph, parts.options(batch))
    return z.view(x_dst.shape)


def feed_forward(parts: FeedForwardParts, x: Tensor, cond: Tensor | None) -> Tensor:
    """Return rows [.., N, F] after the feed-forward sub-layer."""
    rows = x.reshape(-1, x.shape[-1])
    condition = None if cond is None else row_conditions(cond, x)
    tensors = parts.tensors(rows, condition)
    return parts.sublayer.compute(tensors, parts.options()).view(x.shape)


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
    width = parts.query.weight.shape[0]
    heads = (parts.heads, width // parts.heads)
    # one element, expanded: shapes and dtypes are checked, and nothing is allocated
    query = x_dst.new_empty(()).expand(*x_dst.shape[:-1], *heads)
    key = x_dst.new_empty(()).expand(*x_dst.shape[:-2], num_src, *heads)
    edge_bias = parts.edge.bias
    check_operands(
        AttentionOperands(query, key, key, edge_attr, parts.edge.weight, edge_bias), graph
    )
