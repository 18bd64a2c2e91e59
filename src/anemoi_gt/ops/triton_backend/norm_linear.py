"""A linear layer as one operator, after a norm or on rows as they are.

    n = norm(x)                    see `anemoi_gt.ops.sublayer_tensors`; x without a norm
    y = W n + b

It takes the place of a norm in float32 between two casts, or of the cast that autocast makes. Kept
for the backward pass: x and the cast weights; n is recomputed, in chunks of rows.

Columns of 16-bit operands are padded with zeros (`aligned_columns`), W [F_out, F] to [O, I]. A cast
is a pass over the rows anyway.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.ops.operands import Operand
from anemoi_gt.ops.operator import GradientLayout, Spec
from anemoi_gt.ops.sublayer_tensors import (
    Linear,
    NoConstants,
    Norm,
    NormLinearOptions,
    NormLinearTensors,
)
from anemoi_gt.ops.tree import leaves
from anemoi_gt.ops.triton_backend.plan import Buffer, MemoryLayout
from anemoi_gt.ops.triton_backend.planned_operator import PlannedOperator
from anemoi_gt.ops.triton_backend.sublayer_steps import (
    NodeSums,
    NormSteps,
    PackedGradients,
    Part,
    SublayerBuilder,
    aligned_columns,
    as_row,
)


def norm_linear(tensors: NormLinearTensors[Tensor], options: NormLinearOptions) -> Tensor:
    """Return y [N, F_out] = W norm(x) + b in the dtype of the products."""
    flat = norm_linear_triton.flatten(tensors)
    (y,) = norm_linear_triton(flat, NoConstants(), options, save=needs_gradient(*flat))
    return y


class NormLinear(PlannedOperator):
    """Outputs y; keeps the cast weights."""

    builder_class = SublayerBuilder

    def __init__(self) -> None:
        super().__init__(
            "norm_linear",
            tensors=NormLinearTensors,
            constants=NoConstants,
            options=NormLinearOptions,
            outputs=("out",),
            num_results=2,
        )

    def forward_specs(
        self, tensors: NormLinearTensors[Operand], _: NoConstants, options: NormLinearOptions
    ) -> list[Spec]:
        """Return the specs of y and of the kept bytes."""
        kept = kept_layout(tensors, options)
        y = ((tensors.x.shape[0], tensors.linear.weight.shape[0]), options.gemm_dtype)
        return [y, ((kept.num_bytes,), torch.uint8)]

    def add_forward(
        self,
        builder: SublayerBuilder,
        tensors: NormLinearTensors[Buffer],
        _: NoConstants,
        options: NormLinearOptions,
        *,
        save: bool,
    ) -> list[Buffer]:
        """Add the steps of the forward pass."""
        t = tensors
        kept = builder.empty_parts(kept_layout(t, options), together=save)
        weight, bias = kept["weight"], kept.get("bias")
        builder.resize(t.linear.weight, weight)
        if bias is not None:
            assert t.linear.bias is not None  # `kept_layout` has a part for it
            builder.resize(as_row(t.linear.bias), as_row(bias))
        num_rows, num_out = t.x.shape[0], t.linear.weight.shape[0]
        rows = _Rows.of(builder, t, options)
        y = builder.empty((num_rows, num_out), options.gemm_dtype)
        for begin, end in builder.chunks(num_rows):
            normed = rows.normed(begin, end)
            y_rows = y.slice(0, begin, end)
            if weight.shape[0] == num_out:
                builder.linear(normed, weight, bias, y_rows)
            else:
                builder.resize(builder.linear(normed, weight, bias), y_rows)
        return [y, builder.whole(weight)] if save else [y]

    def gradient_layout(
        self,
        tensors: NormLinearTensors[Operand],
        _: NoConstants,
        options: NormLinearOptions,
        needs: NormLinearTensors[bool],
    ) -> GradientLayout:
        """Return the layout of dx and of the packed gradients of parameters."""
        parts = _Parts.of(tensors, options, needs)
        dx = (tensors.x.shape, tensors.x.dtype) if needs.x else None
        return parts.packed().layout((dx,), leaves(parts.tree), leaves(tensors), leaves(needs))

    def add_backward(
        self,
        builder: SublayerBuilder,
        tensors: NormLinearTensors[Buffer],
        _: NoConstants,
        options: NormLinearOptions,
        kept: Buffer,
        grads: Sequence[Buffer],
        needs: NormLinearTensors[bool],
    ) -> list[Buffer | None]:
        """Add the steps of the backward pass."""
        t = tensors
        (grad,) = grads
        weight = kept_layout(t, options).buffers(kept)["weight"]
        parts = _Parts.of(t, options, needs)
        packed, parameters = parts.packed().allocate(builder)
        sums = NodeSums(builder, parts.sums)
        rows = _Rows.of(builder, t, options)
        if rows.norm is not None:
            rows.norm.allocate_gradients(sums, None, needs_condition=False)
        if "bias" in parts.sums:
            sums.sum_rows("bias", grad)
        num_rows = t.x.shape[0]
        padded = grad
        if weight.shape[0] != grad.shape[1]:
            padded = builder.empty((num_rows, weight.shape[0]), options.gemm_dtype)
            builder.resize(grad, padded)
        grad_weight = parameters.get("weight")
        if grad_weight is not None and grad_weight.shape != weight.shape:
            grad_weight = builder.empty(weight.shape, torch.float32)
        dx = builder.empty_like(t.x) if parts.needs_rows else None
        for begin, end in builder.chunks(num_rows):
            grad_rows = padded.slice(0, begin, end)
            normed = None
            if dx is not None:
                normed = rows.differentiate(begin, end, grad_rows, weight, dx.slice(0, begin, end))
            if grad_weight is not None:
                if normed is None:
                    normed = rows.normed(begin, end)
                builder.outer_product(grad_rows, normed, grad_weight, is_first=begin == 0)
        if grad_weight is not None and grad_weight != parameters["weight"]:
            builder.resize(grad_weight, parameters["weight"])
        if parts.sums:
            sums.reduce_into(parameters["sums"])
        return [dx if needs.x else None, packed]


class _Rows(NamedTuple):
    """The steps of rows n, for a chunk of rows."""

    builder: SublayerBuilder
    x: Buffer
    norm: NormSteps | None
    width: int  # I
    gemm_dtype: torch.dtype

    @classmethod
    def of(
        cls, builder: SublayerBuilder, t: NormLinearTensors[Buffer], options: NormLinearOptions
    ) -> "_Rows":
        """Return the steps for these tensors."""
        norm = None
        if options.norm.eps:
            norm = NormSteps(builder, "norm", Norm(t.scale, t.shift), {}, options.norm)
        return cls(builder, t.x, norm, _width(t, options), options.gemm_dtype)

    def normed(self, begin: int, end: int) -> Buffer:
        """Return n of rows `begin` to `end`."""
        x = self.x.slice(0, begin, end)
        if self.norm is None and x.shape[1] == self.width:
            return self.builder.cast(x, self.gemm_dtype)
        normed = self.builder.empty((end - begin, self.width), self.gemm_dtype)
        if self.norm is None:
            self.builder.resize(x, normed)
        else:
            self.norm.forward(x, normed)
        return normed

    def differentiate(
        self, begin: int, end: int, grad: Buffer, weight: Buffer, dx: Buffer
    ) -> Buffer | None:
        """Fill dx of rows `begin` to `end`; return n, recomputed, where the same pass makes it."""
        if self.norm is None and dx.shape[1] == self.width and dx.dtype == self.gemm_dtype:
            self.builder.product(grad, weight, dx)
            return None
        grad_normed = self.builder.product(grad, weight)
        if self.norm is None:
            self.builder.resize(grad_normed, dx)
            return None
        normed = self.builder.empty_like(grad_normed)
        self.norm.backward(self.x.slice(0, begin, end), grad_normed, None, dx, normed, first=begin)
        return normed


class _Parts(NamedTuple):
    """The gradients of parameters that are needed, and the tree of all gradients."""

    weight: Part | None
    sums: dict[str, Part]  # sums over nodes, by the names of their columns
    needs_rows: bool  # of x, or of the parameters of the norm
    tree: NormLinearTensors

    @classmethod
    def of(
        cls,
        t: NormLinearTensors[Operand],
        options: NormLinearOptions,
        needs: NormLinearTensors[bool],
    ) -> "_Parts":
        """Return the parts for these tensors."""
        num_out, features = t.linear.weight.shape
        weight = Part((num_out, features)) if needs.linear.weight else None
        needs_rows = bool(needs.x or needs.scale or needs.shift)
        sums = {}
        if options.norm.eps and needs_rows:
            sums["norm_scale"], sums["norm_shift"] = Part((features,)), Part((features,))
        if needs.linear.bias:
            sums["bias"] = Part((num_out,))
        tree: NormLinearTensors = NormLinearTensors(
            x=0,
            scale=sums.get("norm_scale"),
            shift=sums.get("norm_shift"),
            linear=Linear(weight, sums.get("bias")),
        )
        return cls(weight, sums, needs_rows, tree)

    def packed(self) -> PackedGradients:
        """Return the layout of the gradients that are needed."""
        groups = {}
        if self.weight is not None:
            groups["weight"] = [self.weight]
        if self.sums:
            groups["sums"] = list(self.sums.values())
        return PackedGradients.of(groups)


def _width(t: NormLinearTensors[Operand], options: NormLinearOptions) -> int:
    """Return I, the columns of n: a norm writes its features, which models choose aligned."""
    features = t.linear.weight.shape[1]
    return features if options.norm.eps else aligned_columns(features, options.gemm_dtype)


def kept_layout(t: NormLinearTensors[Operand], options: NormLinearOptions) -> MemoryLayout:
    """Return the layout of what the forward pass keeps: the weight [O, I] and bias [O], cast."""
    num_out = aligned_columns(t.linear.weight.shape[0], options.gemm_dtype)
    specs: dict[str, Spec] = {"weight": ((num_out, _width(t, options)), options.gemm_dtype)}
    if t.linear.bias is not None:
        specs["bias"] = ((num_out,), options.gemm_dtype)
    return MemoryLayout.of(specs)


norm_linear_triton = NormLinear()
