"""Parts of fused sub-layers of a block, and of linear layers, or the refusal of one.

    attention       z_i = x_i + W_proj (edge attention of n + W_self n_i) + b,   n = norm(x)
    feed-forward    y_i = z_i + W_out act(W_in norm(z_i) + b) + b
    linear          y_i = W norm(x_i) + b, or W x_i + b

`attention_parts` and `feed_forward_parts` read the modules of a block of this library or of Anemoi,
whose submodules have the same names, `linear_parts` reads a layer of a mapper. A fused sub-layer
uses parameters without calling their modules, so these must be plain (`nn.plain`), with plain
tensors as parameters. Whatever else a module is, the refusal names it; that costs its own sub-layer
only.

Ask once per call of a block and hand the answer down. Nothing is remembered between calls: the
answer depends on mutable modules, and to read them takes no longer than to compare them with what
they were. It is 25 to 30 us a block, and torch.compile turns it into guards. All modules of a
sub-layer are asked for by one call of the rule, and read afterwards.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.nn import plain
from anemoi_gt.nn.plain import why_not_plain, why_not_plain_tensor
from anemoi_gt.ops.activations import ACTIVATION_NAMES
from anemoi_gt.ops.backends import Sublayer, Sublayers
from anemoi_gt.ops.tensors import (
    AttentionOptions,
    AttentionTensors,
    Layer,
    Linear,
    Network,
    NetworkOptions,
    NetworkTensors,
    Norm,
    NormOptions,
)
from anemoi_gt.refusal import Refusal, permanent
from anemoi_gt.torch_compat import constant_when_traced

# (sources, destinations); sources are None on one set of nodes with one norm
Nodes = tuple[Tensor | None, Tensor]
Conditions = tuple[Tensor | None, Tensor | None]  # of sources and of destinations

# A module of a block, or None; its attributes are known once its class is checked.
Submodule = Any

DOUBLE = torch.float64
EPS = torch.finfo(torch.float32).eps  # of an RMSNorm whose eps is None, for 16-bit rows too
HEAD_NORMS = ("q_norm", "k_norm")
# Roles that the modules of a sub-layer must have.
LINEAR, SEQUENTIAL = (plain.LINEAR,), (plain.SEQUENTIAL,)
NORM = (plain.LAYER_NORM, plain.RMS_NORM, plain.CONDITIONAL_NORM)
LAYER_NORM = (plain.LAYER_NORM,)
HEAD_NORM = (plain.LAYER_NORM, plain.RMS_NORM, plain.IDENTITY)
MLP = (plain.MLP, plain.SEQUENTIAL)
GATED_LINEAR, ACTIVATION = (plain.GATED_LINEAR,), (plain.ACTIVATION,)
NO_LAYER: Layer[Tensor] = Layer()
NO_NORM: Norm[Tensor] = Norm()
NO_NORM_OPTIONS = NormOptions()
WITHOUT_CONDITION = (nn.LayerNorm, nn.RMSNorm)
ATTENTION_LINEARS = ("lin_query", "lin_self", "lin_key", "lin_value", "lin_edge", "projection")


class NormParts(NamedTuple):
    """Parameters and options of a norm; its condition comes with a call."""

    parameters: Norm[Tensor]
    options: NormOptions
    features: int
    has_condition: bool
    is_double: bool | None  # whether its parameters are float64; None without parameters


class FeedForwardParts(NamedTuple):
    """Parameters and options of a feed-forward sub-layer."""

    sublayer: Sublayer  # of `tensors` and `options`
    norm: NormParts
    gate: Linear[Tensor]
    hidden: Linear[Tensor]
    out: Linear[Tensor]
    activation: str
    has_condition: bool  # whether the norm needs a condition; if not, it takes none
    dtype: torch.dtype  # of the parameters
    gemm_dtype: torch.dtype  # the parameters', or in a call autocast's
    keep_hidden: bool = True  # whether a call keeps its hidden layer for the backward pass

    def tensors(self, x: Tensor, condition: Tensor | None) -> NetworkTensors:
        """Return the tensors of a call on rows x [N, F], with a condition [N, K] or None."""
        norm = self.norm.parameters._replace(condition=condition)
        network = Network(Layer(self.gate, self.hidden), NO_LAYER, self.out, NO_NORM)
        return NetworkTensors(x, None, norm, network)

    def options(self) -> NetworkOptions:
        """Return the options of the operator."""
        return NetworkOptions(
            norm=NO_NORM_OPTIONS,
            activation=self.activation,
            gemm_dtype=self.gemm_dtype,
            out_dtype=self.gemm_dtype,
            residual=True,
            norm_in=self.norm.options,
            keep_hidden=self.keep_hidden,
        )


class AttentionParts(NamedTuple):
    """Parameters and options of an attention sub-layer."""

    sublayer: Sublayer  # of `tensors`, a graph and `options`
    norm: NormParts  # of destinations
    norm_src: NormParts  # of sources; `norm` itself if the block has one norm
    query: Linear[Tensor]
    self_term: Linear[Tensor]
    key: Linear[Tensor]
    value: Linear[Tensor]
    edge: Linear[Tensor]
    projection: Linear[Tensor]
    query_norm: "HeadNorm"
    key_norm: "HeadNorm"
    heads: int
    has_condition: bool  # whether both norms need a condition; if not, neither takes one
    dtype: torch.dtype  # of the parameters
    gemm_dtype: torch.dtype  # the parameters', or in a call autocast's

    def tensors(
        self,
        x: Nodes,
        edge_attr: Tensor,
        cond: Conditions,
        halo: Tensor | None,
    ) -> AttentionTensors:
        """Return the tensors of a call, as `fused_block.attention` takes them, but all as rows."""
        x_src, x_dst = x
        cond_src, cond_dst = cond
        norm_src: Norm[Tensor] = Norm()
        if x_src is not None:
            norm_src = self.norm_src.parameters._replace(condition=cond_src)
        return AttentionTensors(
            x_src=x_src,
            halo=halo,
            x_dst=x_dst,
            edge_attr=edge_attr,
            norm=self.norm.parameters._replace(condition=cond_dst),
            norm_src=norm_src,
            query=self.query,
            self_term=self.self_term,
            key=self.key,
            value=self.value,
            edge=self.edge,
            projection=self.projection,
            query_scale=self.query_norm.scale,
            key_scale=self.key_norm.scale,
        )

    def options(self, batch: int) -> AttentionOptions:
        """Return the options of the operator for `batch` entries."""
        return AttentionOptions(
            heads=self.heads,
            batch=batch,
            norm=self.norm.options,
            norm_src=self.norm_src.options,
            query_norm=self.query_norm.options,
            key_norm=self.key_norm.options,
            gemm_dtype=self.gemm_dtype,
        )


class LinearParts(NamedTuple):
    """Parameters and options of a linear layer, perhaps after a norm."""

    sublayer: Sublayer  # of `tensors` and `options`
    norm: NormParts | None
    linear: Linear[Tensor]
    has_condition: bool  # whether the norm needs a condition
    dtype: torch.dtype  # of the parameters
    gemm_dtype: torch.dtype  # the parameters', or in a call autocast's

    def tensors(self, x: Tensor) -> NetworkTensors:
        """Return the tensors of a call on rows x [N, F]."""
        norm = NO_NORM if self.norm is None else self.norm.parameters
        network = Network(NO_LAYER, NO_LAYER, self.linear, NO_NORM)
        return NetworkTensors(x, None, norm, network)

    def options(self) -> NetworkOptions:
        """Return the options of the operator."""
        return NetworkOptions(
            norm=NO_NORM_OPTIONS,
            activation="",  # of hidden layers, which there are none of
            gemm_dtype=self.gemm_dtype,
            out_dtype=self.gemm_dtype,
            residual=False,
            norm_in=NO_NORM_OPTIONS if self.norm is None else self.norm.options,
        )


class HeadNorm(NamedTuple):
    """A norm of queries or keys, over the channels of a head."""

    scale: Tensor | None
    options: NormOptions


NO_HEAD_NORM = HeadNorm(None, NormOptions())


class CannotFuseError(Exception):
    """The refusal of a sub-layer, its only argument; never leaves this module.

    It is read as `args[0]`, because torch.compile cannot trace other attributes of an exception
    before torch 2.13.
    """


def feed_forward_parts(
    norm: Submodule,
    mlp: Submodule,
    sublayers: Sublayers,
    *,
    norm_name: str = "layer_norm_mlp_dst",
    mlp_name: str = "node_dst_mlp",
) -> FeedForwardParts | Refusal:
    """Return the parts of `x + mlp(norm(x))`, or why it cannot be fused.

    Parameters
    ----------
    norm, mlp : nn.Module
        Of any block with such a residual connection.
    sublayers : Sublayers
        Of the backend that is to compute it, for its limits.
    norm_name, mlp_name : str
        Names of the modules in the block, for the text of a refusal.
    """
    try:
        return _read_feed_forward(norm, mlp, sublayers, norm_name, mlp_name)
    except CannotFuseError as error:
        refusal: Refusal = error.args[0]
        return refusal


def attention_parts(block: Any, sublayers: Sublayers) -> AttentionParts | Refusal:
    """Return the parts of the attention of a graph-transformer block, or why it cannot be fused.

    The network of edge attributes, `edge_pre_mlp`, is no part: its result is `edge_attr`.
    """
    try:
        return _read_attention(block, sublayers)
    except CannotFuseError as error:
        refusal: Refusal = error.args[0]
        return refusal


def linear_parts(layer: Submodule, name: str, sublayers: Sublayers) -> LinearParts | Refusal:
    """Return the parts of a linear map, or of a norm and a linear map in a Sequential, or why not.

    It is `name` in its mapper.
    """
    try:
        return _read_linear_layer(layer, name, sublayers)
    except CannotFuseError as error:
        refusal: Refusal = error.args[0]
        return refusal


def linear_parameters(
    linear: Submodule, name: str, role: str = plain.LINEAR
) -> tuple[Tensor, Tensor | None] | Refusal:
    """Return weight and bias of a linear map, to be used in its place, or why it must be called.

    It has the role `role` of `nn.plain`, and is `name` in its block or layer.
    """
    refused = why_not_plain((name, linear, (role,)))
    if refused is not None:
        return refused
    try:
        return read_linears({name: linear})[0]
    except CannotFuseError as error:
        refusal: Refusal = error.args[0]
        return refusal


@constant_when_traced
def warn_of_embedded_edges(text: str) -> None:
    """Warn that edges are embedded before the attention, for the reason in `text`."""
    warnings.warn(
        f"edge attributes are embedded into a tensor [E, H, C] before the attention: {text}",
        stacklevel=3,
    )


def _read_linear_layer(layer: Submodule, name: str, sublayers: Sublayers) -> LinearParts | Refusal:
    asked: list[plain.Asked] = []
    norm: Submodule = None
    linear, linear_name = layer, name
    if isinstance(layer, nn.Sequential):
        asked.append((name, layer, SEQUENTIAL))
        modules = tuple(layer._modules.values())
        if len(modules) != 2:
            raise cannot_fuse(
                f"its {name} has {len(modules)} layers, and a norm and a linear map are needed"
            )
        norm, linear = modules
        linear_name = f"{name}.1"
        asked += _asked_of_norm(norm, f"{name}.0")
    asked.append((linear_name, linear, LINEAR))
    refusal = why_not_plain(*asked)
    if refusal is not None:
        return refusal
    norm_parts = None
    if norm is not None:
        norm_parts = read_norm(norm, f"{name}.0", sublayers)
    (parameters,) = read_linears({linear_name: linear})
    weight = parameters.weight
    if norm_parts is not None and norm_parts.is_double not in (None, weight.dtype is DOUBLE):
        raise other_precision(f"{name}.0")
    if norm_parts is not None and weight.shape[1] != norm_parts.features:
        shape = (weight.shape[0], norm_parts.features)
        raise shape_mismatch(weight, shape, linear_name, f"{name}.0")
    return LinearParts(
        sublayer=sublayers.network,
        norm=norm_parts,
        linear=parameters,
        has_condition=norm_parts is not None and norm_parts.has_condition,
        dtype=weight.dtype,
        gemm_dtype=weight.dtype,
    )


def _read_feed_forward(
    norm: Submodule,
    mlp: Submodule,
    sublayers: Sublayers,
    norm_name: str,
    mlp_name: str,
) -> FeedForwardParts | Refusal:
    asked = _asked_of_norm(norm, norm_name)
    # Up to anemoi-models 0.11 the network is the Sequential itself.
    layers, layers_name = mlp, mlp_name
    if type(mlp) is not nn.Sequential:
        asked.append((mlp_name, mlp, MLP))
        layers, layers_name = child_of(mlp, "mlp"), f"{mlp_name}.mlp"
    asked.append((layers_name, layers, SEQUENTIAL))
    modules = tuple(layers._modules.values()) if isinstance(layers, nn.Module) else ()
    gated: Submodule = None
    activation: Submodule
    if len(modules) == 3:
        linear_in, activation, linear_out = modules
        hidden_name, out_name = f"{layers_name}.0", f"{layers_name}.2"
        activation_name = f"{layers_name}.1"
    elif len(modules) == 2:
        gated, linear_out = modules
        gated_name, out_name = f"{layers_name}.0", f"{layers_name}.1"
        gate_name, hidden_name = f"{gated_name}.gate_proj", f"{gated_name}.value_proj"
        activation_name = f"{gated_name}.gating"
        linear_in, activation = child_of(gated, "value_proj"), child_of(gated, "gating")
        asked.append((gated_name, gated, GATED_LINEAR))
        asked.append((gate_name, child_of(gated, "gate_proj"), LINEAR))
    else:
        refusal = why_not_plain(*asked)
        if refusal is not None:
            return refusal
        raise cannot_fuse(
            f"its {layers_name} has {len(modules)} layers, and a linear map, an activation and a "
            "linear map, or a gated linear map and a linear map are needed"
        )
    asked.append((hidden_name, linear_in, LINEAR))
    asked.append((out_name, linear_out, LINEAR))
    asked.append((activation_name, activation, ACTIVATION))
    refusal = why_not_plain(*asked)
    if refusal is not None:
        return refusal

    approximate = activation.__dict__.get("approximate")  # of a GELU
    kernel_activation = ACTIVATION_NAMES.get((type(activation), approximate))
    if kernel_activation is None:
        got = f"its {activation_name} has approximate={approximate!r}"
        raise cannot_fuse(f"{got}, and 'none' or 'tanh' is needed")
    if layers is not mlp and getattr(mlp, "layer_norm", None) is not None:
        raise cannot_fuse(f"its {mlp_name} ends with a norm")
    norm_parts = read_norm(norm, norm_name, sublayers)
    hidden, out = read_linears({hidden_name: linear_in, out_name: linear_out})
    if norm_parts.is_double not in (None, hidden.weight.dtype is DOUBLE):
        raise other_precision(norm_name)
    gate: Linear[Tensor] = Linear()
    if gated is not None:
        (gate,) = read_linears({gate_name: gated._modules["gate_proj"]})
    num_hidden, num_inputs = hidden.weight.shape
    features = norm_parts.features
    if num_inputs != features:
        raise shape_mismatch(hidden.weight, (num_hidden, features), layers_name, norm_name)
    if out.weight.shape != (features, num_hidden):
        raise shape_mismatch(out.weight, (features, num_hidden), layers_name, norm_name)
    if gate.weight is not None and gate.weight.shape != hidden.weight.shape:
        raise shape_mismatch(gate.weight, (num_hidden, features), layers_name, norm_name)
    return FeedForwardParts(
        sublayer=sublayers.network,
        norm=norm_parts,
        gate=gate,
        hidden=hidden,
        out=out,
        activation=kernel_activation,
        has_condition=norm_parts.has_condition,
        dtype=hidden.weight.dtype,
        gemm_dtype=hidden.weight.dtype,
    )


def _read_attention(block: Any, sublayers: Sublayers) -> AttentionParts | Refusal:
    modules = block._modules
    # Anemoi's attention is a module, which its integration has found to be plain, or a function.
    attention = modules.get("conv", block)
    if attention.__dict__.get("dropout", 0.0) and attention.training:
        raise cannot_fuse("its attention drops weights in training")

    norm_dst = modules.get("layer_norm_attention")
    norm_src = modules.get("layer_norm_attention_src", norm_dst)  # of a mapper
    asked = _asked_of_norm(norm_dst, "layer_norm_attention")
    if norm_src is not norm_dst:
        asked += _asked_of_norm(norm_src, "layer_norm_attention_src")
    linears = {name: modules.get(name) for name in ATTENTION_LINEARS}
    for name, linear in linears.items():
        asked.append((name, linear, LINEAR))
    # Anemoi's blocks have the flag, and norms only where it is set; ours have identities instead.
    has_head_norms = block.__dict__.get("qk_norm", True)
    for name in HEAD_NORMS if has_head_norms else ():
        if modules.get(name) is not None:
            asked.append((name, modules[name], HEAD_NORM))
    refusal = why_not_plain(*asked)
    if refusal is not None:
        return refusal

    norm = read_norm(norm_dst, "layer_norm_attention", sublayers)
    norm_of_sources = norm
    # In a mapper the norm has two names. Anemoi calls it by one of them, this library by the other.
    if modules.get("layer_norm_attention_dest", norm_dst) is not norm_dst:
        raise cannot_fuse("its layer_norm_attention_dest is not its layer_norm_attention")
    if norm_src is not norm_dst:
        norm_of_sources = read_norm(norm_src, "layer_norm_attention_src", sublayers)
    if norm_of_sources.features != norm.features:
        raise cannot_fuse("its norms of sources and destinations have different features")
    if norm_of_sources.has_condition != norm.has_condition:
        raise cannot_fuse("one of its norms of sources and destinations takes a condition")
    query, self_term, key, value, edge, projection = read_linears(linears)
    is_double = query.weight.dtype is DOUBLE
    if norm.is_double not in (None, is_double):
        raise other_precision("layer_norm_attention")
    if norm_of_sources.is_double not in (None, is_double):
        raise other_precision("layer_norm_attention_src")
    width = query.weight.shape[0]
    features = norm.features
    shape = (width, features)
    if query.weight.shape != shape:
        raise shape_mismatch(query.weight, shape, "lin_query", "layer_norm_attention")
    if self_term.weight.shape != shape:
        raise shape_mismatch(self_term.weight, shape, "lin_self", "lin_query")
    if key.weight.shape != shape:
        raise shape_mismatch(key.weight, shape, "lin_key", "lin_query")
    if value.weight.shape != shape:
        raise shape_mismatch(value.weight, shape, "lin_value", "lin_query")
    edge_width, num_attributes = edge.weight.shape
    if edge_width != width:
        raise shape_mismatch(edge.weight, (width, num_attributes), "lin_edge", "lin_query")
    if projection.weight.shape != (features, width):
        raise shape_mismatch(projection.weight, (features, width), "projection", "lin_query")
    if width > sublayers.max_features:
        got = f"its queries have {width} features"
        raise cannot_fuse(f"{got}, and more than {sublayers.max_features} are not measured")
    if num_attributes > sublayers.max_attributes:
        got = f"its edges have {num_attributes} attributes"
        raise cannot_fuse(f"{got}, and at most {sublayers.max_attributes} are possible")

    heads = block.num_heads
    query_norm = key_norm = NO_HEAD_NORM
    if has_head_norms:
        query_norm, key_norm = _read_head_norms(modules, width // heads, query.weight)
    return AttentionParts(
        sublayer=sublayers.attention,
        norm=norm,
        norm_src=norm_of_sources,
        query=query,
        self_term=self_term,
        key=key,
        value=value,
        edge=edge,
        projection=projection,
        query_norm=query_norm,
        key_norm=key_norm,
        heads=heads,
        has_condition=norm.has_condition,
        dtype=query.weight.dtype,
        gemm_dtype=query.weight.dtype,
    )


def _asked_of_norm(norm: Submodule, name: str) -> list[plain.Asked]:
    """Return a norm, and the children of a conditional one, for `why_not_plain`."""
    asked: list[plain.Asked] = [(name, norm, NORM)]
    if not isinstance(norm, WITHOUT_CONDITION):
        asked += asked_of_children(norm, name)
    return asked


def asked_of_children(norm: Submodule, name: str) -> list[plain.Asked]:
    """Return the children of a conditional norm for `why_not_plain`."""
    return [
        (f"{name}.norm", child_of(norm, "norm"), LAYER_NORM),
        (f"{name}.scale", child_of(norm, "scale"), LINEAR),
        (f"{name}.bias", child_of(norm, "bias"), LINEAR),
    ]


def is_conditional(norm: Submodule) -> bool:
    """Return whether a norm is no class without a condition."""
    return norm is not None and not isinstance(norm, (*WITHOUT_CONDITION, nn.Identity))


def read_norm(norm: Submodule, name: str, sublayers: Sublayers) -> NormParts:
    """Return the parts of a layer norm, plain or conditional, or of an RMSNorm."""
    scale: Any
    shift: Any
    has_condition = not isinstance(norm, WITHOUT_CONDITION)
    if has_condition:
        children = norm._modules
        inner = children["norm"]
        if _read_parameters(inner, name) != (None, None):
            raise cannot_fuse(f"its {name}.norm has its own affine parameters")
        (scale, scale_bias), (shift, shift_bias) = read_linears(
            {f"{name}.scale": children["scale"], f"{name}.bias": children["bias"]}
        )
        num_conditions = scale.shape[1]
        if scale_bias is None or shift_bias is None:
            raise cannot_fuse(f"its {name} has linear maps without a bias")
    else:
        inner = norm
        scale, shift = _read_parameters(inner, name)
        scale_bias = shift_bias = None
    normalized_shape = inner.normalized_shape
    if len(normalized_shape) != 1:
        got = f"its {name} is over {len(normalized_shape)} dimensions"
        raise cannot_fuse(f"{got}, and one is needed")
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
        raise shape_mismatch(scale, shape, scale_name, "normalized_shape")
    if shift is not None and shift.shape != shape:
        raise shape_mismatch(shift, shape, shift_name, others)
    if features > sublayers.max_features:
        got = f"its {name} has {features} features"
        raise cannot_fuse(f"{got}, and more than {sublayers.max_features} are not measured")
    parameters: Norm[Tensor] = Norm(scale, shift)
    if has_condition:
        parameters = Norm(scale_map=Linear(scale, scale_bias), shift_map=Linear(shift, shift_bias))
    options = NormOptions(EPS if inner.eps is None else inner.eps, type(inner) is not nn.RMSNorm)
    is_double = None if scale is None else scale.dtype is DOUBLE
    return NormParts(parameters, options, features, has_condition, is_double)


def other_precision(name: str) -> CannotFuseError:
    """Return the error for a norm in float64 among linear maps that are not, or the reverse."""
    return cannot_fuse(f"its {name} and its linear maps are not both float64")


def _read_head_norms(
    modules: dict[str, Submodule], channels: int, weight: Tensor
) -> tuple[HeadNorm, HeadNorm]:
    """Return the norms of queries and of keys, for linear maps with weights like `weight`."""
    norms = {"q_norm": NO_HEAD_NORM, "k_norm": NO_HEAD_NORM}
    for name in HEAD_NORMS:
        norm = modules.get(name)
        if norm is None or type(norm) is nn.Identity:
            continue
        scale, shift = _read_parameters(norm, name)
        if scale is not None and (scale.dtype is DOUBLE) != (weight.dtype is DOUBLE):
            raise other_precision(name)
        if shift is not None:
            raise cannot_fuse(f"its {name} has a bias")
        shape = tuple(norm.normalized_shape)
        if shape != (channels,):
            got = f"its {name} is over {shape}"
            raise cannot_fuse(f"{got}, and its heads have {channels} channels")
        options = NormOptions(EPS if norm.eps is None else norm.eps, type(norm) is not nn.RMSNorm)
        if options.eps <= 0.0:
            raise cannot_fuse(f"its {name} has eps {norm.eps}, and a positive number is needed")
        if scale is not None and scale.shape != shape:
            raise shape_mismatch(scale, shape, name, "normalized_shape")
        norms[name] = HeadNorm(scale, options)
    return norms["q_norm"], norms["k_norm"]


def read_linears(linears: dict[str, Submodule]) -> list[Linear[Tensor]]:
    """Return weight and bias of linear maps; `linears` are by name in the block."""
    read = []
    for name, linear in linears.items():
        parameters = linear._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        has_no_bias = bias is None and "bias" not in linear.__dict__
        if type(weight) is not nn.Parameter or not (has_no_bias or type(bias) is nn.Parameter):
            weight, bias = _read_parameters(linear, name)
            if weight is None:
                raise cannot_fuse(f"its {name} has no weight")
        read.append(Linear(weight, bias))
    # PyTorch multiplies no matrices of both, also not under autocast
    if len({linear.weight.dtype is DOUBLE for linear in read}) > 1:
        raise cannot_fuse(f"some of its {', '.join(linears)} are float64, and others are not")
    return read


def _read_parameters(module: Submodule, module_name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return `weight` and `bias` of a module, None where it has none."""
    read = []
    parameters = module._parameters
    for name in ("weight", "bias"):
        parameter = parameters.get(name)
        if type(parameter) is not nn.Parameter:
            if parameter is None:  # replicas of DataParallel hold plain tensors
                parameter = module.__dict__.get(name)
            refusal = why_not_plain_tensor(f"its {module_name} has a {name}", parameter)
            if refusal is not None:
                raise CannotFuseError(refusal)
        read.append(parameter)
    return read[0], read[1]


def child_of(module: Submodule, name: str) -> Submodule:
    """Return a submodule, or None if there is none; the module may be anything."""
    return module._modules.get(name) if isinstance(module, nn.Module) else None


def shape_mismatch(
    parameter: Tensor, shape: tuple[int, ...], name: str, others: str
) -> CannotFuseError:
    """Return the error for a parameter of another shape than `shape`."""
    got = f"its {name} has a parameter {tuple(parameter.shape)}"
    return cannot_fuse(f"{got}, and its {others} needs {tuple(shape)}")


def cannot_fuse(text: str) -> CannotFuseError:
    return CannotFuseError(permanent(text))
