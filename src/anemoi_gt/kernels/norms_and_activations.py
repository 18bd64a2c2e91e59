"""Row kernels of the sub-layers: norms of nodes, norms of heads, activations and gates.

The norm of a row of F features; dt is the gradient of the residual connection around it:

    n  = (x - mean) / sqrt(var + eps)            y  = n scale + shift
    dn = dy scale                                dx = (dn - mean dn - n mean (dn n)) rstd + dt
    dscale = dy n                                dshift = dy             rstd = 1 / sqrt(var + eps)

Without CENTRED (RMSNorm) the mean of x is taken as 0, in var too, and dx has no mean of dn.
scale and shift are [F], or one row [2 F] of `modulation` for each node, made from a condition.
A head norm is the same over the C channels of each head of a row [H, C], with one scale [C] for all
heads and no shift.

Activations of a hidden row, plain a = f(h), or gated a = f(g) v with h = [g, v]; s is the sigmoid:

    gelu       f(h) = h cdf(h)                   f'(h) = cdf(h) + h pdf(h)
    gelu_tanh  f(h) = h s(u)                     f'(h) = s(u) + h s(u) (1 - s(u)) u'
               u = sqrt(8 / pi) (h + 0.044715 h^3)
    silu       f(h) = h s(h)                     f'(h) = s(h) + h s(h) (1 - s(h))
    sigmoid    f(h) = s(h) = 1 / (1 + exp(-h))   f'(h) = s(h) (1 - s(h))
    relu       f(h) = max(h, 0)                  f'(h) = 1 if h > 0 else 0
    mish       f(h) = h t, t = tanh(log(1 + exp(h)))      f'(h) = t + h (1 - t^2) s(h)

Every kernel reads and writes each row once and computes in float32. A backward kernel recomputes
the result of its forward kernel, so that result is not kept. It also sums over nodes while it has
the rows in registers: program p takes every P-th tile and adds its sums to row p of `partial`
[P, SUMS], from column `first_sum` on, or writes them there with IS_FIRST. Elements are added across
tiles first and across rows last, so no step needs a barrier. The next tile is loaded before
anything of the current tile is stored, because loads cannot be hoisted above stores that may alias
them.

N nodes, F features, H heads, C channels of a head, K hidden features. FEATURES, CHANNELS and
COLUMNS are the widths of tiles, powers of two; ROWS and PAIRS (of a node and a head) are their
heights. STRIDE is the elements between the heads of two nodes. It is constexpr: with a stride that
is known at run time only, Triton would load element by element.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.launch import kernel_name
from anemoi_gt.kernels.primitives import as_index

# ---------------------------------------------------------------------------- tiles and sums


@triton.jit
def _row_offsets(row, rows_per_entry, entry_rows, F: tl.constexpr, ENTRIES: tl.constexpr):
    """Return offsets of rows [ROWS] of [N, F]; with ENTRIES, of [B, entry_rows, F].

    With ENTRIES the rows are the first `rows_per_entry` of each batch entry.
    """
    if ENTRIES:
        row = row // rows_per_entry * entry_rows + row % rows_per_entry
    return row * F


@triton.jit
def load_parameter(parameter, f, mask):
    """Return a parameter of a norm as float32 [1, len(f)]."""
    return tl.load(parameter + f, mask=mask, other=0.0).to(tl.float32)[None, :]


@triton.jit
def normalise(x, mask, eps, F: tl.constexpr, CENTRED: tl.constexpr):
    """Return n, zero where masked, and the inverse standard deviation [rows, 1] of rows x.

    Masked elements of x are 0.
    """
    if CENTRED:
        mean = tl.sum(x, axis=1) / F
        centred = tl.where(mask, x - mean[:, None], 0.0)
    else:
        centred = x
    inv_std = tl.rsqrt(tl.sum(centred * centred, axis=1) / F + eps)[:, None]
    return centred * inv_std, inv_std


@triton.jit
def norm_gradient(n, inv_std, dn, mask, F: tl.constexpr, CENTRED: tl.constexpr):
    """Return dx of n = (x - mean) inv_std, or n = x inv_std."""
    if CENTRED:
        mean = tl.sum(dn, axis=1) / F
    slope = tl.sum(dn * n, axis=1) / F
    d = dn - mean[:, None] - n * slope[:, None] if CENTRED else dn - n * slope[:, None]
    return tl.where(mask, d, 0.0) * inv_std


@triton.jit
def put_into_partial(partial, first_sum, f, mask, sums, SUMS: tl.constexpr, IS_FIRST: tl.constexpr):
    """Write the column sums of a tile to this program's row of `partial`, from `first_sum` on.

    They are added to what is there unless IS_FIRST.
    """
    pointers = partial + tl.program_id(0) * SUMS + first_sum + f
    total = tl.sum(sums, axis=0)
    if not IS_FIRST:
        total += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, total, mask=mask)


# ---------------------------------------------------------------------------- norms of nodes


@triton.jit(
    repr=kernel_name("anemoi_gt_norm_fwd", "x", "F"),
    do_not_specialize=["num_rows", "rows_per_entry", "entry_rows"],
)
def norm_fwd(
    x,  # [N, F]
    scale,  # [F] or None
    shift,  # [F] or None
    modulation,  # [N, 2 F], scale then shift of each row, or None
    out,  # [N, F], or [B, entry_rows, F]
    num_rows,
    rows_per_entry,
    entry_rows,
    eps,
    F: tl.constexpr,
    FEATURES: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (ceil(N / ROWS),): a program writes ROWS rows of `out`."""
    row = as_index(tl.program_id(0), INT64) * ROWS + tl.arange(0, ROWS)
    f = tl.arange(0, FEATURES)
    mask = (row < num_rows)[:, None] & (f < F)[None, :]
    z = tl.load(x + row[:, None] * F + f[None, :], mask=mask, other=0.0).to(tl.float32)
    if modulation is not None:
        rows = modulation + row[:, None] * (2 * F) + f[None, :]
        w = tl.load(rows, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(rows + F, mask=mask, other=0.0).to(tl.float32)
    y, _ = normalise(z, mask, eps, F, CENTRED)
    if modulation is not None:
        y = y * w + b
    if scale is not None:
        y = y * load_parameter(scale, f, f < F)
    if shift is not None:
        y += load_parameter(shift, f, f < F)
    out_row = _row_offsets(row, rows_per_entry, entry_rows, F, ENTRIES)
    tl.store(out + out_row[:, None] + f[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    repr=kernel_name("anemoi_gt_norm_bwd", "x", "F"),
    do_not_specialize=["num_rows", "rows_per_entry", "entry_rows", "first_sum"],
)
def norm_bwd(
    x,  # [N, F]
    grad_normed,  # [N, F], or [B, entry_rows, F]: dy
    grad_total,  # [N, F], the gradient that dx is added to, or None
    scale,  # [F] or None
    shift,  # [F] or None
    modulation,  # [N, 2 F], scale then shift of each row, or None
    dx,  # [N, F]
    normed,  # as grad_normed: y, recomputed
    grad_scale,  # [N, F]: dscale of each row; or None
    partial,  # [P, SUMS] float32: sums of dscale, dshift, and with TOTAL of grad_total
    num_rows,
    rows_per_entry,
    entry_rows,
    first_sum,
    eps,
    F: tl.constexpr,
    FEATURES: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SUMS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    TOTAL: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (P,): a program owns every P-th tile of ROWS rows, and these rows of all outputs."""
    start = as_index(tl.program_id(0), INT64) * ROWS
    step = tl.num_programs(0) * ROWS
    f = tl.arange(0, FEATURES)
    inside = f < F
    if scale is not None:
        w = load_parameter(scale, f, inside)
    if shift is not None:
        b = load_parameter(shift, f, inside)
    scale_sum = tl.zeros((ROWS, FEATURES), tl.float32)
    shift_sum = tl.zeros((ROWS, FEATURES), tl.float32)
    if TOTAL:
        total_sum = tl.zeros((ROWS, FEATURES), tl.float32)

    next_row = start + tl.arange(0, ROWS)
    next_mask = (next_row < num_rows)[:, None] & inside[None, :]
    offset = next_row[:, None] * F + f[None, :]
    normed_row = _row_offsets(next_row, rows_per_entry, entry_rows, F, ENTRIES)
    next_x = tl.load(x + offset, mask=next_mask, other=0.0)
    next_dy = tl.load(grad_normed + normed_row[:, None] + f[None, :], mask=next_mask, other=0.0)
    if grad_total is not None:
        next_total = tl.load(grad_total + offset, mask=next_mask, other=0.0)
    if modulation is not None:
        rows = modulation + next_row[:, None] * (2 * F) + f[None, :]
        next_w = tl.load(rows, mask=next_mask, other=0.0)
        next_b = tl.load(rows + F, mask=next_mask, other=0.0)

    for first in range(start, num_rows, step):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & inside[None, :]
        offset = row[:, None] * F + f[None, :]
        normed_row = _row_offsets(row, rows_per_entry, entry_rows, F, ENTRIES)
        normed_at = normed_row[:, None] + f[None, :]
        z = next_x.to(tl.float32)
        dy = next_dy.to(tl.float32)
        if grad_total is not None:
            total = next_total.to(tl.float32)
        if modulation is not None:
            w = next_w.to(tl.float32)
            b = next_b.to(tl.float32)

        next_row = row + step
        next_mask = (next_row < num_rows)[:, None] & inside[None, :]
        next_at = next_row[:, None] * F + f[None, :]
        normed_row = _row_offsets(next_row, rows_per_entry, entry_rows, F, ENTRIES)
        next_x = tl.load(x + next_at, mask=next_mask, other=0.0)
        next_dy = tl.load(grad_normed + normed_row[:, None] + f[None, :], mask=next_mask, other=0.0)
        if grad_total is not None:
            next_total = tl.load(grad_total + next_at, mask=next_mask, other=0.0)
        if modulation is not None:
            rows = modulation + next_row[:, None] * (2 * F) + f[None, :]
            next_w = tl.load(rows, mask=next_mask, other=0.0)
            next_b = tl.load(rows + F, mask=next_mask, other=0.0)

        n, inv_std = normalise(z, mask, eps, F, CENTRED)
        dscale = dy * n
        dn = dy
        if scale is not None or modulation is not None:
            dn = dy * w
        d = norm_gradient(n, inv_std, dn, mask, F, CENTRED)
        if grad_total is not None:
            d += total
        scale_sum += dscale
        shift_sum += dy
        if TOTAL:
            total_sum += total
        y = n
        if scale is not None or modulation is not None:
            y = y * w
        if shift is not None or modulation is not None:
            y += b
        tl.store(normed + normed_at, y.to(normed.dtype.element_ty), mask=mask)
        if grad_scale is not None:
            tl.store(grad_scale + offset, dscale.to(grad_scale.dtype.element_ty), mask=mask)
        tl.store(dx + offset, d.to(dx.dtype.element_ty), mask=mask)

    put_into_partial(partial, first_sum, f, inside, scale_sum, SUMS, IS_FIRST)
    put_into_partial(partial, first_sum + F, f, inside, shift_sum, SUMS, IS_FIRST)
    if TOTAL:
        put_into_partial(partial, first_sum + 2 * F, f, inside, total_sum, SUMS, IS_FIRST)


# ---------------------------------------------------------------------------- norms of heads


@triton.jit
def _pair_offsets(pair, c, STRIDE: tl.constexpr, H: tl.constexpr, C: tl.constexpr):
    """Return offsets [PAIRS, CHANNELS] of pairs (node, head), numbered node * H + head."""
    return (pair // H * STRIDE + pair % H * C)[:, None] + c[None, :]


@triton.jit(
    repr=kernel_name("anemoi_gt_head_norm_fwd", "x", "H", "C"),
    do_not_specialize=["num_pairs"],
)
def head_norm_fwd(
    x,  # [N, H, C] with STRIDE between nodes
    scale,  # [C] or None
    out,  # [N, H, C] as x; may be x
    num_pairs,
    eps,
    H: tl.constexpr,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,
    CENTRED: tl.constexpr,
    PAIRS: tl.constexpr,
    STRIDE: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (ceil(N H / PAIRS),): a program writes PAIRS heads of nodes."""
    pair = as_index(tl.program_id(0), INT64) * PAIRS + tl.arange(0, PAIRS)
    c = tl.arange(0, CHANNELS)
    mask = (pair < num_pairs)[:, None] & (c < C)[None, :]
    at = _pair_offsets(pair, c, STRIDE, H, C)
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    y, _ = normalise(z, mask, eps, C, CENTRED)
    if scale is not None:
        y = y * load_parameter(scale, c, c < C)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    repr=kernel_name("anemoi_gt_head_norm_bwd", "x", "H", "C"),
    do_not_specialize=["num_pairs", "first_sum"],
)
def head_norm_bwd(
    x,  # [N, H, C] with STRIDE between nodes, before the norm
    grad_normed,  # [N, H, C] as x: dy
    scale,  # [C] or None
    dx,  # [N, H, C] as x; may be grad_normed
    partial,  # [P, SUMS] float32: sums of dscale [C]; None without a scale
    num_pairs,
    first_sum,
    eps,
    H: tl.constexpr,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,
    CENTRED: tl.constexpr,
    PAIRS: tl.constexpr,
    STRIDE: tl.constexpr,
    SUMS: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (P,): a program owns every P-th tile of PAIRS heads of nodes.

    dx may alias grad_normed: a thread loads all its elements of a tile before it stores
    any, and no other thread holds them, because a tile is at least as large as a load of its warps.
    """
    start = as_index(tl.program_id(0), INT64) * PAIRS
    step = tl.num_programs(0) * PAIRS
    c = tl.arange(0, CHANNELS)
    inside = c < C
    if scale is not None:
        w = load_parameter(scale, c, inside)
        scale_sum = tl.zeros((PAIRS, CHANNELS), tl.float32)
    next_pair = start + tl.arange(0, PAIRS)
    next_mask = (next_pair < num_pairs)[:, None] & inside[None, :]
    next_at = _pair_offsets(next_pair, c, STRIDE, H, C)
    next_x = tl.load(x + next_at, mask=next_mask, other=0.0)
    next_dy = tl.load(grad_normed + next_at, mask=next_mask, other=0.0)
    for first in range(start, num_pairs, step):
        pair = first + tl.arange(0, PAIRS)
        mask = (pair < num_pairs)[:, None] & inside[None, :]
        z = next_x.to(tl.float32)
        dy = next_dy.to(tl.float32)

        next_pair = pair + step
        next_mask = (next_pair < num_pairs)[:, None] & inside[None, :]
        next_at = _pair_offsets(next_pair, c, STRIDE, H, C)
        next_x = tl.load(x + next_at, mask=next_mask, other=0.0)
        next_dy = tl.load(grad_normed + next_at, mask=next_mask, other=0.0)

        n, inv_std = normalise(z, mask, eps, C, CENTRED)
        dn = dy
        if scale is not None:
            dn = dy * w
        d = norm_gradient(n, inv_std, dn, mask, C, CENTRED)
        if scale is not None:
            scale_sum += dy * n
        at = _pair_offsets(pair, c, STRIDE, H, C)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
    if scale is not None:
        put_into_partial(partial, first_sum, c, inside, scale_sum, SUMS, IS_FIRST=True)


# ---------------------------------------------------------------------------- activations


@triton.jit
def _normal_cdf(h):
    """Return cdf(h) and exp(-h^2 / 2) of the normal distribution.

    cdf(-|h|) exp(h^2 / 2) is a polynomial of t = 1 / (1 + 0.3 |h|), fitted to a relative error of
    1.5e-7. PyTorch's GELU and erf of libdevice are bound by arithmetic; this has one exponential,
    which the density shares.
    """
    t = 1.0 / (1.0 + 0.3 * tl.abs(h))
    q = ((0.03567487688161375 * t - 0.15720349929360247) * t + 0.2063541956667543) * t
    q = ((q - 0.053684245498132596) * t + 0.1285619241874079) * t + 0.09991340876295038
    q = (q * t + 0.12075396824859405) * t + 0.1196292981063501
    e = tl.exp2(h * h * -0.7213475204444817)
    q = q * t * e
    return tl.where(h > 0.0, 1.0 - q, q), e


@triton.jit
def _sigmoid(h):
    """Return 1 / (1 + exp(-h)), 0 where the exponential overflows."""
    return 1.0 / (1.0 + tl.exp2(h * -1.4426950408889634))


@triton.jit
def activate(h, ACTIVATION: tl.constexpr):
    """Return f(h) and f'(h); what is not used costs nothing once compiled."""
    if ACTIVATION == "gelu":
        cdf, e = _normal_cdf(h)
        return h * cdf, cdf + h * (0.3989422804014327 * e)
    elif ACTIVATION == "gelu_tanh":
        c = tl.minimum(tl.maximum(h, -16.0), 16.0)  # s is 0 or 1 beyond, and c^3 finite
        s = _sigmoid(1.5957691216057308 * c * (1.0 + 0.044715 * c * c))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * c * c)
        return h * s, s + c * s * (1.0 - s) * inner
    elif ACTIVATION == "silu":
        s = _sigmoid(h)
        return h * s, s + h * s * (1.0 - s)
    elif ACTIVATION == "sigmoid":
        s = _sigmoid(h)
        return s, s * (1.0 - s)
    elif ACTIVATION == "mish":
        # tanh(log(1 + e)) = e (e + 2) / (e (e + 2) + 2); beyond 16 it is 1 in float32, and e finite
        e = tl.exp2(tl.minimum(h, 16.0) * 1.4426950408889634)
        n = e * (e + 2.0)
        t = n / (n + 2.0)
        return h * t, t + h * (1.0 - t * t) * (e / (1.0 + e))
    else:
        tl.static_assert(ACTIVATION == "relu")
        # Comparisons with NaN are false, so NaN passes, as in PyTorch.
        return tl.where(h <= 0.0, 0.0, h), tl.where(h <= 0.0, 0.0, 1.0)


@triton.jit(
    repr=kernel_name("anemoi_gt_activation_fwd", "hidden", "ACTIVATION", "GATED", "K"),
    do_not_specialize=["num_rows"],
)
def activation_fwd(
    hidden,  # [N, K], or [N, 2 K] with GATED: gate, then value
    out,  # [N, K]; may be hidden unless GATED
    num_rows,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (ceil(N / ROWS), ceil(K / COLUMNS)): a program writes a tile of `out`."""
    row = as_index(tl.program_id(0), INT64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (k < K)[None, :]
    offset = row[:, None] * K + k[None, :]
    if GATED:
        hidden_at = row[:, None] * (2 * K) + k[None, :]
        h = tl.load(hidden + hidden_at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(hidden + K + hidden_at, mask=mask, other=0.0).to(tl.float32)
        a, _ = activate(h, ACTIVATION)
        a *= value
    else:
        h = tl.load(hidden + offset, mask=mask, other=0.0).to(tl.float32)
        a, _ = activate(h, ACTIVATION)
    tl.store(out + offset, a.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    repr=kernel_name("anemoi_gt_activation_bwd", "hidden", "ACTIVATION", "GATED", "K"),
    do_not_specialize=["num_rows", "first_sum"],
)
def activation_bwd(
    hidden,  # [N, K], or [N, 2 K] with GATED: gate, then value
    grad_activated,  # [N, K]: da
    activated,  # [N, K]: a, recomputed; may be grad_activated
    grad_hidden,  # as hidden
    partial,  # [P, SUMS] float32: sums of grad_hidden
    num_rows,
    first_sum,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SUMS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    INT64: tl.constexpr,
):
    """Grid (P, ceil(K / COLUMNS)): a program owns COLUMNS columns of every P-th tile of ROWS rows.

    `activated` may alias grad_activated, as dx and grad_normed in `head_norm_bwd`.
    """
    WIDTH: tl.constexpr = 2 * K if GATED else K
    start = as_index(tl.program_id(0), INT64) * ROWS
    step = tl.num_programs(0) * ROWS
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = k < K
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if GATED:
        value_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    next_row = start + tl.arange(0, ROWS)
    next_mask = (next_row < num_rows)[:, None] & inside[None, :]
    next_at = next_row[:, None] * K + k[None, :]
    next_hidden = hidden + next_row[:, None] * WIDTH + k[None, :]
    next_h = tl.load(next_hidden, mask=next_mask, other=0.0)
    next_da = tl.load(grad_activated + next_at, mask=next_mask, other=0.0)
    if GATED:
        next_value = tl.load(next_hidden + K, mask=next_mask, other=0.0)
    for first in range(start, num_rows, step):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & inside[None, :]
        offset = row[:, None] * K + k[None, :]
        hidden_at = row[:, None] * WIDTH + k[None, :]
        h = next_h.to(tl.float32)
        da = next_da.to(tl.float32)
        if GATED:
            value = next_value.to(tl.float32)

        next_row = row + step
        next_mask = (next_row < num_rows)[:, None] & inside[None, :]
        next_at = next_row[:, None] * K + k[None, :]
        next_hidden = hidden + next_row[:, None] * WIDTH + k[None, :]
        next_h = tl.load(next_hidden, mask=next_mask, other=0.0)
        next_da = tl.load(grad_activated + next_at, mask=next_mask, other=0.0)
        if GATED:
            next_value = tl.load(next_hidden + K, mask=next_mask, other=0.0)

        a, slope = activate(h, ACTIVATION)
        if GATED:
            dvalue = da * a
            a *= value
            da *= value
            dv = dvalue.to(grad_hidden.dtype.element_ty)
            tl.store(grad_hidden + K + hidden_at, dv, mask=mask)
        dh = da * slope
        sums += dh
        if GATED:
            value_sums += dvalue
        tl.store(activated + offset, a.to(activated.dtype.element_ty), mask=mask)
        tl.store(grad_hidden + hidden_at, dh.to(grad_hidden.dtype.element_ty), mask=mask)
    put_into_partial(partial, first_sum, k, inside, sums, SUMS, IS_FIRST)
    if GATED:
        put_into_partial(partial, first_sum + K, k, inside, value_sums, SUMS, IS_FIRST)
