"""Parts of a fused network: linear maps and activations, with a norm on its output or without.

`network_parts` reads an MLP as Anemoi and this library build it, or refuses it, by the rules of
`nn.sublayers`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.nn import plain
from anemoi_gt.nn.plain import why_not_plain, why_not_plain_tensor
from anemoi_gt.nn.sublayers import (
    ACTIVATION,
    DOUBLE,
    GATED_LINEAR,
    LAYER_NORM,
    LINEAR,
    SEQUENTIAL,
    CannotFuseError,
    Submodule,
    asked_of_children,
    cannot_fuse,
    child_of,
    is_conditional,
    other_precision,
    read_linears,
    read_norm,
    shape_mismatch,
)
from anemoi_gt.ops.activations import ACTIVATION_NAMES
from anemoi_gt.ops.backends import Sublayers
from anemoi_gt.ops.tensors import Layer, Linear, Network, NetworkOptions, Norm, NormOptions
from anemoi_gt.refusal import Refusal, permanent

LAYERS = "one or two hidden layers and a linear map are needed"


class NetworkParts(NamedTuple):
    """Parameters and options of a network."""

    network: Network[Tensor]
    norm: NormOptions  # eps 0 without a norm
    activation: str
    is_cast: bool  # whether the result has the dtype of the GEMMs under autocast too
    features: int  # that it returns
    dtype: torch.dtype  # of the parameters
    has_condition: bool  # whether the norm needs a condition; if not, it takes none
    sublayers: Sublayers

    def network_with(self, condition: Tensor | None) -> Network[Tensor]:
        """Return the parameters with a condition [N, K] of each row, None without one."""
        norm = self.network.norm._replace(condition=condition)
        return self.network._replace(norm=norm)

    def options(
        self, gemm_dtype: torch.dtype, device: torch.device, *, is_autocast: bool, residual: bool
    ) -> NetworkOptions:
        """Return the options of a call on a device."""
        out_dtype = gemm_dtype
        # autocast computes a layer norm in float32 on a GPU, not on a CPU, and returns that
        if is_autocast and device.type == "cuda" and not self.is_cast:
            out_dtype = torch.float32
        return NetworkOptions(self.norm, self.activation, gemm_dtype, out_dtype, residual)


def network_parts(
    mlp: Submodule,
    sublayers: Sublayers,
    name: str,
    *,
    is_called: bool = False,
    norms: tuple[str, ...] = LAYER_NORM,
) -> NetworkParts | Refusal:
    """Return the parts of an MLP, or why it cannot be fused.

    Parameters
    ----------
    mlp : nn.Module
        Of anemoi-models or of this library, with children `mlp` and `layer_norm`.
    sublayers : Sublayers
        Of the backend that is to compute it.
    name : str
        In its block, for the text of a refusal.
    is_called : bool
        Whether the MLP is called, and only its children are not.
    norms : tuple of str
        Roles of its norm. An RMSNorm has another dtype under autocast than a layer norm, on some
        devices and versions of PyTorch: callers that keep what Anemoi returns do not admit it.
    """
    try:
        return _read_network(mlp, sublayers, name, is_called=is_called, norms=norms)
    except CannotFuseError as error:
        refusal: Refusal = error.args[0]
        return refusal


def for_call(
    parts: NetworkParts | Refusal, x: Tensor, *, is_autocast: bool
) -> NetworkParts | Refusal:
    """Return the parts for a call on rows like x, or why it cannot use them."""
    if isinstance(parts, Refusal):
        return parts
    if type(x) is not Tensor:
        refusal = why_not_plain_tensor("its features are", x)
        if refusal is not None:
            return refusal
    if is_autocast or x.dtype == parts.dtype:
        return parts
    return permanent(
        f"its features are {x.dtype} and its parameters {parts.dtype}, without autocast"
    )


def _read_network(
    mlp: Submodule, sublayers: Sublayers, name: str, *, is_called: bool, norms: tuple[str, ...]
) -> NetworkParts | Refusal:
    prefix = f"{name}." if name else ""
    layers, norm = child_of(mlp, "mlp"), child_of(mlp, "layer_norm")
    asked: list[plain.Asked] = []
    if not is_called:
        asked.append((name, mlp, (plain.MLP,)))
    asked.append((f"{prefix}mlp", layers, SEQUENTIAL))
    if norm is not None:
        asked.append((f"{prefix}layer_norm", norm, norms))
    if plain.CONDITIONAL_NORM in norms and is_conditional(norm):
        asked += asked_of_children(norm, f"{prefix}layer_norm")
    modules = list(layers._modules.items()) if isinstance(layers, nn.Module) else []
    linears: list[tuple[str, Submodule]] = []  # of each hidden layer the gate first, if it has one
    activations: list[tuple[str, Submodule]] = []
    num_gated = 0
    for number, module in modules:
        path = f"{prefix}mlp.{number}"
        if hasattr(module, "gate_proj"):
            num_gated += 1
            asked.append((path, module, GATED_LINEAR))
            for child in ("gate_proj", "value_proj"):
                linears.append((f"{path}.{child}", child_of(module, child)))
            activations.append((f"{path}.gating", child_of(module, "gating")))
        elif hasattr(module, "weight"):
            linears.append((path, module))
        else:
            activations.append((path, module))
    for path, module in linears:
        asked.append((path, module, LINEAR))
    for path, module in activations:
        asked.append((path, module, ACTIVATION))
    refusal = why_not_plain(*asked)
    if refusal is not None:
        return refusal

    num_hidden = len(activations)
    is_gated = num_gated > 0
    expected = num_hidden * ["gated"] + ["map"] if is_gated else num_hidden * ["map", "f"] + ["map"]
    kinds = []
    for _, module in modules:
        kind = "f"
        if isinstance(module, nn.Linear):
            kind = "map"
        elif hasattr(module, "gate_proj"):
            kind = "gated"
        kinds.append(kind)
    if num_hidden not in (1, 2) or kinds != expected:
        raise cannot_fuse(f"its {prefix}mlp has {len(modules)} layers, and {LAYERS}")
    names = set()
    for path, module in activations:
        approximate = module.__dict__.get("approximate")  # of a GELU
        known = ACTIVATION_NAMES.get((type(module), approximate))
        if known is None:
            got = f"its {path} has approximate={approximate!r}"
            raise cannot_fuse(f"{got}, and 'none' or 'tanh' is needed")
        names.add(known)
    if len(names) != 1:
        raise cannot_fuse(f"its {prefix}mlp has several kinds of activations")

    read = read_linears(dict(linears))
    out = read.pop()
    hidden = []
    width = read[0].weight.shape[1]
    while read:
        gate: Linear[Tensor] = read.pop(0) if is_gated else Linear()
        layer = Layer(gate, read.pop(0))
        shape = (layer.value.weight.shape[0], width)
        for linear in layer:
            if linear.weight is not None and linear.weight.shape != shape:
                raise shape_mismatch(linear.weight, shape, f"{prefix}mlp", "first layer")
        if is_gated and (layer.gate.bias is None) != (layer.value.bias is None):
            raise cannot_fuse(f"its {prefix}mlp has a bias in a gate or its value, not in both")
        hidden.append(layer)
        width = layer.value.weight.shape[0]
    if out.weight.shape[1] != width:
        shape = (out.weight.shape[0], width)
        raise shape_mismatch(out.weight, shape, f"{prefix}mlp", "last hidden layer")
    features = out.weight.shape[0]
    if features > sublayers.max_features:
        got = f"its {prefix}mlp returns {features} features"
        raise cannot_fuse(f"{got}, and at most {sublayers.max_features} are possible")
    parameters: Norm[Tensor] = Norm()
    options = NormOptions()
    has_condition = False
    if norm is not None and type(norm) is not nn.Identity:
        norm_parts = read_norm(norm, f"{prefix}layer_norm", sublayers)
        if norm_parts.is_double not in (None, out.weight.dtype is DOUBLE):
            raise other_precision(f"{prefix}layer_norm")
        parameters, options = norm_parts.parameters, norm_parts.options
        has_condition = norm_parts.has_condition
        if norm_parts.features != features:
            raise shape_mismatch(
                out.weight, (norm_parts.features, width), f"{prefix}mlp", "layer_norm"
            )
        if options.eps <= 0.0:
            got = f"its {prefix}layer_norm has eps {options.eps}"
            raise cannot_fuse(f"{got}, and a positive number is needed")
    second = hidden[1] if num_hidden == 2 else Layer()
    return NetworkParts(
        network=Network(hidden[0], second, out, parameters),
        norm=options,
        activation=names.pop(),
        # Anemoi's AutocastLayerNorm casts its result to the dtype of its input
        is_cast=type(norm) is not nn.LayerNorm,
        features=features,
        dtype=out.weight.dtype,
        has_condition=has_condition,
        sublayers=sublayers,
    )
