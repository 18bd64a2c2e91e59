"""The `torch` backend as PyTorch custom operators: flat tensors in, a loop over samples and groups of heads, flat tensors out."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.compatibility import warn_if_untested
from anemoi_gt.custom_ops import define_operator, refuse_second_derivative
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dropout import keep_factor
from anemoi_gt.ops.dtypes import accumulator_dtype
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.torch_backend.reference import (
    Edges,
    HeadGradients,
    Heads,
    Needs,
    Runs,
    attend_heads,
    by_head,
    differentiate_heads,
    weighted_sum,
)

PAIRS = 2**21  # of an edge or a node and a head, the most that are computed together


@dataclass(frozen=True)
class Operands:
    """The operands of all samples and heads, contiguous."""

    query: Tensor  # [B, N_dst, H, C]
    key: Tensor  # [B, N_src, H, C]
    value: Tensor  # [B, N_src, H, C]
    edge_attr: Tensor | None  # [1 or B, E, D] raw, or [1 or B, E, H, C]
    edge_weight: Tensor | None  # [H, C, D]
    edge_bias: Tensor | None  # [H, C]
    seed: Tensor | None  # [1]
    scale: float
    dropout_p: float

    def groups(self, edges: Edges) -> Iterator[tuple[int, slice, Heads]]:
        """Yield (sample, heads, their operands), as many heads at a time as `edges` is for."""
        samples, _, heads, _ = self.query.shape
        for b in range(samples):
            for first in range(0, heads, edges.heads):
                yield b, (group := slice(first, first + edges.heads)), self._heads(b, group, edges)

    def _heads(self, b: int, group: slice, edges: Edges) -> Heads:
        return Heads(
            q=self.query[b, :, group].contiguous(),
            k=self.key[b, :, group].contiguous(),
            v=self.value[b, :, group].contiguous(),
            a=self._attributes(b, group),
            weight=None if self.edge_weight is None else self.edge_weight[group],
            bias=None if self.edge_bias is None else self.edge_bias[group],
            keep=self._keep(b, group, edges),
            scale=self.scale,
        )

    def _attributes(self, b: int, group: slice) -> Tensor | None:
        if self.edge_attr is None:
            return None
        attributes = self.edge_attr[b if self.edge_attr.shape[0] > 1 else 0]
        return attributes if self.edge_weight is not None else attributes[:, group].contiguous()

    def _keep(self, b: int, group: slice, edges: Edges) -> Tensor | None:
        if self.seed is None:
            return None
        factors = (
            keep_factor(self.seed, b, edges.number, h, self.dropout_p, self.query.dtype)
            for h in range(group.start, group.stop)
        )
        return torch.stack(list(factors), dim=1)


def unsupported_reason(query: Tensor) -> str | None:
    """The torch backend runs wherever PyTorch does."""
    return None


def attend(
    operands: AttentionOperands,
    graph: GraphStructure,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    config: AttentionConfig | None = None,  # of which this backend reads nothing
) -> tuple[Tensor, Tensor]:
    """Edge attention of checked operands; the meaning of all is that of `anemoi_gt.edge_attention`.

    query, key, value [B, N, H, C] come with edge_attr [1 or B, E, ..]. One sample may come without B, in all of them.
    """
    query, key, value, edge_attr, *embedding = operands
    if query.dim() == 3:
        rows = (None if operand is None else operand.unsqueeze(0) for operand in (query, key, value, edge_attr))
        out, lse = attend(AttentionOperands(*rows, *embedding), graph, seed, scale, dropout_p)
        return out.squeeze(0), lse.squeeze(0)
    warn_if_untested("torch")
    reverse = (graph.rowptr, graph.col, graph.csr_to_csc)
    structure = (graph.colptr, graph.row, graph.perm, graph.global_edge_id)
    return edge_attention_torch(*operands, *structure, *reverse, seed, scale, dropout_p)


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
    global_edge_id: Tensor | None,
    rowptr: Tensor | None,
    col: Tensor | None,
    csr_to_csc: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Forward: out [B, N_dst, H, C] and lse [B, N_dst, H]; the source side of the graph is only kept for backward."""
    operands = _operands(query, key, value, edge_attr, edge_weight, edge_bias, seed, scale, dropout_p)
    edges = _edges(colptr, row, perm, global_edge_id, operands)
    out, lse = query.new_empty(query.shape), operands.query.new_empty(query.shape[:3])
    with torch.autocast(query.device.type, enabled=False):
        for b, group, heads in operands.groups(edges):
            out[b, :, group], lse[b, :, group] = attend_heads(heads, edges)
    return out, lse


@torch.library.register_fake("anemoi_gt::edge_attention_torch")
def _(query, key, value, edge_attr, edge_weight, edge_bias, colptr, row, perm, global_edge_id, *_):
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
    global_edge_id: Tensor | None,
    rowptr: Tensor | None,
    col: Tensor | None,
    csr_to_csc: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    needs: list[bool],
) -> list[Tensor]:
    """Backward: the gradients that `needs` asks for, in the order of the first six operands of the forward."""
    operands = _operands(query, key, value, edge_attr, edge_weight, edge_bias, seed, scale, dropout_p)
    edges = _edges(colptr, row, perm, global_edge_id, operands)
    out = None if rowptr is None else Runs.of_heads(edges.heads, col, rowptr)
    do = torch.zeros_like(operands.query) if grad_out is None else grad_out.to(operands.query.dtype)
    dlse = do.new_zeros(do.shape[:3]) if grad_lse is None else grad_lse
    gradients = Gradients.zeros(operands, Needs(*needs))
    with torch.autocast(query.device.type, enabled=False):
        for b, group, heads in operands.groups(edges):
            do_heads = do[b, :, group].contiguous()
            gradient = differentiate_heads(heads, do_heads, dlse[b, :, group], edges, Needs(*needs))
            gradients.add(b, group, gradient)
            if gradients.key is not None:
                ds = by_head(gradient.ds.index_select(0, csr_to_csc))
                gradients.key[b, :, group] = weighted_sum(ds, heads.q, out)
            if gradients.value is not None:
                w = by_head(gradient.w.index_select(0, csr_to_csc))
                gradients.value[b, :, group] = weighted_sum(w, do_heads, out)
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

    query: Tensor | None  # [B, N_dst, H, C]
    key: Tensor | None  # [B, N_src, H, C]
    value: Tensor | None  # [B, N_src, H, C]
    edge_attr: Tensor | None  # [1 or B, E, D] or [1 or B, E, H, C], CSC order
    edge_weight: Tensor | None  # [H, C, D]
    edge_bias: Tensor | None  # [H, C]

    @classmethod
    def zeros(cls, operands: Operands, needs: Needs) -> "Gradients":
        """Zeros for what is needed."""
        every = (getattr(operands, name) for name in Needs._fields)
        return cls(*(torch.zeros_like(operand) if need else None for operand, need in zip(every, needs, strict=True)))

    def add(self, b: int, group: slice, gradient: HeadGradients) -> None:
        """Add the gradients of a group of heads of sample `b`."""
        if self.query is not None:
            self.query[b, :, group] = gradient.dq
        if self.edge_attr is not None:
            shared = self.edge_attr[b if self.edge_attr.shape[0] > 1 else 0]
            (shared if shared.dim() == 2 else shared[:, group]).add_(gradient.da)
        if self.edge_weight is not None:
            self.edge_weight[group] += gradient.dweight
        if self.edge_bias is not None:
            self.edge_bias[group] += gradient.dbias

    def results(self, dtype: torch.dtype, perm: Tensor | None) -> list[Tensor]:
        """What is needed, in the layout of the caller's operands."""
        nodes = (self.query, self.key, self.value)
        results = [gradient.to(dtype) for gradient in nodes if gradient is not None]
        if self.edge_attr is not None:
            attr = self.edge_attr
            attr = attr if perm is None else torch.empty_like(attr).index_copy_(1, perm.long(), attr)
            results.append(attr.to(dtype))
        embedding = (self.edge_weight, self.edge_bias)  # both begin with [H, C]
        results += [gradient.flatten(0, 1).to(dtype) for gradient in embedding if gradient is not None]
        return results


def _edges(
    colptr: Tensor, row: Tensor, perm: Tensor | None, global_edge_id: Tensor | None, operands: Operands
) -> Edges:
    graph = GraphStructure(colptr, row, row.new_empty(0, 0), perm=perm, global_edge_id=global_edge_id)
    heads = _heads_together(operands, row.shape[0])
    attr, is_raw = graph.edge_order(), operands.edge_weight is not None
    sources = Runs.of_heads(heads, row, colptr)
    attributes = Runs.of_heads(heads, attr, colptr, is_shared=is_raw)
    return Edges(heads, colptr, row, graph.dst, attr, graph.global_edge_ids(), sources, attributes)


def _heads_together(operands: Operands, num_edges: int) -> int:
    """How many heads are computed at a time: what divides them, so few that memory for edges stays small."""
    heads, largest = operands.query.shape[2], max(num_edges, operands.query.shape[1], operands.key.shape[1])
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * largest <= PAIRS))


def _operands(query, key, value, edge_attr, edge_weight, edge_bias, seed, scale, dropout_p) -> Operands:
    dtype, (heads, channels) = accumulator_dtype(query.dtype), query.shape[2:]
    return Operands(
        query=query.to(dtype).contiguous(),
        key=key.to(dtype).contiguous(),
        value=value.to(dtype).contiguous(),
        edge_attr=None if edge_attr is None else edge_attr.to(dtype).contiguous(),
        edge_weight=None if edge_weight is None else edge_weight.to(dtype).reshape(heads, channels, -1),
        edge_bias=None if edge_bias is None else edge_bias.to(dtype).reshape(heads, channels),
        seed=seed,
        scale=scale,
        dropout_p=dropout_p,
    )
