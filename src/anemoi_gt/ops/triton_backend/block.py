"""The parts of `anemoi_gt.ops.block` that are no matrix products, by Triton kernels."""

from functools import lru_cache

import torch
from torch import Tensor

from anemoi_gt.kernels import node_rows
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend import launch
from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem
from anemoi_gt.ops.triton_backend.tiles import attribute_columns

on_device = launch.on_device
PROGRAMS = 528  # that share the sums over nodes; fixed, so that their order never changes
NORM, ELEMENTWISE, SUMS, TOTAL = (2048, 2**16, 2), (2048, 512, 4), (8192, 512, 4), (2048, 32, 4)  # tiles
KEPT = 128


@lru_cache(KEPT)
def _launch(kernel, num_rows: int, width: int, tile: tuple[int, int, int], programs: int = 0, **more) -> Launch:
    """Return the launch of a kernel of `node_rows`; `more` are scalars and constants by name.

    `tile` is the number of its elements, of its columns at most, and of warps. `programs` share the rows; 0: one tile
    for each program.
    """
    elements, columns, num_warps = tile
    features = min(1 << (width - 1).bit_length(), columns)
    rows = max(1, elements // features)
    grid = (programs or -(-num_rows // rows), -(-width // features))
    scalars = {"num_rows": num_rows} | {name: more.pop(name) for name in ("eps", "first_sum") if name in more}
    constants = {"F": width, "FEATURES": features, "ROWS": rows, "num_warps": num_warps}
    constants["INT64"] = num_rows * max(width, more.get("STRIDE", 0)) >= 2**31
    return Launch(kernel, grid, scalars, constants | more)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return x + delta [N, F], x itself without delta, and its layer norm in `dtype`."""
    total = None if delta is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, delta.dtype))
    normed = torch.empty_like(x, dtype=dtype)
    run = _launch(node_rows.layer_norm_fwd, *x.shape, NORM, eps=eps)
    run(x=x, delta=delta, weight=weight, bias=bias, total=total, normed=normed)
    return x if total is None else total, normed


def gelu(hidden: Tensor) -> Tensor:
    """Return GELU of `hidden` [N, F]."""
    activated = torch.empty_like(hidden)
    _launch(node_rows.gelu_fwd, *hidden.shape, ELEMENTWISE)(hidden=hidden, activated=activated)
    return activated


def new_sums(like: Tensor, width: int) -> Tensor:
    """Return memory for sums over nodes, one row for each program."""
    return like.new_empty((PROGRAMS, width), dtype=torch.float32)


def total(partial: Tensor) -> Tensor:
    """Return the sums over nodes [width] that lie in the rows of `new_sums`."""
    sums = partial.new_empty(partial.shape[1])
    options = {"STRIDE": len(sums), "SUMS": len(sums), "ADD": False, "first_sum": 0}
    _launch(node_rows.column_sums, *partial.shape, TOTAL, 1, **options)(rows=partial, partial=sums)
    return sums


def norm_backward(
    dx: Tensor, x: Tensor, grad_normed: Tensor, grad_total: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    partial: Tensor, first_sum: int, biases: bool = False, add: bool = False,
) -> Tensor:  # fmt: skip
    """Fill dx, and return the layer norm of x again like `grad_normed`.

    `partial` receives, from column `first_sum` on, the gradients of weight and bias and, with `biases`, the sums of
    grad_total and of dx; with `add` they are added to what is there.
    """
    normed = torch.empty_like(grad_normed)
    options = {"SUMS": partial.shape[1], "ADD": add, "BIASES": biases, "eps": eps, "first_sum": first_sum}
    run = _launch(node_rows.layer_norm_bwd, *x.shape, NORM, PROGRAMS, **options)
    tensors = {"x": x, "grad_normed": grad_normed, "grad_total": grad_total, "weight": weight, "bias": bias}
    run(**tensors, dx=dx, normed=normed, partial=partial)
    return normed


def gelu_backward(
    hidden: Tensor, grad: Tensor, partial: Tensor, first_sum: int, add: bool = False
) -> tuple[Tensor, Tensor]:
    """Return GELU of `hidden` [N, F] and the gradient of `hidden`, whose sum over nodes goes to `partial`."""
    activated, grad_hidden = torch.empty_like(hidden), torch.empty_like(hidden)
    options = {"SUMS": partial.shape[1], "ADD": add, "first_sum": first_sum}
    run = _launch(node_rows.gelu_bwd, *hidden.shape, ELEMENTWISE, PROGRAMS, **options)
    run(hidden=hidden, grad_activated=grad, activated=activated, grad_hidden=grad_hidden, partial=partial)
    return activated, grad_hidden


def column_sums(rows: Tensor, partial: Tensor, first_sum: int) -> None:
    """Sum rows [N, F], which need not be contiguous, over nodes into `partial`."""
    options = {"STRIDE": rows.stride(0), "SUMS": partial.shape[1], "ADD": False, "first_sum": first_sum}
    _launch(node_rows.column_sums, *rows.shape, SUMS, PROGRAMS, **options)(rows=rows, partial=partial)


def attend(
    operands: AttentionOperands, index: IndexTensors, scale: float, skip: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the attention plus `skip`, and what `differentiate` needs."""
    problem = Problem(operands, index, Options(scale=scale))
    projected = launch.project(problem, operands.query)
    out, _, inv_denominator, exp_scores, sums = launch.attend_rows(problem, projected)
    launch.embed(problem, sums, out, skip=skip)
    return out, inv_denominator, exp_scores, projected


def differentiate(
    operands: AttentionOperands, index: IndexTensors, scale: float, saved: tuple[Tensor, ...], grad: Tensor,
    rows: tuple[Tensor, Tensor, Tensor], dattr: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill the gradients of query, key, value and edge_attr; return those of weight and bias, float32.

    `grad` and the rows may be columns of wider tensors, all of one width.
    """
    dquery, dkey, dvalue = rows
    stride = max(tensor.stride(-3) for tensor in (grad, *rows))  # that of a single row may be anything
    problem, saved = Problem(operands, index, Options(scale=scale), stride), launch.Saved(*saved)
    projected = launch.project(problem, grad)
    p_ds, sums = launch.differentiate_rows(problem, saved, projected, grad, None, dquery, dattr)
    if sums is None:
        sums = launch.differentiate_attributes(problem, p_ds, saved, projected, dattr)
    launch.embed(problem, sums[1], dquery)
    both = launch.differentiate_weight(problem, grad, *sums)
    launch.differentiate_sources(problem, p_ds, grad, index.rowptr, index.col, index.csr_to_csc, dkey, dvalue)
    return both[:, :-1].contiguous(), both[:, -1].contiguous()


def empty_saved(tensors, index: IndexTensors, options) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like those that `attend` saves, for shapes alone."""
    x, batch = tensors.x_dst, options.batch
    nodes = (x.shape[0],) if batch == 1 else (batch, x.shape[0] // batch)
    statistic = x.new_empty((*nodes, options.heads), dtype=torch.float32)
    columns = attribute_columns(int(tensors.edge_weight.shape[1]) + 1)  # D never changes: a constant
    exp_scores = statistic.new_empty((batch, index.row.shape[0], options.heads))
    return statistic, exp_scores, statistic.new_empty((*statistic.shape, columns), dtype=scratch_dtype(options.dtype))
