"""A network on rows as one operator, with a norm on its output and a residual connection.

    p = W_x x + W_m m + b        without m, or (W_x + W_m) x + b        r, y: see `network_steps`

A graph network updates its nodes with it. Without the residual connection, it embeds input rows and
computes output rows. These have one column per variable or attribute, so they and their weights are
padded (`aligned_columns`). With few input columns, p is recomputed in the backward pass, because
writing p takes longer than its product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.ops.network_tensors import NetworkOptions, NetworkTensors, check_network
from anemoi_gt.ops.operands import Operand
from anemoi_gt.ops.operator import GradientLayout, Spec
from anemoi_gt.ops.sublayer_tensors import NoConstants
from anemoi_gt.ops.tree import leaves
from anemoi_gt.ops.triton_backend import network_steps
from anemoi_gt.ops.triton_backend.network_steps import (
    NetworkGradients,
    NetworkSteps,
    NetworkSums,
    residual_gradient,
)
from anemoi_gt.ops.triton_backend.plan import Buffer, MemoryLayout
from anemoi_gt.ops.triton_backend.planned_operator import PlannedOperator
from anemoi_gt.ops.triton_backend.sublayer_steps import (
    PackedWeights,
    SublayerBuilder,
    aligned_columns,
    as_row,
)


def network_sublayer(tensors: NetworkTensors[Tensor], options: NetworkOptions) -> Tensor:
    """Return y [N, F] = x + network([x, more]), or without x."""
    check_network(tensors, options)
    flat = network_triton.flatten(tensors)
    (y,) = network_triton(flat, NoConstants(), options, save=needs_gradient(*flat))
    return y


class NetworkSublayer(PlannedOperator):
    """Outputs y; keeps the cast weights, q and r, and p of wide rows."""

    builder_class = SublayerBuilder

    def __init__(self) -> None:
        super().__init__(
            "network",
            tensors=NetworkTensors,
            constants=NoConstants,
            options=NetworkOptions,
            outputs=("out",),
            num_results=3,
        )

    def forward_specs(
        self, tensors: NetworkTensors[Operand], _: NoConstants, options: NetworkOptions
    ) -> list[Spec]:
        """Return the specs of y and the kept bytes."""
        t = tensors
        return [_out_spec(t, options), ((_kept_layout(t, options).num_bytes,), torch.uint8)]

    def add_forward(
        self,
        builder: SublayerBuilder,
        tensors: NetworkTensors[Buffer],
        _: NoConstants,
        options: NetworkOptions,
        *,
        save: bool,
    ) -> list[Buffer]:
        """Add the steps of the forward pass."""
        t = tensors
        layout = _kept_layout(t, options)
        if save:
            kept = builder.empty_parts(layout, together=True)
        else:
            kept = {"packed": builder.empty(*layout.parts["packed"][1:])}
        packed = builder.pack(network_steps.packed_network(t.network), kept["packed"])
        weights = _padded(builder, packed, _Widths.of(t, options))
        inputs = _Inputs(builder, t, weights, options)
        steps = NetworkSteps(builder, t.network, weights, options, kept)
        y = builder.empty(*_out_spec(t, options))
        for begin, end in builder.chunks(t.x.shape[0]):
            p = steps.rows("first", begin, end)
            inputs.project(inputs.rows(begin, end), p)
            h = steps.activate("first", p)
            x = t.x.slice(0, begin, end) if options.residual else None
            steps.forward(h, x, y.slice(0, begin, end), begin, end)
        return [y, builder.whole(kept["packed"])] if save else [y]

    def gradient_layout(
        self,
        tensors: NetworkTensors[Operand],
        _: NoConstants,
        options: NetworkOptions,
        needs: NetworkTensors[bool],
    ) -> GradientLayout:
        """Return the layout of dx, of the gradient of more inputs, and the packed gradients."""
        t = tensors
        whole: list[Spec | None] = [None, None]
        for result, (rows, need) in enumerate(((t.x, needs.x), (t.more, needs.more))):
            if rows is not None and need:
                whole[result] = (rows.shape, rows.dtype)
        parts = NetworkGradients.of(t.network)
        tree: NetworkTensors = NetworkTensors(0, 1, parts.tree)
        packed = parts.packed(needs.network)
        return packed.layout(whole, leaves(tree), leaves(t), leaves(needs))

    def add_backward(
        self,
        builder: SublayerBuilder,
        tensors: NetworkTensors[Buffer],
        _: NoConstants,
        options: NetworkOptions,
        kept: Buffer,
        grads: Sequence[Buffer],
        needs: NetworkTensors[bool],
    ) -> list[Buffer | None]:
        """Add the steps of the backward pass."""
        t = tensors
        (grad,) = grads
        kept_parts = _kept_layout(t, options).buffers(kept)
        groups = network_steps.packed_network(t.network)
        packed_weights = PackedWeights.of(groups).views(kept_parts["packed"])
        weights = _padded(builder, packed_weights, _Widths.of(t, options))
        inputs = _Inputs(builder, t, weights, options)
        steps = NetworkSteps(builder, t.network, weights, options, kept_parts)
        parts = NetworkGradients.of(t.network)
        packed_gradients, gradients = parts.packed(needs.network).allocate(builder)
        parameters = dict(gradients)  # where a weight is padded, its gradient is too
        for name in ("first", "out"):
            if name in gradients and gradients[name].shape != weights[name].shape:
                parameters[name] = builder.empty(weights[name].shape, torch.float32)
        sums = NetworkSums(builder, parts.sums)
        dx = builder.empty_like(t.x) if needs.x else None
        dmore = builder.empty_like(t.more) if needs.more and t.more is not None else None
        for begin, end in builder.chunks(t.x.shape[0]):
            p = steps.rows("first", begin, end)
            rows = None
            if "first" not in kept_parts:
                rows = inputs.rows(begin, end)
                inputs.project(rows, p)
            dp = builder.empty_like(p)
            dx_rows = None if dx is None else dx.slice(0, begin, end)
            steps.differentiate(
                grad,
                dx_rows if options.residual else None,
                sums,
                parameters,
                p,
                dp,
                begin,
                end,
            )
            dmore_rows = None if dmore is None else dmore.slice(0, begin, end)
            inputs.differentiate(dp, dx_rows, dmore_rows)
            if "first" in parameters:
                if rows is None:
                    rows = inputs.rows(begin, end)
                inputs.add_gradient(dp, rows, parameters["first"], is_first=begin == 0)
        inputs.finish(parameters.get("first"))
        for name, gradient in parameters.items():
            if gradient is not gradients[name]:  # padded
                builder.resize(gradient, gradients[name])
        sums.reduce_into(parameters["sums"])
        return [dx, dmore, packed_gradients]


class _Widths(NamedTuple):
    """Columns of rows in the first product, and in the last."""

    inputs: int
    out: int
    is_alone: bool  # rows x are not joined with others, nor added to the output

    @classmethod
    def of(cls, t: NetworkTensors[Operand], options: NetworkOptions) -> "_Widths":
        """Return the columns, padded where they are a model's, not its channels."""
        inputs, out = t.network.first.value.weight.shape[1], t.network.out.weight.shape[0]
        is_alone = t.more is None and not options.residual and not options.repeats_x
        if is_alone:
            inputs = aligned_columns(inputs, options.gemm_dtype)
            if not options.norm.eps:
                out = aligned_columns(out, options.gemm_dtype)
        return cls(inputs, out, is_alone)

    def recomputes_first(self, t: NetworkTensors[Operand]) -> bool:
        """Return whether p is recomputed in the backward pass."""
        return self.is_alone and 2 * self.inputs <= t.network.first.value.weight.shape[0]


def _padded(
    builder: SublayerBuilder, weights: dict[str, Buffer], widths: _Widths
) -> dict[str, Buffer]:
    """Return weights of these columns, with zeros where a packed one has no element."""
    weights = dict(weights)
    first, out = weights["first"], weights["out"]
    if first.shape[1] != widths.inputs:
        weights["first"] = builder.empty((first.shape[0], widths.inputs), first.dtype)
        builder.resize(first, weights["first"])
    if out.shape[0] != widths.out:
        weights["out"] = builder.empty((widths.out, out.shape[1]), out.dtype)
        builder.resize(out, weights["out"])
        bias = weights.get("out_bias")
        if bias is not None:
            weights["out_bias"] = builder.empty((widths.out,), bias.dtype)
            builder.resize(as_row(bias), as_row(weights["out_bias"]))
    return weights


class _InputRows(NamedTuple):
    """Rows of a chunk in the dtype of the products."""

    x: Buffer
    more: Buffer | None


class _Inputs:
    """The first layer of a network: rows x, and more rows."""

    def __init__(
        self,
        builder: SublayerBuilder,
        t: NetworkTensors[Buffer],
        weights: dict[str, Buffer],
        options: NetworkOptions,
    ):
        self.builder, self.tensors, self.options = builder, t, options
        self.bias = weights.get("first_bias")
        weight = weights["first"]
        more = 0 if t.more is None else t.more.shape[1]
        if options.repeats_x:
            more = t.x.shape[1]
        self.width = weight.shape[1] - more  # of x, padded
        self.of_x = weight.slice(1, 0, self.width)
        self.of_more = weight.slice(1, self.width, weight.shape[1])
        if options.repeats_x:
            folded = builder.empty((weight.shape[0], self.width), weight.dtype)
            builder.compute_into(folded, torch.add, self.of_x, self.of_more)
            self.of_x = folded

    def rows(self, begin: int, end: int) -> _InputRows:
        """Return rows `begin` to `end`."""
        builder, t, dtype = self.builder, self.tensors, self.options.gemm_dtype
        x = t.x.slice(0, begin, end)
        if t.x.shape[1] == self.width:
            x = builder.cast(x, dtype)
        else:
            padded = builder.empty((end - begin, self.width), dtype)
            builder.resize(x, padded)
            x = padded
        if t.more is None:
            return _InputRows(x, None)
        return _InputRows(x, builder.cast(t.more.slice(0, begin, end), dtype))

    def project(self, rows: _InputRows, p: Buffer) -> None:
        """Write p of rows."""
        self.builder.linear(rows.x, self.of_x, self.bias, p)
        if rows.more is not None:
            self.builder.accumulate(rows.more, self.of_more.transposed(), p)

    def differentiate(self, dp: Buffer, dx: Buffer | None, dmore: Buffer | None) -> None:
        """Write the gradients of rows from dp."""
        builder = self.builder
        if dmore is not None:
            residual_gradient(builder, dp, self.of_more, dmore, adds=False)
        if dx is None:
            return
        if dx.shape[1] == self.width:
            residual_gradient(builder, dp, self.of_x, dx, adds=self.options.residual)
        else:
            builder.resize(builder.product(dp, self.of_x), dx)

    def add_gradient(
        self, dp: Buffer, rows: _InputRows, grad_weight: Buffer, *, is_first: bool
    ) -> None:
        """Add the gradient of the weight from dp of rows; write it if they are the first."""
        of_x = grad_weight.slice(1, 0, self.width)
        self.builder.outer_product(dp, rows.x, of_x, is_first=is_first)
        if rows.more is not None:
            of_more = grad_weight.slice(1, self.width, grad_weight.shape[1])
            self.builder.outer_product(dp, rows.more, of_more, is_first=is_first)

    def finish(self, grad_weight: Buffer | None) -> None:
        """Write the rest of the gradient of the weight, once all rows are in it."""
        if self.options.repeats_x and grad_weight is not None:
            halves = (
                grad_weight.slice(1, 0, self.width),
                grad_weight.slice(1, self.width, 2 * self.width),
            )
            self.builder.copy(*halves)


def _out_spec(t: NetworkTensors[Operand], options: NetworkOptions) -> Spec:
    """Return shape and dtype of y."""
    shape = (t.x.shape[0], t.network.out.weight.shape[0])
    return shape, network_steps.out_dtype(t.x.dtype, options)


def _kept_layout(t: NetworkTensors[Operand], options: NetworkOptions) -> MemoryLayout:
    """Return the layout of what the forward pass keeps: packed weights, p, q and r."""
    packed = PackedWeights.of(network_steps.packed_network(t.network))
    specs: dict[str, Spec] = {"packed": ((packed.num_elements,), options.gemm_dtype)}
    specs |= network_steps.kept_specs(t.network, t.x.shape[0], options)
    if _Widths.of(t, options).recomputes_first(t):
        del specs["first"]
    return MemoryLayout.of(specs)


network_triton = NetworkSublayer()
