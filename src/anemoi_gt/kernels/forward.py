"""Edge attention, forward: the kernel that walks the in-edges of each destination and gathers rows of heads x channels.

For destination i, source j, edge e = (j -> i), with attributes a_e and u_i = W^T q_i ready from
`anemoi_gt.kernels.edge_features` (the bias is one more attribute that is always 1):

    s_e   = (<q_i, k_j> + <u_i, a_e>) * scale * log2(e)
    r_e   = 2^(s_e - max s)                                    the numerator, stored [E, H]
    p_e   = r_e * inverse_i,       inverse = 1 / sum_e r_e     stored [N_dst, H]
    lse_i = (max s + log2 sum_e r_e) / log2(e)
    o_i   = sum_e m_e p_e v_j,     A_i = sum_e m_e p_e a_e     W A_i joins o_i in `attributes`

m_e is the dropout factor. Embedded features x_e [H, C] stand for W a_e: k_j + x_e, v_j + x_e.

Work on D numbers an edge and work on a row of C numbers an edge are separate loops over the same edges: in one loop the
layouts of [heads, D] and [heads, C] meet at every edge. The former are small matrix products where a node has edges enough.
What a loop hands to the next goes through [E, H] arrays, which stay in the cache; the barrier between them makes it visible to
all threads of the program. No loop reads and writes one array: several warps may hold the same number, and one could
overwrite it before another has read it. Arrays of D numbers a node have ATTRIBUTES columns, a power of two, zero behind
D + BIAS: whole rows, no mask.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.naming import launch_facts, row_kernel_name
from anemoi_gt.kernels.primitives import (
    caller_edges,
    head_offsets,
    keep_factor,
    load_attributes,
    product,
    project_edges,
    row_offsets,
    wide,
)
from anemoi_gt.kernels.rows import (
    add_halves,
    dot_halves,
    drop,
    gather,
    gather_features,
    half_offsets,
    joined,
    load_halves,
    load_numbers,
    scale_halves,
    store_halves,
    store_heads,
    zero_halves,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    repr=row_kernel_name("edge_attention_fwd", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges", "attr_stride", "drop_below"],
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
    order,  # [N_dst] or None
    seed,  # [1] int64, or None
    out,  # [B, N_dst, H, C]
    lse,  # [B, N_dst, H]
    inverse,  # [B, N_dst, H]
    scores,  # [B, E, H] float32, scratch
    numerators,  # [B, E, H] r
    attr_sums,  # [B, N_dst, H, ATTRIBUTES] A, or None
    num_dst,
    num_src,
    num_edges,
    attr_stride,  # edges between the attributes of two samples: E, or 0 when they share them
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
    PAIRS: tl.constexpr,  # rows are read as pairs of bfloat16
    UNROLL: tl.constexpr,  # edges in flight
    EDGES: tl.constexpr,  # of a tile of attributes
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid (B * N_dst, ceil(H / HEADS)): a program owns HEADS heads of one destination of a sample.

    Writes its rows of out (without W A), lse, inverse and A, and the numerators of its in-edges.
    """
    sample, i = tl.program_id(0) // num_dst, tl.program_id(0) % num_dst
    if order is not None:
        i = tl.load(order + i)
    node = wide(sample, WIDE) * num_dst + i
    begin, end = tl.load(colptr + i), tl.load(colptr + i + 1)
    head = tl.program_id(1) * HEADS
    h = head + tl.arange(0, HEADS)
    offsets, mask = half_offsets(head, H, C, HEADS, CHANNELS, PAIRS)
    WIDTH: tl.constexpr = H * C // 2 if PAIRS else H * C
    first_edge = wide(sample, WIDE) * num_edges
    first_src = wide(sample, WIDE) * num_src
    attr_first = wide(sample, WIDE) * attr_stride
    if D > 0:
        project_edges(
            projected, edge_attr, perm, numerators, node, first_edge, attr_first, begin, end, head, score_scale,
            H, D, BIAS, HEADS, ATTRIBUTES, EDGES, PRECISION, WIDE,
        )  # fmt: skip
        tl.debug_barrier()

    q = load_halves(query, node * WIDTH, offsets, mask, PAIRS)
    high = tl.full((HEADS,), -float("inf"), tl.float32)
    middle = end - (end - begin) % UNROLL
    for e in range(begin, middle, UNROLL):
        high = _score(
            high, q, key, edge_attr, row, perm, numerators, scores, first_src, first_edge, attr_first, e, h, offsets, mask,
            score_scale, H, WIDTH, D, EMBEDDED, HEADS, PAIRS, UNROLL, WIDE,
        )  # fmt: skip
    for e in range(middle, end):
        high = _score(
            high, q, key, edge_attr, row, perm, numerators, scores, first_src, first_edge, attr_first, e, h, offsets, mask,
            score_scale, H, WIDTH, D, EMBEDDED, HEADS, PAIRS, 1, WIDE,
        )  # fmt: skip
    high = tl.where(high == -float("inf"), 0.0, high)  # -inf minus -inf would be NaN
    tl.debug_barrier()

    total = tl.zeros((HEADS,), tl.float32)
    o = zero_halves(HEADS, CHANNELS, PAIRS)
    for e in range(begin, middle, UNROLL):
        total, o = _sum_values(
            total, o, high, value, edge_attr, row, perm, global_edge_id, seed, scores, numerators, sample, first_src, first_edge,
            attr_first, e, h, offsets, mask, drop_below, survivor, H, WIDTH, EMBEDDED, HEADS, PAIRS, UNROLL, WIDE,
        )  # fmt: skip
    for e in range(middle, end):
        total, o = _sum_values(
            total, o, high, value, edge_attr, row, perm, global_edge_id, seed, scores, numerators, sample, first_src, first_edge,
            attr_first, e, h, offsets, mask, drop_below, survivor, H, WIDTH, EMBEDDED, HEADS, PAIRS, 1, WIDE,
        )  # fmt: skip
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    store_halves(out, node * WIDTH, offsets, mask, scale_halves(share, o, PAIRS), PAIRS)
    store_heads(lse, node * H + h, (high + tl.log2(total)) * LN_2, h, H, HEADS)
    store_heads(inverse, node * H + h, tl.where(total == 0.0, 0.0, share), h, H, HEADS)
    if D > 0:
        _sum_attributes(
            edge_attr, perm, global_edge_id, seed, numerators, attr_sums, sample, node, first_edge, attr_first, begin, end,
            head, inverse, drop_below, survivor, H, D, BIAS, HEADS, ATTRIBUTES, EDGES, PRECISION, WIDE,
        )  # fmt: skip


@triton.jit
def _score(
    high, q, key, edge_attr, row, perm, numerators, scores, first_src, first_edge, attr_first, e, h, offsets, mask,
    score_scale,
    H: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, EMBEDDED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    EACH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the scores of edges e .. e + EACH - 1; return the highest so far."""
    k = gather(key, row, first_src, e, offsets, mask, WIDTH, PAIRS, EACH, WIDE)
    features = gather_features(edge_attr, perm, attr_first, e, offsets, mask, EMBEDDED, WIDTH, PAIRS, EACH, WIDE)
    if D > 0:
        t = load_numbers(numerators, first_edge, e, h, H, HEADS, EACH, WIDE)
    found = ()
    for x in tl.static_range(EACH):
        s = dot_halves(q, joined(k, features, x, EMBEDDED, PAIRS), PAIRS) * score_scale
        if D > 0:
            s += t[x]
        high = tl.maximum(high, s, propagate_nan=tl.PropagateNan.ALL)
        found = found + (s,)
    for x in tl.static_range(EACH):
        store_heads(scores, wide(first_edge + e + x, WIDE) * H + h, found[x], h, H, HEADS)
    return high


@triton.jit
def _sum_values(
    total, o, high, value, edge_attr, row, perm, global_edge_id, seed, scores, numerators, sample, first_src, first_edge,
    attr_first, e, h, offsets, mask, drop_below, survivor,
    H: tl.constexpr, WIDTH: tl.constexpr, EMBEDDED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    EACH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the numerators of edges e .. e + EACH - 1; return their sum, and that of the values which they weigh, so far."""
    v = gather(value, row, first_src, e, offsets, mask, WIDTH, PAIRS, EACH, WIDE)
    features = gather_features(edge_attr, perm, attr_first, e, offsets, mask, EMBEDDED, WIDTH, PAIRS, EACH, WIDE)
    s = load_numbers(scores, first_edge, e, h, H, HEADS, EACH, WIDE)
    for x in tl.static_range(EACH):
        r = tl.exp2(s[x] - high)
        store_heads(numerators, wide(first_edge + e + x, WIDE) * H + h, r, h, H, HEADS)
        total += r
        r = drop(r, e + x, perm, global_edge_id, seed, sample, h, drop_below, survivor)
        o = add_halves(o, r, joined(v, features, x, EMBEDDED, PAIRS), PAIRS)
    return total, o


@triton.jit
def _sum_attributes(
    edge_attr, perm, global_edge_id, seed, numerators, attr_sums, sample, node, first_edge, attr_first, begin, end,
    head, inverse, drop_below, survivor,
    H: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, ATTRIBUTES: tl.constexpr,
    EDGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """attr_sums[node, h] = sum_e m_e p_e a_e over the edges begin .. end - 1."""
    h = head + tl.arange(0, HEADS)
    offsets, mask = row_offsets(head, H, ATTRIBUTES, HEADS, ATTRIBUTES)
    tl.debug_barrier()
    sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    for start in range(begin, end, EDGES):
        e = start + tl.arange(0, EDGES)
        inside = e < end
        edge = caller_edges(perm, e, inside)
        a = load_attributes(edge_attr, attr_first + edge, inside, D, BIAS, ATTRIBUTES, WIDE)
        at, known = head_offsets(first_edge + e, inside, h, H, H, WIDE)
        r = tl.load(numerators + at, mask=known, other=0.0)  # [EDGES, HEADS]
        if seed is not None:
            number = edge if global_edge_id is None else tl.load(global_edge_id + e, mask=inside, other=0)
            r *= keep_factor(seed, number[:, None], sample, h[None, :], drop_below, survivor)
        if EDGES == 1:
            sums += tl.sum(r[:, :, None] * a[:, None, :], axis=0)
        else:
            sums = product(tl.trans(r), a, sums, PRECISION)
    sums *= tl.load(inverse + node * H + h, mask=h < H, other=0.0)[:, None]
    tl.store(attr_sums + node * (H * ATTRIBUTES) + offsets, sums.to(attr_sums.dtype.element_ty), mask=mask)
