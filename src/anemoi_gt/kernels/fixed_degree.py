"""Edge attention, forward and backward, for graphs with fixed in-degree K (k nearest neighbours).

Equations as in `anemoi_gt.kernels.forward` and `backward`. K is constexpr, so the edge loop
unrolls: there is no second loop, no [E, H] score buffer and no barrier. The rows of all edges of a
destination are in flight together, and its scores stay in registers. The backward pass over
destinations also has w, ds, u and g in registers, so A, B and the gradient of edge_attr need no
separate kernel.

All loads precede the first store: loads cannot be hoisted above stores that may alias them.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.launch import launch_facts, row_kernel_name
from anemoi_gt.kernels.primitives import as_index, caller_edge, destination, load_row, row_offsets
from anemoi_gt.kernels.rows import (
    add_scaled,
    dot_rows,
    drop,
    load_heads,
    load_raw,
    load_unpacked,
    raw_offsets,
    store_heads,
    store_unpacked,
    unpack,
    zero_row,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_attributes(
    edge_attr, edge, D: tl.constexpr, BIAS: tl.constexpr, ATTRIBUTES: tl.constexpr
):
    """Load a_e of one edge as float32 [1, ATTRIBUTES]; with BIAS, element D is 1."""
    d = tl.arange(0, ATTRIBUTES)[None, :]
    a = tl.load(edge_attr + edge * D + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.where(d == D, 1.0, a) if BIAS else a


@triton.jit
def _gather(
    rows,
    first,
    source,
    in_row,
    K: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    ROW: tl.constexpr,
    PACKED: tl.constexpr,
):
    """For K edges from `first`, return offsets of their source rows, packed rows and attributes."""
    row, first_src, edge_attr, perm, first_attr = source
    starts = ()
    for j in tl.static_range(K):
        starts = starts + ((first_src + tl.load(row + first + j)) * ROW,)
    packed = ()
    attributes = ()
    for j in tl.static_range(K):
        packed = packed + (load_raw(rows, starts[j], in_row, PACKED),)
        if D > 0:
            edge = first_attr + caller_edge(perm, first + j)
            attributes = attributes + (_load_attributes(edge_attr, edge, D, BIAS, ATTRIBUTES),)
    return starts, packed, attributes


@triton.jit
def _dropout_factors(first, dropout, K: tl.constexpr):
    """Return the dropout factors of K edges from `first` on, [HEADS] each; ones without dropout."""
    factors = ()
    for j in tl.static_range(K):
        factors = factors + (drop(1.0, first + j, dropout),)
    return factors


@triton.jit(
    repr=row_kernel_name("edge_attention_fixed_degree_fwd", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges", "attr_stride", "drop_below"],
)
def edge_attention_fixed_degree_fwd(
    query,  # [B, N_dst, H, C]
    key,  # [B, N_src, H, C]
    value,  # [B, N_src, H, C]
    edge_attr,  # [1 or B, E, D], or None
    projected,  # [B, N_dst, H, ATTRIBUTES] u, or None
    row,  # [E]
    perm,  # [E] or None
    global_edge_id,  # [E] int64, or None
    seed,  # [1] int64, or None
    out,  # [B, N_dst, H, C]
    lse,  # [B, N_dst, H]
    inv_denominator,  # [B, N_dst, H]
    exp_scores,  # [B, E, H] r
    attr_sums,  # [B, N_dst, H, ATTRIBUTES] A, or None
    num_dst,
    num_src,
    num_edges,
    attr_stride,  # edges between the attributes of two batch entries: E, or 0 when they share them
    score_scale,  # scale * log2(e)
    drop_below,
    survivor,
    K: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,  # 0 without raw attributes
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    PACKED: tl.constexpr,  # "bf16" or "fp16": rows are read as packed 16-bit pairs; None
    INT64: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two rows of query, key and value
):
    """Grid (B * N_dst,): a program owns a destination of a batch entry, all heads.

    Writes its rows of out (without W A), lse, inv_denominator and A, and exp_scores of its
    in-edges.
    """
    b, i, node = destination(num_dst, INT64)
    first = as_index(i, INT64) * K
    edge = b * num_edges + first
    h = tl.arange(0, HEADS)
    heads = (h, None if H % HEADS == 0 else h < H)
    in_row = raw_offsets(0, H, C, HEADS, CHANNELS, PACKED)
    WIDTH: tl.constexpr = H * C // 2 if PACKED is not None else H * C
    ROW: tl.constexpr = STRIDE // 2 if PACKED is not None else STRIDE
    source = (row, b * num_src, edge_attr, perm, b * attr_stride)
    starts, k, a = _gather(key, first, source, in_row, K, D, BIAS, ATTRIBUTES, ROW, PACKED)
    q = load_unpacked(query, node * ROW, in_row, PACKED)
    if D > 0:
        sums_at, known = row_offsets(0, H, ATTRIBUTES, HEADS, ATTRIBUTES)
        u = load_row(projected, node, sums_at, known, H * ATTRIBUTES)
    v = ()
    for j in tl.static_range(K):
        v = v + (load_raw(value, starts[j], in_row, PACKED),)
    row_max = tl.full((HEADS,), -float("inf"), tl.float32)
    scores = ()
    for j in tl.static_range(K):
        s = dot_rows(q, unpack(k[j], PACKED))
        if D > 0:
            s += tl.sum(u * a[j], axis=1)
        scores = scores + (s * score_scale,)
        row_max = tl.maximum(row_max, scores[j], propagate_nan=tl.PropagateNan.ALL)
    row_max = tl.where(row_max == -float("inf"), 0.0, row_max)  # -inf minus -inf would be NaN

    denominator = tl.zeros((HEADS,), tl.float32)
    r = ()
    for j in tl.static_range(K):
        r = r + (tl.exp2(scores[j] - row_max),)
        denominator += r[j]
    inverse = 1.0 / tl.where(denominator == 0.0, 1.0, denominator)
    m = _dropout_factors(first, (perm, global_edge_id, seed, b, h, drop_below, survivor), K)
    o = zero_row(HEADS, CHANNELS, PACKED)
    sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    for j in tl.static_range(K):
        p = m[j] * r[j] * inverse
        o = add_scaled(o, p, unpack(v[j], PACKED))
        if D > 0:
            sums += p[:, None] * a[j]
    for j in tl.static_range(K):
        store_heads(exp_scores, edge + j, heads, r[j], H)
    store_unpacked(out, node * WIDTH, in_row, o, PACKED)
    store_heads(lse, node, heads, (row_max + tl.log2(denominator)) * LN_2, H)
    store_heads(inv_denominator, node, heads, tl.where(denominator == 0.0, 0.0, inverse), H)
    if D > 0:
        tl.store(
            attr_sums + node * (H * ATTRIBUTES) + sums_at,
            sums.to(attr_sums.dtype.element_ty),
            mask=known,
        )


@triton.jit(
    repr=row_kernel_name("edge_attention_fixed_degree_bwd_dst", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges", "attr_stride", "drop_below"],
)
def edge_attention_fixed_degree_bwd_dst(
    query,  # [B, N_dst, H, C], not read; gives a profiler the shape
    key,  # [B, N_src, H, C]
    value,  # [B, N_src, H, C]
    edge_attr,  # [1 or B, E, D], or None
    projected,  # [B, N_dst, H, ATTRIBUTES] u, or None
    projected_grad,  # [B, N_dst, H, ATTRIBUTES] g, or None
    grad_out,  # [B, N_dst, H, C]
    grad_lse,  # [B, N_dst, H] or None
    inv_denominator,  # [B, N_dst, H]
    exp_scores,  # [B, E, H] r
    row,  # [E]
    perm,  # [E] or None
    global_edge_id,  # [E] int64, or None
    seed,  # [1] int64, or None
    dquery,  # [B, N_dst, H, C] or None
    p_ds,  # [B, E, 2, H]
    attr_sums,  # [B, N_dst, H, ATTRIBUTES] A, or None
    dscore_sums,  # [B, N_dst, H, ATTRIBUTES] B, or None
    dedge_attr,  # [B, E, D] or None
    num_dst,
    num_src,
    num_edges,
    attr_stride,
    scale,
    drop_below,
    survivor,
    K: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    PACKED: tl.constexpr,
    INT64: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two rows of key, value, grad_out and dquery
):
    """Grid (B * N_dst,): a program owns a destination of a batch entry, all heads.

    Writes its row of dquery (without W B), its A and B, da of its in-edges in the caller's order,
    and their
    p_ds = [m p, ds], which the kernel over sources reads.
    """
    b, i, node = destination(num_dst, INT64)
    first = as_index(i, INT64) * K
    edge = b * num_edges + first
    h = tl.arange(0, HEADS)
    heads = (h, None if H % HEADS == 0 else h < H)
    in_row = raw_offsets(0, H, C, HEADS, CHANNELS, PACKED)
    ROW: tl.constexpr = STRIDE // 2 if PACKED is not None else STRIDE
    source = (row, b * num_src, edge_attr, perm, b * attr_stride)
    starts, v, a = _gather(value, first, source, in_row, K, D, BIAS, ATTRIBUTES, ROW, PACKED)
    do = load_unpacked(grad_out, node * ROW, in_row, PACKED)
    inverse = load_heads(inv_denominator, node, heads, H)
    if D > 0:
        sums_at, known = row_offsets(0, H, ATTRIBUTES, HEADS, ATTRIBUTES)
        g = load_row(projected_grad, node, sums_at, known, H * ATTRIBUTES)
    k = ()
    if dquery is not None:
        for j in tl.static_range(K):
            k = k + (load_raw(key, starts[j], in_row, PACKED),)
    m = _dropout_factors(first, (perm, global_edge_id, seed, b, h, drop_below, survivor), K)
    p_sum = tl.zeros((HEADS,), tl.float32)
    delta = tl.zeros((HEADS,), tl.float32)
    p = ()
    dp = ()
    for j in tl.static_range(K):
        x = dot_rows(do, unpack(v[j], PACKED))
        if D > 0:
            x += tl.sum(g * a[j], axis=1)
        dp = dp + (m[j] * x,)
        p = p + (inverse * load_heads(exp_scores, edge + j, heads, H),)
        p_sum += p[j]
        delta += p[j] * dp[j]
    delta = delta / tl.where(p_sum == 0.0, 1.0, p_sum)
    if grad_lse is not None:
        delta -= load_heads(grad_lse, node, heads, H)
    if dedge_attr is not None:
        u = load_row(projected, node, sums_at, known, H * ATTRIBUTES)

    dq = zero_row(HEADS, CHANNELS, PACKED)
    if D > 0:
        value_sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
        score_sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    for j in tl.static_range(K):
        ds = scale * p[j] * (dp[j] - delta)
        w = m[j] * p[j]
        if dquery is not None:
            dq = add_scaled(dq, ds, unpack(k[j], PACKED))
        if D > 0:
            value_sums += w[:, None] * a[j]
            score_sums += ds[:, None] * a[j]
        store_heads(p_ds, 2 * (edge + j), heads, w, H)
        store_heads(p_ds, 2 * (edge + j) + 1, heads, ds, H)
        if dedge_attr is not None:
            d = tl.arange(0, ATTRIBUTES)
            da = tl.sum(w[:, None] * g + ds[:, None] * u, axis=0)
            offset = (b * num_edges + caller_edge(perm, first + j)) * D
            tl.store(dedge_attr + offset + d, da.to(dedge_attr.dtype.element_ty), mask=d < D)
    if dquery is not None:
        store_unpacked(dquery, node * ROW, in_row, dq, PACKED)
    if D > 0:
        offset = node * (H * ATTRIBUTES) + sums_at
        tl.store(attr_sums + offset, value_sums.to(attr_sums.dtype.element_ty), mask=known)
        tl.store(dscore_sums + offset, score_sums.to(dscore_sums.dtype.element_ty), mask=known)
