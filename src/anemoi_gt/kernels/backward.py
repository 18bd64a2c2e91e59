"""Edge attention, backward: the kernels that walk edges and gather rows of heads x channels.

Symbols as in `anemoi_gt.kernels.forward`, with the upstream gradients do_i, dlse_i and g_i = W^T
do_i ready from `anemoi_gt.kernels.edge_projection`.

    over destinations:
        dp_e    = m_e (<do_i, v_j> + <g_i, a_e>)
        delta_i = sum_e p_e dp_e / sum_e p_e                   the forward's p, so sum_e ds_e = 0
        ds_e    = scale * p_e (dp_e - delta_i + dlse_i)
        dq_i    = sum_e ds_e k_j                               W B_i joins dq_i in `edge_projection`
        dx_e    = m_e p_e do_i + ds_e q_i                      embedded features only

    over sources:
        dk_j = sum_e ds_e q_i,     dv_j = sum_e m_e p_e do_i

Hubs are divided into segments as in the forward pass, sources too. The first loop over a segment
ends with its parts of the two sums of delta, which are joined before `edge_attention_bwd_dst_hub`
takes the second loop.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.forward import SIZES
from anemoi_gt.kernels.launch import launch_facts, row_kernel_name
from anemoi_gt.kernels.primitives import (
    as_index,
    caller_edge,
    destination,
    hub_segment,
    load_row,
    num_spans,
    project_edges,
    row_offsets,
    row_or_segment,
    segment_of_program,
    segment_row,
)
from anemoi_gt.kernels.rows import (
    add_scaled,
    dot_rows,
    drop,
    gather,
    gathered_row,
    load_edge_heads,
    load_heads,
    load_unpacked,
    raw_offsets,
    scale_row,
    store_heads,
    store_unpacked,
    zero_row,
)


@triton.jit(
    repr=row_kernel_name("edge_attention_bwd_dst", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=SIZES,
)
def edge_attention_bwd_dst(
    query,  # [B, N_dst, H, C], read for embedded features only
    key,  # [B, N_src, H, C]
    value,  # [B, N_src, H, C]
    edge_attr,  # [1 or B, E, D] or [1 or B, E, H, C] or None
    projected_grad,  # [B, N_dst, H, ATTRIBUTES] g, or None
    grad_out,  # [B, N_dst, H, C]
    grad_lse,  # [B, N_dst, H] or None
    # [B, N_dst, H]; with hubs [B * N_dst + B * spans, H], segment weights last
    inv_denominator,
    exp_scores,  # [B, E, H] r
    colptr,  # [N_dst + 1]
    row,  # [E]
    perm,  # [E] or None
    global_edge_id,  # [E] int64, or None
    seed,  # [1] int64, or None
    dquery,  # [B, N_dst, H, C] or None
    dedge_attr,  # [B, E, H, C] or None
    p_ds,  # [B, E, 2, H]
    attr_dp,  # [B, E, H] float32, scratch
    dp,  # [B, E, H] float32, scratch
    segment_p,  # [B, spans, H] float32, sum_e p_e of a segment, or None without hubs
    segment_p_dp,  # [B, spans, H] float32, sum_e p_e dp_e, or None
    num_dst,
    num_src,
    num_edges,
    attr_stride,
    scale,
    drop_below,
    survivor,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    EMBEDDED: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    PACKED: tl.constexpr,
    UNROLL: tl.constexpr,
    EDGES: tl.constexpr,
    PRECISION: tl.constexpr,
    INT64: tl.constexpr,
    SEGMENT: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two rows of query, key, value, grad_out and dquery
):
    """Grid (B * N_dst, ceil(H / HEADS)): one program per destination, batch entry and HEADS heads.

    Writes its row of dquery (without W B) and, for its in-edges, dx (embedded features) and p_ds =
    [m p, ds], which the kernels over sources and over attributes read. With hubs the grid is (B *
    (spans + N_dst), ..), and the program of a segment writes its dp and its parts of the sums of p
    and p dp.
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
    ROW: tl.constexpr = STRIDE // 2 if PACKED is not None else STRIDE
    if D > 0:
        edge_range = (begin, end, first_edge)
        attributes = (edge_attr, perm, first_attr)
        project_edges(
            attr_dp,
            1.0,
            projected_grad,
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
    edges = (
        (perm, global_edge_id, seed, b, h, drop_below, survivor),
        source,
        in_row,
        heads,
        first_edge,
    )
    main_end = end - (end - begin) % UNROLL
    do = load_unpacked(grad_out, node * ROW, in_row, PACKED)
    stats_row = node
    if SEGMENT > 0 and slot >= 0:
        stats_row = segment_row(slot, num_spans(num_edges, SEGMENT) + num_dst, num_dst)
    inverse = load_heads(inv_denominator, stats_row, heads, H)
    p_sum = tl.zeros((HEADS,), tl.float32)
    delta = tl.zeros((HEADS,), tl.float32)
    weights = (do, inverse, value, attr_dp if D > 0 else None, exp_scores, dp)
    p_sum, delta = _differentiate_weights(
        p_sum, delta, begin, main_end, *weights, *edges, H, ROW, PACKED, EACH=UNROLL
    )
    p_sum, delta = _differentiate_weights(
        p_sum, delta, main_end, end, *weights, *edges, H, ROW, PACKED, EACH=1
    )
    if SEGMENT > 0 and slot >= 0:
        store_heads(segment_p, slot, heads, p_sum, H)
        store_heads(segment_p_dp, slot, heads, delta, H)
        return
    delta = delta / tl.where(p_sum == 0.0, 1.0, p_sum)
    if grad_lse is not None:
        delta -= load_heads(grad_lse, node, heads, H)
    tl.debug_barrier()

    dq = zero_row(HEADS, CHANNELS, PACKED)
    q = load_unpacked(query, node * ROW, in_row, PACKED) if EMBEDDED else do
    scores = (
        delta,
        do,
        q,
        inverse,
        scale,
        key if dquery is not None else None,
        exp_scores,
        dp,
        p_ds,
        dedge_attr,
    )
    dq = _differentiate_scores(dq, begin, main_end, *scores, *edges, H, ROW, PACKED, EACH=UNROLL)
    dq = _differentiate_scores(dq, main_end, end, *scores, *edges, H, ROW, PACKED, EACH=1)
    if dquery is not None:
        store_unpacked(dquery, node * ROW, in_row, dq, PACKED)


@triton.jit(repr=row_kernel_name("edge_attention_bwd_dst_hub", "key"), do_not_specialize=SIZES)
def edge_attention_bwd_dst_hub(
    query,  # [B, N_dst, H, C], read for embedded features only
    key,  # [B, N_src, H, C]
    edge_attr,  # [1 or B, E, H, C] or None
    grad_out,  # [B, N_dst, H, C]
    grad_lse,  # [B, N_dst, H] or None
    inv_denominator,  # [B * N_dst + B * spans, H]
    exp_scores,  # [B, E, H] r
    colptr,  # [N_dst + 1]
    row,  # [E]
    perm,  # [E] or None
    global_edge_id,  # [E] int64, or None
    seed,  # [1] int64, or None
    dedge_attr,  # [B, E, H, C] or None
    p_ds,  # [B, E, 2, H]
    dp,  # [B, E, H] float32
    p_sum,  # [B, N_dst, H] float32, sum_e p_e of hubs
    p_dp_sum,  # [B, N_dst, H] float32, sum_e p_e dp_e of hubs
    segment_dquery,  # [B, spans, H, C] float32, or None
    num_dst,
    num_src,
    num_edges,
    attr_stride,
    scale,
    drop_below,
    survivor,
    H: tl.constexpr,
    C: tl.constexpr,
    EMBEDDED: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
    UNROLL: tl.constexpr,
    INT64: tl.constexpr,
    SEGMENT: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two rows of query, key and grad_out
):
    """Grid (B * spans, ceil(H / HEADS)): a program owns HEADS heads of one segment of a hub.

    Writes its row of segment_dquery, and dx and p_ds of its edges.
    """
    b, i, begin, end, slot, _, _ = segment_of_program(colptr, num_dst, num_edges, SEGMENT, INT64)
    if begin == end:
        return
    node, first_edge, first_attr = b * num_dst + i, b * num_edges, b * attr_stride
    head = tl.program_id(1) * HEADS
    h = head + tl.arange(0, HEADS)
    heads = (h, None if H % HEADS == 0 else h < H)
    in_row = raw_offsets(head, H, C, HEADS, CHANNELS, PACKED)
    WIDTH: tl.constexpr = H * C // 2 if PACKED is not None else H * C
    ROW: tl.constexpr = STRIDE // 2 if PACKED is not None else STRIDE
    source = (row, b * num_src, edge_attr if EMBEDDED else None, perm, first_attr)
    edges = (
        (perm, global_edge_id, seed, b, h, drop_below, survivor),
        source,
        in_row,
        heads,
        first_edge,
    )
    main_end = end - (end - begin) % UNROLL
    total = load_heads(p_sum, node, heads, H)
    delta = load_heads(p_dp_sum, node, heads, H) / tl.where(total == 0.0, 1.0, total)
    if grad_lse is not None:
        delta -= load_heads(grad_lse, node, heads, H)

    dq = zero_row(HEADS, CHANNELS, PACKED)
    do = load_unpacked(grad_out, node * ROW, in_row, PACKED) if EMBEDDED else dq
    q = load_unpacked(query, node * ROW, in_row, PACKED) if EMBEDDED else dq
    inverse = load_heads(
        inv_denominator, segment_row(slot, num_spans(num_edges, SEGMENT), num_dst), heads, H
    )
    read = key if segment_dquery is not None else None
    scores = (delta, do, q, inverse, scale, read, exp_scores, dp, p_ds, dedge_attr)
    dq = _differentiate_scores(dq, begin, main_end, *scores, *edges, H, ROW, PACKED, EACH=UNROLL)
    dq = _differentiate_scores(dq, main_end, end, *scores, *edges, H, ROW, PACKED, EACH=1)
    if segment_dquery is not None:
        store_unpacked(segment_dquery, slot * WIDTH, in_row, dq, PACKED)


@triton.jit
def _differentiate_weights(
    p_sum,
    delta,
    begin,
    end,
    do,
    inverse,
    value,
    attr_dp,
    exp_scores,
    dp,
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
    """Write dp of edges begin .. end - 1, EACH at a time; return running sums of p and p dp."""
    for e in range(begin, end, EACH):
        v = gather(value, e, source, in_row, ROW, PACKED, EACH)
        r = load_edge_heads(exp_scores, first_edge + e, heads, H, EACH)
        if attr_dp is not None:
            t = load_edge_heads(attr_dp, first_edge + e, heads, H, EACH)
        for n in tl.static_range(EACH):
            dp_e = dot_rows(do, gathered_row(v, n, PACKED, EACH))
            if attr_dp is not None:
                dp_e += t[n]
            dp_e = drop(dp_e, e + n, dropout)
            store_heads(dp, first_edge + e + n, heads, dp_e, H)
            p = inverse * r[n]
            p_sum += p
            delta += p * dp_e
    return p_sum, delta


@triton.jit
def _differentiate_scores(
    dq,
    begin,
    end,
    delta,
    do,
    q,
    inverse,
    scale,
    key,
    exp_scores,
    dp,
    p_ds,
    dedge_attr,
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
    """Write [m p, ds] and dx of edges begin .. end - 1; return the running sum of ds k, if any key.

    Edges are processed EACH at a time.
    """
    for e in range(begin, end, EACH):
        if key is not None:
            k = gather(key, e, source, in_row, ROW, PACKED, EACH)
        r = load_edge_heads(exp_scores, first_edge + e, heads, H, EACH)
        dp_e = load_edge_heads(dp, first_edge + e, heads, H, EACH)
        for n in tl.static_range(EACH):
            p = inverse * r[n]
            ds = scale * p * (dp_e[n] - delta)
            p = drop(p, e + n, dropout)
            store_heads(p_ds, 2 * (first_edge + e + n), heads, p, H)
            store_heads(p_ds, 2 * (first_edge + e + n) + 1, heads, ds, H)
            if key is not None:
                dq = add_scaled(dq, ds, gathered_row(k, n, PACKED, EACH))
            if dedge_attr is not None:
                dx = add_scaled(scale_row(p, do), ds, q)
                edge = first_edge + caller_edge(source[3], e + n)
                # rows are contiguous where features are embedded: they are as wide as ROW
                store_unpacked(dedge_attr, edge * ROW, in_row, dx, PACKED)
    return dq


@triton.jit(
    repr=row_kernel_name("edge_attention_bwd_src", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges"],
)
def edge_attention_bwd_src(
    query,  # [B, N_dst, H, C]
    grad_out,  # [B, N_dst, H, C]
    p_ds,  # [B, E, 2, H]
    rowptr,  # [N_src + 1]
    col,  # [E]
    csr_to_csc,  # [E]
    dkey,  # [B, N_src, H, C] or None
    dvalue,  # [B, N_src, H, C] or None
    segment_dkey,  # [B, spans, H, C] float32, or None as dkey and without hubs
    segment_dvalue,  # [B, spans, H, C] float32, or None as dvalue and without hubs
    num_dst,
    num_src,
    num_edges,
    H: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    NODES: tl.constexpr,
    UNROLL: tl.constexpr,
    INT64: tl.constexpr,
    SEGMENT: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two rows of query, grad_out, dkey and dvalue
):
    """Grid (B * ceil(N_src / NODES), ceil(H / HEADS)): one program per NODES sources, HEADS heads.

    Writes their rows of dkey and dvalue. With hubs the grid is (B * (spans + ceil(N_src / NODES)),
    ..), and the program of a segment writes its rows of segment_dkey and segment_dvalue.
    """
    programs = (num_src + NODES - 1) // NODES
    if SEGMENT > 0:
        spans = num_spans(num_edges, SEGMENT)
        programs += spans
    b = as_index(tl.program_id(0) // programs, INT64)
    first = (tl.program_id(0) % programs) * NODES
    head = tl.program_id(1) * HEADS
    h = head + tl.arange(0, HEADS)
    offsets, mask = row_offsets(head, H, C, HEADS, CHANNELS)
    # With these 64-bit products inside the loop, ptxas would load one edge after the other.
    operands = (
        query,
        grad_out,
        p_ds,
        col,
        csr_to_csc,
        b * num_dst,
        b * num_edges,
        h,
        offsets,
        mask,
    )
    if SEGMENT > 0:
        span = as_index(tl.program_id(0) % programs, INT64)
        if span < spans:
            _, begin, end, _, _ = hub_segment(rowptr, span, num_src, SEGMENT)
            sums = _sum_over_edges(
                dkey, dvalue, begin, end, *operands, H, C, HEADS, CHANNELS, UNROLL, STRIDE
            )
            _store_rows(
                segment_dkey, segment_dvalue, (b * spans + span) * (H * C), offsets, mask, sums
            )
            return
        first -= spans * NODES
    for n in range(NODES):
        if first + n < num_src:
            j = first + n
            begin, end = tl.load(rowptr + j), tl.load(rowptr + j + 1)
            if SEGMENT > 0:
                end = tl.where(end - begin > 2 * SEGMENT, begin, end)
            sums = _sum_over_edges(
                dkey, dvalue, begin, end, *operands, H, C, HEADS, CHANNELS, UNROLL, STRIDE
            )
            _store_rows(dkey, dvalue, (b * num_src + j) * STRIDE, offsets, mask, sums)


@triton.jit
def _sum_over_edges(
    dkey,
    dvalue,
    begin,
    end,
    query,
    grad_out,
    p_ds,
    col,
    csr_to_csc,
    first_dst,
    first_edge,
    h,
    offsets,
    mask,
    H: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNROLL: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Sum ds q, for dkey, and m p do, for dvalue, over the edges begin .. end - 1 in CSR order."""
    dk = tl.zeros((HEADS, CHANNELS), tl.float32)
    dv = tl.zeros((HEADS, CHANNELS), tl.float32)
    for x in tl.range(begin, end, loop_unroll_factor=UNROLL):
        i = first_dst + tl.load(col + x)
        pair = p_ds + (first_edge + tl.load(csr_to_csc + x)) * (2 * H) + h
        if dvalue is not None:
            w = tl.load(pair, mask=h < H, other=0.0).to(tl.float32)
            dv += w[:, None] * load_row(grad_out, i, offsets, mask, STRIDE)
        if dkey is not None:
            ds = tl.load(pair + H, mask=h < H, other=0.0).to(tl.float32)
            dk += ds[:, None] * load_row(query, i, offsets, mask, STRIDE)
    return dk, dv


@triton.jit
def _store_rows(dkey, dvalue, start, offsets, mask, sums):
    """Write the sums of `_sum_over_edges` to the rows of dkey and dvalue that begin at `start`."""
    if dkey is not None:
        tl.store(dkey + start + offsets, sums[0].to(dkey.dtype.element_ty), mask=mask)
    if dvalue is not None:
        tl.store(dvalue + start + offsets, sums[1].to(dvalue.dtype.element_ty), mask=mask)
