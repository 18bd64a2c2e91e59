"""Edge attention, backward: the kernels that walk edges and gather rows of heads x channels.

Symbols as in `anemoi_gt.kernels.forward`, with the gradients do_i, dlse_i that arrive and g_i = W^T do_i ready from
`anemoi_gt.kernels.attributes`.

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
from anemoi_gt.kernels.primitives import caller_edge, keep_factor, load_row, project_edges, row_offsets, wide


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
    edge_id,  # [E] int64, or None
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
    UNROLL: tl.constexpr,
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
    offsets, mask = row_offsets(head, H, C, HEADS, CHANNELS)
    first_edge = wide(sample, WIDE) * num_edges
    first_src = wide(sample, WIDE) * num_src
    attr_first = wide(sample, WIDE) * attr_stride
    if D > 0:
        project_edges(
            projected, edge_attr, perm, products, node, first_edge, attr_first, begin, end, head, 1.0,
            H, D, BIAS, HEADS, ATTRIBUTES, EDGES, PRECISION, WIDE,
        )  # fmt: skip
        tl.debug_barrier()

    do = load_row(grad_out, node, offsets, mask, H * C, WIDE)
    share = tl.load(inverse + node * H + h, mask=h < H, other=0.0)
    total = tl.zeros((HEADS,), tl.float32)
    delta = tl.zeros((HEADS,), tl.float32)
    for e in tl.range(begin, end, loop_unroll_factor=UNROLL):
        v = load_row(value, first_src + tl.load(row + e), offsets, mask, H * C, WIDE)
        if EMBEDDED:
            v += load_row(edge_attr, attr_first + caller_edge(perm, e), offsets, mask, H * C, WIDE)
        at = wide(first_edge + e, WIDE) * H + h
        dp = tl.sum(do * v, axis=1)
        if D > 0:
            dp += tl.load(products + at, mask=h < H, other=0.0)
        if seed is not None:
            number = caller_edge(perm, e) if edge_id is None else tl.load(edge_id + e)
            dp *= keep_factor(seed, number, sample, h, drop_below, survivor)
        tl.store(dweights + at, dp, mask=h < H)
        p = share * tl.load(numerators + at, mask=h < H, other=0.0)
        total += p
        delta += p * dp
    delta = delta / tl.where(total == 0.0, 1.0, total)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + node * H + h, mask=h < H, other=0.0)
    tl.debug_barrier()

    dq = tl.zeros((HEADS, CHANNELS), tl.float32)
    if EMBEDDED:
        q = load_row(query, node, offsets, mask, H * C, WIDE)
    for e in tl.range(begin, end, loop_unroll_factor=UNROLL):
        at = wide(first_edge + e, WIDE) * H + h
        p = share * tl.load(numerators + at, mask=h < H, other=0.0)
        ds = scale * p * (tl.load(dweights + at, mask=h < H, other=0.0) - delta)
        if seed is not None:
            number = caller_edge(perm, e) if edge_id is None else tl.load(edge_id + e)
            p *= keep_factor(seed, number, sample, h, drop_below, survivor)
        pair = weights + wide(first_edge + e, WIDE) * (2 * H) + h
        tl.store(pair, p.to(weights.dtype.element_ty), mask=h < H)
        tl.store(pair + H, ds.to(weights.dtype.element_ty), mask=h < H)
        if dquery is not None:
            k = load_row(key, first_src + tl.load(row + e), offsets, mask, H * C, WIDE)
            if EMBEDDED:
                k += load_row(edge_attr, attr_first + caller_edge(perm, e), offsets, mask, H * C, WIDE)
            dq += ds[:, None] * k
        if dedge is not None:
            dx = p[:, None] * do + ds[:, None] * q
            edge = wide(first_edge + caller_edge(perm, e), WIDE)
            tl.store(dedge + edge * (H * C) + offsets, dx.to(dedge.dtype.element_ty), mask=mask)
    if dquery is not None:
        tl.store(dquery + node * (H * C) + offsets, dq.to(dquery.dtype.element_ty), mask=mask)


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
