"""Sharding of Anemoi's models on our halo exchange: replacements of its multi-rank methods.

Anemoi hands every layer the nodes of its rank, contiguous ranges, and the edges into them. With
shard strategy "edges"

    processor block    exchanges halo rows of the normed nodes, in autocast's dtype
    mapper             exchanges halo rows of the sources; nothing is gathered
    graph network      exchanges halo rows of the sources of a block, which has no shard strategy
    provider           edges of one copy of the graph; attributes for each copy in the batch
    model              each copy of each node set is split along the grid: [copies, local nodes]

A rank knows the whole edge list of a provider, so it computes its halo, and the rows that others
read from it, without communication. Both are cached with the list (`edge_lists`), once for each
group, division of the nodes and number of copies.

Replacements call upstream on one rank, for other shard strategies, for blocks without `sharding` in
their settings, and for edge lists of unknown origin.
"""

from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.distributed import HaloExchange, PendingExchange, Ranges
from anemoi_gt.graph import GraphStructure
from anemoi_gt.integrations.anemoi.edge_lists import (
    EdgeCache,
    Key,
    cached_list,
    derived_list,
    lookup,
    shared_by_chunks,
    structure_of,
)
from anemoi_gt.integrations.anemoi.report import warn_once
from anemoi_gt.integrations.anemoi.settings import SETTINGS
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn.plain import ANEMOI_PROVIDER, why_not_plain
from anemoi_gt.torch_compat import constant_when_traced, constants

# How often the nodes are repeated, an attribute of node attributes: from `node_attributes` to
# `get_shard_sizes`, Anemoi's model hands down the tensor and nothing else.
_COPIES = "_anemoi_gt_copies"
_MODELS = (
    "anemoi.models.models.encoder_processor_decoder",
    "anemoi.models.models.ens_encoder_processor_decoder",
)


@replaces
def get_edges(
    upstream: Callable,
    self: Any,
    batch_size: int,
    shard_edges: bool,  # noqa: FBT001  as upstream
    model_comm_group: Any,
) -> Any:
    """Shard a `StaticGraphProvider` by the same range of every copy of a batch."""
    if why_not_plain(("", self, (ANEMOI_PROVIDER,))) is not None or not (
        shard_edges
        and batch_size > 1
        and SETTINGS.any_sharding
        and is_distributed(model_comm_group)
    ):
        return upstream(self, batch_size, shard_edges, model_comm_group)
    edge_attr, edge_index, sizes = upstream(self, 1, shard_edges, model_comm_group)
    return edge_attr.repeat(batch_size, 1), edge_index, sizes


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
    *rest: Any,
    **named: Any,
) -> Any:
    """Exchange halo rows of the sources of a mapper."""
    sizes = _mapper_sizes(x, shard_info, batch_size, model_comm_group)
    shard = shard_of(self.proc, edge_index, sizes, batch_size, model_comm_group)
    if shard is None or sizes is None:
        arguments = (x, shard_info, batch_size, edge_attr, edge_index, model_comm_group, cond)
        return upstream(self, *arguments, *rest, **named)
    (src, dst), (x_src, x_dst) = sizes, x
    if not shard_info.src_is_sharded():
        if cond is not None and cond[0].shape[0] == x_src.shape[0]:
            cond = (_own_rows(cond[0], src, batch_size, model_comm_group), cond[1])
        x_src = _own_rows(x_src, src, batch_size, model_comm_group)
    if not shard_info.dst_is_sharded():
        x_dst = _own_rows(x_dst, dst, batch_size, model_comm_group)

    x_src = shard.start_exchange(x_src).wait().flatten(0, 1)
    if cond is not None:
        cond = (shard.start_exchange(cond[0]).wait().flatten(0, 1), cond[1])
    num_chunks = max(self.num_chunks, Upstream.mapper.NUM_CHUNKS_INFERENCE_MAPPER)
    chunks = Upstream.mapper.build_graph_partition(
        shard.edge_index, num_chunks, (x_src.shape[0], x_dst.shape[0])
    )
    shard_info = type(shard_info)(src_nodes=src, dst_nodes=dst, edges=shard_info.edges)
    x_src, x_dst, edge_attr, cond = shared_by_chunks(x_src, x_dst, edge_attr, cond, chunks)
    return x_src, x_dst, edge_attr, shard.edge_index, shard_info, cond, chunks


@replaces
def mapper_forward(
    upstream: Callable,
    self: Any,
    x: Any,
    batch_size: int,
    shard_info: Any,
    edge_attr: Tensor,
    edge_index: Tensor,
    model_comm_group: Any = None,
    keep_x_dst_sharded: bool = False,  # noqa: FBT001, FBT002  as upstream
    *rest: Any,
    **named: Any,
) -> Any:
    """Gather the destinations of every copy along the grid."""
    arguments = (x, batch_size, shard_info, edge_attr, edge_index, model_comm_group)
    sizes = _mapper_sizes(x, shard_info, batch_size, model_comm_group)
    gathers = not keep_x_dst_sharded and batch_size > 1
    if (
        not gathers
        or sizes is None
        or shard_of(self.proc, edge_index, sizes, batch_size, model_comm_group) is None
    ):
        return upstream(self, *arguments, keep_x_dst_sharded, *rest, **named)
    keep_x_dst_sharded = True  # gathered below
    result = upstream(self, *arguments, keep_x_dst_sharded, *rest, **named)
    rows = result.unflatten(0, (batch_size, -1))
    return Upstream.mapper.gather_tensor(rows, 1, sizes[1], model_comm_group).flatten(0, 1)


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
    """Split rows of several copies of the nodes along the grid, for a model's module."""
    nodes = sum(sizes) if dim == 0 and is_distributed(mgroup) and sizes is not None else 0
    if not nodes or input_.shape[0] == nodes:
        return upstream(input_, dim, sizes, mgroup, *rest, **named)
    rows = input_.unflatten(0, (-1, nodes))
    return upstream(rows, 1, sizes, mgroup, *rest, **named).flatten(0, 1)


@replaces
def node_attributes(upstream: Callable, self: Any, name: str, batch_size: int) -> Tensor:
    """Tag node attributes with the number of copies of the nodes."""
    rows = upstream(self, name, batch_size)
    if batch_size > 1 and SETTINGS.any_sharding:
        setattr(rows, _COPIES, batch_size)
    return rows


@replaces
def get_shard_sizes(
    upstream: Callable, tensor: Tensor, dim: int, model_comm_group: Any = None
) -> Any:
    """Return the shard sizes of the nodes for a model's module, however often they repeat."""
    copies = getattr(tensor, _COPIES, 1)
    if copies > 1 and dim == 0 and is_distributed(model_comm_group):
        tensor = tensor[: tensor.shape[0] // copies]
    return upstream(tensor, dim, model_comm_group)


@replaces
def noise(
    upstream: Callable,
    self: Any,
    x: Any,
    batch_size: int,
    ensemble_size: int,
    grid_size: int,
    grid_shard_sizes: Any,
    noise_dtype: torch.dtype = torch.float32,
    model_comm_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Select this rank's nodes from the noise of every ensemble member."""
    copies = batch_size * ensemble_size
    arguments = (x, batch_size, ensemble_size, grid_size, grid_shard_sizes)
    if copies == 1 or not (SETTINGS.any_sharding and is_distributed(model_comm_group)):
        return upstream(self, *arguments, noise_dtype, model_comm_group)
    x, noise = upstream(self, *arguments, noise_dtype, None)
    rows = noise.unflatten(0, (copies, -1)).split(grid_shard_sizes, 1)[model_comm_group.rank()]
    return x, rows.flatten(0, 1)


@replaces
def assert_valid_sharding(
    upstream: Callable,
    self: Any,
    batch_size: int,
    ensemble_size: int,
    in_out_sharded: bool,  # noqa: FBT001  as upstream
    model_comm_group: Any = None,
) -> Any:
    """Allow batches and ensembles where all layers split them along the grid."""
    if is_distributed(model_comm_group) and batch_size * ensemble_size > 1 and _splits_copies(self):
        batch_size = ensemble_size = 1
    return upstream(self, batch_size, ensemble_size, in_out_sharded, model_comm_group)


def is_distributed(group: Any) -> bool:
    """Return whether several ranks share a model."""
    return group is not None and group.size() > 1


def shards_edges(block: nn.Module) -> bool:
    """Return whether a block uses anemoi_gt's halo exchange."""
    settings = SETTINGS.of(block)
    # blocks of graph networks are sharded by edges only
    by_edges = isinstance(block, Upstream.graph_networks)
    return (
        settings is not None
        and settings.sharding
        and (by_edges or getattr(block, "shard_strategy", None) == "edges")
    )


def _splits_copies(model: Any) -> bool:  # a module of anemoi-models, which has no types
    """Return whether all modules of a model split the copies of a batch or ensemble by grid."""
    mapper, layers = Upstream.mapper, Upstream.processor
    providers = import_module(Upstream.providers)
    if type(model).forward.__module__ not in _MODELS:
        return False
    static = [*model.encoder_graph_provider.values(), *model.decoder_graph_provider.values()]
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, Upstream.block)]
    mappers = [*model.encoder.values(), *model.decoder.values()]
    has_edges = isinstance(model.processor, layers.GraphTransformerProcessor)
    static += [model.processor_graph_provider] if has_edges else []
    return (
        all(isinstance(module, mapper.GraphTransformerBaseMapper) for module in mappers)
        and (has_edges or isinstance(model.processor, layers.NoOpProcessor))
        and all(isinstance(provider, providers.StaticGraphProvider) for provider in static)
        and all(why_not_plain(("", provider, (ANEMOI_PROVIDER,))) is None for provider in static)
        and all(shards_edges(block) for block in blocks)
    )


def _mapper_sizes(
    x: Any, shard_info: Any, copies: int, group: Any
) -> tuple[list[int], list[int]] | None:
    """Return the numbers of sources and destinations of each rank, or None on one rank."""
    if not is_distributed(group):
        return None
    src, dst = shard_info.src_nodes, shard_info.dst_nodes
    if src is None:
        src = list(Ranges.even(x[0].shape[0] // copies, group.size()).counts)
    if dst is None:
        dst = list(Ranges.even(x[1].shape[0] // copies, group.size()).counts)
    return src, dst


def _own_rows(rows: Tensor, sizes: list[int], copies: int, group: Any) -> Tensor:
    """Return this rank's rows of each copy of replicated nodes; gradients are gathered."""
    rows = rows.unflatten(0, (copies, -1))
    return Upstream.partition.shard_tensor(rows, 1, sizes, group).flatten(0, 1)


class LocalEdges(NamedTuple):
    """The edges into this rank's destinations, of each copy, and the exchange of their halo."""

    edge_index: Tensor  # numbered by the nodes of the rank and their halo
    exchange: HaloExchange


class EdgeShard(NamedTuple):
    """The edges into this rank's destinations, as a `ShardedGraph` of rows [copies * N, F]."""

    edge_index: Tensor  # numbered by the nodes of the rank and their halo
    exchange: HaloExchange
    copies: int  # of the graph, members of a batch or an ensemble
    num_local: int  # sources of one copy
    structure: GraphStructure  # of one copy

    def start_exchange(
        self,
        x_src: Tensor,
        prepare: Callable[..., Tensor] | None = None,
        cond: Tensor | None = None,
    ) -> PendingExchange:
        """Send halo rows of sources [copies * N_local, F], prepared if there is a `prepare`.

        `prepare` takes the rows [copies, S, F] to be sent, with `cond` [copies * N_local, K] also
        their conditions. Rows in flight are [copies, N, F].
        """
        conditions = None if cond is None else self._by_copy(cond)
        return self.exchange.start(self._by_copy(x_src), prepare, conditions)

    def _by_copy(self, rows: Tensor) -> Tensor:
        if rows.shape[0] != self.copies * self.num_local:
            raise ValueError(
                f"with sharding, a rank must hold its {self.num_local} nodes of each of "
                f"{self.copies} members of the batch, got {rows.shape[0]} rows; "
                "install(sharding=False) keeps Anemoi's sharding"
            )
        return rows.unflatten(0, (self.copies, self.num_local))


def _cache_of(edge_index: Tensor) -> EdgeCache:
    """Return the cache of a list that has one."""
    cache = lookup(edge_index)
    assert cache is not None
    return cache


def shard_of(
    block: Any, edge_index: Tensor, sizes: Any, copies: int, group: Any
) -> EdgeShard | None:
    """Return the shard of this rank of the edges of a layer; None if unsupported."""
    if not is_distributed(group) or not shards_edges(block) or sizes[0] is None or sizes[1] is None:
        return None
    src = constants(*sizes[0])
    dst = constants(*sizes[1])
    rank, copies = constants(group.rank(), copies)
    key = ("halo", group.group_name, rank, copies, *src, "to", *dst)
    cache = lookup(edge_index)
    if cache is None or not _make_local_edges(
        edge_index, key, rank, group.group_name, src, dst, copies
    ):
        warn_once(
            "an Anemoi layer runs Anemoi's own sharding: its edges are not a shard of a "
            "StaticGraphProvider's"
        )
        return None
    local: LocalEdges = cache.derived.get(key)
    num_nodes = _cache_of(local.edge_index).num_nodes
    structure, _ = structure_of(local.edge_index, num_nodes, reverse=torch.is_grad_enabled())
    return EdgeShard(*local, copies, src[rank], structure)


@constant_when_traced
def _make_local_edges(
    edge_index: Tensor,
    key: Key,
    rank: int,
    group_name: str,
    src: tuple[int, ...],
    dst: tuple[int, ...],
    copies: int,
) -> bool:
    """Make the local edges of a shard once; return False if its source list is unknown."""
    whole = _cache_of(edge_index).whole()
    if whole is None or lookup(whole) is None:
        return False
    sources, destinations = (Ranges((0, *accumulate(sizes))) for sizes in (src, dst))

    def number_locally() -> LocalEdges:
        _check_division(whole, sources, destinations)
        with torch.inference_mode(mode=False), torch.no_grad():
            bounds = torch.tensor(destinations.bounds, device=whole.device)
            by_rank = whole.split(
                torch.searchsorted(whole[1].contiguous(), bounds).diff().tolist(), 1
            )
            read = [edges[0].unique() for edges in by_rank]
            wanted = [nodes[~sources.owns(p, nodes)] for p, nodes in enumerate(read)]
            exchange = HaloExchange.of_all_requests(wanted, sources, rank, group_name)
            src, dst = by_rank[rank]
            own_range = sources.of(rank)
            num_own = sources.counts[rank]
            src = torch.where(
                sources.owns(rank, src),
                src - own_range.start,
                num_own + torch.searchsorted(wanted[rank], src),
            )
            local = torch.stack([src, dst - destinations.of(rank).start])
            num_nodes = num_own + exchange.num_received, destinations.counts[rank]
            step = local.new_tensor(num_nodes).unsqueeze(1)
            local = torch.cat([local + copy * step for copy in range(copies)], 1)
        sizes = (num_nodes[0] * copies, num_nodes[1] * copies)
        return LocalEdges(cached_list(local, sizes, copies), exchange)

    derived_list(edge_index, key, number_locally)
    return True


def _check_division(edge_index: Tensor, sources: Ranges, destinations: Ranges) -> None:
    """Raise ValueError unless the ranges divide the nodes of one copy of the graph."""
    num_nodes = _cache_of(edge_index).num_nodes
    if (sources.size, destinations.size) != num_nodes:
        raise ValueError(
            f"with sharding, {num_nodes[0]} sources and {num_nodes[1]} destinations of one copy of "
            f"the graph must be divided among the ranks, got {sources.counts} and "
            f"{destinations.counts}; install(sharding=False) keeps Anemoi's own division"
        )
    if destinations != Ranges.even(destinations.size, destinations.num_ranks):
        raise ValueError(
            f"with sharding, destinations must be divided evenly, as Anemoi divides the edges, got "
            f"{destinations.counts}; install(sharding=False) keeps Anemoi's sharding"
        )
