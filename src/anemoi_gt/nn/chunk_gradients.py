"""Gradients of rows that chunks read, summed into one tensor.

Where a tensor is read chunk by chunk, autograd makes a gradient with all rows for each chunk, zeros
but for the chunk's, and adds them. Here the chunks add their rows to one tensor, in the order of
the backward pass, so results are bitwise the same. With the four chunks of Anemoi's mappers, that
saves 4 of the 104 ms of kernels of a step at N320 (H100, torch 2.11).

x = shared(x)           before the chunks
rows_of(x, rows)        in each chunk
"""

from typing import Any, TypeVar

import torch
from torch import Tensor

from anemoi_gt.torch_compat import forward_mode_is_active, is_transformed

_PLAIN = (Tensor, torch.nn.Parameter)
RowsT = TypeVar("RowsT", bound=Tensor | None)


def shared(x: RowsT) -> RowsT:
    """Return x [.., N, F] with a gradient that `rows_of` adds to, where autograd runs eagerly.

    Elsewhere x itself: a compiler fuses the sums and cannot trace a backward pass that writes to
    its context, and torch.func has no rule for it.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return x
    if x is None or type(x) not in _PLAIN or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if is_transformed() or forward_mode_is_active():
        return x
    return _Shared.apply(x)


def rows_of(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Return rows of x [.., N, F]: a range, or distinct indices."""
    # the type of the node, not of the tensor: a view or a cast of x is another tensor of its own
    if not torch.compiler.is_compiling() and type(x.grad_fn) is _Shared._backward_cls:
        return _SelectRows.apply(x, rows, x.grad_fn)
    return _select(x, rows)


def _select(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[..., rows, :] if isinstance(rows, slice) else x.index_select(-2, rows)


def _add(total: Tensor, rows: slice | Tensor, grad: Tensor) -> Tensor:
    """Add a gradient to rows of `total` in place."""
    if isinstance(rows, slice):
        total[..., rows, :].add_(grad)
    else:
        total.index_add_(-2, rows, grad)  # rows are distinct: one addition each
    return total


class _Shared(torch.autograd.Function):
    """The identity; its node holds the sum of the gradients of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.total = None
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        # The engine calls this after all chunks, although they return None (torch 2.11, 2.13).
        # `grad` is of a chunk that read all rows.
        total = ctx.total
        ctx.total = None  # for the next pass through a retained graph
        if total is None:
            return grad
        return total if grad is None else total + grad


class _SelectRows(torch.autograd.Function):
    """Rows of a tensor whose node is a `_Shared`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: slice | Tensor, node: Any) -> Tensor:
        ctx.rows = rows
        ctx.node = node
        ctx.shape = x.shape
        return _select(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        node = ctx.node
        if torch.is_grad_enabled():  # create_graph=True, which sums in place would break
            return _add(grad.new_zeros(ctx.shape), ctx.rows, grad), None, None
        if node.total is None:
            node.total = grad.new_zeros(ctx.shape)
        _add(node.total, ctx.rows, grad)
        return None, None, None
