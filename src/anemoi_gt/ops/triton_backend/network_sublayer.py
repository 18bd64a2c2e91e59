"""A network on rows as one operator, with a norm on its output and a residual connection.

    p = W_x x + W_m m + b        without m, or (W_x + W_m) x + b        r, y: see `network_steps`

A graph network updates its nodes so, and embeds rows without the residual connection.
"""

from collections.abc import Sequence

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
    residual_gradient,
)
from anemoi_gt.ops.triton_backend.plan import Buffer, MemoryLayout
from anemoi_gt.ops.triton_backend.planned_operator import PlannedOperator
from anemoi_gt.ops.triton_backend.sublayer_steps import (
    NodeSums,
    PackedWeights,
    SublayerBuilder,
)


def network_sublayer(tensors: NetworkTensors[Tensor], options: NetworkOptions) -> Tensor:
    """Return y [N, F] = x + network([x, more]), or without x."""
    check_network(tensors, options)
    flat = network_triton.flatten(tensors)
    (y,) = network_triton(flat, NoConstants(), options, save=needs_gradient(*flat))
    return y


class NetworkSublayer(PlannedOperator):
    """Outputs y; keeps the cast weights and p, q and r."""

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
        weights = builder.pack(network_steps.packed_network(t.network), kept["packed"])
        inputs = _Inputs(builder, t, weights, options)
        steps = NetworkSteps(builder, t.network, weights, options, kept)
        y = builder.empty(*_out_spec(t, options))
        for begin, end in builder.chunks(t.x.shape[0]):
            p = steps.rows("first", begin, end)
            inputs.project(p, begin, end)
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
        weights = PackedWeights.of(groups).views(kept_parts["packed"])
        inputs = _Inputs(builder, t, weights, options)
        steps = NetworkSteps(builder, t.network, weights, options, kept_parts)
        parts = NetworkGradients.of(t.network)
        packed_gradients, parameters = parts.packed(needs.network).allocate(builder)
        sums = NodeSums(builder, parts.sums)
        dx = builder.empty_like(t.x) if needs.x else None
        dmore = builder.empty_like(t.more) if needs.more and t.more is not None else None
        for begin, end in builder.chunks(t.x.shape[0]):
            p = kept_parts["first"].slice(0, begin, end)
            dp = builder.empty_like(p)
            dx_rows = None if dx is None else dx.slice(0, begin, end)
            steps.differentiate(
                grad,
                None,
                None,
                dx_rows if options.residual else None,
                sums,
                parameters,
                dp,
                begin,
                end,
            )
            dmore_rows = None if dmore is None else dmore.slice(0, begin, end)
            inputs.differentiate(dp, dx_rows, dmore_rows, parameters.get("first"), begin, end)
        inputs.finish(parameters.get("first"))
        sums.reduce_into(parameters["sums"])
        return [dx, dmore, packed_gradients]


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
        width = t.x.shape[1]
        self.of_x = weight.slice(1, 0, width)
        self.of_more = weight.slice(1, width, weight.shape[1])
        if options.repeats_x:
            folded = builder.empty((weight.shape[0], width), weight.dtype)
            builder.compute_into(folded, torch.add, self.of_x, self.of_more)
            self.of_x = folded

    def project(self, p: Buffer, begin: int, end: int) -> None:
        """Write p of rows."""
        self.builder.linear(self._rows(self.tensors.x, begin, end), self.of_x, self.bias, p)
        if self.tensors.more is not None:
            more = self._rows(self.tensors.more, begin, end)
            self.builder.accumulate(more, self.of_more.transposed(), p)

    def differentiate(
        self,
        dp: Buffer,
        dx: Buffer | None,
        dmore: Buffer | None,
        grad_weight: Buffer | None,
        begin: int,
        end: int,
    ) -> None:
        """Write the gradients of rows from dp; add that of the weight."""
        builder, t, is_first = self.builder, self.tensors, begin == 0
        if dx is not None:
            residual_gradient(builder, dp, self.of_x, dx, adds=self.options.residual)
        if dmore is not None:
            residual_gradient(builder, dp, self.of_more, dmore, adds=False)
        if grad_weight is None:
            return
        width = t.x.shape[1]
        x = self._rows(t.x, begin, end)
        builder.outer_product(dp, x, grad_weight.slice(1, 0, width), is_first=is_first)
        if t.more is not None:
            more = self._rows(t.more, begin, end)
            of_more = grad_weight.slice(1, width, grad_weight.shape[1])
            builder.outer_product(dp, more, of_more, is_first=is_first)

    def finish(self, grad_weight: Buffer | None) -> None:
        """Write the rest of the gradient of the weight, once all rows are in it."""
        if self.options.repeats_x and grad_weight is not None:
            width = self.tensors.x.shape[1]
            halves = (grad_weight.slice(1, 0, width), grad_weight.slice(1, width, 2 * width))
            self.builder.copy(*halves)

    def _rows(self, rows: Buffer, begin: int, end: int) -> Buffer:
        return self.builder.cast(rows.slice(0, begin, end), self.options.gemm_dtype)


def _out_spec(t: NetworkTensors[Operand], options: NetworkOptions) -> Spec:
    """Return shape and dtype of y."""
    shape = (t.x.shape[0], t.network.out.weight.shape[0])
    return shape, network_steps.out_dtype(t.x.dtype, options)


def _kept_layout(t: NetworkTensors[Operand], options: NetworkOptions) -> MemoryLayout:
    """Return the layout of what the forward pass keeps: packed weights, p, q and r."""
    packed = PackedWeights.of(network_steps.packed_network(t.network))
    specs: dict[str, Spec] = {"packed": ((packed.num_elements,), options.gemm_dtype)}
    return MemoryLayout.of(specs | network_steps.kept_specs(t.network, t.x.shape[0], options))


network_triton = NetworkSublayer()
