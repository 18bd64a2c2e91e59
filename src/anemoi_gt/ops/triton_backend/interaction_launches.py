"""Launches of the kernels of graph networks, `anemoi_gt.kernels.interaction`.

Each function returns a `Launch` from sizes and options only, as in `row_launches`.
"""

from anemoi_gt.kernels.launch import Launch
from anemoi_gt.ops.tensors import NormOptions
from anemoi_gt.ops.triton_backend import tiles
from anemoi_gt.ops.triton_backend.row_launches import needs_int64


def edge_ends(num_dst: int, num_edges: int) -> Launch:
    """Return the launch of `edge_ends`: colptr, row, perm -> dst, src [num_edges]."""
    from anemoi_gt.kernels import interaction

    scalars = {"num_dst": num_dst, "num_edges": num_edges, "steps": num_dst.bit_length()}
    constants = {"EDGES": tiles.ENDS, "INT64": num_edges + tiles.ENDS >= 2**31, "num_warps": 4}
    return Launch(interaction.edge_ends, (-(-num_edges // tiles.ENDS),), scalars, constants)


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
    from anemoi_gt.kernels import interaction

    rows, columns, num_warps = tiles.activation_tile(features)
    width = 2 * features if gated else features
    scalars = {
        "num_rows": num_rows,
        "first_row": first_row,
        "num_edges": num_edges,
        "num_dst": num_dst,
        "num_src": num_src,
    }
    most_rows = max(num_rows + rows, batch * num_dst, batch * num_src)
    constants = {
        "K": features,
        "COLUMNS": columns,
        "ROWS": rows,
        "ACTIVATION": activation,
        "GATED": gated,
        "ENTRIES": batch > 1,
        "INT64": needs_int64(most_rows, width) or first_row + num_rows + rows >= 2**31,
        "num_warps": num_warps,
    }
    grid = (-(-num_rows // rows), -(-features // columns))
    return Launch(interaction.gather_activation, grid, scalars, constants)


def residual_norm_forward(num_rows: int, features: int, norm: NormOptions) -> Launch:
    """Return the launch of `residual_norm_fwd`: r, x, scale, shift -> y."""
    from anemoi_gt.kernels import interaction

    rows, columns, num_warps = tiles.norm_forward_tile(features)
    scalars = {"num_rows": num_rows, "eps": float(norm.eps)}
    constants = {
        "F": features,
        "FEATURES": columns,
        **norm.constants(),
        "ROWS": rows,
        "INT64": needs_int64(num_rows + rows, features),
        "num_warps": num_warps,
    }
    return Launch(interaction.residual_norm_fwd, (-(-num_rows // rows),), scalars, constants)


def residual_norm_backward(
    num_rows: int,
    features: int,
    norm: NormOptions,
    *,
    dr_stride: int,
    programs: int,
    sums: int,
    first_sum: int,
    is_first: bool,
) -> Launch:
    """Return the launch of `residual_norm_bwd`: r, grad, scale -> dr, dx, partial.

    Rows of dr have `dr_stride` elements, zeros behind `features`. The columns of `partial` from
    `first_sum` on are `features` sums of dscale, the same number of dshift, and of dr.
    """
    from anemoi_gt.kernels import interaction

    rows, columns, num_warps = tiles.residual_norm_tile(dr_stride)
    scalars = {"num_rows": num_rows, "first_sum": first_sum, "eps": float(norm.eps)}
    most_rows = num_rows + 2 * programs * rows
    constants = {
        "F": features,
        "FEATURES": columns,
        **norm.constants(),
        "ROWS": rows,
        "DR_STRIDE": dr_stride,
        "SUMS": sums,
        "IS_FIRST": is_first,
        "INT64": needs_int64(most_rows, dr_stride),
        "num_warps": num_warps,
    }
    return Launch(interaction.residual_norm_bwd, (programs,), scalars, constants)


def segment_sum(
    features: int, *, num_nodes: int, num_edges: int, batch: int, segment: int
) -> Launch:
    """Return the launch of `segment_sum`: x, pointers, order, perm -> out, segments.

    `segment` is the number of edges of a hub's segment, 0 without hubs.
    """
    from anemoi_gt.kernels import interaction

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
    return Launch(interaction.segment_sum, grid, scalars, constants)


def join_segment_sums(
    features: int, *, num_nodes: int, num_edges: int, batch: int, segment: int
) -> Launch:
    """Return the launch of `join_segment_sums`: segments, pointers -> out."""
    from anemoi_gt.kernels import interaction

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
    return Launch(interaction.join_segment_sums, grid, scalars, constants)


def gather_to_edges(features: int, *, num_dst: int, num_edges: int, batch: int) -> Launch:
    """Return the launch of `gather_to_edges`: x, addend, colptr, perm -> out."""
    from anemoi_gt.kernels import interaction

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
    return Launch(interaction.gather_to_edges, grid, scalars, constants)
