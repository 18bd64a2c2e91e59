"""Replacements of the methods of Anemoi's graph-transformer mappers that embed and extract rows.

x_src, x_dst = emb_nodes_src(x_src), emb_nodes_dst(x_dst)      pre_process, before a block
y            = node_data_extractor(x_dst)                      post_process, after it

Before 0.15 these methods shard and gather rows between ranks as well.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anemoi_gt.integrations.anemoi.decision import decide_linear
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn import fused_block
from anemoi_gt.refusal import Refusal


@replaces("self x", "self x shard_shapes model_comm_group x_src_is_sharded x_dst_is_sharded")
def pre_process(
    upstream: Callable,
    self: Any,
    x: Any,
    shard_shapes: Any = None,
    model_comm_group: Any = None,
    x_src_is_sharded: bool = False,  # noqa: FBT001, FBT002  as upstream
    x_dst_is_sharded: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Embed the rows of both node sets; sources of decoders since 0.19."""
    if not isinstance(self, Upstream.mapper.GraphTransformerBaseMapper):
        # up to 0.11 the method belongs to all kinds of mappers
        return upstream(self, x, shard_shapes, model_comm_group, x_src_is_sharded, x_dst_is_sharded)
    x_src, x_dst = x
    embeds_sources = "emb_nodes_src" in self._modules
    if shard_shapes is not None:
        shapes_src, shapes_dst = shard_shapes
        shard_tensor = Upstream.mapper.shard_tensor
        if embeds_sources and not x_src_is_sharded:
            x_src = shard_tensor(x_src, 0, shapes_src, model_comm_group)
        if not x_dst_is_sharded:
            x_dst = shard_tensor(x_dst, 0, shapes_dst, model_comm_group)
    if embeds_sources:
        x_src = _linear(self, "emb_nodes_src", x_src)
    x_dst = _linear(self, "emb_nodes_dst", x_dst)
    if shard_shapes is None:
        return x_src, x_dst
    change_channels = Upstream.mapper.change_channels_in_shape
    return x_src, x_dst, *(change_channels(shapes, self.hidden_dim) for shapes in shard_shapes)


@replaces("self x_dst", "self x_dst shapes_dst model_comm_group keep_x_dst_sharded")
def post_process(
    upstream: Callable,
    self: Any,
    x_dst: Any,
    shapes_dst: Any = None,
    model_comm_group: Any = None,
    keep_x_dst_sharded: bool = False,  # noqa: FBT001, FBT002  as upstream
) -> Any:
    """Return the fields of destinations: a norm and a linear map."""
    if not isinstance(self, Upstream.mapper.GraphTransformerBaseMapper):
        return upstream(self, x_dst, shapes_dst, model_comm_group, keep_x_dst_sharded)
    x_dst = _linear(self, "node_data_extractor", x_dst)
    if shapes_dst is None or keep_x_dst_sharded:
        return x_dst
    shapes = Upstream.mapper.change_channels_in_shape(shapes_dst, self.out_channels_dst)
    return Upstream.mapper.gather_tensor(x_dst, 0, shapes, model_comm_group)


def _linear(mapper: Any, name: str, x: Tensor) -> Tensor:
    """Return the result of a linear layer of a mapper, fused or by its module."""
    parts = decide_linear(mapper, name, x)
    return getattr(mapper, name)(x) if isinstance(parts, Refusal) else fused_block.linear(parts, x)
