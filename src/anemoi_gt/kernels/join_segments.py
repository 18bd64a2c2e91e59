"""Edge attention: nodes with so many edges that one program would walk them long after all others have finished.

The edges, in CSC or CSR order, are divided into blocks of SEGMENT. A node with more than 2 SEGMENT edges is a hub. It
is divided where blocks begin, into segments of fewer than 2 SEGMENT edges. Each block is that of at most one segment,
so ceil(E / SEGMENT) programs serve any graph, without knowing how many hubs it has. A program finds the node of its
block by bisection of the pointers (`anemoi_gt.kernels.primitives.hub_segment`).

A segment k has its part of each sum in float32, at its block in a tensor [B, blocks, ..]. Parts are joined in the order
of the segments, so the same bits come out on every run:

    row_max_i     = max_k row_max_k,             r_e of segment k relative to row_max_k
    denominator_i = sum_k denominator_k 2^(row_max_k - row_max_i)
    weight_k      = 2^(row_max_k - row_max_i) / denominator_i,     p_e = weight_k r_e
    o_i = sum_k weight_k o_k,                    A_i = sum_k weight_k A_k
    sums of p and p dp, dq_i, dk_j, dv_j, A_i and B_i backward     sums over k

All other nodes are written as in a graph without hubs.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.forward import LN_2
from anemoi_gt.kernels.jit_launch import row_kernel_name
from anemoi_gt.kernels.primitives import num_blocks, segment_of_program, segment_row


@triton.jit(repr=row_kernel_name("edge_attention_join_segments", "rows"), do_not_specialize=["num_nodes", "num_edges"])
def join_segments(
    segment_rows,  # [B, blocks, H, WIDTH] float32
    segment_others,  # [B, blocks, H, OTHERS] float32, or None
    segment_max,  # [B, blocks, H], or None without denominators
    segment_denominator,  # [B, blocks, H], or None
    pointers,  # [N + 1]
    rows,  # [B, N, H, WIDTH]
    others,  # [B, N, H, OTHERS], or None
    lse,  # [B, N, H], or None without denominators
    inv_denominator,  # [B * N + B * blocks, H], those of nodes and weight_k, or None without denominators
    num_nodes, num_edges,
    H: tl.constexpr, WIDTH: tl.constexpr, OTHERS: tl.constexpr, COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr,
    STATISTICS: tl.constexpr,  # segments whose maxima and denominators are read together
    INT64: tl.constexpr, SEGMENT: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two nodes in rows, and in others if they are as wide
):  # fmt: skip
    """Grid (B * blocks,): the programs of a hub's segments divide its heads among them.

    Write the hub's rows of the results, SEGMENTS segments and COLUMNS columns at a time.
    """
    b, i, begin, end, slot, first, count = segment_of_program(pointers, num_nodes, num_edges, SEGMENT, INT64)
    if begin == end:
        return
    weights = segment_row(0 * slot, num_blocks(num_edges, SEGMENT), num_nodes) * H
    for head in range(slot - first, H, count):
        node = b * num_nodes + i
        parts = (first, count, head, inv_denominator, weights)
        if segment_denominator is not None:
            _weigh(segment_max, segment_denominator, lse, node * H + head, *parts, H, STATISTICS)
            tl.debug_barrier()
        _join(segment_rows, rows, node * STRIDE + head * WIDTH, *parts, H, WIDTH, COLUMNS, SEGMENTS)
        if segment_others is not None:
            ROW: tl.constexpr = STRIDE if OTHERS == WIDTH else H * OTHERS
            _join(segment_others, others, node * ROW + head * OTHERS, *parts, H, OTHERS, COLUMNS, SEGMENTS)


@triton.jit
def _weigh(
    segment_max, segment_denominator, lse, at, first, count, head, inv_denominator, weights,
    H: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Write lse and inv_denominator at `at`, and from `weights` on those of the `count` segments from `first` on."""
    row_max = -float("inf")
    for k in range(0, count, STATISTICS):
        n = k + tl.arange(0, STATISTICS)
        found = tl.load(segment_max + (first + n) * H + head, mask=n < count, other=-float("inf"))
        row_max = tl.maximum(row_max, tl.max(found, axis=0))
    row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
    denominator = 0.0
    for k in range(0, count, STATISTICS):
        n = k + tl.arange(0, STATISTICS)
        part = (first + n) * H + head
        factor = tl.exp2(tl.load(segment_max + part, mask=n < count, other=-float("inf")) - row_max)
        denominator += tl.sum(factor * tl.load(segment_denominator + part, mask=n < count, other=0.0), axis=0)
    inverse = 1.0 / tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(lse + at, (row_max + tl.log2(denominator)) * LN_2)
    tl.store(inv_denominator + at, tl.where(denominator == 0.0, 0.0, inverse))
    for k in range(0, count, STATISTICS):
        n = k + tl.arange(0, STATISTICS)
        part = (first + n) * H + head
        factor = tl.exp2(tl.load(segment_max + part, mask=n < count, other=-float("inf")) - row_max)
        tl.store(inv_denominator + weights + part, factor * inverse, mask=n < count)


@triton.jit
def _join(
    segment_rows, rows, at, first, count, head, inv_denominator, weights,
    H: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Write rows[at ..] = sum of segment_rows[n, head], weighted or not, over the `count` segments from `first` on."""
    for column in range(0, WIDTH, COLUMNS):
        c = column + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), tl.float32)
        for k in range(0, count, SEGMENTS):
            n = k + tl.arange(0, SEGMENTS)
            part = (first + n) * H + head
            inside = (n < count)[:, None] & (c < WIDTH)[None, :]
            found = tl.load(segment_rows + part[:, None] * WIDTH + c[None, :], mask=inside, other=0.0)
            if inv_denominator is not None:
                found *= tl.load(inv_denominator + weights + part, mask=n < count, other=0.0)[:, None]
            total += tl.sum(found, axis=0)
        tl.store(rows + at + c, total.to(rows.dtype.element_ty), mask=c < WIDTH)
