"""What the blocks of Anemoi's graph transformers do while they compute with us; each function stands in for a method of theirs.

    get_qkve, prepare_qkve_edge_sharding     leave the edge attributes raw: `lin_edge` is applied inside the attention
    attention_block                          all edges at once: nothing is made whose size its chunks would bound
    apply_gt                                 the attention

What we cannot serve runs the method they replace.
"""

import logging
from functools import cache, wraps

import torch
from torch import Tensor, nn

from anemoi_gt.integrations.anemoi.block_settings import CHOSEN, Settings
from anemoi_gt.integrations.anemoi.edge_cache import structure_of, traced_structure
from anemoi_gt.integrations.hooks import hooks_of
from anemoi_gt.nn.layer_kernels import cast_for_projections
from anemoi_gt.ops import edge_attention

log = logging.getLogger(__name__)


def projecting(theirs):
    """`get_qkve` that leaves edges raw [E, D] where the attention embeds them."""

    @wraps(theirs)
    def get_qkve(self, x, edge_attr):
        if not _reads_raw_edges(self):
            return theirs(self, x, edge_attr)
        x_src, x_dst = x if isinstance(x, tuple) else (x, x)
        src = cast_for_projections(x_src, self.lin_query, self.lin_key, self.lin_value)
        dst = src if x_dst is x_src else x_dst  # of a mapper, which lin_query alone reads here
        return self.lin_query(dst), self.lin_key(src), self.lin_value(src), self.edge_pre_mlp(edge_attr)

    return get_qkve


def splitting(theirs):
    """`prepare_qkve_edge_sharding` that splits the heads of nodes, and of edges unless they are raw."""

    @wraps(theirs)
    def prepare_qkve_edge_sharding(self, query, key, value, edges):
        if not _reads_raw_edges(self):
            return theirs(self, query, key, value, edges)
        return *(_split_heads(self, rows) for rows in (query, key, value)), edges

    return prepare_qkve_edge_sharding


def blocking(theirs):
    """`attention_block` that needs no chunks of edges."""

    @wraps(theirs)
    def attention_block(self, query, key, value, edges, edge_index, size, num_chunks, edges_are_dst_sorted=True):
        if not _serves(self, edge_index):
            edges = _embedded(self, edges)
            return theirs(self, query, key, value, edges, edge_index, size, num_chunks, edges_are_dst_sorted)
        return self.apply_gt(query, key, value, edges, edge_index, size, edges_are_dst_sorted)

    return attention_block


def attending(theirs):
    """`apply_gt` by `anemoi_gt.edge_attention`."""

    @wraps(theirs)
    def apply_gt(self, query, key, value, edges, edge_index, size, edges_are_dst_sorted=True):
        if not _serves(self, edge_index):
            edges = _embedded(self, edges)
            return theirs(self, query, key, value, edges, edge_index, size, edges_are_dst_sorted)
        num_nodes = (key.shape[0], query.shape[0])
        reverse = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
        if torch.compiler.is_compiling():
            graph, samples = traced_structure(edge_index, num_nodes, reverse=reverse), 1
        else:
            graph, samples = structure_of(edge_index, num_nodes, reverse=reverse)
        embedding = (self.lin_edge.weight, self.lin_edge.bias) if edges.dim() == 2 else ()
        if samples > 1:
            query, key, value, edges = (rows.unflatten(0, (samples, -1)) for rows in (query, key, value, edges))
        options = {"dropout_p": _dropout(self.conv), "config": CHOSEN.of(self).config}
        out, _ = edge_attention(query, key, value, graph, edges, *embedding, **options)
        return out if samples == 1 else out.flatten(0, 1)

    return apply_gt


def _serves(block, edge_index) -> bool:
    """Whether we compute the attention of a block; if not, say why once, or raise where a backend was named."""
    settings = CHOSEN.of(block)
    if settings is None:
        return False
    reason = _unsupported_reason(block, edge_index)
    if reason is not None:
        _refuse(settings, reason)
    return reason is None


def _unsupported_reason(block, edge_index) -> str | None:
    """Return why we cannot compute the attention of a block, or None when we can."""
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return "its edges came as a sparse adjacency, and an edge_index [2, E] is needed"
    conv = block.conv
    if _name_of(conv) not in ATTENTIONS:
        return f"its conv is {_name_of(conv)}, which is not Anemoi's attention"
    if isinstance(conv, nn.Module) and hooks_of(conv):
        return "hooks watch its conv, which would not be called"
    return None


ATTENTIONS = (
    "anemoi.models.layers.conv.GraphTransformerConv",
    "anemoi.models.triton.gt.graph_transformer_attention_conv",
)


def _name_of(conv) -> str:
    named = type(conv) if isinstance(conv, nn.Module) else conv
    return f"{getattr(named, '__module__', None)}.{getattr(named, '__qualname__', repr(named))}"


def _refuse(settings: Settings, reason: str) -> None:
    if settings.config.backend != "auto":
        raise ValueError(
            f"attention backend {settings.config.backend!r} cannot serve this Anemoi block: {reason}; "
            "backend 'auto' runs Anemoi's own code there"
        )
    if not torch.compiler.is_compiling():
        _say_once(f"an Anemoi block runs Anemoi's own attention: {reason}")


@cache
def _say_once(message: str) -> None:
    log.warning(message)


def _reads_raw_edges(block) -> bool:
    """Whether the attention embeds the edges of a block; the same answer to all methods in one forward pass."""
    settings = CHOSEN.of(block)
    if settings is None or not settings.fuse_edges or getattr(block, "shard_strategy", None) != "edges":
        return False  # by heads, Anemoi exchanges embedded edges between ranks
    reason = _raw_edges_unsupported_reason(block)
    if reason is not None and not torch.compiler.is_compiling():
        _say_once(f"an Anemoi block embeds its edges before the attention: {reason}")
    return reason is None


def _raw_edges_unsupported_reason(block) -> str | None:
    for name in (
        "get_qkve",
        "prepare_qkve_edge_sharding",
        "_forward_edges_sharded_attention",
        "attention_block",
        "apply_gt",
    ):
        if not getattr(getattr(type(block), name), "__module__", "").startswith("anemoi.models."):
            return f"{type(block).__qualname__} has a {name} of its own"
    embed = block.lin_edge
    if type(embed) is not nn.Linear:
        return f"its lin_edge is {_name_of(embed)}, and torch.nn.Linear is needed"
    if hooks_of(embed):
        return "hooks watch its lin_edge, which would not be called"
    return None


def _split_heads(block, rows: Tensor) -> Tensor:
    return rows.unflatten(-1, (block.num_heads, block.out_channels_conv))


def _embedded(block, edges: Tensor) -> Tensor:
    """Edges [E, H, C], as Anemoi's own methods take them."""
    return _split_heads(block, block.lin_edge(edges)) if edges.dim() == 2 else edges


def _dropout(conv) -> float:
    return conv.dropout if isinstance(conv, nn.Module) and conv.training else 0.0
