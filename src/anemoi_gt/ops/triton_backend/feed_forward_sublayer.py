"""The feed-forward sub-layer of a block as one operator: norm, network, residual connection.

    m = norm(x)                                  see `anemoi_gt.ops.sublayer_tensors`
    h = W_hidden m + b_hidden                                               [N, K_h]
    h = [W_gate; W_hidden] m + [b_gate; b_hidden]       gated               [N, 2 K_h]
    a = act(h), gated act(h_gate) h_value        [N, K_h]
    y = x + W_out a + b_out

Kept for the backward pass: x, and in one storage h and the cast weights. The backward pass
recomputes m and a in the passes that read x and h. Rows are taken in chunks: hidden-width tensors
are per chunk, except h. With the option `keep_hidden` False h is not kept either: the backward pass
recomputes it from x by the launches and GEMMs of the forward pass over the same chunks, so the
result is bitwise identical.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.ops.operands import Operand, OperandT
from anemoi_gt.ops.operator import GradientLayout, Spec
from anemoi_gt.ops.sublayer_tensors import (
    FeedForwardOptions,
    FeedForwardTensors,
    Linear,
    NoConstants,
)
from anemoi_gt.ops.tree import leaves
from anemoi_gt.ops.triton_backend import row_launches, sublayer_steps
from anemoi_gt.ops.triton_backend.plan import Buffer, MemoryLayout
from anemoi_gt.ops.triton_backend.planned_operator import PlannedOperator
from anemoi_gt.ops.triton_backend.sublayer_steps import (
    NodeSums,
    NormGradients,
    NormSteps,
    PackedGradients,
    PackedWeights,
    Part,
    Piece,
    SublayerBuilder,
    stacked,
)


def feed_forward_sublayer(
    tensors: FeedForwardTensors[Tensor], options: FeedForwardOptions
) -> Tensor:
    """Return y [N, F] = x + network(norm(x)), in the promoted dtype of x and the GEMMs."""
    flat = feed_forward_triton.flatten(tensors)
    (y,) = feed_forward_triton(flat, NoConstants(), options, save=needs_gradient(*flat))
    return y


def feed_forward_kept_bytes(
    tensors: FeedForwardTensors[Tensor], options: FeedForwardOptions
) -> int:
    """Return the bytes that a call keeps for its backward pass, besides its inputs."""
    return kept_layout(tensors, options).num_bytes


class FeedForward(PlannedOperator):
    """Outputs y; keeps the cast weights, and h if the options say so."""

    builder_class = SublayerBuilder

    def __init__(self) -> None:
        super().__init__(
            "feed_forward",
            tensors=FeedForwardTensors,
            constants=NoConstants,
            options=FeedForwardOptions,
            outputs=("out",),
            num_results=3,
        )

    def forward_specs(
        self, tensors: FeedForwardTensors[Operand], _: NoConstants, options: FeedForwardOptions
    ) -> list[Spec]:
        """Return the specs of y and of the kept bytes."""
        kept = kept_layout(tensors, options)
        y = (tensors.x.shape, _out_dtype(tensors, options))
        return [y, ((kept.num_bytes,), torch.uint8)]

    def add_forward(
        self,
        builder: SublayerBuilder,
        tensors: FeedForwardTensors[Buffer],
        _: NoConstants,
        options: FeedForwardOptions,
        *,
        save: bool,
    ) -> list[Buffer]:
        """Add the steps of the forward pass."""
        t = tensors
        kept = builder.empty_parts(kept_layout(t, options), together=save)
        weights = builder.pack(_packed(t), kept["packed"])
        norm = NormSteps(builder, "norm", t.norm, weights, options.norm)
        network = _Network(builder, t, norm, weights, options)
        y = builder.empty(t.x.shape, _out_dtype(t, options))
        for begin, end in builder.chunks(t.x.shape[0]):
            hidden = None  # scratch of this chunk
            if save and options.keep_hidden:
                hidden = kept["hidden"].slice(0, begin, end)
            hidden = network.hidden(begin, end, hidden)
            activated = network.activate(hidden)
            delta = builder.linear(activated, weights["out"], weights.get("out_bias"))
            builder.add(t.x.slice(0, begin, end), delta, y.slice(0, begin, end))
        return [y, builder.whole(kept["packed"])] if save else [y]

    def gradient_layout(
        self,
        tensors: FeedForwardTensors[Operand],
        _: NoConstants,
        options: FeedForwardOptions,
        needs: FeedForwardTensors[bool],
    ) -> GradientLayout:
        """Return the layout of dx, the gradient of the condition, and the packed gradients."""
        parts = _Parts.of(tensors)
        condition = None
        if tensors.norm.condition is not None and needs.norm.condition:
            condition = (tensors.norm.condition.shape, options.gemm_dtype)
        whole = ((tensors.x.shape, tensors.x.dtype), condition)
        packed = parts.packed(needs)
        return packed.layout(whole, leaves(parts.tree), leaves(tensors), leaves(needs))

    def add_backward(
        self,
        builder: SublayerBuilder,
        tensors: FeedForwardTensors[Buffer],
        _: NoConstants,
        options: FeedForwardOptions,
        kept: Buffer,
        grads: Sequence[Buffer],
        needs: FeedForwardTensors[bool],
    ) -> list[Buffer | None]:
        """Add the steps of the backward pass."""
        t = tensors
        (grad,) = grads
        kept_parts = kept_layout(t, options).buffers(kept)
        weights = PackedWeights.of(_packed(t)).views(kept_parts["packed"])
        norm = NormSteps(builder, "norm", t.norm, weights, options.norm)
        network = _Network(builder, t, norm, weights, options)
        parts = _Parts.of(t)
        packed_gradients, parameters = parts.packed(needs).allocate(builder)
        sums = NodeSums(builder, parts.sums)
        needs_condition = bool(needs.norm.condition)
        norm.allocate_gradients(sums, parameters.get("norm_map"), needs_condition=needs_condition)
        dx = builder.empty_like(t.x)
        for begin, end in builder.chunks(t.x.shape[0]):
            is_first = begin == 0
            x = t.x.slice(0, begin, end)
            if options.keep_hidden:
                hidden = kept_parts["hidden"].slice(0, begin, end)
            else:
                hidden = network.hidden(begin, end, None)
            grad_rows = grad.slice(0, begin, end)
            grad_cast = builder.cast(grad_rows, options.gemm_dtype)
            grad_activated = builder.product(grad_cast, weights["out"])
            activated, grad_hidden = network.differentiate(
                hidden, grad_activated, sums, is_first=is_first
            )
            if _needs_weights(needs):
                builder.outer_product(grad_cast, activated, parameters["out"], is_first=is_first)
            grad_normed = builder.product(grad_hidden, weights["hidden"])
            normed = builder.empty_like(grad_normed)
            norm.backward(x, grad_normed, grad_rows, dx.slice(0, begin, end), normed, first=begin)
            if _needs_weights(needs):
                builder.outer_product(grad_hidden, normed, parameters["hidden"], is_first=is_first)
        sums.reduce_into(parameters["sums"])
        return [dx, norm.grad_condition, packed_gradients]


class _Network(NamedTuple):
    """The steps of the hidden layer, for a chunk of rows."""

    builder: SublayerBuilder
    tensors: FeedForwardTensors[Buffer]
    norm: NormSteps
    weights: dict[str, Buffer]
    options: FeedForwardOptions

    def hidden(self, begin: int, end: int, out: Buffer | None) -> Buffer:
        """Write h of rows `begin` to `end`, into `out` or else into scratch, and return it."""
        x = self.tensors.x.slice(0, begin, end)
        m = self.builder.empty(x.shape, self.options.gemm_dtype)
        self.norm.forward(x, m, first=begin)
        return self.builder.linear(m, self.weights["hidden"], self.weights.get("hidden_bias"), out)

    def activate(self, hidden: Buffer) -> Buffer:
        """Return a of rows h."""
        num_rows, num_hidden = hidden.shape[0], self.tensors.hidden.weight.shape[0]
        activated = self.builder.empty((num_rows, num_hidden), self.options.gemm_dtype)
        launch = row_launches.activation_forward(
            num_rows, num_hidden, self.options.activation, gated=_is_gated(self.tensors)
        )
        self.builder.launch(launch, hidden=hidden, out=activated)
        return activated

    def differentiate(
        self, hidden: Buffer, grad_activated: Buffer, sums: NodeSums, *, is_first: bool
    ) -> tuple[Buffer, Buffer]:
        """Return a, recomputed, and the gradient of h; add the gradients of the biases to sums."""
        num_rows, num_hidden = hidden.shape[0], self.tensors.hidden.weight.shape[0]
        is_gated = _is_gated(self.tensors)
        activated = self.builder.empty((num_rows, num_hidden), self.options.gemm_dtype)
        grad_hidden = self.builder.empty_like(hidden)
        launch = row_launches.activation_backward(
            num_rows,
            num_hidden,
            self.options.activation,
            gated=is_gated,
            programs=sums.programs,
            sums=sums.width,
            first_sum=sums.columns["gate_bias" if is_gated else "hidden_bias"].start,
            is_first=is_first,
        )
        self.builder.launch(
            launch,
            hidden=hidden,
            grad_activated=grad_activated,
            activated=activated,
            grad_hidden=grad_hidden,
            partial=sums.partial,
        )
        return activated, grad_hidden


class _Parts(NamedTuple):
    """The packed gradients of parameters, and the tree of all gradients."""

    hidden: list[Part]  # weights, of the gate first
    out: Part
    norm: NormGradients
    sums: dict[str, Part]  # sums over nodes, by the names of their columns
    tree: FeedForwardTensors

    @classmethod
    def of(cls, t: FeedForwardTensors[Operand]) -> "_Parts":
        """Return the parts for these tensors."""
        hidden, features = t.hidden.weight.shape
        norm = NormGradients.of(t.norm, features, condition_result=1)
        scale, shift = norm.sums
        sums = {"norm_scale": scale, "norm_shift": shift, "norm_total": Part((features,))}
        gate: Linear = Linear()
        weights = [Part((hidden, features))]
        if _is_gated(t):
            sums["gate_bias"] = Part((hidden,))
            weights.insert(0, Part((hidden, features)))
            gate = Linear(weights[0], sums["gate_bias"])
        sums["hidden_bias"] = Part((hidden,))
        out = Linear(Part((features, hidden)), sums["norm_total"])
        tree: FeedForwardTensors = FeedForwardTensors(
            x=0,
            norm=norm.tree,
            gate=gate,
            hidden=Linear(weights[-1], sums["hidden_bias"]),
            out=out,
        )
        return cls(weights, out.weight, norm, sums, tree)

    def packed(self, needs: FeedForwardTensors[bool]) -> PackedGradients:
        """Return their layout, without frozen linear maps."""
        groups = {}
        if _needs_weights(needs):
            groups = {"hidden": self.hidden, "out": [self.out]}
        if self.norm.maps:
            groups["norm_map"] = list(self.norm.maps)
        groups["sums"] = list(self.sums.values())
        return PackedGradients.of(groups)


def _needs_weights(needs: FeedForwardTensors[bool]) -> bool:
    """Return whether a linear map needs a gradient; not in a frozen block."""
    return bool(needs.gate.weight or needs.hidden.weight or needs.out.weight)


def _is_gated(t: FeedForwardTensors[Operand]) -> bool:
    return t.gate.weight is not None


def _packed(t: FeedForwardTensors[OperandT]) -> dict[str, list[Piece[OperandT]]]:
    """Return the packed parameters by the group that stacks them."""
    groups = {"hidden": stacked(t.gate.weight, t.hidden.weight), "out": stacked(t.out.weight)}
    if t.hidden.bias is not None:
        groups["hidden_bias"] = stacked(t.gate.bias, t.hidden.bias)
    if t.out.bias is not None:
        groups["out_bias"] = stacked(t.out.bias)
    return groups | sublayer_steps.packed_norm(t.norm, "norm")


def kept_layout(t: FeedForwardTensors[Operand], options: FeedForwardOptions) -> MemoryLayout:
    """Return the layout of what the forward pass keeps: the packed weights, and h if wanted."""
    packed = PackedWeights.of(_packed(t))
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "packed": ((packed.num_elements,), options.gemm_dtype)
    }
    if options.keep_hidden:
        specs["hidden"] = ((t.x.shape[0], packed.groups["hidden"][1][0]), options.gemm_dtype)
    return MemoryLayout.of(specs)


def _out_dtype(t: FeedForwardTensors[Operand], options: FeedForwardOptions) -> torch.dtype:
    """Return the dtype of y, and of its gradient."""
    return torch.promote_types(t.x.dtype, options.gemm_dtype)


feed_forward_triton = FeedForward()
