"""The `torch` backend as custom operators on flat tensors, looping over batch and head groups."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dropout import dropout_factor
from anemoi_gt.ops.dtypes import accumulator_dtype, without_autocast
from anemoi_gt.ops.operator import GradientLayout, Operator, Spec
from anemoi_gt.ops.tensors import (
    AttentionConstants,
    AttentionOperands,
    CallSizes,
    EdgeAttentionOptions,
    IndexTensors,
)
from anemoi_gt.ops.torch_backend.reference import (
    Edges,
    HeadGroup,
    OutEdges,
    Segments,
    attend_heads,
    differentiate_heads,
)
from anemoi_gt.tested_versions import warn_if_untested

NUM_OPERANDS = len(AttentionOperands._fields)
MAX_EDGE_HEADS = 2**21  # limit on heads in a group times the number of edges or nodes


class Call(NamedTuple):
    """A call: its operands as `in_accumulator_dtype` returns them, indices and options."""

    operands: AttentionOperands[Tensor]
    graph: IndexTensors[Tensor]
    seed: Tensor | None
    options: EdgeAttentionOptions

    @classmethod
    def of(cls, inputs: Sequence[Tensor | None], options: EdgeAttentionOptions) -> "Call":
        """Read the flat inputs of the operator."""
        *index, seed = inputs[NUM_OPERANDS:]
        operands = in_accumulator_dtype(AttentionOperands._make(inputs[:NUM_OPERANDS]))
        return cls(operands, IndexTensors._make(index), seed, options)

    def head_groups(self, edges: Edges) -> Iterator[tuple[int, slice, HeadGroup]]:
        """Yield (batch index, slice of heads, operands of the group), `edges.heads` at a time."""
        batch, _, num_heads, _ = self.operands.query.shape
        for b in range(batch):
            for first in range(0, num_heads, edges.heads):
                group = slice(first, first + edges.heads)
                yield b, group, self._head_group(b, group, edges.global_edge_id)

    def _head_group(self, b: int, group: slice, global_edge_id: Tensor) -> HeadGroup:
        q, k, v = (rows[b, :, group].contiguous() for rows in self.operands[:3])
        _, _, _, attr, weight, bias = self.operands
        if attr is not None:
            attr = attr[b] if attr.shape[0] > 1 else attr[0]
            if weight is None:  # embedded: [E, H, C]
                attr = attr[:, group].contiguous()
        if weight is not None:
            weight = weight[group]
        if bias is not None:
            bias = bias[group]
        scale, dropout_p, _ = self.options
        dropout = None
        if self.seed is not None:
            heads = range(group.start, group.stop)
            dropout = dropout_factor(self.seed, b, global_edge_id, heads, dropout_p, q.dtype)
        return HeadGroup(q, k, v, attr, weight, bias, dropout, scale)

    def edges(self) -> Edges:
        """Return the edges in the form `reference` takes, for as many heads as memory allows."""
        index, (query, key, *_) = self.graph, self.operands
        graph = GraphStructure(
            index.colptr, index.row, index.row.new_empty(0, 0), index.perm, index.global_edge_id
        )
        num_rows = max(graph.num_edges, query.shape[1], key.shape[1])
        heads = head_group_size(query.shape[2], num_rows)
        order = graph.edge_order()
        is_raw = self.operands.edge_weight is not None
        sources = Segments.of_heads(heads, index.row, index.colptr)
        attributes = Segments.of_heads(heads, order, index.colptr, is_shared=is_raw)
        return Edges(
            heads,
            index.colptr,
            index.row,
            graph.dst,
            order,
            graph.global_edge_ids(),
            sources,
            attributes,
        )

    def out_edges(self, heads: int) -> OutEdges:
        """Return the edges of sources, for groups of `heads` heads."""
        rowptr, col, csr_to_csc = self.graph.rowptr, self.graph.col, self.graph.csr_to_csc
        # what needs gradients of key or value has the reverse structure
        assert rowptr is not None
        assert col is not None
        assert csr_to_csc is not None
        return OutEdges(Segments.of_heads(heads, col, rowptr), csr_to_csc)


def in_accumulator_dtype(operands: AttentionOperands[Tensor]) -> AttentionOperands[Tensor]:
    """Return contiguous operands with a batch dimension, in the dtype of sums.

    The weight is [H, C, D], the bias [H, C].
    """
    query = operands.query
    dtype, heads = accumulator_dtype(query.dtype), query.shape[-2:]
    q, k, v, attr, weight, bias = operands.map(lambda operand: operand.to(dtype).contiguous())
    if query.dim() == 3:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        if attr is not None:
            attr = attr.unsqueeze(0)
    if weight is not None:
        weight = weight.reshape(*heads, -1)
    if bias is not None:
        bias = bias.reshape(heads)
    return AttentionOperands(q, k, v, attr, weight, bias)


def head_group_size(heads: int, rows: int) -> int:
    """Return the number of heads in a group: the largest divisor within `MAX_EDGE_HEADS`."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return max(n for n in divisors if n == 1 or n * rows <= MAX_EDGE_HEADS)


def attend(
    operands: AttentionOperands[Tensor],
    graph: GraphStructure,
    seed: Tensor | None,
    options: EdgeAttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Compute edge attention of checked operands, as documented in `anemoi_gt.edge_attention`.

    With query, key, value [B, N, H, C], edge_attr is [1 or B, E, ..]; without B, none of them has a
    batch dimension. Operators and gradients accept both, because unsqueezing would add autograd
    nodes.
    """
    warn_if_untested("torch")
    index = IndexTensors(
        graph.colptr,
        graph.row,
        graph.perm,
        graph.global_edge_id,
        rowptr=graph.rowptr,
        col=graph.col,
        csr_to_csc=graph.csr_to_csc,
    )
    save = needs_gradient(*operands)
    out, lse = edge_attention_torch(operands, (*index, seed), options, save=save)
    return out, lse


class EdgeAttention(Operator):
    """Outputs out, shaped like query, and lse [B, N_dst, H]; keeps the softmax p [B, E, H].

    Without B in query, out and lse have no B either.
    """

    def __init__(self) -> None:
        super().__init__(
            "edge_attention",
            "torch",
            tensors=AttentionOperands[Tensor],
            constants=AttentionConstants[Tensor],
            options=EdgeAttentionOptions,
            outputs=("out", "lse"),
        )

    def call_sizes(
        self,
        tensors: AttentionOperands[Tensor],
        constants: AttentionConstants[Tensor],
        options: EdgeAttentionOptions,
    ) -> CallSizes:
        """Return the sizes of a call."""
        return CallSizes.of_attention(tensors, constants.graph.row.shape[0])

    def passes(self, inputs: Sequence[Tensor | None], options: EdgeAttentionOptions) -> "_Passes":
        """Return both passes."""
        return _Passes(options)

    def forward_specs(
        self,
        tensors: AttentionOperands[Tensor],
        constants: AttentionConstants[Tensor],
        options: EdgeAttentionOptions,
    ) -> list[Spec]:
        """Return the specs of out, lse and p."""
        query = tensors.query
        dtype = accumulator_dtype(query.dtype)
        batch = query.shape[0] if query.dim() == 4 else 1
        p = (batch, constants.graph.row.shape[0], query.shape[-2])
        return [(query.shape, query.dtype), (query.shape[:-1], dtype), (p, dtype)]


class _Passes(NamedTuple):
    options: EdgeAttentionOptions

    def forward(self, inputs: Sequence[Tensor | None], *, save: bool) -> list[Tensor]:
        """Return out, lse and, with `save`, p."""
        call = Call.of(inputs, self.options)
        query, batched = inputs[0], call.operands.query
        assert query is not None
        with without_autocast(query.device.type):
            edges = call.edges()
            # results are no views, which in-place operations of the caller could not change
            out = query.new_empty(query.shape)
            lse = batched.new_empty(query.shape[:-1])
            batched_out, batched_lse = out.view(batched.shape), lse.view(batched.shape[:-1])
            p = None
            if save:
                batch, _, num_heads, _ = batched.shape
                p = batched.new_empty((batch, edges.row.shape[0], num_heads))
            for b, group, heads in call.head_groups(edges):
                rows, lse_of_rows, p_heads = attend_heads(heads, edges)
                batched_out[b, :, group] = rows
                batched_lse[b, :, group] = lse_of_rows
                if p is not None:
                    p[b, :, group] = p_heads
        return [out, lse] if p is None else [out, lse, p]

    def backward(
        self,
        inputs: Sequence[Tensor | None],
        kept: Tensor,
        grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> tuple[list[Tensor | None], GradientLayout]:
        """Return the gradients of the six operands, of p kept by the forward pass."""
        p = kept
        grad_out, grad_lse = grads
        required: AttentionOperands[bool] = AttentionOperands._make(needs)
        call = Call.of(inputs, self.options)
        query = call.operands.query
        if grad_out is None:
            do = torch.zeros_like(query)
        else:
            do = grad_out.to(query.dtype).view_as(query)
        dlse = do.new_zeros(do.shape[:3]) if grad_lse is None else grad_lse.view(do.shape[:3])
        with without_autocast(do.device.type):
            edges = call.edges()
            out_edges = None
            if required.key or required.value:
                out_edges = call.out_edges(edges.heads)
            gradients = zero_gradients(call.operands, required)
            for b, group, heads in call.head_groups(edges):
                do_heads = do[b, :, group].contiguous()
                of_heads = differentiate_heads(
                    heads, do_heads, dlse[b, :, group], p[b, :, group], edges, out_edges, required
                )
                add_heads(gradients, b, group, of_heads)
            attr, perm = gradients.edge_attr, call.graph.perm
            if attr is not None and perm is not None:  # from CSC order to the caller's order
                permuted = torch.empty_like(attr).index_copy_(1, perm.long(), attr)
                gradients = gradients._replace(edge_attr=permuted)
        operands = inputs[:NUM_OPERANDS]
        results: list[Tensor | None] = []
        for operand, whole in zip(operands, gradients, strict=True):
            if whole is not None and operand is not None:
                whole = whole.view(operand.shape).to(operand.dtype)
            results.append(whole)
        return results, GradientLayout.separate(operands, needs)


edge_attention_torch = EdgeAttention()


def zero_gradients(
    operands: AttentionOperands[Tensor], needs: AttentionOperands[bool]
) -> AttentionOperands[Tensor | None]:
    """Return zeros like the operands; None where no gradient is needed."""
    gradients: list[Tensor | None] = []
    for operand, need in zip(operands, needs, strict=True):
        gradients.append(torch.zeros_like(operand) if need and operand is not None else None)
    return AttentionOperands._make(gradients)


def add_heads(
    gradients: AttentionOperands[Tensor | None],
    b: int,
    group: slice,
    of_heads: AttentionOperands[Tensor | None],
) -> None:
    """Add the gradients of a group of heads at batch index `b`; both are None alike."""
    dq, dk, dv, da, dweight, dbias = of_heads
    for whole, rows in zip(gradients[:3], (dq, dk, dv), strict=True):
        if whole is not None and rows is not None:
            whole[b, :, group] = rows
    if gradients.edge_attr is not None and da is not None:
        is_shared = gradients.edge_attr.shape[0] == 1  # by all batch entries
        attr = gradients.edge_attr[0] if is_shared else gradients.edge_attr[b]
        if attr.dim() == 3:  # embedded: [E, H, C]
            attr = attr[:, group]
        attr.add_(da)
    for whole, parameter in zip(gradients[4:], (dweight, dbias), strict=True):
        if whole is not None and parameter is not None:
            whole[group] += parameter
