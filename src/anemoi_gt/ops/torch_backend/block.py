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


def norm_backward(
    dx: Tensor, x: Tensor, grad_normed: Tensor, grad_total: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill dx; return the layer norm of x again like `grad_normed`, and sums over nodes [2 or 4, F]."""
    wide = accumulator_dtype(x.dtype)
    z, dy, w, b = (tensor.to(wide) for tensor in (x, grad_normed, weight, bias))
    normed, mean, rstd = torch.native_layer_norm(z, z.shape[-1:], w, b, eps)
    dz, dw, db = torch.ops.aten.native_layer_norm_backward(dy, z, z.shape[-1:], mean, rstd, w, b, [True] * 3)
    dz = dz if grad_total is None else dz + grad_total
    dx.copy_(dz)
    more = [grad_total.to(wide).sum(0), dz.sum(0)] if sums else []
    return normed.to(grad_normed.dtype), torch.stack([dw, db, *more])


def gelu_backward(hidden: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return GELU of `hidden` [N, F], the gradient of `hidden`, and its sum over nodes."""
    grad_hidden = torch.ops.aten.gelu_backward(grad, hidden)
    return functional.gelu(hidden), grad_hidden, column_sums(grad_hidden)


def column_sums(rows: Tensor) -> Tensor:
    """Return the sum over nodes of rows [N, F]."""
    return rows.sum(0, dtype=accumulator_dtype(rows.dtype))


def attend(operands: AttentionOperands, index, scale: float, skip: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the attention plus `skip`, and what `differentiate` needs: nothing."""
    out, lse = edge_attention_torch(*_flat(operands, index, scale))
    return out.reshape(skip.shape) + skip, *(lse.new_empty(0) for _ in range(3))


def differentiate(
    operands: AttentionOperands, index, scale: float, saved: tuple[Tensor, ...], grad: Tensor, need_attr: bool
) -> list[Tensor]:
    """Return the gradients of the operands, that of edge_attr if it is needed."""
    flat = _flat(operands, index, scale)
    needs = [True, True, True, need_attr, True, True]
    gradients = edge_attention_torch_backward(grad.reshape(flat[0].shape), None, *flat, needs)
    names = [name for name, need in zip(AttentionOperands._fields, needs, strict=True) if need]
    return [found.reshape(getattr(operands, name).shape) for name, found in zip(names, gradients, strict=True)]


def _flat(operands: AttentionOperands, index, scale: float) -> tuple:
    """Return the arguments of the operator of this backend, whose nodes and edges have a batch dimension."""
    query, key, value, attr, weight, bias = operands
    rows = [rows if query.dim() == 4 else rows.unsqueeze(0) for rows in (query, key, value, attr)]
    structure = (index.colptr, index.row, index.perm, index.global_edge_id, index.rowptr, index.col, index.csr_to_csc)
    return *rows, weight, bias, *structure, None, scale, 0.0


def empty_saved(tensors, index, options) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like those that `attend` saves, for shapes alone."""
    return tuple(tensors.x_dst.new_empty(0, dtype=accumulator_dtype(options.dtype)) for _ in range(3))
