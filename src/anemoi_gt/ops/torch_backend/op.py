"""The `torch` backend as PyTorch custom operators: flat tensors in and out, a loop over batch and groups of heads."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.compatibility import warn_if_untested
from anemoi_gt.custom_ops import define_operator, flat_arguments, refuse_second_derivative
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dropout import keep_factor
from anemoi_gt.ops.dtypes import accumulator_dtype
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

MAX_EDGE_HEADS = 2**21  # of a group of heads: its number of heads times that of edges or nodes


class FlatArguments(NamedTuple):
    """The arguments of the operator: six operands, the graph, and what else the formulas read."""

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
    rowptr: Tensor | None  # the reverse structure is only read by the backward pass
    col: Tensor | None
    csr_to_csc: Tensor | None
    seed: Tensor | None  # [1], None without dropout
    scale: float
    dropout_p: float

    def in_accumulator_dtype(self) -> "FlatArguments":
        """Return contiguous operands in the dtype of the sums, with weight [H, C, D] and bias [H, C]."""
        dtype, heads = accumulator_dtype(self.query.dtype), self.query.shape[2:]
        operands = [None if each is None else each.to(dtype).contiguous() for each in self[:6]]
        *rest, weight, bias = operands
        weight = None if weight is None else weight.reshape(*heads, -1)
        return FlatArguments(*rest, weight, None if bias is None else bias.reshape(heads), *self[6:])

    def head_groups(self, edges: Edges) -> Iterator[tuple[int, slice, HeadGroup]]:
        """Yield (batch index, heads, their operands), `edges.heads` at a time."""
        for b in range(self.query.shape[0]):
            for first in range(0, self.query.shape[2], edges.heads):
                group = slice(first, first + edges.heads)
                yield b, group, self._head_group(b, group, edges.global_edge_id)

    def _head_group(self, b: int, group: slice, global_edge_id: Tensor) -> HeadGroup:
        attr, keep = self.edge_attr, None
        if attr is not None:
            attr = attr[b if attr.shape[0] > 1 else 0]
            attr = attr if self.edge_weight is not None else attr[:, group].contiguous()
        if self.seed is not None:
            heads, options = range(group.start, group.stop), (self.dropout_p, self.query.dtype)
            keep = torch.stack([keep_factor(self.seed, b, global_edge_id, head, *options) for head in heads], dim=1)
        q, k, v = (rows[b, :, group].contiguous() for rows in self[:3])
        weight, bias = (None if each is None else each[group] for each in (self.edge_weight, self.edge_bias))
        return HeadGroup(q, k, v, attr, weight, bias, keep, self.scale)

    def edges(self) -> Edges:
        """Return the edges as the formulas read them, for as many heads at a time as memory allows."""
        graph = GraphStructure(self.colptr, self.row, self.row.new_empty(0, 0), self.perm, self.global_edge_id)
        heads = head_group_size(self.query.shape[2], max(graph.num_edges, self.query.shape[1], self.key.shape[1]))
        order, raw = graph.edge_order(), self.edge_weight is not None
        sources = Segments.of_heads(heads, self.row, self.colptr)
        attributes = Segments.of_heads(heads, order, self.colptr, is_shared=raw)
        return Edges(heads, self.colptr, self.row, graph.dst, order, graph.global_edge_ids(), sources, attributes)


def head_group_size(heads: int, rows: int) -> int:
    """Return how many heads to compute at a time: the largest divisor of `heads` within `MAX_EDGE_HEADS`."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * rows <= MAX_EDGE_HEADS))


def unsupported_reason(query: Tensor) -> str | None:
    """Return None: the torch backend runs wherever PyTorch does."""
    return None


def attend(
    operands: AttentionOperands,
    graph: GraphStructure,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    config: AttentionConfig | None = None,  # not used by this backend
) -> tuple[Tensor, Tensor]:
    """Compute edge attention of checked operands, with the meaning they have in `anemoi_gt.edge_attention`.

    query, key, value [B, N, H, C] come with edge_attr [1 or B, E, ..]; without B, all of them come without.
    """
    if operands.query.dim() == 3:
        *rows, weight, bias = operands
        rows = (None if operand is None else operand.unsqueeze(0) for operand in rows)
        out, lse = attend(AttentionOperands(*rows, weight, bias), graph, seed, scale, dropout_p)
        return out.squeeze(0), lse.squeeze(0)
    warn_if_untested("torch")
    reverse = (graph.rowptr, graph.col, graph.csr_to_csc)
    structure = (graph.colptr, graph.row, graph.perm, graph.global_edge_id)
    return edge_attention_torch(*operands, *structure, *reverse, seed, scale, dropout_p)


@define_operator
def edge_attention_torch(flat: FlatArguments) -> tuple[Tensor, Tensor]:
    """Forward: out [B, N_dst, H, C] and lse [B, N_dst, H]."""
    out, flat = flat.query.new_empty(flat.query.shape), flat.in_accumulator_dtype()
    edges, lse = flat.edges(), flat.query.new_empty(out.shape[:3])
    with torch.autocast(out.device.type, enabled=False):
        for b, group, heads in flat.head_groups(edges):
            out[b, :, group], lse[b, :, group] = attend_heads(heads, edges)
    return out, lse


@torch.library.register_fake("anemoi_gt::edge_attention_torch")
def _(query, *_):
    lse = query.new_empty(query.shape[:3], dtype=accumulator_dtype(query.dtype))
    return query.new_empty(query.shape), lse


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    *tensors, ctx.scale, ctx.dropout_p = inputs
    ctx.save_for_backward(*tensors)


@define_operator
def edge_attention_torch_backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, flat: FlatArguments, needs: list[bool]
) -> list[Tensor]:
    """Backward: the gradients that `needs` asks for, in the order of the six operands."""
    needs = Needs(*needs)
    dtype, flat = flat.query.dtype, flat.in_accumulator_dtype()
    edges, gradients = flat.edges(), Gradients.zeros(flat, needs)
    out_edges = None if flat.rowptr is None else Segments.of_heads(edges.heads, flat.col, flat.rowptr)
    do = torch.zeros_like(flat.query) if grad_out is None else grad_out.to(flat.query.dtype)
    dlse = do.new_zeros(do.shape[:3]) if grad_lse is None else grad_lse
    with torch.autocast(do.device.type, enabled=False):
        for b, group, heads in flat.head_groups(edges):
            do_heads = do[b, :, group].contiguous()
            gradient = differentiate_heads(heads, do_heads, dlse[b, :, group], edges, needs)
            gradients.add(b, group, gradient)
            if gradients.key is not None:
                ds = by_head(gradient.ds.index_select(0, flat.csr_to_csc))
                gradients.key[b, :, group] = weighted_sum(ds, heads.q, out_edges)
            if gradients.value is not None:
                w = by_head(gradient.w.index_select(0, flat.csr_to_csc))
                gradients.value[b, :, group] = weighted_sum(w, do_heads, out_edges)
    return gradients.results(dtype, flat.perm)


@torch.library.register_fake("anemoi_gt::edge_attention_torch_backward")
@flat_arguments
def _(grad_out, grad_lse, flat: FlatArguments, needs):
    return [operand.new_empty(operand.shape) for operand, need in zip(flat[:6], needs, strict=True) if need]


def _backward(ctx, grad_out, grad_lse):
    needs = list(ctx.needs_input_grad[:6])
    rest = (None,) * (len(FlatArguments._fields) - 6)
    if grad_out is None and grad_lse is None:
        return (None,) * 6 + rest
    arguments = (grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, ctx.dropout_p, needs)
    gradients = iter(edge_attention_torch_backward(*arguments))
    return *(next(gradients) if need else None for need in needs), *rest


torch.library.register_autograd("anemoi_gt::edge_attention_torch", _backward, setup_context=_setup_context)
torch.library.register_autograd("anemoi_gt::edge_attention_torch_backward", refuse_second_derivative)


class Gradients(NamedTuple):
    """Sums of the gradients of all heads; None for an operand that needs none."""

    query: Tensor | None  # [B, N_dst, H, C]
    key: Tensor | None  # [B, N_src, H, C]
    value: Tensor | None  # [B, N_src, H, C]
    edge_attr: Tensor | None  # [1 or B, E, D] or [1 or B, E, H, C], CSC order
    edge_weight: Tensor | None  # [H, C, D]
    edge_bias: Tensor | None  # [H, C]

    @classmethod
    def zeros(cls, operands: FlatArguments, needs: Needs) -> "Gradients":
        """Return zeros where a gradient is needed."""
        pairs = zip(operands[:6], needs, strict=True)
        return cls(*(torch.zeros_like(operand) if need else None for operand, need in pairs))

    def add(self, b: int, group: slice, gradient: HeadGradients) -> None:
        """Add the gradients of a group of heads at batch index `b`."""
        if self.query is not None:
            self.query[b, :, group] = gradient.dq
        if self.edge_attr is not None:
            attr = self.edge_attr[b if self.edge_attr.shape[0] > 1 else 0]
            (attr if attr.dim() == 2 else attr[:, group]).add_(gradient.da)
        if self.edge_weight is not None:
            self.edge_weight[group] += gradient.dweight
        if self.edge_bias is not None:
            self.edge_bias[group] += gradient.dbias

    def results(self, dtype: torch.dtype, perm: Tensor | None) -> list[Tensor]:
        """Return the needed gradients in the layout of the caller's operands."""
        attr, weight, bias = self[3:]
        if attr is not None and perm is not None:
            attr = torch.empty_like(attr).index_copy_(1, perm.long(), attr)
        embedding = (None if gradient is None else gradient.flatten(0, 1) for gradient in (weight, bias))
        return [gradient.to(dtype) for gradient in (*self[:3], attr, *embedding) if gradient is not None]
