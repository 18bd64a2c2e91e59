"""Replacements for `forward` of Anemoi's graph-transformer blocks: the whole block by one operator.

They call upstream, whose attention is ours, for blocks that the operator cannot compute.
"""

import torch

from anemoi_gt.compatibility import is_exporting
from anemoi_gt.integrations.anemoi import attention
from anemoi_gt.integrations.anemoi.attention import SETTINGS
from anemoi_gt.integrations.anemoi.edge_cache import structure_of
from anemoi_gt.integrations.anemoi.sharding import is_distributed, local_edges, start_halo
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn import whole_block

PARAMETERS = "self x edge_attr edge_index shard_info batch_size size model_comm_group cond edges_are_dst_sorted"


@replaces(f"{PARAMETERS} kwargs")
def processor_block(
    upstream, self, x, edge_attr, edge_index, shard_info, batch_size, size, model_comm_group=None, cond=None, *rest,
    **named,
):  # fmt: skip
    """Compute the whole block, or the attention alone."""
    local, is_shard, halo = edge_index, is_distributed(model_comm_group), None
    if is_shard:
        local = local_edges(self, edge_index, 2 * (shard_info.nodes,), batch_size, model_comm_group)
    if _serves(self, x, edge_index, local is None, cond):
        if is_shard:
            given = (x, local, batch_size, shard_info.nodes, model_comm_group, self.layer_norm_attention)
            pending = start_halo(self, *given)
            x, halo = pending.own.flatten(0, 1), pending.wait_halo().flatten(0, 1)
        return _run(self, None, x, edge_attr, local, halo), edge_attr
    given = (x, edge_attr, edge_index, shard_info, batch_size, size, model_comm_group, cond)
    return upstream(self, *given, *rest, **named)


@replaces(f"{PARAMETERS} layer_kwargs")
def mapper_block(
    upstream, self, x, edge_attr, edge_index, shard_info, batch_size, size, model_comm_group=None, cond=None, *rest,
    **named,
):  # fmt: skip
    """Compute the whole block, or the attention alone; sources are updated as upstream does."""
    gathers = is_distributed(model_comm_group) and self.shard_strategy != "edges"  # by edges, the mapper exchanges
    if _serves(self, x[1], edge_index, gathers, cond):
        x_src, x_dst = x[0], _run(self, *x, edge_attr, edge_index)
        x_src = self.run_node_src_mlp(x_src) + x_src if self.update_src_nodes else x_src
        return (x_src, x_dst), edge_attr
    given = (x, edge_attr, edge_index, shard_info, batch_size, size, model_comm_group, cond)
    return upstream(self, *given, *rest, **named)


def _run(block, x_src, x_dst, edge_attr, edge_index, halo=None):
    num_src = sum(rows.shape[0] for rows in (x_dst if x_src is None else x_src, halo) if rows is not None)
    num_nodes = (num_src, x_dst.shape[0])
    graph, batch = structure_of(edge_index, num_nodes, reverse=torch.is_grad_enabled())
    edge_attr = block.edge_pre_mlp(edge_attr)
    edge_attr = edge_attr if batch == 1 else edge_attr.unflatten(0, (batch, -1))
    return whole_block.run_block(block, x_src, x_dst, edge_attr, graph, batch, halo)


def _serves(block, x, edge_index, sharded_upstream: bool, cond) -> bool:
    """Return whether one operator computes a block; if not, say so once, or raise if `blocks=True` names a backend."""
    settings = SETTINGS.of(block)
    if settings is None or settings.blocks is False or is_exporting():
        return False
    if attention.unsupported_reason(block, edge_index) is not None:
        return False  # the attention says so
    if settings.blocks is None and not whole_block.is_proven(x, settings.config):
        return False
    reason = _unsupported_reason(block, x, sharded_upstream, cond, settings)
    if reason is not None and settings.blocks and settings.config.backend != "auto":
        raise ValueError(
            f"blocks=True with backend {settings.config.backend!r} cannot compute this Anemoi block: {reason}; "
            "blocks=None takes the attention alone there, and so does backend 'auto'"
        )
    if reason is not None:
        attention.warn_once(f"an Anemoi block has its attention alone computed by anemoi_gt: {reason}")
    return reason is None


def _unsupported_reason(block, x, sharded_upstream: bool, cond, settings) -> str | None:
    if sharded_upstream:
        return "its nodes are sharded by Anemoi"
    if cond is not None:
        return "its norms take a condition"
    if block.qk_norm:
        return "its queries and keys are normed"
    if attention.dropout_of(block.conv) > 0:
        return "its attention drops weights"
    if not settings.fuse_edges:
        return "its edges are embedded before the attention"
    reason, methods = _own_method(type(block))
    own = [name for name in methods if name in block.__dict__]
    reason = f"its {own[0]} was replaced on the instance" if own else reason
    return reason or whole_block.unsupported_reason(block, x, settings.config, Upstream.parts)


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
