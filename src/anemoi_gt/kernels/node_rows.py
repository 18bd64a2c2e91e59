"""Rows of nodes outside of the attention: layer norms with residual connection, GELU, and sums over nodes.

    total = x + delta                                          residual connection, where there is one
    n     = (total - mean) / sqrt(var + eps),    normed = n weight + bias            over the features of a row
    d total = rstd (dn - mean dn - n mean (dn n)) + incoming gradient of total,      dn = dnormed weight
    d weight = sum_i n dnormed,    d bias = sum_i dnormed
    g = h cdf(h),    dh = dg (cdf(h) + h pdf(h))               cdf, pdf of the normal distribution

Each kernel reads and writes a row once. Sums over nodes are made in the pass that has the rows in registers: a program
adds up every P-th tile and writes one row of `partial` for each sum, which the caller adds up. Elements are added
across tiles before they are added across rows, so that no step needs a barrier.
"""

import triton
import triton.language as tl

from anemoi_gt.kernels.primitives import as_index


def _name(base: str, tensor: str):
    def name(specialization) -> str:
        dtype = str(specialization.signature[tensor]).lstrip("*")
        return f"anemoi_gt_{base}_{dtype}_f{specialization.constants.get('F')}"

    return name


@triton.jit
def _tile(first, column, num_rows, F: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr):
    """Return the columns, and offsets and mask [ROWS, FEATURES] of rows from `first` on in a tensor [N, F]."""
    row = first + tl.arange(0, ROWS)
    f = column + tl.arange(0, FEATURES)
    return f, row[:, None] * F + f[None, :], (row < num_rows)[:, None] & (f < F)[None, :]


@triton.jit
def _normal(x, mask, eps, F: tl.constexpr):
    """Return the normalised rows of x, zero where masked, and the inverse standard deviation of each."""
    mean = tl.sum(x, axis=1) / F
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / F + eps)
    return centred * rstd[:, None], rstd


@triton.jit(repr=_name("layer_norm_fwd", "x"), do_not_specialize=["num_rows"])
def layer_norm_fwd(
    x,  # [N, F]
    delta,  # [N, F] or None
    weight,  # [F]
    bias,  # [F]
    total,  # [N, F], or None without delta
    normed,  # [N, F]
    num_rows, eps,
    F: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(N / ROWS),): a program owns ROWS rows, and writes those of total and normed."""
    f, at, mask = _tile(as_index(tl.program_id(0), INT64) * ROWS, 0, num_rows, F, FEATURES, ROWS)
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if delta is not None:
        z = (z + tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, z, mask=mask)
        z = z.to(tl.float32)
    w = tl.load(weight + f, mask=f < F, other=0.0).to(tl.float32)
    b = tl.load(bias + f, mask=f < F, other=0.0).to(tl.float32)
    n, _ = _normal(z, mask, eps, F)
    tl.store(normed + at, (n * w[None, :] + b[None, :]).to(normed.dtype.element_ty), mask=mask)


@triton.jit(repr=_name("layer_norm_bwd", "x"), do_not_specialize=["num_rows"])
def layer_norm_bwd(
    x,  # [N, F], or total
    grad_normed,  # [N, F]
    grad_total,  # [N, F], or None without a residual connection
    weight,  # [F]
    bias,  # [F]
    dx,  # [N, F]
    normed,  # [N, F], made again
    partial,  # [2 or 4, P, F] float32: d weight, d bias, and with SUMS the sums of grad_total and dx
    num_rows, eps,
    F: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Grid (P,): a program owns every P-th tile of ROWS rows, and writes those of dx and normed and its sums."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    f = tl.arange(0, FEATURES)
    w = tl.load(weight + f, mask=f < F, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + f, mask=f < F, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros((ROWS, FEATURES), tl.float32)
    bias_sum = tl.zeros((ROWS, FEATURES), tl.float32)
    if SUMS:
        total_sum = tl.zeros((ROWS, FEATURES), tl.float32)
        dx_sum = tl.zeros((ROWS, FEATURES), tl.float32)
    for first in range(part * ROWS, num_rows, parts * ROWS):
        _, at, mask = _tile(as_index(first, INT64), 0, num_rows, F, FEATURES, ROWS)
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(grad_normed + at, mask=mask, other=0.0).to(tl.float32)
        if grad_total is not None:
            dz = tl.load(grad_total + at, mask=mask, other=0.0).to(tl.float32)
        n, rstd = _normal(z, mask, eps, F)
        dn = dy * w
        centred = dn - (tl.sum(dn, axis=1) / F)[:, None] - n * (tl.sum(dn * n, axis=1) / F)[:, None]
        d = tl.where(mask, centred, 0.0) * rstd[:, None]
        weight_sum += dy * n
        bias_sum += dy
        if grad_total is not None:
            d += dz
        if SUMS:
            total_sum += dz
            dx_sum += d
        tl.store(normed + at, (n * w + b).to(normed.dtype.element_ty), mask=mask)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
    tl.store(partial + part * F + f, tl.sum(weight_sum, axis=0), mask=f < F)
    tl.store(partial + (parts + part) * F + f, tl.sum(bias_sum, axis=0), mask=f < F)
    if SUMS:
        tl.store(partial + (2 * parts + part) * F + f, tl.sum(total_sum, axis=0), mask=f < F)
        tl.store(partial + (3 * parts + part) * F + f, tl.sum(dx_sum, axis=0), mask=f < F)


@triton.jit(repr=_name("gelu_bwd", "hidden"), do_not_specialize=["num_rows"])
def gelu_bwd(
    hidden,  # [N, F] h
    grad_activated,  # [N, F] dg
    activated,  # [N, F] g, made again
    grad_hidden,  # [N, F] dh
    partial,  # [P, F] float32, sums of dh
    num_rows,
    F: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Grid (P, ceil(F / FEATURES)): a program owns every P-th tile of ROWS rows, FEATURES columns of each."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * FEATURES
    sums = tl.zeros((ROWS, FEATURES), tl.float32)
    for first in range(part * ROWS, num_rows, parts * ROWS):
        _, at, mask = _tile(as_index(first, INT64), column, num_rows, F, FEATURES, ROWS)
        h = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
        dg = tl.load(grad_activated + at, mask=mask, other=0.0).to(tl.float32)
        cdf = 0.5 + 0.5 * tl.erf(h * 0.7071067811865476)
        dh = dg * (cdf + h * (0.3989422804014327 * tl.exp(-0.5 * h * h)))
        sums += dh
        tl.store(activated + at, (h * cdf).to(activated.dtype.element_ty), mask=mask)
        tl.store(grad_hidden + at, dh.to(grad_hidden.dtype.element_ty), mask=mask)
    f = column + tl.arange(0, FEATURES)
    tl.store(partial + part * F + f, tl.sum(sums, axis=0), mask=f < F)


@triton.jit(repr=_name("column_sums", "rows"), do_not_specialize=["num_rows"])
def column_sums(
    rows,  # [N, F]
    partial,  # [P, F] float32
    num_rows,
    F: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Grid (P, ceil(F / FEATURES)): a program sums every P-th tile of ROWS rows, FEATURES columns of each."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * FEATURES
    sums = tl.zeros((ROWS, FEATURES), tl.float32)
    for first in range(part * ROWS, num_rows, parts * ROWS):
        _, at, mask = _tile(as_index(first, INT64), column, num_rows, F, FEATURES, ROWS)
        sums += tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
    f = column + tl.arange(0, FEATURES)
    tl.store(partial + part * F + f, tl.sum(sums, axis=0), mask=f < F)
