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

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.integrations.anemoi import report
from anemoi_gt.integrations.anemoi.decision import (
    FUSED,
    SIZES_OF_TRACE,
    UNWANTED,
    UPSTREAM,
    computation_of,
    report_not_fused,
)
from anemoi_gt.integrations.anemoi.edge_lists import structure_of
from anemoi_gt.integrations.anemoi.settings import FUSES_SUBLAYERS, SETTINGS, Settings
from anemoi_gt.integrations.anemoi.sharding import is_distributed, local_edges, start_rows
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn import plain
from anemoi_gt.nn.fused_block import for_call
from anemoi_gt.nn.plain import why_not_plain
from anemoi_gt.nn.sublayers import Computation, NetworkParts, network_parts
from anemoi_gt.ops.tensors import InteractionOptions, InteractionTensors
from anemoi_gt.refusal import Refusal, RefusalKind, not_faster, permanent
from anemoi_gt.torch_compat import is_exporting

EDGES = "edge_update"  # the edge update fused, the update of nodes by modules
PARAMETERS = "self x edge_attr edge_index shard_info model_comm_group size layer_kwargs"
OLDER = PARAMETERS.replace("shard_info", "shapes")  # before 0.15
# The first layer multiplies E + N_src + N_dst rows, and that of modules 3 E.
GATHERED = not_faster("Anemoi gathers more than two nodes for each edge of its rank")
# Networks of other models are parts of fused sub-layers, and a single hidden layer without a norm
# gains little by itself.
NOT_OF_GRAPH_NETWORK = not_faster("it has one hidden layer and no norm")


class BlockParts(NamedTuple):
    """The parts of both updates of a block in one call, or refusals."""

    edges: NetworkParts | Refusal
    nodes: NetworkParts | Refusal


class Ranks(NamedTuple):
    """The ranks that share the nodes of a block."""

    group: Any
    src: Any  # numbers of own sources of each rank; their shapes before 0.15
    dst: Any

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
    ) -> "Ranks | None":
        """Read the arguments of a block after its edges; return None on one rank."""
        del size, others
        if not is_distributed(model_comm_group):
            return None
        shards = shards or shard_info or shapes
        if isinstance(shards, tuple):
            return cls(model_comm_group, *shards)
        if hasattr(shards, "nodes"):
            return cls(model_comm_group, shards.nodes, shards.nodes)
        return cls(model_comm_group, shards.src_nodes, shards.dst_nodes)


class Nodes(NamedTuple):
    """The nodes that a block updates, and those that its edges read."""

    own_src: Tensor | None  # None where sources are the destinations
    own_dst: Tensor
    src: Tensor | None
    halo: Tensor | None
    dst: Tensor
    edge_index: Tensor  # between sources, followed by the halo, and destinations
    gathered: Ranks | None = None  # the ranks whose nodes Anemoi gathered

    @classmethod
    def on_one_rank(cls, x_src: Tensor | None, x_dst: Tensor, edge_index: Tensor) -> "Nodes":
        """Return the nodes of a call without other ranks."""
        return cls(x_src, x_dst, x_src, None, x_dst, edge_index)

    @classmethod
    def with_halo(cls, x_src: Tensor | None, x_dst: Tensor, local: Tensor, ranks: Ranks) -> "Nodes":
        """Exchange the halo of `local`, a list of `local_edges`."""
        own = x_dst if x_src is None else x_src
        pending = start_rows(own, local, 1, ranks.src, ranks.group)
        own, halo = pending.own.flatten(0, 1), pending.wait_halo().flatten(0, 1)
        if x_src is None:
            return cls(None, own, None, halo, own, local)
        return cls(own, x_dst, own, halo, x_dst, local)

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


@replaces(OLDER, PARAMETERS)
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
    ranks = Ranks.of(*args, **kwargs)
    parts, local = _decide(self, x, edge_index, ranks, _size_of(*args, **kwargs))
    if isinstance(parts.edges, Refusal) and local is None:
        return upstream(self, x, edge_attr, edge_index, *args, **kwargs)
    if getattr(self, "emb_edges", None) is not None:  # not before 0.11
        edge_attr = self.emb_edges(edge_attr)
    nodes = _nodes_of(None, x, edge_index, ranks, local)
    edges, sums = _update_edges(self, parts, nodes, edge_attr)
    return _update_nodes(self, parts, nodes.own_dst, sums), edges


@replaces(OLDER, PARAMETERS)
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
    ranks = Ranks.of(*args, **kwargs)
    parts, local = _decide(self, x, edge_index, ranks, _size_of(*args, **kwargs))
    if isinstance(parts.edges, Refusal) and local is None:
        return upstream(self, x, edge_attr, edge_index, *args, **kwargs)
    nodes = _nodes_of(x_src, x_dst, edge_index, ranks, local)
    assert nodes.own_src is not None  # a mapper has two sets
    edges, sums = _update_edges(self, parts, nodes, edge_attr)
    out = _update_nodes(self, parts, nodes.own_dst, sums)
    x_src = nodes.own_src
    if self.update_src_nodes:
        x_src = _update_nodes(self, parts, x_src, None)
    return (x_src, out), edges


@replaces("self x layer_kwargs", "self x")
def network(upstream: Any, self: Any, x: Tensor, **layer_kwargs: Any) -> Any:
    """Compute an MLP, an embedding of a graph network."""
    settings = SETTINGS.of(self)
    if settings is None or settings.fusion not in FUSES_SUBLAYERS or layer_kwargs or is_exporting():
        return upstream(self, x, **layer_kwargs)
    computation = _computation_of(settings, x)
    parts: NetworkParts | Refusal = NOT_OF_GRAPH_NETWORK
    if isinstance(computation, Refusal):
        parts = computation
    elif _is_embedding(self):
        parts = for_call(network_parts(self, computation, "", is_called=True), x, None)
    report.record_network(self, parts, "an MLP of Anemoi")
    if isinstance(parts, Refusal):
        return upstream(self, x)
    options = parts.options(residual=False, out_dtype=_dtype_of(parts, x))
    out = parts.compute(parts.tensors(x.reshape(-1, x.shape[-1])), options)
    return out.view(*x.shape[:-1], out.shape[-1])


def examine(block: Any, device: torch.device) -> tuple[str, str | None]:
    """Predict outcome and reason of a block on one rank and device; log nothing."""
    x = torch.empty(0, 1, device=device)
    edge_index = torch.empty(2, 0, dtype=torch.int64, device=device)
    settings = SETTINGS.of(block)
    if settings is None:
        return UPSTREAM, None
    return _outcome(_parts_of(block, settings, x, edge_index, None))


def _size_of(
    shards: Any = None, model_comm_group: Any = None, size: Any = None, **others: Any
) -> Any:
    """Return the sizes in the arguments of a block after its edges."""
    del shards, model_comm_group, others
    return size


def _nodes_of(
    x_src: Tensor | None,
    x_dst: Tensor,
    edge_index: Tensor,
    ranks: Ranks | None,
    local: Tensor | None,
) -> Nodes:
    """Return the nodes of a call; x_src None for one set of nodes."""
    if ranks is None:
        return Nodes.on_one_rank(x_src, x_dst, edge_index)
    if local is not None:
        return Nodes.with_halo(x_src, x_dst, local, ranks)
    return Nodes.gather(x_src, x_dst, edge_index, ranks)


def _decide(
    block: Any, x: Any, edge_index: Any, ranks: Ranks | None, size: Any
) -> tuple[BlockParts, Tensor | None]:
    """Return the parts of a block and its local edges; log or raise what is less than requested.

    x are nodes, or a pair of sources and destinations, and `size` their numbers or None.
    Local edges are this rank's, numbered by its nodes and halo; None if there is no halo.
    """
    is_exported = is_exporting()
    local = None
    if ranks is not None and not is_exported and not torch.jit.is_tracing():
        local = local_edges(block, edge_index, (ranks.src, ranks.dst), 1, ranks.group)
    unwanted = BlockParts(UNWANTED, UNWANTED)
    settings = SETTINGS.of(block)
    if settings is None:
        return unwanted, local
    parts = unwanted
    refusal = None if size is None or ranks is not None else _why_not_size(size, x)
    if refusal is not None:
        parts = BlockParts(refusal, refusal)
    elif not is_exported:
        gathered = ranks if local is None else None
        x_dst = x if isinstance(x, Tensor) else x[1]
        parts = _parts_of(block, settings, x_dst, edge_index, gathered)
    refusals: list[Refusal] = []
    for part in (parts.edges, parts.nodes):
        if isinstance(part, Refusal) and part not in refusals:
            refusals.append(part)
    reported = [refusal for refusal in refusals if refusal.kind is not RefusalKind.NOT_FASTER]
    report_not_fused(settings, reported)
    outcome, reason = _outcome(parts)
    report.record(block, outcome, reason)
    return parts, local


def _why_not_size(size: Any, x: Any) -> Refusal | None:
    """Return why the sizes of a call are not those of its nodes x, which PyG checks, or None."""
    src, dst = (x, x) if isinstance(x, Tensor) else x
    nodes = (src.shape[0], dst.shape[0])
    if tuple(size) == nodes:
        return None
    return permanent(f"its size is {tuple(size)}, and its nodes are {nodes}")


def _outcome(parts: BlockParts) -> tuple[str, str | None]:
    """Return the outcome, and the reason if the block is not fused as a whole."""
    if isinstance(parts.edges, Refusal):
        return UPSTREAM, parts.edges.text
    if isinstance(parts.nodes, Refusal):
        return EDGES, parts.nodes.text
    return FUSED, None


def _computation_of(settings: Settings, x: Tensor) -> Computation | Refusal:
    """Return how a call is computed, or why its modules compute it."""
    if torch.jit.is_tracing():
        return SIZES_OF_TRACE
    return computation_of(settings, x)


def _parts_of(
    block: Any, settings: Settings, x_dst: Tensor, edge_index: Any, gathered: Ranks | None
) -> BlockParts:
    """Return the parts of a block; `gathered` are the ranks whose nodes Anemoi gathers."""
    if settings.fusion not in FUSES_SUBLAYERS:
        return BlockParts(UNWANTED, UNWANTED)
    computation = _computation_of(settings, x_dst)
    refusal = computation if isinstance(computation, Refusal) else None
    if refusal is None and (
        not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided
    ):
        refusal = permanent("its edges are no edge_index [2, E]")
    if refusal is None and gathered is not None and settings.fusion == "auto":
        num_nodes = _num_nodes(gathered.src) + _num_nodes(gathered.dst)
        refusal = GATHERED if num_nodes > 2 * edge_index.shape[1] else None
    if refusal is None and settings.config.precision is not None:
        refusal = permanent("the precision of the attention is set")
    if refusal is None:
        refusal = why_not_plain(("conv", block.conv, (plain.ANEMOI_GRAPH_CONV,)))
    if refusal is not None:
        return BlockParts(refusal, refusal)
    assert isinstance(computation, Computation)
    edge_mlp = block.conv.edge_mlp
    edges = network_parts(edge_mlp, computation, "conv.edge_mlp", is_edge_update=True)
    nodes = network_parts(block.node_mlp, computation, "node_mlp")
    return BlockParts(for_call(edges, x_dst, None), for_call(nodes, x_dst, None))


def _num_nodes(sizes: Any) -> int:
    """Return the number of nodes of all ranks from their sizes, or shapes."""
    return sum(size if isinstance(size, int) else size[0] for size in sizes)


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


def _dtype_of(parts: NetworkParts, x: Tensor) -> torch.dtype:
    """Return the dtype in which Anemoi's network returns rows like x."""
    # autocast computes a layer norm in float32 on a GPU, not on a CPU, and returns that
    if parts.computation.is_autocast and x.is_cuda and not parts.is_cast:
        return torch.float32
    return parts.computation.gemm_dtype


def _update_edges(
    block: Any, block_parts: BlockParts, nodes: Nodes, edges: Tensor
) -> tuple[Tensor, Tensor]:
    """Return e' and the sums over the in-edges of own destinations."""
    parts = block_parts.edges
    if isinstance(parts, Refusal):  # ranks may decide differently, and must exchange the same rows
        return _update_edges_by_modules(block, nodes, edges)
    num_src = (nodes.dst if nodes.src is None else nodes.src).shape[0]
    if nodes.halo is not None:
        num_src += nodes.halo.shape[0]
    graph, batch = structure_of(
        nodes.edge_index, (num_src, nodes.dst.shape[0]), reverse=torch.is_grad_enabled()
    )
    options = parts.options(residual=True, out_dtype=_dtype_of(parts, nodes.dst))
    backend = parts.computation.backend
    assert backend.edge_sums is not None  # it comes with the edge update
    tensors = InteractionTensors(nodes.src, nodes.halo, nodes.dst, edges, parts.network)
    edges = parts.compute(tensors, graph, InteractionOptions(batch, options))
    return edges, nodes.own_sums(backend.edge_sums(edges, graph, batch))


def _update_edges_by_modules(block: Any, nodes: Nodes, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Do so by the block's conv, in Anemoi's chunks of edges, with the halo."""
    src = nodes.dst if nodes.src is None else nodes.src
    assert nodes.halo is not None  # or Anemoi's forward would compute
    x = (torch.cat([src, nodes.halo]), nodes.dst)
    chunks = zip(
        edges.tensor_split(block.num_chunks),
        nodes.edge_index.tensor_split(block.num_chunks, 1),
        strict=True,
    )
    sums, updated = zip(*(block.conv(x, *chunk) for chunk in chunks), strict=True)
    return torch.cat(updated), reduce(torch.add, sums)


def _update_nodes(block: Any, block_parts: BlockParts, x: Tensor, sums: Tensor | None) -> Tensor:
    """Return updated rows of nodes; those without in-edges take their own rows for the sums."""
    parts = block_parts.nodes
    if isinstance(parts, Refusal):
        more = x if sums is None else sums
        return block.node_mlp(torch.cat([x, more], dim=1)) + x
    dtype = _dtype_of(parts, x)
    options = parts.options(residual=True, repeats_x=sums is None, out_dtype=dtype)
    return parts.compute(parts.tensors(x, sums), options)
