"""Kernels of the sub-layers between norms, GEMMs and attention: casts, residuals, sums of rows.

    pack           parameters in another dtype, one after another in one tensor
    add            x + y in the dtype of the result; without y a cast
    resize         rows in another dtype, with columns left out, or zeros behind them
    sum_columns    sums over nodes of rows, a row of partial sums for each program
    sum_partial    the totals of partial sums
    map_total      W^T s of totals s: the sum over nodes of W^T rows, without reading rows
    add_outer      dy^T x of a few rows, added to the GEMM over all other rows

Each replaces PyTorch calls that take longer on the host than on the GPU. A launch passes addresses;
PyTorch needs views and checks them (14 us on the host for a launch, 31 to 49 us for these calls and
their views, with torch 2.11). All sums are in float32 and in a fixed order.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.launch import kernel_name
from anemoi_gt.kernels.primitives import as_index

PACKED = 20  # parameters that a launch of `pack` takes
INTERPRETED = tl.constexpr(not isinstance(as_index, triton.runtime.JITFunction))


@triton.jit
def _load_piece(source, element, mask):
    """Return elements [ELEMENTS] of a parameter as float32, zeros where there is none."""
    if source is None:
        return tl.zeros(element.shape, tl.float32)
    else:
        return tl.load(source + element, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _pack_piece(
    tile,
    source,
    addend,
    packed,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    ONE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Write tile `tile` of a parameter, if it exists; return its number after this parameter."""
    tiles = (SIZE + ELEMENTS - 1) // ELEMENTS
    if tile >= 0 and tile < tiles:
        element = tile * ELEMENTS + tl.arange(0, ELEMENTS)
        mask = element < SIZE
        x = _load_piece(source, element, mask)
        if addend is not None:
            x += _load_piece(addend, element, mask)
        if ONE:
            x += 1.0
        tl.store(packed + FIRST + element, x.to(packed.dtype.element_ty), mask=mask)
    return tile - tiles


# Sources have numbers, because a launch past Triton's binder hands over addresses one by one.
@triton.jit(repr=kernel_name("anemoi_gt_pack", "packed"))
def pack(
    source0,
    source1,
    source2,
    source3,
    source4,
    source5,
    source6,
    source7,
    source8,
    source9,
    source10,
    source11,
    source12,
    source13,
    source14,
    source15,
    source16,
    source17,
    source18,
    source19,
    addend,  # added to the parameter whose number is WITH_ADDEND
    packed,
    SIZES: tl.constexpr,  # elements of each parameter, in order; 0 for none
    FIRSTS: tl.constexpr,  # the element of `packed` at which each begins
    ONES: tl.constexpr,  # whether 1 is added to each
    WITH_ADDEND: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Grid (sum of ceil(size / ELEMENTS),): a program writes ELEMENTS elements of one parameter.

    A parameter of a size that is None is written as zeros.
    """
    sources = (
        source0,
        source1,
        source2,
        source3,
        source4,
        source5,
        source6,
        source7,
        source8,
        source9,
        source10,
        source11,
        source12,
        source13,
        source14,
        source15,
        source16,
        source17,
        source18,
        source19,
    )
    tile = tl.program_id(0)
    for n in tl.static_range(len(SIZES)):
        if SIZES[n] > 0:
            if n == WITH_ADDEND:
                tile = _pack_piece(
                    tile, sources[n], addend, packed, SIZES[n], FIRSTS[n], ONES[n], ELEMENTS
                )
            else:
                tile = _pack_piece(
                    tile, sources[n], None, packed, SIZES[n], FIRSTS[n], ONES[n], ELEMENTS
                )


@triton.jit(repr=kernel_name("anemoi_gt_add", "out"), do_not_specialize=["num_units"])
def add(
    x,
    y,  # or None
    out,
    num_units,  # of UNIT elements
    UNIT: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (ceil(elements / ELEMENTS),): out = x + y, or x, over contiguous elements.

    With UNIT = 16 Triton sees that the mask is the same for 16 elements in a row, and loads 16
    bytes at once; with 1 it loads element by element.
    """
    element = as_index(tl.program_id(0), INT64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = element < as_index(num_units, INT64) * UNIT
    total = tl.load(x + element, mask=mask, other=0.0).to(tl.float32)
    if y is not None:
        total += tl.load(y + element, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    repr=kernel_name("anemoi_gt_resize", "out", "W_OUT"),
    do_not_specialize=["num_rows", "out_rows"],
)
def resize(
    x,  # [N, W]
    out,  # [N_OUT, W_OUT]
    num_rows,  # N
    out_rows,  # N_OUT
    W: tl.constexpr,
    W_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (ceil(N_OUT / ROWS), ceil(W_OUT / COLUMNS)): out = x, and 0 where x has no element."""
    row = as_index(tl.program_id(0), INT64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < W)[None, :]
    rows = tl.load(x + row[:, None] * W + column[None, :], mask=mask, other=0.0).to(tl.float32)
    mask = (row < out_rows)[:, None] & (column < W_OUT)[None, :]
    address = out + row[:, None] * W_OUT + column[None, :]
    tl.store(address, rows.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    repr=kernel_name("anemoi_gt_sum_columns", "rows", "W"),
    do_not_specialize=["num_rows", "first_sum"],
)
def sum_columns(
    rows,  # [N, W] with STRIDE between rows
    partial,  # [P, SUMS] float32
    num_rows,
    first_sum,
    W: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    IS_FIRST: tl.constexpr,  # if not, sums are added to what is there
    INT64: tl.constexpr,
):
    """Grid (P, ceil(W / COLUMNS)): a program sums the columns of every P-th tile of ROWS rows."""
    start = as_index(tl.program_id(0), INT64) * ROWS
    step = tl.num_programs(0) * ROWS
    w = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = w < W
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, num_rows, step):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & inside[None, :]
        x = tl.load(rows + row[:, None] * STRIDE + w[None, :], mask=mask, other=0.0)
        sums += x.to(tl.float32)
    address = partial + tl.program_id(0) * SUMS + first_sum + w
    total = tl.sum(sums, axis=0)
    if not IS_FIRST:
        total += tl.load(address, mask=inside, other=0.0)
    tl.store(address, total, mask=inside)


@triton.jit(repr=kernel_name("anemoi_gt_sum_partial", "partial", "SUMS"))
def sum_partial(
    partial,  # [P, SUMS] float32
    total,  # [SUMS] float32
    P: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (ceil(SUMS / COLUMNS),): a program writes COLUMNS totals."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SUMS
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, P, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < P)[:, None] & inside[None, :]
        sums += tl.load(partial + row[:, None] * SUMS + column[None, :], mask=mask, other=0.0)
    tl.store(total + column, tl.sum(sums, axis=0), mask=inside)


@triton.jit(repr=kernel_name("anemoi_gt_map_total", "weight", "F", "W"))
def map_total(
    weight,  # [F, W]
    total,  # [F] float32
    out,  # [W] float32
    F: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (ceil(W / COLUMNS),): a program writes COLUMNS elements of W^T total."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < W
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, F, ROWS):
        f = first + tl.arange(0, ROWS)
        mask = (f < F)[:, None] & inside[None, :]
        x = tl.load(weight + f[:, None] * W + column[None, :], mask=mask, other=0.0)
        s = tl.load(total + f, mask=f < F, other=0.0)
        sums += x.to(tl.float32) * s[:, None]
    tl.store(out + column, tl.sum(sums, axis=0), mask=inside)


@triton.jit(repr=kernel_name("anemoi_gt_add_outer", "dy", "M", "K"), do_not_specialize=["num_rows"])
def add_outer(
    dy,  # [N, M] with DY_STRIDE between rows
    x,  # [N, K] with X_STRIDE between rows
    total,  # [M, K] float32 with TOTAL_STRIDE between rows
    num_rows,  # N, at most ROWS
    M: tl.constexpr,
    K: tl.constexpr,
    DY_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TOTAL_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Grid (ceil(M / TILE_M), ceil(K / TILE_K)): a program adds a tile of dy^T x to `total`.

    One matrix instruction over ROWS rows, those beyond N being zeros: `total` is read and written
    once, and bounds the time.
    """
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    k = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    row = tl.arange(0, ROWS)
    a_mask = (row < num_rows)[:, None] & (m < M)[None, :]
    a = tl.load(dy + row[:, None] * DY_STRIDE + m[None, :], mask=a_mask, other=0.0)
    b_mask = (row < num_rows)[:, None] & (k < K)[None, :]
    b = tl.load(x + row[:, None] * X_STRIDE + k[None, :], mask=b_mask, other=0.0)
    mask = (m < M)[:, None] & (k < K)[None, :]
    address = total + m[:, None] * TOTAL_STRIDE + k[None, :]
    sums = tl.load(address, mask=mask, other=0.0)
    if INTERPRETED:  # which has no products of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    tl.store(address, tl.dot(tl.trans(a), b, sums), mask=mask)
