"""A whole graph-transformer block as one operator: norms, projections, edge attention, feed-forward network.

    n_i = norm(x_i)              n_j = norm_src(x_j), or norm(x_j) where sources and destinations are one set
    q_i = W_query n_i + b        k_j = W_key n_j        v_j = W_value n_j        x_e = W_edge a_e + b_edge + b_value
    y_i = sum_e p_e (v_j + x_e) + W_self n_i + b        p_e = softmax of < q_i , k_j + x_e > / sqrt(C)
    z_i = x_i + W_projection y_i + b                    h_i = W_in mlp_norm(z_i) + b
    x_i = z_i + W_out gelu(h_i) + b

Adding a vector to all keys shifts all scores of a destination alike and changes no weight: the bias of the keys has no
effect, its gradient is 0, and the bias of the values may be added to key and value by the bias of the edges, whose
gradient it shares. That of W_self follows from that of the projection: sum_i dy_i = W_projection^T sum_i dz_i. So rows
are read for sums over nodes of dq alone; all other gradients of biases and norms are made by the passes over rows that
are needed anyway.

The backward pass makes normed rows and gelu(h) again, in the passes that read x and h. The feed-forward network takes
`chunk` rows at a time: what is as wide as its hidden layer exists for them alone, except h.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from anemoi_gt.custom_ops import (
    call_unrecorded,
    define_gradient,
    define_operator,
    flat_arguments,
    refuse_second_derivative,
)
from anemoi_gt.ops.dtypes import accumulator_dtype, without_autocast
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend.problem import IndexTensors

CHUNK = 65536  # rows of the feed-forward network at a time: products are as fast as those of all


class BlockTensors(NamedTuple):
    """The differentiable tensors of a block: nodes, edge attributes and parameters."""

    x_src: Tensor | None  # [B * N_src, F]; None: the destinations
    x_dst: Tensor  # [B * N_dst, F]
    edge_attr: Tensor  # [E, D] or [B, E, D]
    norm_src_weight: Tensor | None  # [F], with x_src
    norm_src_bias: Tensor | None
    norm_weight: Tensor  # [F]
    norm_bias: Tensor
    query_weight: Tensor  # [H * C, F]
    query_bias: Tensor  # [H * C]
    key_weight: Tensor
    key_bias: Tensor
    value_weight: Tensor
    value_bias: Tensor
    self_weight: Tensor
    self_bias: Tensor | None
    edge_weight: Tensor  # [H * C, D]
    edge_bias: Tensor
    projection_weight: Tensor  # [F, H * C]
    projection_bias: Tensor  # [F]
    mlp_norm_weight: Tensor  # [F]
    mlp_norm_bias: Tensor
    in_weight: Tensor  # [K, F]
    in_bias: Tensor  # [K]
    out_weight: Tensor  # [F, K]
    out_bias: Tensor  # [F]


class BlockOptions(NamedTuple):
    """Options of a block beside its tensors."""

    heads: int
    batch: int
    eps_src: float
    eps: float
    eps_mlp: float
    dtype: torch.dtype  # of products and attention
    backend: str  # "triton" or "torch"
    chunk: int = CHUNK


MATRICES = ("query", "key", "value", "self", "edge", "projection", "in", "out")
NUM_TENSORS = len(BlockTensors._fields)
NUM_INPUTS = NUM_TENSORS + len(IndexTensors._fields)


@define_operator
def transformer_block(
    tensors: BlockTensors, index: IndexTensors, options: BlockOptions, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the destinations [B * N_dst, F] after the block, and what backward needs, empty unless `save`.

    That is query, key, value, y, z, h and what the backend of the attention saves.
    """
    t, rows = tensors, _row_kernels(options)
    with _computing(rows, t.x_dst):
        weights, biases = _cast(t, options.dtype)
        _, n_dst = rows.add_norm(t.x_dst, None, t.norm_weight, t.norm_bias, options.eps, options.dtype)
        n_src = n_dst
        if t.x_src is not None:
            norm = (t.norm_src_weight, t.norm_src_bias, options.eps_src)
            _, n_src = rows.add_norm(t.x_src, None, *norm, options.dtype)
        query = torch.addmm(biases["query"], n_dst, weights["query"].t())
        key, value = (n_src @ weights[name].t() for name in ("key", "value"))
        skip = _linear(n_dst, weights["self"], biases["self"])
        del n_src, n_dst
        attention = _attention_operands(t, query, key, value, weights, biases, options)
        skip = skip.view_as(attention.query)
        attended, *saved = rows.attend(attention, index, _scale(query, options), skip)
        attended = attended.reshape(query.shape)
        projected = torch.addmm(biases["projection"], attended, weights["projection"].t())
        mlp_norm = (t.mlp_norm_weight, t.mlp_norm_bias, options.eps_mlp)
        z, normed = rows.add_norm(t.x_dst, projected, *mlp_norm, options.dtype)
        del skip, projected
        x, width = torch.empty_like(z), weights["in"].shape[0]
        hidden = normed.new_empty((normed.shape[0] if save else 0, width))
        for part in _chunks(z.shape[0], options.chunk):
            out = hidden[part] if save else normed.new_empty((normed[part].shape[0], width))
            h = torch.addmm(biases["in"], normed[part], weights["in"].t(), out=out)
            torch.add(z[part], torch.addmm(biases["out"], gelu(h), weights["out"].t()), out=x[part])
    kept = (query, key, value, attended, z, hidden, *saved)
    return x, *(kept if save else (x.new_empty(0) for _ in kept))


@torch.library.register_fake("anemoi_gt::transformer_block")
@flat_arguments
def _(tensors: BlockTensors, index: IndexTensors, options: BlockOptions, save: bool):
    t, dtype = tensors, options.dtype
    nodes, wide = t.x_dst.shape[0], t.query_weight.shape[0]
    z = t.x_dst.new_empty(t.x_dst.shape, dtype=torch.promote_types(t.x_dst.dtype, dtype))
    if not save:
        return torch.empty_like(z), *(z.new_empty(0) for _ in range(9))
    num_src = nodes if t.x_src is None else t.x_src.shape[0]
    kept = [(nodes, wide), (num_src, wide), (num_src, wide), (nodes, wide)]
    kept = [z.new_empty(shape, dtype=dtype) for shape in kept]
    hidden = z.new_empty((nodes, t.in_weight.shape[0]), dtype=dtype)
    return torch.empty_like(z), *kept, z, hidden, *_row_kernels(options).empty_saved(t, index, options)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.options = inputs[NUM_INPUTS:-1]
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*inputs[:NUM_INPUTS], *saved)


@define_operator
def transformer_block_backward(
    grad: Tensor, tensors: BlockTensors, index: IndexTensors, options: BlockOptions, query: Tensor, key: Tensor,
    value: Tensor, attended: Tensor, z: Tensor, hidden: Tensor, saved_0: Tensor, saved_1: Tensor, saved_2: Tensor,
    needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients that `needs` asks for, in the order of the tensors."""
    t, rows, found = tensors, _row_kernels(options), {}
    with _computing(rows, t.x_dst):
        weights, biases = _cast(t, options.dtype)
        dz = _mlp_backward(t, rows, options, weights, grad.to(z.dtype).contiguous(), z, hidden, found)
        narrow = dz.to(options.dtype)
        dy = narrow @ weights["projection"]
        found["projection_weight"] = _outer(narrow, attended)
        if t.self_bias is not None:
            found["self_bias"] = found["projection_bias"] @ t.projection_weight.to(found["projection_bias"].dtype)
        attention = _attention_operands(t, query, key, value, weights, biases, options)
        need_attr = needs[BlockTensors._fields.index("edge_attr")]
        saved, scale = (saved_0, saved_1, saved_2), _scale(query, options)
        dy_heads = dy.view_as(attention.query)
        dq, dk, dv, *edges = rows.differentiate(attention, index, scale, saved, dy_heads, need_attr)
        found |= dict(zip((("edge_attr",) if need_attr else ()) + ("edge_weight", "edge_bias"), edges, strict=True))
        found |= {"key_bias": torch.zeros_like(t.key_bias), "value_bias": found["edge_bias"].clone()}
        dq, dk, dv = (rows_.reshape(-1, query.shape[1]) for rows_ in (dq, dk, dv))
        found["query_bias"] = rows.column_sums(dq)
        dst, src = {"query": dq, "self": dy}, {"key": dk, "value": dv}
        if t.x_src is None:
            dst |= src
        _norm_backward(t, rows, "norm", options.eps, weights, t.x_dst, dst, dz, found)
        if t.x_src is not None:
            _norm_backward(t, rows, "norm_src", options.eps_src, weights, t.x_src, src, None, found)
    return [found[n].to(x.dtype).reshape(x.shape) for n, x, need in zip(t._fields, t, needs, strict=True) if need]


def _mlp_backward(t, rows, options, weights, grad: Tensor, z: Tensor, hidden: Tensor, found: dict) -> Tensor:
    """Return dz [N, F]; put the gradients of the feed-forward network and the bias of the projection into `found`."""
    dz, sums = torch.empty_like(z), {}

    def add(name, part):
        sums[name] = part if name not in sums else sums[name].add_(part)

    for part in _chunks(z.shape[0], options.chunk):
        dx, narrow = grad[part], grad[part].to(options.dtype)
        activated, dh, dh_sum = rows.gelu_backward(hidden[part], narrow @ weights["out"])
        add("out_weight", _outer(narrow, activated))
        del activated
        norm = (t.mlp_norm_weight, t.mlp_norm_bias, options.eps_mlp, True)
        normed, norm_sums = rows.norm_backward(dz[part], z[part], dh @ weights["in"], dx, *norm)
        add("in_weight", _outer(dh, normed))
        add("in_bias", dh_sum)
        add("norm", norm_sums)
    names = ("mlp_norm_weight", "mlp_norm_bias", "out_bias", "projection_bias")
    found |= dict(zip(names, sums.pop("norm"), strict=True)) | sums
    return dz


def _norm_backward(t, rows, name, eps, weights, x, gradients: dict[str, Tensor], dz: Tensor | None, found) -> None:
    """Differentiate projections of normed rows, by name, and the norm; put the gradients into `found`."""
    dn = None
    for projection, dy in gradients.items():
        dn = dy @ weights[projection] if dn is None else dn.addmm_(dy, weights[projection])
    weight, bias = f"{name}_weight", f"{name}_bias"
    dx = torch.empty_like(x)
    normed, sums = rows.norm_backward(dx, x, dn, dz, getattr(t, weight), getattr(t, bias), eps, False)
    found |= {"x_dst" if name == "norm" else "x_src": dx, weight: sums[0], bias: sums[1]}
    found |= {f"{projection}_weight": _outer(dy, normed) for projection, dy in gradients.items()}


def _backward(ctx, grad, *_):
    arguments = NUM_INPUTS + len(ctx.options) + 1
    if grad is None:
        return (None,) * arguments
    needs = list(ctx.needs_input_grad[:NUM_TENSORS])
    tensors = ctx.saved_tensors  # read once: checkpointing unpacks at each access
    given = (grad, *tensors[:NUM_INPUTS], *ctx.options, *tensors[NUM_INPUTS:], needs)
    gradients = iter(call_unrecorded(transformer_block_backward, *given))
    return *(next(gradients) if need else None for need in needs), *((None,) * (arguments - NUM_TENSORS))


@torch.library.register_fake("anemoi_gt::transformer_block_backward")
@flat_arguments
def _(grad, tensors: BlockTensors, index: IndexTensors, options: BlockOptions, q, k, v, y, z, h, s0, s1, s2, needs):
    return [x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=True) if need]


define_gradient(transformer_block, _setup_context, _backward)
torch.library.register_autograd("anemoi_gt::transformer_block_backward", refuse_second_derivative)


def _row_kernels(options: BlockOptions):
    """Return the module with the parts of a block that are no matrix products."""
    return import_module(f"anemoi_gt.ops.{options.backend}_backend.block")


def _computing(rows, tensor: Tensor) -> ExitStack:
    """Return a context on the device of a tensor, without autocast."""
    stack = ExitStack()
    stack.enter_context(rows.on_device(tensor))
    stack.enter_context(without_autocast(tensor.device.type))
    return stack


def _cast(t: BlockTensors, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Return weights and biases of the linear maps by name, in `dtype`; key and value have no bias, and edge theirs."""
    given = {f"{name}_weight": getattr(t, f"{name}_weight") for name in MATRICES}
    given |= {f"{name}_bias": getattr(t, f"{name}_bias") for name in MATRICES if name not in ("key", "value", "edge")}
    given["edge_bias"] = t.edge_bias + t.value_bias
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    if all(tensor.dtype == dtype for tensor in given.values()):
        cast = given
    else:
        cast = {name: torch.empty_like(tensor, dtype=dtype) for name, tensor in given.items()}
        torch._foreach_copy_(list(cast.values()), list(given.values()))
    return tuple({name: cast.get(f"{name}_{kind}") for name in MATRICES} for kind in ("weight", "bias"))


def _attention_operands(t: BlockTensors, query, key, value, weights, biases, options: BlockOptions):
    """Return the operands of the attention, with a batch dimension where there is a batch."""
    shape = (options.heads, -1) if options.batch == 1 else (options.batch, -1, options.heads)
    if options.batch == 1:
        split = [rows.unflatten(-1, shape) for rows in (query, key, value)]
    else:
        split = [rows.view(*shape, rows.shape[-1] // options.heads) for rows in (query, key, value)]
    return AttentionOperands(*split, t.edge_attr.to(options.dtype).contiguous(), weights["edge"], biases["edge"])


def _scale(query: Tensor, options: BlockOptions) -> float:
    return (query.shape[1] // options.heads) ** -0.5


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


def _outer(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy^T x, the gradient of a weight, in the dtype of sums where the device makes such products."""
    wide = accumulator_dtype(dy.dtype)
    if dy.is_cuda and wide != dy.dtype:
        return torch.mm(dy.t(), x, out_dtype=wide)
    return (dy.t() @ x).to(wide)


def _chunks(num_rows: int, size: int) -> Iterator[slice]:
    """Yield slices of nearly equal sizes, at most `size`."""
    number = max(1, -(-num_rows // size))
    for part in range(number):
        yield slice(part * num_rows // number, (part + 1) * num_rows // number)
