"""The outcome for a block, decided once in each of its forward passes.

    fused              its attention sub-layer fused, and its feed-forward sub-layer if possible
    attention only     the block's modules around anemoi_gt's attention; feed-forward fused if
                       possible
    feed-forward only  a transformer block with fused feed-forward and Anemoi's attention
    upstream           Anemoi's own forward

The decision depends on mutable state, such as hooks and parameters, so it is taken once in each
forward pass, and again in a recomputation, from the current state (`nn.unchanged`).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.integrations.anemoi import report
from anemoi_gt.integrations.anemoi.settings import FUSES_SUBLAYERS, SETTINGS, Settings
from anemoi_gt.integrations.anemoi.upstream import Upstream
from anemoi_gt.nn import fused_block
from anemoi_gt.nn.fused_block import (
    NO_SOURCES,
    NOT_FASTER,
    BlockModules,
)
from anemoi_gt.nn.plain import ANEMOI_ATTENTION, ANEMOI_BLOCK, why_not_plain
from anemoi_gt.nn.sublayers import (
    NO_SUBLAYERS,
    Computation,
    NetworkModules,
    dtypes_of,
    linear_parameters,
    read_network,
)
from anemoi_gt.nn.unchanged import none_refused, reading
from anemoi_gt.ops.backends import may_be_faster_fused
from anemoi_gt.refusal import Refusal, RefusalKind, not_faster, permanent, transient
from anemoi_gt.torch_compat import is_exporting

FUSED, ATTENTION, UPSTREAM = "fused", "attention only", "upstream"
FEED_FORWARD = "feed-forward only"
UNWANTED = not_faster("its sub-layers are not fused")
SHARDED_BY_ANEMOI = permanent("its nodes are sharded by Anemoi")
SIZES_OF_TRACE = transient("torch.jit.trace records it, which would make constants of sizes")


class Decision(NamedTuple):
    """Outcome for a block in one forward pass."""

    settings: Settings | None  # None: neither installed nor swapped
    outcome: str  # FUSED, ATTENTION or UPSTREAM
    fused: BlockModules = BlockModules.by_modules(UNWANTED)
    refusals: tuple[Refusal, ...] = ()  # why it is not fused as a whole
    has_raw_edges: bool = False  # the attention applies `lin_edge` itself
    # methods of the block itself are other ones than Anemoi's; the same on all ranks
    is_overridden: bool = False


NOT_INSTALLED = Decision(None, UPSTREAM)


class Call(NamedTuple):
    """The arguments of a block's forward, in any version of anemoi-models."""

    x: Any  # rows of a processor, or (sources, destinations) of a mapper
    edge_attr: Tensor
    edge_index: Tensor
    shards: Any  # shard_info, or shapes before 0.15
    batch_size: int
    group: object  # of the ranks that share a model, or None
    cond: Any  # None, or the conditions, in the form of `x`

    @classmethod
    def of(
        cls,
        x: Any,
        edge_attr: Tensor,
        edge_index: Tensor,
        shard_info: Any = None,
        batch_size: int = 1,
        size: Any = None,
        model_comm_group: Any = None,
        cond: Any = None,
        edges_are_dst_sorted: bool = True,  # noqa: FBT001, FBT002  as upstream
        shapes: Any = None,
        **others: Any,
    ) -> "Call":
        """Read arguments as upstream passes them; others are ignored, as upstream does."""
        shards = shapes if shard_info is None else shard_info
        return cls(x, edge_attr, edge_index, shards, batch_size, model_comm_group, cond)


def decide(block: Any, x_dst: Tensor, call: Call, *, gathers: bool) -> Decision:
    """Decide for a block with destinations `x_dst`; log why if the request is not fully met.

    `gathers`: Anemoi exchanges rows between ranks. Raise ValueError if a named backend cannot run.
    """
    settings = SETTINGS.of(block)
    if settings is None:
        return NOT_INSTALLED
    computation = computation_of(settings, x_dst)
    takes_list = isinstance(call.edge_index, Tensor) and call.edge_index.layout == torch.strided
    rows = (type(x_dst), x_dst.dtype)
    decision = reading(
        (block,),
        (settings, computation, gathers, takes_list, rows, call.cond is None),
        lambda: _decide(block, x_dst, call, settings, computation, gathers=gathers),
        lambda decision: none_refused(decision.refusals),
    )
    report.record(block, decision.outcome, decision.refusals)
    return decision


def decide_transformer(block: Any, x: Tensor, cond: Tensor | None) -> NetworkModules | Refusal:
    """Return the modules of a transformer block's feed-forward network for rows x, or why not.

    Log and keep the reason. Raise ValueError if fusion is "sublayers" and the named backend cannot
    run.
    """
    settings = SETTINGS.of(block)
    if settings is None:
        return UNWANTED
    modules = _feed_forward_of(block, x, cond, computation_of(settings, x))
    refusals = refusals_in((modules,))
    check_named(settings, refusals)
    report.record(block, UPSTREAM if refusals else FEED_FORWARD, refusals)
    return modules


def _feed_forward_of(
    block: Any, x: Tensor, cond: Tensor | None, computation: Computation | Refusal
) -> NetworkModules | Refusal:
    if isinstance(computation, Refusal):
        return computation
    # "mpl" is upstream's spelling in mappers, whose layer_norm_mlp is not used
    norm_name = "layer_norm_mpl" if hasattr(block, "layer_norm_mpl") else "layer_norm_mlp"
    norm = (norm_name, getattr(block, norm_name))
    modules = read_network(block.mlp, computation, "mlp", norm_in=norm)
    return fused_block.for_call(modules, x, cond)


def decide_layer(
    layer: Any,
    settings: Settings | None,
    x: Tensor,
    read: Callable[[Computation], NetworkModules | Refusal],
) -> NetworkModules | Refusal:
    """Return the modules of a network or linear layer for rows x, as `read`, or why it is called.

    Log and keep the reason. Raise ValueError if the named backend cannot run.
    """
    computation = UNWANTED if settings is None else computation_of(settings, x)
    modules: NetworkModules | Refusal
    if isinstance(computation, Refusal):
        modules = computation
    else:
        key = (computation, type(x), x.dtype, x.shape[-1])
        modules = reading((layer,), key, lambda: read(computation), none_refused)
    report.record_network(layer, modules)
    return modules


def computation_of(settings: Settings, x: Tensor) -> Computation | Refusal:
    """Return how fused sub-layers of rows like x compute, or why modules compute them.

    Raise ValueError if they are wanted and the named backend cannot run on x.
    """
    if settings.fusion not in FUSES_SUBLAYERS or is_exporting():
        return UNWANTED
    if torch.jit.is_tracing():
        return SIZES_OF_TRACE
    config, dtypes = settings.config, dtypes_of(x)
    if settings.fusion == "auto" and not may_be_faster_fused(config.backend, dtypes):
        return NOT_FASTER
    computation = Computation.of(x, config, keep_hidden=settings.keep_hidden, dtypes=dtypes)
    if not computation.backend.has_sublayers:
        return NOT_FASTER if settings.fusion == "auto" else NO_SUBLAYERS
    return computation


def _decide(
    block: Any,
    x_dst: Tensor,
    call: Call,
    settings: Settings,
    computation: Computation | Refusal,
    *,
    gathers: bool,
) -> Decision:
    overridden = why_not_plain(("", block, (ANEMOI_BLOCK,)))
    refusal = overridden or _why_not_attention(block, call)
    if refusal is not None:
        fallback = "runs Anemoi's own code there"
        refusal.raise_if_named(settings.config.backend, "this Anemoi block", fallback)
        is_overridden = overridden is not None
        return Decision(settings, UPSTREAM, refusals=(refusal,), is_overridden=is_overridden)

    if isinstance(computation, Refusal):
        fused = BlockModules.by_modules(computation)
    else:
        shards = SHARDED_BY_ANEMOI if gathers else None
        fused = BlockModules.of(block, x_dst, call.cond, settings.config, computation, shards)
    refusals = refusals_in(fused)
    check_named(settings, refusals)
    if not isinstance(fused.attention, Refusal):
        return Decision(settings, FUSED, fused, refusals, has_raw_edges=True)

    has_raw_edges = settings.fusion != "none" and not gathers
    if has_raw_edges:
        embedding = linear_parameters(block.lin_edge, "lin_edge")
        if isinstance(embedding, Refusal):
            has_raw_edges = False
            refusals = refusals_in((*refusals, embedding))
    return Decision(settings, ATTENTION, fused, refusals, has_raw_edges)


def refusals_in(sublayers: Iterable[Any]) -> tuple[Refusal, ...]:
    """Return the refusals among the modules of sub-layers, each once."""
    refusals: list[Refusal] = []
    for sublayer in sublayers:
        if isinstance(sublayer, Refusal) and sublayer not in (NO_SOURCES, *refusals):
            refusals.append(sublayer)
    return tuple(refusals)


def check_named(settings: Settings, refusals: Iterable[Refusal]) -> None:
    """Raise ValueError if a named backend must fuse what it cannot."""
    if settings.fusion != "sublayers" or settings.config.backend == "auto":
        return
    for refusal in refusals:
        if refusal.kind is RefusalKind.PERMANENT:
            raise ValueError(
                f"fusion='sublayers' with backend {settings.config.backend!r} cannot compute this "
                f"Anemoi block: {refusal.text}; fusion='auto' computes it by its modules there, "
                "and so does backend 'auto'"
            )


def _why_not_attention(block: Any, call: Call) -> Refusal | None:
    """Return why the attention of a block cannot be replaced, or None."""
    if torch.jit.is_tracing():
        return SIZES_OF_TRACE
    if not isinstance(call.edge_index, Tensor) or call.edge_index.layout != torch.strided:
        return permanent("edges must be an edge_index [2, E], got a sparse adjacency")
    is_updated = call.cond is not None and getattr(block, "update_src_nodes", False)
    if is_updated and Upstream.sources_take_destination_condition:
        return permanent(
            "it updates its sources under the condition of its destinations, as anemoi-models 0.9 "
            "to 0.13 do"
        )
    conv = block.conv
    if Upstream.triton_conv is not None and Upstream.triton_conv in (
        conv,
        getattr(conv, "__self__", None),
    ):
        return None
    refusal = why_not_plain(("conv", conv, (ANEMOI_ATTENTION,)))
    if refusal is None and conv.out_channels != block.out_channels_conv:
        return permanent(
            f"its conv has out_channels {conv.out_channels}, and its heads have "
            f"{block.out_channels_conv} channels"
        )
    return refusal
