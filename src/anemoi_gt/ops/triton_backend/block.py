"""The parts of `anemoi_gt.ops.block` that are no matrix products, by Triton kernels."""

from functools import lru_cache

import torch
from torch import Tensor

from anemoi_gt.kernels import node_rows
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend import launch
from anemoi_gt.ops.triton_backend.op import _gradients
from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem
from anemoi_gt.ops.triton_backend.tiles import attribute_columns

on_device = launch.on_device
PARTS = 396  # programs that share a sum over nodes; fixed, so that its order never changes
ELEMENTS = 2048  # of a tile: 16 of each thread, none of them held twice
KEPT = 128


@lru_cache(KEPT)
def _row_launch(
    kernel, num_rows: int, width: int, whole: bool, parts: int, eps: float | None, elements: int = ELEMENTS, **constants
) -> Launch:
    """Return the launch of a kernel of `node_rows`: of whole rows, or of tiles of at most 512 columns."""
    features = 1 << (width - 1).bit_length()
    features = features if whole else min(features, 512)
    rows = max(1, elements // features)
    scalars = {"num_rows": num_rows} | ({} if eps is None else {"eps": eps})
    grid = (parts or -(-num_rows // rows),) + (() if whole else (-(-width // features),))
    constants |= {"F": width, "FEATURES": features, "ROWS": rows, "INT64": num_rows * width >= 2**31}
    return Launch(kernel, grid, scalars, constants | {"num_warps": 4})


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return x + delta [N, F], x itself without delta, and its layer norm in `dtype`."""
    total = None if delta is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, delta.dtype))
    normed = torch.empty_like(x, dtype=dtype)
    run = _row_launch(node_rows.layer_norm_fwd, *x.shape, True, 0, eps)
    run(x=x, delta=delta, weight=weight, bias=bias, total=total, normed=normed)
    return x if total is None else total, normed


def norm_backward(
    dx: Tensor, x: Tensor, grad_normed: Tensor, grad_total: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill dx; return the layer norm of x again like `grad_normed`, and sums over nodes [2 or 4, F] float32.

    These are the gradients of weight and bias and, with `sums`, the sums of grad_total and of dx.
    """
    normed = torch.empty_like(grad_normed)
    partial = x.new_empty((4 if sums else 2, PARTS, x.shape[1]), dtype=torch.float32)
    run = _row_launch(node_rows.layer_norm_bwd, *x.shape, True, PARTS, eps, SUMS=sums)
    tensors = {"x": x, "grad_normed": grad_normed, "grad_total": grad_total, "weight": weight, "bias": bias}
    run(**tensors, dx=dx, normed=normed, partial=partial)
    return normed, partial.sum(1)


def gelu_backward(hidden: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return GELU of `hidden` [N, F], the gradient of `hidden`, and its sum over nodes, float32."""
    activated, grad_hidden = torch.empty_like(hidden), torch.empty_like(hidden)
    partial = hidden.new_empty((PARTS, hidden.shape[1]), dtype=torch.float32)
    run = _row_launch(node_rows.gelu_bwd, *hidden.shape, False, PARTS, None)
    run(hidden=hidden, grad_activated=grad, activated=activated, grad_hidden=grad_hidden, partial=partial)
    return activated, grad_hidden, partial.sum(0)


def column_sums(rows: Tensor) -> Tensor:
    """Return the sum over nodes of rows [N, F], float32."""
    partial = rows.new_empty((PARTS, rows.shape[1]), dtype=torch.float32)
    _row_launch(node_rows.column_sums, *rows.shape, False, PARTS, None, 4 * ELEMENTS)(rows=rows, partial=partial)
    return partial.sum(0)


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
    need_attr: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of the operands, that of edge_attr if it is needed."""
    problem = Problem(operands, index, Options(scale=scale))
    needs = [True, True, True, need_attr, True, True]
    return _gradients(problem, launch.Saved(*saved), grad, None, needs)


def empty_saved(tensors, index: IndexTensors, options) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like those that `attend` saves, for shapes alone."""
    nodes = (
        (tensors.x_dst.shape[0],) if options.batch == 1 else (options.batch, tensors.x_dst.shape[0] // options.batch)
    )
    statistic = tensors.x_dst.new_empty((*nodes, options.heads), dtype=torch.float32)
    columns = attribute_columns(int(tensors.edge_weight.shape[1]) + 1)  # D never changes: a constant
    exp_scores = statistic.new_empty((options.batch, index.row.shape[0], options.heads))
    return statistic, exp_scores, statistic.new_empty((*statistic.shape, columns), dtype=scratch_dtype(options.dtype))
