"""Replacements of the methods of Anemoi's graph-transformer mappers that embed and extract rows.

x_src, x_dst = emb_nodes_src(x_src), emb_nodes_dst(x_dst)      pre_process, before a block
y            = node_data_extractor(x_dst)                      post_process, after it

Before 0.15 these methods shard and gather rows between ranks as well. Before 0.16 a mapper cuts and
renumbers the edges of each chunk at each pass; here, they are cut once (`edge_lists`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anemoi_gt.integrations.anemoi.decision import decide_layer
from anemoi_gt.integrations.anemoi.edge_lists import cut_destinations, list_of_mapper, rows_of_chunk
from anemoi_gt.integrations.anemoi.settings import SETTINGS
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn import fused_block
from anemoi_gt.nn.chunking import rows_of
from anemoi_gt.refusal import Refusal
from anemoi_gt.torch_compat import is_exporting


@replaces
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


@replaces
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


@replaces
def mapper_chunk(
    upstream: Callable,
    self: Any,
    x: Any,
    dst_chunk: Tensor,
    edge_attr: Tensor,
    edge_index: Tensor,
    shards: Any,
    batch_size: int,
    size: Any,
    model_comm_group: Any = None,
    cond: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Return the rows of a chunk of destinations, before 0.16."""
    destinations = _range_of(dst_chunk)
    if destinations is None:
        arguments = (x, dst_chunk, edge_attr, edge_index, shards, batch_size, size)
        return upstream(self, *arguments, model_comm_group, cond, **kwargs)
    whole = list_of_mapper(self, edge_index, (size[0], size[1]))
    chunk = cut_destinations(whole, destinations)
    sharding: tuple = ()
    if not hasattr(shards, "dst_nodes"):  # shapes, before 0.15
        sharding = (shards, model_comm_group, True, True)  # both sides are sharded
    x_src, x_dst, *_ = self.pre_process(rows_of_chunk(x, chunk, destinations), *sharding)
    cond = None if cond is None else rows_of_chunk(cond, chunk, destinations)
    (_, out), _ = self.proc(
        (x_src, x_dst),
        rows_of(edge_attr, chunk.edges),
        chunk.edge_index,
        shards,
        batch_size,
        (x_src.shape[0], x_dst.shape[0]),
        model_comm_group,
        cond=cond,
        **kwargs,
    )
    if not sharding:
        return self.post_process(out)
    names = {"shapes_dst": shards[1], "model_comm_group": model_comm_group}
    return self.post_process(out, **names, keep_x_dst_sharded=True)


def _range_of(index: Tensor) -> slice | None:
    """Return the range that an index [N] holds in order, or None; synchronises the device.

    None too where a call is recorded, by which the comparison would become a constant.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_exporting():
        return None
    first = int(index.storage_offset())  # of a slice of `arange`, as upstream makes it
    stop = first + index.shape[0]
    if not torch.equal(index, torch.arange(first, stop, device=index.device)):
        return None
    return slice(first, stop)


def _linear(mapper: Any, name: str, x: Tensor) -> Tensor:
    """Return the result of a linear layer of a mapper, fused or by its module."""
    layer = getattr(mapper, name)
    read = partial(fused_block.read_linear_layer, layer, name, x)
    modules = decide_layer(layer, SETTINGS.of(mapper.proc), x, read)
    if isinstance(modules, Refusal):
        return layer(x)
    return fused_block.network(modules, x)
