"""Kernels of graph networks: the edge update, and networks with a norm on their output.

    p_e = z_e + a_i + b_j          z from the edge's own row, a from its destination, b its source
    h_e = act(p_e)                 plain or gated, as in `norms_and_activations`
    y_n = x_n + norm(r_n)          r the output of a network, x the residual connection, if any
    s_i = sum of y_e over the edges e of node i

    edge_ends            i and j of each edge, in the caller's order
    gather_activation    p and h
    residual_norm_fwd    y
    residual_norm_bwd    dr from dy_n; sums of dscale, dshift and dr
    segment_sum          s, or the same of gradients, over in-edges or out-edges
    join_segment_sums    s of hubs, whose edges several programs sum
    gather_to_edges      dy_e + ds_i, with the transpose of the sum over in-edges

Edges are in the caller's order, one batch entry after the other. Pointers and `order` are as in
`anemoi_gt.graph.GraphStructure`. Edge rows are read and written once, node rows are gathered once
per edge; sums are float32 and in a fixed order. Tiles, `partial` and prefetched tiles are as in
`norms_and_activations`.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.launch import kernel_name
from anemoi_gt.kernels.norms_and_activations import (
    activate,
    load_parameter,
    norm_gradient,
    normalise,
    put_into_partial,
)
from anemoi_gt.kernels.primitives import (
    as_index,
    caller_edges,
    row_or_segment,
    segment_of_program,
)


@triton.jit
def _destination(colptr, k, inside, num_dst, steps):
    """Return the destinations of edges at positions k of the CSC order, by `steps` of bisection."""
    i = k * 0
    above = i + num_dst
    for _ in range(steps):  # colptr[i] <= k < colptr[above], until they are neighbours
        middle = (i + above) // 2
        is_left = tl.load(colptr + middle, mask=inside, other=0) <= k
        i = tl.where(is_left, middle, i)
        above = tl.where(is_left, above, middle)
    return i


@triton.jit(
    repr=kernel_name("anemoi_gt_edge_ends", "dst"),
    do_not_specialize=["num_dst", "num_edges", "steps"],
)
def edge_ends(
    colptr,  # [N_dst + 1]
    row,  # [E]
    perm,  # [E] or None
    dst,  # [E]
    src,  # [E]
    num_dst,
    num_edges,
    steps,  # of a bisection of N_dst
    EDGES: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (ceil(E / EDGES),): a program finds the ends of EDGES edges of the CSC order."""
    k = as_index(tl.program_id(0), INT64) * EDGES + tl.arange(0, EDGES)
    inside = k < num_edges
    i = _destination(colptr, k, inside, num_dst, steps)
    e = caller_edges(perm, k, inside)
    tl.store(dst + e, i.to(dst.dtype.element_ty), mask=inside)
    j = tl.load(row + k, mask=inside, other=0)
    tl.store(src + e, j.to(src.dtype.element_ty), mask=inside)


@triton.jit
def _end(ends, row, mask, num_edges, num_nodes, ENTRIES: tl.constexpr):
    """Return the rows of nodes [B * N] at the ends of edge rows [ROWS] of [B * E]."""
    if ENTRIES:
        entry = row // num_edges
        node = tl.load(ends + row - entry * num_edges, mask=mask, other=0).to(row.dtype)
        return node + entry * num_nodes
    else:
        return tl.load(ends + row, mask=mask, other=0).to(row.dtype)


@triton.jit
def _gathered(p, at_dst, at_src, at, dst_at, src_at, mask):
    total = tl.load(p + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(at_dst + dst_at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(at_src + src_at, mask=mask, other=0.0).to(tl.float32)
    return total.to(p.dtype.element_ty)


@triton.jit(
    repr=kernel_name("anemoi_gt_gather_activation", "p", "ACTIVATION", "GATED", "K"),
    do_not_specialize=["num_rows", "first_row", "num_edges", "num_dst", "num_src"],
)
def gather_activation(
    p,  # [rows, K], or [rows, 2 K] with GATED: z, which becomes p
    at_dst,  # [B * N_dst, ..] as p: a
    at_src,  # [B * N_src, ..] as p: b
    dst,  # [E]
    src,  # [E]
    out,  # [rows, K]: h
    num_rows,
    first_row,  # of these among all [B * E]
    num_edges,
    num_dst,
    num_src,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ENTRIES: tl.constexpr,  # whether there are several batch entries
    INT64: tl.constexpr,
):
    """Grid (ceil(rows / ROWS), ceil(K / COLUMNS)): a program writes a tile of p and `out`."""
    WIDTH: tl.constexpr = 2 * K if GATED else K
    row = as_index(tl.program_id(0), INT64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < num_rows
    mask = inside[:, None] & (k < K)[None, :]
    edge = first_row + row
    i = _end(dst, edge, inside, num_edges, num_dst, ENTRIES)
    j = _end(src, edge, inside, num_edges, num_src, ENTRIES)
    at = row[:, None] * WIDTH + k[None, :]
    dst_at = i[:, None] * WIDTH + k[None, :]
    src_at = j[:, None] * WIDTH + k[None, :]
    h = _gathered(p, at_dst, at_src, at, dst_at, src_at, mask)
    tl.store(p + at, h, mask=mask)
    # of the rounded p, which is what the backward pass reads
    a, _ = activate(h.to(tl.float32), ACTIVATION)
    if GATED:
        value = _gathered(p, at_dst, at_src, at + K, dst_at + K, src_at + K, mask)
        tl.store(p + at + K, value, mask=mask)
        a *= value.to(tl.float32)
    out_at = row[:, None] * K + k[None, :]
    tl.store(out + out_at, a.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    repr=kernel_name("anemoi_gt_residual_norm_fwd", "r", "F"),
    do_not_specialize=["num_rows"],
)
def residual_norm_fwd(
    r,  # [N, F]
    x,  # [N, F] or None
    scale,  # [F] or None
    shift,  # [F] or None
    y,  # [N, F]
    num_rows,
    eps,
    F: tl.constexpr,
    FEATURES: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (ceil(N / ROWS),): a program writes ROWS rows of y."""
    row = as_index(tl.program_id(0), INT64) * ROWS + tl.arange(0, ROWS)
    f = tl.arange(0, FEATURES)
    mask = (row < num_rows)[:, None] & (f < F)[None, :]
    at = row[:, None] * F + f[None, :]
    z = tl.load(r + at, mask=mask, other=0.0).to(tl.float32)
    if x is not None:
        residual = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    n, _ = normalise(z, mask, eps, F, CENTRED)
    if scale is not None:
        n = n * load_parameter(scale, f, f < F)
    if shift is not None:
        n += load_parameter(shift, f, f < F)
    if x is not None:
        n += residual
    tl.store(y + at, n.to(y.dtype.element_ty), mask=mask)


@triton.jit(
    repr=kernel_name("anemoi_gt_residual_norm_bwd", "r", "F"),
    do_not_specialize=["num_rows", "first_sum"],
)
def residual_norm_bwd(
    r,  # [rows, F]; None without a norm
    grad,  # [rows, F]: dy
    scale,  # [F] or None
    dr,  # [rows, DR_STRIDE], zeros behind F
    dx,  # [rows, F]: dy in its dtype; or None
    partial,  # [P, SUMS] float32: sums of dscale, dshift and dr
    num_rows,
    first_sum,
    eps,
    F: tl.constexpr,
    FEATURES: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    DR_STRIDE: tl.constexpr,
    SUMS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (P,): a program owns every P-th tile of ROWS rows, and these rows of all outputs."""
    start = as_index(tl.program_id(0), INT64) * ROWS
    step = tl.num_programs(0) * ROWS
    f = tl.arange(0, FEATURES)
    inside = f < F
    if scale is not None:
        w = load_parameter(scale, f, inside)
    scale_sum = tl.zeros((ROWS, FEATURES), tl.float32)
    shift_sum = tl.zeros((ROWS, FEATURES), tl.float32)
    total_sum = tl.zeros((ROWS, FEATURES), tl.float32)
    # rows are loaded one tile ahead
    row = start + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None] & inside[None, :]
    at = row[:, None] * F + f[None, :]
    if r is not None:
        next_r = tl.load(r + at, mask=mask, other=0.0)
    next_grad = tl.load(grad + at, mask=mask, other=0.0)

    for first in range(start, num_rows, step):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & inside[None, :]
        at = row[:, None] * F + f[None, :]
        dy = next_grad.to(tl.float32)
        if r is not None:
            z = next_r.to(tl.float32)

        next_row = row + step
        next_mask = (next_row < num_rows)[:, None] & inside[None, :]
        next_at = next_row[:, None] * F + f[None, :]
        if r is not None:
            next_r = tl.load(r + next_at, mask=next_mask, other=0.0)
        next_grad = tl.load(grad + next_at, mask=next_mask, other=0.0)

        d = dy
        if r is not None:
            n, inv_std = normalise(z, mask, eps, F, CENTRED)
            scale_sum += dy * n
            shift_sum += dy
            if scale is not None:
                d = dy * w
            d = norm_gradient(n, inv_std, d, mask, F, CENTRED)
        total_sum += d
        dr_at = row[:, None] * DR_STRIDE + f[None, :]
        dr_mask = (row < num_rows)[:, None] & (f < DR_STRIDE)[None, :]
        tl.store(dr + dr_at, d.to(dr.dtype.element_ty), mask=dr_mask)
        if dx is not None:
            tl.store(dx + at, dy.to(dx.dtype.element_ty), mask=mask)

    put_into_partial(partial, first_sum, f, inside, scale_sum, SUMS, IS_FIRST)
    put_into_partial(partial, first_sum + F, f, inside, shift_sum, SUMS, IS_FIRST)
    put_into_partial(partial, first_sum + 2 * F, f, inside, total_sum, SUMS, IS_FIRST)


@triton.jit(
    repr=kernel_name("anemoi_gt_segment_sum", "x", "W"),
    do_not_specialize=["num_nodes", "num_edges"],
)
def segment_sum(
    x,  # [B * E, W]
    pointers,  # [N + 1]
    order,  # [E], CSC position of each edge of a node; None: the position itself
    perm,  # [E] or None
    out,  # [B * N, W]
    segments,  # [B * spans, W] float32: sums of hubs' segments; None without hubs
    num_nodes,
    num_edges,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    EDGES: tl.constexpr,
    SEGMENT: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (B * (spans + N), ceil(W / COLUMNS)): a program sums the edges of a node or segment."""
    if segments is not None:
        b, i, begin, end, slot = row_or_segment(pointers, num_nodes, num_edges, SEGMENT, INT64)
    else:
        b = as_index(tl.program_id(0) // num_nodes, INT64)
        i = as_index(tl.program_id(0) % num_nodes, INT64)
        begin = tl.load(pointers + i).to(i.dtype)
        end = tl.load(pointers + i + 1).to(i.dtype)
        slot = i * 0 - 1
    w = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = w < W
    sums = tl.zeros((EDGES, COLUMNS), tl.float32)
    # from 0, because Triton 3.5 fails to coalesce the loads of a loop from `begin`
    for first in range(0, end - begin, EDGES):
        k = begin + first + tl.arange(0, EDGES)
        exists = k < end
        if order is not None:
            k = tl.load(order + k, mask=exists, other=0)
        e = b * num_edges + caller_edges(perm, k, exists)
        mask = exists[:, None] & inside[None, :]
        sums += tl.load(x + e[:, None] * W + w[None, :], mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(sums, axis=0)
    if segments is not None:
        tl.store(segments + slot * W + w, total, mask=inside & (slot >= 0))
    at = out + (b * num_nodes + i) * W + w
    tl.store(at, total.to(out.dtype.element_ty), mask=inside & (slot < 0))


@triton.jit(
    repr=kernel_name("anemoi_gt_join_segment_sums", "out", "W"),
    do_not_specialize=["num_nodes", "num_edges"],
)
def join_segment_sums(
    segments,  # [B * spans, W] float32
    pointers,  # [N + 1]
    out,  # [B * N, W]
    num_nodes,
    num_edges,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (B * spans, ceil(W / COLUMNS)): the program of a hub's first segment writes its sum."""
    b, i, begin, end, slot, first, count = segment_of_program(
        pointers, num_nodes, num_edges, SEGMENT, INT64
    )
    if begin == end:
        return
    if slot != first:
        return
    w = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = w < W
    sums = tl.zeros((SEGMENTS, COLUMNS), tl.float32)
    for start in range(0, count, SEGMENTS):
        n = start + tl.arange(0, SEGMENTS)
        mask = (n < count)[:, None] & inside[None, :]
        at = (first + n)[:, None] * W + w[None, :]
        sums += tl.load(segments + at, mask=mask, other=0.0)
    total = tl.sum(sums, axis=0)
    at = out + (b * num_nodes + i) * W + w
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(
    repr=kernel_name("anemoi_gt_gather_to_edges", "x", "W"),
    do_not_specialize=["num_dst", "num_edges", "steps"],
)
def gather_to_edges(
    x,  # [B * N_dst, W]
    addend,  # [B * E, W] or None
    colptr,  # [N_dst + 1]
    perm,  # [E] or None
    out,  # [B * E, W]
    num_dst,
    num_edges,
    steps,  # of a bisection of N_dst
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    EDGES: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (ceil(E / EDGES), ceil(W / COLUMNS), B): a program writes EDGES rows, in CSC order."""
    k = as_index(tl.program_id(0), INT64) * EDGES + tl.arange(0, EDGES)
    w = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b = as_index(tl.program_id(2), INT64)
    inside = k < num_edges
    mask = inside[:, None] & (w < W)[None, :]
    i = b * num_dst + _destination(colptr, k, inside, num_dst, steps)
    e = b * num_edges + caller_edges(perm, k, inside)
    at = e[:, None] * W + w[None, :]
    rows = tl.load(x + i[:, None] * W + w[None, :], mask=mask, other=0.0).to(tl.float32)
    if addend is not None:
        rows += tl.load(addend + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, rows.to(out.dtype.element_ty), mask=mask)
