"""A block of this library or of Anemoi: its modules, read once in a call, and its forward pass.

modules = BlockModules.of(block, x_dst, cond, config)    parameters of fused sub-layers, or refusals
y = block_forward(block, modules, (x_src, x_dst), graph, edge_attr, cond, ...)

Linear layers of a mapper are fused alike:

modules = read_linear_layer(layer, name, x, computation)
y = network(modules, x)                                where it is not refused
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure, ShardedGraph
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn.layer_kernels import cast_for_projections
from anemoi_gt.nn.norm import apply_norm
from anemoi_gt.nn.plain import why_not_plain_tensor
from anemoi_gt.nn.sublayers import (
    AttentionModules,
    Computation,
    Conditions,
    NetworkModules,
    read_attention,
    read_linear,
    read_network,
)
from anemoi_gt.ops.tensors import InteractionOptions, InteractionTensors
from anemoi_gt.refusal import Refusal, not_faster, permanent, transient

NO_SOURCES = not_faster("its sources are not updated")
NOT_FASTER = not_faster(
    "sub-layers are fused under 16-bit autocast where the backend of the attention has them"
)

WRONG_CONDITION = permanent(
    "its norms expect a condition, and the call passes none (or the reverse)"
)
FUSED_BY_COMPILER = not_faster("compiled code fuses casts and norms, and pads rows")
NO_LAYER = not_faster("it is no layer")
MOST_OF_ONE = 2**26  # elements of the rows of a block that is one operator


class BlockModules(NamedTuple):
    """The modules of each sub-layer in one call if it is fused, else the refusal."""

    attention: AttentionModules | Refusal
    feed_forward: NetworkModules | Refusal
    source_feed_forward: NetworkModules | Refusal  # of a mapper that updates its sources
    both: AttentionModules | None = None  # attention and feed-forward as one operator

    @classmethod
    def by_modules(cls, refusal: Refusal) -> "BlockModules":
        """Return the refusals of a block whose own modules compute everything."""
        return cls(refusal, refusal, refusal)

    @classmethod
    def of(
        cls,
        block: Any,
        x: Tensor,
        cond: Tensor | tuple | None,
        config: KernelConfig,
        computation: Computation,
        refused_attention: Refusal | None = None,
    ) -> "BlockModules":
        """Read a block of this library or of Anemoi for a call on destinations like x.

        `refused_attention` is the caller's reason not to fuse the attention.
        """
        children = block._modules
        attention: AttentionModules | Refusal
        if refused_attention is not None:
            attention = refused_attention
        elif config.precision is not None:  # sub-layers have one dtype for all their operands
            attention = permanent("the precision of its attention is set")
        else:
            attention = for_call(read_attention(block, computation), x, cond)
        norm = ("layer_norm_mlp_dst", children.get("layer_norm_mlp_dst"))
        mlp = children.get("node_dst_mlp")
        modules = read_network(mlp, computation, "node_dst_mlp", norm_in=norm)
        feed_forward = for_call(modules, x, cond)
        sources: NetworkModules | Refusal = NO_SOURCES
        # processor blocks of anemoi-models have the attribute but nothing to update
        if block.__dict__.get("update_src_nodes", False) and hasattr(block, "run_node_src_mlp"):
            norm = ("layer_norm_mlp_src", children.get("layer_norm_mlp_src"))
            mlp = children.get("node_src_mlp")
            modules = read_network(mlp, computation, "node_src_mlp", norm_in=norm)
            sources = for_call(modules, x, cond)
        both = None
        # A compiler decides for each of two operators what to compute again. A norm of other
        # features is refused by the operator of the network.
        if (
            not torch.compiler.is_compiling()
            and not isinstance(attention, Refusal)
            and not isinstance(feed_forward, Refusal)
            and feed_forward.norm_in.features == attention.parameters.projection.weight.shape[0]
        ):
            both = attention.followed_by(feed_forward)
        return cls(attention, feed_forward, sources, both)


Modules = TypeVar("Modules", AttentionModules, NetworkModules)


def for_call(
    modules: Modules | Refusal, x: Tensor, cond: Tensor | tuple | None
) -> Modules | Refusal:
    """Return the modules for a call on rows like x with this condition, or why not."""
    if isinstance(modules, Refusal):
        return modules
    if type(x) is not Tensor:
        refusal = why_not_plain_tensor("its features are", x)
        if refusal is not None:
            return refusal
    if modules.has_condition != (cond is not None):
        return WRONG_CONDITION
    if x.dtype != modules.dtype and not modules.computation.is_autocast:
        return permanent(
            f"its features are {x.dtype} and its parameters {modules.dtype}, without autocast"
        )
    return modules


def read_linear_layer(
    layer: Any, name: str, x: Tensor, computation: Computation
) -> NetworkModules | Refusal:
    """Decide for a linear layer on features like x, called `name` in its mapper.

    It may be a Sequential of a norm and a linear map.
    """
    if torch.compiler.is_compiling():
        return FUSED_BY_COMPILER
    if torch.jit.is_tracing():
        return transient("torch.jit.trace records it")
    if type(layer) is nn.Identity:
        return NO_LAYER
    modules = for_call(read_linear(layer, name, computation), x, None)
    if isinstance(modules, Refusal):
        return modules
    features = modules.network.out.weight.shape[1]
    if x.shape[-1] != features:
        return permanent(f"its {name} takes {features} features, got {x.shape[-1]}")
    return modules


def network(
    modules: NetworkModules,
    x: Tensor,
    cond: Tensor | None = None,
    *,
    more: Tensor | None = None,
    residual: bool = False,
    repeats_x: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a network or linear layer of [x, more], plus x if `residual`, for x [.., N, F].

    `more` are rows [.., N, F_m], or x again with `repeats_x`. `out_dtype` None is the dtype of the
    GEMMs.
    """
    condition = row_conditions(cond, x) if modules.has_condition else None
    shape = x.shape
    if len(shape) != 2:  # a view has a node in the graph of autograd
        x, more = _rows(x), _rows(more)
    options = modules.options(residual=residual, repeats_x=repeats_x, out_dtype=out_dtype)
    y = modules.compute(modules.tensors(x, more, condition), options)
    return y if len(shape) == 2 else y.view(*shape[:-1], y.shape[-1])


def update_edges(
    modules: NetworkModules,
    x: tuple[Tensor | None, Tensor | None, Tensor],
    graph: GraphStructure,
    edges: Tensor,
    batch: int,
    *,
    cond: Tensor | None = None,
    residual: bool = True,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return rows of updated edges [B * E, F], or their updates, and the sums [B * N_dst, F].

    Parameters
    ----------
    modules : NetworkModules
        Of an edge update.
    x : (Tensor or None, Tensor or None, Tensor)
        Sources, None on one set of nodes, their halo, if there is one, and destinations: [.., N, F]
        or rows of a batch.
    graph : GraphStructure
    edges : Tensor [.., E, F]
    batch : int
        Number of batch entries, 1 without a batch.
    cond : Tensor [.., E or 1, K], optional
    residual : bool
        Whether edges are returned and summed; if not, their updates are.
    out_dtype : torch.dtype
        Of both results.
    """
    x_src, halo, x_dst = x
    parameters = modules.network
    if modules.has_condition:
        parameters = modules.network_with(row_conditions(cond, edges))
    if x_dst.dim() != 2:
        x_src, halo, x_dst, edges = _rows(x_src), _rows(halo), _rows(x_dst), _rows(edges)
    tensors = InteractionTensors(x_src, halo, x_dst, edges, parameters)
    options = modules.options(residual=residual, out_dtype=out_dtype)
    updated = modules.compute(tensors, graph, InteractionOptions(batch, options))
    edge_sums = modules.computation.backend.edge_sums
    assert edge_sums is not None  # it comes with the edge update
    # of the edges that are returned: autograd must see that
    return updated, edge_sums(updated, graph, batch)


def block_forward(
    block: Any,
    modules: BlockModules,
    x: tuple[Tensor, Tensor],
    graph: GraphStructure | ShardedGraph,
    edge_attr: Tensor,
    cond: Conditions,
    *,
    batch: int,
    attend: Callable[[], Tensor],
) -> Tensor:
    """Return destinations after attention and feed-forward network of a block of either owner.

    Parameters
    ----------
    block : nn.Module
        Of this library or of anemoi-models, whose submodules have the same names.
    modules : BlockModules
        As read in this call.
    x : (Tensor, Tensor)
        (x_src, x_dst), [.., N, F]; or rows of a batch, [B * N, F]. One tensor for one set of nodes.
    graph : GraphStructure or ShardedGraph
    edge_attr : Tensor [E, D] or [B, E, D]
    cond : (Tensor or None, Tensor or None)
        Of sources and destinations, [.., N or 1, K]; or [B * N or 1, K].
    batch : int
        Number of batch entries, 1 without a batch.
    attend : callable
        Returns the destinations after attention by the block's own modules.
    """
    # On few rows the host takes longer than the GPU, and one operator saves it a quarter of the
    # time. Two free what the network keeps before the backward pass of the attention.
    if modules.both is not None and x[1].numel() <= MOST_OF_ONE:
        return _attention(block, modules.both, x, graph, edge_attr, cond, batch)
    if isinstance(modules.attention, Refusal):
        z = attend()
    else:
        z = _attention(block, modules.attention, x, graph, edge_attr, cond, batch)
    return feed_forward(modules.feed_forward, block.run_node_dst_mlp, z, cond[1])


def feed_forward(
    modules: NetworkModules | Refusal,
    run_network: Callable[..., Tensor],
    x: Tensor,
    cond: Tensor | None,
) -> Tensor:
    """Return x [.., N, F] after a feed-forward sub-layer, fused or by the block's `run_network`."""
    if not isinstance(modules, Refusal):
        return network(modules, x, cond, residual=True)
    if cond is None:
        return x + run_network(x)
    return x + run_network(x, cond=cond)


def _attention(
    block: Any,
    modules: AttentionModules,
    x: tuple[Tensor, Tensor],
    graph: GraphStructure | ShardedGraph,
    edge_attr: Tensor,
    cond: Conditions,
    batch: int,
) -> Tensor:
    """Return destinations, shaped like x_dst, after the attention, or the whole block."""
    x_src: Tensor | None
    x_src, x_dst = x
    shape = x_dst.shape
    cond_src, cond_dst = cond
    is_one_set = x_src is x_dst and modules.has_one_norm
    halo = None
    # before the exchange, which returns rows of a batch as [B, N, F]
    rows_of_cond_src = None
    if modules.has_condition:
        cond_dst = row_conditions(cond_dst, x_dst)
        if not is_one_set:
            rows_of_cond_src = row_conditions(cond_src, x_src)
    if isinstance(graph, GraphStructure):
        structure = graph
    else:  # as by the block's modules, which another rank may call (hooks)
        norm = "layer_norm_attention"
        if not modules.has_one_norm:
            norm = "layer_norm_attention_src"
        prepare = partial(_normed, block, block._modules[norm])
        conditions = None
        if cond_src is not None:
            # a row for each source: the exchange selects the conditions of the rows it sends
            conditions = cond_src.expand(*x_src.shape[:-1], cond_src.shape[-1])
        pending = graph.start_exchange(x_src, prepare, conditions)
        x_src = pending.own
        if is_one_set:
            x_dst = x_src
        halo = pending.wait_halo()
        structure = graph.structure
    mixing = block._modules.get("edge_pre_mlp")  # not before anemoi-models 0.11.1
    if mixing is not None and (mixing._modules or type(mixing) is not nn.Sequential):
        edge_attr = mixing(edge_attr)
    # a batch of one reads attributes as one graph does: no batch stride in the kernels
    if batch == 1 and edge_attr.dim() == len(shape) == 3:
        edge_attr = edge_attr.squeeze(0)
    # without x_src, the sub-layer normalises the rows of one set once
    if is_one_set:
        x_src = None
    if x_dst.dim() != 2:
        x_src, halo, x_dst = _rows(x_src), _rows(halo), _rows(x_dst)
    tensors = modules.tensors((x_src, x_dst), edge_attr, (rows_of_cond_src, cond_dst), halo)
    z = modules.compute(tensors, structure, modules.options._replace(batch=batch))
    return z if len(shape) == 2 else z.view(shape)


def _normed(block: Any, norm: nn.Module, x: Tensor, cond: Tensor | None = None) -> Tensor:
    """Return normed sources as the projections of a block read them."""
    normed = apply_norm(norm, x, cond)
    return cast_for_projections(normed, block.lin_query, block.lin_key, block.lin_value)


def _rows(x: Any) -> Any:
    """Return features [.., N, F] as rows [B * N, F], None where there are none."""
    return None if x is None else x.reshape(-1, x.shape[-1])


def row_conditions(cond: Tensor | None, x: Tensor) -> Tensor:
    """Return a condition [.., N or 1, K] as one row per node of x [.., N, F]: [B * N, K]."""
    if cond is None:
        raise ValueError("cond must hold a condition of sources and one of destinations, got None")
    return cond.expand(*x.shape[:-1], cond.shape[-1]).reshape(-1, cond.shape[-1])
