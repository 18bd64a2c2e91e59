"""The parts of `anemoi_gt.ops.block` that are no matrix products, by PyTorch's operators; see the Triton ones."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from anemoi_gt.ops.dtypes import accumulator_dtype
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.torch_backend.op import edge_attention_torch, edge_attention_torch_backward


def on_device(tensor: Tensor) -> nullcontext:
    """Return a context that does nothing."""
    return nullcontext()


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return x + delta [N, F], x itself without delta, and its layer norm in `dtype`."""
    total = x if delta is None else x + delta
    wide = accumulator_dtype(x.dtype)
    return total, functional.layer_norm(total.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps).to(dtype)


gelu = functional.gelu


def new_sums(like: Tensor, width: int) -> Tensor:
    """Return memory for sums over nodes."""
    return like.new_empty(width, dtype=accumulator_dtype(like.dtype))


def total(partial: Tensor) -> Tensor:
    """Return the sums over nodes [width] that lie in `new_sums`."""
    return partial


def norm_backward(
    dx: Tensor, x: Tensor, grad_normed: Tensor, grad_total: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    partial: Tensor, first_sum: int, biases: bool = False, add: bool = False,
) -> Tensor:  # fmt: skip
    """Fill dx, and return the layer norm of x again like `grad_normed`.

    `partial` receives, from column `first_sum` on, the gradients of weight and bias and, with `biases`, the sums of
    grad_total and of dx; with `add` they are added to what is there.
    """
    wide = accumulator_dtype(x.dtype)
    z, dy, w, b = (tensor.to(wide) for tensor in (x, grad_normed, weight, bias))
    normed, mean, rstd = torch.native_layer_norm(z, z.shape[-1:], w, b, eps)
    dz, *sums = torch.ops.aten.native_layer_norm_backward(dy, z, z.shape[-1:], mean, rstd, w, b, [True] * 3)
    dz = dz if grad_total is None else dz + grad_total
    dx.copy_(dz)
    _put(partial, first_sum, torch.cat([*sums, grad_total.to(wide).sum(0), dz.sum(0)] if biases else sums), add)
    return normed.to(grad_normed.dtype)


def gelu_backward(
    hidden: Tensor, grad: Tensor, partial: Tensor, first_sum: int, add: bool = False
) -> tuple[Tensor, Tensor]:
    """Return GELU of `hidden` [N, F] and the gradient of `hidden`, whose sum over nodes goes to `partial`."""
    grad_hidden = torch.ops.aten.gelu_backward(grad, hidden)
    _put(partial, first_sum, grad_hidden.sum(0, dtype=partial.dtype), add)
    return gelu(hidden), grad_hidden


def column_sums(rows: Tensor, partial: Tensor, first_sum: int) -> None:
    """Sum rows [N, F] over nodes into `partial`."""
    _put(partial, first_sum, rows.sum(0, dtype=partial.dtype), False)


def _put(partial: Tensor, first: int, sums: Tensor, add: bool) -> None:
    into = partial[first : first + len(sums)]
    into.copy_(into + sums if add else sums)


def attend(operands: AttentionOperands, index, scale: float, skip: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the attention plus `skip`, and what `differentiate` needs: nothing."""
    out, lse = edge_attention_torch(*_flat(operands, index, scale))
    return out.reshape(skip.shape) + skip, *(lse.new_empty(0) for _ in range(3))


def differentiate(
    operands: AttentionOperands, index, scale: float, saved: tuple[Tensor, ...], grad: Tensor,
    rows: tuple[Tensor, Tensor, Tensor], dattr: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill the gradients of query, key, value and edge_attr; return those of weight and bias."""
    flat = _flat(operands, index, scale)
    needs = [True, True, True, dattr is not None, True, True]
    gradients = edge_attention_torch_backward(grad.reshape(flat[0].shape), None, *flat, needs)
    *found, dweight, dbias = gradients
    for into, gradient in zip((*rows, dattr), found, strict=False):
        into.copy_(gradient.reshape(into.shape))
    wide = accumulator_dtype(dweight.dtype)
    return dweight.to(wide, copy=True), dbias.to(wide, copy=True)


def _flat(operands: AttentionOperands, index, scale: float) -> tuple:
    """Return the arguments of the operator of this backend, whose nodes and edges have a batch dimension."""
    query, key, value, attr, weight, bias = operands
    rows = [rows if query.dim() == 4 else rows.unsqueeze(0) for rows in (query, key, value, attr)]
    structure = (index.colptr, index.row, index.perm, index.global_edge_id, index.rowptr, index.col, index.csr_to_csc)
    return *rows, weight, bias, *structure, None, scale, 0.0


def empty_saved(tensors, index, options) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like those that `attend` saves, for shapes alone."""
    return tuple(tensors.x_dst.new_empty(0, dtype=accumulator_dtype(options.dtype)) for _ in range(3))
