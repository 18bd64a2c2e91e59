"""The `triton` backend as PyTorch custom operators: flat tensors in, kernel launches, flat tensors out."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import linear

from anemoi_gt.compatibility import warn_if_untested
from anemoi_gt.custom_ops import (
    by_batch_entry,
    call_unrecorded,
    define_gradient,
    define_operator,
    flat_arguments,
    is_plain,
    needs_gradient,
    on_device,
    refuse_second_derivative,
)
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dtypes import scratch_dtype, without_autocast
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem
from anemoi_gt.ops.triton_backend.replay import NUM_OPERANDS, NUM_TENSORS, Pass
from anemoi_gt.ops.triton_backend.tiles import MOST_ATTRIBUTES, attribute_columns

KEPT = 128  # passes that are replayed: those of graphs and layers of different sizes in use at a time


def attend(
    operands: AttentionOperands,
    graph: GraphStructure,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of checked operands; the meaning of all is that of `anemoi_gt.edge_attention`.

    query, key, value [B, N, H, C] come with edge_attr [1 or B, E, ..]. A batch of one may come without B, in all of
    them: to the kernels it is the same memory, and views that add B would be autograd nodes that cost a launch each.
    Attributes for which `embeds_first` are embedded before: an edge's own [H, C] is smaller than what it has.
    """
    warn_if_untested("triton")
    query, key, value, edge_attr, edge_weight, edge_bias = operands
    save = needs_gradient(*operands)
    first = edge_weight is not None and embeds_first(operands, save)
    if first:
        with without_autocast(query.device.type):
            edge_attr = linear(edge_attr, edge_weight, edge_bias).unflatten(-1, query.shape[-2:])
        operands = AttentionOperands(query, key, value, edge_attr)
    index, options = IndexTensors.of(graph), Options(seed, scale, dropout_p, first)
    if not is_plain(*operands, *index, seed):
        return _attend(*operands, *index, *options, save)[:2]
    return Attention.apply(*operands, index, options) if save else _forward(operands, index, options, save)[0]


def embeds_first(operands: AttentionOperands, save: bool) -> bool:
    """Return whether to embed the attributes [E, D] into [E, H, C] instead of factoring W out of the sums over edges.

    They are where a program cannot hold D, and where that moves fewer bytes with D > C, which takes many attributes and
    few edges a node. Elements of N nodes and E edges that one moves and the other does not, with D padded to P columns:

        factored    forward N H (3 C + 4 P),    backward N H (5 C + 9 P) + E (4 H + D)
        embedded    forward E H 2 C,            backward N H C + E H 4 C

    Symbolic sizes are not compared, because the program would depend on them: W is factored out.
    """
    query, _, _, edge_attr, edge_weight, edge_bias = operands
    heads, channels, edge_dim = int(query.shape[-2]), int(query.shape[-1]), int(edge_weight.shape[1])
    columns = edge_dim + int(edge_bias is not None)
    if columns > MOST_ATTRIBUTES or edge_dim <= channels:
        return columns > MOST_ATTRIBUTES
    samples, sets = (each.shape[0] if query.dim() == 4 else 1 for each in (query, edge_attr))
    nodes, edges, columns = samples * query.shape[-3], sets * edge_attr.shape[-2], attribute_columns(columns)
    factored, embedded = nodes * heads * (3 * channels + 4 * columns), edges * heads * 2 * channels
    if save:
        factored += nodes * heads * (5 * channels + 9 * columns) + edges * (4 * heads + edge_dim)
        embedded += nodes * heads * channels + edges * heads * 4 * channels
    return statically_known_true(embedded < factored)


@define_operator
def edge_attention_triton(
    operands: AttentionOperands, index: IndexTensors, options: Options, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out like query, lse [B, N_dst, H], without B as query, and what backward needs, empty unless `save`."""
    (out, lse, *saved), _, _ = _forward(operands, index, options, save)
    return out, lse, *(lse.new_empty(0) if tensor is None else tensor for tensor in saved or (None,) * 3)


@torch.library.register_fake("anemoi_gt::edge_attention_triton")
@flat_arguments
def _(operands: AttentionOperands, index: IndexTensors, options: Options, save: bool):
    query, edge_weight = operands.query, operands.edge_weight
    statistic = query.shape[:-1]
    edges = (query.shape[0] if query.dim() == 4 else 1, index.row.shape[0], query.shape[-2])
    out, lse = query.new_empty(query.shape), query.new_empty(statistic, dtype=torch.float32)
    if not save:
        return out, lse, *(lse.new_empty(0) for _ in range(3))
    projected = lse.new_empty(0)
    if edge_weight is not None:
        attributes = int(edge_weight.shape[1]) + int(operands.edge_bias is not None)  # D never changes: a constant
        projected = query.new_empty((*statistic, attribute_columns(attributes)), dtype=scratch_dtype(query.dtype))
    inv_denominator = lse.new_empty(Problem(operands, index, options).inverse_shape)
    return out, lse, inv_denominator, lse.new_empty(edges), projected


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.options = inputs[NUM_TENSORS:-1]
    _, _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*inputs[:NUM_TENSORS], *saved)


@define_operator
def edge_attention_triton_backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, operands: AttentionOperands, index: IndexTensors,
    options: Options, inv_denominator: Tensor, exp_scores: Tensor, projected: Tensor | None, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients that `needs` asks for, in the order of the operands."""
    saved = (inv_denominator, exp_scores, None if operands.edge_weight is None else projected)
    tensors = (*map(_readable, (*operands, *index, options.seed)), *saved)
    gradients = _differentiated(grad_out, grad_lse, tensors, options[1:], tuple(needs))
    return [gradient for gradient in gradients if gradient is not None]


@torch.library.register_fake("anemoi_gt::edge_attention_triton_backward")
@flat_arguments
def _(grad_out, grad_lse, operands: AttentionOperands, index: IndexTensors, options: Options, inv, exp, proj, needs):
    return [operand.new_empty(operand.shape) for operand, need in zip(operands, needs, strict=True) if need]


def _backward(ctx, grad_out, grad_lse, *_):
    found = _dispatched(ctx, ctx.saved_tensors, grad_out, grad_lse)
    return *found, *((None,) * (NUM_TENSORS + len(ctx.options) + 1 - NUM_OPERANDS))


def _dispatched(ctx, tensors: tuple, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return a gradient or None for each operand; `tensors` were saved, and checkpointing unpacks at each access."""
    needs = list(ctx.needs_input_grad[:NUM_OPERANDS])
    if grad_out is None and grad_lse is None:
        return (None,) * NUM_OPERANDS
    given = (grad_out, grad_lse, *tensors[:NUM_TENSORS], *ctx.options, *tensors[NUM_TENSORS:], needs)
    gradients = iter(call_unrecorded(_differentiate, *given))
    return tuple(next(gradients) if need else None for need in needs)


class Attention(torch.autograd.Function):
    """Both operators for calls that concern autograd alone: the same launches, without PyTorch's dispatcher."""

    @staticmethod
    def forward(ctx, *given):
        *operands, index, options = given
        (out, lse, *saved, projected), tensors, ctx.forward_pass = _forward(operands, index, options, save=True)
        projected = lse.new_empty(0) if projected is None else projected  # as many as the operator saves
        ctx.set_materialize_grads(False)
        ctx.options = options[1:]
        ctx.save_for_backward(*tensors, *saved, projected)
        return out, lse

    @staticmethod
    @by_batch_entry
    def backward(ctx, grad_out, grad_lse):
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[:NUM_OPERANDS]
        if torch.is_grad_enabled() or not is_plain(*tensors, grad_out, grad_lse):
            return *_dispatched(ctx, tensors, grad_out, grad_lse), None, None
        if AttentionOperands(*tensors[:NUM_OPERANDS]).edge_weight is None:
            tensors = (*tensors[:-1], None)
        return *_differentiated(grad_out, grad_lse, tensors, ctx.options, needs, ctx.forward_pass), None, None


_attend = define_gradient(edge_attention_triton, _setup_context, _backward)
_differentiate = refuse_second_derivative(edge_attention_triton_backward)


def _readable(tensor: Tensor | None) -> Tensor | None:
    """Return the same elements where a kernel can read them: contiguous, 16-bit pairs aligned to 32 bits."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 4 else tensor


@lru_cache(KEPT)
def _pass(compute: Callable, *sizes_and_dtypes) -> Pass:
    return Pass(compute)


def _pass_for(compute: Callable, tensors: tuple[Tensor | None, ...], *how) -> Pass:
    """Return the pass for all calls of `compute` with tensors of the same sizes and dtypes, and the same options."""
    query, key, _, attr, weight, *_ = tensors
    index = IndexTensors(*tensors[NUM_OPERANDS : NUM_TENSORS - 1])
    shaped = (query, key, attr, weight, index.row, index.fixed_in_degree, index.dst_hubs, index.src_hubs)
    shapes = [None if each is None else each.shape for each in shaped]
    dtypes = [None if each is None else each.dtype for each in tensors]
    return _pass(compute, query.get_device(), *shapes, *dtypes, *how)


def _forward(operands, index, options: Options, save: bool) -> tuple[Sequence[Tensor | None], tuple, Pass]:
    """Return what `_launch` returns, the tensors that were read (operands, index tensors and seed), and the pass."""
    tensors = tuple(map(_readable, (*operands, *index, options.seed)))
    with on_device(tensors[0]):
        forward = _pass_for(_launch, tensors, options[1:], save)
        return forward.run(tensors, options[1:], save), tensors, forward


def _launch(problem: Problem, save: bool) -> tuple[Tensor | None, ...]:
    """Return out, lse, and with `save` what the backward pass reads: inv_denominator, exp_scores, projected."""
    from anemoi_gt.ops.triton_backend import launch

    found = launch.attend(problem)
    return found if save else found[:2]


def _differentiated(
    grad_out: Tensor | None, grad_lse: Tensor | None, tensors: tuple, options: tuple, needs: tuple[bool, ...],
    forward: Pass | None = None,
) -> Sequence[Tensor | None]:  # fmt: skip
    """Return the gradients that `needs` asks for, None for others; `tensors` are those of `_forward`, and the saved."""
    if grad_out is None and grad_lse is None:
        return (None,) * NUM_OPERANDS
    grad_out = torch.zeros_like(tensors[0]) if grad_out is None else _readable(grad_out)
    tensors = (*tensors, grad_out, _readable(grad_lse))
    followed_by = {} if forward is None else forward.followed_by
    if (key := (needs, grad_lse is None)) not in followed_by:  # sizes and dtypes are those of the forward pass
        followed_by[key] = _pass_for(_launch_backward, tensors, options, needs)
    with on_device(grad_out):
        return followed_by[key].run(tensors, options, needs)


def _launch_backward(problem: Problem, needs: tuple[bool, ...], *saved: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients in `needs`, from what `_launch` saved, grad_out and grad_lse."""
    from anemoi_gt.ops.triton_backend import launch

    return gradients(problem, launch.Saved(*saved[:-2]), *saved[-2:], needs)


def gradients(
    problem: Problem, saved, grad_out: Tensor, grad_lse: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Launch the kernels that the gradients in `needs` take; return all six, None for others."""
    from anemoi_gt.ops.triton_backend import launch

    query, key, value, edge_attr, edge_weight, _ = problem.operands
    need_query, need_key, need_value, need_attr, need_weight, need_bias = needs
    raw, dweight, dbias = edge_weight is not None, None, None
    dquery = torch.empty_like(query) if need_query else None
    dattr = torch.empty_like(edge_attr) if need_attr and not problem.shares_attributes else None
    if need_attr and dattr is None:  # to be summed over the batch
        dattr = edge_attr.new_empty((problem.batch, *edge_attr.shape[1:]), dtype=torch.float32)
    projected_grad = launch.project(problem, grad_out) if raw else None
    p_ds, sums = launch.differentiate_rows(problem, saved, projected_grad, grad_out, grad_lse, dquery, dattr)
    if raw and (need_query or need_attr or need_weight or need_bias):
        if sums is None:
            sums = launch.differentiate_attributes(problem, p_ds, saved, projected_grad, dattr)
        if need_query:
            launch.embed(problem, sums[1], dquery)
        if need_weight or need_bias:
            dweight, dbias = launch.differentiate_weight(problem, grad_out, *sums, (need_weight, need_bias))
    dkey = torch.empty_like(key) if need_key else None
    dvalue = torch.empty_like(value) if need_value else None
    if need_key or need_value:
        launch.differentiate_sources(problem, p_ds, grad_out, dkey, dvalue)
    if need_attr and problem.shares_attributes:
        dattr = dattr.sum(0, keepdim=True).to(edge_attr.dtype)
    return dquery, dkey, dvalue, dattr, dweight, dbias
