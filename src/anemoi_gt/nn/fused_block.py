"""Sub-layers of a block and linear layers of a mapper, fused if possible and faster.

Decided per call:

fused = FusedParts.of(block, x_dst, cond, config)    parts of fused sub-layers, or refusals
z = attention(fused.attention, ...)                  where they are parts
y = network(fused.feed_forward, ..., residual=True)

parts = linear_layer_parts(layer, name, x, computation)
y = network(parts, x)                                where it has parts
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn.plain import why_not_plain_tensor
from anemoi_gt.nn.sublayers import (
    AttentionParts,
    Computation,
    Conditions,
    NetworkParts,
    Nodes,
    attention_parts,
    linear_parts,
    network_parts,
)
from anemoi_gt.ops.tensors import AttentionOperands, check_operands
from anemoi_gt.refusal import Refusal, not_faster, permanent, transient
from anemoi_gt.torch_compat import is_exporting

NO_SOURCES = not_faster("its sources are not updated")
NOT_FASTER = not_faster(
    "sub-layers are fused under 16-bit autocast where the backend of the attention has them"
)

WRONG_CONDITION = permanent(
    "its norms expect a condition, and the call passes none (or the reverse)"
)
FUSED_BY_COMPILER = not_faster("compiled code fuses casts and norms, and pads rows")
NO_LAYER = not_faster("it is no layer")


class FusedParts(NamedTuple):
    """The parts of each sub-layer in one call if it is fused, else the refusal."""

    attention: AttentionParts | Refusal
    feed_forward: NetworkParts | Refusal
    source_feed_forward: NetworkParts | Refusal  # of a mapper that updates its sources

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
        refused_attention, refused_feed_forward, refused_sources = refused
        attention: AttentionParts | Refusal
        if refused_attention is not None:
            attention = refused_attention
        elif config.precision is not None:  # sub-layers have one dtype for all their operands
            attention = permanent("the precision of its attention is set")
        else:
            attention = for_call(attention_parts(block, computation), x, cond)
        feed_forward: NetworkParts | Refusal
        if refused_feed_forward is not None:
            feed_forward = refused_feed_forward
        else:
            norm = ("layer_norm_mlp_dst", block.layer_norm_mlp_dst)
            parts = network_parts(block.node_dst_mlp, computation, "node_dst_mlp", norm_in=norm)
            feed_forward = for_call(parts, x, cond)
        sources: NetworkParts | Refusal = NO_SOURCES
        if refused_sources is not None:
            sources = refused_sources
        elif getattr(block, "update_src_nodes", False):
            norm = ("layer_norm_mlp_src", block.layer_norm_mlp_src)
            parts = network_parts(block.node_src_mlp, computation, "node_src_mlp", norm_in=norm)
            sources = for_call(parts, x, cond)
        return cls(attention, feed_forward, sources)


Parts = TypeVar("Parts", AttentionParts, NetworkParts)


def for_call(parts: Parts | Refusal, x: Tensor, cond: Tensor | tuple | None) -> Parts | Refusal:
    """Return the parts for a call on rows like x with this condition, or why it cannot use them."""
    if isinstance(parts, Refusal):
        return parts
    if type(x) is not Tensor:
        refusal = why_not_plain_tensor("its features are", x)
        if refusal is not None:
            return refusal
    if parts.has_condition != (cond is not None):
        return WRONG_CONDITION
    if x.dtype != parts.dtype and not parts.computation.is_autocast:
        return permanent(
            f"its features are {x.dtype} and its parameters {parts.dtype}, without autocast"
        )
    return parts


def linear_layer_parts(
    layer: Any, name: str, x: Tensor, computation: Computation
) -> NetworkParts | Refusal:
    """Decide for a linear layer on features like x, called `name` in its mapper.

    It may be a Sequential of a norm and a linear map.
    """
    if torch.compiler.is_compiling():
        return FUSED_BY_COMPILER
    if torch.jit.is_tracing():
        return transient("torch.jit.trace records it")
    if type(layer) is nn.Identity:
        return NO_LAYER
    parts = for_call(linear_parts(layer, name, computation), x, None)
    if isinstance(parts, Refusal):
        return parts
    features = parts.network.out.weight.shape[1]
    if x.shape[-1] != features:
        return permanent(f"its {name} takes {features} features, got {x.shape[-1]}")
    return parts


def network(
    parts: NetworkParts, x: Tensor, cond: Tensor | None = None, *, residual: bool = False
) -> Tensor:
    """Return a network or linear layer of rows x [.., N, F], plus x if `residual`."""
    condition = None if cond is None else row_conditions(cond, x)
    tensors = parts.tensors(_rows(x), None, condition)
    y = parts.compute(tensors, parts.options(residual=residual))
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
    z = parts.compute(tensors, graph, parts.options(batch))
    return z.view(x_dst.shape)


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
