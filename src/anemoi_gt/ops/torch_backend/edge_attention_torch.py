"""The `torch` backend as custom operators on flat tensors, looping over batch and head groups."""

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dropout import dropout_factor
from anemoi_gt.ops.dtypes import accumulator_dtype, without_autocast
from anemoi_gt.ops.operator import GradientLayout, Operator, Spec
from anemoi_gt.ops.tensors import (
    AttentionOperands,
    CallSizes,
    EdgeAttentionOptions,
    Held,
)
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
from anemoi_gt.ops.tree import leaves
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
        dropout = None
        if self.seed is not None:
            heads = range(group.start, group.stop)
            dtype = self.query.dtype
            dropout = dropout_factor(self.seed, b, global_edge_id, heads, self.dropout_p, dtype)
        return HeadGroup(q, k, v, attr, weight, bias, dropout, self.scale)

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


class Index(NamedTuple, Generic[Held]):
    """The index tensors of a graph, and the seed of dropout."""

    colptr: Held
    row: Held
    perm: Held | None
    global_edge_id: Held | None
    rowptr: Held | None
    col: Held | None
    csr_to_csc: Held | None
    seed: Held | None


class Options(NamedTuple):
    """Options of a call."""

    scale: float
    dropout_p: float


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
    structure = (graph.colptr, graph.row, graph.perm, graph.global_edge_id)
    constants = (*structure, graph.rowptr, graph.col, graph.csr_to_csc, seed)
    save = needs_gradient(*operands)
    own_options = Options(options.scale, options.dropout_p)
    out, lse = edge_attention_torch(operands, constants, own_options, save=save)
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
            constants=Index[Tensor],
            options=Options,
            outputs=("out", "lse"),
            num_results=6,
        )

    def call_sizes(
        self, tensors: AttentionOperands[Tensor], constants: Index[Tensor], options: Options
    ) -> CallSizes:
        """Return the sizes of a call."""
        return CallSizes.of_attention(tensors, constants.row.shape[0])

    def passes(self, inputs: Sequence[Tensor | None], options: Options) -> "_Passes":
        """Return both passes."""
        return _Passes(options)

    def forward_specs(
        self, tensors: AttentionOperands[Tensor], constants: Index[Tensor], options: Options
    ) -> list[Spec]:
        """Return the specs of out, lse and p."""
        query = tensors.query
        dtype = accumulator_dtype(query.dtype)
        batch = query.shape[0] if query.dim() == 4 else 1
        p = (batch, constants.row.shape[0], query.shape[-2])
        return [(query.shape, query.dtype), (query.shape[:-1], dtype), (p, dtype)]

    def gradient_layout(
        self,
        tensors: AttentionOperands[Tensor],
        constants: Index[Tensor],
        options: Options,
        needs: AttentionOperands[bool],
    ) -> GradientLayout:
        """Return a layout with one result for each operand."""
        return GradientLayout.separate(leaves(tensors), leaves(needs))


class _Passes(NamedTuple):
    options: Options

    def forward(self, inputs: Sequence[Tensor | None], *, save: bool) -> list[Tensor]:
        """Return out, lse and, with `save`, p."""
        flat = FlatArguments._make((*inputs, *self.options))
        query = flat.query
        flat = flat.in_accumulator_dtype()
        with without_autocast(flat.query.device.type):
            edges = flat.edges()
            # results are no views, which in-place operations of the caller could not change
            out = query.new_empty(query.shape)
            lse = flat.query.new_empty(query.shape[:-1])
            batched_out, batched_lse = out.view(flat.query.shape), lse.view(flat.query.shape[:-1])
            p = None
            if save:
                batch, _, num_heads, _ = flat.query.shape
                p = flat.query.new_empty((batch, flat.row.shape[0], num_heads))
            for b, group, heads in flat.head_groups(edges):
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
        flat = FlatArguments._make((*inputs, *self.options))
        p = kept
        (grad_out, grad_lse) = grads
        required: AttentionOperands[bool] = AttentionOperands._make(needs)
        operands = flat[:6]
        layout = GradientLayout.separate(operands, needs)
        dtype = flat.query.dtype
        flat = flat.in_accumulator_dtype()
        if grad_out is None:
            do = torch.zeros_like(flat.query)
        else:
            do = grad_out.to(flat.query.dtype).view_as(flat.query)
        dlse = do.new_zeros(do.shape[:3]) if grad_lse is None else grad_lse.view(do.shape[:3])
        with without_autocast(do.device.type):
            edges = flat.edges()
            gradients = zero_gradients(flat, required)
            out_edges = None
            if required.key or required.value:
                out_edges = OutEdges.of(flat, edges.heads)
            for b, group, heads in flat.head_groups(edges):
                do_heads = do[b, :, group].contiguous()
                gradient = differentiate_heads(
                    heads, do_heads, dlse[b, :, group], p[b, :, group], edges, required
                )
                add_heads(gradients, b, group, gradient)
                if out_edges is not None and gradients.key is not None:
                    gradients.key[b, :, group] = out_edges.sum(gradient.ds, heads.q)
                if out_edges is not None and gradients.value is not None:
                    gradients.value[b, :, group] = out_edges.sum(gradient.w, do_heads)
            attr = gradients.edge_attr
            if attr is not None and flat.perm is not None:  # from CSC order to the caller's order
                permuted = torch.empty_like(attr).index_copy_(1, flat.perm.long(), attr)
                gradients = gradients._replace(edge_attr=permuted)
        results: list[Tensor | None] = []
        for operand, whole in zip(operands, gradients, strict=True):
            if whole is not None and operand is not None:
                whole = whole.view(operand.shape).to(dtype)
            results.append(whole)
        return results, layout


edge_attention_torch = EdgeAttention()


def zero_gradients(
    flat: FlatArguments, needs: AttentionOperands[bool]
) -> AttentionOperands[Tensor | None]:
    """Return zeros like the operands of `flat`; None where no gradient is needed."""
    gradients: list[Tensor | None] = []
    for operand, need in zip(flat[:6], needs, strict=True):
        if operand is None or not need:
            gradients.append(None)
        else:
            gradients.append(torch.zeros_like(operand))
    return AttentionOperands._make(gradients)


def add_heads(
    gradients: AttentionOperands[Tensor | None], b: int, group: slice, of_heads: HeadGradients
) -> None:
    """Add the gradients of a group of heads at batch index `b`."""
    if gradients.query is not None:
        gradients.query[b, :, group] = of_heads.dq
    if gradients.edge_attr is not None and of_heads.da is not None:
        is_shared = gradients.edge_attr.shape[0] == 1  # by all batch entries
        attr = gradients.edge_attr[0] if is_shared else gradients.edge_attr[b]
        if attr.dim() == 3:  # embedded: [E, H, C]
            attr = attr[:, group]
        attr.add_(of_heads.da)
    if gradients.edge_weight is not None and of_heads.dweight is not None:
        gradients.edge_weight[group] += of_heads.dweight
    if gradients.edge_bias is not None and of_heads.dbias is not None:
        gradients.edge_bias[group] += of_heads.dbias
