"""The `triton` backend as PyTorch custom operators: flat tensors in, kernel launches, flat tensors out."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from anemoi_gt.compatibility import warn_if_untested
from anemoi_gt.custom_ops import call_unrecorded, define_gradient, define_operator
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.derivative import refuse_second_derivative
from anemoi_gt.ops.dtypes import scratch_dtype, without_autocast
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend.tiles import MOST_ATTRIBUTES, attribute_columns


def attend(
    operands: AttentionOperands,
    graph: GraphStructure,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Edge attention of checked operands; the meaning of all is that of `anemoi_gt.edge_attention`.

    query, key, value [B, N, H, C] come with edge_attr [1 or B, E, ..]. One sample may come without B, in all of them: to
    the kernels it is the same memory, and views that add B would be nodes of autograd, which cost as much as a launch.

    More attributes than a program can hold are embedded first: there an edge's own [H, C] is no larger than what it has.
    """
    warn_if_untested("triton")
    query, key, value, edge_attr, edge_weight, edge_bias = operands
    if edge_weight is not None and edge_weight.shape[1] + int(edge_bias is not None) > MOST_ATTRIBUTES:
        with without_autocast(query.device.type):
            edge_attr = linear(edge_attr, edge_weight, edge_bias).unflatten(-1, query.shape[-2:])
        operands = AttentionOperands(query, key, value, edge_attr)
    save = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
    structure = (graph.colptr, graph.row, graph.perm, graph.global_edge_id, graph.dst_schedule, graph.fixed_in_degree)
    reverse = (graph.rowptr, graph.col, graph.csr_to_csc)
    return edge_attention_triton(*operands, *structure, *reverse, seed, scale, dropout_p, save)[:2]


@define_operator
def edge_attention_triton(
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
    dst_schedule: Tensor | None,
    fixed_in_degree: Tensor | None,
    rowptr: Tensor | None,
    col: Tensor | None,
    csr_to_csc: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward: out like query, lse [B, N_dst, H], without B as query, and what backward needs, empty unless `save`."""
    from anemoi_gt.ops.triton_backend import fixed_degree_launch, launch

    nodes = (query, key, value, edge_attr, edge_weight, edge_bias)
    problem = launch.Problem(
        *_contiguous(*nodes, colptr, row, perm, global_edge_id, dst_schedule),
        seed=seed, scale=scale, dropout_p=dropout_p, fixed_in_degree=0 if fixed_in_degree is None else fixed_in_degree.shape[0],
    )  # fmt: skip
    with launch.on_device(query):
        projected = None if edge_weight is None else launch.project(problem, problem.query)
        attend_rows = (
            fixed_degree_launch.attend_rows if fixed_degree_launch.serves(problem.sizes) else launch.attend_rows
        )
        out, lse, inverse, numerators, attr_sums = attend_rows(problem, projected)
        if attr_sums is not None:
            launch.embed(problem, attr_sums, out)
    if not save:
        return out, lse, *(lse.new_empty(0) for _ in range(3))
    return out, lse, inverse, numerators, lse.new_empty(0) if projected is None else projected


@torch.library.register_fake("anemoi_gt::edge_attention_triton")
def _(query, key, value, edge_attr, edge_weight, edge_bias, colptr, row, *rest):
    save = rest[-1]
    statistic = query.shape[:-1]
    edges = (query.shape[0] if query.dim() == 4 else 1, row.shape[0], query.shape[-2])
    out = query.new_empty(query.shape)
    lse = query.new_empty(statistic, dtype=torch.float32)
    if not save:
        return out, lse, *(lse.new_empty(0) for _ in range(3))
    projected = lse.new_empty(0)
    if edge_weight is not None:
        columns = attribute_columns(int(edge_weight.shape[1]) + (edge_bias is not None))  # D never changes: a constant
        projected = query.new_empty((*statistic, columns), dtype=scratch_dtype(query.dtype))
    return out, lse, lse.new_empty(statistic), lse.new_empty(edges), projected


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
    dst_schedule: Tensor | None,
    fixed_in_degree: Tensor | None,
    rowptr: Tensor | None,
    col: Tensor | None,
    csr_to_csc: Tensor | None,
    seed: Tensor | None,
    inverse: Tensor,
    numerators: Tensor,
    projected: Tensor,
    scale: float,
    dropout_p: float,
    needs: list[bool],
) -> list[Tensor]:
    """Backward: the gradients that `needs` asks for, in the order of the first six operands of the forward."""
    from anemoi_gt.ops.triton_backend import launch

    nodes = (query, key, value, edge_attr, edge_weight, edge_bias)
    problem = launch.Problem(
        *_contiguous(*nodes, colptr, row, perm, global_edge_id, dst_schedule),
        seed=seed, scale=scale, dropout_p=dropout_p, fixed_in_degree=0 if fixed_in_degree is None else fixed_in_degree.shape[0],
    )  # fmt: skip
    saved = launch.Saved(inverse, numerators, None if edge_weight is None else projected)
    grad_out = torch.zeros_like(problem.query) if grad_out is None else grad_out
    grad_out, grad_lse = _contiguous(grad_out, grad_lse)
    with launch.on_device(query):
        return _gradients(problem, saved, grad_out, grad_lse, _contiguous(rowptr, col, csr_to_csc), needs)


@torch.library.register_fake("anemoi_gt::edge_attention_triton_backward")
def _(grad_out, grad_lse, query, key, value, edge_attr, edge_weight, edge_bias, *rest):
    operands = (query, key, value, edge_attr, edge_weight, edge_bias)
    return [operand.new_empty(operand.shape) for operand, need in zip(operands, rest[-1], strict=True) if need]


def _backward(ctx, grad_out, grad_lse, *_):
    if grad_out is None and grad_lse is None:
        return (None,) * 19
    needs = list(ctx.needs_input_grad[:6])
    arguments = (grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, ctx.dropout_p, needs)
    gradients = iter(call_unrecorded(edge_attention_triton_backward, *arguments))
    return *(next(gradients) if need else None for need in needs), *((None,) * 13)


define_gradient(edge_attention_triton, _setup_context, _backward)
torch.library.register_autograd("anemoi_gt::edge_attention_triton_backward", refuse_second_derivative)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same numbers where a kernel can read them: side by side, pairs of 16 bits at addresses of 32-bit numbers."""
    found = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    return [tensor.clone() if tensor is not None and tensor.data_ptr() % 4 else tensor for tensor in found]


def _gradients(problem, saved, grad_out, grad_lse, reverse, needs: list[bool]) -> list[Tensor]:
    from anemoi_gt.ops.triton_backend import launch

    need_query, need_key, need_value, need_attr, need_weight, need_bias = needs
    raw, dweight, dbias = problem.edge_weight is not None, None, None
    dquery = torch.empty_like(problem.query) if need_query else None
    dattr = _attribute_gradient(problem) if need_attr else None
    projected_grad = launch.project(problem, grad_out) if raw else None
    given = (problem, saved, projected_grad, grad_out, grad_lse, dquery, dattr)
    weights, sums = _differentiate_destinations(*given, want_sums=need_query or need_attr or need_weight or need_bias)
    if raw and sums is not None:
        if need_query:
            launch.embed(problem, sums[1], dquery)
        if need_weight or need_bias:
            both = launch.differentiate_weight(problem, grad_out, *sums)
            dweight, dbias = _weight_and_bias(both, problem, need_weight, need_bias)
    dkey = torch.empty_like(problem.key) if need_key else None
    dvalue = torch.empty_like(problem.value) if need_value else None
    if need_key or need_value:
        launch.differentiate_sources(problem, weights, grad_out, *reverse, dkey, dvalue)
    if need_attr and problem.shares_attributes:
        dattr = dattr.sum(0, keepdim=True).to(problem.edge_attr.dtype)
    every = (dquery, dkey, dvalue, dattr, dweight, dbias)
    return [gradient for gradient, need in zip(every, needs, strict=True) if need]


def _differentiate_destinations(
    problem, saved, projected_grad, grad_out, grad_lse, dquery, dattr, *, want_sums: bool
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Fill dquery (without W B) and the gradient of edge_attr; return [m p, ds] of each edge, and A and B where they are wanted."""
    from anemoi_gt.ops.triton_backend import fixed_degree_launch, launch

    given = (problem, saved, projected_grad, grad_out, grad_lse, dquery)
    if fixed_degree_launch.serves(problem.sizes):
        return fixed_degree_launch.differentiate_rows(*given, dattr)
    raw = problem.edge_weight is not None
    weights = launch.differentiate_rows(*given, None if raw else dattr)
    if not (raw and want_sums):
        return weights, None
    return weights, launch.differentiate_attributes(problem, weights, saved, projected_grad, dattr)


def _attribute_gradient(problem) -> Tensor:
    """Memory for the gradient of edge_attr: [B, E, ..], float32 where the samples' are to be summed."""
    attr = problem.edge_attr
    if not problem.shares_attributes:
        return torch.empty_like(attr)
    return attr.new_empty((problem.samples, *attr.shape[1:]), dtype=torch.float32)


def _weight_and_bias(both: Tensor, problem, need_weight: bool, need_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """The columns of [H * C, D + BIAS] that are needed: copies, because outputs of an operator share no memory."""
    edge_dim, layout = problem.edge_weight.shape[1], {"copy": True, "memory_format": torch.contiguous_format}
    dweight = both[:, :edge_dim].to(problem.query.dtype, **layout) if need_weight else None
    return dweight, both[:, edge_dim].to(problem.query.dtype, **layout) if need_bias else None
