"""Rows [heads, channels] in registers: how they are read, unpacked, multiplied, summed and written.

A row of bfloat16 is read as pairs, two numbers in 32 bits, each of which becomes float32 with one instruction where it lies:
in the high half by a mask, in the low half by a shift. What is called `halves` is then the even and the odd channels,
[HEADS, CHANNELS / 2] each; without PAIRS it is the row alone, [HEADS, CHANNELS]. What a row is before that is called raw.

Edges in flight. A load may not pass a store that stands before it, for both could mean the same memory. So a step over EACH edges
reads the raw rows of all of them before it writes anything for the first.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.primitives import caller_edge, keep_factor, row_offsets, wide


@triton.jit
def half_offsets(
    head, H: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr
):
    """Offsets and mask of a raw row of heads head .. head + HEADS - 1."""
    if PAIRS:
        return row_offsets(head, H, C // 2, HEADS, CHANNELS // 2)
    else:
        return row_offsets(head, H, C, HEADS, CHANNELS)


@triton.jit
def load_raw(rows, place, offsets, mask, PAIRS: tl.constexpr):
    """A row as it lies in memory: with PAIRS [HEADS, CHANNELS / 2] int32, else [HEADS, CHANNELS]."""
    if PAIRS:
        return tl.load(rows.to(tl.pointer_type(tl.int32)) + place + offsets, mask=mask, other=0)
    else:
        return tl.load(rows + place + offsets, mask=mask, other=0.0)


@triton.jit
def halves(raw, PAIRS: tl.constexpr):
    """A raw row as float32."""
    if PAIRS:
        return (raw << 16).to(tl.float32, bitcast=True), (raw & -65536).to(tl.float32, bitcast=True)
    else:
        return (raw.to(tl.float32),)


@triton.jit
def load_halves(rows, place, offsets, mask, PAIRS: tl.constexpr):
    """A row as float32."""
    return halves(load_raw(rows, place, offsets, mask, PAIRS), PAIRS)


@triton.jit
def store_halves(rows, place, offsets, mask, row, PAIRS: tl.constexpr):
    """Write what `load_halves` would read; with PAIRS also into an array of another dtype, number by number."""
    if PAIRS and rows.dtype.element_ty != tl.bfloat16:
        at = rows + place * 2 + offsets * 2
        tl.store(at, row[0].to(rows.dtype.element_ty), mask=mask)
        tl.store(at + 1, row[1].to(rows.dtype.element_ty), mask=mask)
    elif PAIRS:
        even = row[0].to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        odd = row[1].to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(rows.to(tl.pointer_type(tl.int32)) + place + offsets, even | odd, mask=mask)
    else:
        tl.store(rows + place + offsets, row[0].to(rows.dtype.element_ty), mask=mask)


@triton.jit
def zero_halves(HEADS: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr):
    """A row of zeros."""
    if PAIRS:
        return tl.zeros((HEADS, CHANNELS // 2), tl.float32), tl.zeros((HEADS, CHANNELS // 2), tl.float32)
    else:
        return (tl.zeros((HEADS, CHANNELS), tl.float32),)


@triton.jit
def dot_halves(x, y, PAIRS: tl.constexpr):
    """<x, y> of each head, [HEADS]."""
    if PAIRS:
        return tl.sum(x[0] * y[0] + x[1] * y[1], axis=1)
    else:
        return tl.sum(x[0] * y[0], axis=1)


@triton.jit
def add_halves(x, factor, y, PAIRS: tl.constexpr):
    """Return x + factor y, with one factor a head, [HEADS]."""
    if PAIRS:
        return x[0] + factor[:, None] * y[0], x[1] + factor[:, None] * y[1]
    else:
        return (x[0] + factor[:, None] * y[0],)


@triton.jit
def scale_halves(factor, x, PAIRS: tl.constexpr):
    """Return factor x, with one factor a head, [HEADS]."""
    if PAIRS:
        return factor[:, None] * x[0], factor[:, None] * x[1]
    else:
        return (factor[:, None] * x[0],)


@triton.jit
def load_heads(numbers, at, h, H: tl.constexpr, HEADS: tl.constexpr):
    """One number a head as float32 [HEADS]; without a mask where every program has HEADS of them."""
    if H % HEADS == 0:
        return tl.load(numbers + at).to(tl.float32)
    else:
        return tl.load(numbers + at, mask=h < H, other=0.0).to(tl.float32)


@triton.jit
def store_heads(numbers, at, x, h, H: tl.constexpr, HEADS: tl.constexpr):
    """Write what `load_heads` would read."""
    if H % HEADS == 0:
        tl.store(numbers + at, x.to(numbers.dtype.element_ty))
    else:
        tl.store(numbers + at, x.to(numbers.dtype.element_ty), mask=h < H)


@triton.jit
def gather(
    rows, neighbours, first, e, offsets, mask,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Raw rows of the neighbours at edges e .. e + EACH - 1, a tuple."""
    places = ()
    for x in tl.static_range(EACH):
        places = places + (wide(first + tl.load(neighbours + e + x), WIDE) * WIDTH,)
    found = ()
    for x in tl.static_range(EACH):
        found = found + (load_raw(rows, places[x], offsets, mask, PAIRS),)
    return found


@triton.jit
def gather_features(
    edge_attr, perm, attr_first, e, offsets, mask,
    EMBEDDED: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Raw rows of the embedded features of edges e .. e + EACH - 1, a tuple; empty where features are not embedded."""
    found = ()
    if EMBEDDED:
        for x in tl.static_range(EACH):
            place = wide(attr_first + caller_edge(perm, e + x), WIDE) * WIDTH
            found = found + (load_raw(edge_attr, place, offsets, mask, PAIRS),)
    return found


@triton.jit
def joined(rows, features, x: tl.constexpr, EMBEDDED: tl.constexpr, PAIRS: tl.constexpr):
    """Row x of a step as float32, with the features of its edge added where they are embedded."""
    row = halves(rows[x], PAIRS)
    if EMBEDDED:
        feature = halves(features[x], PAIRS)
        if PAIRS:
            return row[0] + feature[0], row[1] + feature[1]
        else:
            return (row[0] + feature[0],)
    else:
        return row


@triton.jit
def load_numbers(
    numbers, first_edge, e, h, H: tl.constexpr, HEADS: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr
):
    """Numbers [E, H] of edges e .. e + EACH - 1, a tuple of [HEADS]."""
    found = ()
    for x in tl.static_range(EACH):
        found = found + (load_heads(numbers, wide(first_edge + e + x, WIDE) * H + h, h, H, HEADS),)
    return found


@triton.jit
def drop(weight, e, perm, global_edge_id, seed, sample, h, drop_below, survivor):
    """`weight` [HEADS] of edge e times its dropout factor."""
    if seed is not None:
        number = caller_edge(perm, e) if global_edge_id is None else tl.load(global_edge_id + e)
        weight = weight * keep_factor(seed, number, sample, h, drop_below, survivor)
    return weight
