"""The `torch` backend as PyTorch custom operators: flat tensors in, a loop over samples and heads, flat tensors out."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.operators import define_operator
from anemoi_gt.ops.derivative import refuse_second_derivative
from anemoi_gt.ops.dropout import keep_factor
from anemoi_gt.ops.dtypes import accumulator_dtype
from anemoi_gt.ops.torch_backend.head import (
    Edges,
    Head,
    HeadGradient,
    Needs,
    attend_head,
    differentiate_head,
    weighted_sum,
)


@dataclass(frozen=True)
class Operands:
    """The operands of all samples and heads, laid out so that each head's rows are contiguous."""

    query: Tensor  # [B, H, N_dst, C]
    key: Tensor  # [B, H, N_src, C]
    value: Tensor  # [B, H, N_src, C]
    edge_attr: Tensor | None  # [1 or B, E, D] raw, or [1 or B, H, E, C]
    edge_weight: Tensor | None  # [H, C, D]
    edge_bias: Tensor | None  # [H, C]
    seed: Tensor | None  # [1]
    scale: float
    dropout_p: float

    def heads(self, edges: Edges) -> Iterator[tuple[int, int, Head]]:
        """Yield (sample, head, operands of that head)."""
        samples, heads = self.query.shape[:2]
        for b, h in product(range(samples), range(heads)):
            yield (
                b,
                h,
                Head(
                    q=self.query[b, h],
                    k=self.key[b, h],
                    v=self.value[b, h],
                    a=self._attributes(b, h),
                    weight=None if self.edge_weight is None else self.edge_weight[h],
                    bias=None if self.edge_bias is None else self.edge_bias[h],
                    keep=self._keep(b, h, edges),
                    scale=self.scale,
                ),
            )

    def _attributes(self, b: int, h: int) -> Tensor | None:
        if self.edge_attr is None:
            return None
        attributes = self.edge_attr[b if self.edge_attr.shape[0] > 1 else 0]
        return attributes if self.edge_weight is not None else attributes[h]

    def _keep(self, b: int, h: int, edges: Edges) -> Tensor | None:
        if self.seed is None:
            return None
        return keep_factor(self.seed, b, edges.number, h, self.dropout_p, self.query.dtype)


def why_not(query: Tensor) -> str | None:
    """The torch backend runs wherever PyTorch does."""
    return None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: GraphStructure,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_bias: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Edge attention of checked operands; the meaning of all is that of `anemoi_gt.edge_attention`.

    query, key, value [B, N, H, C] come with edge_attr [1 or B, E, ..]. One sample may come without B, in all of them.
    """
    if query.dim() == 3:
        sample = [None if operand is None else operand.unsqueeze(0) for operand in (query, key, value, edge_attr)]
        out, lse = attend(*sample[:3], graph, sample[3], edge_weight, edge_bias, seed, scale, dropout_p)
        return out.squeeze(0), lse.squeeze(0)
    reverse = (graph.rowptr, graph.col, graph.csr_to_csc)
    return edge_attention_torch(
        query, key, value, edge_attr, edge_weight, edge_bias,
        graph.colptr, graph.row, graph.perm, graph.edge_id, *reverse, seed, scale, dropout_p,
    )  # fmt: skip


@define_operator
def edge_attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_bias: Tensor | None,
    colptr: Tensor,
    row: Tensor,
    perm: Tensor | None,
    edge_id: Tensor | None,
    rowptr: Tensor | None,
    col: Tensor | None,
    csr_to_csc: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Forward: out [B, N_dst, H, C] and lse [B, N_dst, H]; the source side of the graph is only kept for backward."""
    edges = _edges(colptr, row, perm, edge_id)
    operands = _operands(query, key, value, edge_attr, edge_weight, edge_bias, seed, scale, dropout_p)
    out = torch.empty_like(operands.query)
    lse = out.new_empty(out.shape[:3])
    with torch.autocast(query.device.type, enabled=False):
        for b, h, head in operands.heads(edges):
            out[b, h], lse[b, h] = attend_head(head, edges)
    return _nodes_first(out, query.dtype), lse.transpose(1, 2).contiguous()


@torch.library.register_fake("anemoi_gt::edge_attention_torch")
def _(query, key, value, edge_attr, edge_weight, edge_bias, colptr, row, perm, edge_id, *_):
    lse = query.new_empty(query.shape[:3], dtype=accumulator_dtype(query.dtype))
    return query.new_empty(query.shape), lse


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    *tensors, ctx.scale, ctx.dropout_p = inputs
    ctx.save_for_backward(*tensors)


@define_operator
def edge_attention_torch_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_bias: Tensor | None,
    colptr: Tensor,
    row: Tensor,
    perm: Tensor | None,
    edge_id: Tensor | None,
    rowptr: Tensor | None,
    col: Tensor | None,
    csr_to_csc: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    needs: list[bool],
) -> list[Tensor]:
    """Backward: the gradients that `needs` asks for, in the order of the first six operands of the forward."""
    edges = _edges(colptr, row, perm, edge_id)
    operands = _operands(query, key, value, edge_attr, edge_weight, edge_bias, seed, scale, dropout_p)
    do = torch.zeros_like(operands.query) if grad_out is None else _heads_first(grad_out, operands.query.dtype)
    dlse = do.new_zeros(do.shape[:3]) if grad_lse is None else grad_lse.transpose(1, 2)
    gradients = Gradients.zeros(operands, Needs(*needs))
    with torch.autocast(query.device.type, enabled=False):
        for b, h, head in operands.heads(edges):
            gradient = differentiate_head(head, do[b, h], dlse[b, h], edges, Needs(*needs))
            gradients.add(b, h, gradient)
            if gradients.key is not None:
                gradients.key[b, h] = weighted_sum(gradient.ds[csr_to_csc], head.q, col, rowptr)
            if gradients.value is not None:
                gradients.value[b, h] = weighted_sum(gradient.w[csr_to_csc], do[b, h], col, rowptr)
    return gradients.results(query.dtype, perm)


@torch.library.register_fake("anemoi_gt::edge_attention_torch_backward")
def _(grad_out, grad_lse, query, key, value, edge_attr, edge_weight, edge_bias, *rest):
    operands = (query, key, value, edge_attr, edge_weight, edge_bias)
    return [operand.new_empty(operand.shape) for operand, need in zip(operands, rest[-1], strict=True) if need]


def _backward(ctx, grad_out, grad_lse):
    if grad_out is None and grad_lse is None:
        return (None,) * 16
    needs = list(ctx.needs_input_grad[:6])
    saved = ctx.saved_tensors
    gradients = iter(edge_attention_torch_backward(grad_out, grad_lse, *saved, ctx.scale, ctx.dropout_p, needs))
    return *(next(gradients) if need else None for need in needs), *((None,) * 10)


torch.library.register_autograd("anemoi_gt::edge_attention_torch", _backward, setup_context=_setup_context)
torch.library.register_autograd("anemoi_gt::edge_attention_torch_backward", refuse_second_derivative)


@dataclass(frozen=True)
class Gradients:
    """Where the heads' gradients are summed; None for an operand that needs none."""

    query: Tensor | None  # [B, H, N_dst, C]
    key: Tensor | None  # [B, H, N_src, C]
    value: Tensor | None  # [B, H, N_src, C]
    edge_attr: Tensor | None  # [1 or B, E, D] or [1 or B, H, E, C], CSC order
    edge_weight: Tensor | None  # [H, C, D]
    edge_bias: Tensor | None  # [H, C]

    @classmethod
    def zeros(cls, operands: Operands, needs: Needs) -> "Gradients":
        """Zeros for what is needed."""
        every = (getattr(operands, name) for name in Needs._fields)
        return cls(*(torch.zeros_like(operand) if need else None for operand, need in zip(every, needs, strict=True)))

    def add(self, b: int, h: int, gradient: HeadGradient) -> None:
        """Add the gradients of head `h` of sample `b`."""
        if self.query is not None:
            self.query[b, h] = gradient.dq
        if self.edge_attr is not None:
            shared = self.edge_attr[b if self.edge_attr.shape[0] > 1 else 0]
            (shared if shared.dim() == 2 else shared[h]).add_(gradient.da)
        if self.edge_weight is not None:
            self.edge_weight[h] += gradient.dweight
        if self.edge_bias is not None:
            self.edge_bias[h] += gradient.dbias

    def results(self, dtype: torch.dtype, perm: Tensor | None) -> list[Tensor]:
        """What is needed, in the layout of the caller's operands."""
        nodes = (self.query, self.key, self.value)
        results = [_nodes_first(gradient, dtype) for gradient in nodes if gradient is not None]
        if self.edge_attr is not None:
            attr = self.edge_attr if self.edge_attr.dim() == 3 else self.edge_attr.transpose(1, 2)
            attr = attr if perm is None else torch.empty_like(attr).index_copy_(1, perm.long(), attr)
            results.append(attr.to(dtype).contiguous())
        embedding = (self.edge_weight, self.edge_bias)  # both begin with [H, C]
        results += [gradient.flatten(0, 1).to(dtype) for gradient in embedding if gradient is not None]
        return results


def _edges(colptr: Tensor, row: Tensor, perm: Tensor | None, edge_id: Tensor | None) -> Edges:
    graph = GraphStructure(colptr, row, row.new_empty(0, 0), perm=perm, edge_id=edge_id)
    return Edges(colptr, row, graph.dst, graph.edge_order(), graph.edge_numbers())


def _operands(query, key, value, edge_attr, edge_weight, edge_bias, seed, scale, dropout_p) -> Operands:
    dtype, (heads, channels) = accumulator_dtype(query.dtype), query.shape[2:]
    if edge_attr is not None:
        edge_attr = edge_attr.to(dtype).contiguous() if edge_weight is not None else _heads_first(edge_attr, dtype)
    return Operands(
        query=_heads_first(query, dtype),
        key=_heads_first(key, dtype),
        value=_heads_first(value, dtype),
        edge_attr=edge_attr,
        edge_weight=None if edge_weight is None else edge_weight.to(dtype).reshape(heads, channels, -1),
        edge_bias=None if edge_bias is None else edge_bias.to(dtype).reshape(heads, channels),
        seed=seed,
        scale=scale,
        dropout_p=dropout_p,
    )


def _heads_first(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, N, H, C] to [B, H, N, C], contiguous."""
    return rows.to(dtype).transpose(1, 2).contiguous()


def _nodes_first(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, N, C] to [B, N, H, C], contiguous."""
    return rows.transpose(1, 2).to(dtype).contiguous()
