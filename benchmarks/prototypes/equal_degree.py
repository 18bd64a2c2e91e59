"""Edge attention where every destination has K in-edges, known when compiled, as k nearest gives (a decoder's 3).

The equations are those of `anemoi_gt.kernels.forward` and `backward`. What K changes: no loop over edges and no second one, so no array
[E, H] of scores between them and no barrier; the scores of a destination stay in registers, and the rows of all its edges are in flight
together. The backward over destinations has w, ds, u and g in registers, so that A, B and the gradient of edge_attr need no kernel of
their own.

A row of bfloat16 is read as pairs: the two numbers of 32 bits become float32 with one instruction each, where a conversion of
16-bit numbers takes two. Sums are over the even and the odd channels, then over both.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.naming import launch_facts, row_kernel_name
from anemoi_gt.kernels.primitives import caller_edge, keep_factor, row_offsets, wide

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_halves(rows, place, offsets, mask, PAIRS: tl.constexpr):
    """A row as float32: with PAIRS the even and the odd channels, [HEADS, CHANNELS / 2] each, else (all of them,)."""
    if PAIRS:
        pairs = tl.load(rows.to(tl.pointer_type(tl.int32)) + place + offsets, mask=mask, other=0)
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        return (tl.load(rows + place + offsets, mask=mask, other=0.0).to(tl.float32),)


@triton.jit
def store_halves(
    rows, place, offsets, mask, halves, H: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr, head, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write what `load_halves` would read."""
    if PAIRS:
        row = tl.reshape(tl.join(halves[0], halves[1]), (HEADS, CHANNELS))
        offsets, mask = row_offsets(head, H, C, HEADS, CHANNELS)
        tl.store(rows + place * 2 + offsets, row.to(rows.dtype.element_ty), mask=mask)
    else:
        tl.store(rows + place + offsets, halves[0].to(rows.dtype.element_ty), mask=mask)


@triton.jit
def dot_halves(x, y, PAIRS: tl.constexpr):
    """<x, y> of each head, [HEADS]."""
    if PAIRS:
        return tl.sum(x[0] * y[0] + x[1] * y[1], axis=1)
    else:
        return tl.sum(x[0] * y[0], axis=1)


@triton.jit
def add_halves(x, factor, y, PAIRS: tl.constexpr):
    """Return x + factor y with one factor a head."""
    if PAIRS:
        return x[0] + factor[:, None] * y[0], x[1] + factor[:, None] * y[1]
    else:
        return (x[0] + factor[:, None] * y[0],)


@triton.jit
def zero_halves(HEADS: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr):
    """A row of zeros."""
    if PAIRS:
        return tl.zeros((HEADS, CHANNELS // 2), tl.float32), tl.zeros((HEADS, CHANNELS // 2), tl.float32)
    else:
        return (tl.zeros((HEADS, CHANNELS), tl.float32),)


@triton.jit
def half_offsets(
    head, H: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr
):
    """Offsets and mask of a row for `load_halves`."""
    if PAIRS:
        return row_offsets(head, H, C // 2, HEADS, CHANNELS // 2)
    else:
        return row_offsets(head, H, C, HEADS, CHANNELS)


@triton.jit
def load_attribute_row(
    edge_attr, edge, D: tl.constexpr, BIAS: tl.constexpr, ATTRIBUTES: tl.constexpr, WIDE: tl.constexpr
):
    """a_e of one edge as float32 [1, ATTRIBUTES], 1 after the last with BIAS: two dimensions, so that all heads have it."""
    d = tl.arange(0, ATTRIBUTES)[None, :]
    a = tl.load(edge_attr + wide(edge, WIDE) * D + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.where(d == D, 1.0, a) if BIAS else a


@triton.jit(
    repr=row_kernel_name("edge_attention_equal_fwd", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges", "attr_stride", "drop_below"],
)
def equal_fwd(
    query,  # [B, N_dst, H, C]
    key,  # [B, N_src, H, C]
    value,  # [B, N_src, H, C]
    edge_attr,  # [1 or B, E, D], or None
    projected,  # [B, N_dst, H, ATTRIBUTES] u, or None
    row,  # [E]
    perm,  # [E] or None
    edge_id,  # [E] int64, or None
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
    attr_stride,
    score_scale,  # scale * log2(e)
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
    """Grid (B * N_dst, ceil(H / HEADS)): a program owns HEADS heads of one destination of a sample."""
    sample, i = tl.program_id(0) // num_dst, tl.program_id(0) % num_dst
    if order is not None:
        i = tl.load(order + i)
    node = wide(sample, WIDE) * num_dst + i
    head = tl.program_id(1) * HEADS
    h = head + tl.arange(0, HEADS)
    offsets, mask = half_offsets(head, H, C, HEADS, CHANNELS, PAIRS)
    WIDTH: tl.constexpr = H * C // 2 if PAIRS else H * C
    first_edge = wide(sample, WIDE) * num_edges
    first_src = wide(sample, WIDE) * num_src
    attr_first = wide(sample, WIDE) * attr_stride
    q = load_halves(query, node * WIDTH, offsets, mask, PAIRS)
    at_attr, known = row_offsets(head, H, ATTRIBUTES, HEADS, ATTRIBUTES)
    if D > 0:
        u = tl.load(projected + node * (H * ATTRIBUTES) + at_attr, mask=known, other=0.0).to(tl.float32)
    scores = ()
    attributes = ()
    high = tl.full((HEADS,), -float("inf"), tl.float32)
    for j in tl.static_range(K):
        e = i * K + j
        k = load_halves(key, wide(first_src + tl.load(row + e), WIDE) * WIDTH, offsets, mask, PAIRS)
        s = dot_halves(q, k, PAIRS)
        if D > 0:
            a = load_attribute_row(edge_attr, attr_first + caller_edge(perm, e), D, BIAS, ATTRIBUTES, WIDE)
            s += tl.sum(u * a, axis=1)
            attributes = attributes + (a,)
        s *= score_scale
        scores = scores + (s,)
        high = tl.maximum(high, s, propagate_nan=tl.PropagateNan.ALL)
    high = tl.where(high == -float("inf"), 0.0, high)  # -inf minus -inf would be NaN

    total = tl.zeros((HEADS,), tl.float32)
    o = zero_halves(HEADS, CHANNELS, PAIRS)
    sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    for j in tl.static_range(K):
        e = i * K + j
        v = load_halves(value, wide(first_src + tl.load(row + e), WIDE) * WIDTH, offsets, mask, PAIRS)
        r = tl.exp2(scores[j] - high)
        tl.store(numerators + wide(first_edge + e, WIDE) * H + h, r, mask=h < H)
        total += r
        if seed is not None:
            number = caller_edge(perm, e) if edge_id is None else tl.load(edge_id + e)
            r *= keep_factor(seed, number, sample, h, drop_below, survivor)
        o = add_halves(o, r, v, PAIRS)
        if D > 0:
            sums += r[:, None] * attributes[j]
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    o = add_halves(zero_halves(HEADS, CHANNELS, PAIRS), share, o, PAIRS)
    store_halves(out, node * WIDTH, offsets, mask, o, H, C, HEADS, CHANNELS, PAIRS, head, WIDTH)
    at = node * H + h
    tl.store(lse + at, (high + tl.log2(total)) * LN_2, mask=h < H)
    tl.store(inverse + at, tl.where(total == 0.0, 0.0, share), mask=h < H)
    if D > 0:
        sums *= share[:, None]
        tl.store(attr_sums + node * (H * ATTRIBUTES) + at_attr, sums.to(attr_sums.dtype.element_ty), mask=known)


@triton.jit(
    repr=row_kernel_name("edge_attention_equal_bwd_dst", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges", "attr_stride", "drop_below"],
)
def equal_bwd_dst(
    query,  # [B, N_dst, H, C], not read
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
    edge_id,  # [E] int64, or None
    order,  # [N_dst] or None
    seed,  # [1] int64, or None
    dquery,  # [B, N_dst, H, C] or None
    weights,  # [B, E, 2, H]
    attr_sums,  # [B, N_dst, H, ATTRIBUTES] A, or None
    dscore_sums,  # [B, N_dst, H, ATTRIBUTES] B, or None
    dedge_attr,  # [B, E, D] or None; wants all heads in one program
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
    """Grid (B * N_dst, ceil(H / HEADS)): a program owns HEADS heads of one destination of a sample."""
    sample, i = tl.program_id(0) // num_dst, tl.program_id(0) % num_dst
    if order is not None:
        i = tl.load(order + i)
    node = wide(sample, WIDE) * num_dst + i
    head = tl.program_id(1) * HEADS
    h = head + tl.arange(0, HEADS)
    offsets, mask = half_offsets(head, H, C, HEADS, CHANNELS, PAIRS)
    WIDTH: tl.constexpr = H * C // 2 if PAIRS else H * C
    first_edge = wide(sample, WIDE) * num_edges
    first_src = wide(sample, WIDE) * num_src
    attr_first = wide(sample, WIDE) * attr_stride
    do = load_halves(grad_out, node * WIDTH, offsets, mask, PAIRS)
    share = tl.load(inverse + node * H + h, mask=h < H, other=0.0)
    at_attr, known = row_offsets(head, H, ATTRIBUTES, HEADS, ATTRIBUTES)
    if D > 0:
        g = tl.load(projected_grad + node * (H * ATTRIBUTES) + at_attr, mask=known, other=0.0).to(tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    delta = tl.zeros((HEADS,), tl.float32)
    shares = ()
    products = ()
    factors = ()
    attributes = ()
    for j in tl.static_range(K):
        e = i * K + j
        v = load_halves(value, wide(first_src + tl.load(row + e), WIDE) * WIDTH, offsets, mask, PAIRS)
        dp = dot_halves(do, v, PAIRS)
        if D > 0:
            a = load_attribute_row(edge_attr, attr_first + caller_edge(perm, e), D, BIAS, ATTRIBUTES, WIDE)
            dp += tl.sum(g * a, axis=1)
            attributes = attributes + (a,)
        if seed is not None:
            number = caller_edge(perm, e) if edge_id is None else tl.load(edge_id + e)
            m = keep_factor(seed, number, sample, h, drop_below, survivor)
            dp *= m
            factors = factors + (m,)
        p = share * tl.load(numerators + wide(first_edge + e, WIDE) * H + h, mask=h < H, other=0.0)
        total += p
        delta += p * dp
        shares = shares + (p,)
        products = products + (dp,)
    delta = delta / tl.where(total == 0.0, 1.0, total)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + node * H + h, mask=h < H, other=0.0)

    dq = zero_halves(HEADS, CHANNELS, PAIRS)
    if D > 0:
        value_sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
        score_sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    if dedge_attr is not None:
        u = tl.load(projected + node * (H * ATTRIBUTES) + at_attr, mask=known, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        e = i * K + j
        p = shares[j]
        ds = scale * p * (products[j] - delta)
        if seed is not None:
            p *= factors[j]
        pair = weights + wide(first_edge + e, WIDE) * (2 * H) + h
        tl.store(pair, p.to(weights.dtype.element_ty), mask=h < H)
        tl.store(pair + H, ds.to(weights.dtype.element_ty), mask=h < H)
        if dquery is not None:
            k = load_halves(key, wide(first_src + tl.load(row + e), WIDE) * WIDTH, offsets, mask, PAIRS)
            dq = add_halves(dq, ds, k, PAIRS)
        if D > 0:
            value_sums += p[:, None] * attributes[j]
            score_sums += ds[:, None] * attributes[j]
        if dedge_attr is not None:
            d = tl.arange(0, ATTRIBUTES)
            da = tl.sum(p[:, None] * g + ds[:, None] * u, axis=0)
            at = wide(sample, WIDE) * num_edges + caller_edge(perm, e)
            tl.store(dedge_attr + wide(at, WIDE) * D + d, da.to(dedge_attr.dtype.element_ty), mask=d < D)
    if dquery is not None:
        store_halves(dquery, node * WIDTH, offsets, mask, dq, H, C, HEADS, CHANNELS, PAIRS, head, WIDTH)
    if D > 0:
        at = node * (H * ATTRIBUTES) + at_attr
        tl.store(attr_sums + at, value_sums.to(attr_sums.dtype.element_ty), mask=known)
        tl.store(dscore_sums + at, score_sums.to(dscore_sums.dtype.element_ty), mask=known)
