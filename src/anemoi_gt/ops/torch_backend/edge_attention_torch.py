"""The `torch` backend as custom operators on flat tensors, looping over batch and head groups."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import (
    define_operator,
    flat_arguments,
    needs_gradient,
    refuse_second_derivative,
)
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dropout import keep_factor
from anemoi_gt.ops.dtypes import accumulator_dtype, without_autocast
from anemoi_gt.ops.operands import AttentionOperands, Needs
from anemoi_gt.ops.torch_backend.reference import (
    Edges,
    HeadGradients,
    HeadGroup,
    Segments,
    attend_heads,
    by_head,
    differentiate_heads,
    weighted_sum,
)
from anemoi_gt.tested_versions import warn_if_untested

MAX_EDGE_HEADS = 2**21  # limit on heads in a group times the number of edges or nodes


class FlatArguments(NamedTuple):
    """The flat arguments of the operator: six operands, the graph, dropout and scale."""

    query: Tensor  # [B, N_dst, H, C]
    key: Tensor  # [B, N_src, H, C]
    value: Tensor  # [B, N_src, H, C]
    edge_attr: Tensor | None  # [1 or B, E, D] raw, or [1 or B, E, H, C]
    edge_weight: Tensor | None  # [H * C, D]
    edge_bias: Tensor | None  # [H * C]
    colptr: Tensor
    row: Tensor
    perm: Tensor | None
    global_edge_id: Tensor | None
    rowptr: Tensor | None  # the reverse structure is read only by the backward pass
    col: Tensor | None
    csr_to_csc: Tensor | None
    seed: Tensor | None  # [1], None without dropout
    scale: float
    dropout_p: float
    save: bool  # keep tensors for the backward pass

    def in_accumulator_dtype(self) -> "FlatArguments":
        """Return contiguous operands in the accumulator dtype: weight [H, C, D], bias [H, C]."""
        dtype = accumulator_dtype(self.query.dtype)
        heads = self.query.shape[-2:]

        def cast(operand: Tensor) -> Tensor:
            return operand.to(dtype).contiguous()

        def with_batch(operand: Tensor) -> Tensor:
            return cast(operand).unsqueeze(0) if self.query.dim() == 3 else cast(operand)

        attr, weight, bias = self.edge_attr, self.edge_weight, self.edge_bias
        if attr is not None:
            attr = with_batch(attr)
        if weight is not None:
            weight = cast(weight).reshape(*heads, -1)
        if bias is not None:
            bias = cast(bias).reshape(heads)
        query, key, value = with_batch(self.query), with_batch(self.key), with_batch(self.value)
        return self._replace(
            query=query, key=key, value=value, edge_attr=attr, edge_weight=weight, edge_bias=bias
        )

    def head_groups(self, edges: Edges) -> Iterator[tuple[int, slice, HeadGroup]]:
        """Yield (batch index, slice of heads, operands of the group), `edges.heads` at a time."""
        for b in range(self.query.shape[0]):
            for first in range(0, self.query.shape[2], edges.heads):
                group = slice(first, first + edges.heads)
                yield b, group, self._head_group(b, group, edges.global_edge_id)

    def _head_group(self, b: int, group: slice, global_edge_id: Tensor) -> HeadGroup:
        q, k, v = (rows[b, :, group].contiguous() for rows in self[:3])
        attr, weight, bias = self.edge_attr, self.edge_weight, self.edge_bias
        if attr is not None:
            attr = attr[b] if attr.shape[0] > 1 else attr[0]
            if weight is None:  # embedded: [E, H, C]
                attr = attr[:, group].contiguous()
        if weight is not None:
            weight = weight[group]
        if bias is not None:
            bias = bias[group]
        keep = None
        if self.seed is not None:
            dtype = self.query.dtype
            factors = [
                keep_factor(self.seed, b, global_edge_id, head, self.dropout_p, dtype)
                for head in range(group.start, group.stop)
            ]
            keep = torch.stack(factors, dim=1)
        return HeadGroup(q, k, v, attr, weight, bias, keep, self.scale)

    def edges(self) -> Edges:
        """Return the edges in the form `reference` takes, for as many heads as memory allows."""
        graph = GraphStructure(
            self.colptr, self.row, self.row.new_empty(0, 0), self.perm, self.global_edge_id
        )
        num_rows = max(graph.num_edges, self.query.shape[1], self.key.shape[1])
        heads = head_group_size(self.query.shape[2], num_rows)
        order = graph.edge_order()
        is_raw = self.edge_weight is not None
        sources = Segments.of_heads(heads, self.row, self.colptr)
        attributes = Segments.of_heads(heads, order, self.colptr, is_shared=is_raw)
        return Edges(
            heads,
            self.colptr,
            self.row,
            graph.dst,
            order,
            graph.global_edge_ids(),
            sources,
            attributes,
        )


class OutEdges(NamedTuple):
    """The out-edges of sources, over which gradients of key and value are summed."""

    segments: Segments
    csr_to_csc: Tensor  # [E]

    @classmethod
    def of(cls, flat: FlatArguments, heads: int) -> "OutEdges":
        """Return the out-edges for groups of `heads` heads.

        Raise ValueError without the reverse structure.
        """
        if flat.rowptr is None or flat.col is None or flat.csr_to_csc is None:
            raise ValueError(
                "gradients of key and value need rowptr, col and csr_to_csc, got a graph without "
                "them; pass graph.with_reverse()"
            )
        return cls(Segments.of_heads(heads, flat.col, flat.rowptr), flat.csr_to_csc)

    def sum(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Return sum_e weight_e rows_e per source.

        `weight` is [E, G] in CSC order, `rows` [N_dst, G, C].
        """
        weight_in_csr_order = weight.index_select(0, self.csr_to_csc)
        return weighted_sum(by_head(weight_in_csr_order), rows, self.segments)


def head_group_size(heads: int, rows: int) -> int:
    """Return the number of heads in a group: the largest divisor within `MAX_EDGE_HEADS`."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return max(n for n in divisors if n == 1 or n * rows <= MAX_EDGE_HEADS)


def attend(
    operands: AttentionOperands[Tensor],
    graph: GraphStructure,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Compute edge attention of checked operands, as documented in `anemoi_gt.edge_attention`.

    With query, key, value [B, N, H, C], edge_attr is [1 or B, E, ..]; without B, none of them has a
    batch dimension. Operators and gradients accept both, because unsqueezing would add autograd
    nodes.
    """
    warn_if_untested("torch")
    reverse = (graph.rowptr, graph.col, graph.csr_to_csc)
    structure = (graph.colptr, graph.row, graph.perm, graph.global_edge_id)
    save = needs_gradient(*operands)
    return edge_attention_torch(*operands, *structure, *reverse, seed, scale, dropout_p, save)[:2]


@define_operator
def edge_attention_torch(flat: FlatArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Compute out, shaped like query, lse [B, N_dst, H] and p [B, E, H], empty unless saved.

    p is the softmax. Without B, out and lse have no B either.
    """
    query = flat.query
    flat = flat.in_accumulator_dtype()
    with without_autocast(flat.query.device.type):
        edges = flat.edges()
        # results are no views, which in-place operations of the caller could not change
        out = query.new_empty(query.shape)
        lse = flat.query.new_empty(query.shape[:-1])
        p = flat.query.new_empty(_saved_shape(flat))
        batched_out, batched_lse = out.view(flat.query.shape), lse.view(flat.query.shape[:-1])
        for b, group, heads in flat.head_groups(edges):
            rows, lse_of_rows, p_heads = attend_heads(heads, edges)
            batched_out[b, :, group] = rows
            batched_lse[b, :, group] = lse_of_rows
            if flat.save:
                p[b, :, group] = p_heads
    return out, lse, p


@torch.library.register_fake("anemoi_gt::edge_attention_torch")
@flat_arguments
def _(flat: FlatArguments):
    dtype = accumulator_dtype(flat.query.dtype)
    out = flat.query.new_empty(flat.query.shape)
    lse = flat.query.new_empty(flat.query.shape[:-1], dtype=dtype)
    p = flat.query.new_empty(_saved_shape(flat), dtype=dtype)
    return out, lse, p


def _saved_shape(flat: FlatArguments) -> tuple[int, ...]:
    """Return the shape of p: [B, E, H], or [0] if it is not saved."""
    if not flat.save:
        return (0,)
    batch = flat.query.shape[0] if flat.query.dim() == 4 else 1
    return (batch, flat.row.shape[0], flat.query.shape[-2])


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    *tensors, ctx.scale, ctx.dropout_p, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*tensors, output[1], output[2])


@define_operator
def edge_attention_torch_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    flat: FlatArguments,
    lse: Tensor,
    p: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the six operands, empty where `needs` is False.

    They are separate results, not a list, because PyTorch's fallback for batched gradients supports
    only operators that return single tensors.
    """
    required = Needs(*needs)
    operands = flat[:6]
    dtype = flat.query.dtype
    flat = flat.in_accumulator_dtype()
    if grad_out is None:
        do = torch.zeros_like(flat.query)
    else:
        do = grad_out.to(flat.query.dtype).view_as(flat.query)
    if grad_lse is None:
        dlse = do.new_zeros(do.shape[:3])
    else:  # where lse is -inf, no gradient flows, even if the incoming one is NaN
        dlse = torch.where(lse.isneginf(), 0.0, grad_lse).view(do.shape[:3])
    with without_autocast(do.device.type):
        edges = flat.edges()
        gradients = Gradients.zeros(flat, required)
        out_edges = None
        if required.key or required.value:
            out_edges = OutEdges.of(flat, edges.heads)
        for b, group, heads in flat.head_groups(edges):
            do_heads = do[b, :, group].contiguous()
            gradient = differentiate_heads(
                heads, do_heads, dlse[b, :, group], p[b, :, group], edges, required
            )
            gradients.add(b, group, gradient)
            if out_edges is not None and gradients.key is not None:
                gradients.key[b, :, group] = out_edges.sum(gradient.ds, heads.q)
            if out_edges is not None and gradients.value is not None:
                gradients.value[b, :, group] = out_edges.sum(gradient.w, do_heads)
        attr = gradients.edge_attr
        if attr is not None and flat.perm is not None:  # from CSC order to the caller's order
            permuted = torch.empty_like(attr).index_copy_(1, flat.perm.long(), attr)
            gradients = gradients._replace(edge_attr=permuted)
        return _like(operands, gradients, dtype)


SixTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _like(operands: tuple, gradients: Iterable[Tensor | None], dtype: torch.dtype) -> SixTensors:
    """Return the gradients with the shapes of the operands, empty where none is needed."""
    shaped = []
    for operand, gradient in zip(operands, gradients, strict=True):
        if gradient is None:
            shaped.append(operands[0].new_empty(0))
        else:
            shaped.append(gradient.view(operand.shape).to(dtype))
    query, key, value, edge_attr, edge_weight, edge_bias = shaped
    return query, key, value, edge_attr, edge_weight, edge_bias


@torch.library.register_fake("anemoi_gt::edge_attention_torch_backward")
@flat_arguments
def _(grad_out, grad_lse, flat: FlatArguments, lse, p, needs):
    gradients = []
    for operand, need in zip(flat[:6], needs, strict=True):
        if need and operand is not None:
            gradients.append(operand.new_empty(operand.shape))
        else:
            gradients.append(p.new_empty(0))
    return tuple(gradients)


def _backward(ctx, grad_out, grad_lse, _):
    needs = list(ctx.needs_input_grad[:6])
    rest = (None,) * (len(FlatArguments._fields) - 6)
    if grad_out is None and grad_lse is None:
        return (None,) * 6 + rest
    *tensors, lse, p = ctx.saved_tensors
    arguments = (grad_out, grad_lse, *tensors, ctx.scale, ctx.dropout_p, True, lse, p, needs)
    gradients = list(edge_attention_torch_backward(*arguments))
    for i, need in enumerate(needs):
        if not need:
            gradients[i] = None
    return *gradients, *rest


torch.library.register_autograd(edge_attention_torch, _backward, setup_context=_setup_context)
refuse_second_derivative(edge_attention_torch_backward)


class Gradients(NamedTuple):
    """The gradients of all heads; None for an operand that needs no gradient."""

    query: Tensor | None  # [B, N_dst, H, C]
    key: Tensor | None  # [B, N_src, H, C]
    value: Tensor | None  # [B, N_src, H, C]
    edge_attr: Tensor | None  # [1 or B, E, D] or [1 or B, E, H, C], CSC order
    edge_weight: Tensor | None  # [H, C, D]
    edge_bias: Tensor | None  # [H, C]

    @classmethod
    def zeros(cls, flat: FlatArguments, needs: Needs) -> "Gradients":
        """Return zeros for the operands that need a gradient."""

        gradients: list[Tensor | None] = []
        for name in cls._fields:
            operand = getattr(flat, name)
            is_needed = operand is not None and getattr(needs, name)
            gradients.append(torch.zeros_like(operand) if is_needed else None)
        return cls(*gradients)

    def add(self, b: int, group: slice, gradient: HeadGradients) -> None:
        """Add the gradients of a group of heads at batch index `b`."""
        if self.query is not None:
            self.query[b, :, group] = gradient.dq
        if self.edge_attr is not None and gradient.da is not None:
            attr = self.edge_attr[b] if self.edge_attr.shape[0] > 1 else self.edge_attr[0]
            if attr.dim() == 3:  # embedded: [E, H, C]
                attr = attr[:, group]
            attr.add_(gradient.da)
        if self.edge_weight is not None and gradient.dweight is not None:
            self.edge_weight[group] += gradient.dweight
        if self.edge_bias is not None and gradient.dbias is not None:
            self.edge_bias[group] += gradient.dbias
