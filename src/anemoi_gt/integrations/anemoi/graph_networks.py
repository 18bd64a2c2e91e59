"""Anemoi's graph networks: replacements of `forward` of their blocks, and of MLPs.

A block updates its edges, then its nodes (`anemoi_gt.ops.tensors`):

    e'_e = e_e + edge_mlp([x_i, x_j, e_e])        s_i = sum of e'_e
    x'_i = x_i + node_mlp([x_i, s_i])

Sources of the encoder have no in-edges, and get x_j + node_mlp([x_j, x_j]).

On several ranks, Anemoi hands a block the nodes of its rank and all edges into them, gathers the
nodes of all ranks, and takes the sums of its own; it reduces their gradients in float32. Here a
block exchanges the halo of its rank instead (`sharding`) where its edges are a shard of a
`StaticGraphProvider`'s, and gathers as Anemoi does with other edges and with `sharding=False`.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.integrations.anemoi import report
from anemoi_gt.integrations.anemoi.decision import (
    FUSED,
    UNWANTED,
    UPSTREAM,
    check_named,
    computation_of,
    decide_layer,
    refusals_in,
)
from anemoi_gt.integrations.anemoi.edge_lists import structure_of
from anemoi_gt.integrations.anemoi.settings import SETTINGS, Settings
from anemoi_gt.integrations.anemoi.sharding import EdgeShard, is_distributed, shard_of
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn import fused_block, plain
from anemoi_gt.nn.fused_block import for_call
from anemoi_gt.nn.plain import why_not_plain
from anemoi_gt.nn.sublayers import Computation, NetworkModules, read_network
from anemoi_gt.nn.unchanged import none_refused, reading
from anemoi_gt.refusal import Refusal, not_faster, permanent
from anemoi_gt.torch_compat import is_exporting

EDGES = "edge update only"  # the edge update fused, the update of nodes by modules
# The first layer multiplies E + N_src + N_dst rows, and that of modules 3 E.
GATHERED = not_faster("Anemoi gathers more than two nodes for each edge of its rank")
PRECISION = permanent("a precision is set, which is of attention: it computes in its own dtypes")
# Networks of other models are modules of fused sub-layers, and a single hidden layer without a norm
# gains little by itself.
NOT_OF_GRAPH_NETWORK = not_faster("it has one hidden layer and no norm")


class GraphNetworkModules(NamedTuple):
    """The modules of both updates of a block, read in one call, or refusals."""

    edges: NetworkModules | Refusal
    nodes: NetworkModules | Refusal


class Ranks(NamedTuple):
    """The ranks that share the nodes of a block."""

    group: Any
    src: Any  # numbers of own sources of each rank; their shapes before 0.15
    dst: Any


class Call(NamedTuple):
    """The arguments of a block after its edges, in any version of anemoi-models."""

    ranks: Ranks | None  # None on one rank
    size: Any  # numbers of sources and destinations, or None

    @classmethod
    def of(
        cls,
        shards: Any = None,
        model_comm_group: Any = None,
        size: Any = None,
        *,
        shard_info: Any = None,
        shapes: Any = None,
        **others: Any,
    ) -> "Call":
        """Read arguments as upstream passes them; others are ignored, as upstream does."""
        if not is_distributed(model_comm_group):
            return cls(None, size)
        shards = shards or shard_info or shapes
        if isinstance(shards, tuple):
            return cls(Ranks(model_comm_group, *shards), size)
        if hasattr(shards, "nodes"):
            return cls(Ranks(model_comm_group, shards.nodes, shards.nodes), size)
        return cls(Ranks(model_comm_group, shards.src_nodes, shards.dst_nodes), size)


class Nodes(NamedTuple):
    """The nodes that a block updates, and those that its edges read."""

    own_src: Tensor | None  # None where sources are the destinations
    own_dst: Tensor
    src: Tensor | None
    halo: Tensor | None
    dst: Tensor
    edges: Tensor | EdgeShard  # an edge_index, or with a halo the shard of this rank
    gathered: Ranks | None = None  # the ranks whose nodes Anemoi gathered

    @classmethod
    def with_halo(cls, x_src: Tensor | None, x_dst: Tensor, shard: EdgeShard) -> "Nodes":
        """Exchange the halo of the shard of this rank."""
        pending = shard.start_exchange(x_dst if x_src is None else x_src)
        own, halo = pending.own.flatten(0, 1), pending.wait_halo().flatten(0, 1)
        if x_src is None:
            return cls(None, own, None, halo, own, shard)
        return cls(own, x_dst, own, halo, x_dst, shard)

    @classmethod
    def gather(
        cls, x_src: Tensor | None, x_dst: Tensor, edge_index: Tensor, ranks: Ranks
    ) -> "Nodes":
        """Gather the nodes of all ranks as Anemoi does."""
        gather = Upstream.block_module.sync_tensor
        src = None if x_src is None else gather(x_src, 0, ranks.src, ranks.group)
        dst = gather(x_dst, 0, ranks.dst, ranks.group)
        return cls(x_src, x_dst, src, None, dst, edge_index, ranks)

    def own_sums(self, sums: Tensor) -> Tensor:
        """Return the sums over the edges of own destinations."""
        if self.gathered is None:
            return sums
        cut = Upstream.block_module.shard_tensor
        return cut(sums, 0, self.gathered.dst, self.gathered.group, gather_in_backward=False)


@replaces
def processor_block(
    upstream: Any,
    self: Any,
    x: Tensor,
    edge_attr: Tensor,
    edge_index: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute a block on one set of nodes."""
    call = Call.of(*args, **kwargs)
    modules, shard = decide(self, x, edge_index, call)
    if isinstance(modules.edges, Refusal) and shard is None:
        return upstream(self, x, edge_attr, edge_index, *args, **kwargs)
    if getattr(self, "emb_edges", None) is not None:  # not before 0.11
        edge_attr = self.emb_edges(edge_attr)
    nodes = _nodes_of(None, x, edge_index, call.ranks, shard)
    edges, sums = _update_edges(self, modules.edges, nodes, edge_attr)
    return _update_nodes(self, modules.nodes, nodes.own_dst, sums), edges


@replaces
def mapper_block(
    upstream: Any,
    self: Any,
    x: tuple[Tensor, Tensor],
    edge_attr: Tensor,
    edge_index: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute a block from sources to destinations."""
    x_src, x_dst = x
    call = Call.of(*args, **kwargs)
    modules, shard = decide(self, x, edge_index, call)
    if isinstance(modules.edges, Refusal) and shard is None:
        return upstream(self, x, edge_attr, edge_index, *args, **kwargs)
    nodes = _nodes_of(x_src, x_dst, edge_index, call.ranks, shard)
    assert nodes.own_src is not None  # a mapper has two sets
    edges, sums = _update_edges(self, modules.edges, nodes, edge_attr)
    out = _update_nodes(self, modules.nodes, nodes.own_dst, sums)
    x_src = nodes.own_src
    if self.update_src_nodes:
        x_src = _update_nodes(self, modules.nodes, x_src, None)
    return (x_src, out), edges


@replaces
def network(upstream: Any, self: Any, x: Tensor, **layer_kwargs: Any) -> Any:
    """Compute an MLP, an embedding of a graph network."""
    settings = SETTINGS.of(self)
    if settings is None or layer_kwargs:
        return upstream(self, x, **layer_kwargs)
    modules = decide_layer(self, settings, x, partial(_read_embedding, self, x))
    if isinstance(modules, Refusal):
        return upstream(self, x)
    return fused_block.network(modules, x, out_dtype=_dtype_of(modules, x))


def _nodes_of(
    x_src: Tensor | None,
    x_dst: Tensor,
    edge_index: Tensor,
    ranks: Ranks | None,
    shard: EdgeShard | None,
) -> Nodes:
    """Return the nodes of a call; x_src None for one set of nodes."""
    if ranks is None:
        return Nodes(x_src, x_dst, x_src, None, x_dst, edge_index)
    if shard is not None:
        return Nodes.with_halo(x_src, x_dst, shard)
    return Nodes.gather(x_src, x_dst, edge_index, ranks)


def decide(
    block: Any, x: Any, edge_index: Any, call: Call
) -> tuple[GraphNetworkModules, EdgeShard | None]:
    """Return the modules of a block and its shard; log or raise what is less than requested.

    x are nodes, or a pair of sources and destinations. The shard is this rank's edges, numbered by
    its nodes and halo; None if there is no halo.
    """
    ranks = call.ranks
    shard = None
    if ranks is not None and not is_exporting() and not torch.jit.is_tracing():
        shard = shard_of(block, edge_index, (ranks.src, ranks.dst), 1, ranks.group)
    settings = SETTINGS.of(block)
    if settings is None:
        return GraphNetworkModules(UNWANTED, UNWANTED), shard
    nodes = (x, x) if isinstance(x, Tensor) else x
    computation = _computation_of(settings, nodes, edge_index, call, gathers=shard is None)
    if isinstance(computation, Refusal):
        modules = GraphNetworkModules(computation, computation)
    else:
        modules = _read_modules(block, nodes[1], computation)
    refusals = refusals_in(modules)
    check_named(settings, refusals)
    report.record(block, _outcome_of(modules), refusals)
    return modules, shard


def _outcome_of(modules: GraphNetworkModules) -> str:
    if isinstance(modules.edges, Refusal):
        return UPSTREAM
    return EDGES if isinstance(modules.nodes, Refusal) else FUSED


def _computation_of(
    settings: Settings, nodes: tuple[Tensor, Tensor], edge_index: Any, call: Call, *, gathers: bool
) -> Computation | Refusal:
    """Return how the updates of a block are computed fused, or why they are not.

    `gathers`: if there are several ranks, Anemoi gathers their nodes.
    """
    src, dst = nodes
    computation = computation_of(settings, dst)
    if settings.config.precision is not None:  # logged, even where modules compute anyway
        return PRECISION
    if isinstance(computation, Refusal):
        return computation
    ranks, size = call
    sizes = (src.shape[0], dst.shape[0])
    if ranks is None and size is not None and tuple(size) != sizes:  # which PyG checks
        return permanent(f"its size is {tuple(size)}, and its nodes are {sizes}")
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return permanent("its edges are no edge_index [2, E]")
    if ranks is not None and gathers and settings.fusion == "auto":
        num_nodes = _num_nodes(ranks.src) + _num_nodes(ranks.dst)
        if num_nodes > 2 * edge_index.shape[1]:
            return GATHERED
    return computation


def _read_modules(block: Any, x_dst: Tensor, computation: Computation) -> GraphNetworkModules:
    """Return the modules of a block for destinations like `x_dst`."""

    def read() -> GraphNetworkModules:
        refusal = why_not_plain(("conv", block.conv, (plain.ANEMOI_GRAPH_CONV,)))
        if refusal is not None:
            return GraphNetworkModules(refusal, refusal)
        edge_mlp = block.conv.edge_mlp
        edges = read_network(edge_mlp, computation, "conv.edge_mlp", is_edge_update=True)
        nodes = read_network(block.node_mlp, computation, "node_mlp")
        return GraphNetworkModules(for_call(edges, x_dst, None), for_call(nodes, x_dst, None))

    key = (computation, type(x_dst), x_dst.dtype)
    return reading((block.conv, block.node_mlp), key, read, none_refused)


def _num_nodes(sizes: Any) -> int:
    """Return the number of nodes of all ranks from their sizes, or shapes."""
    return sum(size if isinstance(size, int) else size[0] for size in sizes)


def _read_embedding(mlp: Any, x: Tensor, computation: Computation) -> NetworkModules | Refusal:
    """Return the modules of an MLP for rows like x."""
    if not _is_embedding(mlp):
        return NOT_OF_GRAPH_NETWORK
    return for_call(read_network(mlp, computation, "", is_called=True), x, None)


def _is_embedding(mlp: Any) -> bool:
    """Return whether an MLP has a norm, or several hidden layers."""
    if mlp._modules.get("layer_norm") is not None:
        return True
    num_maps = 0
    layers = mlp._modules.get("mlp")
    if layers is None:  # a function
        return False
    for layer in layers.children():
        if hasattr(layer, "weight") or hasattr(layer, "gate_proj"):
            num_maps += 1
    return num_maps > 2


def _dtype_of(modules: NetworkModules, x: Tensor) -> torch.dtype:
    """Return the dtype in which Anemoi's network returns rows like x."""
    # autocast computes a layer norm in float32 on a GPU, not on a CPU, and returns that
    if modules.computation.is_autocast and x.is_cuda and not modules.is_cast:
        return torch.float32
    return modules.computation.gemm_dtype


def _update_edges(
    block: Any, modules: NetworkModules | Refusal, nodes: Nodes, edges: Tensor
) -> tuple[Tensor, Tensor]:
    """Return e' and the sums over the in-edges of own destinations."""
    # ranks may decide differently, and must exchange the same rows
    if isinstance(modules, Refusal):
        return _update_edges_by_modules(block, nodes, edges)
    if isinstance(nodes.edges, EdgeShard):
        graph, batch = nodes.edges.structure, 1
    else:
        num_nodes = ((nodes.dst if nodes.src is None else nodes.src).shape[0], nodes.dst.shape[0])
        graph, batch = structure_of(nodes.edges, num_nodes, reverse=torch.is_grad_enabled())
    x = (nodes.src, nodes.halo, nodes.dst)
    dtype = _dtype_of(modules, nodes.dst)
    edges, sums = fused_block.update_edges(modules, x, graph, edges, batch, out_dtype=dtype)
    return edges, nodes.own_sums(sums)


def _update_edges_by_modules(block: Any, nodes: Nodes, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Do so by the block's conv, in Anemoi's chunks of edges, with the halo."""
    src = nodes.dst if nodes.src is None else nodes.src
    assert isinstance(nodes.edges, EdgeShard)  # or Anemoi's forward would compute
    assert nodes.halo is not None
    x = (torch.cat([src, nodes.halo]), nodes.dst)
    chunks = zip(
        edges.tensor_split(block.num_chunks),
        nodes.edges.edge_index.tensor_split(block.num_chunks, 1),
        strict=True,
    )
    sums, updated = zip(*(block.conv(x, *chunk) for chunk in chunks), strict=True)
    return torch.cat(updated), reduce(torch.add, sums)


def _update_nodes(
    block: Any, modules: NetworkModules | Refusal, x: Tensor, sums: Tensor | None
) -> Tensor:
    """Return updated rows of nodes; those without in-edges take their own rows for the sums."""
    if isinstance(modules, Refusal):
        more = x if sums is None else sums
        return block.node_mlp(torch.cat([x, more], dim=1)) + x
    dtype = _dtype_of(modules, x)
    repeats_x = sums is None
    return fused_block.network(
        modules, x, more=sums, residual=True, repeats_x=repeats_x, out_dtype=dtype
    )
