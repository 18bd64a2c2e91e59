"""The `triton` backend: plans of forward and backward pass, and their two entry points.

Eager calls go through `EdgeAttention`, an autograd function, which needs half the host time of an
operator (torch 2.11). Traced code, dispatch modes and tensor subclasses see the registered
operators `edge_attention_triton` and its backward.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import linear

from anemoi_gt.custom_ops import (
    define_operator,
    flat_arguments,
    is_plain,
    needs_gradient,
    on_device,
    refuse_second_derivative,
)
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dtypes import scratch_dtype, without_autocast
from anemoi_gt.ops.operands import AttentionOperands, Needs
from anemoi_gt.ops.triton_backend.plan import Buffer, Plan, PlanBuilder
from anemoi_gt.ops.triton_backend.sizes import IndexTensors, Options, sizes_of
from anemoi_gt.ops.triton_backend.tiles import MOST_ATTRIBUTES, attribute_columns
from anemoi_gt.tested_versions import warn_if_untested
from anemoi_gt.torch_compat import is_batched

KEPT = (
    128  # plans of each pass that are kept: graphs times layers of different sizes in use at a time
)
NUM_OPERANDS = len(AttentionOperands._fields)
NUM_TENSORS = NUM_OPERANDS + len(IndexTensors._fields) + 1  # and the seed


def attend(
    operands: AttentionOperands[Tensor],
    graph: GraphStructure,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of checked operands, as documented in `anemoi_gt.edge_attention`.

    query, key, value [B, N, H, C] have edge_attr [1 or B, E, ..]. A batch of one may omit B,
    in all of them: the memory is the same, and unsqueezing would add autograd nodes, which cost a
    launch each. If `embeds_first`, attributes are embedded first, because [H, C] per edge is then
    smaller.
    """
    warn_if_untested("triton")
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
    index = IndexTensors.of(graph)
    if not is_plain(*operands, *index, seed):
        out, lse, *_ = edge_attention_triton(*operands, *index, seed, scale, dropout_p, save)
    elif save:
        out, lse = EdgeAttention.apply(*operands, index, Options(seed, scale, dropout_p))
    else:
        tensors = _readable_tensors(*operands, *index, seed)
        out, lse, *_ = _run_forward(tensors, scale, dropout_p, save=False)
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
    if columns > MOST_ATTRIBUTES or edge_dim <= channels:
        return columns > MOST_ATTRIBUTES
    samples, sets = (operand.shape[0] if query.dim() == 4 else 1 for operand in (query, edge_attr))
    nodes, edges, columns = (
        samples * query.shape[-3],
        sets * edge_attr.shape[-2],
        attribute_columns(columns),
    )
    factored, embedded = nodes * heads * (3 * channels + 4 * columns), edges * heads * 2 * channels
    if save:
        factored += nodes * heads * (5 * channels + 9 * columns) + edges * (4 * heads + edge_dim)
        embedded += nodes * heads * channels + edges * heads * 4 * channels
    return statically_known_true(embedded < factored)


def _spec(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    """Return the key of a plan for a contiguous tensor: shape and dtype."""
    return None if tensor is None else (tensor.shape, tensor.dtype)


@lru_cache(KEPT)
def forward_plan(specs: tuple, scale: float, dropout_p: float, *, save: bool) -> Plan:
    """Return the plan of a forward pass over operands, indices and seed; see `forward_steps`."""
    builder = PlanBuilder(specs)
    return builder.finish(forward_steps(builder, scale, dropout_p, save=save))


def forward_steps(
    builder: PlanBuilder, scale: float, dropout_p: float, *, save: bool, holds=bool
) -> list:
    """Add the forward steps; return buffers of out, lse and, with `save`, for backward."""
    from anemoi_gt.ops.triton_backend.attention_steps import AttentionCall, attend

    *buffers, seed = builder.inputs
    operands: AttentionOperands[Buffer] = AttentionOperands._make(buffers[:NUM_OPERANDS])
    index: IndexTensors[Buffer] = IndexTensors._make(buffers[NUM_OPERANDS:])
    sizes = sizes_of(operands, index, scale, dropout_p, holds=holds)
    out, lse, saved = attend(AttentionCall(builder, sizes, operands, index, seed))
    return [out, lse, *saved] if save else [out, lse]


@lru_cache(KEPT)
def backward_plan(specs: tuple, scale: float, dropout_p: float, needs: Needs) -> Plan:
    """Return the plan of a backward pass over inputs, saved tensors, grad_out and grad_lse.

    Its results are the gradients of the operands, None for those that are not needed.
    """
    from anemoi_gt.ops.triton_backend.attention_steps import AttentionCall, Saved, gradients

    builder = PlanBuilder(specs)
    *buffers, seed = builder.inputs[:NUM_TENSORS]
    *saved, grad_out, grad_lse = builder.inputs[NUM_TENSORS:]
    operands: AttentionOperands[Buffer] = AttentionOperands._make(buffers[:NUM_OPERANDS])
    index: IndexTensors[Buffer] = IndexTensors._make(buffers[NUM_OPERANDS:])
    assert grad_out is not None  # zeros if only lse has a gradient
    call = AttentionCall(
        builder, sizes_of(operands, index, scale, dropout_p), operands, index, seed
    )
    return builder.finish(gradients(call, Saved._make(saved), grad_out, grad_lse, needs))


def _readable_tensors(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors that kernels can read: contiguous, 16-bit pairs aligned to 32 bits."""
    readable = []
    for tensor in tensors:
        if tensor is not None:
            tensor = tensor.contiguous()
            if tensor.data_ptr() % 4:
                tensor = tensor.clone()
        readable.append(tensor)
    return readable


def _run_forward(
    tensors: Sequence[Tensor | None], scale: float, dropout_p: float, *, save: bool
) -> list[Any]:
    """Run the forward pass on readable operands, index tensors and seed; see `forward_steps`.

    Of the results only the last, `Saved.projected`, may be None.
    """
    with on_device(tensors[0]):  # type: ignore[arg-type]  # query, which is always present
        specs = tuple(_spec(tensor) for tensor in tensors)
        plan = forward_plan(specs, scale, dropout_p, save=save)
        return plan.run(tensors)


def _run_backward(
    tensors: Sequence[Tensor | None],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    scale: float,
    dropout_p: float,
    needs: Needs,
) -> list[Tensor | None]:
    """Run the backward pass on saved tensors; return a gradient or None per operand."""
    if grad_out is None:
        query = tensors[0]
        grad_out = torch.zeros_like(query)  # type: ignore[arg-type]  # query is always present
    tensors = [*tensors, *_readable_tensors(grad_out, grad_lse)]
    with on_device(grad_out):
        plan = backward_plan(tuple(_spec(tensor) for tensor in tensors), scale, dropout_p, needs)
        return plan.run(tensors)


class EdgeAttention(torch.autograd.Function):
    """Edge attention of eager calls: apply(*operands, index, options) returns out and lse."""

    @staticmethod
    def forward(ctx, *arguments):
        *operands, index, options = arguments
        tensors = _readable_tensors(*operands, *index, options.seed)
        out, lse, *saved = _run_forward(tensors, options.scale, options.dropout_p, save=True)
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.dropout_p = options.scale, options.dropout_p
        ctx.save_for_backward(*tensors, *saved)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        needs = Needs(*ctx.needs_input_grad[:NUM_OPERANDS])
        if grad_out is None and grad_lse is None:
            return (None,) * (NUM_OPERANDS + 2)
        tensors = ctx.saved_tensors
        is_eager = is_plain(*tensors, grad_out, grad_lse) and not is_batched(grad_out, grad_lse)
        if torch.is_grad_enabled() or not is_eager:
            gradients = _call_backward(tensors, grad_out, grad_lse, ctx.scale, ctx.dropout_p, needs)
        else:
            gradients = _run_backward(tensors, grad_out, grad_lse, ctx.scale, ctx.dropout_p, needs)
        return *gradients, None, None


@define_operator
def edge_attention_triton(
    operands: AttentionOperands[Tensor],
    index: IndexTensors[Tensor],
    options: Options,
    save: bool,  # noqa: FBT001  operators take positions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse [B, N_dst, H] and saved tensors, which are empty unless `save`.

    `out` is like query; without B, results have no B either.
    """
    tensors = _readable_tensors(*operands, *index, options.seed)
    out, lse, *saved = _run_forward(tensors, options.scale, options.dropout_p, save=save)
    saved = saved or [None, None, None]
    inv_denominator, exp_scores, projected = (
        lse.new_empty(0) if tensor is None else tensor for tensor in saved
    )
    return out, lse, inv_denominator, exp_scores, projected


@torch.library.register_fake("anemoi_gt::edge_attention_triton")
@flat_arguments
def _(
    operands: AttentionOperands[Tensor],
    index: IndexTensors[Tensor],
    options: Options,
    save: bool,  # noqa: FBT001  operators take positions
):
    query = operands.query
    out, lse = query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32)
    if not save:
        return out, lse, *(lse.new_empty(0) for _ in range(3))
    sizes = sizes_of(operands, index, holds=statically_known_true)
    exp_scores = lse.new_empty((sizes.batch, sizes.num_edges, sizes.heads))
    inv_denominator = lse.new_empty(sizes.inverse_shape(lse.shape))
    if operands.edge_weight is None:
        return out, lse, inv_denominator, exp_scores, lse.new_empty(0)
    projected = query.new_empty((*lse.shape, sizes.columns), dtype=scratch_dtype(query.dtype))
    return out, lse, inv_denominator, exp_scores, projected


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    *tensors, ctx.scale, ctx.dropout_p, _ = inputs
    _, _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*tensors, *saved)


@define_operator
def edge_attention_triton_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    operands: AttentionOperands[Tensor],
    index: IndexTensors[Tensor],
    options: Options,
    inv_denominator: Tensor,
    exp_scores: Tensor,
    projected: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the operands, empty if `needs` is False.

    Not a list: PyTorch's fallback for batched gradients requires single tensors.
    """
    if operands.edge_weight is None:
        projected = None
    tensors = _readable_tensors(*operands, *index, options.seed)
    tensors += [inv_denominator, exp_scores, projected]
    gradients = _run_backward(
        tensors, grad_out, grad_lse, options.scale, options.dropout_p, Needs(*needs)
    )
    dquery, dkey, dvalue, dattr, dweight, dbias = (
        exp_scores.new_empty(0) if gradient is None else gradient for gradient in gradients
    )
    return dquery, dkey, dvalue, dattr, dweight, dbias


@torch.library.register_fake("anemoi_gt::edge_attention_triton_backward")
@flat_arguments
def _(
    grad_out,
    grad_lse,
    operands: AttentionOperands[Tensor],
    index: IndexTensors[Tensor],
    options: Options,
    inv,
    exp,
    proj,
    needs,
):
    gradients = []
    for operand, need in zip(operands, needs, strict=True):
        if operand is None or not need:
            gradients.append(exp.new_empty(0))
        else:
            gradients.append(operand.new_empty(operand.shape))
    return tuple(gradients)


def _backward(ctx, grad_out, grad_lse, *_):
    num_arguments = NUM_TENSORS + 3
    if grad_out is None and grad_lse is None:
        return (None,) * num_arguments
    needs = Needs(*ctx.needs_input_grad[:NUM_OPERANDS])
    gradients = _call_backward(
        ctx.saved_tensors, grad_out, grad_lse, ctx.scale, ctx.dropout_p, needs
    )
    return *gradients, *((None,) * (num_arguments - NUM_OPERANDS))


def _call_backward(
    tensors, grad_out, grad_lse, scale: float, dropout_p: float, needs: Needs
) -> list[Tensor | None]:
    """Call the backward operator on saved tensors; return a gradient or None per operand."""
    arguments = (*tensors[:NUM_TENSORS], scale, dropout_p, *tensors[NUM_TENSORS:], list(needs))
    gradients = edge_attention_triton_backward(grad_out, grad_lse, *arguments)
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]


torch.library.register_autograd(edge_attention_triton, _backward, setup_context=_setup_context)
refuse_second_derivative(edge_attention_triton_backward)
