"""Edge attention: the kernels that contract over the D edge attributes.

W [H * C, D] is the embedding, b [H * C] its bias; with BIAS the bias is one more column of W, for
an attribute that is always 1, so that all below holds with D + 1 attributes. Tensors between
kernels have ATTRIBUTES columns, a power of two, zero after D + BIAS:

    project           u_i = W_h^T q_i                            rows [.., H, C] to [.., H, D]
    embed             o_i += W_h A_i                             [.., H, D] into rows [.., H, C]
    attribute_bwd     A_i = sum_e w_e a_e,   B_i = sum_e ds_e a_e,
                      da_e = sum_h (w_e g_i + ds_e u_i)
    weight_bwd        dW_h = sum_i (do_i A_i^T + q_i B_i^T)      partial sums over programs
    weight_sum        dW, db = the sum of these

Each reads and writes its rows once, at memory bandwidth. They replace batched matmuls with inner
size D = 11, which are far slower. 16-bit operands are multiplied in their own dtype, or as tf32,
which holds both exactly.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.launch import row_kernel_name
from anemoi_gt.kernels.primitives import (
    as_index,
    caller_edges,
    destination,
    load_attributes,
    load_row,
    product,
    row_offsets,
    row_or_segment,
    tile_offsets,
)


@triton.jit
def _load_weight(
    edge_weight,
    edge_bias,
    head,
    channel,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
):
    """Load W_h, bias as column D: float32 [CHANNELS, ATTRIBUTES] from channel `channel` on."""
    c = channel + tl.arange(0, CHANNELS)
    d = tl.arange(0, ATTRIBUTES)
    channel_row = head * C + c
    inside = (c < C)[:, None] & (d < D)[None, :]
    w = tl.load(edge_weight + channel_row[:, None] * D + d[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    if edge_bias is not None:
        b = tl.load(edge_bias + channel_row, mask=c < C, other=0.0).to(tl.float32)
        w = tl.where((d == D)[None, :], b[:, None], w)
    return w


@triton.jit
def _tile_offsets(
    node,
    head,
    column,
    num_nodes,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Return offsets and mask [nodes, columns] of one head in [N, H, WIDTH], from `column` on.

    STRIDE elements lie between two nodes.
    """
    x = column + tl.arange(0, COLUMNS)
    offsets = (node * STRIDE + head * WIDTH)[:, None] + x[None, :]
    return offsets, (node < num_nodes)[:, None] & (x < WIDTH)[None, :]


@triton.jit(repr=row_kernel_name("edge_attention_project", "rows"), do_not_specialize=["num_nodes"])
def project(
    rows,  # [N, H, C], N nodes of the whole batch
    edge_weight,  # [H * C, D]
    edge_bias,  # [H * C] or None
    projected,  # [N, H, ATTRIBUTES]
    num_nodes,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    NODES: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    INT64: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two rows of `rows`
):
    """Grid (ceil(N / (NODES * TILES)) * H,): a program owns one head of TILES tiles of NODES nodes.

    Writes their rows of `projected`. Heads are the fast axis, so that programs side by side read
    whole rows.
    """
    head = tl.program_id(0) % H
    first = as_index(tl.program_id(0) // H, INT64) * (NODES * TILES)
    if CHANNELS >= C:  # the weight is read once for all tiles
        w = _load_weight(edge_weight, edge_bias, head, 0, H, C, D, CHANNELS, ATTRIBUTES)
    for tile in range(TILES):
        node = first + tile * NODES + tl.arange(0, NODES)
        u = tl.zeros((NODES, ATTRIBUTES), tl.float32)
        for channel in tl.static_range(0, C, CHANNELS):
            offsets, mask = _tile_offsets(node, head, channel, num_nodes, C, CHANNELS, STRIDE)
            x = tl.load(rows + offsets, mask=mask, other=0.0)  # [NODES, CHANNELS]
            if CHANNELS < C:
                w = _load_weight(
                    edge_weight, edge_bias, head, channel, H, C, D, CHANNELS, ATTRIBUTES
                )
            u = product(x, w, u, PRECISION)
        offset, inside = _tile_offsets(
            node, head, 0, num_nodes, ATTRIBUTES, ATTRIBUTES, H * ATTRIBUTES
        )
        tl.store(projected + offset, u.to(projected.dtype.element_ty), mask=inside)


@triton.jit(repr=row_kernel_name("edge_attention_embed", "rows"), do_not_specialize=["num_nodes"])
def embed(
    sums,  # [N, H, ATTRIBUTES], N nodes of the whole batch
    edge_weight,  # [H * C, D]
    edge_bias,  # [H * C] or None
    skip,  # [N, H, C] contiguous, or None, added too
    rows,  # [N, H, C], read and written
    num_nodes,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    NODES: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    INT64: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two rows of `rows`
):
    """Grid (ceil(N / (NODES * TILES)) * H,): a program owns one head of TILES tiles of NODES nodes.

    Adds W sums, and skip, to their rows. Heads are the fast axis, so that programs side by side
    touch whole rows.
    """
    head = tl.program_id(0) % H
    first = as_index(tl.program_id(0) // H, INT64) * (NODES * TILES)
    if CHANNELS >= C:  # the weight is read once for all tiles
        w = _load_weight(edge_weight, edge_bias, head, 0, H, C, D, CHANNELS, ATTRIBUTES)
    for tile in range(TILES):
        node = first + tile * NODES + tl.arange(0, NODES)
        offset, inside = _tile_offsets(
            node, head, 0, num_nodes, ATTRIBUTES, ATTRIBUTES, H * ATTRIBUTES
        )
        s = tl.load(sums + offset, mask=inside, other=0.0)  # [NODES, ATTRIBUTES]
        for channel in tl.static_range(0, C, CHANNELS):
            if CHANNELS < C:
                w = _load_weight(
                    edge_weight, edge_bias, head, channel, H, C, D, CHANNELS, ATTRIBUTES
                )
            offsets, mask = _tile_offsets(node, head, channel, num_nodes, C, CHANNELS, STRIDE)
            x = tl.load(rows + offsets, mask=mask, other=0.0).to(tl.float32)
            if skip is not None:
                skip_offsets, _ = _tile_offsets(node, head, channel, num_nodes, C, CHANNELS, H * C)
                x += tl.load(skip + skip_offsets, mask=mask, other=0.0).to(tl.float32)
            x = product(s, tl.trans(w), x, PRECISION)
            tl.store(rows + offsets, x.to(rows.dtype.element_ty), mask=mask)


@triton.jit(
    repr=row_kernel_name("edge_attention_bwd_attributes", "edge_attr"),
    do_not_specialize=["num_dst", "num_edges", "attr_stride"],
)
def attribute_bwd(
    p_ds,  # [B, E, 2, H]
    edge_attr,  # [1 or B, E, D]
    projected,  # [B, N_dst, H, ATTRIBUTES] u, or None
    projected_grad,  # [B, N_dst, H, ATTRIBUTES] g, or None
    colptr,  # [N_dst + 1]
    perm,  # [E] or None
    attr_sums,  # [B, N_dst, H, ATTRIBUTES] A
    dscore_sums,  # [B, N_dst, H, ATTRIBUTES] B
    dedge_attr,  # [B, E, D] or None
    segment_attr_sums,  # [B, spans, H, ATTRIBUTES] float32, or None without hubs
    segment_dscore_sums,  # [B, spans, H, ATTRIBUTES] float32, or None without hubs
    num_dst,
    num_edges,
    attr_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    EDGES: tl.constexpr,
    PRECISION: tl.constexpr,
    INT64: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Grid (B * N_dst,): a program owns a destination of a batch entry, all heads.

    Writes its A and B, and da of its in-edges in the caller's order. With hubs the grid is (B *
    (spans + N_dst),), and the program of a segment writes its rows of segment_attr_sums and
    segment_dscore_sums.
    """
    if SEGMENT > 0:
        b, i, begin, end, slot = row_or_segment(colptr, num_dst, num_edges, SEGMENT, INT64)
        node = b * num_dst + i
    else:
        b, i, node = destination(num_dst, INT64)
    first_edge = b * num_edges
    h = tl.arange(0, HEADS)
    d = tl.arange(0, ATTRIBUTES)
    offsets, mask = row_offsets(0, H, ATTRIBUTES, HEADS, ATTRIBUTES)
    if dedge_attr is not None:
        u = load_row(projected, node, offsets, mask, H * ATTRIBUTES)
        g = load_row(projected_grad, node, offsets, mask, H * ATTRIBUTES)
    value_sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    score_sums = tl.zeros((HEADS, ATTRIBUTES), tl.float32)
    if SEGMENT == 0:
        end = tl.load(colptr + i + 1)
        begin = tl.load(colptr + i)
    # from 0, because Triton 3.5 fails to coalesce the loads of a loop from `begin`
    for start in range(0, end - begin, EDGES):
        e = begin + start + tl.arange(0, EDGES)
        inside = e < end
        edge = caller_edges(perm, e, inside)
        a = load_attributes(edge_attr, b * attr_stride + edge, inside, D, BIAS, ATTRIBUTES)
        offset, known = tile_offsets(first_edge + e, inside, h, 2 * H, H)
        w = tl.load(p_ds + offset, mask=known, other=0.0)  # [EDGES, HEADS]
        ds = tl.load(p_ds + offset + H, mask=known, other=0.0)
        value_sums = product(tl.trans(w), a, value_sums, PRECISION)
        score_sums = product(tl.trans(ds), a, score_sums, PRECISION)
        if dedge_attr is not None:
            da = product(w, g, tl.zeros((EDGES, ATTRIBUTES), tl.float32), PRECISION)
            da = product(ds, u, da, PRECISION)
            offset, known = tile_offsets(first_edge + edge, inside, d, D, D)
            tl.store(dedge_attr + offset, da.to(dedge_attr.dtype.element_ty), mask=known)
    if SEGMENT > 0 and slot >= 0:
        tl.store(segment_attr_sums + slot * (H * ATTRIBUTES) + offsets, value_sums, mask=mask)
        tl.store(segment_dscore_sums + slot * (H * ATTRIBUTES) + offsets, score_sums, mask=mask)
        return
    tl.store(
        attr_sums + node * (H * ATTRIBUTES) + offsets,
        value_sums.to(attr_sums.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        dscore_sums + node * (H * ATTRIBUTES) + offsets,
        score_sums.to(dscore_sums.dtype.element_ty),
        mask=mask,
    )


@triton.jit(
    repr=row_kernel_name("edge_attention_bwd_weight", "query"), do_not_specialize=["num_nodes"]
)
def weight_bwd(
    query,  # [N, H, C], N destinations of the whole batch
    grad_out,  # [N, H, C]
    attr_sums,  # [N, H, ATTRIBUTES] A
    dscore_sums,  # [N, H, ATTRIBUTES] B
    partial,  # [P, H, C, D + BIAS] float32
    num_nodes,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    NODES: tl.constexpr,
    PRECISION: tl.constexpr,
    INT64: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between two rows of query, and of grad_out
):
    """Grid (P * H, ceil(C / CHANNELS)): a program sums every P-th tile of NODES nodes for one head.

    Writes its partial dW. Heads are the fast axis, so that programs side by side read whole rows.
    """
    head = tl.program_id(0) % H
    part = tl.program_id(0) // H
    channel = tl.program_id(1) * CHANNELS
    dw = tl.zeros((CHANNELS, ATTRIBUTES), tl.float32)
    for first in range(part * NODES, num_nodes, tl.num_programs(0) // H * NODES):
        node = as_index(first, INT64) + tl.arange(0, NODES)
        offsets, mask = _tile_offsets(node, head, channel, num_nodes, C, CHANNELS, STRIDE)
        q = tl.load(query + offsets, mask=mask, other=0.0)  # [NODES, CHANNELS]
        do = tl.load(grad_out + offsets, mask=mask, other=0.0)
        offset, inside = _tile_offsets(
            node, head, 0, num_nodes, ATTRIBUTES, ATTRIBUTES, H * ATTRIBUTES
        )
        value_sums = tl.load(attr_sums + offset, mask=inside, other=0.0)
        score_sums = tl.load(dscore_sums + offset, mask=inside, other=0.0)
        dw = product(tl.trans(do), value_sums, dw, PRECISION)
        dw = product(tl.trans(q), score_sums, dw, PRECISION)
    c = channel + tl.arange(0, CHANNELS)
    d = tl.arange(0, ATTRIBUTES)
    offset = ((part * H + head) * C + c)[:, None] * (D + BIAS) + d[None, :]
    tl.store(partial + offset, dw, mask=(c < C)[:, None] & (d < D + BIAS)[None, :])


@triton.jit(
    repr=row_kernel_name("edge_attention_sum_weight", "partial"), do_not_specialize=["num_parts"]
)
def weight_sum(
    partial,  # [P, H * C, D + BIAS] float32
    dweight,  # [H * C, D] or None
    dbias,  # [H * C] or None
    num_parts,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (ceil(H * C / ROWS),): sum ROWS rows of all parts, PARTS at a time, and round once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, ATTRIBUTES)
    offset, inside = tile_offsets(row, row < H * C, d, D + BIAS, D + BIAS)
    total = tl.zeros((ROWS, ATTRIBUTES), tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None, None]
        known = (part < num_parts) & inside[None, :, :]
        total += tl.sum(
            tl.load(
                partial + part * (H * C * (D + BIAS)) + offset[None, :, :], mask=known, other=0.0
            ),
            0,
        )
    if dweight is not None:
        offset, inside = tile_offsets(row, row < H * C, d, D, D)
        tl.store(dweight + offset, total.to(dweight.dtype.element_ty), mask=inside)
    if dbias is not None:
        bias = tl.sum(tl.where((d == D)[None, :], total, 0.0), 1)
        tl.store(dbias + row, bias.to(dbias.dtype.element_ty), mask=row < H * C)
