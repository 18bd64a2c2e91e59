"""What the makers of Anemoi's edge lists do while blocks compute with us: they hand out the same list again.

Anemoi makes a new `edge_index` at every forward pass and cuts and renumbers it for every chunk and rank. What follows from
the graph alone is remembered:

    provider, batch size      -> the list that it expands to                    StaticGraphProvider._expand_edges
    list, sizes of the shards -> the shard of this rank                         StaticGraphProvider._get_edges_impl
    shard, gathered           -> the list that it was cut from                  gather_tensor
    list, number of parts     -> how many edges each part has                   build_graph_partition
    list, its partition       -> the renumbered list of this rank or chunk      prepare_edge_sharding_wrapper, materialise

The first lists belong to their provider, which is known weakly, the others to the list they were made from: all of them die
with the provider. Each function stands in for a function of theirs, and runs it for lists that it does not know.
"""

import weakref
from collections.abc import Callable
from functools import partial, wraps

import torch
from torch import Tensor

from anemoi_gt.integrations.anemoi.edge_cache import HandedOut, recognise, version_of

_BY_PROVIDER: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def forget() -> None:
    """Forget all providers."""
    _BY_PROVIDER.clear()


def expanding(theirs):
    """`StaticGraphProvider._expand_edges` that hands out the same list again."""

    @wraps(theirs)
    def _expand_edges(self, edge_index, edge_inc, batch_size):
        if torch.compiler.is_compiling():
            return theirs(self, edge_index, edge_inc, batch_size)
        bases = (edge_index, edge_inc)
        expanded = _BY_PROVIDER.setdefault(self, {})
        made_from, held = expanded.get(batch_size, ((), None))
        if held is None or not held.is_intact or not _is_made_from(bases, made_from):
            with torch.inference_mode(False):
                held = HandedOut(theirs(self, edge_index, edge_inc, batch_size), samples=batch_size)
            expanded[batch_size] = (_made_from(bases, forget=partial(expanded.pop, batch_size, None)), held)
        return held.edge_index

    return _expand_edges


def sharding(theirs):
    """`StaticGraphProvider._get_edges_impl` whose shards of known lists are known."""

    @wraps(theirs)
    def _get_edges_impl(self, batch_size, shard_edges, model_comm_group):
        edge_attr, edge_index, shard_sizes = theirs(self, batch_size, shard_edges, model_comm_group)
        _, whole = _BY_PROVIDER.get(self, {}).get(batch_size, ((), None))
        if whole is not None and shard_sizes is not None:
            key = ("shard", model_comm_group.rank(), *shard_sizes)
            edge_index = whole.part(key, lambda: HandedOut(edge_index, whole=whole)).edge_index
        return edge_attr, edge_index, shard_sizes

    return _get_edges_impl


def gathering(theirs):
    """`gather_tensor` that returns the list from which the shards were cut in place of a copy of it.

    The shards travel nevertheless: a rank that left the collective out, when another one does not know its shard, would hang it.
    """

    @wraps(theirs)
    def gather_tensor(input_, dim, sizes, mgroup):
        gathered = theirs(input_, dim, sizes, mgroup)
        shard = None if torch.compiler.is_compiling() or input_.dtype.is_floating_point else recognise(input_)
        whole = None if shard is None else shard.whole
        is_whole = whole is not None and dim == 1 and whole.edge_index.shape == gathered.shape
        return whole.edge_index if is_whole else gathered

    return gather_tensor


def localising(theirs):
    """`GraphTransformerBaseMapper.prepare_edge_sharding_wrapper` whose renumbered lists of this rank are known."""

    @wraps(theirs)
    def prepare_edge_sharding_wrapper(
        self,
        x,
        shard_info,
        batch_size,
        edge_attr,
        edge_index,
        model_comm_group=None,
        cond=None,
        edges_are_dst_sorted=True,
    ):
        given = (x, shard_info, batch_size, edge_attr, edge_index, model_comm_group, cond, edges_are_dst_sorted)
        x_src, x_dst, edge_attr, local, *rest = theirs(self, *given)
        whole = None if torch.compiler.is_compiling() else recognise(edge_index)
        if whole is not None and recognise(local) is None:
            sizes = (shard_info.src_nodes, shard_info.dst_nodes, shard_info.edges)
            place = (model_comm_group.rank(), model_comm_group.size()) if model_comm_group else (0, 1)
            key = ("local", *place, edges_are_dst_sorted, x[0].shape[0], x[1].shape[0], *map(_frozen, sizes))
            local = whole.part(key, lambda: HandedOut(local)).edge_index
        return x_src, x_dst, edge_attr, local, *rest

    return prepare_edge_sharding_wrapper


def partitioning(theirs):
    """`build_graph_partition` that counts the edges of a known list once, without waiting for the device afterwards."""

    @wraps(theirs)
    def build_graph_partition(edge_index, num_parts, num_nodes):
        known = None if torch.compiler.is_compiling() else recognise(edge_index)
        if known is None:
            return theirs(edge_index, num_parts, num_nodes)
        key = (num_parts, *num_nodes)
        if key not in known.partitions:
            known.partitions[key] = theirs(edge_index, num_parts, num_nodes)
        return known.partitions[key]

    return build_graph_partition


def materialising(theirs):
    """`GraphPartition.materialise` that renumbers the sources of a known list once."""

    @wraps(theirs)
    def materialise(self, partition_id, x, edge_attr, edge_index, cond=None):
        whole = None if torch.compiler.is_compiling() else recognise(edge_index)
        if whole is None:
            return theirs(self, partition_id, x, edge_attr, edge_index, cond=cond)
        edges, destinations = self._get_edge_range(partition_id), self._get_dst_range(partition_id)
        key = ("chunk", edges.start, edges.stop, destinations.start, destinations.stop, self.num_parts)
        part = whole.part(key, lambda: _cut(whole, edges, destinations, self.num_parts))

        def share(pair):
            x_src, x_dst = pair
            is_whole = part.sources.shape[0] == x_src.shape[0]
            return x_src if is_whole else x_src.index_select(0, part.sources), x_dst[destinations]

        return share(x), edge_attr[edges], part.edge_index, None if cond is None else share(cond)

    return materialise


def _cut(whole: HandedOut, edges: slice, destinations: slice, num_parts: int) -> HandedOut:
    """The edges of some destinations, both sides numbered from 0, sources without edge left out."""
    with torch.inference_mode(False):
        src, dst = whole.edge_index[:, edges]
        sources, src = torch.unique(src, return_inverse=True)
        edge_index = torch.stack([src, dst - destinations.start])
    samples = whole.samples // num_parts if whole.samples % num_parts == 0 else 1
    return HandedOut(edge_index, samples, sources)


def _made_from(bases: tuple[Tensor, ...], forget: Callable[[], object]) -> tuple:
    """What tells these tensors from others; `forget` is called when one of them dies, as when its model goes to another device."""
    return tuple((weakref.ref(base, lambda _: forget()), version_of(base)) for base in bases)


def _is_made_from(bases: tuple[Tensor, ...], made_from: tuple) -> bool:
    return all(
        ref() is base and version == version_of(base) for base, (ref, version) in zip(bases, made_from, strict=True)
    )


def _frozen(sizes) -> tuple:
    return () if sizes is None else tuple(sizes)
