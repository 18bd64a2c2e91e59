"""The path of a block, decided once in each of its forward passes.

    fused         its attention sub-layer fused, and its feed-forward sub-layer if possible
    attention     the block's modules around anemoi_gt's attention; feed-forward fused if possible
    feed_forward  a transformer block with fused feed-forward and Anemoi's attention
    upstream      Anemoi's own forward

The decision depends on mutable state, such as hooks, so it is taken once. A checkpointed chunk
keeps the decisions of its forward pass for the recomputation, which must save the same tensors.
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.integrations.anemoi import report
from anemoi_gt.integrations.anemoi.settings import SETTINGS, Settings
from anemoi_gt.integrations.anemoi.upstream import Upstream
from anemoi_gt.nn import fused_block
from anemoi_gt.nn.fused_block import NO_SOURCES, BlockPath, Computation, ReasonsAgainst
from anemoi_gt.nn.layer_kernels import class_path, has_global_hooks, has_wrapped_weights, hooks_of
from anemoi_gt.nn.sublayers import FeedForwardParts, feed_forward_parts
from anemoi_gt.torch_compat import constant_when_traced, is_exporting

FUSED, ATTENTION, UPSTREAM = "fused", "attention", "upstream"
FEED_FORWARD = "feed_forward"
# methods of Anemoi's blocks that the replacement forward calls only on falling back, or never
BYPASSED = (
    *("get_qkve", "prepare_qkve_edge_sharding", "attention_block", "apply_gt", "_apply_qk_norm"),
    *("_forward_edges_sharded_attention", "_forward_heads_sharded_attention"),
    *("_forward_edges_shard_strategy", "_forward_heads_shard_strategy"),
)
GLOBAL_HOOKS = "hooks on all modules would skip its submodules"
NOT_FASTER_FUSED = "sub-layers are fused under 16-bit autocast where backend triton attends"


NOT_FUSED = BlockPath.by_modules("its sub-layers are not fused")


class Decision(NamedTuple):
    """The path of a block in one forward pass."""

    settings: Settings | None  # None: neither installed nor swapped
    path: str  # FUSED, ATTENTION, FEED_FORWARD or UPSTREAM
    has_raw_edges: bool = False  # the attention applies `lin_edge` itself
    reason: str | None = None  # why it is less than requested; None if it is not
    sublayers: BlockPath = NOT_FUSED  # parts of each fused sub-layer
    is_overridden: bool = (
        False  # a subclass of Anemoi's block overrides methods; the same on all ranks
    )


class Call(NamedTuple):
    """The arguments of a block's forward, in any version of anemoi-models."""

    x: Any  # rows of a processor, or (sources, destinations) of a mapper
    edge_attr: Tensor
    edge_index: Tensor
    shards: Any  # shard_info, or shapes before 0.15
    batch_size: int
    size: int | tuple[int, int]
    group: object  # of the ranks that share a model, or None
    cond: Any  # None, or the conditions, in the form of `x`

    @classmethod
    def of(
        cls,
        x,
        edge_attr,
        edge_index,
        shard_info=None,
        batch_size=1,
        size=None,
        model_comm_group=None,
        cond=None,
        edges_are_dst_sorted=True,  # noqa: FBT002  as upstream
        shapes=None,
        **others,
    ) -> "Call":
        """Read arguments as upstream passes them; others are ignored, as upstream does."""
        shards = shapes if shard_info is None else shard_info
        return cls(x, edge_attr, edge_index, shards, batch_size, size, model_comm_group, cond)


class ChunkDecisions:
    """The decisions in one checkpointed chunk, in the order of its blocks."""

    def __init__(self):
        self.decisions: list[Decision] = []
        self.position: int | None = None  # in a recomputation: index of the next block

    def take(self) -> Decision | None:
        """Return the forward pass's decision for the next block; None in that pass itself."""
        if self.position is None or self.position >= len(self.decisions):
            return None
        self.position += 1
        return self.decisions[self.position - 1]


_CHUNK: ContextVar[ChunkDecisions | None] = ContextVar("chunk", default=None)


def keeping_decisions(function: Callable) -> Callable:
    """Wrap a function to checkpoint; recomputations reuse the decisions of its first call."""
    decisions, has_run = ChunkDecisions(), False

    @wraps(function)
    def run(*args, **kwargs):
        nonlocal has_run
        if has_run:
            decisions.position = 0
        has_run = True
        token = _CHUNK.set(decisions)
        try:
            return function(*args, **kwargs)
        finally:
            _CHUNK.reset(token)

    return run


def decide(block: Any, x_dst: Tensor, call: Call, *, gathers: bool) -> Decision:
    """Return the path of a block with destinations `x_dst`; log it if it is less than requested.

    `gathers`: Anemoi exchanges rows between ranks. Raise ValueError if a named backend cannot run.
    """
    return _decide_once(block, lambda: _decide(block, x_dst, call, gathers=gathers))


def decide_transformer(block: Any, norm_name: str, x: Tensor, cond: Tensor | None) -> Decision:
    """Return the path of a transformer block with rows x; log it if it is less than requested.

    `norm_name` names the norm before its feed-forward network. Raise ValueError if `blocks` is
    True and the named backend cannot run.
    """
    return _decide_once(block, lambda: _decide_transformer(block, norm_name, x, cond))


def _decide_once(block: Any, decide_now: Callable[[], Decision]) -> Decision:
    """Return the forward pass's decision in a recomputation, else a new one, which is recorded."""
    if torch.compiler.is_compiling():
        decision = decide_now()
        report.record_traced(type(block), decision.path, decision.reason)
        return decision
    chunk = _CHUNK.get()
    kept = None if chunk is None else chunk.take()
    if kept is not None:
        return kept
    decision = decide_now()
    if chunk is not None and chunk.position is None:
        chunk.decisions.append(decision)
    report.record(block, decision.path, decision.reason)
    return decision


def examine(block: Any, device: torch.device) -> Decision:
    """Predict the path of a block on one rank and device, from the block alone; log nothing."""
    x = torch.empty(0, 1, device=device)  # decisions do not depend on the number of features
    if isinstance(block, Upstream.transformers):
        norm_name = "layer_norm_mlp"
        if hasattr(block, "layer_norm_mpl"):
            norm_name = "layer_norm_mpl"
        return _decide_transformer(block, norm_name, x, None, log_reason=lambda _: None)
    edge_index = torch.empty(2, 0, dtype=torch.int64, device=device)
    call = Call.of(x, x, edge_index)
    return _decide(block, x, call, gathers=False, log_reason=lambda _: None)


def _decide(
    block: Any,
    x_dst: Tensor,
    call: Call,
    *,
    gathers: bool,
    log_reason: Callable[[str], None] = report.warn_once,
) -> Decision:
    settings = SETTINGS.of(block)
    if settings is None:
        return Decision(None, UPSTREAM)
    overridden_method = overridden_method_of(type(block))
    reason = overridden_method or _reason_against_attention(block, call)
    if reason is not None:
        if settings.config.backend != "auto" and not _is_temporary(reason):
            raise ValueError(
                f"attention backend {settings.config.backend!r} cannot run this Anemoi block: "
                f"{reason}; backend 'auto' runs Anemoi's own code there"
            )
        log_reason(f"an Anemoi block falls back to Anemoi's attention: {reason}")
        return Decision(
            settings, UPSTREAM, reason=reason, is_overridden=overridden_method is not None
        )

    path = NOT_FUSED
    if settings.blocks is not False and not is_exporting():
        computation = Computation.of(x_dst, settings.config, keep_hidden=settings.keep_hidden)
        if settings.blocks is None and not computation.is_faster_fused:
            reason = NOT_FASTER_FUSED
        else:
            path = _sublayers_of(block, x_dst, call, settings, computation, gathers=gathers)
            reasons = dict.fromkeys(
                parts for parts in path if isinstance(parts, str) and parts != NO_SOURCES
            )
            if reasons:
                _report_not_fused(settings, reasons, log_reason)
                reason = "; ".join(reasons)
    if not isinstance(path.attention, str):
        return Decision(settings, FUSED, has_raw_edges=True, reason=reason, sublayers=path)

    reason_to_embed = _reason_to_embed(block, settings, gathers=gathers)
    if reason_to_embed is not None:
        log_reason(f"an Anemoi block embeds its edges before the attention: {reason_to_embed}")
    has_raw_edges = reason_to_embed is None and settings.fuse_edges and not gathers
    return Decision(settings, ATTENTION, has_raw_edges, reason, path)


def _decide_transformer(
    block: Any,
    norm_name: str,
    x: Tensor,
    cond: Tensor | None,
    log_reason: Callable[[str], None] = report.warn_once,
) -> Decision:
    settings = SETTINGS.of(block)
    if settings is None:
        return Decision(None, UPSTREAM)
    if settings.blocks is False or is_exporting():
        return Decision(settings, UPSTREAM, reason="its sub-layers are not fused")
    if torch.jit.is_tracing():
        return Decision(settings, UPSTREAM, reason="torch.jit.trace records it")
    computation = Computation.of(x, settings.config, keep_hidden=settings.keep_hidden)
    if settings.blocks is None and not computation.is_faster_fused:
        return Decision(settings, UPSTREAM, reason=NOT_FASTER_FUSED)
    parts: FeedForwardParts | str = "another backend than triton is chosen"
    if _runs_on_triton(x, computation, settings):
        norm = getattr(block, norm_name)
        parts = feed_forward_parts(norm, block.mlp, norm_name=norm_name, mlp_name="mlp")
        parts = fused_block.for_call(parts, x, cond, computation)
    if isinstance(parts, str):
        _report_not_fused(settings, (parts,), log_reason)
        return Decision(settings, UPSTREAM, reason=parts)
    path = BlockPath("its attention is Anemoi's", parts, NO_SOURCES)
    return Decision(settings, FEED_FORWARD, sublayers=path)


def _report_not_fused(
    settings: Settings, reasons: Iterable[str], log_reason: Callable[[str], None]
) -> None:
    """Log why sub-layers are not fused; raise ValueError with blocks=True and a named backend."""
    for reason in reasons:
        if settings.blocks and settings.config.backend != "auto" and not _is_temporary(reason):
            raise ValueError(
                f"blocks=True with backend {settings.config.backend!r} cannot compute this Anemoi "
                f"block: {reason}; blocks=None computes it by its modules there, and so does "
                "backend 'auto'"
            )
        log_reason(f"a sub-layer of an Anemoi block is not fused: {reason}")


def _is_temporary(reason: str) -> bool:
    """Return whether a reason is a temporary tool, such as a hook, and so must not end a run."""
    return "hooks" in reason or reason.startswith("torch.jit")


def _reason_against_attention(block: Any, call: Call) -> str | None:
    """Return why the attention of a block cannot be replaced, or None."""
    if torch.jit.is_tracing():
        return "torch.jit.trace records it, which would make constants of sizes"
    if not isinstance(call.edge_index, Tensor) or call.edge_index.layout != torch.strided:
        return "its edges came as a sparse adjacency, and an edge_index [2, E] is needed"
    replaced = [name for name in BYPASSED if name in block.__dict__]
    if replaced:
        return f"its {replaced[0]} was replaced on the instance"
    if has_global_hooks():
        return GLOBAL_HOOKS
    is_updated = call.cond is not None and getattr(block, "update_src_nodes", False)
    if is_updated and Upstream.sources_take_destination_condition:
        return (
            "it updates its sources under the condition of its destinations, as anemoi-models 0.9 "
            "to 0.13 do"
        )
    conv = block.conv
    if Upstream.triton_conv is not None and Upstream.triton_conv in (
        conv,
        getattr(conv, "__self__", None),
    ):
        return None
    if type(conv) is not Upstream.conv:
        return f"its conv is {class_path(type(conv))}, which is not Anemoi's attention"
    if "forward" in conv.__dict__:
        return "its conv has an instance-level forward"
    return "its conv has hooks, which would be skipped" if hooks_of(block.conv) else None


def _reason_to_embed(block: Any, settings: Settings, *, gathers: bool) -> str | None:
    """Return why edges must be embedded before the attention, or None."""
    if not settings.fuse_edges or gathers:
        return None
    if type(block.lin_edge) is not nn.Linear:
        return f"its lin_edge is {class_path(type(block.lin_edge))}, and torch.nn.Linear is needed"
    if hooks_of(block.lin_edge):
        return "its lin_edge has hooks, which would be skipped"
    if has_wrapped_weights(block.lin_edge):
        return "its lin_edge has weights that are a tensor subclass"
    return None


def _runs_on_triton(x: Tensor, computation: Computation, settings: Settings) -> bool:
    """Return whether backend triton attends over x; it does where fused computation is faster."""
    if computation.is_faster_fused:
        return True
    return fused_block.runs_on_triton(x, computation.dtype, settings.config)


def _sublayers_of(
    block: Any,
    x_dst: Tensor,
    call: Call,
    settings: Settings,
    computation: Computation,
    *,
    gathers: bool,
) -> BlockPath:
    """Return the parts of each sub-layer of a block, or the reason why its modules compute it."""
    if not _runs_on_triton(x_dst, computation, settings):
        return BlockPath.by_modules("another backend than triton computes its attention")
    attention: str | None = None
    if gathers:
        attention = "its nodes are sharded by Anemoi"
    elif not settings.fuse_edges:
        attention = "its edges are embedded before the attention"
    feed_forward = _overridden_network(block, "run_node_dst_mlp")
    source_feed_forward: str | None = NO_SOURCES
    # processor blocks of anemoi-models have the attribute but nothing to update
    if getattr(block, "update_src_nodes", False) and hasattr(block, "run_node_src_mlp"):
        source_feed_forward = _overridden_network(block, "run_node_src_mlp")
    reasons = ReasonsAgainst(attention, feed_forward, source_feed_forward)
    return BlockPath.of_modules(block, x_dst, call.cond, settings.config, computation, reasons)


def _overridden_network(block: Any, name: str) -> str | None:
    """Return why a feed-forward network is not run by Anemoi's method, or None."""
    if name in block.__dict__:
        return f"its {name} was replaced on the instance"
    return overridden_network_of(type(block), name)


@constant_when_traced
def overridden_method_of(kind: type) -> str | None:
    """Return the first method of BYPASSED that a block class overrides, as a reason, or None."""
    if kind not in Upstream.own_methods:
        upstream = _upstream_class(kind)
        overridden = [
            name
            for name in BYPASSED
            if getattr(kind, name, None) is not getattr(upstream, name, None)
        ]
        Upstream.own_methods[kind] = (
            f"{kind.__qualname__} overrides {overridden[0]}" if overridden else None
        )
    return Upstream.own_methods[kind]


@constant_when_traced
def overridden_network_of(kind: type, name: str) -> str | None:
    """Return the reason if a block class overrides its feed-forward computation, or None."""
    if (kind, name) not in Upstream.own_networks:
        reason = None
        if getattr(kind, name) is not getattr(_upstream_class(kind), name):
            reason = f"{kind.__qualname__} overrides {name}"
        Upstream.own_networks[kind, name] = reason
    return Upstream.own_networks[kind, name]


def _upstream_class(kind: type) -> type:
    return next(upstream for upstream in Upstream.blocks if issubclass(kind, upstream))


def dropout_of(conv: Any) -> float:
    """Return the dropout probability of the attention in the current mode."""
    if isinstance(conv, nn.Module) and conv.training:
        dropout: Any = conv.dropout
        return dropout
    return 0.0
