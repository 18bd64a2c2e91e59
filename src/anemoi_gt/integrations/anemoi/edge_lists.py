"""Cached edge lists: Anemoi's lists are reused, each with the structure of its graph.

Anemoi makes a new `edge_index` at every forward pass, and cuts and renumbers it for every chunk and
rank. Everything that follows from the graph only is cached:

    provider, batch size      -> the list that it expands to         _get_edges_impl
    list, sizes of the shards -> the shard of this rank              _get_edges_impl
    shard, gathered           -> the list that it was cut from       gather_tensor
    list, number of chunks    -> the number of edges of each chunk   build_graph_partition
    list, its partition       -> the renumbered list of a chunk      GraphPartition.materialise
    list, sizes of the shards -> the renumbered list of this rank    prepare_edge_sharding_wrapper
    mapper, equal list        -> the list of an earlier pass         run_processor_chunk_..
    list, destinations        -> the renumbered list of a chunk      run_processor_chunk_..
    shard, group, its sizes   -> the list of this rank and its halo  sharding

`_get_edges_impl` is a method of `StaticGraphProvider`. `run_processor_chunk_edge_sharding` is that
of anemoi-models before 0.16, where each pass makes new lists, which are recognised by content.

The cache of a list is an attribute of the tensor, so torch.compile reads it, guards on it and takes
the structure as an input of the compiled code. Lists belong to the edges of their provider, which
are known weakly, or to the list that they were cut from: all are freed with these edges, as when a
model is moved to another device. A list of unknown origin gets no attribute; its structure is kept
as long as the tensor lives. All lists are such with anemoi-models 0.9.3 and 0.11.2, which have no
StaticGraphProvider. Lookups never use sizes.

Replacements call upstream for lists without cache.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from anemoi_gt.custom_ops import define_operator
from anemoi_gt.graph import GraphStructure
from anemoi_gt.integrations.anemoi.report import warn_once
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn.chunking import rows_of, shared
from anemoi_gt.nn.plain import ANEMOI_PROVIDER, why_not_plain
from anemoi_gt.torch_compat import constant_when_traced, constants, is_exporting

# of an edge list: Anemoi's methods hand each other the tensor and nothing else
_ATTRIBUTE = "_anemoi_gt_cache"
# {edges of a provider: {batch size: (edge_inc, contents of both, expanded list)}}
_BY_BASE = WeakTensorKeyDictionary()
_BY_TENSOR = WeakTensorKeyDictionary()  # caches of lists of unknown origin
# before 0.16: the list of the last pass of a mapper
_BY_MAPPER: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()


class Content(NamedTuple):
    """What a tensor held, to be compared with what it holds.

    Its version changes when PyTorch writes it, not when NumPy or another library that shares its
    memory does, as after `torch.from_numpy`. So values are compared where they can be without
    waiting for a device.
    """

    version: int
    values: Tensor | None  # a copy of a tensor on a CPU

    @classmethod
    def of(cls, tensor: Tensor) -> "Content":
        """Return the content of a tensor."""
        return cls(version_of(tensor), tensor.detach().clone() if tensor.is_cpu else None)

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor holds this, as far as it can be seen."""
        if self.version != version_of(tensor):
            return False
        return self.values is None or torch.equal(self.values, tensor)


Key = tuple[int | str | None, ...]  # describes fully what was derived from a list
Cut = TypeVar("Cut")  # a list, or a value with an `edge_index`


class Derived:
    """Values derived from an edge list, by key.

    Each is an attribute, and no entry of a dictionary: Dynamo reads an attribute that was set while
    it traced, but of a dictionary it knows the entries from before.
    """

    def get(self, key: Key) -> Any:
        """Return the value of a key, or None."""
        return getattr(self, self._attribute(key), None)

    def set(self, key: Key, value: Any) -> None:
        """Keep a value."""
        setattr(self, self._attribute(key), value)

    @staticmethod
    def _attribute(key: Key) -> str:
        return "_".join([str(element) for element in key])


class EdgeChunk(NamedTuple):
    """The edges into some destinations of a list; both sides renumbered, unused sources dropped."""

    edge_index: Tensor  # with a cache
    sources: Tensor  # [S] int64, the sources of the whole list that remain
    edges: slice | Tensor  # of the whole list


@dataclass(eq=False)
class EdgeCache:
    """The cache of one edge list."""

    num_nodes: tuple[int, int]  # sources and destinations of the list
    content: Content  # of the tensor
    # copies of one graph, side by side; set to 1 where they differ, before `graph` is made
    batch: int = 1
    validate: bool = True  # check the values when the list is sorted, which synchronises the device
    # for a shard: the list that it was cut from, until that is freed
    whole: Callable[[], Tensor | None] = lambda: None
    graph: GraphStructure | None = None  # structure of one of the `batch` copies; made at first use
    # GraphPartitions, and the lists and chunks that were cut from this one
    derived: Derived = field(default_factory=Derived)

    def __reduce__(self) -> tuple[Callable, tuple]:
        # Pickles and copies of a tensor have its attributes, and this one belongs to this tensor in
        # this process. `torch.load(weights_only=True)` allows an empty set.
        return set, ()


def cached_list(
    edge_index: Tensor,
    num_nodes: tuple[int, int],
    batch: int = 1,
    whole: Callable[[], Tensor | None] = lambda: None,
) -> Tensor:
    """Return an edge list with a cache: the same tensor."""
    cache = EdgeCache(num_nodes, Content.of(edge_index), batch, whole=whole)
    setattr(edge_index, _ATTRIBUTE, cache)
    return edge_index


def lookup(edge_index: Tensor) -> EdgeCache | None:
    """Return the cache of a list, or None where it has none or was written into.

    Compiled code does not check for writes: providers do, in eager code, whenever they hand out the
    list.
    """
    cache = getattr(edge_index, _ATTRIBUTE, None)
    if not isinstance(cache, EdgeCache):  # also the set in its place on a copy
        return None
    if torch.compiler.is_compiling():
        return cache
    return None if _is_stale(edge_index) else cache


def structure_of(
    edge_index: Tensor, num_nodes: tuple[int, int], *, reverse: bool
) -> tuple[GraphStructure, int]:
    """Return the structure of an edge list between (num_src, num_dst) nodes, and its batch size.

    While torch.compile traces, the structure of a cached list is made at once and becomes an input
    of the compiled code; for any other list, an operator in the compiled code looks it up.
    """
    cache = lookup(edge_index)
    if cache is not None:
        if torch.compiler.is_compiling():
            has_structure = _make_structure(edge_index, reverse=reverse)
        else:  # which `lookup` has found to be up to date
            has_structure = True
            _fill(cache, edge_index, reverse=reverse)
        graph, batch = cache.graph, cache.batch
        if (
            has_structure
            and graph is not None
            and graph.num_src * batch == num_nodes[0]
            and graph.num_dst * batch == num_nodes[1]
        ):
            return graph, batch
    if not torch.compiler.is_compiling():
        return _structure_by_tensor(edge_index, num_nodes, reverse=reverse), 1
    colptr, row, perm, *source_side = edge_structure(edge_index, *num_nodes, reverse)
    sources = torch.empty(num_nodes[0], 0, device=edge_index.device)
    return GraphStructure(colptr, row, sources, perm, None, *source_side), 1


def prepare_structure(edge_index: Tensor) -> None:
    """Build the structure of a cached list early, so that compiled blocks need not recompile."""
    if lookup(edge_index) is not None:
        _make_structure(edge_index, reverse=torch.is_grad_enabled())


@define_operator
def edge_structure(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    reverse: bool,  # noqa: FBT001  operators take positions
) -> list[Tensor]:
    """Return copies of colptr, row, perm and, with `reverse`, rowptr, col, csr_to_csc."""
    graph = _structure_by_tensor(edge_index, (num_src, num_dst), reverse=reverse)
    tensors: list[Any] = [graph.colptr, graph.row, graph.edge_order()]
    if reverse:
        tensors += [graph.rowptr, graph.col, graph.csr_to_csc]
    return [tensor.clone() for tensor in tensors]


@torch.library.register_fake("anemoi_gt::edge_structure")
def _(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    reverse: bool,  # noqa: FBT001  operators take positions
) -> list[Tensor]:
    num_edges = edge_index.shape[1]
    dtype = torch.int32 if max(num_src, num_dst, num_edges) < 2**31 else torch.int64
    lengths = (num_dst + 1, num_edges, num_edges) + (
        (num_src + 1, num_edges, num_edges) if reverse else ()
    )
    return [edge_index.new_empty(length, dtype=dtype) for length in lengths]


def clear_cache() -> None:
    """Free all cached lists."""
    _BY_BASE.clear()
    _BY_TENSOR.clear()
    _BY_MAPPER.clear()


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version counter; inference tensors, which have none, share one version."""
    return -1 if tensor.is_inference() else tensor._version


@replaces
def get_edges(
    upstream: Callable,
    self: Any,
    batch_size: int,
    shard_edges: bool,  # noqa: FBT001  as upstream
    model_comm_group: Any,
) -> Any:
    """Hand out cached lists of a `StaticGraphProvider` without synchronising the device."""
    refusal = why_not_plain(("", self, (ANEMOI_PROVIDER,)))
    if refusal is not None:
        warn_once(f"edges are made and sorted at each step: {refusal.text}")
    if refusal is not None or is_exporting() or torch.jit.is_tracing():
        return upstream(self, batch_size, shard_edges, model_comm_group)
    edge_index, num_nodes = _expanded_list(self, batch_size)
    edge_attr = self.trainable(self.edge_attr, batch_size)
    if not shard_edges:
        return edge_attr, edge_index, None
    shard_edges_1hop = import_module(Upstream.providers).shard_edges_1hop
    edge_attr, shard, sizes = shard_edges_1hop(edge_attr, edge_index, *num_nodes, model_comm_group)
    if sizes is not None:
        key = ("shard", model_comm_group.rank(), *sizes)
        shard = derived_list(
            edge_index, key, lambda: cached_list(shard, num_nodes, whole=weakref.ref(edge_index))
        )
    return edge_attr, shard, sizes


@torch.compiler.disable
def _expanded_list(provider: Any, batch_size: int) -> tuple[Tensor, tuple[int, int]]:
    """Return a provider's edges, repeated for a batch, and the number of nodes on both sides."""
    base, inc = provider.edge_index_base, provider.edge_inc
    expanded = _BY_BASE.setdefault(base, {})
    if batch_size in expanded:
        known_inc, contents, edge_index = expanded[batch_size]
        is_fresh = known_inc is inc and contents[0].is_of(base) and contents[1].is_of(inc)
        cache = lookup(edge_index) if is_fresh else None
        if cache is not None:
            return edge_index, cache.num_nodes
    with torch.inference_mode(mode=False):
        edge_index = provider._expand_edges(base, inc, batch_size)
    num_src, num_dst = inc[:, 0].tolist()
    num_nodes = num_src * batch_size, num_dst * batch_size
    contents = Content.of(base), Content.of(inc)
    expanded[batch_size] = (inc, contents, cached_list(edge_index, num_nodes, batch_size))
    return edge_index, num_nodes


@replaces
def shard_tensor(
    upstream: Callable,
    input_: Tensor,
    dim: int,
    sizes: list[int] | None,
    mgroup: Any,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Return, on one rank, a cached list and not a view without cache."""
    if (mgroup is None or mgroup.size() == 1) and lookup(input_) is not None:
        return input_
    return upstream(input_, dim, sizes, mgroup, *rest, **named)


@replaces
def gather_tensor(
    upstream: Callable, input_: Tensor, dim: int, sizes: list[int] | None, mgroup: Any
) -> Tensor:
    """Return the list from which the shards were cut instead of a copy of it.

    The shards are exchanged all the same: if one rank left out the collective and another did not
    know its shard, it would hang.
    """
    if (cache := lookup(input_)) is None:
        return upstream(input_, dim, sizes, mgroup)
    gathered = input_ if not mgroup else upstream(input_, dim, sizes, mgroup)
    if mgroup and not torch.compiler.is_compiling():
        whole = cache.whole()
        is_whole = (
            whole is not None
            and lookup(whole) is not None
            and dim == 1
            and whole.shape == gathered.shape
        )
        gathered = whole if is_whole else gathered
    prepare_structure(gathered)
    return gathered


@replaces
def processor_forward(
    upstream: Callable,
    self: Any,
    x: Any,
    batch_size: int,
    shard_info: Any,
    edge_attr: Tensor,
    edge_index: Tensor,
    model_comm_group: Any = None,
    *rest: Any,
    **named: Any,
) -> Any:
    """Build the structure before the first block runs."""
    if model_comm_group is None or model_comm_group.size() == 1:
        prepare_structure(edge_index)
    return upstream(
        self, x, batch_size, shard_info, edge_attr, edge_index, model_comm_group, *rest, **named
    )


@replaces
def prepare_edge_sharding(
    upstream: Callable,
    self: Any,
    x: Any,
    shard_info: Any,
    batch_size: int,
    edge_attr: Tensor,
    edge_index: Tensor,
    model_comm_group: Any = None,
    cond: Any = None,
    edges_are_dst_sorted: bool = True,  # noqa: FBT001, FBT002  as upstream
) -> Any:
    """Cache the renumbered list of this rank of a mapper."""
    arguments = (
        x,
        shard_info,
        batch_size,
        edge_attr,
        edge_index,
        model_comm_group,
        cond,
        edges_are_dst_sorted,
    )
    x_src, x_dst, edge_attr, local, shards, cond, partition = upstream(self, *arguments)
    if (
        not torch.compiler.is_compiling()
        and lookup(edge_index) is not None
        and lookup(local) is None
    ):
        sizes = (shard_info.src_nodes, shard_info.dst_nodes, shard_info.edges)
        rank, world = (
            (model_comm_group.rank(), model_comm_group.size()) if model_comm_group else (0, 1)
        )
        num_rows = (x[0].shape[0], x[1].shape[0])
        key = ("local", rank, world, edges_are_dst_sorted, *num_rows, *sizes)
        num_nodes = (x_src.shape[0], x_dst.shape[0])
        local = derived_list(edge_index, key, lambda: cached_list(local, num_nodes))
    x_src, x_dst, edge_attr, cond = shared_by_chunks(x_src, x_dst, edge_attr, cond, partition)
    return x_src, x_dst, edge_attr, local, shards, cond, partition


def shared_by_chunks(
    x_src: Tensor, x_dst: Tensor, edge_attr: Tensor, cond: Any, partition: Any
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return the inputs of a mapper's chunks, whose gradients are summed in place."""
    if partition.num_parts > 1:
        x_src, x_dst, edge_attr = shared(x_src), shared(x_dst), shared(edge_attr)
        cond = None if cond is None else (shared(cond[0]), shared(cond[1]))
    return x_src, x_dst, edge_attr, cond


@replaces
def build_graph_partition(
    upstream: Callable, edge_index: Tensor, num_parts: int, num_nodes: tuple[int, int]
) -> Any:
    """Count the edges of a cached list once: later steps do not synchronise."""
    cache = lookup(edge_index)
    if cache is None or tuple(num_nodes) != cache.num_nodes:
        return upstream(edge_index, num_parts, num_nodes)
    _count_parts(upstream, edge_index, num_parts)
    return cache.derived.get(("partition", num_parts))


@replaces
def materialise(
    upstream: Callable,
    self: Any,
    partition_id: int,
    x: Any,
    edge_attr: Tensor,
    edge_index: Tensor,
    cond: Any = None,
) -> Any:
    """Renumber the sources of a cached list once for each chunk."""
    if (cache := lookup(edge_index)) is None:
        return upstream(self, partition_id, x, edge_attr, edge_index, cond=cond)
    edges, destinations = self._get_edge_range(partition_id), self._get_dst_range(partition_id)
    bounds = (edges.start, edges.stop, destinations.start, destinations.stop)
    key = constants(*bounds, self.num_parts)
    _make_chunk(edge_index, key, reverse=torch.is_grad_enabled())
    chunk: EdgeChunk = cache.derived.get(("chunk", *key))

    x = rows_of_chunk(x, chunk, destinations)
    cond = None if cond is None else rows_of_chunk(cond, chunk, destinations)
    return x, rows_of(edge_attr, edges), chunk.edge_index, cond


def rows_of_chunk(
    pair: tuple[Tensor, Tensor], chunk: EdgeChunk, destinations: slice
) -> tuple[Tensor, Tensor]:
    """Return the rows of sources and destinations of a chunk."""
    x_src, x_dst = pair
    if chunk.sources.shape[0] != x_src.shape[0]:
        x_src = rows_of(x_src, chunk.sources)
    return x_src, rows_of(x_dst, destinations)


def list_of_mapper(mapper: nn.Module, edge_index: Tensor, num_nodes: tuple[int, int]) -> Tensor:
    """Return a cached list with the content of `edge_index`: of an earlier pass of a mapper.

    Comparing them synchronises the device, as the code that made the list does.
    """
    known = _BY_MAPPER.get(mapper)
    if known is not None and known.device == edge_index.device:
        cache = lookup(known)
        if cache is not None and cache.num_nodes == num_nodes and torch.equal(known, edge_index):
            return known
    with torch.inference_mode(mode=False):
        known = cached_list(edge_index.clone(), num_nodes)
    _BY_MAPPER[mapper] = known
    return known


def cut_destinations(edge_index: Tensor, destinations: slice) -> EdgeChunk:
    """Return the edges of a cached list into a range of destinations, cut once."""
    first, stop = destinations.start, destinations.stop

    def cut() -> EdgeChunk:
        with torch.inference_mode(mode=False):
            src, dst = edge_index
            edges = ((dst >= first) & (dst < stop)).nonzero().flatten()
            sources, src = torch.unique(src[edges], return_inverse=True)
            chunk = torch.stack([src, dst[edges] - first])
        rows: slice | Tensor = edges
        begin, end = (0, 0) if len(edges) == 0 else (int(edges[0]), int(edges[-1]) + 1)
        if end - begin == len(edges):
            rows = slice(begin, end)
        num_nodes = (sources.shape[0], stop - first)
        return EdgeChunk(cached_list(chunk, num_nodes), sources, rows)

    return derived_list(edge_index, ("destinations", first, stop), cut)


# Dynamo calls a function that is assumed constant while it traces, with the real list, and reads
# the result off the cache of the list afterwards, with guards. Its other arguments must be
# constants.


@constant_when_traced
def _make_structure(edge_index: Tensor, *, reverse: bool) -> bool:
    """Build a list's structure, with `reverse` its source side; return False if it was modified."""
    cache = getattr(edge_index, _ATTRIBUTE)
    if _is_stale(edge_index):
        return False
    _fill(cache, edge_index, reverse=reverse)
    return True


@constant_when_traced
def _count_parts(count: Callable, edge_index: Tensor, num_parts: int) -> None:
    """Count the edges of the chunks of a list, which Anemoi calls parts, as it does."""
    cache = getattr(edge_index, _ATTRIBUTE)
    key = ("partition", num_parts)
    if cache.derived.get(key) is None:
        cache.derived.set(key, count(edge_index, num_parts, cache.num_nodes))


@constant_when_traced
def _make_chunk(edge_index: Tensor, key: tuple[int, ...], *, reverse: bool) -> None:
    """Cut the edges of some destinations."""
    first_edge, last_edge, first_dst, last_dst, num_parts = key

    def cut() -> EdgeChunk:
        with torch.inference_mode(mode=False):
            src, dst = edge_index[:, first_edge:last_edge]
            sources, src = torch.unique(src, return_inverse=True)
            chunk = torch.stack([src, dst - first_dst])
        batch = getattr(edge_index, _ATTRIBUTE).batch
        copies = batch // num_parts if batch % num_parts == 0 else 1
        chunk = cached_list(chunk, (sources.shape[0], last_dst - first_dst), copies)
        return EdgeChunk(chunk, sources, slice(first_edge, last_edge))

    chunk = derived_list(edge_index, ("chunk", *key), cut)
    _make_structure(chunk.edge_index, reverse=reverse)


def derived_list(edge_index: Tensor, key: Key, make: Callable[[], Cut]) -> Cut:
    """Return the list, or the value with an `edge_index`, that `make` cuts from a list.

    It is cut at the first call, and again after somebody has written into its edges.
    """
    derived = getattr(edge_index, _ATTRIBUTE).derived
    cut = derived.get(key)
    if cut is None or _is_stale(cut if isinstance(cut, Tensor) else cut.edge_index):
        cut = make()
        derived.set(key, cut)
    return cut


def _is_stale(edge_index: Tensor) -> bool:
    return not getattr(edge_index, _ATTRIBUTE).content.is_of(edge_index)


def _fill(cache: EdgeCache, edge_index: Tensor, *, reverse: bool) -> None:
    graph = cache.graph
    if graph is not None and (not reverse or graph.rowptr is not None):
        return
    # an inference tensor cannot be used by a later training step
    with (
        torch.inference_mode(mode=False),
        torch.no_grad(),
    ):
        if graph is None:
            num_src, num_dst = cache.num_nodes
            if cache.batch > 1 and not _is_replicated(edge_index, cache.num_nodes, cache.batch):
                cache.batch = 1
            one = edge_index[:, : edge_index.shape[1] // cache.batch]
            num_nodes = (num_src // cache.batch, num_dst // cache.batch)
            graph = GraphStructure.from_edge_index(
                one, num_nodes, validate=cache.validate, reverse=False
            )
        cache.graph = graph.with_reverse() if reverse else graph


def _structure_by_tensor(
    edge_index: Tensor, num_nodes: tuple[int, int], *, reverse: bool
) -> GraphStructure:
    """Return the structure of a list of unknown origin, unchecked; it may sort at every step."""
    cache = _BY_TENSOR.get(edge_index)
    if cache is None or cache.num_nodes != num_nodes or not cache.content.is_of(edge_index):
        cache = EdgeCache(num_nodes, Content.of(edge_index), validate=False)
        _BY_TENSOR[edge_index] = cache
    _fill(cache, edge_index, reverse=reverse)
    return cache.graph


def _is_replicated(edge_index: Tensor, num_nodes: tuple[int, int], batch: int) -> bool:
    """Return whether a list holds one graph `batch` times, one after the other; synchronises."""
    if edge_index.shape[1] % batch or num_nodes[0] % batch or num_nodes[1] % batch:
        return False
    stride = edge_index.new_tensor(num_nodes).div(batch, rounding_mode="floor").view(2, 1, 1)
    copies = edge_index.unflatten(1, (batch, -1))
    shifts = torch.arange(batch, device=edge_index.device).view(1, batch, 1) * stride
    return bool((copies == copies[:, :1] + shifts).all())
