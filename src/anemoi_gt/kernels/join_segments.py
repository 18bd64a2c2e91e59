"""Edge attention: nodes with so many edges that one program would walk them long after all others have finished.

The edges, in CSC or CSR order, are divided into blocks of SEGMENT. A node with more than 2 SEGMENT edges is a hub. It
is divided where blocks begin, into segments of fewer than 2 SEGMENT edges. Each block is that of at most one segment,
so ceil(E / SEGMENT) programs serve any graph, without knowing how many hubs it has. A program finds the node of its
block by bisection of the pointers (`anemoi_gt.kernels.primitives.hub_segment`).

A segment k has its part of each sum in float32, at its block in a tensor [B, blocks, ..]. Parts are joined in the order
of the segments, so the same bits come out on every run:

    row_max_i     = max_k row_max_k,             r_e relative to it in all segments
    denominator_i = sum_k denominator_k
    o_i = sum_k o_k / denominator_i,             A_i = sum_k A_k / denominator_i
    dq_i, dk_j, dv_j, A_i and B_i backward       sums over k

All other nodes are written as in a graph without hubs.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.forward import LN_2
from anemoi_gt.kernels.jit_launch import row_kernel_name
from anemoi_gt.kernels.primitives import segment_of_program


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
    inv_denominator,  # [B, N, H], or None without denominators
    num_nodes, num_edges,
    H: tl.constexpr, WIDTH: tl.constexpr, OTHERS: tl.constexpr, COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr,
    INT64: tl.constexpr, SEGMENT: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two nodes in rows, and in others if they are as wide
):  # fmt: skip
    """Grid (B * blocks,): the programs of a hub's segments divide its heads among them.

    Write the hub's rows of the results, SEGMENTS segments and COLUMNS columns at a time.
    """
    b, i, begin, end, slot, first, count = segment_of_program(pointers, num_nodes, num_edges, SEGMENT, INT64)
    if begin == end:
        return
    for head in range(slot - first, H, count):
        node = b * num_nodes + i
        at = node * H + head
        factor = 1.0
        if segment_denominator is not None:
            row_max = -float("inf")
            denominator = 0.0
            for k in range(0, count, SEGMENTS):
                n = k + tl.arange(0, SEGMENTS)
                part = (first + n) * H + head
                found = tl.load(segment_max + part, mask=n < count, other=-float("inf"))
                row_max = tl.maximum(row_max, tl.max(found, axis=0))
                denominator += tl.sum(tl.load(segment_denominator + part, mask=n < count, other=0.0), axis=0)
            row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
            factor = 1.0 / tl.where(denominator == 0.0, 1.0, denominator)
            tl.store(lse + at, (row_max + tl.log2(denominator)) * LN_2)
            tl.store(inv_denominator + at, tl.where(denominator == 0.0, 0.0, factor))
        _join(segment_rows, rows, node * STRIDE + head * WIDTH, first, count, head, factor, H, WIDTH, COLUMNS, SEGMENTS)
        if segment_others is not None:
            ROW: tl.constexpr = STRIDE if OTHERS == WIDTH else H * OTHERS
            other = node * ROW + head * OTHERS
            _join(segment_others, others, other, first, count, head, factor, H, OTHERS, COLUMNS, SEGMENTS)


@triton.jit
def _join(
    segment_rows, rows, at, first, count, head, factor,
    H: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Write rows[at ..] = factor * sum of segment_rows[n, head] over the `count` segments from `first` on."""
    for column in range(0, WIDTH, COLUMNS):
        c = column + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), tl.float32)
        for k in range(0, count, SEGMENTS):
            n = k + tl.arange(0, SEGMENTS)
            part = ((first + n) * H + head)[:, None] * WIDTH + c[None, :]
            inside = (n < count)[:, None] & (c < WIDTH)[None, :]
            total += tl.sum(tl.load(segment_rows + part, mask=inside, other=0.0), axis=0)
        tl.store(rows + at + c, (total * factor).to(rows.dtype.element_ty), mask=c < WIDTH)
