"""Parts of the two fused sub-layers of a block, or the reason why a sub-layer cannot be fused.

    attention_sublayer      z_i = x_i + W_proj (edge attention of n + W_self n_i) + b,   n = norm(x)
    feed_forward_sublayer   y_i = z_i + W_out act(W_in norm(z_i) + b) + b

`attention_parts` and `feed_forward_parts` read the modules of a block of this library or of Anemoi,
whose submodules have the same names. A fused sub-layer uses parameters without calling their
modules, so it stands only for modules of classes whose `forward` is known, without hooks, and with
plain tensors as parameters. Whatever else a module is, it is named in the reason, a sentence about
"the block"; that costs its own sub-layer alone.

Ask once per call of a block and hand the answer down. Nothing is remembered between calls: the
answer depends on mutable modules, and to read them takes no longer than to compare them with what
they were. It is about 20 us a block, and torch.compile turns it into guards.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.nn.layer_kernels import has_global_hooks
from anemoi_gt.nn.mlp import MLP, GatedLinear
from anemoi_gt.nn.norm import AutocastLayerNorm, ConditionalLayerNorm
from anemoi_gt.ops.sublayer_tensors import (
    AttentionOptions,
    AttentionTensors,
    FeedForwardOptions,
    FeedForwardTensors,
)
from anemoi_gt.ops.triton_backend.tiles import MOST_ATTRIBUTES

# A module of a block, or None; its attributes are known once its class is checked.
Submodule = Any

MOST_FEATURES = 1024  # of a row, which a program of the kernels holds in registers


GLOBAL_HOOKS = "hooks are registered for all modules, which a fused sub-layer skips"
ATTENTION_LINEARS = ("lin_query", "lin_self", "lin_key", "lin_value", "lin_edge", "projection")


class KnownClasses:
    """Classes that a fused sub-layer replaces; `register` adds classes of other libraries."""

    layer_norm: tuple[type[nn.Module], ...] = (nn.LayerNorm, AutocastLayerNorm)
    conditional_norm: tuple[type[nn.Module], ...] = (ConditionalLayerNorm,)
    mlp: tuple[type[nn.Module], ...] = (MLP,)
    gated_linear: tuple[type[nn.Module], ...] = (GatedLinear,)


# GELU is missing because it has two forms.
ACTIVATIONS = {nn.SiLU: "silu", nn.ReLU: "relu", nn.Sigmoid: "sigmoid"}


def register(
    *,
    layer_norm: type[nn.Module] | None = None,
    conditional_norm: type[nn.Module] | None = None,
    mlp: type[nn.Module] | None = None,
    gated_linear: type[nn.Module] | None = None,
) -> None:
    """Declare that classes compute what the classes of this library do, with the same submodules.

    Parameters
    ----------
    layer_norm : type, optional
        Like `torch.nn.LayerNorm`, whatever the dtype of its result.
    conditional_norm : type, optional
        Like `ConditionalLayerNorm`: `norm`, `scale` and `bias`.
    mlp : type, optional
        Like `MLP`: calls `mlp`, a Sequential, and then `layer_norm` unless it is None or absent.
    gated_linear : type, optional
        Like `GatedLinear`: `gate_proj`, `value_proj` and `gating`.
    """
    kinds = {
        "layer_norm": layer_norm,
        "conditional_norm": conditional_norm,
        "mlp": mlp,
        "gated_linear": gated_linear,
    }
    for name, kind in kinds.items():
        known = getattr(KnownClasses, name)
        if kind is not None and kind not in known:
            setattr(KnownClasses, name, (*known, kind))


class NormParts(NamedTuple):
    """Parameters of a norm, named as in `FeedForwardTensors`."""

    scale: Tensor | None
    shift: Tensor | None
    scale_bias: Tensor | None
    shift_bias: Tensor | None
    eps: float
    features: int
    has_condition: bool


class FeedForwardParts(NamedTuple):
    """Parameters and options of a feed-forward sub-layer."""

    norm: NormParts
    weight_gate: Tensor | None
    bias_gate: Tensor | None
    weight_in: Tensor
    bias_in: Tensor | None
    weight_out: Tensor
    bias_out: Tensor | None
    activation: str
    has_condition: bool  # whether the norm needs a condition; if not, it takes none
    dtype: torch.dtype  # of the parameters
    product_dtype: torch.dtype  # of matrix products: the parameters', or in a call autocast's
    keep_hidden: bool = True  # whether a call keeps its hidden layer for the backward pass

    def tensors(self, x: Tensor, condition: Tensor | None) -> FeedForwardTensors:
        """Return the tensors of a call on rows x [N, F], with a condition [N, K] or None."""
        return FeedForwardTensors(
            x=x,
            norm_scale=self.norm.scale,
            norm_shift=self.norm.shift,
            norm_scale_bias=self.norm.scale_bias,
            norm_shift_bias=self.norm.shift_bias,
            condition=condition,
            weight_gate=self.weight_gate,
            bias_gate=self.bias_gate,
            weight_in=self.weight_in,
            bias_in=self.bias_in,
            weight_out=self.weight_out,
            bias_out=self.bias_out,
        )

    def options(self) -> FeedForwardOptions:
        """Return the options of the operator."""
        return FeedForwardOptions(
            self.norm.eps, self.activation, self.product_dtype, self.keep_hidden
        )


class AttentionParts(NamedTuple):
    """Parameters and options of an attention sub-layer."""

    norm: NormParts  # of destinations
    norm_src: NormParts  # of sources; `norm` itself if the block has one norm
    query_weight: Tensor
    query_bias: Tensor | None
    self_weight: Tensor
    self_bias: Tensor | None
    key_weight: Tensor
    key_bias: Tensor | None
    value_weight: Tensor
    value_bias: Tensor | None
    edge_weight: Tensor
    edge_bias: Tensor | None
    projection_weight: Tensor
    projection_bias: Tensor | None
    query_norm_scale: Tensor | None
    query_norm_eps: float  # 0.0 without a norm of queries
    key_norm_scale: Tensor | None
    key_norm_eps: float
    heads: int
    has_condition: bool  # whether both norms need a condition; if not, neither takes one
    dtype: torch.dtype  # of the parameters
    product_dtype: torch.dtype  # of matrix products: the parameters', or in a call autocast's

    def tensors(
        self,
        x_src: Tensor | None,
        halo: Tensor | None,
        x_dst: Tensor,
        edge_attr: Tensor,
        condition: Tensor | None,
        condition_src: Tensor | None,
    ) -> AttentionTensors:
        """Return the tensors of a call; x_src is None for one set of nodes with one norm."""
        norm = self.norm
        norm_src = self.norm_src
        if x_src is None:
            norm_src = NormParts(None, None, None, None, 0.0, 0, has_condition=False)
        return AttentionTensors(
            x_src=x_src,
            halo=halo,
            x_dst=x_dst,
            edge_attr=edge_attr,
            norm_scale=norm.scale,
            norm_shift=norm.shift,
            norm_scale_bias=norm.scale_bias,
            norm_shift_bias=norm.shift_bias,
            condition=condition,
            norm_src_scale=norm_src.scale,
            norm_src_shift=norm_src.shift,
            norm_src_scale_bias=norm_src.scale_bias,
            norm_src_shift_bias=norm_src.shift_bias,
            condition_src=condition_src,
            query_weight=self.query_weight,
            query_bias=self.query_bias,
            self_weight=self.self_weight,
            self_bias=self.self_bias,
            key_weight=self.key_weight,
            key_bias=self.key_bias,
            value_weight=self.value_weight,
            value_bias=self.value_bias,
            edge_weight=self.edge_weight,
            edge_bias=self.edge_bias,
            projection_weight=self.projection_weight,
            projection_bias=self.projection_bias,
            query_norm_scale=self.query_norm_scale,
            key_norm_scale=self.key_norm_scale,
        )

    def options(self, batch: int) -> AttentionOptions:
        """Return the options of the operator for `batch` entries."""
        return AttentionOptions(
            heads=self.heads,
            batch=batch,
            norm_eps=self.norm.eps,
            norm_src_eps=self.norm_src.eps,
            query_norm_eps=self.query_norm_eps,
            key_norm_eps=self.key_norm_eps,
            dtype=self.product_dtype,
        )


class HeadNorm(NamedTuple):
    """A norm of queries or keys, over the channels of a head."""

    scale: Tensor | None
    eps: float


NO_HEAD_NORM = HeadNorm(None, 0.0)


class CannotFuseError(Exception):
    """The reason why a sub-layer cannot be fused, its only argument; never leaves this module.

    It is read as `args[0]`, because torch.compile cannot trace `str` of an exception before torch
    2.13.
    """


def feed_forward_parts(
    norm: Submodule,
    mlp: Submodule,
    *,
    norm_name: str = "layer_norm_mlp_dst",
    mlp_name: str = "node_dst_mlp",
) -> FeedForwardParts | str:
    """Return the parts of `x + mlp(norm(x))`, or the reason why it cannot be fused.

    Parameters
    ----------
    norm, mlp : nn.Module
        Of any block with such a residual connection.
    norm_name, mlp_name : str
        Names of the modules in the block, for the reason.
    """
    try:
        return _read_feed_forward(norm, mlp, norm_name, mlp_name)
    except CannotFuseError as error:
        reason: str = error.args[0]
        return reason


def attention_parts(block: Any) -> AttentionParts | str:
    """Return the parts of the attention of a graph-transformer block, or why it cannot be fused.

    The network of edge attributes, `edge_pre_mlp`, is no part: its result is `edge_attr`.
    """
    try:
        return _read_attention(block)
    except CannotFuseError as error:
        reason: str = error.args[0]
        return reason


def _read_feed_forward(
    norm: Submodule,
    mlp: Submodule,
    norm_name: str,
    mlp_name: str,
) -> FeedForwardParts:
    if has_global_hooks():
        raise CannotFuseError(GLOBAL_HOOKS)
    norm_parts = _read_norm(norm, norm_name)
    # Up to anemoi-models 0.11 the network is the Sequential itself.
    layers, layers_name = mlp, mlp_name
    if type(mlp) is not nn.Sequential:
        _check_modules({mlp_name: mlp}, KnownClasses.mlp, "an MLP or a torch.nn.Sequential")
        if mlp._modules.get("layer_norm") is not None:
            raise CannotFuseError(f"its {mlp_name} ends with a norm")
        layers, layers_name = mlp._modules.get("mlp"), f"{mlp_name}.mlp"
    _check_modules({layers_name: layers}, (nn.Sequential,), "a torch.nn.Sequential")

    modules = tuple(layers._modules.values())
    weight_gate = bias_gate = None
    if len(modules) == 3:
        linear_in, activation, linear_out = modules
        (weight_in, bias_in), (weight_out, bias_out) = _read_linears(
            {f"{layers_name}.0": linear_in, f"{layers_name}.2": linear_out}
        )
        activation_name = f"{layers_name}.1"
    elif len(modules) == 2:
        gated, linear_out = modules
        gated_name = f"{layers_name}.0"
        _check_modules({gated_name: gated}, KnownClasses.gated_linear, "a gated linear map")
        children = gated._modules
        linears = {
            f"{gated_name}.gate_proj": children.get("gate_proj"),
            f"{gated_name}.value_proj": children.get("value_proj"),
            f"{layers_name}.1": linear_out,
        }
        gate, value, out = _read_linears(linears)
        weight_gate, bias_gate = gate
        weight_in, bias_in = value
        weight_out, bias_out = out
        activation, activation_name = children.get("gating"), f"{gated_name}.gating"
    else:
        raise CannotFuseError(
            f"its {layers_name} has {len(modules)} layers, and a linear map, an activation and a "
            "linear map, or a gated linear map and a linear map are needed"
        )

    hidden = weight_in.shape[0]
    features = norm_parts.features
    if weight_in.shape[1] != features:
        raise _shape_mismatch(weight_in, (hidden, features), layers_name, norm_name)
    if weight_out.shape != (features, hidden):
        raise _shape_mismatch(weight_out, (features, hidden), layers_name, norm_name)
    if weight_gate is not None and weight_gate.shape != weight_in.shape:
        raise _shape_mismatch(weight_gate, (hidden, features), layers_name, norm_name)
    return FeedForwardParts(
        norm=norm_parts,
        weight_gate=weight_gate,
        bias_gate=bias_gate,
        weight_in=weight_in,
        bias_in=bias_in,
        weight_out=weight_out,
        bias_out=bias_out,
        activation=_read_activation(activation, activation_name),
        has_condition=norm_parts.has_condition,
        dtype=weight_in.dtype,
        product_dtype=weight_in.dtype,
    )


def _read_attention(block: Any) -> AttentionParts:
    if has_global_hooks():
        raise CannotFuseError(GLOBAL_HOOKS)
    _check_dropout(block)
    modules = block._modules
    norm, norm_src = _read_attention_norms(modules)
    linears = {name: modules.get(name) for name in ATTENTION_LINEARS}
    query, self_term, key, value, edge, projection = _read_linears(linears)
    query_weight, query_bias = query
    self_weight, self_bias = self_term
    key_weight, key_bias = key
    value_weight, value_bias = value
    edge_weight, edge_bias = edge
    projection_weight, projection_bias = projection

    width = query_weight.shape[0]
    features = norm.features
    weights = {
        "lin_query": query_weight,
        "lin_self": self_weight,
        "lin_key": key_weight,
        "lin_value": value_weight,
    }
    for name, weight in weights.items():
        if weight.shape != (width, features):
            others = "layer_norm_attention" if name == "lin_query" else "lin_query"
            raise _shape_mismatch(weight, (width, features), name, others)
    if edge_weight.shape[0] != width:
        raise _shape_mismatch(edge_weight, (width, edge_weight.shape[1]), "lin_edge", "lin_query")
    if projection_weight.shape != (features, width):
        raise _shape_mismatch(projection_weight, (features, width), "projection", "lin_query")
    if width > MOST_FEATURES:
        got = f"its queries have {width} features"
        raise CannotFuseError(f"{got}, and at most {MOST_FEATURES} are possible")
    if edge_weight.shape[1] >= MOST_ATTRIBUTES:
        got = f"its edges have {edge_weight.shape[1]} attributes"
        raise CannotFuseError(f"{got}, and at most {MOST_ATTRIBUTES - 1} are possible")

    heads = block.num_heads
    query_norm = key_norm = NO_HEAD_NORM
    # Anemoi's blocks have the flag, and norms only where it is set; ours have identities instead.
    if block.__dict__.get("qk_norm", True):
        query_norm, key_norm = _read_head_norms(modules, width // heads)
    return AttentionParts(
        norm=norm,
        norm_src=norm_src,
        query_weight=query_weight,
        query_bias=query_bias,
        self_weight=self_weight,
        self_bias=self_bias,
        key_weight=key_weight,
        key_bias=key_bias,
        value_weight=value_weight,
        value_bias=value_bias,
        edge_weight=edge_weight,
        edge_bias=edge_bias,
        projection_weight=projection_weight,
        projection_bias=projection_bias,
        query_norm_scale=query_norm.scale,
        query_norm_eps=query_norm.eps,
        key_norm_scale=key_norm.scale,
        key_norm_eps=key_norm.eps,
        heads=heads,
        has_condition=norm.has_condition,
        dtype=query_weight.dtype,
        product_dtype=query_weight.dtype,
    )


def _read_attention_norms(modules: dict[str, Submodule]) -> tuple[NormParts, NormParts]:
    """Return the norms of destinations and of sources, which are the same object in a processor."""
    dst = modules.get("layer_norm_attention")
    norm = _read_norm(dst, "layer_norm_attention")
    src = modules.get("layer_norm_attention_src")
    if src is None:
        return norm, norm
    # In a mapper the norm has two names. Anemoi calls it by one of them, this library by the other.
    if modules.get("layer_norm_attention_dest") is not dst:
        raise CannotFuseError("its layer_norm_attention_dest is not its layer_norm_attention")
    if src is dst:
        return norm, norm
    norm_src = _read_norm(src, "layer_norm_attention_src")
    if norm_src.features != norm.features:
        raise CannotFuseError("its norms of sources and destinations have different features")
    if norm_src.has_condition != norm.has_condition:
        raise CannotFuseError("one of its norms of sources and destinations takes a condition")
    return norm, norm_src


def _read_norm(norm: Submodule, name: str) -> NormParts:
    """Return the parts of a layer norm, plain or conditional."""
    scale: Tensor | None
    shift: Tensor | None
    has_condition = type(norm) in KnownClasses.conditional_norm
    if has_condition:
        _check_modules({name: norm}, KnownClasses.conditional_norm, "a ConditionalLayerNorm")
        children = norm._modules
        plain, plain_name = children.get("norm"), f"{name}.norm"
        _check_modules({plain_name: plain}, KnownClasses.layer_norm, "a torch.nn.LayerNorm")
        if any(parameter is not None for parameter in _read_parameters(plain, name)):
            raise CannotFuseError(f"its {plain_name} has parameters besides the condition's")
        (scale, scale_bias), (shift, shift_bias) = _read_linears(
            {f"{name}.scale": children.get("scale"), f"{name}.bias": children.get("bias")}
        )
        num_conditions = scale.shape[1]
        if scale_bias is None or shift_bias is None:
            raise CannotFuseError(f"its {name} has linear maps without a bias")
    else:
        plain = norm
        needed = "a LayerNorm or a ConditionalLayerNorm"
        _check_modules({name: plain}, KnownClasses.layer_norm, needed)
        scale, shift = _read_parameters(plain, name)
        scale_bias = shift_bias = None
    normalized_shape = plain.normalized_shape
    if len(normalized_shape) != 1:
        got = f"its {name} is over {len(normalized_shape)} dimensions"
        raise CannotFuseError(f"{got}, and one is needed")
    features = normalized_shape[0]
    shape: tuple[int, ...]
    if has_condition:
        shape = (features, num_conditions)
        scale_name, shift_name, others = f"{name}.scale", f"{name}.bias", f"{name}.scale"
    else:
        shape = (features,)
        scale_name, shift_name, others = name, name, "normalized_shape"
    # Kernels read `features` elements of both, or rows of them with a condition.
    if scale is not None and scale.shape != shape:
        raise _shape_mismatch(scale, shape, scale_name, "normalized_shape")
    if shift is not None and shift.shape != shape:
        raise _shape_mismatch(shift, shape, shift_name, others)
    if features > MOST_FEATURES:
        got = f"its {name} has {features} features"
        raise CannotFuseError(f"{got}, and at most {MOST_FEATURES} are possible")
    return NormParts(scale, shift, scale_bias, shift_bias, plain.eps, features, has_condition)


def _read_head_norms(modules: dict[str, Submodule], channels: int) -> tuple[HeadNorm, HeadNorm]:
    """Return the norms of queries and of keys."""
    named = {name: modules[name] for name in ("q_norm", "k_norm") if modules.get(name) is not None}
    _check_modules(named, (nn.Identity, *KnownClasses.layer_norm), "a LayerNorm")
    norms = {"q_norm": NO_HEAD_NORM, "k_norm": NO_HEAD_NORM}
    for name, norm in named.items():
        if type(norm) is nn.Identity:
            continue
        scale, shift = _read_parameters(norm, name)
        if shift is not None:
            raise CannotFuseError(f"its {name} has a bias")
        shape = tuple(norm.normalized_shape)
        if shape != (channels,):
            got = f"its {name} is over {shape}"
            raise CannotFuseError(f"{got}, and its heads have {channels} channels")
        if norm.eps <= 0.0:
            raise CannotFuseError(f"its {name} has eps {norm.eps}, and a positive number is needed")
        if scale is not None and scale.shape != shape:
            raise _shape_mismatch(scale, shape, name, "normalized_shape")
        norms[name] = HeadNorm(scale, norm.eps)
    return norms["q_norm"], norms["k_norm"]


def _read_linears(
    linears: dict[str, Submodule],
) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of linear maps, by their names in the block."""
    _check_modules(linears, (nn.Linear,), "a torch.nn.Linear")
    parameters = []
    for name, linear in linears.items():
        weight = linear._parameters.get("weight")
        bias = linear._parameters.get("bias")
        has_no_bias = bias is None and "bias" not in linear.__dict__
        if type(weight) is not nn.Parameter or not (has_no_bias or type(bias) is nn.Parameter):
            weight, bias = _read_parameters(linear, name)
            if weight is None:
                raise CannotFuseError(f"its {name} has no weight")
        parameters.append((weight, bias))
    return parameters


def _read_activation(activation: Submodule, name: str) -> str:
    """Return the name of an activation for the kernels."""
    kinds = (nn.GELU, *ACTIVATIONS)
    _check_modules({name: activation}, kinds, "a GELU, SiLU, ReLU or Sigmoid of torch.nn")
    if type(activation) is not nn.GELU:
        return ACTIVATIONS[type(activation)]
    return "gelu" if activation.approximate == "none" else "gelu_tanh"


def _read_parameters(module: Submodule, module_name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return `weight` and `bias` of a module, None where it has none."""
    parameters = []
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if parameter is None:
            parameter = module.__dict__.get(name)  # replicas of DataParallel hold plain tensors
        # Subclasses with their own data: DTensor, and quantisation of other libraries.
        is_plain = parameter is None or type(parameter) is nn.Parameter
        if not is_plain and hasattr(parameter, "__tensor_flatten__"):
            kind = _path(type(parameter))
            raise CannotFuseError(f"its {module_name} has a {name} of the tensor subclass {kind}")
        parameters.append(parameter)
    return parameters[0], parameters[1]


def _check_modules(
    modules: dict[str, Submodule],
    kinds: tuple[type[nn.Module], ...],
    needed: str,
) -> None:
    """Raise CannotFuseError unless calls of these modules would run `forward` of classes alone.

    `modules` are by their names in the block, `kinds` the classes, `needed` their name in words.
    """
    for name, module in modules.items():
        if type(module) not in kinds:
            if module is None:
                raise CannotFuseError(f"it has no {name}, and {needed} is needed")
            raise CannotFuseError(f"its {name} is a {_path(type(module))}, and {needed} is needed")
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or "forward" in module.__dict__
        ):
            _check_hooks(module, name)


def _check_hooks(module: nn.Module, name: str) -> None:
    """Raise CannotFuseError if a call of the module would run more than `forward` of its class."""
    has_forward_hooks = module._forward_hooks or module._forward_pre_hooks
    if has_forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise CannotFuseError(f"its {name} has hooks, which a fused sub-layer skips")
    # Offloading and quantisation of other libraries.
    if "forward" in module.__dict__:
        raise CannotFuseError(f"its {name} has a forward set on it, which a fused sub-layer skips")


def _check_dropout(block: Any) -> None:
    """Raise CannotFuseError if the attention drops weights now, or if its module has hooks."""
    dropout = block.__dict__.get("dropout", 0.0) if block.training else 0.0
    # Anemoi's attention is a module. Its class is not checked here: the integration knows it.
    conv = block._modules.get("conv")
    if conv is not None:
        _check_modules({"conv": conv}, (type(conv),), "")
        if conv.training:
            dropout = conv.__dict__.get("dropout", 0.0)
    if dropout:
        raise CannotFuseError("its attention drops weights in training")


def _shape_mismatch(
    parameter: Tensor, shape: tuple[int, ...], name: str, others: str
) -> CannotFuseError:
    """Return the reason why a parameter of another shape than `shape` cannot be used."""
    got = f"its {name} has a parameter {tuple(parameter.shape)}"
    return CannotFuseError(f"{got}, and its {others} needs {tuple(shape)}")


def _path(kind: type) -> str:
    """Return the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"
