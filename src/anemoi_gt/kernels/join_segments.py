"""Edge attention: hubs, nodes with so many edges that one program would delay all others.

The edges, in CSC or CSR order, are divided into spans of SEGMENT. A node with more than 2 SEGMENT
edges is a hub. It is divided where spans begin, into segments of fewer than 2 SEGMENT edges. Each
span belongs to at most one segment, so ceil(E / SEGMENT) programs suffice for any graph, whatever
its number of hubs. A program finds the node of its span by bisection of the pointers
(`anemoi_gt.kernels.primitives.hub_segment`).

A segment k has its part of each sum in float32, at its span in a tensor [B, spans, ..]. Parts are
joined in the order of the segments, so the same bits come out on every run:

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
from anemoi_gt.kernels.launch import row_kernel_name
from anemoi_gt.kernels.primitives import num_spans, segment_of_program, segment_row


@triton.jit(
    repr=row_kernel_name("edge_attention_join_segments", "rows"),
    do_not_specialize=["num_nodes", "num_edges"],
)
def join_segments(
    segment_rows,  # [B, spans, H, WIDTH] float32
    segment_others,  # [B, spans, H, OTHERS] float32, or None
    segment_max,  # [B, spans, H], or None without denominators
    segment_denominator,  # [B, spans, H], or None
    pointers,  # [N + 1]
    rows,  # [B, N, H, WIDTH]
    others,  # [B, N, H, OTHERS], or None
    lse,  # [B, N, H], or None without denominators
    # [B * N + B * spans, H], nodes then weight_k, or None without denominators
    inv_denominator,
    num_nodes,
    num_edges,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    OTHERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STATISTICS: tl.constexpr,  # segments whose maxima and denominators are read together
    INT64: tl.constexpr,
    SEGMENT: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two nodes in rows, and in others if they are as wide
):
    """Grid (B * spans,): the programs of a hub's segments divide its heads and columns among them.

    Write the hub's rows of the results, SEGMENTS segments and COLUMNS columns at a time. One warp
    each: most programs do nothing but look for their hub, and the more of them there are at a time,
    the less its latency counts.
    """
    b, i, begin, end, slot, first, count = segment_of_program(
        pointers, num_nodes, num_edges, SEGMENT, INT64
    )
    if begin == end:
        return
    node = b * num_nodes + i
    weights = segment_row(0 * slot, num_spans(num_edges, SEGMENT), num_nodes) * H
    TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    EACH: tl.constexpr = TILES + (OTHERS + COLUMNS - 1) // COLUMNS
    for task in range(slot - first, H * EACH, count):
        head, tile = task // EACH, task % EACH
        statistics = (None, 0.0, 1.0)
        if segment_denominator is not None:
            row_max, denominator = _statistics(
                segment_max, segment_denominator, first, count, head, H, STATISTICS
            )
            inverse = 1.0 / tl.where(denominator == 0.0, 1.0, denominator)
            statistics = (segment_max, row_max, inverse)
            if tile == 0:
                tl.store(lse + node * H + head, (row_max + tl.log2(denominator)) * LN_2)
                tl.store(
                    inv_denominator + node * H + head, tl.where(denominator == 0.0, 0.0, inverse)
                )
                for k in range(0, count, STATISTICS):
                    n = k + tl.arange(0, STATISTICS)
                    part = (first + n) * H + head
                    weight = _weight(statistics, part, n < count)
                    tl.store(inv_denominator + weights + part, weight, mask=n < count)
        if tile < TILES:
            start = node * STRIDE + head * WIDTH
            _join(
                segment_rows,
                rows,
                start,
                tile,
                first,
                count,
                head,
                statistics,
                H,
                WIDTH,
                COLUMNS,
                SEGMENTS,
            )
        elif segment_others is not None:
            ROW: tl.constexpr = STRIDE if OTHERS == WIDTH else H * OTHERS
            tile -= TILES
            start = node * ROW + head * OTHERS
            _join(
                segment_others,
                others,
                start,
                tile,
                first,
                count,
                head,
                statistics,
                H,
                OTHERS,
                COLUMNS,
                SEGMENTS,
            )


@triton.jit
def _statistics(
    segment_max, segment_denominator, first, count, head, H: tl.constexpr, STATISTICS: tl.constexpr
):
    """Return row_max (0 for -inf) and denominator of a head of a hub.

    The hub has `count` segments from `first`.
    """
    row_max = -float("inf")
    for k in range(0, count, STATISTICS):
        n = k + tl.arange(0, STATISTICS)
        statistic = tl.load(
            segment_max + (first + n) * H + head, mask=n < count, other=-float("inf")
        )
        row_max = tl.maximum(row_max, tl.max(statistic, axis=0))
    row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
    denominator = 0.0
    for k in range(0, count, STATISTICS):
        n = k + tl.arange(0, STATISTICS)
        part = (first + n) * H + head
        statistic = tl.load(segment_denominator + part, mask=n < count, other=0.0)
        denominator += tl.sum(
            _weight((segment_max, row_max, 1.0), part, n < count) * statistic, axis=0
        )
    return row_max, denominator


@triton.jit
def _weight(statistics, part, inside):
    """Return the weights of the segments with statistics at `part`, 0 if not `inside`."""
    segment_max, row_max, inverse = statistics
    return (
        tl.exp2(tl.load(segment_max + part, mask=inside, other=-float("inf")) - row_max) * inverse
    )


@triton.jit
def _join(
    segment_rows,
    rows,
    start,
    tile,
    first,
    count,
    head,
    statistics,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Write a tile of rows[start ..], the weighted sum of `count` rows segment_rows[n, head].

    Segments start at `first`.
    """
    c = tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in range(0, count, SEGMENTS):
        n = k + tl.arange(0, SEGMENTS)
        part = (first + n) * H + head
        inside = (n < count)[:, None] & (c < WIDTH)[None, :]
        part_rows = tl.load(
            segment_rows + part[:, None] * WIDTH + c[None, :], mask=inside, other=0.0
        )
        if statistics[0] is not None:
            part_rows *= _weight(statistics, part, n < count)[:, None]
        total += tl.sum(part_rows, axis=0)
    tl.store(rows + start + c, total.to(rows.dtype.element_ty), mask=c < WIDTH)
