"""Inference on graphs that are large for the device's memory. The only place that computes layers a block of rows at a time.

Without gradients nothing has to be kept, so what belongs to one node is made for some nodes at a time:

    key, value  of all sources, block by block
    for each piece of destinations:
        query   of the piece, block by block
        out     attention of the piece, in one call
        y       of the piece, block by block: embedding, residuals, feed-forward network, fields

Of all nodes there are key and value, of a piece query and out: no embedded or normed features, no hidden layers. Blocks lie
at multiples of their size and pieces end where blocks end, so every product of matrices is the same call on the same rows
whatever the number of pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.block import (
    GraphTransformerBaseBlock,
    GraphTransformerMapperBlock,
    GraphTransformerProcessorBlock,
)
from anemoi_gt.nn.conv import GraphTransformerConv
from anemoi_gt.nn.input_validation import check_conditions, check_features, check_rows, check_sides, check_structure
from anemoi_gt.nn.mapper import GraphTransformerBackwardMapper, GraphTransformerBaseMapper
from anemoi_gt.nn.norm import apply_norm
from anemoi_gt.nn.processor import GraphTransformerProcessor
from anemoi_gt.ops import edge_attention
from anemoi_gt.option_checks import check_integer

ROWS = 16384
OF_HEADS, OF_FEATURES = -3, -2  # dimension of the nodes in [.., N, H, C] and in [.., N, F]


@dataclass(frozen=True)
class _Stages:
    """What a layer does with rows of nodes, before and after its attention; `cond` is None or as many rows."""

    sides: Callable[..., tuple[Tensor, Tensor]]  # x as the layer takes it to x_src, x_dst, checked as it does
    conditions: Callable[..., tuple[Tensor | None, Tensor | None]]  # cond as the layer takes it to cond_src, cond_dst
    sources: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]  # x_src, cond to key, value
    query: Callable[[Tensor, Tensor | None], Tensor]  # x_dst, cond to query
    finish: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x_dst, out, cond to the result
    edges: Callable[..., tuple[Tensor | None, ...]]  # graph, attributes to attributes, weight, bias
    config: AttentionConfig


class ChunkedInference:
    """Compute layers on one graph without gradients, in pieces of its destinations.

    Parameters
    ----------
    graph : GraphStructure
        For more than one piece its edges come sorted by destination: `perm` is None.
    num_chunks : int
        Pieces of destinations; more need less memory. Attention reads keys and values of all sources in any case.
    rows : int
        Nodes whose features are computed at a time.

    Raises
    ------
    ValueError
        When graph is no structure, rows is below 1, num_chunks not in 1 .. number of blocks of so many rows, or the edges are not sorted.

    Notes
    -----
    The result is the same bit by bit for any number of pieces, provided that a piece is attended to as the whole is. The
    backend `triton` chooses its tiles by the mean numbers of edges of a destination and of a source, and a piece has all
    sources and fewer edges: it rounds alike where the tiles are the same, as they are for encoder and decoder of O1280 in up
    to 64 pieces; `anemoi_gt.explain` tells them. The backend `torch` rounds alike when `rows` is a multiple of 8192 and a
    head has more channels than an edge has attributes. Else results agree to rounding.

    Examples
    --------
    >>> from anemoi_gt.nn import GraphTransformerBackwardMapper
    >>> decoder = GraphTransformerBackwardMapper(
    ...     in_channels_src=16, in_channels_dst=4, out_channels_dst=3, num_channels=16, num_heads=2, edge_dim=3).eval()
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 4]]), (2, 5))
    >>> run = ChunkedInference(graph, num_chunks=2, rows=2)
    >>> run(decoder, (torch.randn(2, 16), torch.randn(5, 4)), torch.randn(3, 3)).shape
    torch.Size([5, 3])
    """

    def __init__(self, graph: GraphStructure, num_chunks: int = 1, *, rows: int = ROWS):
        check_structure(graph)
        check_integer("rows", rows)
        check_integer("num_chunks", num_chunks, least=None)
        blocks = max(1, -(-graph.num_dst // rows))
        if not 1 <= num_chunks <= blocks:
            raise ValueError(
                f"num_chunks must be in 1 .. {blocks}, the blocks of {rows} rows of {graph.num_dst} destinations, "
                f"got {num_chunks}; lower rows for more"
            )
        if num_chunks > 1 and graph.perm is not None:
            raise ValueError("graph must hold its edges sorted by destination: build it from a sorted edge_index")
        self.graph, self.rows = graph, rows
        ends = [min(rows * (blocks * i // num_chunks), graph.num_dst) for i in range(num_chunks + 1)]
        pieces = [slice(*bounds) for bounds in pairwise(ends)]
        self.pieces = [(slice(None), slice(None), graph)] if num_chunks == 1 else [_cut(graph, dst) for dst in pieces]

    @torch.no_grad()
    def __call__(
        self,
        layer: nn.Module,
        x: Tensor | tuple[Tensor, Tensor],
        edge_attr: Tensor | None = None,
        *,
        cond: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute a layer.

        Parameters
        ----------
        layer : GraphTransformerConv, a block, a mapper, or GraphTransformerProcessor
            In eval mode, or without dropout.
        x : Tensor or (Tensor, Tensor)
            What `layer` takes: [N, F] or [B, N, F], or a pair of sources and destinations.
        edge_attr : Tensor [E, D] or [B, E, D], optional
            Raw attributes in the order of the graph's edges.
        cond : Tensor or (Tensor, Tensor), optional
            What `layer` takes as `cond`.

        Returns
        -------
        Tensor [N_dst, F] or [B, N_dst, F]
            What `layer` gives the destinations, without a gradient.

        Raises
        ------
        ValueError
            For another kind of layer, one that drops attention or updates its sources, for what the layer refuses, and for
            rows that are not those of the graph.
        """
        if isinstance(layer, GraphTransformerProcessor):
            for block in layer.proc:
                x = self(block, x, edge_attr, cond=cond)
            return x
        stages = _stages(layer)
        x_src, x_dst = stages.sides(x)
        cond_src, cond_dst = stages.conditions(cond)
        sizes = self.graph.num_src, self.graph.num_dst, self.graph.num_edges
        check_rows(sizes, x_src=x_src, x_dst=x_dst, edge_attr=edge_attr, cond_src=cond_src, cond_dst=cond_dst)
        key, value = self._by_rows(
            lambda rows: stages.sources(_take(x_src, rows), _take(cond_src, rows)), sizes[0], OF_HEADS
        )
        attr, weight, bias = stages.edges(self.graph, edge_attr)
        results = []
        for dst, edges, graph in self.pieces:
            x_piece, cond_piece = _take(x_dst, dst), _take(cond_dst, dst)
            num_rows = x_piece.shape[-2]
            (query,) = self._by_rows(
                lambda rows, x=x_piece, cond=cond_piece: (stages.query(_take(x, rows), _take(cond, rows)),),
                num_rows,
                OF_HEADS,
            )
            part = attr if attr is None or graph is self.graph else attr[..., edges, :].clone()  # as `_cut` does
            out, _ = edge_attention(query, key, value, graph, part, weight, bias, config=stages.config)
            del query  # as large as the piece's result
            results += self._by_rows(
                lambda rows, x=x_piece, out=out, cond=cond_piece: (
                    stages.finish(_take(x, rows), out[..., rows, :, :], _take(cond, rows)),
                ),
                num_rows,
                OF_FEATURES,
            )
            del out
        return torch.cat(results, dim=-2) if len(results) > 1 else results[0]

    def _by_rows(
        self, function: Callable[[slice], tuple[Tensor, ...]], num_rows: int, nodes: int
    ) -> tuple[Tensor, ...]:
        """Lay side by side what a function gives for each block of so many rows, along the dimension of the nodes."""
        whole = None
        for begin in range(0, max(num_rows, 1), self.rows):
            block = slice(begin, min(begin + self.rows, num_rows))
            results = function(block)
            if block == slice(0, num_rows):
                return results
            if whole is None:
                whole = tuple(_with_rows(result, num_rows, nodes) for result in results)
            for target, result in zip(whole, results, strict=True):
                target.narrow(nodes, begin, block.stop - begin).copy_(result)
        return whole


def _cut(graph: GraphStructure, dst: slice) -> tuple[slice, slice, GraphStructure]:
    """Destinations, edges and structure of a piece; its sources are those of the graph."""
    colptr = graph.colptr[dst.start : dst.stop + 1]
    edges, order = slice(int(colptr[0]), int(colptr[-1])), graph.dst_schedule
    if order is not None:
        order = order[(order >= dst.start) & (order < dst.stop)] - dst.start
    row = graph.row[edges].clone()  # slices lie at any address, and kernels are compiled apart for odd ones
    return (
        dst,
        edges,
        GraphStructure(
            colptr - colptr[0], row, graph.sources, dst_schedule=order, fixed_in_degree=graph.fixed_in_degree
        ),
    )


def _take(rows: Tensor | None, block: slice) -> Tensor | None:
    """Some of the rows [.., N, F]; one row is every node's, and none is none."""
    return rows if rows is None or rows.shape[-2] == 1 else rows[..., block, :]


def _for_both(cond: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The condition of sources and destinations where they are the same nodes."""
    return cond, cond


def _with_rows(like: Tensor, num_rows: int, nodes: int) -> Tensor:
    """Memory for as many rows as there are, each as in `like`."""
    size = list(like.shape)
    size[nodes] = num_rows
    return like.new_empty(size)


def _stages(layer: nn.Module) -> _Stages:
    kinds = {
        GraphTransformerConv: _stages_of_conv,
        GraphTransformerBaseMapper: _stages_of_mapper,
        GraphTransformerBaseBlock: _stages_of_block,
    }
    make = next((make for kind, make in kinds.items() if isinstance(layer, kind)), None)
    if make is None:
        names = ", ".join(kind.__name__ for kind in (*kinds, GraphTransformerProcessor))
        raise ValueError(f"layer must be one of {names}, got {type(layer).__name__}")
    inner = layer.proc if isinstance(layer, GraphTransformerBaseMapper) else layer
    if layer.training and inner.dropout > 0:
        raise ValueError(f"layer must not drop attention in inference, call eval() first, got dropout={inner.dropout}")
    return make(layer)


def _stages_of_conv(conv: GraphTransformerConv) -> _Stages:
    def conditions(cond):
        if cond is not None:
            raise ValueError(f"cond must be None, for GraphTransformerConv has no norms, got {type(cond).__name__}")
        return None, None

    def sources(x, cond):
        return conv._split_heads(conv.lin_key(x)), conv._split_heads(conv.lin_value(x))

    def edges(graph, attr):
        graph, attr = conv._edges(graph, attr, (graph.num_src, graph.num_dst))
        return attr, conv._edge_weight(attr), None

    return _Stages(
        sides=conv._sides,
        conditions=conditions,
        sources=sources,
        query=lambda x, cond: conv._split_heads(conv.lin_query(x)),
        finish=lambda x, out, cond: conv._add_skip(conv._join_heads(out), x),
        edges=edges,
        config=conv.config,
    )


def _stages_of_block(block: GraphTransformerBaseBlock) -> _Stages:
    if getattr(block, "update_src_nodes", False):
        raise ValueError("update_src_nodes must be False here, where destinations alone are computed, got True")
    is_mapper = isinstance(block, GraphTransformerMapperBlock)
    if not is_mapper and not isinstance(block, GraphTransformerProcessorBlock):
        raise ValueError(f"layer must be a processor or mapper block, got {type(block).__name__}")
    norm_src = block.layer_norm_attention_src if is_mapper else block.layer_norm_attention

    def sides(x):
        if is_mapper:
            return check_sides(x, (block.channels, block.channels), like=block.lin_query.weight)
        check_features("x", x, block.channels, like=block.lin_query.weight)
        return x, x

    def finish(x, out, cond):
        x = x + block.combine(out, block.lin_self(block.normed(block.layer_norm_attention, x, cond)))
        return x + block.node_dst_mlp(apply_norm(block.layer_norm_mlp_dst, x, cond))

    return _Stages(
        sides=sides,
        conditions=check_conditions if is_mapper else _for_both,
        sources=lambda x, cond: block.key_value(block.normed(norm_src, x, cond)),
        query=lambda x, cond: block.make_query(block.normed(block.layer_norm_attention, x, cond)),
        finish=finish,
        edges=lambda graph, attr: block.edge_operands(attr),
        config=block.config,
    )


def _stages_of_mapper(mapper: GraphTransformerBaseMapper) -> _Stages:
    inner = _stages_of_block(mapper.proc)
    extract = mapper.node_data_extractor if isinstance(mapper, GraphTransformerBackwardMapper) else nn.Identity()
    return _Stages(
        sides=mapper.check_sides,
        conditions=inner.conditions,
        sources=lambda x, cond: inner.sources(mapper.emb_nodes_src(x), cond),
        query=lambda x, cond: inner.query(mapper.emb_nodes_dst(x), cond),
        finish=lambda x, out, cond: extract(inner.finish(mapper.emb_nodes_dst(x), out, cond)),
        edges=inner.edges,
        config=inner.config,
    )
