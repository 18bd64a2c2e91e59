"""Building blocks of all kernels: indices, loads of rows and attributes, dropout, <u_i, a_e>.

Letters: b batch entry, i destination, j source, e edge in CSC order, h head, c channel, d
attribute. Pointers carry the tensor's name. Every load that can overrun is masked with `other=`;
sums are float32. Constants: H heads, C channels and D attributes of the problem; HEADS, CHANNELS,
ATTRIBUTES their padded sizes in a program; INT64 is set if offsets need 64 bits.
"""

import triton
import triton.language as tl


@triton.jit
def as_index(index, INT64: tl.constexpr):
    """Cast `index` to an integer type in which offsets computed from it cannot overflow."""
    if INT64:
        return index + tl.full((), 0, tl.int64)
    else:
        return index + tl.full((), 0, tl.int32)


@triton.jit
def destination(num_dst, INT64: tl.constexpr):
    """Return b, i and the row of i in [B * N_dst, ..] for a program of a grid (B * N_dst, ..)."""
    b, i = as_index(tl.program_id(0) // num_dst, INT64), tl.program_id(0) % num_dst
    return b, i, b * num_dst + i


@triton.jit
def hub_segment(pointers, span, num_rows, SEGMENT: tl.constexpr):
    """Return row, begin and end of a span's segment, and its row's first span and span count.

    The edges are divided into spans of SEGMENT. A row with more than 2 SEGMENT edges is a hub; its
    segments begin where a span begins, but for the first, which begins with the row. A span that
    begins in no hub has begin = end.
    """
    x = span * SEGMENT
    i, above = x * 0, num_rows + x * 0
    while above - i > 1:  # pointers[i] <= x < pointers[above]
        middle = (i + above) // 2
        is_left = tl.load(pointers + middle) <= x
        i, above = tl.where(is_left, middle, i), tl.where(is_left, above, middle)
    row_begin, row_end = tl.load(pointers + i).to(x.dtype), tl.load(pointers + i + 1).to(x.dtype)
    begin = tl.where(x - row_begin < SEGMENT, row_begin, x)
    end = tl.where(row_end - row_begin > 2 * SEGMENT, tl.minimum(x + SEGMENT, row_end), begin)
    first = (row_begin + SEGMENT - 1) // SEGMENT
    return i, begin, end, first, (row_end - 1) // SEGMENT - first + 1


@triton.jit
def num_spans(num_edges, SEGMENT: tl.constexpr):
    """Return the number of spans of edges, which bounds the number of hub segments."""
    return (num_edges + SEGMENT - 1) // SEGMENT


@triton.jit
def row_or_segment(pointers, num_rows, num_edges, SEGMENT: tl.constexpr, INT64: tl.constexpr):
    """Return b, i, begin, end and slot of a program of a grid (B * (spans + N), ..).

    Segments come first, and `slot` is their row in partial results [B * spans, ..]. It is -1 for a
    row, which has no edges where it is a hub: what is written for it is overwritten when its
    segments are joined.
    """
    spans = num_spans(num_edges, SEGMENT)
    b = as_index(tl.program_id(0) // (spans + num_rows), INT64)
    program = as_index(tl.program_id(0) % (spans + num_rows), INT64)
    if program < spans:
        i, begin, end, _, _ = hub_segment(pointers, program, num_rows, SEGMENT)
        slot = b * spans + program
    else:
        i = program - spans
        begin, end = (
            tl.load(pointers + i).to(program.dtype),
            tl.load(pointers + i + 1).to(program.dtype),
        )
        end = tl.where(end - begin > 2 * SEGMENT, begin, end)
        slot = program * 0 - 1
    return b, i, begin, end, slot


@triton.jit
def segment_of_program(pointers, num_rows, num_edges, SEGMENT: tl.constexpr, INT64: tl.constexpr):
    """Return b, i, begin, end, slot, first slot and slot count of a row: grid (B * spans, ..)."""
    spans = num_spans(num_edges, SEGMENT)
    b, span = (
        as_index(tl.program_id(0) // spans, INT64),
        as_index(tl.program_id(0) % spans, INT64),
    )
    i, begin, end, first, count = hub_segment(pointers, span, num_rows, SEGMENT)
    return b, i, begin, end, b * spans + span, b * spans + first, count


@triton.jit
def segment_row(slot, programs, num_rows):
    """Return the row index of a segment; segment rows follow the B * num_rows node rows."""
    return (tl.num_programs(0) // programs).to(slot.dtype) * num_rows + slot


@triton.jit
def product(x, y, acc, PRECISION: tl.constexpr):
    """Return acc + x y, a matrix product of operands rounded to PRECISION, summed in float32."""
    if PRECISION == "bf16":
        return tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), acc)
    elif PRECISION == "fp16":
        return tl.dot(x.to(tl.float16), y.to(tl.float16), acc)
    else:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), acc, input_precision=PRECISION)


@triton.jit
def row_offsets(
    head, H: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Return offsets and mask [HEADS, CHANNELS] of HEADS heads from `head` in a row [H, C]."""
    h = head + tl.arange(0, HEADS)
    c = tl.arange(0, CHANNELS)
    # known when compiled: nothing to mask, and loads need no zeros
    if H % HEADS == 0 and C == CHANNELS:
        mask = tl.full((HEADS, CHANNELS), 1, tl.int1)
    else:
        mask = (h < H)[:, None] & (c < C)[None, :]
    return h[:, None] * C + c[None, :], mask


@triton.jit
def load_row(rows, node, offsets, mask, WIDTH: tl.constexpr):
    """Return rows[node] of a tensor [.., WIDTH] as float32."""
    return tl.load(rows + node * WIDTH + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def caller_edge(perm, e):
    """Return the position of edge e in the caller's order."""
    if perm is None:
        return e
    else:
        return tl.load(perm + e)


@triton.jit
def caller_edges(perm, e, inside):
    """Return the positions of edges e [EDGES] in the caller's order, for the edges `inside`."""
    if perm is None:
        return e
    else:
        return tl.load(perm + e, mask=inside, other=0)


@triton.jit
def load_attributes(
    edge_attr, edge, inside, D: tl.constexpr, BIAS: tl.constexpr, ATTRIBUTES: tl.constexpr
):
    """Load a_e of the caller's edges `edge` as float32 [EDGES, ATTRIBUTES], 0 if not `inside`.

    With BIAS the attribute after the last is 1, so that its weight is the bias.
    """
    d = tl.arange(0, ATTRIBUTES)
    offset = edge[:, None] * D + d[None, :]
    a = tl.load(edge_attr + offset, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(
        tl.float32
    )
    if BIAS:
        a = tl.where(inside[:, None] & (d == D)[None, :], 1.0, a)
    return a


@triton.jit
def tile_offsets(edge, inside, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return offsets and mask [EDGES, columns] of COLUMNS columns of a tensor [E, WIDTH]."""
    return edge[:, None] * WIDTH + column[None, :], inside[:, None] & (column < COLUMNS)[None, :]


@triton.jit
def dropout_factor(edge_id, seed, b, h, drop_below, survivor):
    """Return the dropout factor of edges and heads, broadcast: 0 or 1 / (1 - rate).

    `anemoi_gt.ops.dropout` defines the mask.
    """
    edge_id = edge_id + tl.full((), 0, tl.int64)
    zero = ((edge_id + h) * 0).to(tl.uint32)
    low = (edge_id & 0xFFFFFFFF).to(tl.uint32) + zero
    high = (edge_id >> 32).to(tl.uint32) + zero
    bits, _, _, _ = tl.philox(
        tl.load(seed),
        low,
        high,
        zero + (b + zero.to(tl.int32)).to(tl.uint32),
        zero + h.to(tl.uint32),
    )
    return tl.where(bits.to(tl.int64) >= drop_below, survivor, 0.0)


@triton.jit
def project_edges(
    result,
    factor,
    projected,
    node,
    head,
    edge_range,
    attributes,
    H: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    EDGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write result[e, h] = factor * <projected[node, h], a_e> for the edges of a range.

    `edge_range` is (begin, end, first_edge), of a batch entry whose edges begin at `first_edge`;
    `attributes` is (edge_attr, perm, first_attr).
    """
    begin, end, first_edge = edge_range
    edge_attr, perm, first_attr = attributes
    h = head + tl.arange(0, HEADS)
    offsets, mask = row_offsets(head, H, ATTRIBUTES, HEADS, ATTRIBUTES)
    u = load_row(projected, node, offsets, mask, H * ATTRIBUTES)  # [HEADS, ATTRIBUTES]
    for start in range(begin, end, EDGES):
        e = start + tl.arange(0, EDGES)
        inside = e < end
        a = load_attributes(
            edge_attr, first_attr + caller_edges(perm, e, inside), inside, D, BIAS, ATTRIBUTES
        )
        if EDGES == 1:
            t = tl.sum(u[None, :, :] * a[:, None, :], axis=2)  # [EDGES, HEADS]
        else:
            t = product(a, tl.trans(u), tl.zeros((EDGES, HEADS), tl.float32), PRECISION)
        offset, known = tile_offsets(first_edge + e, inside, h, H, H)
        tl.store(result + offset, t * factor, mask=known)
