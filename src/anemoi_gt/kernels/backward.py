"""Edge attention, backward: the kernels that walk edges and gather rows of heads x channels.

Symbols as in `anemoi_gt.kernels.forward`, with the gradients do_i, dlse_i that arrive and g_i = W^T do_i ready from
`anemoi_gt.kernels.edge_features`.

    over destinations:
        dp_e    = m_e (<do_i, v_j> + <g_i, a_e>)
        delta_i = sum_e p_e dp_e / sum_e p_e                   with the forward's p, so that sum_e ds_e vanishes
        ds_e    = scale * p_e (dp_e - delta_i + dlse_i)
        dq_i    = sum_e ds_e k_j                               W B_i joins dq_i in `attributes`
        dx_e    = m_e p_e do_i + ds_e q_i                      embedded features only

    over sources:
        dk_j = sum_e ds_e q_i,     dv_j = sum_e m_e p_e do_i
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.naming import launch_facts, row_kernel_name
from anemoi_gt.kernels.primitives import caller_edge, load_row, project_edges, row_offsets, wide
from anemoi_gt.kernels.rows import (
    add_halves,
    dot_halves,
    drop,
    gather,
    gather_features,
    half_offsets,
    joined,
    load_halves,
    load_heads,
    load_numbers,
    scale_halves,
    store_halves,
    store_heads,
    zero_halves,
)


@triton.jit(
    repr=row_kernel_name("edge_attention_bwd_dst", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges", "attr_stride", "drop_below"],
)
def edge_attention_bwd_dst(
    query,  # [B, N_dst, H, C], read for embedded features only
    key,  # [B, N_src, H, C]
    value,  # [B, N_src, H, C]
    edge_attr,  # [1 or B, E, D] or [1 or B, E, H, C] or None
    projected,  # [B, N_dst, H, ATTRIBUTES] g, or None
    grad_out,  # [B, N_dst, H, C]
    grad_lse,  # [B, N_dst, H] or None
    inverse,  # [B, N_dst, H]
    numerators,  # [B, E, H] r
    colptr,  # [N_dst + 1]
    row,  # [E]
    perm,  # [E] or None
    global_edge_id,  # [E] int64, or None
    order,  # [N_dst] or None
    seed,  # [1] int64, or None
    dquery,  # [B, N_dst, H, C] or None
    dedge,  # [B, E, H, C] or None
    weights,  # [B, E, 2, H]
    products,  # [B, E, H] float32, scratch
    dweights,  # [B, E, H] float32, scratch
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
    PAIRS: tl.constexpr,  # rows are read as pairs of bfloat16
    UNROLL: tl.constexpr,  # edges in flight
    EDGES: tl.constexpr,  # of a tile of attributes
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid (B * N_dst, ceil(H / HEADS)): a program owns HEADS heads of one destination of a sample.

    Writes its row of dquery (without W B), and of its in-edges dx (embedded features), and
    in weights [m p, ds], which the kernels over sources and over attributes read.
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
            projected, edge_attr, perm, products, node, first_edge, attr_first, begin, end, head, 1.0,
            H, D, BIAS, HEADS, ATTRIBUTES, EDGES, PRECISION, WIDE,
        )  # fmt: skip
        tl.debug_barrier()

    do = load_halves(grad_out, node * WIDTH, offsets, mask, PAIRS)
    share = load_heads(inverse, node * H + h, h, H, HEADS)
    total = tl.zeros((HEADS,), tl.float32)
    delta = tl.zeros((HEADS,), tl.float32)
    middle = end - (end - begin) % UNROLL
    for e in range(begin, middle, UNROLL):
        total, delta = _weigh(
            total, delta, do, share, value, edge_attr, row, perm, global_edge_id, seed, products, numerators, dweights, sample,
            first_src, first_edge, attr_first, e, h, offsets, mask, drop_below, survivor,
            H, WIDTH, D, EMBEDDED, HEADS, PAIRS, UNROLL, WIDE,
        )  # fmt: skip
    for e in range(middle, end):
        total, delta = _weigh(
            total, delta, do, share, value, edge_attr, row, perm, global_edge_id, seed, products, numerators, dweights, sample,
            first_src, first_edge, attr_first, e, h, offsets, mask, drop_below, survivor,
            H, WIDTH, D, EMBEDDED, HEADS, PAIRS, 1, WIDE,
        )  # fmt: skip
    delta = delta / tl.where(total == 0.0, 1.0, total)
    if grad_lse is not None:
        delta -= load_heads(grad_lse, node * H + h, h, H, HEADS)
    tl.debug_barrier()

    dq = zero_halves(HEADS, CHANNELS, PAIRS)
    q = load_halves(query, node * WIDTH, offsets, mask, PAIRS) if EMBEDDED else do
    for e in range(begin, middle, UNROLL):
        dq = _sum_keys(
            dq, delta, do, q, share, scale, key, edge_attr, row, perm, global_edge_id, seed, numerators, dweights, weights, dquery,
            dedge, sample, first_src, first_edge, attr_first, e, h, offsets, mask, drop_below, survivor,
            H, WIDTH, EMBEDDED, HEADS, PAIRS, UNROLL, WIDE,
        )  # fmt: skip
    for e in range(middle, end):
        dq = _sum_keys(
            dq, delta, do, q, share, scale, key, edge_attr, row, perm, global_edge_id, seed, numerators, dweights, weights, dquery,
            dedge, sample, first_src, first_edge, attr_first, e, h, offsets, mask, drop_below, survivor,
            H, WIDTH, EMBEDDED, HEADS, PAIRS, 1, WIDE,
        )  # fmt: skip
    if dquery is not None:
        store_halves(dquery, node * WIDTH, offsets, mask, dq, PAIRS)


@triton.jit
def _weigh(
    total, delta, do, share, value, edge_attr, row, perm, global_edge_id, seed, products, numerators, dweights, sample,
    first_src, first_edge, attr_first, e, h, offsets, mask, drop_below, survivor,
    H: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, EMBEDDED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    EACH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write dp of edges e .. e + EACH - 1; return the sums of p and of p dp so far."""
    v = gather(value, row, first_src, e, offsets, mask, WIDTH, PAIRS, EACH, WIDE)
    features = gather_features(edge_attr, perm, attr_first, e, offsets, mask, EMBEDDED, WIDTH, PAIRS, EACH, WIDE)
    r = load_numbers(numerators, first_edge, e, h, H, HEADS, EACH, WIDE)
    if D > 0:
        t = load_numbers(products, first_edge, e, h, H, HEADS, EACH, WIDE)
    for x in tl.static_range(EACH):
        dp = dot_halves(do, joined(v, features, x, EMBEDDED, PAIRS), PAIRS)
        if D > 0:
            dp += t[x]
        dp = drop(dp, e + x, perm, global_edge_id, seed, sample, h, drop_below, survivor)
        store_heads(dweights, wide(first_edge + e + x, WIDE) * H + h, dp, h, H, HEADS)
        p = share * r[x]
        total += p
        delta += p * dp
    return total, delta


@triton.jit
def _sum_keys(
    dq, delta, do, q, share, scale, key, edge_attr, row, perm, global_edge_id, seed, numerators, dweights, weights, dquery,
    dedge, sample, first_src, first_edge, attr_first, e, h, offsets, mask, drop_below, survivor,
    H: tl.constexpr, WIDTH: tl.constexpr, EMBEDDED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    EACH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write [m p, ds], and dx, of edges e .. e + EACH - 1; return the sum of the keys that ds weighs so far."""
    if dquery is not None:
        k = gather(key, row, first_src, e, offsets, mask, WIDTH, PAIRS, EACH, WIDE)
        features = gather_features(edge_attr, perm, attr_first, e, offsets, mask, EMBEDDED, WIDTH, PAIRS, EACH, WIDE)
    r = load_numbers(numerators, first_edge, e, h, H, HEADS, EACH, WIDE)
    dp = load_numbers(dweights, first_edge, e, h, H, HEADS, EACH, WIDE)
    for x in tl.static_range(EACH):
        p = share * r[x]
        ds = scale * p * (dp[x] - delta)
        p = drop(p, e + x, perm, global_edge_id, seed, sample, h, drop_below, survivor)
        pair = wide(first_edge + e + x, WIDE) * (2 * H) + h
        store_heads(weights, pair, p, h, H, HEADS)
        store_heads(weights, pair + H, ds, h, H, HEADS)
        if dquery is not None:
            dq = add_halves(dq, ds, joined(k, features, x, EMBEDDED, PAIRS), PAIRS)
        if dedge is not None:
            dx = add_halves(scale_halves(p, do, PAIRS), ds, q, PAIRS)
            place = wide(first_edge + caller_edge(perm, e + x), WIDE) * WIDTH
            store_halves(dedge, place, offsets, mask, dx, PAIRS)
    return dq


@triton.jit(
    repr=row_kernel_name("edge_attention_bwd_src", "query"),
    launch_metadata=launch_facts,
    do_not_specialize=["num_dst", "num_src", "num_edges"],
)
def edge_attention_bwd_src(
    query,  # [B, N_dst, H, C]
    grad_out,  # [B, N_dst, H, C]
    weights,  # [B, E, 2, H]
    rowptr,  # [N_src + 1]
    col,  # [E]
    csr_to_csc,  # [E]
    dkey,  # [B, N_src, H, C] or None
    dvalue,  # [B, N_src, H, C] or None
    num_dst,
    num_src,
    num_edges,
    H: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    NODES: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid (B * ceil(N_src / NODES), ceil(H / HEADS)): a program owns NODES sources of a sample, HEADS heads of them.

    Writes their rows of dkey and dvalue.
    """
    programs = (num_src + NODES - 1) // NODES
    sample = tl.program_id(0) // programs
    place = (tl.program_id(0) % programs) * NODES
    head = tl.program_id(1) * HEADS
    h = head + tl.arange(0, HEADS)
    offsets, mask = row_offsets(head, H, C, HEADS, CHANNELS)
    first_edge = wide(sample, WIDE) * num_edges
    first_dst = wide(sample, WIDE) * num_dst
    for n in range(NODES):
        if place + n < num_src:
            j = place + n
            dk = tl.zeros((HEADS, CHANNELS), tl.float32)
            dv = tl.zeros((HEADS, CHANNELS), tl.float32)
            for x in tl.range(tl.load(rowptr + j), tl.load(rowptr + j + 1), loop_unroll_factor=UNROLL):
                i = first_dst + tl.load(col + x)
                pair = weights + wide(first_edge + tl.load(csr_to_csc + x), WIDE) * (2 * H) + h
                if dvalue is not None:
                    w = tl.load(pair, mask=h < H, other=0.0).to(tl.float32)
                    dv += w[:, None] * load_row(grad_out, i, offsets, mask, H * C, WIDE)
                if dkey is not None:
                    ds = tl.load(pair + H, mask=h < H, other=0.0).to(tl.float32)
                    dk += ds[:, None] * load_row(query, i, offsets, mask, H * C, WIDE)
            at = (wide(sample, WIDE) * num_src + j) * (H * C)
            if dkey is not None:
                tl.store(dkey + at + offsets, dk.to(dkey.dtype.element_ty), mask=mask)
            if dvalue is not None:
                tl.store(dvalue + at + offsets, dv.to(dvalue.dtype.element_ty), mask=mask)
