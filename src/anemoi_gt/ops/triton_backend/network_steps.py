"""Plan steps of a network with a norm on its output (`anemoi_gt.ops.network_tensors`).

    p = first layer of u, h = act(p)       q = W_2 h + b_2, g = act(q)       r = W_out g + b_out
    y = x + norm(r)

Kept for the backward pass, in the GEMM dtype: p, q, r. It recomputes h, g and the normalised rows
in the passes that read p, q and r. Rows are processed in chunks; all other tensors of hidden width
exist for one chunk at a time.
"""

from typing import NamedTuple

import torch

from anemoi_gt.ops.network_tensors import Layer, Network, NetworkOptions
from anemoi_gt.ops.operands import Operand, OperandT
from anemoi_gt.ops.operator import Spec
from anemoi_gt.ops.sublayer_tensors import Linear, Norm
from anemoi_gt.ops.triton_backend import (
    interaction_launches,
    row_launches,
    tiles,
)
from anemoi_gt.ops.triton_backend.packing import PackedGradients, Part, Piece, stacked
from anemoi_gt.ops.triton_backend.plan import Buffer
from anemoi_gt.ops.triton_backend.sublayer_builder import NodeSums, SublayerBuilder, wide_mm


def is_gated(network: Network[Operand]) -> bool:
    """Return whether hidden layers have a gate."""
    return network.first.gate.weight is not None


def has_second(network: Network[Operand]) -> bool:
    """Return whether there are two hidden layers."""
    return network.second.value.weight is not None


def packed_network(network: Network[OperandT]) -> dict[str, list[Piece[OperandT]]]:
    """Return the packed parameters by the group that stacks them."""
    groups = {}
    for name, layer in (("first", network.first), ("second", network.second)):
        if layer.value.weight is not None:
            groups[name] = stacked(layer.gate.weight, layer.value.weight)
        if layer.value.bias is not None:
            groups[f"{name}_bias"] = stacked(layer.gate.bias, layer.value.bias)
    groups["out"] = stacked(network.out.weight)
    if network.out.bias is not None:
        groups["out_bias"] = stacked(network.out.bias)
    return groups


def kept_specs(
    network: Network[Operand], num_rows: int, options: NetworkOptions
) -> dict[str, Spec]:
    """Return the specs of p, q and r of all rows; r is kept for its norm."""
    factor = 2 if is_gated(network) else 1
    specs: dict[str, Spec] = {}
    for name, layer in (("first", network.first), ("second", network.second)):
        if layer.value.weight is not None:
            specs[name] = ((num_rows, factor * layer.value.weight.shape[0]), options.gemm_dtype)
    if options.norm.eps:
        specs["out"] = ((num_rows, network.out.weight.shape[0]), options.gemm_dtype)
    return specs


# columns that `residual_norm_bwd` writes side by side
NORM_SUMS = ("norm_scale", "norm_shift", "out_bias")


class NetworkGradients(NamedTuple):
    """The packed gradients of a network's parameters, and the tree of all of them."""

    groups: dict[str, list[Part]]  # of weights
    sums: dict[str, Part]  # sums over rows, by the names of their columns
    tree: Network

    @classmethod
    def of(cls, network: Network[Operand]) -> "NetworkGradients":
        """Return the parts for these parameters."""
        features = network.out.weight.shape[0]
        sums = {name: Part((features,)) for name in NORM_SUMS}
        groups: dict[str, list[Part]] = {}
        layers: dict[str, Layer] = {}
        for name, layer in (("first", network.first), ("second", network.second)):
            layers[name] = Layer()
            if layer.value.weight is None:
                continue
            linears = []
            groups[name] = []
            for kind, linear in (("gate_", layer.gate), ("", layer.value)):
                if linear.weight is None:
                    linears.append(Linear())
                    continue
                weight = Part(tuple(linear.weight.shape))
                groups[name].append(weight)
                bias = Part((linear.weight.shape[0],))
                sums[f"{name}_{kind}bias"] = bias
                linears.append(Linear(weight, bias))
            layers[name] = Layer(*linears)
        groups["out"] = [Part(tuple(network.out.weight.shape))]
        tree: Network = Network(
            **layers,
            out=Linear(groups["out"][0], sums["out_bias"]),
            norm=Norm(sums["norm_scale"], sums["norm_shift"]),
        )
        return cls(groups, sums, tree)

    def packed(self, needs: Network[bool]) -> PackedGradients:
        """Return their layout, without weights if none needs a gradient."""
        groups = dict(self.groups) if needs_weights(needs) else {}
        groups["sums"] = list(self.sums.values())
        return PackedGradients.of(groups)


def needs_weights(needs: Network[bool]) -> bool:
    """Return whether a weight needs a gradient; not in a frozen network."""
    linears = (*needs.first, *needs.second, needs.out)
    return any(linear.weight for linear in linears)


class NetworkSums:
    """Sums over rows; `residual_norm_bwd`, with its own number of programs, writes the first."""

    def __init__(self, builder: SublayerBuilder, parts: dict[str, Part]):
        widths = {name: part.shape[0] for name, part in parts.items()}
        of_norm = {name: widths[name] for name in NORM_SUMS}
        features = widths["norm_scale"]
        programs = tiles.residual_norm_programs(features, builder.tuning)
        self.norm = NodeSums(builder, of_norm, programs)
        hidden = {name: width for name, width in widths.items() if name not in NORM_SUMS}
        self.hidden = NodeSums(builder, hidden, builder.tuning.programs)

    def reduce_into(self, total: Buffer) -> None:
        """Write all sums into `total`, in the order of the parts."""
        width = self.norm.width
        self.norm.reduce_into(total.slice(0, 0, width))
        self.hidden.reduce_into(total.slice(0, width, width + self.hidden.width))


class NetworkSteps:
    """The steps of a network, on a chunk of rows from `begin` to `end` at a time.

    Parameters
    ----------
    builder : SublayerBuilder
    network : Network
    weights : dict
        The packed parameters.
    options : NetworkOptions
    kept : dict
        p, q and r of all rows; without one of them it is scratch.
    """

    def __init__(
        self,
        builder: SublayerBuilder,
        network: Network[Buffer],
        weights: dict[str, Buffer],
        options: NetworkOptions,
        kept: dict[str, Buffer],
    ):
        self.builder, self.network, self.weights = builder, network, weights
        self.options, self.kept = options, kept
        self.is_gated = is_gated(network)
        self.has_second = has_second(network)
        self.features = network.out.weight.shape[0]

    def hidden(self, name: str) -> int:
        """Return the features of the hidden layer `name`."""
        return getattr(self.network, name).value.weight.shape[0]

    def rows(self, name: str, begin: int, end: int) -> Buffer:
        """Return the memory of rows of p, q or r."""
        if name in self.kept:
            return self.kept[name].slice(0, begin, end)
        width = self.weights[name].shape[0]
        return self.builder.empty((end - begin, width), self.options.gemm_dtype)

    def activate(self, name: str, pre: Buffer) -> Buffer:
        """Return the activated rows of a hidden layer."""
        features = self.hidden(name)
        out = self.builder.empty((pre.shape[0], features), self.options.gemm_dtype)
        launch = row_launches.activation_forward(
            pre.shape[0], features, self.options.activation, gated=self.is_gated
        )
        self.builder.launch(launch, hidden=pre, out=out)
        return out

    def forward(self, h: Buffer, x: Buffer | None, y: Buffer, begin: int, end: int) -> None:
        """Write y of rows h, with x if it is added."""
        builder, weights = self.builder, self.weights
        if self.has_second:
            q = self.rows("second", begin, end)
            builder.linear(h, weights["second"], weights.get("second_bias"), q)
            h = self.activate("second", q)
        has_norm = bool(self.options.norm.eps)
        has_dtype = y.dtype == self.options.gemm_dtype
        has_width = weights["out"].shape[0] == self.features  # it is not padded
        is_output = not has_norm and x is None and has_dtype and has_width
        r = y if is_output else self.rows("out", begin, end)
        builder.linear(h, weights["out"], weights.get("out_bias"), r)
        if is_output:
            return
        if not has_norm:
            if x is None:
                builder.resize(r, y)
            else:
                builder.add(r, x, y)
            return
        norm = self.network.norm
        launch = interaction_launches.residual_norm_forward(
            end - begin, self.features, self.options.norm
        )
        builder.launch(launch, r=r, x=x, scale=norm.scale, shift=norm.shift, y=y)

    def differentiate(
        self,
        grad: Buffer,
        dx: Buffer | None,
        sums: NetworkSums,
        parameters: dict[str, Buffer],
        p: Buffer,
        dp: Buffer,
        begin: int,
        end: int,
    ) -> None:
        """Write dp of rows from p and dy.

        dx gets what comes through the residual connection. Gradients of parameters are added to
        those of earlier chunks.
        """
        builder, weights, is_first = self.builder, self.weights, begin == 0
        dr = builder.empty((end - begin, weights["out"].shape[0]), self.options.gemm_dtype)
        has_norm = bool(self.options.norm.eps)
        launch = interaction_launches.residual_norm_backward(
            end - begin,
            self.features,
            self.options.norm,
            dr_stride=dr.shape[1],
            programs=sums.norm.programs,
            sums=sums.norm.width,
            first_sum=sums.norm.columns["norm_scale"].start,
            is_first=is_first,
        )
        builder.launch(
            launch,
            r=self.kept["out"].slice(0, begin, end) if has_norm else None,
            grad=grad.slice(0, begin, end),
            scale=self.network.norm.scale,
            dr=dr,
            dx=dx,
            partial=sums.norm.partial,
        )
        if self.has_second:
            pre = self.kept["second"].slice(0, begin, end)
            da = builder.product(dr, weights["out"])
            dq = builder.empty_like(pre)
            activated = self._differentiate("second", pre, da, dq, sums.hidden, is_first=is_first)
            if "out" in parameters:
                builder.outer_product(dr, activated, parameters["out"], is_first=is_first)
            da = builder.product(dq, weights["second"])
        else:
            dq = dr
            da = builder.product(dr, weights["out"])
        activated = self._differentiate("first", p, da, dp, sums.hidden, is_first=is_first)
        name = "second" if self.has_second else "out"
        if name in parameters:
            builder.outer_product(dq, activated, parameters[name], is_first=is_first)

    def _differentiate(
        self, name: str, pre: Buffer, da: Buffer, out: Buffer, sums: NodeSums, *, is_first: bool
    ) -> Buffer:
        """Write the gradient of a hidden layer's p or q; return its activated rows."""
        features = self.hidden(name)
        launch = row_launches.activation_backward(
            pre.shape[0],
            features,
            self.options.activation,
            gated=self.is_gated,
            programs=sums.programs,
            sums=sums.width,
            first_sum=sums.columns[f"{name}_gate_bias" if self.is_gated else f"{name}_bias"].start,
            is_first=is_first,
        )
        activated = self.builder.empty_like(da)
        self.builder.launch(
            launch,
            hidden=pre,
            grad_activated=da,
            activated=activated,
            grad_hidden=out,
            partial=sums.partial,
        )
        return activated


def residual_gradient(
    builder: SublayerBuilder, dp: Buffer, weight: Buffer, dx: Buffer, *, adds: bool
) -> None:
    """Write dp W into dx of any dtype; add it if there is a residual connection."""
    if adds:
        builder.accumulate(dp, weight, dx)
    elif dx.dtype == dp.dtype:
        builder.product(dp, weight, dx)
    else:
        builder.compute(wide_mm, dp, weight, dx)


def out_dtype(x: torch.dtype, options: NetworkOptions) -> torch.dtype:
    """Return the dtype of y."""
    return torch.promote_types(x, options.out_dtype) if options.residual else options.out_dtype
