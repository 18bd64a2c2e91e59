"""Launches of the kernels on rows: norms, activations, edges of graph networks.

Each function returns a `Launch` from sizes and options only. Call it with tensors by the kernel's
argument names; None leaves one out. Outputs may alias inputs where the kernel's docstring says
so.

`programs` is the number of rows of `partial` [programs, sums], and `first_sum` the first column
that a launch writes, if `is_first`, or adds to. A backward kernel runs without rows too, because it
writes sums.
"""

from typing import Any, NamedTuple

from anemoi_gt import kernels
from anemoi_gt.kernels.launch import Launch
from anemoi_gt.ops.tensors import NormOptions
from anemoi_gt.ops.triton_backend import tiles
from anemoi_gt.ops.triton_backend.tiles import NodeTile


def norm_forward(
    num_rows: int,
    features: int,
    norm: NormOptions,
    *,
    batch: int = 1,
    out_entry_rows: int | None = None,
) -> Launch:
    """Return the launch of `norm_fwd`: x, scale, shift, modulation -> out.

    Parameters
    ----------
    num_rows : int
        Rows of x, of all batch entries.
    features : int
        A program holds them in registers.
    norm : NormOptions
    batch : int
        Batch entries, which have the same number of rows.
    out_entry_rows : int or None
        Rows of `out` in each batch entry; the first num_rows / batch are written. None: no others.
    """
    tile = tiles.norm_forward_tile(features)
    entries = _entries(num_rows, batch, out_entry_rows)
    scalars = {
        "num_rows": num_rows,
        "rows_per_entry": entries.rows,
        "entry_rows": entries.stride,
        "eps": float(norm.eps),
    }
    constants = _norm_constants(features, norm, tile)
    constants["ENTRIES"] = entries.are_apart
    constants["INT64"] = needs_int64(entries.last_row + tile.rows, 2 * features)
    grid = (-(-num_rows // tile.rows),)
    return Launch(kernels.norms_and_activations.norm_fwd, grid, scalars, constants)


def norm_backward(
    num_rows: int,
    features: int,
    norm: NormOptions,
    *,
    programs: int,
    sums: int,
    first_sum: int,
    is_first: bool = False,
    total: bool = False,
    batch: int = 1,
    normed_entry_rows: int | None = None,
) -> Launch:
    """Return the launch of `norm_bwd`.

    Its tensors are x, grad_normed, grad_total, scale, shift, modulation -> dx, normed, grad_scale,
    partial. The columns of `partial` from `first_sum` on are `features` sums of dscale, the same
    number of dshift, and with `total` of grad_total.

    Parameters
    ----------
    num_rows, features, norm, batch
        As in `norm_forward`.
    programs : int
        Rows of `partial`.
    sums : int
        Columns of `partial`.
    first_sum : int
    is_first : bool
    total : bool
        Whether to sum grad_total too.
    normed_entry_rows : int or None
        Rows of both `normed` and `grad_normed` in each batch entry, as of `out` in `norm_forward`.
    """
    tile = tiles.norm_backward_tile(features)
    entries = _entries(num_rows, batch, normed_entry_rows)
    scalars = {
        "num_rows": num_rows,
        "rows_per_entry": entries.rows,
        "entry_rows": entries.stride,
        "first_sum": first_sum,
        "eps": float(norm.eps),
    }
    constants = _norm_constants(features, norm, tile) | {
        "ENTRIES": entries.are_apart,
        "SUMS": sums,
        "IS_FIRST": is_first,
        "TOTAL": total,
        "INT64": needs_int64(entries.last_row + 2 * programs * tile.rows, 2 * features),
    }
    return Launch(kernels.norms_and_activations.norm_bwd, (programs,), scalars, constants)


def head_norm_forward(
    num_rows: int, heads: int, channels: int, norm: NormOptions, *, stride: int
) -> Launch:
    """Return the launch of `head_norm_fwd`: x, scale -> out, with `stride` between nodes."""
    tile = tiles.head_norm_tile(channels)
    num_pairs = num_rows * heads
    scalars = {"num_pairs": num_pairs, "eps": float(norm.eps)}
    constants = _head_norm_constants(heads, channels, norm, stride, tile)
    constants["INT64"] = _pairs_need_int64(num_pairs + tile.rows, heads, stride)
    grid = (-(-num_pairs // tile.rows),)
    return Launch(kernels.norms_and_activations.head_norm_fwd, grid, scalars, constants)


def head_norm_backward(
    num_rows: int,
    heads: int,
    channels: int,
    norm: NormOptions,
    *,
    stride: int,
    programs: int,
    sums: int,
    first_sum: int,
) -> Launch:
    """Return the launch of `head_norm_bwd`: x, grad_normed, scale -> dx, partial.

    `stride` elements lie between nodes; dx may take the place of grad_normed. The columns of
    `partial` from `first_sum` on are `channels` sums of dscale; without a scale, `sums` is 0.
    """
    tile = tiles.head_norm_tile(channels)
    num_pairs = num_rows * heads
    last_pair = num_pairs + 2 * programs * tile.rows
    scalars = {"num_pairs": num_pairs, "first_sum": first_sum, "eps": float(norm.eps)}
    constants = _head_norm_constants(heads, channels, norm, stride, tile)
    constants["SUMS"] = sums
    constants["INT64"] = _pairs_need_int64(last_pair, heads, stride)
    return Launch(kernels.norms_and_activations.head_norm_bwd, (programs,), scalars, constants)


def activation_forward(num_rows: int, features: int, activation: str, *, gated: bool) -> Launch:
    """Return the launch of `activation_fwd`: hidden -> out [num_rows, features].

    `hidden` has the same shape; if `gated`, twice the columns: the gate, which `activation` is
    applied to, then the value.
    """
    tile = tiles.activation_tile(features)
    width = 2 * features if gated else features
    constants = _activation_constants(features, activation, tile, gated=gated)
    constants["INT64"] = needs_int64(num_rows + tile.rows, width)
    grid = (-(-num_rows // tile.rows), -(-features // tile.columns))
    scalars = {"num_rows": num_rows}
    return Launch(kernels.norms_and_activations.activation_fwd, grid, scalars, constants)


def activation_backward(
    num_rows: int,
    features: int,
    activation: str,
    *,
    gated: bool,
    programs: int,
    sums: int,
    first_sum: int,
    is_first: bool = False,
) -> Launch:
    """Return the launch of `activation_bwd`.

    Its tensors are hidden, grad_activated -> activated, grad_hidden, partial. The sums of the
    columns of grad_hidden are the columns of `partial` from `first_sum` on.
    """
    tile_of = tiles.gate_backward_tile if gated else tiles.activation_tile
    tile = tile_of(features)
    width = 2 * features if gated else features
    scalars = {"num_rows": num_rows, "first_sum": first_sum}
    constants = _activation_constants(features, activation, tile, gated=gated) | {
        "SUMS": sums,
        "IS_FIRST": is_first,
        "INT64": needs_int64(num_rows + 2 * programs * tile.rows, width),
    }
    grid = (programs, -(-features // tile.columns))
    return Launch(kernels.norms_and_activations.activation_bwd, grid, scalars, constants)


def edge_ends(num_dst: int, num_edges: int) -> Launch:
    """Return the launch of `edge_ends`: colptr, row, perm -> dst, src [num_edges]."""
    scalars = {"num_dst": num_dst, "num_edges": num_edges, "steps": num_dst.bit_length()}
    constants = {"EDGES": tiles.ENDS, "INT64": num_edges + tiles.ENDS >= 2**31, "num_warps": 4}
    return Launch(kernels.interaction.edge_ends, (-(-num_edges // tiles.ENDS),), scalars, constants)


def gather_activation(
    num_rows: int,
    features: int,
    activation: str,
    *,
    gated: bool,
    first_row: int,
    num_edges: int,
    num_dst: int,
    num_src: int,
    batch: int,
) -> Launch:
    """Return the launch of `gather_activation`: p, at_dst, at_src, dst, src -> p, out.

    `num_rows` rows of edges begin at row `first_row` of [batch * num_edges]; `features` are the
    columns of `out`.
    """
    tile = tiles.activation_tile(features)
    width = 2 * features if gated else features
    scalars = {
        "num_rows": num_rows,
        "first_row": first_row,
        "num_edges": num_edges,
        "num_dst": num_dst,
        "num_src": num_src,
    }
    last_row = num_rows + tile.rows
    most_rows = max(last_row, batch * num_dst, batch * num_src)
    constants = _activation_constants(features, activation, tile, gated=gated)
    constants["ENTRIES"] = batch > 1
    constants["INT64"] = needs_int64(most_rows, width) or first_row + last_row >= 2**31
    grid = (-(-num_rows // tile.rows), -(-features // tile.columns))
    return Launch(kernels.interaction.gather_activation, grid, scalars, constants)


def residual_norm_forward(num_rows: int, features: int, norm: NormOptions) -> Launch:
    """Return the launch of `residual_norm_fwd`: r, x, scale, shift -> y."""
    tile = tiles.norm_forward_tile(features)
    scalars = {"num_rows": num_rows, "eps": float(norm.eps)}
    constants = _norm_constants(features, norm, tile)
    constants["INT64"] = needs_int64(num_rows + tile.rows, features)
    grid = (-(-num_rows // tile.rows),)
    return Launch(kernels.interaction.residual_norm_fwd, grid, scalars, constants)


def residual_norm_backward(
    num_rows: int,
    features: int,
    norm: NormOptions,
    *,
    programs: int,
    sums: int,
    first_sum: int,
    is_first: bool,
) -> Launch:
    """Return the launch of `residual_norm_bwd`: r, grad, scale -> dr, dx, partial.

    The columns of `partial` from `first_sum` on are `features` sums of dscale, the same number of
    dshift, and of dr.
    """
    tile = tiles.residual_norm_tile(features)
    scalars = {"num_rows": num_rows, "first_sum": first_sum, "eps": float(norm.eps)}
    constants = _norm_constants(features, norm, tile) | {
        "DR_STRIDE": features,
        "SUMS": sums,
        "IS_FIRST": is_first,
        "INT64": needs_int64(num_rows + 2 * programs * tile.rows, features),
    }
    return Launch(kernels.interaction.residual_norm_bwd, (programs,), scalars, constants)


def segment_sum(
    features: int, *, num_nodes: int, num_edges: int, batch: int, segment: int
) -> Launch:
    """Return the launch of `segment_sum`: x, pointers, order, perm -> out, segments.

    `segment` is the number of edges of a hub's segment, 0 without hubs.
    """
    edges, columns, num_warps = tiles.segment_sum_tile(features)
    spans = -(-num_edges // segment) if segment else 0
    constants = {
        "W": features,
        "COLUMNS": columns,
        "EDGES": edges,
        "SEGMENT": segment,
        "INT64": needs_int64(batch * max(num_edges, num_nodes) + edges, features),
        "num_warps": num_warps,
    }
    grid = (batch * (spans + num_nodes), -(-features // columns))
    scalars = {"num_nodes": num_nodes, "num_edges": num_edges}
    return Launch(kernels.interaction.segment_sum, grid, scalars, constants)


def join_segment_sums(
    features: int, *, num_nodes: int, num_edges: int, batch: int, segment: int
) -> Launch:
    """Return the launch of `join_segment_sums`: segments, pointers -> out."""
    _, columns, num_warps = tiles.segment_sum_tile(features)
    spans = -(-num_edges // segment)
    constants = {
        "W": features,
        "COLUMNS": columns,
        "SEGMENTS": tiles.JOINED_SEGMENTS,
        "SEGMENT": segment,
        "INT64": needs_int64(batch * max(num_edges, num_nodes), features),
        "num_warps": num_warps,
    }
    grid = (batch * spans, -(-features // columns))
    scalars = {"num_nodes": num_nodes, "num_edges": num_edges}
    return Launch(kernels.interaction.join_segment_sums, grid, scalars, constants)


def gather_to_edges(features: int, *, num_dst: int, num_edges: int, batch: int) -> Launch:
    """Return the launch of `gather_to_edges`: x, addend, colptr, perm -> out."""
    edges, columns, num_warps = tiles.gather_tile(features)
    constants = {
        "W": features,
        "COLUMNS": columns,
        "EDGES": edges,
        "INT64": needs_int64(batch * max(num_edges, num_dst) + edges, features),
        "num_warps": num_warps,
    }
    grid = (-(-num_edges // edges), -(-features // columns), batch)
    scalars = {"num_dst": num_dst, "num_edges": num_edges, "steps": num_dst.bit_length()}
    return Launch(kernels.interaction.gather_to_edges, grid, scalars, constants)


def _norm_constants(features: int, norm: NormOptions, tile: NodeTile) -> dict[str, Any]:
    """Return the constants of all kernels that normalise rows."""
    return {
        "F": features,
        "FEATURES": tile.columns,
        "CENTRED": norm.is_centred,
        "ROWS": tile.rows,
        "num_warps": tile.num_warps,
    }


def _head_norm_constants(
    heads: int, channels: int, norm: NormOptions, stride: int, tile: NodeTile
) -> dict[str, Any]:
    """Return the constants of both kernels that normalise heads."""
    return {
        "H": heads,
        "C": channels,
        "CHANNELS": tile.columns,
        "CENTRED": norm.is_centred,
        "PAIRS": tile.rows,
        "STRIDE": stride,
        "num_warps": tile.num_warps,
    }


def _activation_constants(
    features: int, activation: str, tile: NodeTile, *, gated: bool
) -> dict[str, Any]:
    """Return the constants of all kernels that activate rows."""
    return {
        "K": features,
        "COLUMNS": tile.columns,
        "ROWS": tile.rows,
        "ACTIVATION": activation,
        "GATED": gated,
        "num_warps": tile.num_warps,
    }


class _Entries(NamedTuple):
    """Rows of batch entries in a buffer that may have more rows in each."""

    rows: int  # of an entry; at least 1, because kernels divide by it
    stride: int  # rows between the first rows of two entries
    are_apart: bool
    last_row: int  # of the buffer


def _entries(num_rows: int, batch: int, entry_rows: int | None) -> _Entries:
    rows = num_rows // batch
    stride = rows if entry_rows is None else entry_rows
    return _Entries(max(1, rows), stride, batch > 1 and stride != rows, batch * stride)


def needs_int64(rows: int, stride: int) -> bool:
    """Return whether an offset in `rows` rows can pass 2^31; `rows` includes masked rows ahead."""
    return rows * stride >= 2**31


def _pairs_need_int64(num_pairs: int, heads: int, stride: int) -> bool:
    return needs_int64(-(-num_pairs // heads) + 1, stride)
