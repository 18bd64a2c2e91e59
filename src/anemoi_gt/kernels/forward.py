"""Edge attention, forward: reduce the in-edges of each destination over rows [heads, channels].

For destination i, source j, edge e = (j -> i), with attributes a_e and u_i = W^T q_i ready from
`anemoi_gt.kernels.edge_projection` (the bias is one more attribute that is always 1):

    s_e   = (<q_i, k_j> + <u_i, a_e>) * scale * log2(e)
    r_e   = 2^(s_e - row_max_i)                                exp_scores, stored [E, H]
    p_e   = r_e * inv_denominator_i                            1 / sum_e r_e, stored [N_dst, H]
    lse_i = (row_max_i + log2 sum_e r_e) / log2(e)
    o_i   = sum_e m_e p_e v_j,     A_i = sum_e m_e p_e a_e     W A_i joins o_i in `edge_projection`

m_e is the dropout factor. Embedded features x_e [H, C] replace W a_e: k_j + x_e, v_j + x_e.

Work on D elements per edge and work on a row of C elements per edge are separate loops over the
same edges: fusing both loops costs a layout conversion per edge. Work on D elements uses small
matrix products if a node has enough edges. One loop hands to the next through [E, H] arrays, which
stay in the cache; the barrier between them makes the elements visible to all threads of the
program. No loop reads and writes one array: several warps may hold the same element, and one could
overwrite it before another has read it. Arrays of D elements per node have ATTRIBUTES columns, a
power of two, zero after D + BIAS: whole rows, no mask.

A destination with more than 2 SEGMENT edges, a hub, is divided into segments (see `join_segments`).
SEGMENT is 0 unless the graph may contain hubs. A segment is computed like a destination, with its
own row_max, and `join_segments` writes the hub's rows.

Each loop over rows is a function that processes EACH edges per step. It is called twice: with
UNROLL up to `main_end`, then edge by edge for the remainder.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.launch import launch_facts, row_kernel_name
from anemoi_gt.kernels.primitives import (
    caller_edges,
    destination,
    dropout_factor,
    load_attributes,
    product,
    project_edges,
    row_offsets,
    row_or_segment,
    tile_offsets,
)
from anemoi_gt.kernels.rows import (
    add_scaled,
    dot_rows,
    drop,
    gather,
    gathered_row,
    load_edge_heads,
    load_unpacked,
    raw_offsets,
    scale_row,
    store_heads,
    store_unpacked,
    zero_row,
)

LN_2 = tl.constexpr(0.6931471805599453)
SIZES = ["num_dst", "num_src", "num_edges", "attr_stride", "drop_below"]  # never specialised


@triton.jit(
    repr=row_kernel_name("edge_attention_fwd", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=SIZES,
)
def edge_attention_fwd(
    query,  # [B, N_dst, H, C]
    key,  # [B, N_src, H, C]
    value,  # [B, N_src, H, C]
    edge_attr,  # [1 or B, E, D] or [1 or B, E, H, C] or None
    projected,  # [B, N_dst, H, ATTRIBUTES] u, or None
    colptr,  # [N_dst + 1]
    row,  # [E]
    perm,  # [E] or None
    global_edge_id,  # [E] int64, or None
    seed,  # [1] int64, or None
    out,  # [B, N_dst, H, C]
    lse,  # [B, N_dst, H]
    inv_denominator,  # [B, N_dst, H]; with hubs see `join_segments`
    scores,  # [B, E, H] float32, scratch
    exp_scores,  # [B, E, H] r
    attr_sums,  # [B, N_dst, H, ATTRIBUTES] A, or None
    segment_max,  # [B, spans, H] row_max of segments, or None without hubs
    segment_denominator,  # [B, spans, H], or None
    segment_out,  # [B, spans, H, C] float32, sum_e m_e r_e v_j, or None
    segment_attr_sums,  # [B, spans, H, ATTRIBUTES] float32, sum_e m_e r_e a_e, or None
    num_dst,
    num_src,
    num_edges,
    attr_stride,  # edges between the attributes of two batch entries: E, or 0 when they share them
    score_scale,  # scale * log2(e)
    drop_below,
    survivor,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,  # 0 without raw attributes
    BIAS: tl.constexpr,
    EMBEDDED: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    PACKED: tl.constexpr,  # "bf16" or "fp16": rows are read as packed 16-bit pairs; None
    UNROLL: tl.constexpr,  # edges whose rows are in flight together
    EDGES: tl.constexpr,  # edges of a tile of attributes
    PRECISION: tl.constexpr,
    INT64: tl.constexpr,
    SEGMENT: tl.constexpr,  # edges of a segment of a hub; 0 where no destination is one
    STRIDE: tl.constexpr,  # elements between two rows of query, key and value
):
    """Grid (B * N_dst, ceil(H / HEADS)): one program per destination, batch entry and HEADS heads.

    Writes its rows of out (without W A), lse, inv_denominator and A, and exp_scores of its
    in-edges. With hubs the grid is (B * (spans + N_dst), ..), and the program of a segment writes
    exp_scores and its rows of the partial results.
    """
    if SEGMENT > 0:
        b, i, begin, end, slot = row_or_segment(colptr, num_dst, num_edges, SEGMENT, INT64)
        node = b * num_dst + i
    else:
        b, i, node = destination(num_dst, INT64)
    first_edge, first_attr = b * num_edges, b * attr_stride
    if SEGMENT == 0:
        begin, end = tl.load(colptr + i), tl.load(colptr + i + 1)
    head = tl.program_id(1) * HEADS
    h = head + tl.arange(0, HEADS)
    heads = (h, None if H % HEADS == 0 else h < H)
    in_row = raw_offsets(head, H, C, HEADS, CHANNELS, PACKED)
    WIDTH: tl.constexpr = H * C // 2 if PACKED is not None else H * C
    ROW: tl.constexpr = STRIDE // 2 if PACKED is not None else STRIDE
    edge_range = (begin, end, first_edge)
    attributes = (edge_attr, perm, first_attr)
    if D > 0:
        project_edges(
            exp_scores,
            score_scale,
            projected,
            node,
            head,
            edge_range,
            attributes,
            H=H,
            D=D,
            BIAS=BIAS,
            HEADS=HEADS,
            ATTRIBUTES=ATTRIBUTES,
            EDGES=EDGES,
            PRECISION=PRECISION,
        )
        tl.debug_barrier()

    source = (row, b * num_src, edge_attr if EMBEDDED else None, perm, first_attr)
    dropout = (perm, global_edge_id, seed, b, h, drop_below, survivor)
    main_end = end - (end - begin) % UNROLL
    q = load_unpacked(query, node * ROW, in_row, PACKED)
    row_max = tl.full((HEADS,), -float("inf"), tl.float32)
    score = (
        q,
        key,
        exp_scores if D > 0 else None,
        scores,
        score_scale,
        source,
        in_row,
        heads,
        first_edge,
    )
    row_max = _score(row_max, begin, main_end, *score, H, ROW, PACKED, EACH=UNROLL)
    row_max = _score(row_max, main_end, end, *score, H, ROW, PACKED, EACH=1)
    if SEGMENT > 0 and slot >= 0:
        store_heads(segment_max, slot, heads, row_max, H)
    row_max = tl.where(row_max == -float("inf"), 0.0, row_max)  # -inf minus -inf would be NaN
    tl.debug_barrier()

    denominator = tl.zeros((HEADS,), tl.float32)
    o = zero_row(HEADS, CHANNELS, PACKED)
    values = (row_max, value, scores, exp_scores, dropout, source, in_row, heads, first_edge)
    denominator, o = _sum_values(denominator, o, begin, main_end, *values, H, ROW, PACKED, UNROLL)
    denominator, o = _sum_values(denominator, o, main_end, end, *values, H, ROW, PACKED, 1)
    if SEGMENT > 0 and slot >= 0:
        store_unpacked(segment_out, slot * WIDTH, in_row, o, PACKED)
        store_heads(segment_denominator, slot, heads, denominator, H)
        if D > 0:
            _sum_attributes(
                segment_attr_sums,
                exp_scores,
                None,
                slot,
                head,
                edge_range,
                attributes,
                dropout,
                H=H,
                D=D,
                BIAS=BIAS,
                HEADS=HEADS,
                ATTRIBUTES=ATTRIBUTES,
                EDGES=EDGES,
                PRECISION=PRECISION,
            )
        return
    inverse = 1.0 / tl.where(denominator == 0.0, 1.0, denominator)
    store_unpacked(out, node * WIDTH, in_row, scale_row(inverse, o), PACKED)
    store_heads(lse, node, heads, (row_max + tl.log2(denominator)) * LN_2, H)
    store_heads(inv_denominator, node, heads, tl.where(denominator == 0.0, 0.0, inverse), H)
    if D > 0:
        _sum_attributes(
            attr_sums,
            exp_scores,
            inv_denominator,
            node,
            head,
            edge_range,
            attributes,
            dropout,
            H=H,
            D=D,
            BIAS=BIAS,
            HEADS=HEADS,
            ATTRIBUTES=ATTRIBUTES,
            EDGES=EDGES,
            PRECISION=PRECISION,
        )


@triton.jit
def _score(
    row_max,
    begin,
    end,
    q,
    key,
    attr_scores,
    scores,
    score_scale,
    source,
    in_row,
    heads,
    first_edge,
    H: tl.constexpr,
    ROW: tl.constexpr,
    PACKED: tl.constexpr,
    EACH: tl.constexpr,
):
    """Write the scores of edges begin .. end - 1; return the maximum of them and `row_max`.

    Edges are processed EACH at a time.
    """
    for e in range(begin, end, EACH):
        k = gather(key, e, source, in_row, ROW, PACKED, EACH)
        if attr_scores is not None:
            t = load_edge_heads(attr_scores, first_edge + e, heads, H, EACH)
        new_scores = ()
        for n in tl.static_range(EACH):
            s = dot_rows(q, gathered_row(k, n, PACKED, EACH)) * score_scale
            if attr_scores is not None:
                s += t[n]
            row_max = tl.maximum(row_max, s, propagate_nan=tl.PropagateNan.ALL)
            new_scores = new_scores + (s,)
        for n in tl.static_range(EACH):
            store_heads(scores, first_edge + e + n, heads, new_scores[n], H)
    return row_max


@triton.jit
def _sum_values(
    denominator,
    o,
    begin,
    end,
    row_max,
    value,
    scores,
    exp_scores,
    dropout,
    source,
    in_row,
    heads,
    first_edge,
    H: tl.constexpr,
    ROW: tl.constexpr,
    PACKED: tl.constexpr,
    EACH: tl.constexpr,
):
    """Write r of edges begin .. end - 1, EACH at a time; return the sums of r and of r v so far."""
    for e in range(begin, end, EACH):
        v = gather(value, e, source, in_row, ROW, PACKED, EACH)
        s = load_edge_heads(scores, first_edge + e, heads, H, EACH)
        for n in tl.static_range(EACH):
            r = tl.exp2(s[n] - row_max)
            store_heads(exp_scores, first_edge + e + n, heads, r, H)
            denominator += r
            o = add_scaled(o, drop(r, e + n, dropout), gathered_row(v, n, PACKED, EACH))
    return denominator, o


@triton.jit
def _sum_attributes(
    attr_sums,
    exp_scores,
    inv_denominator,
    node,
    head,
    edge_range,
    attributes,
    dropout,
    H: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    EDGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write attr_sums[node, h] = sum_e m_e p_e a_e over a range, as in `project_edges`.

    Without inv_denominator, r_e replaces p_e.
    """
    begin, end, first_edge = edge_range
    edge_attr, perm, first_attr = attributes
    _, global_edge_id, seed, b, h, drop_below, survivor = dropout
    offsets, mask = row_offsets(head, H, ATTRIBUTES, HEADS, ATTRIBUTES)
    tl.debug_barrier()
    sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    for start in range(begin, end, EDGES):
        e = start + tl.arange(0, EDGES)
        inside = e < end
        edge = caller_edges(perm, e, inside)
        a = load_attributes(edge_attr, first_attr + edge, inside, D, BIAS, ATTRIBUTES)
        offset, known = tile_offsets(first_edge + e, inside, h, H, H)
        r = tl.load(exp_scores + offset, mask=known, other=0.0)  # [EDGES, HEADS]
        if seed is not None:
            edge_id = (
                edge
                if global_edge_id is None
                else tl.load(global_edge_id + e, mask=inside, other=0)
            )
            r *= dropout_factor(edge_id[:, None], seed, b, h[None, :], drop_below, survivor)
        if EDGES == 1:
            sums += tl.sum(r[:, :, None] * a[:, None, :], axis=0)
        else:
            sums = product(tl.trans(r), a, sums, PRECISION)
    if inv_denominator is not None:
        sums *= tl.load(inv_denominator + node * H + h, mask=h < H, other=0.0)[:, None]
    tl.store(
        attr_sums + node * (H * ATTRIBUTES) + offsets,
        sums.to(attr_sums.dtype.element_ty),
        mask=mask,
    )
