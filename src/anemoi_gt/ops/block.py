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

Gradients of query, key, value and y are columns of one tensor, so that those of n, and of the weights, are one product
each. The backward pass makes normed rows and gelu(h) again, in the passes that read x and h. The feed-forward network
takes `chunk` rows at a time: what is as wide as its hidden layer exists for them alone, except h.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

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


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass."""

    query: Tensor  # [B * N_dst, H * C]
    key: Tensor  # [B * N_src, H * C]
    value: Tensor
    attended: Tensor  # y [B * N_dst, H * C]
    z: Tensor  # [B * N_dst, F]
    hidden: Tensor  # h [B * N_dst, K]
    parameters: Tensor  # of the linear maps, in the dtype of products
    attr: Tensor  # edge attributes in the dtype of products
    saved_0: Tensor  # of the backend of the attention
    saved_1: Tensor
    saved_2: Tensor


MATRICES = ("query", "self", "key", "value", "edge", "projection", "in", "out")
NUM_TENSORS = len(BlockTensors._fields)
NUM_INPUTS = NUM_TENSORS + len(IndexTensors._fields)


@define_operator
def transformer_block(
    tensors: BlockTensors, index: IndexTensors, options: BlockOptions, save: bool
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Return the destinations [B * N_dst, F] after the block, and what backward needs, empty unless `save`.

    That is `Kept`, in order.
    """
    t, rows = tensors, _row_kernels(options)
    with _computing(rows, t.x_dst):
        parameters = _cast_parameters(t, options.dtype)
        weights, biases = _weights_and_biases(t, parameters)
        _, n_dst = rows.add_norm(t.x_dst, None, t.norm_weight, t.norm_bias, options.eps, options.dtype)
        n_src = n_dst
        if t.x_src is not None:
            norm = (t.norm_src_weight, t.norm_src_bias, options.eps_src)
            _, n_src = rows.add_norm(t.x_src, None, *norm, options.dtype)
        query = torch.addmm(biases["query"], n_dst, weights["query"].t())
        key, value = (n_src @ weights[name].t() for name in ("key", "value"))
        skip = _linear(n_dst, weights["self"], biases["self"])
        del n_src, n_dst
        attr = t.edge_attr.to(options.dtype, copy=True, memory_format=torch.contiguous_format)
        attention = _attention_operands(query, key, value, attr, weights, biases, options)
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
            torch.add(z[part], torch.addmm(biases["out"], rows.gelu(h), weights["out"].t()), out=x[part])
    kept = Kept(query, key, value, attended, z, hidden, parameters, attr, *saved)
    return x, *(kept if save else (x.new_empty(0) for _ in kept))


@torch.library.register_fake("anemoi_gt::transformer_block")
@flat_arguments
def _(tensors: BlockTensors, index: IndexTensors, options: BlockOptions, save: bool):
    t, dtype = tensors, options.dtype
    nodes, wide = t.x_dst.shape[0], t.query_weight.shape[0]
    z = t.x_dst.new_empty(t.x_dst.shape, dtype=torch.promote_types(t.x_dst.dtype, dtype))
    if not save:
        return torch.empty_like(z), *(z.new_empty(0) for _ in Kept._fields)
    num_src = nodes if t.x_src is None else t.x_src.shape[0]
    kept = [(nodes, wide), (num_src, wide), (num_src, wide), (nodes, wide)]
    query, key, value, attended = (z.new_empty(shape, dtype=dtype) for shape in kept)
    hidden = z.new_empty((nodes, t.in_weight.shape[0]), dtype=dtype)
    parameters = z.new_empty(sum(part.numel() for part in _parameters(t)), dtype=dtype)
    attr = z.new_empty(t.edge_attr.shape, dtype=dtype)
    saved = _row_kernels(options).empty_saved(t, index, options)
    return torch.empty_like(z), *Kept(query, key, value, attended, z, hidden, parameters, attr, *saved)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.options = inputs[NUM_INPUTS:-1]
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*inputs[:NUM_INPUTS], *saved)


class Sums:
    """The columns of the sums over nodes that a backward pass makes, by the parameters whose gradients they are."""

    def __init__(self, t: BlockTensors):
        width, hidden, features = t.query_weight.shape[0], t.in_weight.shape[0], t.x_dst.shape[1]
        names = ("mlp_norm_weight", "mlp_norm_bias", "out_bias", "projection_bias", "norm_weight", "norm_bias")
        names += ("norm_src_weight", "norm_src_bias") if t.x_src is not None else ()
        self.sizes = dict.fromkeys(names, features) | {"in_bias": hidden, "query_bias": width}
        ends = list(accumulate(self.sizes.values()))
        self.first = dict(zip(self.sizes, [0, *ends], strict=False))
        self.width = ends[-1]

    def split(self, total: Tensor) -> dict[str, Tensor]:
        """Return the sums by name, as views."""
        return dict(zip(self.sizes, total.split(list(self.sizes.values())), strict=True))


@define_operator
def transformer_block_backward(
    grad: Tensor, tensors: BlockTensors, index: IndexTensors, options: BlockOptions, kept: Kept, need_attr: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients: those of `GRADIENTS`, in the dtype of sums but for nodes and edges, and `Sums` of nodes.

    Those of query, key, value and self are rows of one tensor [4 H * C, F], or [2 H * C, F] each with x_src.
    """
    t, rows = tensors, _row_kernels(options)
    with _computing(rows, t.x_dst):
        weights, biases = _weights_and_biases(t, kept.parameters)
        layout, wide = Sums(t), kept.query.shape[1]
        partial = rows.new_sums(t.x_dst, layout.width)
        dz, in_weight, out_weight = _mlp_backward(t, rows, options, weights, grad, kept, partial, layout.first)

        num_dst, num_src = kept.query.shape[0], kept.key.shape[0]
        dst = grad.new_empty((num_dst, (4 if t.x_src is None else 2) * wide), dtype=options.dtype)
        src = dst[:, 2 * wide :] if t.x_src is None else dst.new_empty((num_src, 2 * wide))
        dquery, dy = dst[:, :wide], dst[:, wide : 2 * wide]
        narrow = dz.to(options.dtype)
        torch.mm(narrow, weights["projection"], out=dy)
        projection_weight = _outer(narrow, kept.attended)
        attention = _attention_operands(*kept[:3], kept.attr, weights, biases, options)
        dattr = torch.empty_like(attention.edge_attr) if need_attr else None
        into = (dquery, src[:, :wide], src[:, wide:])
        into, dy_heads = [_split_heads(x, options) for x in into], _split_heads(dy, options)
        saved = (kept.saved_0, kept.saved_1, kept.saved_2)
        scale = _scale(kept.query, options)
        edges = rows.differentiate(attention, index, scale, saved, dy_heads, into, dattr)
        rows.column_sums(dquery, partial, layout.first["query_bias"])

        def through_norm(name, eps, x, gradients, dx_too):
            first_row = 0 if name == "norm" else 2 * wide  # in the weights of query, self, key and value
            weight = kept.parameters[: 4 * wide * x.shape[1]].view(4 * wide, -1)[first_row:][: gradients.shape[1]]
            dx, norm = torch.empty_like(x), (getattr(t, f"{name}_weight"), getattr(t, f"{name}_bias"), eps)
            first = layout.first[f"{name}_weight"]
            normed = rows.norm_backward(dx, x, gradients @ weight, dx_too, *norm, partial, first)
            return dx, _outer(gradients, normed)

        x_dst, dst_weights = through_norm("norm", options.eps, t.x_dst, dst, dz)
        x_src = src_weights = dz.new_empty(0)
        if t.x_src is not None:
            x_src, src_weights = through_norm("norm_src", options.eps_src, t.x_src, src, None)
        else:
            src_weights = dst_weights.new_empty(0)
        sums = rows.total(partial)
        self_bias = layout.split(sums)["projection_bias"] @ t.projection_weight.to(sums.dtype)
    edge_attr = dz.new_empty(0) if dattr is None else dattr.to(t.edge_attr.dtype).reshape(t.edge_attr.shape)
    return (
        x_src,
        x_dst,
        edge_attr,
        dst_weights,
        src_weights,
        *edges,
        projection_weight,
        in_weight,
        out_weight,
        self_bias,
        sums,
    )


@torch.library.register_fake("anemoi_gt::transformer_block_backward")
@flat_arguments
def _(grad, tensors: BlockTensors, index: IndexTensors, options: BlockOptions, kept: Kept, need_attr):
    t, none = tensors, (0,)
    wide, features = t.query_weight.shape
    apart = t.x_src is not None
    shapes = [(2 * wide if apart else 4 * wide, features), (2 * wide, features) if apart else none]
    shapes += [t.edge_weight.shape, (wide,), t.projection_weight.shape, t.in_weight.shape, t.out_weight.shape, (wide,)]
    sums = [grad.new_empty(shape, dtype=accumulator_dtype(options.dtype)) for shape in (*shapes, (Sums(t).width,))]
    x_src = kept.z.new_empty(0) if t.x_src is None else torch.empty_like(t.x_src)
    edge_attr = t.edge_attr.new_empty(t.edge_attr.shape) if need_attr else kept.z.new_empty(0)
    return x_src, torch.empty_like(t.x_dst), edge_attr, *sums


def _mlp_backward(t, rows, options, weights, grad: Tensor, kept: Kept, partial, first) -> tuple[Tensor, Tensor, Tensor]:
    """Return dz [N, F] and the gradients of both weights; the sums go to `partial`."""
    z, grad = kept.z, grad.to(kept.z.dtype).contiguous()
    dz, in_weight, out_weight = torch.empty_like(z), None, None
    norm = (t.mlp_norm_weight, t.mlp_norm_bias, options.eps_mlp, partial, first["mlp_norm_weight"], True)
    for part in _chunks(z.shape[0], options.chunk):
        narrow, add = grad[part].to(options.dtype), in_weight is not None
        dg = narrow @ weights["out"]
        activated, dh = rows.gelu_backward(kept.hidden[part], dg, partial, first["in_bias"], add)
        del dg
        dw = _outer(narrow, activated)
        out_weight = out_weight.add_(dw) if add else dw
        normed = rows.norm_backward(dz[part], z[part], dh @ weights["in"], grad[part], *norm, add)
        dw = _outer(dh, normed)
        in_weight = in_weight.add_(dw) if add else dw
    return dz, in_weight, out_weight


def _backward(ctx, grad, *_):
    arguments = NUM_INPUTS + len(ctx.options) + 1
    if grad is None:
        return (None,) * arguments
    needs = dict(zip(BlockTensors._fields, ctx.needs_input_grad, strict=False))
    tensors = ctx.saved_tensors  # read once: checkpointing unpacks at each access
    given = (grad, *tensors[:NUM_INPUTS], *ctx.options, *tensors[NUM_INPUTS:], needs["edge_attr"])
    x_src, x_dst, attr, dst, src, edge, edge_bias, projection, in_weight, out_weight, self_bias, sums = call_unrecorded(
        transformer_block_backward, *given
    )
    t = BlockTensors(*tensors[:NUM_TENSORS])
    found = Sums(t).split(sums) | {"x_src": x_src, "x_dst": x_dst, "edge_attr": attr, "self_bias": self_bias}
    query, skip, *rest = dst.chunk(2 if t.x_src is not None else 4)
    key, value = rest or src.chunk(2)
    found |= {"query_weight": query, "self_weight": skip, "key_weight": key, "value_weight": value}
    found |= {"edge_weight": edge, "edge_bias": edge_bias, "value_bias": edge_bias, "projection_weight": projection}
    found |= {"in_weight": in_weight, "out_weight": out_weight}
    if needs["key_bias"]:
        found["key_bias"] = torch.zeros_like(t.key_bias)
    gradients = [found[name].to(tensor.dtype) if needs[name] else None for name, tensor in t._asdict().items()]
    return *gradients, *((None,) * (arguments - NUM_TENSORS))


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


def _parameters(t: BlockTensors) -> list[Tensor]:
    """Return the parameters of the linear maps that are used: key and value have no bias."""
    biases = [getattr(t, f"{name}_bias") for name in MATRICES if name not in ("key", "value")]
    return [getattr(t, f"{name}_weight") for name in MATRICES] + [bias for bias in biases if bias is not None]


def _cast_parameters(t: BlockTensors, dtype: torch.dtype) -> Tensor:
    """Return `_parameters` in one tensor, the bias of the values added to that of the edges."""
    parameters = _parameters(t._replace(edge_bias=t.edge_bias + t.value_bias))
    return torch.cat([parameter.reshape(-1) for parameter in parameters]).to(dtype)


def _weights_and_biases(t: BlockTensors, cast: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Return views of weights and biases by name in what `_cast_parameters` returned."""
    parameters = _parameters(t)
    views = [
        x.view(like.shape) for x, like in zip(cast.split([x.numel() for x in parameters]), parameters, strict=True)
    ]
    names = [name for name in MATRICES if name not in ("key", "value") and getattr(t, f"{name}_bias") is not None]
    return dict(zip(MATRICES, views, strict=False)), {"self": None} | dict(
        zip(names, views[len(MATRICES) :], strict=True)
    )


def _attention_operands(query, key, value, attr, weights, biases, options: BlockOptions) -> AttentionOperands:
    """Return the operands of the attention, with a batch dimension where there is a batch."""
    rows = [_split_heads(x, options) for x in (query, key, value)]
    return AttentionOperands(*rows, attr, weights["edge"], biases["edge"])


def _split_heads(rows: Tensor, options: BlockOptions) -> Tensor:
    """Return rows [B * N, H * C] as [N, H, C], or [B, N, H, C] where there is a batch."""
    heads = rows.unflatten(-1, (options.heads, -1))
    return heads if options.batch == 1 else heads.unflatten(0, (options.batch, -1))


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
