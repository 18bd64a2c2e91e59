"""Sums of edge rows over the in-edges of each node: a linear map, and its transpose.

    s_i = sum of y_e over the in-edges e of i        dy_e = ds_i of the destination i of e

Each is the backward pass of the other, so derivatives of any order exist and nothing is saved but
indices. The sums are an operator of their own, beside the edge update, because autograd must see
that they are made from the updated edges: these can be hooked, or differentiated with respect to.

Rows dy are as many as edges, and autograd adds them to the gradient of the next block, which reads
the same edges. So an eager backward pass returns ds as `GatheredRows`, which are added in one pass.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from anemoi_gt.custom_ops import is_plain, needs_gradient, register
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.operator import OPERATORS, Spec
from anemoi_gt.ops.tensors import CallSizes, check_rows
from anemoi_gt.ops.triton_backend import row_launches
from anemoi_gt.ops.triton_backend.plan import Buffer, Plan, PlanBuilder
from anemoi_gt.ops.triton_backend.sizes import segment_of
from anemoi_gt.torch_compat import is_batched


def sum_edges(edges: Tensor, graph: GraphStructure, batch: int) -> Tensor:
    """Return the sums [B * N_dst, F] of rows of edges [B * E, F] over in-edges, 0 without any.

    `graph` is the structure of one of the `batch` entries; edges are in the caller's order.
    """
    check_rows("edges", edges, batch * graph.num_edges)
    index = graph.colptr, graph.perm, graph.dst_hubs
    if not is_plain(edges, *index):
        return edge_sums(edges, *index, graph.num_edges, batch)
    if not needs_gradient(edges):
        return _sum(edges, *index, graph.num_edges, batch)
    if edges.grad_fn is not None:
        # the first hook of all, so that others, and the backward pass of the edges, get dense rows
        edges.register_hook(_dense)
    return EdgeSums.apply(edges, *index, graph.num_edges, batch)


def add_segment_sum(
    builder: PlanBuilder,
    rows: Buffer,
    pointers: Buffer,
    order: Buffer | None,
    perm: Buffer | None,
    out: Buffer,
    *,
    num_nodes: int,
    num_edges: int,
    batch: int,
    segment: int,
) -> None:
    """Write the sums of edge rows [B * E, W] over the edges of each node, hubs in segments."""
    width = rows.shape[1]
    sizes = {"num_nodes": num_nodes, "num_edges": num_edges, "batch": batch, "segment": segment}
    segments = None
    if segment:
        spans = -(-num_edges // segment)
        segments = builder.empty((batch * spans, width), torch.float32)
    launch = row_launches.segment_sum(width, **sizes)
    builder.launch(
        launch, x=rows, pointers=pointers, order=order, perm=perm, out=out, segments=segments
    )
    if segments is not None:
        launch = row_launches.join_segment_sums(width, **sizes)
        builder.launch(launch, segments=segments, pointers=pointers, out=out)


def _sum(
    edges: Tensor,
    colptr: Tensor,
    perm: Tensor | None,
    hubs: Tensor | None,
    num_edges: int,
    batch: int,
) -> Tensor:
    inputs = [edges.contiguous(), colptr, perm]
    segment = segment_of(hubs, num_edges)
    (sums,) = _sum_plan(*map(_spec, inputs), segment, num_edges, batch).run(inputs)
    assert sums is not None
    return sums


@cache
def _sum_plan(
    rows: Spec, colptr: Spec, perm: Spec | None, segment: int, num_edges: int, batch: int
) -> Plan:
    builder = PlanBuilder([rows, colptr, perm])
    edges, pointers, order = builder.inputs
    assert edges is not None
    assert pointers is not None
    num_dst = pointers.shape[0] - 1
    out = builder.empty((batch * num_dst, edges.shape[1]), edges.dtype)
    sizes = {"num_nodes": num_dst, "num_edges": num_edges, "batch": batch, "segment": segment}
    add_segment_sum(builder, edges, pointers, None, order, out, **sizes)
    return builder.finish([out])


def _gather(
    rows: Tensor,
    colptr: Tensor,
    perm: Tensor | None,
    hubs: Tensor | None,  # of the transpose
    num_edges: int,
    batch: int,
) -> Tensor:
    return _add_gathered(None, rows, colptr, perm, num_edges, batch)


def _add_gathered(
    total: Tensor | None,
    rows: Tensor,
    colptr: Tensor,
    perm: Tensor | None,
    num_edges: int,
    batch: int,
) -> Tensor:
    inputs = [rows.contiguous(), colptr, perm, None if total is None else total.contiguous()]
    (gathered,) = _gather_plan(*map(_spec, inputs), num_edges, batch).run(inputs)
    assert gathered is not None
    return gathered


@cache
def _gather_plan(
    rows: Spec, colptr: Spec, perm: Spec | None, addend: Spec | None, num_edges: int, batch: int
) -> Plan:
    builder = PlanBuilder([rows, colptr, perm, addend])
    x, pointers, order, added = builder.inputs
    assert x is not None
    assert pointers is not None
    width = x.shape[1]
    sizes = {"num_dst": pointers.shape[0] - 1, "num_edges": num_edges, "batch": batch}
    out = builder.empty((batch * num_edges, width), x.dtype)
    launch = row_launches.gather_to_edges(width, **sizes)
    builder.launch(launch, x=x, addend=added, colptr=pointers, perm=order, out=out)
    return builder.finish([out])


def _spec(tensor: Tensor | None) -> Spec | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


class GatheredRows(torch.Tensor):
    """The row of its destination for each edge, [B * E, F]: not written until it is read.

    Adding it to rows in memory reads and writes these once. Any other operation sees dense rows.
    """

    arguments: Any  # a tuple, of `_gather`

    @staticmethod
    def __new__(cls, rows: Tensor, *others: Any) -> "GatheredRows":
        """Hold the arguments of `_gather`."""
        *_, num_edges, batch = others
        shape = batch * num_edges, rows.shape[1]
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)
        self.arguments = rows, *others
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # it is a class method of Tensor, too
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Add to rows in memory, as autograd adds gradients, or compute with dense rows."""
        if func is torch.ops.aten.add.Tensor and not kwargs:
            total, added = args
            is_like = total.shape == added.shape and total.dtype == added.dtype
            if type(total) is Tensor and isinstance(added, cls) and is_like:
                rows, colptr, perm, _, *sizes = added.arguments
                return _add_gathered(total, rows, colptr, perm, *sizes)
        args, kwargs = tree_map(_dense_or_same, (args, kwargs or {}))
        return func(*args, **kwargs)


def _dense(gradient: Tensor) -> Tensor:
    """Return rows in memory; a hook on the edges."""
    return _gather(*gradient.arguments) if type(gradient) is GatheredRows else gradient


def _dense_or_same(value: Any) -> Any:
    return _dense(value) if isinstance(value, Tensor) else value


class EdgeSums(torch.autograd.Function):
    """Sums in eager calls."""

    @staticmethod
    def forward(ctx: Any, edges: Tensor, *others: Any) -> Tensor:
        """Return the sums."""
        *index, ctx.num_edges, ctx.batch = others
        ctx.save_for_backward(*index)
        ctx.is_hooked = edges.grad_fn is not None
        return _sum(edges, *others)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the edges."""
        arguments = (grad, *ctx.saved_tensors, ctx.num_edges, ctx.batch)
        if torch.is_grad_enabled() or is_batched(grad) or not is_plain(*arguments[:4]):
            return edge_gather(*arguments), *_NO_GRADIENTS
        gradient = GatheredRows(*arguments) if ctx.is_hooked else _gather(*arguments)
        return gradient, *_NO_GRADIENTS


edge_sums = register("edge_sums_triton", _sum)
edge_gather = register("edge_gather_triton", _gather)
_NO_GRADIENTS = (None,) * 5  # of indices and numbers


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, *index, ctx.num_edges, ctx.batch = inputs
    ctx.save_for_backward(*index)


def _backward_of(transpose: Callable[..., Tensor]) -> Callable:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return transpose(grad, *ctx.saved_tensors, ctx.num_edges, ctx.batch), *_NO_GRADIENTS

    return backward


@torch.library.register_fake(edge_sums)
def _(edges: Tensor, colptr: Tensor, *others: Any) -> Tensor:
    batch = others[-1]
    return edges.new_empty(batch * (colptr.shape[0] - 1), edges.shape[1])


@torch.library.register_fake(edge_gather)
def _(rows: Tensor, colptr: Tensor, *others: Any) -> Tensor:
    *_, num_edges, batch = others
    return rows.new_empty(batch * num_edges, rows.shape[1])


class ListedSums:
    """The sums, and the transpose as their backward pass, in `OPERATORS`."""

    op = edge_sums
    op_backward = edge_gather
    backend = "triton"
    num_tensors = 1

    def sizes_of(self, arguments: Sequence) -> CallSizes:
        """Return the sizes of a call, for people."""
        edges, colptr, _, _, num_edges, batch = arguments
        sizes = {"batch": batch, "destinations": colptr.shape[0] - 1, "edges": num_edges}
        return CallSizes(sizes | {"features": edges.shape[1]}, edges.dtype)

    def kernels(self, arguments: Sequence, needs: Sequence[bool]) -> tuple[list[str], list[str]]:
        """Return the kernels of a forward pass, and of a backward pass if edges need a gradient.

        Assumes that it writes rows, as it does unless they are added to others.
        """
        edges, colptr, perm, hubs, num_edges, batch = arguments
        index = _spec(colptr), _spec(perm)
        segment = segment_of(hubs, num_edges)
        forward = _sum_plan(_spec(edges), *index, segment, num_edges, batch).kernels()
        if not any(needs):
            return forward, []
        sums = ((batch * (colptr.shape[0] - 1), edges.shape[1]), edges.dtype)
        return forward, _gather_plan(sums, *index, None, num_edges, batch).kernels()


OPERATORS[edge_sums] = ListedSums()
for _operator, _transpose in ((edge_sums, edge_gather), (edge_gather, edge_sums)):
    torch.library.register_autograd(
        _operator, _backward_of(_transpose), setup_context=_setup_context
    )
