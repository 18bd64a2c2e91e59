"""Replacements of `forward` of Anemoi's graph-transformer and transformer blocks.

Each decides once how the block is computed (`decision`): by fused sub-layers, by the block's own
modules around anemoi_gt's attention, or by upstream's forward. Sources of other ranks come from the
halo exchange of anemoi_gt, from Anemoi's, or from its strategy "heads".
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anemoi_gt.integrations.anemoi.decision import (
    UPSTREAM,
    Call,
    Decision,
    decide,
    decide_transformer,
)
from anemoi_gt.integrations.anemoi.edge_lists import structure_of
from anemoi_gt.integrations.anemoi.sharding import (
    EdgeShard,
    is_distributed,
    shard_of,
    shards_edges,
)
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn import fused_block
from anemoi_gt.nn.layer_kernels import cast_for_projections
from anemoi_gt.ops import edge_attention
from anemoi_gt.refusal import Refusal


@replaces
def processor_block(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a block on one set of nodes."""
    call = Call.of(*args, **kwargs)
    shard = None
    distributed = is_distributed(call.group)
    if distributed and shards_edges(self):
        sizes = 2 * (call.shards.nodes,)
        shard = shard_of(self, call.edge_index, sizes, call.batch_size, call.group)
    decision = decide(self, call.x, call, gathers=distributed and shard is None)
    if decision.outcome == UPSTREAM and (shard is None or decision.is_overridden):
        return upstream(self, *args, **kwargs)

    def attend() -> Tensor:
        x = self.layer_norm_attention(call.x, **_named_condition(call.cond))
        self_term = self.lin_self(x)
        if shard is not None:
            out = _attend_with_halo(self, decision, x, call, shard)
        elif not distributed:
            out = _attend_here(self, decision, x, x, call)
        elif getattr(self, "shard_strategy", "heads") == "edges":
            out = _attend_with_halo_of_anemoi(self, decision, x, call)
        else:
            out = _attend_by_heads(self, decision, x, x, call)
        return self.projection(out + self_term) + call.x

    out = _forward(self, decision, call, (call.x, call.x), (call.cond, call.cond), shard, attend)
    return out, call.edge_attr


@replaces
def mapper_block(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a block from sources to destinations; with "edges", the mapper exchanges rows."""
    call = Call.of(*args, **kwargs)
    x_src, x_dst = call.x
    gathers = is_distributed(call.group) and self.shard_strategy != "edges"
    decision = decide(self, x_dst, call, gathers=gathers)
    if decision.outcome == UPSTREAM:
        return upstream(self, *args, **kwargs)
    cond_src, cond_dst = (None, None) if call.cond is None else call.cond

    def attend() -> Tensor:
        src = self.layer_norm_attention_src(x_src, **_named_condition(cond_src))
        dst = self.layer_norm_attention_dest(x_dst, **_named_condition(cond_dst))
        self_term = self.lin_self(dst)
        attend_to = _attend_by_heads if gathers else _attend_here
        return self.projection(attend_to(self, decision, src, dst, call) + self_term) + x_dst

    out = _forward(self, decision, call, (x_src, x_dst), (cond_src, cond_dst), None, attend)
    if self.update_src_nodes:
        sources = decision.fused.source_feed_forward
        x_src = fused_block.feed_forward(sources, self.run_node_src_mlp, x_src, cond_src)
    return (x_src, out), call.edge_attr


@replaces
def transformer_processor_block(
    upstream: Callable, self: Any, x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute a transformer block of a processor: Anemoi's attention, fused feed-forward."""
    shards, batch_size, group, cond = _transformer_arguments(*args, **kwargs)
    modules = decide_transformer(self, x, cond)
    if isinstance(modules, Refusal):
        return upstream(self, x, *args, **kwargs)
    normed = self.layer_norm_attention(x, **_named_condition(cond))
    x = x + self.attention(normed, shards, batch_size, model_comm_group=group)
    x = fused_block.network(modules, x, cond, residual=True)
    return x if Upstream.returns_rows_only else (x,)


@replaces
def transformer_mapper_block(
    upstream: Callable, self: Any, x: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compute a transformer block of a mapper: Anemoi's attention, fused feed-forward."""
    shards, batch_size, group, cond = _transformer_arguments(*args, **kwargs)
    cond_src, cond_dst = (None, None) if cond is None else cond
    x_src, x_dst = x
    modules = decide_transformer(self, x_dst, cond_dst)
    if isinstance(modules, Refusal):
        return upstream(self, x, *args, **kwargs)
    src = self.layer_norm_attention_src(x_src, **_named_condition(cond_src))
    dst = self.layer_norm_attention_dst(x_dst, **_named_condition(cond_dst))
    # upstream adds to the normed destinations and returns the normed sources (anemoi-models 0.19)
    out = dst + self.attention((src, dst), shards, batch_size, model_comm_group=group)
    out = fused_block.network(modules, out, cond_dst, residual=True)
    return (src, out), None


def _transformer_arguments(
    shard_info: Any = None,
    batch_size: int = 1,
    model_comm_group: Any = None,
    cond: Any = None,
    shapes: Any = None,
    **_others: Any,
) -> tuple[Any, int, Any, Any]:
    """Return shards, batch size, group and condition of a transformer block of any version."""
    shards = shapes if shard_info is None else shard_info
    return shards, batch_size, model_comm_group, cond


def _named_condition(cond: Tensor | None) -> dict[str, Tensor]:
    """Return a condition as a keyword argument of a norm that takes one."""
    return {} if cond is None else {"cond": cond}


def _forward(
    block: Any,
    decision: Decision,
    call: Call,
    x: tuple[Tensor, Tensor],
    cond: tuple[Tensor | None, Tensor | None],
    shard: EdgeShard | None,
    attend: Callable[[], Tensor],
) -> Tensor:
    """Return destinations [B * N_dst, F] after the forward pass of a block of either library."""
    modules = decision.fused
    edge_attr = call.edge_attr
    graph: Any = shard  # None where the block's modules read the list
    batch = 1 if shard is None else shard.copies
    if not isinstance(modules.attention, Refusal):
        if shard is None:
            num_nodes = (x[0].shape[0], x[1].shape[0])
            reverse = torch.is_grad_enabled()
            graph, batch = structure_of(call.edge_index, num_nodes, reverse=reverse)
        if batch > 1:
            edge_attr = edge_attr.unflatten(0, (batch, -1))
    return fused_block.block_forward(
        block, modules, x, graph, edge_attr, cond, batch=batch, attend=attend
    )


def _attend_here(block: Any, decision: Decision, src: Tensor, dst: Tensor, call: Call) -> Tensor:
    """Return the attention [N_dst, H * C] of a block on one rank, or with gathered sources."""
    is_one_set = src is dst
    src = cast_for_projections(src, block.lin_query, block.lin_key, block.lin_value)
    dst = src if is_one_set else dst
    return _attend_to(block, decision, dst, lambda: src, call.edge_attr, call.edge_index)


def _attend_with_halo(
    block: Any, decision: Decision, x: Tensor, call: Call, shard: EdgeShard
) -> Tensor:
    """Return the attention of local destinations; compute the query during the exchange."""
    x = cast_for_projections(x, block.lin_query, block.lin_key, block.lin_value)
    local = shard.edge_index
    pending = shard.start_exchange(x)
    local_rows = pending.own.flatten(0, 1)
    # ranks may decide differently, and must exchange the same rows
    if decision.outcome == UPSTREAM:
        rows = pending.wait().flatten(0, 1)
        operands = block.get_qkve((rows, local_rows), call.edge_attr)
        size = (rows.shape[0], local_rows.shape[0])
        num_chunks = 1 if block.training else Upstream.block_module.NUM_CHUNKS_INFERENCE_PROCESSOR
        return block._forward_edges_sharded_attention(
            *operands, local, size, num_chunks, edges_are_dst_sorted=True
        )

    def sources() -> Tensor:
        return pending.wait().flatten(0, 1)

    return _attend_to(block, decision, local_rows, sources, call.edge_attr, local)


def _attend_with_halo_of_anemoi(block: Any, decision: Decision, x: Tensor, call: Call) -> Tensor:
    """Return the attention of local destinations, after Anemoi's own exchange of sources."""
    info = block._get_or_build_cached_halo_info(
        x, call.edge_index, call.shards, call.batch_size, call.group
    )
    rows = Upstream.block_module.halo_exchange(x, info, call.group)
    return _attend_to(block, decision, x, lambda: rows, call.edge_attr, info.edge_index_local)


def _attend_to(
    block: Any,
    decision: Decision,
    dst: Tensor,
    sources: Callable[[], Tensor],
    edge_attr: Tensor,
    edge_index: Tensor,
) -> Tensor:
    """Return the attention [N_dst, H * C] of normed rows; `sources` waits for rows of others."""
    query = _split_heads(block, block.lin_query(dst))
    src = sources()
    key, value = _split_heads(block, block.lin_key(src)), _split_heads(block, block.lin_value(src))
    if hasattr(block, "edge_pre_mlp"):  # not before 0.11.1
        edge_attr = block.edge_pre_mlp(edge_attr)
    if not decision.has_raw_edges:
        edge_attr = _split_heads(block, block.lin_edge(edge_attr))
    return _attend(block, decision, query, key, value, edge_attr, edge_index)


def _attend_by_heads(
    block: Any, decision: Decision, src: Tensor, dst: Tensor, call: Call
) -> Tensor:
    """Return the attention of local destinations; each rank computes some heads of all nodes."""
    shards: Any = call.shards
    of_one_set: Any = getattr(Upstream.shapes, "GraphShardInfo", ())  # not before 0.15
    if isinstance(shards, of_one_set):
        shards = Upstream.shapes.BipartiteGraphShardInfo(shards.nodes, shards.nodes, shards.edges)
    edge_attr = (
        block.edge_pre_mlp(call.edge_attr) if hasattr(block, "edge_pre_mlp") else call.edge_attr
    )
    rows = (
        block.lin_query(dst),
        block.lin_key(src),
        block.lin_value(src),
        block.lin_edge(edge_attr),
    )
    query, key, value, edges, *sizes = block.shard_qkve_heads(
        *rows, shards, call.batch_size, call.group
    )
    out = _attend(block, decision, query, key, value, edges, call.edge_index, flat=False)
    return block.shard_output_seq(out, shards, *sizes, call.batch_size, call.group)


def _attend(
    block: Any,
    decision: Decision,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Tensor,
    edge_index: Tensor,
    *,
    flat: bool = True,
) -> Tensor:
    """Return the attention [N_dst, H * C] or [N_dst, H, C]; edges are raw or embedded.

    Raw edges are [E, D], embedded ones [E, H, C].
    """
    if block.qk_norm:
        query, key = block.q_norm(query), block.k_norm(key)
    reverse = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    graph, batch = structure_of(edge_index, (key.shape[0], query.shape[0]), reverse=reverse)
    embedding = (block.lin_edge.weight, block.lin_edge.bias) if edges.dim() == 2 else ()
    if batch > 1:
        query, key, value, edges = (
            rows.unflatten(0, (batch, -1)) for rows in (query, key, value, edges)
        )
    assert decision.settings is not None  # or Anemoi's forward would compute
    conv = block.conv  # or a function
    drops = isinstance(conv, nn.Module) and conv.training
    out, _ = edge_attention(
        query,
        key,
        value,
        graph,
        edges,
        *embedding,
        dropout_p=conv.dropout if drops else 0.0,
        config=decision.settings.config,
    )
    out = out if batch == 1 else out.flatten(0, 1)
    return out.flatten(1) if flat else out


def _split_heads(block: Any, rows: Tensor) -> Tensor:
    return rows.unflatten(-1, (block.num_heads, block.out_channels_conv))
