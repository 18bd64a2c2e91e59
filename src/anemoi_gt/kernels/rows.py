"""Rows [heads, channels] in registers: gathered, unpacked, multiplied, summed and stored.

PACKED is "bf16" or "fp16" where a row of 16-bit elements is read as pairs in 32 bits, which halves
the loads, and None where it is not. A row as stored in memory is called packed or raw: [HEADS,
CHANNELS / 2] int32 with PACKED, else [HEADS, CHANNELS]. Unpacked it is a tuple of float32 tiles:
the even and the odd channels [HEADS, CHANNELS / 2] with PACKED, else the row itself.

Loads cannot be hoisted above stores that may alias them. So a step over EACH edges loads all raw
rows before its first store.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.primitives import caller_edge, dropout_factor, row_offsets


@triton.jit
def raw_offsets(
    head,
    H: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return `in_row`: offsets and mask of heads head .. head + HEADS - 1 in a raw row."""
    if PACKED is not None:
        return row_offsets(head, H, C // 2, HEADS, CHANNELS // 2)
    else:
        return row_offsets(head, H, C, HEADS, CHANNELS)


@triton.jit
def load_raw(rows, start, in_row, PACKED: tl.constexpr):
    """Load the packed row at offset `start` from `rows`."""
    if PACKED is not None:
        return tl.load(
            rows.to(tl.pointer_type(tl.int32)) + start + in_row[0], mask=in_row[1], other=0
        )
    else:
        return tl.load(rows + start + in_row[0], mask=in_row[1], other=0.0)


@triton.jit
def unpack(raw, PACKED: tl.constexpr):
    """Return a raw row as a tuple of float32 tiles."""
    if PACKED == "bf16":  # the upper half of a float32: one instruction an element
        return (raw << 16).to(tl.float32, bitcast=True), (raw & -65536).to(tl.float32, bitcast=True)
    elif PACKED == "fp16":
        even, odd = raw.to(tl.int16), (raw >> 16).to(tl.int16)
        return even.to(tl.float16, bitcast=True).to(tl.float32), odd.to(
            tl.float16, bitcast=True
        ).to(tl.float32)
    else:
        return (raw.to(tl.float32),)


@triton.jit
def load_unpacked(rows, start, in_row, PACKED: tl.constexpr):
    """Return a row as a tuple of float32 tiles."""
    return unpack(load_raw(rows, start, in_row, PACKED), PACKED)


@triton.jit
def store_unpacked(rows, start, in_row, row, PACKED: tl.constexpr):
    """Store a row, inverse of `load_unpacked`; element by element for dtypes not PACKED."""
    if PACKED is not None:
        dtype: tl.constexpr = tl.bfloat16 if PACKED == "bf16" else tl.float16
        if rows.dtype.element_ty == dtype:
            even = row[0].to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 65535
            odd = row[1].to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
            tl.store(
                rows.to(tl.pointer_type(tl.int32)) + start + in_row[0], even | odd, mask=in_row[1]
            )
        else:
            address = rows + start * 2 + in_row[0] * 2
            tl.store(address, row[0].to(rows.dtype.element_ty), mask=in_row[1])
            tl.store(address + 1, row[1].to(rows.dtype.element_ty), mask=in_row[1])
    else:
        tl.store(rows + start + in_row[0], row[0].to(rows.dtype.element_ty), mask=in_row[1])


@triton.jit
def zero_row(HEADS: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr):
    """Return an unpacked row of zeros."""
    if PACKED is not None:
        return tl.zeros((HEADS, CHANNELS // 2), tl.float32), tl.zeros(
            (HEADS, CHANNELS // 2), tl.float32
        )
    else:
        return (tl.zeros((HEADS, CHANNELS), tl.float32),)


@triton.jit
def dot_rows(x, y):
    """Return <x, y> of each head, [HEADS]."""
    if len(x) == 2:
        return tl.sum(x[0] * y[0] + x[1] * y[1], axis=1)
    else:
        return tl.sum(x[0] * y[0], axis=1)


@triton.jit
def add_scaled(x, factor, y):
    """Return x + factor y, with one factor a head, [HEADS]."""
    total = ()
    for n in tl.static_range(len(x)):
        total = total + (x[n] + factor[:, None] * y[n],)
    return total


@triton.jit
def scale_row(factor, x):
    """Return factor x, with one factor a head, [HEADS]."""
    scaled = ()
    for n in tl.static_range(len(x)):
        scaled = scaled + (factor[:, None] * x[n],)
    return scaled


@triton.jit
def load_heads(x, index, heads, H: tl.constexpr):
    """Load row x[index] of a tensor [.., H] as float32 [HEADS].

    `heads` is the number of each head and a mask, None where every program has HEADS heads.
    """
    address = x + (index * H + heads[0])
    if heads[1] is None:
        return tl.load(address).to(tl.float32)
    else:
        return tl.load(address, mask=heads[1], other=0.0).to(tl.float32)


@triton.jit
def store_heads(x, index, heads, elements, H: tl.constexpr):
    """Store one row; inverse of `load_heads`."""
    address = x + (index * H + heads[0])
    if heads[1] is None:
        tl.store(address, elements.to(x.dtype.element_ty))
    else:
        tl.store(address, elements.to(x.dtype.element_ty), mask=heads[1])


@triton.jit
def load_edge_heads(x, edge, heads, H: tl.constexpr, EACH: tl.constexpr):
    """Return rows edge .. edge + EACH - 1 of a tensor [E, H], a tuple of [HEADS]."""
    loaded = ()
    for n in tl.static_range(EACH):
        loaded = loaded + (load_heads(x, edge + n, heads, H),)
    return loaded


@triton.jit
def gather(rows, e, source, in_row, ROW: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr):
    """Gather the packed source rows of EACH edges from `e`, then their edge features, if any.

    ROW elements lie between two rows, and between the features of two edges. `source` is (row,
    first_src, features, perm, first_attr), with features [E, H, C] in the
    caller's order or None.
    """
    starts = ()
    for n in tl.static_range(EACH):
        starts = starts + ((source[1] + tl.load(source[0] + e + n)) * ROW,)
    packed = ()
    for n in tl.static_range(EACH):
        packed = packed + (load_raw(rows, starts[n], in_row, PACKED),)
    if source[2] is not None:
        for n in tl.static_range(EACH):
            start = (source[4] + caller_edge(source[3], e + n)) * ROW
            packed = packed + (load_raw(source[2], start, in_row, PACKED),)
    return packed


@triton.jit
def gathered_row(packed, n: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr):
    """Return row n of what `gather` found, unpacked, with the features of its edge added."""
    row = unpack(packed[n], PACKED)
    if len(packed) > EACH:
        features = unpack(packed[EACH + n], PACKED)
        total = ()
        for x in tl.static_range(len(row)):
            total = total + (row[x] + features[x],)
        row = total
    return row


@triton.jit
def drop(weight, e, dropout):
    """Return `weight` [HEADS] of edge e times its dropout factor.

    `dropout` is (perm, global_edge_id, seed, b, h, drop_below, survivor); nothing is dropped where
    the seed is None.
    """
    perm, global_edge_id, seed, b, h, drop_below, survivor = dropout
    if seed is not None:
        edge_id = caller_edge(perm, e) if global_edge_id is None else tl.load(global_edge_id + e)
        weight = weight * dropout_factor(edge_id, seed, b, h, drop_below, survivor)
    return weight
