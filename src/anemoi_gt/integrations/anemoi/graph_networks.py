"""Anemoi's graph networks: replacements of `forward` of their blocks, and of MLPs.

A block updates its edges, then its nodes (`anemoi_gt.ops.network_tensors`):

    e'_e = e_e + edge_mlp([x_i, x_j, e_e])        s_i = sum of e'_e
    x'_i = x_i + node_mlp([x_i, s_i])

Sources of the encoder have no in-edges, and get x_j + node_mlp([x_j, x_j]). On several ranks Anemoi
gathers all nodes, and its own code computes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.integrations.anemoi import report
from anemoi_gt.integrations.anemoi.decision import (
    FUSED,
    SIZES_OF_TRACE,
    UNWANTED,
    UPSTREAM,
    report_not_fused,
)
from anemoi_gt.integrations.anemoi.edge_lists import structure_of
from anemoi_gt.integrations.anemoi.settings import SETTINGS, Settings
from anemoi_gt.integrations.anemoi.sharding import is_distributed
from anemoi_gt.integrations.anemoi.upstream import replaces
from anemoi_gt.nn import plain
from anemoi_gt.nn.activation_checkpointing import as_in_forward
from anemoi_gt.nn.fused_block import NO_SUBLAYERS, NOT_FASTER, Computation
from anemoi_gt.nn.networks import NetworkParts, for_call, network_parts
from anemoi_gt.nn.plain import why_not_plain
from anemoi_gt.ops.network_tensors import (
    InteractionOptions,
    InteractionTensors,
    NetworkOptions,
    NetworkTensors,
)
from anemoi_gt.refusal import Refusal, RefusalKind, permanent
from anemoi_gt.torch_compat import is_exporting

EDGES = "edge_update"  # the edge update fused, the update of nodes by modules
PARAMETERS = "self x edge_attr edge_index shard_info model_comm_group size layer_kwargs"
OLDER = PARAMETERS.replace("shard_info", "shapes")  # before 0.15
SHARDED = permanent("its nodes are sharded by Anemoi")
# Networks of other models are parts of fused sub-layers, and a single hidden layer without a norm
# gains little by itself.
NOT_OF_GRAPH_NETWORK = permanent("it has one hidden layer and no norm")


class BlockParts(NamedTuple):
    """The parts of both updates of a block in one call, or refusals."""

    computation: Computation | None
    edges: NetworkParts | Refusal
    nodes: NetworkParts | Refusal


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
    parts = _decide(self, x, edge_index, _group_of(*args, **kwargs))
    if isinstance(parts.edges, Refusal):
        return upstream(self, x, edge_attr, edge_index, *args, **kwargs)
    if getattr(self, "emb_edges", None) is not None:  # not before 0.11
        edge_attr = self.emb_edges(edge_attr)
    edges, sums = _update_edges(parts, None, x, edge_attr, edge_index)
    return _update_nodes(self, parts, x, sums), edges


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
    parts = _decide(self, x_dst, edge_index, _group_of(*args, **kwargs))
    if isinstance(parts.edges, Refusal):
        return upstream(self, x, edge_attr, edge_index, *args, **kwargs)
    edges, sums = _update_edges(parts, x_src, x_dst, edge_attr, edge_index)
    out = _update_nodes(self, parts, x_dst, sums)
    if self.update_src_nodes:
        x_src = _update_nodes(self, parts, x_src, None)
    return (x_src, out), edges


@replaces("self x layer_kwargs", "self x")
def network(upstream: Any, self: Any, x: Tensor, **layer_kwargs: Any) -> Any:
    """Compute an MLP, an embedding of a graph network."""
    settings = SETTINGS.of(self)
    if settings is None or settings.blocks is False or layer_kwargs or is_exporting():
        return upstream(self, x, **layer_kwargs)
    computation, refusal = _computation_of(settings, x)
    parts: NetworkParts | Refusal = refusal or NOT_OF_GRAPH_NETWORK
    if computation is not None and computation.sublayers is not None and _is_embedding(self):
        parts = network_parts(self, computation.sublayers, "", is_called=True)
        parts = for_call(parts, x, is_autocast=computation.is_autocast)
    (parts,) = as_in_forward(self, "network", (parts,))
    if isinstance(parts, Refusal):
        if parts.kind is not RefusalKind.NOT_FASTER and parts is not NOT_OF_GRAPH_NETWORK:
            report.warn_once(f"an MLP of Anemoi is not fused: {parts.text}")
        return upstream(self, x)
    assert computation is not None  # or there would be no parts
    options = _options(parts, computation, x, residual=False)
    rows = x.reshape(-1, x.shape[-1])
    out = parts.sublayers.network(NetworkTensors(rows, None, parts.network), options)
    return out.view(*x.shape[:-1], parts.features)


def examine(block: Any, device: torch.device) -> tuple[str, str | None]:
    """Predict outcome and reason of a block on one rank and device; log nothing."""
    x = torch.empty(0, 1, device=device)
    edge_index = torch.empty(2, 0, dtype=torch.int64, device=device)
    settings = SETTINGS.of(block)
    if settings is None:
        return UPSTREAM, None
    return _outcome(_parts_of(block, settings, x, edge_index, None))


def _group_of(
    shards: Any = None,
    model_comm_group: Any = None,
    size: Any = None,
    *,
    shard_info: Any = None,
    shapes: Any = None,
    **others: Any,
) -> Any:
    """Return the group of ranks among the arguments of a block after its edges."""
    del shards, size, shard_info, shapes, others
    return model_comm_group


def _decide(block: Any, x_dst: Tensor, edge_index: Any, group: Any) -> BlockParts:
    """Return the parts of a block; log or raise what is less than requested."""
    settings = SETTINGS.of(block)
    if settings is None:
        return BlockParts(None, UNWANTED, UNWANTED)
    parts = _parts_of(block, settings, x_dst, edge_index, group)
    edges, nodes = as_in_forward(block, "graph network", (parts.edges, parts.nodes))
    parts = parts._replace(edges=edges, nodes=nodes)
    refusals: list[Refusal] = []
    for part in (edges, nodes):
        if isinstance(part, Refusal) and part not in refusals:
            refusals.append(part)
    reported = [refusal for refusal in refusals if refusal.kind is not RefusalKind.NOT_FASTER]
    report_not_fused(settings, reported)
    outcome, reason = _outcome(parts)
    if torch.compiler.is_compiling():
        report.record_traced(type(block), outcome, reason)
    else:
        report.record(block, outcome, reason)
    return parts


def _outcome(parts: BlockParts) -> tuple[str, str | None]:
    """Return the outcome, and the reason if the block is not fused as a whole."""
    if isinstance(parts.edges, Refusal):
        return UPSTREAM, parts.edges.text
    if isinstance(parts.nodes, Refusal):
        return EDGES, parts.nodes.text
    return FUSED, None


def _computation_of(settings: Settings, x: Tensor) -> tuple[Computation | None, Refusal | None]:
    """Return how a call is computed, or why its modules compute it."""
    if torch.jit.is_tracing():
        return None, SIZES_OF_TRACE
    computation = Computation.of(x, settings.config)
    if settings.blocks is None and not computation.is_faster_fused:
        return None, NOT_FASTER
    if computation.sublayers is None:
        return None, NO_SUBLAYERS
    return computation, None


def _parts_of(
    block: Any, settings: Settings, x_dst: Tensor, edge_index: Any, group: Any
) -> BlockParts:
    if settings.blocks is False or is_exporting():
        return BlockParts(None, UNWANTED, UNWANTED)
    computation, refusal = _computation_of(settings, x_dst)
    if refusal is None and is_distributed(group):
        refusal = SHARDED
    if refusal is None and (
        not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided
    ):
        refusal = permanent("its edges are no edge_index [2, E]")
    if refusal is None and settings.config.precision is not None:
        refusal = permanent("the precision of the attention is set")
    if refusal is None:
        refusal = why_not_plain(("conv", block.conv, (plain.ANEMOI_GRAPH_CONV,)))
    if refusal is not None:
        return BlockParts(None, refusal, refusal)
    assert computation is not None
    assert computation.sublayers is not None
    edges = network_parts(block.conv.edge_mlp, computation.sublayers, "conv.edge_mlp")
    nodes = network_parts(block.node_mlp, computation.sublayers, "node_mlp")
    return BlockParts(
        computation,
        for_call(edges, x_dst, is_autocast=computation.is_autocast),
        for_call(nodes, x_dst, is_autocast=computation.is_autocast),
    )


def _is_embedding(mlp: Any) -> bool:
    """Return whether an MLP has a norm, or several hidden layers."""
    if mlp._modules.get("layer_norm") is not None:
        return True
    num_maps = 0
    for layer in mlp._modules["mlp"].children():
        if hasattr(layer, "weight") or hasattr(layer, "gate_proj"):
            num_maps += 1
    return num_maps > 2


def _options(
    parts: NetworkParts,
    computation: Computation,
    x: Tensor,
    *,
    residual: bool,
    repeats_x: bool = False,
) -> NetworkOptions:
    options = parts.options(
        computation.gemm_dtype, x.device, is_autocast=computation.is_autocast, residual=residual
    )
    return options._replace(repeats_x=repeats_x)


def _update_edges(
    block_parts: BlockParts,
    x_src: Tensor | None,
    x_dst: Tensor,
    edges: Tensor,
    edge_index: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return e' and the sums over the in-edges of destinations; x_src None for one set of nodes."""
    parts, computation = block_parts.edges, block_parts.computation
    assert isinstance(parts, NetworkParts)
    assert computation is not None
    num_src = (x_dst if x_src is None else x_src).shape[0]
    graph, batch = structure_of(
        edge_index, (num_src, x_dst.shape[0]), reverse=torch.is_grad_enabled()
    )
    options = _options(parts, computation, x_dst, residual=True)
    tensors = InteractionTensors(x_src, None, x_dst, edges, parts.network)
    return parts.sublayers.interaction(tensors, graph, InteractionOptions(batch, options))


def _update_nodes(block: Any, block_parts: BlockParts, x: Tensor, sums: Tensor | None) -> Tensor:
    """Return updated rows of nodes; those without in-edges take their own rows for the sums."""
    parts, computation = block_parts.nodes, block_parts.computation
    if isinstance(parts, Refusal):
        more = x if sums is None else sums
        return block.node_mlp(torch.cat([x, more], dim=1)) + x
    assert computation is not None
    options = _options(parts, computation, x, residual=True, repeats_x=sums is None)
    return parts.sublayers.network(NetworkTensors(x, sums, parts.network), options)
