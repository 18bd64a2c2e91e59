"""What the kernels share: offsets, loads of rows and attributes, the dropout factor, the attributes' share of a score.

Letters: i destination, j source, e edge in CSC order, h head, c channel, d attribute, b sample.
Pointers carry the tensor's name. Every load is masked with `other=`; sums are float32.
"""

import triton
import triton.language as tl


@triton.jit
def wide(index, WIDE: tl.constexpr):
    """`index` as the integer type in which products with it cannot overflow."""
    if WIDE:
        return index + tl.full((), 0, tl.int64)
    else:
        return index + tl.full((), 0, tl.int32)


@triton.jit
def product(x, y, acc, PRECISION: tl.constexpr):
    """Acc + x y, a matrix product with float32 sums; PRECISION says to what its operands are rounded."""
    if PRECISION == "bf16":
        return tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), acc)
    else:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), acc, input_precision=PRECISION)


@triton.jit
def row_offsets(head, H: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr):
    """Offsets and mask [HEADS, CHANNELS] of heads head .. head + HEADS - 1 in a row [H, C]."""
    h = head + tl.arange(0, HEADS)
    c = tl.arange(0, CHANNELS)
    if H % HEADS == 0 and C == CHANNELS:  # known when compiled: nothing to mask, and loads need no zeros
        mask = tl.full((HEADS, CHANNELS), 1, tl.int1)
    else:
        mask = (h < H)[:, None] & (c < C)[None, :]
    return h[:, None] * C + c[None, :], mask


@triton.jit
def load_row(rows, node, offsets, mask, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """rows[node] of a tensor [.., H, C] with WIDTH = H * C, as float32 [HEADS, CHANNELS]."""
    return tl.load(rows + wide(node, WIDE) * WIDTH + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def caller_edge(perm, e):
    """Where edge e stands in the caller's order."""
    if perm is None:
        return e
    else:
        return tl.load(perm + e)


@triton.jit
def caller_edges(perm, e, inside):
    """Where the edges e [EDGES] stand in the caller's order, of those that are `inside`."""
    if perm is None:
        return e
    else:
        return tl.load(perm + e, mask=inside, other=0)


@triton.jit
def load_attributes(
    edge_attr, edge, inside, D: tl.constexpr, BIAS: tl.constexpr, ATTRIBUTES: tl.constexpr, WIDE: tl.constexpr
):
    """a_e as float32 [EDGES, ATTRIBUTES] of the caller's edges `edge` [EDGES], zero where not `inside`.

    With BIAS the attribute after the last is 1, so that its weight is the bias.
    """
    d = tl.arange(0, ATTRIBUTES)
    at = wide(edge, WIDE)[:, None] * D + d[None, :]
    a = tl.load(edge_attr + at, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    if BIAS:
        a = tl.where(inside[:, None] & (d == D)[None, :], 1.0, a)
    return a


@triton.jit
def head_offsets(edge, inside, h, H: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Offsets and mask [EDGES, HEADS] of heads h in rows of WIDTH numbers an edge, of which the first H are meant."""
    return wide(edge, WIDE)[:, None] * WIDTH + h[None, :], inside[:, None] & (h < H)[None, :]


@triton.jit
def keep_factor(seed, number, sample, h, drop_below, survivor):
    """Dropout factor of edges and heads that broadcast: 0, or 1 / (1 - rate); `anemoi_gt.ops.dropout` defines it."""
    number = number + tl.full((), 0, tl.int64)
    zero = ((number + h) * 0).to(tl.uint32)
    low = (number & 0xFFFFFFFF).to(tl.uint32) + zero
    high = (number >> 32).to(tl.uint32) + zero
    bits, _, _, _ = tl.philox(
        tl.load(seed), low, high, zero + (sample + zero.to(tl.int32)).to(tl.uint32), zero + h.to(tl.uint32)
    )
    return tl.where(bits.to(tl.int64) >= drop_below, survivor, 0.0)


@triton.jit
def project_edges(
    projected, edge_attr, perm, edges, node, first_edge, attr_first, begin, end, head, factor,
    H: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, ATTRIBUTES: tl.constexpr,
    EDGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """edges[e, h] = factor * <projected[node, h], a_e> for the edges begin .. end - 1."""
    h = head + tl.arange(0, HEADS)
    offsets, mask = row_offsets(head, H, ATTRIBUTES, HEADS, ATTRIBUTES)
    u = load_row(projected, node, offsets, mask, H * ATTRIBUTES, WIDE)  # [HEADS, ATTRIBUTES]
    for start in range(begin, end, EDGES):
        e = start + tl.arange(0, EDGES)
        inside = e < end
        edge = attr_first + caller_edges(perm, e, inside)
        a = load_attributes(edge_attr, edge, inside, D, BIAS, ATTRIBUTES, WIDE)
        if EDGES == 1:
            t = tl.sum(u[None, :, :] * a[:, None, :], axis=2)  # [EDGES, HEADS]
        else:
            t = product(a, tl.trans(u), tl.zeros((EDGES, HEADS), tl.float32), PRECISION)
        at, known = head_offsets(first_edge + e, inside, h, H, H, WIDE)
        tl.store(edges + at, t * factor, mask=known)
