"""Launches of the edge attention kernels: grids, tiles, scratch memory. One function per kernel, tensors in and out.

Beside each stands its launch for given sizes, which is worked out once: a graph is static, and its sizes come again at
every step. What is kept holds numbers and compiled kernels, no tensors. A launch may be given a tile, to measure it;
None is the one that is chosen for the sizes. A problem makes the launches, so that others trace them for an export, or
list them.

Where all destinations have the same few in-edges, `attend_rows` and `differentiate_rows` launch the kernels of
`anemoi_gt.kernels.fixed_degree`, which need fewer scratch arrays and compute A, B and d edge_attr in passing.

Where a node may have more than twice `Sizes.dst_segment` or `src_segment` edges, their kernels have programs for the
segments of such hubs too, and `join` writes the hubs' rows (`anemoi_gt.kernels.join_segments`).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from anemoi_gt.kernels import backward, edge_features, fixed_degree, forward, join_segments
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.dropout import drop_threshold
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.triton_backend import tiles
from anemoi_gt.ops.triton_backend.device import interpreted
from anemoi_gt.ops.triton_backend.problem import PACKED_DTYPES, Problem, Sizes
from anemoi_gt.ops.triton_backend.tiles import ContractionTile, RowTile

LOG2_E = 1.4426950408889634
PROGRAMS = 528  # that share the sum of dW, all heads; fixed, so that its order never changes
KEPT = 128  # launches of each kernel that are kept: graphs times layers of different sizes in use at a time


def has_fixed_degree(sizes: Sizes) -> bool:
    """Return whether the fixed-degree kernels serve: a small known in-degree, raw attributes, rows that fit."""
    return sizes.fixed_in_degree > 0 and not sizes.embedded and _fixed_degree_tile(sizes) is not None


def dst_segment(sizes: Sizes) -> int:
    """Return the edges of a segment of hubs in the row kernels over destinations; 0 where they need none."""
    return 0 if has_fixed_degree(sizes) else sizes.dst_segment


@lru_cache(KEPT)
def _fixed_degree_tile(sizes: Sizes) -> RowTile | None:
    return tiles.fixed_degree_tile(sizes.over_destinations, sizes.fixed_in_degree)


def forward_tile(sizes: Sizes) -> RowTile:
    """Return the tile of `attend_rows`.

    Measured with a fixed in-degree, decoder at C = 64 / 32: 1.02, 0.60 ms; with packed pairs 1.10, 0.61.
    """
    if has_fixed_degree(sizes):
        return _fixed_degree_tile(sizes)
    return tiles.forward_tile(sizes.over_destinations)


def destination_tile(sizes: Sizes) -> RowTile:
    """Return the tile of `differentiate_rows`.

    Measured with a fixed in-degree, decoder at C = 64 / 32: 1.26, 0.98 ms; with packed pairs 1.31, 0.88.
    """
    if has_fixed_degree(sizes):
        tile = _fixed_degree_tile(sizes)
        packed = sizes.pairs_possible and tile.heads * tile.channels < tiles.ROW_ELEMENTS * tile.num_warps
        return replace(tile, pairs=packed)
    return tiles.destination_tile(sizes.over_destinations)


def source_tile(sizes: Sizes) -> RowTile:
    """Return the tile of `differentiate_sources`."""
    return tiles.source_tile(sizes.over_sources)


def _constants(sizes: Sizes, **more) -> dict:
    """Return what all kernels on edge attributes are compiled for, and `more`."""
    constants = {"H": sizes.heads, "C": sizes.channels, "D": sizes.edge_dim, "BIAS": sizes.bias}
    constants |= {"ATTRIBUTES": sizes.columns, "PRECISION": _precision(sizes.dtype), "INT64": sizes.needs_int64}
    return constants | more


def _precision(dtype: torch.dtype) -> str:
    """Return the precision to which operands of matrix products are rounded; 16-bit elements stay as they are.

    tf32 holds them exactly, but not every AMD GPU has it. The interpreter knows no bfloat16 products.
    """
    if dtype == torch.float32 or torch.version.hip:
        return "ieee"
    return "tf32" if interpreted() else PACKED_DTYPES[dtype]


def _row_launch(kernel, sizes: Sizes, tile: RowTile, scale: dict[str, float]) -> Launch:
    """Return the launch of a kernel over destinations that gathers rows."""
    scalars = {"num_dst": sizes.num_dst, "num_src": sizes.num_src, "num_edges": sizes.num_edges}
    scalars |= {"attr_stride": sizes.attr_stride, **scale, "drop_below": drop_threshold(sizes.dropout_p)}
    scalars["survivor"] = 1.0 / (1.0 - sizes.dropout_p) if sizes.dropout_p < 1.0 else 0.0
    constants = _constants(sizes, HEADS=tile.heads, CHANNELS=tile.channels, num_warps=tile.num_warps)
    constants["PACKED"] = PACKED_DTYPES[sizes.dtype] if tile.pairs else None
    if "STRIDE" in kernel.arg_names:  # of the backward pass
        constants["STRIDE"] = sizes.gradient_stride
    if has_fixed_degree(sizes):
        del constants["PRECISION"]
        return Launch(kernel, (sizes.destinations,), scalars, constants | {"K": tile.unroll})
    constants |= {"EMBEDDED": sizes.embedded, "UNROLL": tile.unroll, "SEGMENT": sizes.dst_segment}
    constants["EDGES"] = tiles.attribute_edges(sizes.degree(sizes.num_dst))
    blocks = sizes.batch * sizes.blocks(sizes.dst_segment)
    if kernel is backward.edge_attention_bwd_dst_hub:
        programs = blocks
        constants = {name: each for name, each in constants.items() if name in (*kernel.arg_names, "num_warps")}
    else:
        programs = blocks + sizes.destinations
    return Launch(kernel, (programs, -(-sizes.heads // tile.heads)), scalars, constants)


def _segment_rows(sizes: Sizes, like: Tensor | None, width: int, segment: int | None = None) -> Tensor | None:
    """Return memory for a float32 result of each segment [B, blocks, H, width]; None without segments or `like`.

    Segments are those of destinations, or `segment` edges each.
    """
    segment = sizes.dst_segment if segment is None else segment
    if like is None or not segment:
        return None
    return like.new_empty((sizes.batch * sizes.blocks(segment), sizes.heads, width), dtype=torch.float32)


@lru_cache(KEPT)
def join_launch(sizes: Sizes, segment: int, num_nodes: int, width: int, others: int = 0, stride: int = 0) -> Launch:
    """Return the launch of `join` for rows [H, width] of `num_nodes` nodes, and rows [H, others] if any."""
    scalars = {"num_nodes": num_nodes, "num_edges": sizes.num_edges}
    columns = min(tiles.next_power_of_two(width), tiles.JOINED_COLUMNS)
    constants = {"H": sizes.heads, "WIDTH": width, "OTHERS": others, "COLUMNS": columns, "num_warps": 1}
    constants |= {"SEGMENTS": tiles.JOINED // columns, "STATISTICS": tiles.STATISTICS}
    constants |= {"INT64": sizes.needs_int64, "SEGMENT": segment, "STRIDE": stride or sizes.heads * width}
    return Launch(join_segments.join_segments, (sizes.batch * sizes.blocks(segment),), scalars, constants)


def join(
    problem: Problem, pointers: Tensor, segment: int, parts: list[Tensor | None], results: tuple[Tensor | None, ...],
    statistics: dict[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Join `parts` [B * blocks, H, ..] of the segments of hubs into the hubs' rows of `results` [B, N, H, ..].

    Those that are None are left out. With `statistics`, the tensors by name, lse and inv_denominator are made from
    those of the segments, which also weigh their parts.
    """
    found = [(part, result) for part, result in zip(parts, results, strict=True) if part is not None]
    if not found:
        return
    (part, rows), (other_part, others) = (*found, (None, None))[:2]
    widths = (part.shape[-1], 0 if other_part is None else other_part.shape[-1])
    absent = dict.fromkeys(("segment_max", "segment_denominator", "lse", "inv_denominator"))
    problem.launch(join_launch, segment, pointers.shape[0] - 1, *widths, *_stride(rows))(
        segment_rows=part, segment_others=other_part, pointers=pointers, rows=rows, others=others,
        **(statistics or absent),
    )  # fmt: skip


def _contraction_launch(kernel, sizes: Sizes, tile: ContractionTile, grid: tuple[int, ...], **more) -> Launch:
    """Return the launch of a contraction of rows with W, over all destinations."""
    constants = _constants(sizes, CHANNELS=tile.channels, NODES=tile.nodes, num_warps=tile.num_warps, **more)
    return Launch(kernel, grid, {"num_nodes": sizes.destinations}, constants | {"num_stages": tile.num_stages})


def _node_map_launch(kernel, sizes: Sizes, tile: ContractionTile, stride: int) -> Launch:
    """Return the launch of a contraction that maps the rows of each node."""
    grid = (-(-sizes.destinations // (tile.nodes * tile.tiles)) * sizes.heads,)
    return _contraction_launch(kernel, sizes, tile, grid, TILES=tile.tiles, STRIDE=stride)


def _stride(rows: Tensor) -> tuple[int, ...]:
    """Return the stride of the nodes in rows [.., H, C], of the batch where an entry has one node; () if contiguous."""
    return () if rows.is_contiguous() else (rows.stride(-3 if rows.shape[-3] > 1 else 0),)


@lru_cache(KEPT)
def project_launch(sizes: Sizes, tile: ContractionTile | None = None, stride: int = 0) -> Launch:
    """Return the launch of `project`."""
    tile = tile or tiles.project_tile(sizes.channels, sizes.attributes)
    return _node_map_launch(edge_features.project, sizes, tile, stride)


def project(problem: Problem, rows: Tensor) -> Tensor:
    """Return W^T of rows [B, N_dst, H, C]: [B, N_dst, H, columns]."""
    projected = rows.new_empty((*rows.shape[:-1], problem.sizes.columns), dtype=scratch_dtype(rows.dtype))
    _, _, _, _, edge_weight, edge_bias = problem.operands
    launch = problem.launch(project_launch, None, *_stride(rows))
    launch(rows=rows, edge_weight=edge_weight, edge_bias=edge_bias, projected=projected)
    return projected


@lru_cache(KEPT)
def embed_launch(sizes: Sizes, tile: ContractionTile | None = None, stride: int = 0) -> Launch:
    """Return the launch of `embed`."""
    tile = tile or tiles.embed_tile(sizes.channels, sizes.attributes)
    return _node_map_launch(edge_features.embed, sizes, tile, stride)


def embed(problem: Problem, sums: Tensor, rows: Tensor, skip: Tensor | None = None) -> None:
    """Add W sums [B, N_dst, H, columns], and `skip` like rows, to rows [B, N_dst, H, C]."""
    _, _, _, _, edge_weight, edge_bias = problem.operands
    launch = problem.launch(embed_launch, None, *_stride(rows))
    launch(sums=sums, edge_weight=edge_weight, edge_bias=edge_bias, skip=skip, rows=rows)


@lru_cache(KEPT)
def forward_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """Return the launch of `attend_rows`."""
    kernel = fixed_degree.edge_attention_fixed_degree_fwd if has_fixed_degree(sizes) else forward.edge_attention_fwd
    return _row_launch(kernel, sizes, tile or forward_tile(sizes), {"score_scale": sizes.scale * LOG2_E})


def attend(problem: Problem) -> tuple[Tensor | None, ...]:
    """Attend, and return out, lse, and what `Saved` holds."""
    query, edge_weight = problem.operands.query, problem.operands.edge_weight
    projected = None if edge_weight is None else project(problem, query)
    out, lse, inv_denominator, exp_scores, attr_sums = attend_rows(problem, projected)
    if attr_sums is not None:
        embed(problem, attr_sums, out)
    return out, lse, inv_denominator, exp_scores, projected


def attend_rows(problem: Problem, projected: Tensor | None) -> tuple[Tensor, ...]:
    """Attend over destinations: return out without W A, lse, inv_denominator, exp_scores and A."""
    query, sizes = problem.operands.query, problem.sizes
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    inv_denominator = lse.new_empty(problem.inverse_shape)
    exp_scores = lse.new_empty((sizes.batch, sizes.num_edges, sizes.heads))
    attr_sums = None if projected is None else torch.empty_like(projected)
    tensors = problem.destination_tensors | {"projected": projected, "out": out, "lse": lse, "attr_sums": attr_sums}
    if not has_fixed_degree(sizes):
        tensors["scores"] = torch.empty_like(exp_scores)
        parts = [_segment_rows(sizes, *rows) for rows in ((out, sizes.channels), (attr_sums, sizes.columns))]
        statistics = {name: _segment_rows(sizes, lse, 1) for name in ("segment_max", "segment_denominator")}
        tensors |= {"segment_out": parts[0], "segment_attr_sums": parts[1], **statistics}
    problem.launch(forward_launch)(**tensors, inv_denominator=inv_denominator, exp_scores=exp_scores)
    if dst_segment(sizes):
        statistics |= {"lse": lse, "inv_denominator": inv_denominator}
        join(problem, problem.index.colptr, sizes.dst_segment, parts, (out, attr_sums), statistics)
    return out, lse, inv_denominator, exp_scores, attr_sums


@dataclass(frozen=True)
class Saved:
    """Tensors that the forward pass saves for the backward pass."""

    inv_denominator: Tensor  # [B, N_dst, H], or with hubs as `Problem.inverse_shape`
    exp_scores: Tensor  # [B, E, H]
    projected: Tensor | None  # [B, N_dst, H, columns]


@lru_cache(KEPT)
def destination_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """Return the launch of `differentiate_rows`."""
    fixed = has_fixed_degree(sizes)
    kernel = fixed_degree.edge_attention_fixed_degree_bwd_dst if fixed else backward.edge_attention_bwd_dst
    return _row_launch(kernel, sizes, tile or destination_tile(sizes), {"scale": sizes.scale})


def differentiate_rows(
    problem: Problem, saved: Saved, projected_grad: Tensor | None, grad_out: Tensor, grad_lse: Tensor | None,
    dquery: Tensor | None, dedge_attr: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """Differentiate over destinations: fill dquery (without W B) and the gradient of embedded features.

    Return p_ds [B, E, 2, H], m p and ds of each edge, and sums: A and B of each destination where the in-degree is
    fixed and attributes are raw, else None. With sums, dedge_attr is filled too.
    """
    sizes, fixed = problem.sizes, has_fixed_degree(problem.sizes)
    p_ds = grad_out.new_empty((sizes.batch, sizes.num_edges, 2, sizes.heads), dtype=scratch_dtype(grad_out.dtype))
    tensors = problem.destination_tensors | {"inv_denominator": saved.inv_denominator, "exp_scores": saved.exp_scores}
    tensors |= {"projected_grad": projected_grad, "grad_out": grad_out, "grad_lse": grad_lse}
    tensors |= {"dquery": dquery, "p_ds": p_ds}
    sums = None
    if fixed:
        if projected_grad is not None:
            sums = torch.empty_like(projected_grad), torch.empty_like(projected_grad)
        tensors |= dict(zip(("attr_sums", "dscore_sums"), sums or (None, None), strict=True))
        tensors |= {"projected": None if dedge_attr is None else saved.projected, "dedge_attr": dedge_attr}
    else:
        tensors |= {name: torch.empty_like(saved.exp_scores) for name in ("attr_dp", "dp")}
        tensors["dedge_attr"] = dedge_attr if sizes.embedded else None
        parts = [_segment_rows(sizes, p_ds, 1) for _ in range(2)]
        tensors |= {"segment_p": parts[0], "segment_p_dp": parts[1]}
    problem.launch(destination_launch)(**tensors)
    if dst_segment(sizes):
        hub_sums = [part.new_empty((sizes.destinations, sizes.heads, 1)) for part in parts]
        join(problem, problem.index.colptr, sizes.dst_segment, parts, hub_sums)
        tensors |= {"p_sum": hub_sums[0], "p_dp_sum": hub_sums[1]}
        part = _segment_rows(sizes, dquery, sizes.channels)
        read = {name: tensors[name] for name in hub_destination_launch(sizes).tensors if name in tensors}
        problem.launch(hub_destination_launch)(**read, segment_dquery=part)
        join(problem, problem.index.colptr, sizes.dst_segment, [part], (dquery,))
    return p_ds, sums


@lru_cache(KEPT)
def hub_destination_launch(sizes: Sizes) -> Launch:
    """Return the launch of the second half of `differentiate_rows` over the segments of hubs."""
    return _row_launch(backward.edge_attention_bwd_dst_hub, sizes, destination_tile(sizes), {"scale": sizes.scale})


@lru_cache(KEPT)
def source_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """Return the launch of `differentiate_sources`."""
    tile = tile or source_tile(sizes)
    programs = sizes.blocks(sizes.src_segment) + -(-sizes.num_src // tile.nodes)
    grid = (sizes.batch * programs, -(-sizes.heads // tile.heads))
    scalars = {"num_dst": sizes.num_dst, "num_src": sizes.num_src, "num_edges": sizes.num_edges}
    constants = {"H": sizes.heads, "C": sizes.channels, "HEADS": tile.heads, "CHANNELS": tile.channels}
    constants |= {"NODES": tile.nodes, "UNROLL": tile.unroll, "INT64": sizes.needs_int64, "num_warps": tile.num_warps}
    constants |= {"SEGMENT": sizes.src_segment, "STRIDE": sizes.gradient_stride}
    return Launch(backward.edge_attention_bwd_src, grid, scalars, constants)


def differentiate_sources(
    problem: Problem, p_ds: Tensor, grad_out: Tensor, dkey: Tensor | None, dvalue: Tensor | None
) -> None:
    """Differentiate over sources: fill dkey and dvalue."""
    sizes, index = problem.sizes, problem.index
    parts = [_segment_rows(sizes, rows, sizes.channels, sizes.src_segment) for rows in (dkey, dvalue)]
    problem.launch(source_launch)(
        query=problem.operands.query, grad_out=grad_out, p_ds=p_ds, rowptr=index.rowptr, col=index.col,
        csr_to_csc=index.csr_to_csc, dkey=dkey, dvalue=dvalue, segment_dkey=parts[0], segment_dvalue=parts[1],
    )  # fmt: skip
    join(problem, index.rowptr, sizes.src_segment, parts, (dkey, dvalue))


@lru_cache(KEPT)
def attribute_launch(sizes: Sizes) -> Launch:
    """Return the launch of `differentiate_attributes`."""
    scalars = {"num_dst": sizes.num_dst, "num_edges": sizes.num_edges, "attr_stride": sizes.attr_stride}
    constants = _constants(sizes, HEADS=tiles.attribute_heads(sizes.heads), EDGES=tiles.PRODUCT)
    constants |= {"num_warps": tiles.attribute_warps(sizes.heads, sizes.attributes), "SEGMENT": sizes.dst_segment}
    del constants["C"]
    programs = sizes.destinations + sizes.batch * sizes.blocks(sizes.dst_segment)
    return Launch(edge_features.attribute_bwd, (programs,), scalars, constants)


def differentiate_attributes(
    problem: Problem, p_ds: Tensor, saved: Saved, projected_grad: Tensor, dedge_attr: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return A and B of each destination [B, N_dst, H, columns]; fill dedge_attr [B, E, D]."""
    sizes, sums = problem.sizes, (torch.empty_like(projected_grad), torch.empty_like(projected_grad))
    parts = [_segment_rows(sizes, rows, sizes.columns) for rows in sums]
    problem.launch(attribute_launch)(
        p_ds=p_ds, edge_attr=problem.operands.edge_attr, projected=saved.projected, projected_grad=projected_grad,
        colptr=problem.index.colptr, perm=problem.index.perm, attr_sums=sums[0], dscore_sums=sums[1],
        dedge_attr=dedge_attr, segment_attr_sums=parts[0], segment_dscore_sums=parts[1],
    )  # fmt: skip
    join(problem, problem.index.colptr, sizes.dst_segment, parts, sums)
    return sums


@lru_cache(KEPT)
def weight_launch(sizes: Sizes, tile: ContractionTile | None = None) -> Launch:
    """Return the launch that writes the partial sums of `differentiate_weight`, grid[0] of all heads."""
    tile = tile or tiles.weight_tile(sizes.channels, sizes.attributes)
    partials = max(1, min(-(-PROGRAMS // sizes.heads), -(-sizes.destinations // tile.nodes)))
    grid = (partials * sizes.heads, -(-sizes.channels // tile.channels))
    return _contraction_launch(edge_features.weight_bwd, sizes, tile, grid, STRIDE=sizes.gradient_stride)


def partial_sums(sizes: Sizes) -> int:
    """Return the number of partial sums that `weight_launch` writes for each head."""
    return weight_launch(sizes).grid[0] // sizes.heads


@lru_cache(KEPT)
def weight_sum_launch(sizes: Sizes) -> Launch:
    """Return the launch that adds the partial sums up."""
    constants = {"H": sizes.heads, "C": sizes.channels, "D": sizes.edge_dim, "BIAS": sizes.bias}
    rows = max(1, tiles.SUMMED // sizes.columns)
    grid = (-(-sizes.heads * sizes.channels // rows),)
    constants |= {"ATTRIBUTES": sizes.columns, "PARTS": tiles.PARTS, "ROWS": rows, "num_warps": 4}
    return Launch(edge_features.weight_sum, grid, {"num_parts": partial_sums(sizes)}, constants)


def differentiate_weight(
    problem: Problem, grad_out: Tensor, attr_sums: Tensor, dscore_sums: Tensor, needs: tuple[bool, bool],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of W [H * C, D] and of the bias [H * C] that `needs` asks for, in their dtype or `dtype`."""
    sizes, (query, _, _, _, edge_weight, edge_bias) = problem.sizes, problem.operands
    shape = (partial_sums(sizes), sizes.heads * sizes.channels, sizes.attributes)
    partial = grad_out.new_empty(shape, dtype=torch.float32)
    problem.launch(weight_launch)(
        query=query, grad_out=grad_out, attr_sums=attr_sums, dscore_sums=dscore_sums, partial=partial
    )
    dweight, dbias = (
        torch.empty_like(each, dtype=dtype) if need else None
        for each, need in zip((edge_weight, edge_bias), needs, strict=True)
    )
    problem.launch(weight_sum_launch)(partial=partial, dweight=dweight, dbias=dbias)
    return dweight, dbias
