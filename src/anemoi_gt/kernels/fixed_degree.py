"""Edge attention where every destination has the same few in-edges, K, as k nearest neighbours give: forward and backward.

The equations are those of `anemoi_gt.kernels.forward` and `backward`. With K known when compiled there is no loop over edges
and no second one, hence no array [E, H] of scores between them and no barrier: the rows of all edges of a destination are in
flight together, and its scores stay in registers. The pass backward over destinations has w, ds, u and g in registers too, so that
A, B and the gradient of edge_attr need no kernel of their own.

All loads stand before the first store: none may pass one.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.naming import launch_facts, row_kernel_name
from anemoi_gt.kernels.primitives import caller_edge, keep_factor, row_offsets, wide
from anemoi_gt.kernels.rows import (
    add_halves,
    dot_halves,
    half_offsets,
    halves,
    load_halves,
    load_heads,
    load_raw,
    store_halves,
    store_heads,
    zero_halves,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_attributes(
    edge_attr, edge, D: tl.constexpr, BIAS: tl.constexpr, ATTRIBUTES: tl.constexpr, WIDE: tl.constexpr
):
    """a_e of one edge as float32 [1, ATTRIBUTES], 1 after the last with BIAS: two dimensions, so that all heads have it."""
    d = tl.arange(0, ATTRIBUTES)[None, :]
    a = tl.load(edge_attr + wide(edge, WIDE) * D + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.where(d == D, 1.0, a) if BIAS else a


@triton.jit
def _gather(
    rows, row, edge_attr, perm, first_src, attr_first, first, offsets, mask,
    K: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, ATTRIBUTES: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Of the K edges from `first` on: where the rows of their sources are, these rows raw, and their attributes."""
    places = ()
    for j in tl.static_range(K):
        places = places + (wide(first_src + tl.load(row + first + j), WIDE) * WIDTH,)
    found = ()
    attributes = ()
    for j in tl.static_range(K):
        found = found + (load_raw(rows, places[j], offsets, mask, PAIRS),)
        if D > 0:
            edge = attr_first + caller_edge(perm, first + j)
            attributes = attributes + (_load_attributes(edge_attr, edge, D, BIAS, ATTRIBUTES, WIDE),)
    return places, found, attributes


@triton.jit
def _keep_factors(
    perm, global_edge_id, seed, first, sample, h, drop_below, survivor, K: tl.constexpr, HEADS: tl.constexpr
):
    """Dropout factors of the K edges from `first` on, [HEADS] each; ones without dropout."""
    found = ()
    for j in tl.static_range(K):
        if seed is not None:
            number = caller_edge(perm, first + j) if global_edge_id is None else tl.load(global_edge_id + first + j)
            found = found + (keep_factor(seed, number, sample, h, drop_below, survivor),)
        else:
            found = found + (1.0,)
    return found


@triton.jit(
    repr=row_kernel_name("edge_attention_equal_fwd", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges", "attr_stride", "drop_below"],
)
def edge_attention_equal_fwd(
    query,  # [B, N_dst, H, C]
    key,  # [B, N_src, H, C]
    value,  # [B, N_src, H, C]
    edge_attr,  # [1 or B, E, D], or None
    projected,  # [B, N_dst, H, ATTRIBUTES] u, or None
    row,  # [E]
    perm,  # [E] or None
    global_edge_id,  # [E] int64, or None
    order,  # [N_dst] or None
    seed,  # [1] int64, or None
    out,  # [B, N_dst, H, C]
    lse,  # [B, N_dst, H]
    inverse,  # [B, N_dst, H]
    numerators,  # [B, E, H] r
    attr_sums,  # [B, N_dst, H, ATTRIBUTES] A, or None
    num_dst,
    num_src,
    num_edges,
    attr_stride,  # edges between the attributes of two samples: E, or 0 when they share them
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
    PAIRS: tl.constexpr,  # rows are read as pairs of bfloat16
    WIDE: tl.constexpr,
):
    """Grid (B * N_dst,): a program owns a destination of a sample, all heads.

    Writes its rows of out (without W A), lse, inverse and A, and the numerators of its in-edges.
    """
    sample, i = tl.program_id(0) // num_dst, tl.program_id(0) % num_dst
    if order is not None:
        i = tl.load(order + i)
    node = wide(sample, WIDE) * num_dst + i
    h = tl.arange(0, HEADS)
    offsets, mask = half_offsets(0, H, C, HEADS, CHANNELS, PAIRS)
    WIDTH: tl.constexpr = H * C // 2 if PAIRS else H * C
    first, first_edge = wide(i, WIDE) * K, wide(sample, WIDE) * num_edges
    places, k, a = _gather(
        key, row, edge_attr, perm, wide(sample, WIDE) * num_src, wide(sample, WIDE) * attr_stride, first, offsets, mask,
        K, D, BIAS, ATTRIBUTES, WIDTH, PAIRS, WIDE,
    )  # fmt: skip
    q = load_halves(query, node * WIDTH, offsets, mask, PAIRS)
    if D > 0:
        sums_at, known = row_offsets(0, H, ATTRIBUTES, HEADS, ATTRIBUTES)
        u = tl.load(projected + node * (H * ATTRIBUTES) + sums_at, mask=known, other=0.0).to(tl.float32)
    v = ()
    for j in tl.static_range(K):
        v = v + (load_raw(value, places[j], offsets, mask, PAIRS),)
    high = tl.full((HEADS,), -float("inf"), tl.float32)
    scores = ()
    for j in tl.static_range(K):
        s = dot_halves(q, halves(k[j], PAIRS), PAIRS)
        if D > 0:
            s += tl.sum(u * a[j], axis=1)
        scores = scores + (s * score_scale,)
        high = tl.maximum(high, scores[j], propagate_nan=tl.PropagateNan.ALL)
    high = tl.where(high == -float("inf"), 0.0, high)  # -inf minus -inf would be NaN

    total = tl.zeros((HEADS,), tl.float32)
    r = ()
    for j in tl.static_range(K):
        r = r + (tl.exp2(scores[j] - high),)
        total += r[j]
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    m = _keep_factors(perm, global_edge_id, seed, first, sample, h, drop_below, survivor, K, HEADS)
    o = zero_halves(HEADS, CHANNELS, PAIRS)
    sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    for j in tl.static_range(K):
        p = m[j] * r[j] * share
        o = add_halves(o, p, halves(v[j], PAIRS), PAIRS)
        if D > 0:
            sums += p[:, None] * a[j]
    for j in tl.static_range(K):
        store_heads(numerators, wide(first_edge + first + j, WIDE) * H + h, r[j], h, H, HEADS)
    store_halves(out, node * WIDTH, offsets, mask, o, PAIRS)
    store_heads(lse, node * H + h, (high + tl.log2(total)) * LN_2, h, H, HEADS)
    store_heads(inverse, node * H + h, tl.where(total == 0.0, 0.0, share), h, H, HEADS)
    if D > 0:
        tl.store(attr_sums + node * (H * ATTRIBUTES) + sums_at, sums.to(attr_sums.dtype.element_ty), mask=known)


@triton.jit(
    repr=row_kernel_name("edge_attention_equal_bwd_dst", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges", "attr_stride", "drop_below"],
)
def edge_attention_equal_bwd_dst(
    query,  # [B, N_dst, H, C], not read; a profiler is told its shape
    key,  # [B, N_src, H, C]
    value,  # [B, N_src, H, C]
    edge_attr,  # [1 or B, E, D], or None
    projected,  # [B, N_dst, H, ATTRIBUTES] u, or None
    projected_grad,  # [B, N_dst, H, ATTRIBUTES] g, or None
    grad_out,  # [B, N_dst, H, C]
    grad_lse,  # [B, N_dst, H] or None
    inverse,  # [B, N_dst, H]
    numerators,  # [B, E, H] r
    row,  # [E]
    perm,  # [E] or None
    global_edge_id,  # [E] int64, or None
    order,  # [N_dst] or None
    seed,  # [1] int64, or None
    dquery,  # [B, N_dst, H, C] or None
    weights,  # [B, E, 2, H]
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
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid (B * N_dst,): a program owns a destination of a sample, all heads.

    Writes its row of dquery (without W B), its A and B, da of its in-edges at the caller's place, and in weights [m p, ds] of them,
    which the kernel over sources reads.
    """
    sample, i = tl.program_id(0) // num_dst, tl.program_id(0) % num_dst
    if order is not None:
        i = tl.load(order + i)
    node = wide(sample, WIDE) * num_dst + i
    h = tl.arange(0, HEADS)
    offsets, mask = half_offsets(0, H, C, HEADS, CHANNELS, PAIRS)
    WIDTH: tl.constexpr = H * C // 2 if PAIRS else H * C
    first, first_edge = wide(i, WIDE) * K, wide(sample, WIDE) * num_edges
    places, v, a = _gather(
        value, row, edge_attr, perm, wide(sample, WIDE) * num_src, wide(sample, WIDE) * attr_stride, first, offsets, mask,
        K, D, BIAS, ATTRIBUTES, WIDTH, PAIRS, WIDE,
    )  # fmt: skip
    do = load_halves(grad_out, node * WIDTH, offsets, mask, PAIRS)
    share = load_heads(inverse, node * H + h, h, H, HEADS)
    if D > 0:
        sums_at, known = row_offsets(0, H, ATTRIBUTES, HEADS, ATTRIBUTES)
        g = tl.load(projected_grad + node * (H * ATTRIBUTES) + sums_at, mask=known, other=0.0).to(tl.float32)
    k = ()
    if dquery is not None:
        for j in tl.static_range(K):
            k = k + (load_raw(key, places[j], offsets, mask, PAIRS),)
    m = _keep_factors(perm, global_edge_id, seed, first, sample, h, drop_below, survivor, K, HEADS)
    total = tl.zeros((HEADS,), tl.float32)
    delta = tl.zeros((HEADS,), tl.float32)
    p = ()
    dp = ()
    for j in tl.static_range(K):
        x = dot_halves(do, halves(v[j], PAIRS), PAIRS)
        if D > 0:
            x += tl.sum(g * a[j], axis=1)
        dp = dp + (m[j] * x,)
        p = p + (share * load_heads(numerators, wide(first_edge + first + j, WIDE) * H + h, h, H, HEADS),)
        total += p[j]
        delta += p[j] * dp[j]
    delta = delta / tl.where(total == 0.0, 1.0, total)
    if grad_lse is not None:
        delta -= load_heads(grad_lse, node * H + h, h, H, HEADS)
    if dedge_attr is not None:
        u = tl.load(projected + node * (H * ATTRIBUTES) + sums_at, mask=known, other=0.0).to(tl.float32)

    dq = zero_halves(HEADS, CHANNELS, PAIRS)
    if D > 0:
        value_sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
        score_sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    for j in tl.static_range(K):
        ds = scale * p[j] * (dp[j] - delta)
        w = m[j] * p[j]
        if dquery is not None:
            dq = add_halves(dq, ds, halves(k[j], PAIRS), PAIRS)
        if D > 0:
            value_sums += w[:, None] * a[j]
            score_sums += ds[:, None] * a[j]
        pair = wide(first_edge + first + j, WIDE) * (2 * H) + h
        store_heads(weights, pair, w, h, H, HEADS)
        store_heads(weights, pair + H, ds, h, H, HEADS)
        if dedge_attr is not None:
            d = tl.arange(0, ATTRIBUTES)
            da = tl.sum(w[:, None] * g + ds[:, None] * u, axis=0)
            edge = wide(first_edge + caller_edge(perm, first + j), WIDE)
            tl.store(dedge_attr + edge * D + d, da.to(dedge_attr.dtype.element_ty), mask=d < D)
    if dquery is not None:
        store_halves(dquery, node * WIDTH, offsets, mask, dq, PAIRS)
    if D > 0:
        at = node * (H * ATTRIBUTES) + sums_at
        tl.store(attr_sums + at, value_sums.to(attr_sums.dtype.element_ty), mask=known)
        tl.store(dscore_sums + at, score_sums.to(dscore_sums.dtype.element_ty), mask=known)
