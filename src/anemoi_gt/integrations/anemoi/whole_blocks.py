"""Replacements for `forward` of Anemoi's graph-transformer blocks: two fused sub-layers.

What computes each sub-layer is decided once per call. Where the attention cannot be fused, upstream runs, whose edge
attention is ours; where the feed-forward network cannot, its own modules follow the fused attention.
"""

import torch
from torch import Tensor, nn

from anemoi_gt.compatibility import is_exporting
from anemoi_gt.integrations.anemoi import attention
from anemoi_gt.integrations.anemoi.attention import SETTINGS
from anemoi_gt.integrations.anemoi.edge_cache import structure_of
from anemoi_gt.integrations.anemoi.sharding import is_distributed, local_edges, start_halo
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn import fused_block
from anemoi_gt.nn.fused_block import BlockPath
from anemoi_gt.nn.sublayers import AttentionParts, FeedForwardParts, attention_parts, feed_forward_parts
from anemoi_gt.ops.dtypes import autocast_dtype
from anemoi_gt.ops.triton_backend.attention_sublayer import attention_sublayer

PARAMETERS = "self x edge_attr edge_index shard_info batch_size size model_comm_group cond edges_are_dst_sorted"


@replaces(f"{PARAMETERS} kwargs")
def processor_block(
    upstream, self, x, edge_attr, edge_index, shard_info, batch_size, size, model_comm_group=None, cond=None, *rest,
    **named,
):  # fmt: skip
    """Compute both sub-layers fused, or the attention alone by us."""
    is_shard = is_distributed(model_comm_group)
    local = edge_index
    if is_shard:
        local = local_edges(self, edge_index, 2 * (shard_info.nodes,), batch_size, model_comm_group)
    path = _path(self, x, edge_index, local is None, cond)
    if isinstance(path.attention, str):
        arguments = (x, edge_attr, edge_index, shard_info, batch_size, size, model_comm_group, cond)
        return upstream(self, *arguments, *rest, **named)
    halo = None
    if is_shard:
        norm = self.layer_norm_attention
        pending = start_halo(self, x, local, batch_size, shard_info.nodes, model_comm_group, norm, cond)
        x = pending.own.flatten(0, 1)
        halo = pending.wait_halo().flatten(0, 1)
    z = _attend(self, path.attention, None, x, edge_attr, local, (cond, cond), halo)
    return _feed_forward(path.feed_forward, self.layer_norm_mlp_dst, self.node_dst_mlp, z, cond), edge_attr


@replaces(f"{PARAMETERS} layer_kwargs")
def mapper_block(
    upstream, self, x, edge_attr, edge_index, shard_info, batch_size, size, model_comm_group=None, cond=None, *rest,
    **named,
):  # fmt: skip
    """Compute all sub-layers fused, or the attention alone by us."""
    gathers = is_distributed(model_comm_group) and self.shard_strategy != "edges"  # by edges, the mapper exchanges
    path = _path(self, x[1], edge_index, gathers, cond)
    if isinstance(path.attention, str):
        arguments = (x, edge_attr, edge_index, shard_info, batch_size, size, model_comm_group, cond)
        return upstream(self, *arguments, *rest, **named)
    x_src, x_dst = x
    conditions = (None, None) if cond is None else cond
    z = _attend(self, path.attention, x_src, x_dst, edge_attr, edge_index, conditions, None)
    x_dst = _feed_forward(path.feed_forward, self.layer_norm_mlp_dst, self.node_dst_mlp, z, conditions[1])
    if self.update_src_nodes:
        norm, mlp = self.layer_norm_mlp_src, self.node_src_mlp
        x_src = _feed_forward(path.source_feed_forward, norm, mlp, x_src, conditions[0])
    return (x_src, x_dst), edge_attr


def _attend(
    block, parts: AttentionParts, x_src: Tensor | None, x_dst: Tensor, edge_attr: Tensor, edge_index: Tensor,
    cond: tuple[Tensor | None, Tensor | None], halo: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return destinations [B * N_dst, F] after the attention sub-layer; x_src None stands for one set of nodes."""
    num_src = (x_dst if x_src is None else x_src).shape[0]
    if halo is not None:
        num_src += halo.shape[0]
    graph, batch = structure_of(edge_index, (num_src, x_dst.shape[0]), reverse=torch.is_grad_enabled())
    edge_attr = block.edge_pre_mlp(edge_attr)
    if batch > 1:
        edge_attr = edge_attr.unflatten(0, (batch, -1))
    conditions = (fused_block.row_conditions(cond[1], x_dst), None)
    if x_src is not None:
        conditions = (conditions[0], fused_block.row_conditions(cond[0], x_src))
    tensors = parts.tensors(x_src, halo, x_dst, edge_attr, *conditions)
    return attention_sublayer(tensors, graph, parts.options(batch, autocast_dtype(x_dst)))


def _feed_forward(
    parts: FeedForwardParts | str, norm: nn.Module, mlp: nn.Module, x: Tensor, cond: Tensor | None
) -> Tensor:
    """Return rows [N, F] after the feed-forward sub-layer, fused or by its modules."""
    if not isinstance(parts, str):
        return fused_block.feed_forward(parts, x, cond)
    normed = norm(x) if cond is None else norm(x, cond=cond)
    return mlp(normed) + x


def _path(block, x: Tensor, edge_index, sharded_upstream: bool, cond) -> BlockPath:
    """Return what computes each sub-layer in this call; raise if `blocks=True` names a backend that cannot."""
    settings = SETTINGS.of(block)
    if settings is None or settings.blocks is False or is_exporting():
        return BlockPath.by_modules("fused sub-layers are switched off")
    if attention.unsupported_reason(block, edge_index) is not None:  # the attention says so
        return BlockPath.by_modules("its attention is not that of Anemoi")
    if settings.blocks is None and not fused_block.pays(x, settings.config):
        return BlockPath.by_modules("sub-layers are fused under 16-bit autocast, on backend triton")
    path = _fused_path(block, x, sharded_upstream, cond, settings)
    for reason in path:
        if isinstance(reason, str) and reason != NO_SOURCES:
            if settings.blocks and settings.config.backend != "auto":
                raise ValueError(
                    f"blocks=True with backend {settings.config.backend!r} cannot compute this Anemoi block: {reason}; "
                    "blocks=None takes the attention alone there, and so does backend 'auto'"
                )
            attention.warn_once(f"a sub-layer of an Anemoi block is not fused: {reason}")
    return path


NO_SOURCES = "its sources are not updated"


def _fused_path(block, x: Tensor, sharded_upstream: bool, cond, settings) -> BlockPath:
    if sharded_upstream:
        return BlockPath.by_modules("its nodes are sharded by Anemoi")
    if not settings.fuse_edges:
        return BlockPath.by_modules("its edges are embedded before the attention")
    reason, methods = _own_method(type(block))
    replaced = [name for name in methods if name in block.__dict__]
    if replaced:
        reason = f"its {replaced[0]} was replaced on the instance"
    if reason is not None:
        return BlockPath.by_modules(reason)
    if not fused_block.runs_on_triton(x, settings.config):
        return BlockPath.by_modules("another backend than triton computes its attention")
    sources: FeedForwardParts | str = NO_SOURCES
    if getattr(block, "update_src_nodes", False) and type(block.node_src_mlp) is not nn.Identity:
        names = {"norm_name": "layer_norm_mlp_src", "mlp_name": "node_src_mlp"}
        sources = feed_forward_parts(block.layer_norm_mlp_src, block.node_src_mlp, **names)
    destinations = feed_forward_parts(block.layer_norm_mlp_dst, block.node_dst_mlp)
    return BlockPath(
        fused_block.attention_path(attention_parts(block), x, cond, settings.config),
        fused_block.feed_forward_path(destinations, x, cond),
        fused_block.feed_forward_path(sources, x, cond),
    )


@torch.compiler.assume_constant_result
def _own_method(kind: type) -> tuple[str | None, tuple[str, ...]]:
    """Return which method that `forward` calls a class of blocks overrides, None if none, and names of such methods."""
    upstream = next((each for each in Upstream.blocks if issubclass(kind, each)), None)
    if upstream is None:
        return f"{kind.__qualname__} is not a block of Anemoi's processor or mapper", ()
    names = [name for base in (upstream, Upstream.block) for name in vars(base) if not name.startswith("__")]
    methods = tuple(name for name in names if name != "forward" and callable(getattr(upstream, name)))
    own = [name for name in methods if getattr(kind, name) is not getattr(upstream, name)]
    return f"{kind.__qualname__} has a {own[0]} of its own" if own else None, methods
