"""Edge attention as an operator of the `triton` backend: plans of both passes."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import linear

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dtypes import without_autocast
from anemoi_gt.ops.operator import Spec
from anemoi_gt.ops.tensors import (
    AttentionConstants,
    AttentionOperands,
    CallSizes,
    EdgeAttentionOptions,
    IndexTensors,
    Operand,
)
from anemoi_gt.ops.triton_backend import attention_steps
from anemoi_gt.ops.triton_backend.attention_steps import AttentionCall
from anemoi_gt.ops.triton_backend.packing import zero
from anemoi_gt.ops.triton_backend.plan import Buffer, MemoryLayout, PlanBuilder
from anemoi_gt.ops.triton_backend.planned_operator import PlannedOperator
from anemoi_gt.ops.triton_backend.sizes import Kept, sizes_of
from anemoi_gt.ops.triton_backend.tiles import MAX_ATTRIBUTES, attribute_columns


def attend(
    operands: AttentionOperands[Tensor],
    graph: GraphStructure,
    seed: Tensor | None,
    options: EdgeAttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of checked operands, as documented in `anemoi_gt.edge_attention`.

    query, key, value [B, N, H, C] have edge_attr [1 or B, E, ..]. A batch of one may omit B,
    in all of them: the memory is the same, and unsqueezing would add autograd nodes, which cost a
    launch each. If `embeds_first`, attributes are embedded first, because [H, C] per edge is then
    smaller.
    """
    query, key, value, edge_attr, edge_weight, edge_bias = operands
    save = needs_gradient(*operands)
    if (
        edge_attr is not None
        and edge_weight is not None
        and embeds_first(query, edge_attr, edge_weight, edge_bias, save=save)
    ):
        with without_autocast(query.device.type):
            edge_attr = linear(edge_attr, edge_weight, edge_bias).unflatten(-1, query.shape[-2:])
        operands = AttentionOperands(query, key, value, edge_attr)
    constants = [*IndexTensors.of(graph), seed]
    out, lse = edge_attention_triton(list(operands), constants, options, save=save)
    return out, lse


def embeds_first(
    query: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    edge_bias: Tensor | None,
    *,
    save: bool,
) -> bool:
    """Return whether to embed attributes [E, D] into [E, H, C] instead of factoring out W.

    They are embedded if a program cannot hold D, or if D > C and embedding moves fewer bytes, as
    with many attributes and few edges per node. Elements of N nodes and E edges that only one of
    the two moves, with D padded to P columns:

        factored    forward N H (3 C + 4 P),    backward N H (5 C + 9 P) + E (4 H + D)
        embedded    forward E H 2 C,            backward N H C + E H 4 C

    Symbolic sizes are not compared, because the program would depend on them: W is factored out.
    """
    heads, channels, edge_dim = (
        int(query.shape[-2]),
        int(query.shape[-1]),
        int(edge_weight.shape[1]),
    )
    columns = edge_dim + int(edge_bias is not None)
    if columns > MAX_ATTRIBUTES or edge_dim <= channels:
        return columns > MAX_ATTRIBUTES
    samples, sets = (operand.shape[0] if query.dim() == 4 else 1 for operand in (query, edge_attr))
    nodes = samples * query.shape[-3]
    edges = sets * edge_attr.shape[-2]
    columns = attribute_columns(columns)
    factored, embedded = nodes * heads * (3 * channels + 4 * columns), edges * heads * 2 * channels
    if save:
        factored += nodes * heads * (5 * channels + 9 * columns) + edges * (4 * heads + edge_dim)
        embedded += nodes * heads * channels + edges * heads * 4 * channels
    return statically_known_true(embedded < factored)


class EdgeAttention(PlannedOperator):
    """Outputs out and lse [B, N_dst, H]; without B in query, they have no B either.

    Keeps exponentials, inverse denominators and W^T q.
    """

    def __init__(self) -> None:
        super().__init__(
            "edge_attention",
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

    def readable(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return inputs that kernels can read: contiguous, 16-bit pairs aligned to 32 bits."""
        readable = []
        for tensor in inputs:
            if tensor is not None:
                tensor = tensor.contiguous()
                if tensor.data_ptr() % 4:
                    tensor = tensor.clone()
            readable.append(tensor)
        return readable

    def forward_specs(
        self,
        tensors: AttentionOperands[Operand],
        constants: AttentionConstants[Operand],
        options: EdgeAttentionOptions,
    ) -> list[Spec]:
        """Return the specs of out, lse and of the kept bytes."""
        query = tensors.query
        kept = kept_layout(tensors, constants.graph)
        lse = (tuple(query.shape[:-1]), torch.float32)
        return [(query.shape, query.dtype), lse, ((kept.num_bytes,), torch.uint8)]

    def add_forward(
        self,
        builder: PlanBuilder,
        tensors: AttentionOperands[Buffer],
        constants: AttentionConstants[Buffer],
        options: EdgeAttentionOptions,
        *,
        save: bool,
    ) -> list[Buffer]:
        """Add the steps of the forward pass."""
        kept = builder.empty_tensors(kept_layout(tensors, constants.graph), together=save)
        call = _attention_call(builder, tensors, constants, options)
        out = builder.empty_like(tensors.query)
        lse = attention_steps.attend(call, Kept(**kept), out)
        return [out, lse, builder.whole(kept["exp_scores"])] if save else [out, lse]

    def add_backward(
        self,
        builder: PlanBuilder,
        tensors: AttentionOperands[Buffer],
        constants: AttentionConstants[Buffer],
        options: EdgeAttentionOptions,
        kept: Buffer,
        grads: Sequence[Buffer | None],
        needs: AttentionOperands[bool],
    ) -> Sequence[Buffer | None]:
        """Add the steps of the backward pass."""
        grad_out, grad_lse = grads
        if grad_out is None:
            grad_out = builder.empty_like(tensors.query)
            builder.compute(zero, grad_out)
        layout = kept_layout(tensors, constants.graph)
        call = _attention_call(builder, tensors, constants, options)
        kept_buffers = Kept(**layout.buffers(kept))
        return attention_steps.gradients(call, kept_buffers, grad_out, grad_lse, needs)


def kept_layout(operands: AttentionOperands[Operand], index: IndexTensors[Operand]) -> MemoryLayout:
    """Return the layout of what the forward pass keeps for the backward pass."""
    sizes = sizes_of(operands, index, holds=statically_known_true)
    kept = sizes.kept(tuple(operands.query.shape[:-1]))
    return MemoryLayout.of({n: spec for n, spec in kept._asdict().items() if spec is not None})


def _attention_call(
    builder: PlanBuilder,
    operands: AttentionOperands[Buffer],
    constants: AttentionConstants[Buffer],
    options: EdgeAttentionOptions,
) -> AttentionCall:
    sizes = sizes_of(
        operands,
        constants.graph,
        options.scale,
        options.dropout_p,
        int32_limit=builder.tuning.int32_limit,
    )
    return AttentionCall(builder, sizes, operands, constants.graph, constants.seed)


edge_attention_triton = EdgeAttention()
