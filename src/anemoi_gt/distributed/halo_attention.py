"""Edge attention of a graph that is divided among ranks: three ways, one signature. The only place where ranks meet attention.

A layer hands over what it would have computed attention from: queries of its destinations, rows of its sources, and the function that
makes key and value of rows. So rows of sources travel, F numbers each, and not keys and values, twice as many.

    after exchange     halo leaves;  key, value of [owned, halo];  attention over all own edges
    overlapped         halo leaves;  attention over interior edges;  halo is there;  attention over boundary edges;  merged:
                       lse = log(exp(lse_interior) + exp(lse_boundary)),   out = exp(lse_interior - lse) out_interior + ...
    by heads           query, key, value to heads;  attention over all edges, own heads;  out back to nodes
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anemoi_gt.distributed.graph_shard import EdgeShard, GraphShard, HeadShard
from anemoi_gt.distributed.halo import PendingExchange
from anemoi_gt.distributed.heads import head_ranges, to_heads, to_nodes
from anemoi_gt.distributed.shard_validation import check_own_rows
from anemoi_gt.ops import attend_heads, edge_attention, merge
from anemoi_gt.ops.dropout import draw_seed
from anemoi_gt.ops.dtypes import cast_for_autocast

KeyValue = Callable[[Tensor], tuple[Tensor, Tensor]]  # rows [.., n, F] to key and value [.., n, H, C]


def start_exchange(shard: EdgeShard, x_src: Tensor) -> PendingExchange:
    """Send rows of this rank's sources, in the dtype in which projections read them, and go on. Collective, and so is its backward.

    What is computed before `attend_after_exchange` or `attend_overlapped` waits for the halo hides messages, and in backward so does
    the backward of it.

    Parameters
    ----------
    shard : EdgeShard
    x_src : Tensor [n_src, F] or [B, n_src, F]

    Returns
    -------
    PendingExchange
        Takes the place of `x_src` in either, once and with this shard; in a function that is computed again for backward, start it there.

    Raises
    ------
    ValueError
        When rows are not those of this rank's nodes, and for a shard of strategy "heads", before anything travels.
    """
    if not isinstance(shard, EdgeShard):
        raise ValueError(
            f"shard must be one of strategy 'edges', got {type(shard).__name__}: others have no halo to start"
        )
    return shard.start(cast_for_autocast(x_src))


def attend_after_exchange(
    shard: EdgeShard,
    query: Tensor,
    x_src: Tensor | PendingExchange,
    key_value: KeyValue,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    edge_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend over this rank's edges once the halo is there. Collective, and so is its backward.

    Parameters
    ----------
    shard : EdgeShard
    query : Tensor [n_dst, H, C] or [B, n_dst, H, C]
        Of this rank's destinations.
    x_src : Tensor [n_src, F] or [B, n_src, F]
        Rows of this rank's sources; or what `start_exchange` made of them, for work in between.
    key_value : callable
        Makes key and value [.., n, H, C] of rows [.., n, F], for any n, 0 too.
    edge_attr, edge_weight, edge_bias
        As `anemoi_gt.edge_attention` takes them; attributes of this rank's edges.
    **options
        `scale`, `dropout_p` and `config` of `anemoi_gt.edge_attention`, and by edges `dropout_seed`. With dropout, ranks whose
        generators are in the same state, or whose seed is the same, drop what one device would.

    Returns
    -------
    Tensor, shape of query

    Raises
    ------
    ValueError
        When rows are not those of this rank's nodes and edges, or were started on another shard; before anything travels, unless it
        was started.
    """
    _check_own(shard, query, x_src, edge_attr, edge_weight)
    key, value = key_value(_started(shard, x_src).joined())
    out, _ = edge_attention(query, key, value, shard.graph, edge_attr, edge_weight, edge_bias, **options)
    return out


def attend_overlapped(
    shard: EdgeShard,
    query: Tensor,
    x_src: Tensor | PendingExchange,
    key_value: KeyValue,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    edge_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend over interior edges while the halo travels, then over the boundary. Collective, and so is its backward, which overlaps too.

    Parameters and result are those of `attend_after_exchange`.
    """
    _check_own(shard, query, x_src, edge_attr, edge_weight)
    if options.get("dropout_p", 0.0) > 0 and options.get("dropout_seed") is None:
        options["dropout_seed"] = draw_seed(query.device)  # one for both calls: then they drop what one call would
    pending = _started(shard, x_src)
    inner, outer = _split_edges(shard, edge_attr, edge_weight)
    key, value = key_value(pending.own)
    out, lse = edge_attention(query, key, value, shard.interior, inner, edge_weight, edge_bias, **options)

    key, value = key_value(pending.wait())
    rows = shard.boundary_dst
    query = query.index_select(-3, rows)
    part = edge_attention(query, key, value, shard.boundary, outer, edge_weight, edge_bias, **options)
    merged, _ = merge(out.index_select(-3, rows), lse.index_select(-2, rows), *part)
    return out.index_copy(-3, rows, merged)


def attend_by_heads(
    shard: HeadShard,
    query: Tensor,
    x_src: Tensor,
    key_value: KeyValue,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    edge_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend over all edges for this rank's heads. Collective, and so is its backward.

    Parameters and result are those of `attend_after_exchange`. Attributes travel raw, D numbers an edge.

    Raises
    ------
    ValueError
        As `attend_after_exchange`; for rows on their way; when there are more ranks than heads; for embedded edge features; for dropout on the backend
        `triton`, whose kernels count heads from 0.
    """
    if edge_attr is not None and edge_weight is None:
        raise ValueError(
            "edge_attr must come raw, [E, D] with edge_weight, under strategy 'heads': embedded features would travel as [E, H, C]"
        )
    if isinstance(x_src, PendingExchange):
        raise ValueError(
            "x_src must be rows under strategy 'heads', got PendingExchange: start_exchange is for strategy 'edges'"
        )
    _check_own(shard, query, x_src, edge_attr, edge_weight)
    count = query.shape[-2]
    heads = head_ranges(count, shard.sources.ranges.parts)
    own, channels = heads.of(shard.rank), query.shape[-1]
    where = (heads, shard.rank, shard.group_name)

    key_and_value = to_heads(torch.cat(key_value(x_src), dim=-1), shard.sources.ranges, *where)
    key, value = key_and_value.split(channels, dim=-1)
    query = to_heads(query, shard.destinations.ranges, *where)
    if edge_attr is not None:
        edge_attr = shard.attributes(edge_attr)
        torch._check(edge_attr.shape[-2] == shard.graph.num_edges)  # else torch.compile takes them for two numbers
        edge_weight = edge_weight.unflatten(0, (count, channels))[own].flatten(0, 1)
    if edge_bias is not None:
        edge_bias = edge_bias.unflatten(0, (count, channels))[own].flatten(0, 1)
    edges = edge_attr, edge_weight, edge_bias
    out, _ = attend_heads(query, key, value, shard.graph, *edges, first_head=own.start, **options)
    return to_nodes(out, shard.destinations.ranges, *where)


def _started(shard: EdgeShard, x_src: Tensor | PendingExchange) -> PendingExchange:
    return x_src if isinstance(x_src, PendingExchange) else start_exchange(shard, x_src)


def _check_own(
    shard: GraphShard,
    query: Tensor,
    x_src: Tensor | PendingExchange,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
) -> None:
    """Raise unless all rows are this rank's: of others they would be taken for its own, or leave the ranks waiting for each other."""
    check_own_rows("query", query, -3, shard.destinations.ranges.counts[shard.rank], "destinations")
    own = x_src.own if isinstance(x_src, PendingExchange) else x_src
    if isinstance(x_src, PendingExchange) and x_src.exchange is not shard.halo:
        raise ValueError(
            "x_src must be started on the shard that attends, got rows started on another: start_exchange(shard, x_src)"
        )
    check_own_rows("x_src", own, -2, shard.sources.ranges.counts[shard.rank], "sources")
    if edge_attr is not None:
        check_own_rows("edge_attr", edge_attr, _dim_of_edges(edge_weight), shard.edges.shape[0], "edges")


def _dim_of_edges(edge_weight: Tensor | None) -> int:
    """Where attributes count edges: raw they have one dimension behind it, embedded two."""
    return -3 if edge_weight is None else -2


def _split_edges(shard: EdgeShard, edge_attr: Tensor | None, edge_weight: Tensor | None) -> tuple[Tensor | None, ...]:
    """Attributes of interior and of boundary edges."""
    if edge_attr is None:
        return None, None
    dim = _dim_of_edges(edge_weight)
    return edge_attr.index_select(dim, shard.parted).split([shard.interior.num_edges, shard.boundary.num_edges], dim)
