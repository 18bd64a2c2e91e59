"""Replacements for methods of Anemoi's graph-transformer blocks, and the settings of each block.

    get_qkve, prepare_qkve_edge_sharding     leave the edge attributes raw: `lin_edge` is applied inside the attention
    attention_block                          all edges at once: no tensor is made whose size its chunks would bound
    apply_gt                                 the attention; before anemoi-models 0.11, attention_block is

They call upstream for blocks that we cannot serve. All decisions are the same in eager and in compiled code: functions
and classes are compared as objects, because their names are not what they seem while torch.compile traces.
"""

import logging
import weakref
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.integrations.anemoi.edge_cache import structure_of
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn.layer_kernels import cast_for_projections, class_path, has_wrapped_weights, hooks_of
from anemoi_gt.ops import edge_attention

if TYPE_CHECKING:
    from anemoi_gt.integrations.anemoi.activation_checkpointing import Checkpointing

log = logging.getLogger(__name__)
_log_once = cache(log.warning)
METHODS = ("get_qkve", "prepare_qkve_edge_sharding", "_forward_edges_sharded_attention", "attention_block", "apply_gt")


@dataclass(frozen=True)
class Settings:
    """Settings of a block, as `install` describes them."""

    config: AttentionConfig
    fuse_edges: bool
    blocks: bool | None = None
    sharding: bool = False
    checkpointing: "Checkpointing | None" = None  # of `install` alone


class SettingsRegistry:
    """The settings of all blocks, and of single blocks, which take precedence.

    Blocks are identified by `id` and dropped when they die: nothing is written on them, so they pickle, copy and
    compare as before. torch.compile can read a dictionary of integers; it cannot read a weak one.
    """

    def __init__(self):
        self.everywhere: Settings | None = None
        self._single: dict[int, Settings] = {}

    def of(self, block) -> Settings | None:
        """Return the settings of a block, None if it computes with upstream code."""
        if not self._single:  # reading an id would make torch.compile compile every block separately
            return self.everywhere
        return self._single.get(id(block), self.everywhere)

    def choose(self, block, settings: Settings) -> None:
        """Set the settings of one block for as long as it lives."""
        if id(block) not in self._single:
            weakref.finalize(block, self._single.pop, id(block), None).atexit = False
        self._single[id(block)] = settings

    @property
    def any_sharding(self) -> bool:
        """True if some block exchanges its halo with us."""
        return any(settings is not None and settings.sharding for settings in (self.everywhere, *self._single.values()))

    @property
    def is_empty(self) -> bool:
        """True if every block computes with upstream code."""
        return self.everywhere is None and not self._single

    def clear(self) -> None:
        """Drop all settings."""
        self.everywhere = None
        self._single.clear()


SETTINGS = SettingsRegistry()


@replaces("self x edge_attr")
def get_qkve(upstream, self, x, edge_attr):
    """Leave edges raw [E, D] where the attention embeds them."""
    if not reads_raw_edges(self):
        return upstream(self, x, edge_attr)
    x_src, x_dst = x if isinstance(x, tuple) else (x, x)
    src = cast_for_projections(x_src, self.lin_query, self.lin_key, self.lin_value)
    dst = src if x_dst is x_src else x_dst  # of a mapper: lin_query alone reads it here
    edges = self.edge_pre_mlp(edge_attr) if hasattr(self, "edge_pre_mlp") else edge_attr  # not before 0.11
    return self.lin_query(dst), self.lin_key(src), self.lin_value(src), edges


@replaces("self query key value edges")
def prepare_qkve_edge_sharding(upstream, self, query, key, value, edges):
    """Split the heads of nodes, and of edges unless they are raw."""
    if not reads_raw_edges(self):
        return upstream(self, query, key, value, edges)
    return *(_split_heads(self, rows) for rows in (query, key, value)), edges


@replaces(
    "self query key value edges edge_index size num_chunks edges_are_dst_sorted",
    "self query key value edges edge_index size num_chunks",
)
def attention_block(upstream, self, query, key, value, edges, edge_index, size, num_chunks, *rest, **named):
    """Attend without cutting the edges into chunks; where there is no `apply_gt`, attend here."""
    if not _serves(self, edge_index):
        return upstream(self, query, key, value, _embedded(self, edges), edge_index, size, num_chunks, *rest, **named)
    if hasattr(self, "apply_gt"):
        return self.apply_gt(query, key, value, edges, edge_index, size, *rest, **named)
    return _attend(self, query, key, value, edges, edge_index)


@replaces(
    "self query key value edges edge_index size edges_are_dst_sorted", "self query key value edges edge_index size"
)
def apply_gt(upstream, self, query, key, value, edges, edge_index, *rest, **named):
    """Attend by `anemoi_gt.edge_attention`."""
    if not _serves(self, edge_index):
        return upstream(self, query, key, value, _embedded(self, edges), edge_index, *rest, **named)
    return _attend(self, query, key, value, edges, edge_index)


def _attend(block, query: Tensor, key: Tensor, value: Tensor, edges: Tensor, edge_index: Tensor) -> Tensor:
    """Return the attention of a block [N_dst, H, C]; edges are raw [E, D] or embedded [E, H, C]."""
    reverse = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    graph, batch = structure_of(edge_index, (key.shape[0], query.shape[0]), reverse=reverse)
    embedding = (block.lin_edge.weight, block.lin_edge.bias) if edges.dim() == 2 else ()
    if batch > 1:
        query, key, value, edges = (rows.unflatten(0, (batch, -1)) for rows in (query, key, value, edges))
    options = {"dropout_p": dropout_of(block.conv), "config": SETTINGS.of(block).config}
    out, _ = edge_attention(query, key, value, graph, edges, *embedding, **options)
    return out if batch == 1 else out.flatten(0, 1)


def _serves(block, edge_index) -> bool:
    """Return whether we compute the attention of a block; if not, warn once, or raise if a backend was named."""
    if (settings := SETTINGS.of(block)) is None:
        return False
    if (reason := unsupported_reason(block, edge_index)) is None:
        return True
    if settings.config.backend != "auto":
        raise ValueError(
            f"attention backend {settings.config.backend!r} cannot serve this Anemoi block: {reason}; "
            "backend 'auto' runs Anemoi's own code there"
        )
    warn_once(f"an Anemoi block runs Anemoi's own attention: {reason}")
    return False


def unsupported_reason(block, edge_index) -> str | None:
    """Return why we cannot compute the attention of a block, or None if we can."""
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return "its edges came as a sparse adjacency, and an edge_index [2, E] is needed"
    conv = block.conv
    if Upstream.triton_conv is not None and Upstream.triton_conv in (conv, getattr(conv, "__self__", None)):
        return None
    if type(conv) is not Upstream.conv:
        return f"its conv is {class_path(type(conv))}, which is not Anemoi's attention"
    return "hooks watch its conv, which would not be called" if hooks_of(conv) else None


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """Log a warning at the first call with this message; in compiled code, when it is traced."""
    _log_once(message)


def reads_raw_edges(block) -> bool:
    """Return whether the attention embeds the edges of a block; the same answer to all methods in one forward pass."""
    settings = SETTINGS.of(block)
    if settings is None or not settings.fuse_edges or getattr(block, "shard_strategy", None) != "edges":
        return False  # by heads, Anemoi exchanges embedded edges between ranks
    reason = _own_method(type(block))
    if reason is None and type(block.lin_edge) is not nn.Linear:
        reason = f"its lin_edge is {class_path(type(block.lin_edge))}, and torch.nn.Linear is needed"
    if reason is None and hooks_of(block.lin_edge):
        reason = "hooks watch its lin_edge, which would not be called"
    if reason is None and has_wrapped_weights(block.lin_edge):
        reason = "its lin_edge has weights that are a tensor subclass"
    if reason is not None:
        warn_once(f"an Anemoi block embeds its edges before the attention: {reason}")
    return reason is None


@torch.compiler.assume_constant_result
def _own_method(kind: type) -> str | None:
    """Return which method between projection and attention a class of blocks overrides, None if none."""
    for name in METHODS:
        method = getattr(kind, name, None)
        if method is not getattr(Upstream.block, name, None) and method not in Upstream.replaced:
            return f"{kind.__qualname__} has a {name} of its own"
    return None


def _split_heads(block, rows: Tensor) -> Tensor:
    return rows.unflatten(-1, (block.num_heads, block.out_channels_conv))


def _embedded(block, edges: Tensor) -> Tensor:
    """Return edges [E, H, C], as upstream methods take them."""
    return _split_heads(block, block.lin_edge(edges)) if edges.dim() == 2 else edges


def dropout_of(conv) -> float:
    """Return the probability with which the attention drops weights now."""
    return conv.dropout if isinstance(conv, nn.Module) and conv.training else 0.0
