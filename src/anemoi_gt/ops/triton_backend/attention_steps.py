"""Steps of edge attention on a plan: grids, tiles, scratch memory; one function per kernel.

    attend                      forward: project, rows over destinations, embed
    gradients                   backward: rows over destinations, attributes, dW, rows over sources

Where all destinations have the same small in-degree, the kernels of
`anemoi_gt.kernels.fixed_degree` compute the passes over destinations: they need fewer scratch
arrays and compute A, B and d edge_attr in passing.

Where a node may have more than twice `Sizes.dst_segment` or `src_segment` edges, the row kernels
have programs for the segments of such hubs too, and `join` writes the hubs' rows
(`anemoi_gt.kernels.join_segments`).

A launch accepts a tile, for measurements; None uses the heuristic of `tiles`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anemoi_gt import kernels
from anemoi_gt.kernels.launch import Launch
from anemoi_gt.ops.dropout import drop_threshold
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.tensors import AttentionOperands, IndexTensors
from anemoi_gt.ops.triton_backend import tiles
from anemoi_gt.ops.triton_backend.device import interpreted
from anemoi_gt.ops.triton_backend.plan import Buffer, PlanBuilder
from anemoi_gt.ops.triton_backend.sizes import PACKED_DTYPES, Kept, Sizes
from anemoi_gt.ops.triton_backend.tiles import ContractionTile, RowTile

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionCall:
    """One call of edge attention on a plan: sizes, and the buffers of its tensors."""

    builder: PlanBuilder
    sizes: Sizes
    operands: AttentionOperands[Buffer]
    index: IndexTensors[Buffer]
    seed: Buffer | None = None

    def destination_buffers(self) -> dict[str, Buffer | None]:
        """Return the operands of all row kernels over destinations, by argument name."""
        buffers = {
            name: getattr(self.operands, name) for name in ("query", "key", "value", "edge_attr")
        }
        for name in ("colptr", "row", "perm", "global_edge_id"):
            buffers[name] = getattr(self.index, name)
        buffers["seed"] = self.seed
        return buffers


def attend(call: AttentionCall, kept: Kept[Buffer], out: Buffer) -> Buffer:
    """Attend into `out`, like query; fill `kept` and return lse."""
    if call.operands.edge_weight is not None:
        project(call, call.operands.query, kept.projected)
    lse, attr_sums = attend_rows(call, kept, out)
    if attr_sums is not None:
        embed(call, attr_sums, out)
    return lse


def attend_and_add(call: AttentionCall, kept: Kept[Buffer], scratch: Buffer, rows: Buffer) -> None:
    """Add the attention to rows [.., N_dst, H, C]; fill `kept`.

    `scratch` is contiguous, like rows.
    """
    project(call, call.operands.query, kept.projected)
    _, attr_sums = attend_rows(call, kept, scratch)
    assert attr_sums is not None  # attributes of a sub-layer are raw
    embed(call, attr_sums, rows, skip=scratch)


def gradients(
    call: AttentionCall,
    kept: Kept[Buffer],
    grad_out: Buffer,
    grad_lse: Buffer | None,
    needs: AttentionOperands[bool],
    into: AttentionOperands[Buffer | None] | None = None,
) -> AttentionOperands[Buffer | None]:
    """Differentiate; return the gradients that `needs` asks for, None for others.

    `into` has the buffers to write, rows with the row stride of `Sizes`. Without it they are
    allocated like the operands. The gradient of edge_attr always is.
    """
    builder = call.builder
    sizes = call.sizes
    is_raw = call.operands.edge_weight is not None
    if into is None:
        into = AttentionOperands(
            *(
                builder.empty_like(operand) if need and operand is not None else None
                for operand, need in zip(call.operands, needs, strict=True)
            )
        )
    edge_attr = call.operands.edge_attr
    dattr = None
    if edge_attr is not None and needs.edge_attr:
        if sizes.shares_attributes:  # summed over the batch below
            dattr = builder.empty((sizes.batch, *edge_attr.shape[1:]), torch.float32)
        else:
            dattr = builder.empty_like(edge_attr)

    projected_grad = project(call, grad_out) if is_raw else None
    p_ds, sums = differentiate_rows(
        call, kept, projected_grad, grad_out, grad_lse, into.query, dattr
    )
    needs_sums = needs.query or needs.edge_attr or needs.edge_weight or needs.edge_bias
    if projected_grad is not None and needs_sums:
        if sums is None:
            sums = differentiate_attributes(call, p_ds, kept, projected_grad, dattr)
        if into.query is not None:
            embed(call, sums[1], into.query)
        if needs.edge_weight or needs.edge_bias:
            differentiate_weight(call, grad_out, *sums, into.edge_weight, into.edge_bias)
    if needs.key or needs.value:
        differentiate_sources(call, p_ds, grad_out, into.key, into.value)
    if edge_attr is not None and dattr is not None and sizes.shares_attributes:
        per_entry = dattr
        dattr = builder.empty_like(edge_attr)
        builder.compute(_sum_over_batch, per_entry, dattr)
    return into._replace(edge_attr=dattr)


def _sum_over_batch(entries: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(entries.sum(0, keepdim=True))


def has_fixed_degree(sizes: Sizes) -> bool:
    """Return whether fixed-degree kernels run: raw attributes, and a tile for this in-degree."""
    return _fixed_degree_tile(sizes) is not None


def _fixed_degree_tile(sizes: Sizes) -> RowTile | None:
    """Return the tile of the fixed-degree kernels, None where they do not run."""
    if not sizes.fixed_in_degree or sizes.embedded:
        return None
    return tiles.fixed_degree_tile(sizes.over_destinations, sizes.fixed_in_degree)


def forward_tile(sizes: Sizes) -> RowTile:
    """Return the tile of `attend_rows`."""
    tile = _fixed_degree_tile(sizes)
    if tile is not None:
        return tile
    return tiles.forward_tile(sizes.over_destinations)


def destination_tile(sizes: Sizes) -> RowTile:
    """Return the tile of `differentiate_rows`."""
    tile = _fixed_degree_tile(sizes)
    if tile is not None:
        packed = (
            sizes.pairs_possible
            and tile.heads * tile.channels < tiles.ROW_ELEMENTS * tile.num_warps
        )
        return replace(tile, pairs=packed)
    return tiles.destination_tile(sizes.over_destinations)


def _attribute_constants(sizes: Sizes) -> dict:
    """Return the constants of all kernels on edge attributes."""
    return {
        "H": sizes.heads,
        "C": sizes.channels,
        "D": sizes.edge_dim,
        "BIAS": sizes.bias,
        "ATTRIBUTES": sizes.columns,
        "PRECISION": _precision(sizes.dtype),
        "INT64": sizes.needs_int64,
    }


def _precision(dtype: torch.dtype) -> str:
    """Return the precision of matrix product operands; 16-bit elements are not rounded.

    tf32 holds them exactly, but not every AMD GPU has it. The interpreter has no bfloat16 products.
    """
    if dtype == torch.float32 or torch.version.hip:
        return "ieee"
    return "tf32" if interpreted() else PACKED_DTYPES[dtype]


def _row_launch(kernel: Any, sizes: Sizes, tile: RowTile, scale: dict[str, float]) -> Launch:
    """Return the launch of a kernel over destinations that gathers rows."""
    scalars = {
        "num_dst": sizes.num_dst,
        "num_src": sizes.num_src,
        "num_edges": sizes.num_edges,
        "attr_stride": sizes.attr_stride,
        **scale,
        "drop_below": drop_threshold(sizes.dropout_p),
        "survivor": 1.0 / (1.0 - sizes.dropout_p) if sizes.dropout_p < 1.0 else 0.0,
    }
    constants = _attribute_constants(sizes)
    constants |= {"HEADS": tile.heads, "CHANNELS": tile.channels, "num_warps": tile.num_warps}
    constants["PACKED"] = PACKED_DTYPES[sizes.dtype] if tile.pairs else None
    constants["STRIDE"] = sizes.row_stride
    if has_fixed_degree(sizes):
        del constants["PRECISION"]
        return Launch(kernel, (sizes.destinations,), scalars, constants | {"K": tile.unroll})
    constants |= {"EMBEDDED": sizes.embedded, "UNROLL": tile.unroll, "SEGMENT": sizes.dst_segment}
    constants["EDGES"] = tiles.attribute_edges(sizes.degree(sizes.num_dst))
    spans = sizes.batch * sizes.spans(sizes.dst_segment)
    programs = spans + sizes.destinations
    if kernel is kernels.backward.edge_attention_bwd_dst_hub:
        programs = spans
        constants = {
            n: value for n, value in constants.items() if n in (*kernel.arg_names, "num_warps")
        }
    return Launch(kernel, (programs, -(-sizes.heads // tile.heads)), scalars, constants)


def _segment_rows(
    call: AttentionCall, like: Buffer | None, width: int, segment: int
) -> Buffer | None:
    """Return float32 memory [B * spans, H, width] of segments, or None without them or `like`."""
    if like is None or not segment:
        return None
    sizes = call.sizes
    return call.builder.empty(
        (sizes.batch * sizes.spans(segment), sizes.heads, width), torch.float32
    )


def _row_stride(rows: Buffer) -> int:
    """Return the elements between two node rows [.., N, H, C]; for one node, between entries."""
    if rows.is_contiguous:
        return rows.shape[-2] * rows.shape[-1]
    if len(rows.shape) == 4 and rows.shape[1] == 1:
        return rows.stride[0]
    return rows.stride[-3]


def join(
    call: AttentionCall,
    pointers: Buffer,
    segment: int,
    of_segments: Sequence[Buffer | None],
    results: Sequence[Buffer | None],
    statistics: Mapping[str, Buffer | None] | None = None,
) -> None:
    """Join `of_segments` [B * spans, H, ..] into hub rows of `results` [B, N, H, ..].

    Tensors that are None are left out. With `statistics`, the buffers by name, lse and
    inv_denominator are made from the segments' values, which also weigh their rows.
    """
    pairs = [
        (segment_rows, rows)
        for segment_rows, rows in zip(of_segments, results, strict=True)
        if segment_rows is not None and rows is not None  # which they are joined into
    ]
    if not pairs:
        return
    segment_rows, rows = pairs[0]
    segment_others, other_rows = pairs[1] if len(pairs) > 1 else (None, None)
    sizes = call.sizes
    tuning = call.builder.tuning
    width = segment_rows.shape[-1]
    columns = min(tiles.next_power_of_two(width), tiles.JOINED_COLUMNS)
    constants = {
        "H": sizes.heads,
        "WIDTH": width,
        "OTHERS": 0 if segment_others is None else segment_others.shape[-1],
        "COLUMNS": columns,
        "SEGMENTS": tuning.joined // columns,
        "STATISTICS": tuning.statistics,
        "INT64": sizes.needs_int64,
        "SEGMENT": segment,
        "STRIDE": _row_stride(rows),
        "num_warps": 1,
    }
    scalars = {"num_nodes": pointers.shape[0] - 1, "num_edges": sizes.num_edges}
    grid = (sizes.batch * sizes.spans(segment),)
    if statistics is None:
        statistics = dict.fromkeys(("segment_max", "segment_denominator", "lse", "inv_denominator"))
    call.builder.launch(
        Launch(kernels.join_segments.join_segments, grid, scalars, constants),
        segment_rows=segment_rows,
        segment_others=segment_others,
        pointers=pointers,
        rows=rows,
        others=other_rows,
        **statistics,
    )


def _contraction_launch(
    kernel: Any, sizes: Sizes, tile: ContractionTile, grid: tuple[int, ...], **options: Any
) -> Launch:
    """Return the launch of a contraction of rows with W, over all destinations."""
    constants = _attribute_constants(sizes)
    constants |= {"CHANNELS": tile.channels, "NODES": tile.nodes, "num_warps": tile.num_warps}
    constants |= {"num_stages": tile.num_stages, "STRIDE": sizes.row_stride, **options}
    return Launch(kernel, grid, {"num_nodes": sizes.destinations}, constants)


def _node_map_launch(kernel: Any, sizes: Sizes, tile: ContractionTile) -> Launch:
    """Return the launch of a contraction that maps the rows of each node."""
    grid = (-(-sizes.destinations // (tile.nodes * tile.tiles)) * sizes.heads,)
    return _contraction_launch(kernel, sizes, tile, grid, TILES=tile.tiles)


def project_launch(sizes: Sizes, tile: ContractionTile | None = None) -> Launch:
    """Return the launch of `project`."""
    tile = tile or tiles.project_tile(sizes.channels, sizes.attributes)
    return _node_map_launch(kernels.edge_projection.project, sizes, tile)


def project(call: AttentionCall, rows: Buffer, projected: Buffer | None = None) -> Buffer:
    """Write W^T of rows [B, N_dst, H, C] into `projected` [B, N_dst, H, columns]; return it.

    Rows lie `Sizes.row_stride` elements apart, as in `embed`.
    """
    if projected is None:
        projected = call.builder.empty(
            (*rows.shape[:-1], call.sizes.columns), scratch_dtype(rows.dtype)
        )
    call.builder.launch(
        project_launch(call.sizes),
        rows=rows,
        edge_weight=call.operands.edge_weight,
        edge_bias=call.operands.edge_bias,
        projected=projected,
    )
    return projected


def embed_launch(sizes: Sizes, tile: ContractionTile | None = None) -> Launch:
    """Return the launch of `embed`."""
    tile = tile or tiles.embed_tile(sizes.channels, sizes.attributes)
    return _node_map_launch(kernels.edge_projection.embed, sizes, tile)


def embed(call: AttentionCall, sums: Buffer, rows: Buffer, skip: Buffer | None = None) -> None:
    """Add W sums [B, N_dst, H, columns], and `skip` like rows, to rows [B, N_dst, H, C]."""
    call.builder.launch(
        embed_launch(call.sizes),
        sums=sums,
        edge_weight=call.operands.edge_weight,
        edge_bias=call.operands.edge_bias,
        skip=skip,
        rows=rows,
    )


def forward_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """Return the launch of `attend_rows`."""
    kernel = (
        kernels.fixed_degree.edge_attention_fixed_degree_fwd
        if has_fixed_degree(sizes)
        else kernels.forward.edge_attention_fwd
    )
    return _row_launch(
        kernel, sizes, tile or forward_tile(sizes), {"score_scale": sizes.scale * LOG2_E}
    )


def attend_rows(
    call: AttentionCall, kept: Kept[Buffer], out: Buffer
) -> tuple[Buffer, Buffer | None]:
    """Attend over destinations, into `out` without W A; fill `kept`, return lse and A."""
    builder = call.builder
    sizes = call.sizes
    inv_denominator, exp_scores, projected = kept
    lse = builder.empty(out.shape[:-1], torch.float32)
    attr_sums = None if projected is None else builder.empty_like(projected)
    buffers = call.destination_buffers()
    buffers |= {"projected": projected, "out": out, "lse": lse, "attr_sums": attr_sums}
    buffers |= {"inv_denominator": inv_denominator, "exp_scores": exp_scores}
    if has_fixed_degree(sizes):
        builder.launch(forward_launch(sizes), **buffers)
        return lse, attr_sums

    segment = sizes.dst_segment
    buffers["scores"] = builder.empty_like(exp_scores)
    segment_out = _segment_rows(call, out, sizes.channels, segment)
    segment_attr_sums = _segment_rows(call, attr_sums, sizes.columns, segment)
    statistics = {
        "segment_max": _segment_rows(call, lse, 1, segment),
        "segment_denominator": _segment_rows(call, lse, 1, segment),
    }
    buffers |= {"segment_out": segment_out, "segment_attr_sums": segment_attr_sums, **statistics}
    builder.launch(forward_launch(sizes), **buffers)
    if segment:
        statistics |= {"lse": lse, "inv_denominator": inv_denominator}
        of_segments = (segment_out, segment_attr_sums)
        join(call, call.index.colptr, segment, of_segments, (out, attr_sums), statistics)
    return lse, attr_sums


def destination_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """Return the launch of `differentiate_rows`."""
    kernel = kernels.backward.edge_attention_bwd_dst
    if has_fixed_degree(sizes):
        kernel = kernels.fixed_degree.edge_attention_fixed_degree_bwd_dst
    return _row_launch(kernel, sizes, tile or destination_tile(sizes), {"scale": sizes.scale})


def differentiate_rows(
    call: AttentionCall,
    kept: Kept[Buffer],
    projected_grad: Buffer | None,
    grad_out: Buffer,
    grad_lse: Buffer | None,
    dquery: Buffer | None,
    dedge_attr: Buffer | None,
) -> tuple[Buffer, tuple[Buffer, Buffer] | None]:
    """Differentiate over destinations: fill dquery (without W B) and embedded dx.

    Return p_ds [B, E, 2, H], m p and ds of each edge, and sums: A and B of each destination where
    the in-degree is fixed and attributes are raw, else None. With sums, dedge_attr is filled too.
    """
    builder = call.builder
    sizes = call.sizes
    p_ds = builder.empty((sizes.batch, sizes.num_edges, 2, sizes.heads), scratch_dtype(sizes.dtype))
    buffers = call.destination_buffers()
    buffers |= {"inv_denominator": kept.inv_denominator, "exp_scores": kept.exp_scores}
    buffers |= {"projected_grad": projected_grad, "grad_out": grad_out, "grad_lse": grad_lse}
    buffers |= {"dquery": dquery, "p_ds": p_ds}
    if has_fixed_degree(sizes):
        sums = None
        if projected_grad is not None:
            sums = (builder.empty_like(projected_grad), builder.empty_like(projected_grad))
        attr_sums, dscore_sums = sums or (None, None)
        projected = None if dedge_attr is None else kept.projected
        buffers |= {"attr_sums": attr_sums, "dscore_sums": dscore_sums}
        buffers |= {"projected": projected, "dedge_attr": dedge_attr}
        builder.launch(destination_launch(sizes), **buffers)
        return p_ds, sums

    segment = sizes.dst_segment
    buffers["attr_dp"] = builder.empty_like(kept.exp_scores)
    buffers["dp"] = builder.empty_like(kept.exp_scores)
    buffers["dedge_attr"] = dedge_attr if sizes.embedded else None
    segment_p = _segment_rows(call, p_ds, 1, segment)
    segment_p_dp = _segment_rows(call, p_ds, 1, segment)
    buffers |= {"segment_p": segment_p, "segment_p_dp": segment_p_dp}
    builder.launch(destination_launch(sizes), **buffers)
    if segment:
        p_sum = builder.empty((sizes.destinations, sizes.heads, 1), torch.float32)
        p_dp_sum = builder.empty_like(p_sum)
        join(call, call.index.colptr, segment, (segment_p, segment_p_dp), (p_sum, p_dp_sum))
        buffers |= {"p_sum": p_sum, "p_dp_sum": p_dp_sum}
        segment_dquery = _segment_rows(call, dquery, sizes.channels, segment)
        buffers["segment_dquery"] = segment_dquery
        # the second half, over the segments of hubs
        kernel = kernels.backward.edge_attention_bwd_dst_hub
        hub_launch = _row_launch(kernel, sizes, destination_tile(sizes), {"scale": sizes.scale})
        builder.launch(hub_launch, **{name: buffers[name] for name in hub_launch.tensors})
        join(call, call.index.colptr, segment, [segment_dquery], [dquery])
    return p_ds, None


def source_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """Return the launch of `differentiate_sources`."""
    tile = tile or tiles.source_tile(sizes.over_sources)
    programs = sizes.spans(sizes.src_segment) + -(-sizes.num_src // tile.nodes)
    grid = (sizes.batch * programs, -(-sizes.heads // tile.heads))
    scalars = {"num_dst": sizes.num_dst, "num_src": sizes.num_src, "num_edges": sizes.num_edges}
    constants = {
        "H": sizes.heads,
        "C": sizes.channels,
        "HEADS": tile.heads,
        "CHANNELS": tile.channels,
        "NODES": tile.nodes,
        "UNROLL": tile.unroll,
        "INT64": sizes.needs_int64,
        "SEGMENT": sizes.src_segment,
        "STRIDE": sizes.row_stride,
        "num_warps": tile.num_warps,
    }
    return Launch(kernels.backward.edge_attention_bwd_src, grid, scalars, constants)


def differentiate_sources(
    call: AttentionCall, p_ds: Buffer, grad_out: Buffer, dkey: Buffer | None, dvalue: Buffer | None
) -> None:
    """Differentiate over sources: fill dkey and dvalue."""
    sizes = call.sizes
    index = call.index
    assert index.rowptr is not None  # what needs gradients has the reverse structure
    segment_dkey = _segment_rows(call, dkey, sizes.channels, sizes.src_segment)
    segment_dvalue = _segment_rows(call, dvalue, sizes.channels, sizes.src_segment)
    call.builder.launch(
        source_launch(sizes),
        query=call.operands.query,
        grad_out=grad_out,
        p_ds=p_ds,
        rowptr=index.rowptr,
        col=index.col,
        csr_to_csc=index.csr_to_csc,
        dkey=dkey,
        dvalue=dvalue,
        segment_dkey=segment_dkey,
        segment_dvalue=segment_dvalue,
    )
    join(call, index.rowptr, sizes.src_segment, (segment_dkey, segment_dvalue), (dkey, dvalue))


def attribute_launch(sizes: Sizes) -> Launch:
    """Return the launch of `differentiate_attributes`."""
    scalars = {
        "num_dst": sizes.num_dst,
        "num_edges": sizes.num_edges,
        "attr_stride": sizes.attr_stride,
    }
    constants = _attribute_constants(sizes)
    constants |= {"HEADS": tiles.attribute_heads(sizes.heads), "EDGES": tiles.PRODUCT}
    constants |= {
        "num_warps": tiles.attribute_warps(sizes.heads, sizes.attributes),
        "SEGMENT": sizes.dst_segment,
    }
    del constants["C"]
    programs = sizes.destinations + sizes.batch * sizes.spans(sizes.dst_segment)
    return Launch(kernels.edge_projection.attribute_bwd, (programs,), scalars, constants)


def differentiate_attributes(
    call: AttentionCall,
    p_ds: Buffer,
    kept: Kept[Buffer],
    projected_grad: Buffer,
    dedge_attr: Buffer | None,
) -> tuple[Buffer, Buffer]:
    """Return A and B of each destination [B, N_dst, H, columns]; fill dedge_attr [B, E, D]."""
    sizes = call.sizes
    index = call.index
    attr_sums = call.builder.empty_like(projected_grad)
    dscore_sums = call.builder.empty_like(projected_grad)
    segment_attr_sums = _segment_rows(call, attr_sums, sizes.columns, sizes.dst_segment)
    segment_dscore_sums = _segment_rows(call, dscore_sums, sizes.columns, sizes.dst_segment)
    call.builder.launch(
        attribute_launch(sizes),
        p_ds=p_ds,
        edge_attr=call.operands.edge_attr,
        projected=kept.projected,
        projected_grad=projected_grad,
        colptr=index.colptr,
        perm=index.perm,
        attr_sums=attr_sums,
        dscore_sums=dscore_sums,
        dedge_attr=dedge_attr,
        segment_attr_sums=segment_attr_sums,
        segment_dscore_sums=segment_dscore_sums,
    )
    of_segments = (segment_attr_sums, segment_dscore_sums)
    join(call, index.colptr, sizes.dst_segment, of_segments, (attr_sums, dscore_sums))
    return attr_sums, dscore_sums


def weight_launch(sizes: Sizes, tile: ContractionTile | None = None, *, programs: int) -> Launch:
    """Return the launch of `differentiate_weight` for partial sums, grid[0] of all heads."""
    tile = tile or tiles.weight_tile(sizes.channels, sizes.attributes)
    partials = max(1, min(-(-programs // sizes.heads), -(-sizes.destinations // tile.nodes)))
    grid = (partials * sizes.heads, -(-sizes.channels // tile.channels))
    return _contraction_launch(kernels.edge_projection.weight_bwd, sizes, tile, grid)


def weight_sum_launch(sizes: Sizes, num_parts: int) -> Launch:
    """Return the launch that adds up `num_parts` partial sums of each head."""
    rows = max(1, tiles.SUMMED // sizes.columns)
    grid = (-(-sizes.heads * sizes.channels // rows),)
    constants = {
        "H": sizes.heads,
        "C": sizes.channels,
        "D": sizes.edge_dim,
        "BIAS": sizes.bias,
        "ATTRIBUTES": sizes.columns,
        "PARTS": tiles.PARTS,
        "ROWS": rows,
        "num_warps": 4,
    }
    return Launch(kernels.edge_projection.weight_sum, grid, {"num_parts": num_parts}, constants)


def differentiate_weight(
    call: AttentionCall,
    grad_out: Buffer,
    attr_sums: Buffer,
    dscore_sums: Buffer,
    dweight: Buffer | None,
    dbias: Buffer | None,
) -> None:
    """Fill the gradients of W [H * C, D] and of the bias [H * C]."""
    builder = call.builder
    sizes = call.sizes
    launch = weight_launch(sizes, programs=builder.tuning.programs)
    num_parts = launch.grid[0] // sizes.heads
    partial = builder.empty(
        (num_parts, sizes.heads * sizes.channels, sizes.attributes), torch.float32
    )
    builder.launch(
        launch,
        query=call.operands.query,
        grad_out=grad_out,
        attr_sums=attr_sums,
        dscore_sums=dscore_sums,
        partial=partial,
    )
    builder.launch(
        weight_sum_launch(sizes, num_parts), partial=partial, dweight=dweight, dbias=dbias
    )
