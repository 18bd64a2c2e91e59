"""Modules of sub-layers, networks and linear layers as operators read them, or the refusal of one.

    attention       z_i = x_i + W_proj (edge attention of n + W_self n_i) + b,   n = norm(x)
    network         y_i = norm(W_out act(W_2 act(W_1 u_i + b) + b) + b),         u_i = norm_in(x_i)

`read_attention` and `read_network` read the modules of a block of this library or of Anemoi,
whose submodules have the same names, `read_linear` a network without hidden layers. A fused
sub-layer uses parameters without calling their modules, so these must be plain (`nn.plain`), with
plain tensors as parameters. Whatever else a module is, the refusal names it; that costs its own
sub-layer only.

Ask once per call of a block and hand the answer down. Answers are kept while the modules are
unchanged (`nn.unchanged`); torch.compile turns them into guards. All modules of a sub-layer are
asked for by one call of the rule, and read afterwards.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn import plain
from anemoi_gt.nn.plain import why_not_plain, why_not_plain_tensor
from anemoi_gt.ops.activations import ACTIVATION_NAMES
from anemoi_gt.ops.backend import Backend, Dtypes
from anemoi_gt.ops.backends import choose_backend
from anemoi_gt.ops.dtypes import autocast_is_active
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
from anemoi_gt.ops.tree import leaves
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
WITHOUT_CONDITION = (nn.LayerNorm, nn.RMSNorm, nn.Identity)
NO_SUBLAYERS = permanent("the backend of its attention has no fused sub-layers")
Result = TypeVar("Result")
ATTENTION_LINEARS = ("lin_query", "lin_self", "lin_key", "lin_value", "lin_edge", "projection")


def dtypes_of(x: Tensor) -> Dtypes:
    """Return the dtypes of a layer on features like x."""
    device_type, dtype = x.device.type, x.dtype
    is_autocast = autocast_is_active(device_type)
    if is_autocast and dtype is not DOUBLE:  # as `autocast_dtype`, which asks for the device again
        dtype = torch.get_autocast_dtype(device_type)
    return Dtypes(dtype, is_autocast)


class Computation(NamedTuple):
    """Dtype, backend and kept tensors of a call, decided once from its features and settings."""

    gemm_dtype: torch.dtype
    is_autocast: bool  # whether autocast is active
    backend: Backend
    keep_hidden: bool = True  # whether fused feed-forward sub-layers keep their hidden layer
    replay: bool = True  # as in `KernelConfig`

    @classmethod
    def of(
        cls,
        x: Tensor,
        config: KernelConfig,
        *,
        keep_hidden: bool = True,
        dtypes: Dtypes | None = None,
    ) -> "Computation":
        """Choose the backend for features like x. Raise like `edge_attention`.

        `dtypes` are `dtypes_of(x)`, where the caller has read them.
        """
        dtypes = dtypes_of(x) if dtypes is None else dtypes
        backend = choose_backend(config.backend, {"features": x.shape[-1]}, dtypes, x.device)
        return cls(*dtypes, backend, keep_hidden, config.replay)

    @property
    def is_faster_fused(self) -> bool:
        """Whether the backend is faster than modules, of what it has."""
        return self.backend.is_faster(Dtypes(self.gemm_dtype, self.is_autocast))


class NormModule(NamedTuple):
    """Parameters and options of a norm; its condition comes with a call."""

    parameters: Norm[Tensor]
    options: NormOptions
    features: int
    has_condition: bool


NO_NORM_MODULE = NormModule(NO_NORM, NO_NORM_OPTIONS, 0, has_condition=False)


class NetworkModules(NamedTuple):
    """Parameters and options of a network on rows; only one of its norms may take a condition."""

    computation: Computation
    compute: Callable[..., Tensor]  # of `tensors` and `options`
    norm_in: NormModule  # of its input; without one NO_NORM_MODULE
    network: Network[Tensor]
    norm: NormOptions  # of its output; eps 0 without one
    activation: str  # "" without hidden layers
    is_cast: bool  # whether its result has the dtype of the GEMMs under autocast too
    has_condition: bool  # whether a norm needs a condition; if not, the network takes none
    dtype: torch.dtype  # of the parameters

    def tensors(
        self, x: Tensor, more: Tensor | None = None, condition: Tensor | None = None
    ) -> NetworkTensors:
        """Return the tensors of a call on rows x [N, F], and `more` beside them.

        `condition` is [N, K], None without one.
        """
        norm_in = self.norm_in.parameters
        network = self.network
        if self.norm_in.has_condition:
            norm_in = norm_in._replace(condition=condition)
        elif condition is not None:
            network = self.network_with(condition)
        return NetworkTensors(x, more, norm_in, network)

    def network_with(self, condition: Tensor) -> Network[Tensor]:
        """Return the parameters, with the condition [N, K] of the norm of the output."""
        return self.network._replace(norm=self.network.norm._replace(condition=condition))

    def options(
        self,
        *,
        residual: bool,
        repeats_x: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> NetworkOptions:
        """Return the options of a call; `out_dtype` None is the dtype of the GEMMs."""
        dtype = self.computation.gemm_dtype
        return NetworkOptions(
            norm=self.norm,
            activation=self.activation,
            gemm_dtype=dtype,
            out_dtype=dtype if out_dtype is None else out_dtype,
            residual=residual,
            repeats_x=repeats_x,
            norm_in=self.norm_in.options,
            keep_hidden=self.computation.keep_hidden,
            replay=self.computation.replay,
        )


class AttentionModules(NamedTuple):
    """Parameters and options of an attention sub-layer."""

    computation: Computation
    compute: Callable[..., Tensor]  # of `tensors`, a graph and `options`
    parameters: AttentionTensors  # without rows
    has_one_norm: bool  # for both sets; PyTorch 2.9 cannot trace whether two tuples are the same
    options: AttentionOptions  # of one batch entry
    has_condition: bool  # whether both norms need a condition; if not, neither takes one
    dtype: torch.dtype  # of the parameters

    def followed_by(self, network: NetworkModules) -> "AttentionModules":
        """Return the modules of a block as one operator, whose feed-forward network this is."""
        parameters = self.parameters._replace(
            norm_in=network.norm_in.parameters,
            hidden=network.network.first,
            out=network.network.out,
        )
        options = self.options._replace(
            norm_in=network.norm_in.options,
            activation=network.activation,
            keep_hidden=network.computation.keep_hidden,
        )
        return self._replace(parameters=parameters, options=options)

    def tensors(
        self, x: Nodes, edge_attr: Tensor, cond: Conditions, halo: Tensor | None
    ) -> AttentionTensors:
        """Return the tensors of a call on rows [B * N, F], with a condition for each or None."""
        x_src, x_dst = x
        cond_src, cond_dst = cond
        parameters = self.parameters
        norm, norm_src, norm_in = parameters.norm, parameters.norm_src, parameters.norm_in
        if cond_dst is not None:
            norm = norm._replace(condition=cond_dst)
            if parameters.out.weight is not None:  # with a feed-forward network
                norm_in = norm_in._replace(condition=cond_dst)
        if x_src is None:
            norm_src = NO_NORM
        elif cond_src is not None:
            norm_src = norm_src._replace(condition=cond_src)
        return parameters._replace(
            x_src=x_src,
            halo=halo,
            x_dst=x_dst,
            edge_attr=edge_attr,
            norm=norm,
            norm_src=norm_src,
            norm_in=norm_in,
        )


class CannotFuseError(Exception):
    """The refusal of a sub-layer, its only argument; never leaves this module.

    It is read as `args[0]`, because torch.compile cannot trace other attributes of an exception
    before torch 2.13.
    """


def or_refusal(read: Callable[..., Result]) -> Callable[..., Result | Refusal]:
    """Make a reader return the refusal of a `CannotFuseError` that it raises."""

    @wraps(read)
    def read_or_refuse(*args: Any, **kwargs: Any) -> Result | Refusal:
        try:
            return read(*args, **kwargs)
        except CannotFuseError as error:
            refusal: Refusal = error.args[0]
            return refusal

    return read_or_refuse


@or_refusal
def linear_parameters(
    linear: Submodule, name: str, role: str = plain.LINEAR
) -> tuple[Tensor, Tensor | None] | Refusal:
    """Return weight and bias of a linear map, to be used in its place, or why it must be called.

    It has the role `role` of `nn.plain`, and is `name` in its block or layer.
    """
    refusal = why_not_plain((name, linear, (role,)))
    if refusal is not None:
        return refusal
    return linear_of(linear, name)


def edge_operands(
    linear: nn.Module, edge_attr: Tensor, heads: int, role: str = plain.LINEAR
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the edge operands of an attention: attributes, embedding weight and bias.

    If `linear` must be called, because it is not plain, they are embedded edges, None and None.
    """
    embedding = linear_parameters(linear, "lin_edge", role)
    if isinstance(embedding, Refusal):
        _warn_of_embedded_edges(embedding.text)
        return linear(edge_attr).unflatten(-1, (heads, -1)), None, None
    return edge_attr, *embedding


@constant_when_traced
def _warn_of_embedded_edges(text: str) -> None:
    """Warn that edges are embedded before the attention, for the reason in `text`."""
    warnings.warn(
        f"edge attributes are embedded into a tensor [E, H, C] before the attention: {text}",
        stacklevel=4,
    )


@or_refusal
def read_linear(layer: Submodule, name: str, computation: Computation) -> NetworkModules | Refusal:
    """Return the modules of a linear map, or a norm and a linear map in a Sequential, or why not.

    It is `name` in its mapper.
    """
    backend = computation.backend
    if backend.network is None:
        return NO_SUBLAYERS
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
    parameters = linear_of(linear, linear_name)
    norm_in = NO_NORM_MODULE
    if norm is not None:
        norm_in = read_norm(norm, f"{name}.0", backend)
        shape = (parameters.weight.shape[0], norm_in.features)
        check_parameter(linear_name, parameters.weight, shape)
        check_precision(norm_in.parameters, parameters)
    return NetworkModules(
        computation=computation,
        compute=backend.network,
        norm_in=norm_in,
        network=Network(NO_LAYER, NO_LAYER, parameters, NO_NORM),
        norm=NO_NORM_OPTIONS,
        activation="",
        is_cast=True,
        has_condition=norm_in.has_condition,
        dtype=parameters.weight.dtype,
    )


@or_refusal
def read_network(
    mlp: Submodule,
    computation: Computation,
    name: str,
    *,
    norm_in: tuple[str, Submodule] | None = None,
    is_called: bool = False,
    norms: tuple[str, ...] = LAYER_NORM,
    is_edge_update: bool = False,
) -> NetworkModules | Refusal:
    """Return the modules of an MLP of one or two hidden layers, or why it cannot be fused.

    Parameters
    ----------
    mlp : nn.Module
        Of anemoi-models or of this library, with children `mlp` and `layer_norm`.
    computation : Computation
        Of the call.
    name : str
        In its block, for the text of a refusal.
    norm_in : (str, nn.Module), optional
        Name and module of the norm in a feed-forward sub-layer `x + mlp(norm(x))`. Its network has
        one hidden layer and no norm on its output, and may be a Sequential, as it is up to
        anemoi-models 0.11.
    is_called : bool
        Whether the MLP is called, and only its children are not.
    norms : tuple of str
        Roles of the norm on its output. An RMSNorm has another dtype under autocast than a layer
        norm, on some devices and versions of PyTorch: callers that keep what Anemoi returns do not
        admit it.
    is_edge_update : bool
        Whether the operator of an edge update computes it, not the operator of networks on rows.
    """
    backend = computation.backend
    compute = backend.edge_update if is_edge_update else backend.network
    if compute is None:
        return NO_SUBLAYERS
    is_feed_forward = norm_in is not None
    asked = [] if norm_in is None else _asked_of_norm(norm_in[1], norm_in[0])
    path = f"{name}." if name else ""
    layers, layers_name, norm = mlp, name, None
    if type(mlp) is not nn.Sequential or not is_feed_forward:
        if not is_called:
            asked.append((name, mlp, MLP if is_feed_forward else MLP[:1]))
        children = mlp._modules if isinstance(mlp, nn.Module) else {}
        layers, layers_name = children.get("mlp"), f"{path}mlp"
        norm, norm_name = children.get("layer_norm"), f"{path}layer_norm"
    asked.append((layers_name, layers, SEQUENTIAL))
    if norm is not None and not is_feed_forward:
        asked += _asked_of_norm(norm, norm_name, norms)
    gates: dict[str, Submodule] = {}  # of each hidden layer, if it has one
    linears: dict[str, Submodule] = {}
    activations: dict[str, Submodule] = {}
    form = ""  # a linear map "m", a gated layer "g", anything else "f"
    modules = layers._modules if isinstance(layers, nn.Module) else {}
    for key, module in modules.items():
        module_name = f"{layers_name}.{key}"
        if "gate_proj" in getattr(module, "_modules", ()):
            asked.append((module_name, module, GATED_LINEAR))
            gates[f"{module_name}.gate_proj"] = child_of(module, "gate_proj")
            linears[f"{module_name}.value_proj"] = child_of(module, "value_proj")
            activations[f"{module_name}.gating"] = child_of(module, "gating")
            form += "g"
        elif hasattr(module, "weight"):
            linears[module_name] = module
            form += "m"
        else:
            activations[module_name] = module
            form += "f"
    linears = gates | linears  # gates come first
    for linear_name, linear in linears.items():
        asked.append((linear_name, linear, LINEAR))
    for activation_name, activation in activations.items():
        asked.append((activation_name, activation, ACTIVATION))
    refusal = why_not_plain(*asked)
    if refusal is not None:
        return refusal

    num_hidden = len(activations)
    is_gated = len(gates) > 0
    expected = num_hidden * ("g" if is_gated else "mf") + "m"
    if not 1 <= num_hidden <= (1 if is_feed_forward else 2) or form != expected:
        number = "one hidden layer" if is_feed_forward else "one or two hidden layers"
        raise cannot_fuse(
            f"its {layers_name} has {len(modules)} layers, and {number} (a linear map and an "
            "activation, or a gated linear map) and a linear map are needed"
        )
    if norm is not None and is_feed_forward:
        raise cannot_fuse(f"its {name} ends with a norm")
    names = set()
    for activation_name, activation in activations.items():
        approximate = activation.__dict__.get("approximate")  # of a GELU
        known = ACTIVATION_NAMES.get((type(activation), approximate))
        if known is None:
            got = f"its {activation_name} has approximate={approximate!r}"
            raise cannot_fuse(f"{got}, and 'none' or 'tanh' is needed")
        names.add(known)
    if len(names) != 1:
        raise cannot_fuse(f"its {layers_name} has several kinds of activations")

    *values, out = [linear_of(linear, linear_name) for linear_name, linear in linears.items()]
    norm_of_input = norm_of_output = NO_NORM_MODULE
    width = values[0].weight.shape[1]
    features = out.weight.shape[0]
    if norm_in is not None:
        norm_of_input = read_norm(norm_in[1], norm_in[0], backend)
        width = features = norm_of_input.features  # a residual connection
    elif norm is not None and type(norm) is not nn.Identity:
        norm_of_output = read_norm(norm, norm_name, backend)
        features = norm_of_output.features
    hidden = []
    for index in range(num_hidden):
        layer = Layer(NO_LAYER.gate, values[index])
        if is_gated:
            layer = Layer(values[index], values[num_hidden + index])
        shape = (layer.value.weight.shape[0], width)
        for linear in layer:
            check_parameter(layers_name, linear.weight, shape)
        hidden.append(layer)
        width = shape[0]
    check_parameter(layers_name, out.weight, (features, width))
    check_limit(f"its {layers_name} returns {features} features", features, backend.max_features)
    check_precision(norm_of_input.parameters, *values, out, norm_of_output.parameters)
    second = hidden[1] if num_hidden == 2 else NO_LAYER
    return NetworkModules(
        computation=computation,
        compute=compute,
        norm_in=norm_of_input,
        network=Network(hidden[0], second, out, norm_of_output.parameters),
        norm=norm_of_output.options,
        activation=names.pop(),
        # Anemoi's AutocastLayerNorm casts its result to the dtype of its input
        is_cast=type(norm) is not nn.LayerNorm,
        has_condition=norm_of_input.has_condition or norm_of_output.has_condition,
        dtype=out.weight.dtype,
    )


@or_refusal
def read_attention(block: Any, computation: Computation) -> AttentionModules | Refusal:
    """Return the modules of the attention of a graph-transformer block, or why it cannot be fused.

    The network of edge attributes, `edge_pre_mlp`, is not read: its result is `edge_attr`.
    """
    backend = computation.backend
    if backend.attention_sublayer is None:
        return NO_SUBLAYERS
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
    linears = {}
    for name in ATTENTION_LINEARS:
        linears[name] = modules.get(name)
        asked.append((name, linears[name], LINEAR))
    # Anemoi's blocks have the flag, and norms only where it is set; ours have identities instead.
    has_head_norms = block.__dict__.get("qk_norm", "q_norm" in modules)
    for name in HEAD_NORMS if has_head_norms else ():
        asked.append((name, modules.get(name), HEAD_NORM))
    refusal = why_not_plain(*asked)
    if refusal is not None:
        return refusal

    norm = read_norm(norm_dst, "layer_norm_attention", backend)
    norm_of_sources = norm
    # In a mapper the norm has two names. Anemoi calls it by one of them, this library by the other.
    if modules.get("layer_norm_attention_dest", norm_dst) is not norm_dst:
        raise cannot_fuse("its layer_norm_attention_dest is not its layer_norm_attention")
    if norm_src is not norm_dst:
        norm_of_sources = read_norm(norm_src, "layer_norm_attention_src", backend)
    if norm_of_sources.features != norm.features:
        raise cannot_fuse("its norms of sources and destinations have different features")
    if norm_of_sources.has_condition != norm.has_condition:
        raise cannot_fuse("one of its norms of sources and destinations takes a condition")
    read = [linear_of(linear, name) for name, linear in linears.items()]
    query, self_term, key, value, edge, projection = read
    width = query.weight.shape[0]
    features = norm.features
    shape = (width, features)
    num_attributes = edge.weight.shape[1]
    shapes = (shape, shape, shape, shape, (width, num_attributes), (features, width))
    for name, linear, expected in zip(ATTENTION_LINEARS, read, shapes, strict=True):
        check_parameter(name, linear.weight, expected)
    check_limit(f"its queries have {width} features", width, backend.max_features)
    got = f"its edges have {num_attributes} attributes"
    check_limit(got, num_attributes, backend.max_attributes)

    heads = block.num_heads
    # Anemoi's blocks have the attribute; ours divide the channels by the heads
    channels = block.__dict__.get("out_channels_conv", width // heads)
    if heads * channels != width:
        got = f"its queries have {width} features"
        raise cannot_fuse(f"{got}, and its {heads} heads have {channels} channels")
    query_norm = key_norm = NO_NORM_MODULE
    if has_head_norms:
        query_norm = _read_head_norm(modules.get("q_norm"), "q_norm", channels, backend)
        key_norm = _read_head_norm(modules.get("k_norm"), "k_norm", channels, backend)
    parameters: AttentionTensors = AttentionTensors(
        x_src=None,
        halo=None,
        x_dst=None,  # of a call
        edge_attr=None,
        norm=norm.parameters,
        norm_src=norm_of_sources.parameters,
        query=query,
        self_term=self_term,
        key=key,
        value=value,
        edge=edge,
        projection=projection,
        query_scale=query_norm.parameters.scale,
        key_scale=key_norm.parameters.scale,
    )
    check_precision(parameters)
    return AttentionModules(
        computation=computation,
        compute=backend.attention_sublayer,
        parameters=parameters,
        has_one_norm=norm_src is norm_dst,
        options=AttentionOptions(
            heads=heads,
            batch=1,
            norm=norm.options,
            norm_src=norm_of_sources.options,
            query_norm=query_norm.options,
            key_norm=key_norm.options,
            gemm_dtype=computation.gemm_dtype,
            replay=computation.replay,
        ),
        has_condition=norm.has_condition,
        dtype=query.weight.dtype,
    )


def _asked_of_norm(norm: Submodule, name: str, roles: tuple[str, ...] = NORM) -> list[plain.Asked]:
    """Return a norm, and the children of a conditional one, for `why_not_plain`."""
    asked: list[plain.Asked] = [(name, norm, roles)]
    if plain.CONDITIONAL_NORM in roles and not isinstance(norm, WITHOUT_CONDITION):
        asked.append((f"{name}.norm", child_of(norm, "norm"), LAYER_NORM))
        asked.append((f"{name}.scale", child_of(norm, "scale"), LINEAR))
        asked.append((f"{name}.bias", child_of(norm, "bias"), LINEAR))
    return asked


def read_norm(norm: Submodule, name: str, backend: Backend) -> NormModule:
    """Return parameters and options of a layer norm, plain or conditional, or of an RMSNorm."""
    scale: Any
    shift: Any
    has_condition = not isinstance(norm, WITHOUT_CONDITION)
    if has_condition:
        children = norm._modules
        inner = children["norm"]
        if _read_parameters(inner, name) != (None, None):
            raise cannot_fuse(f"its {name}.norm has its own affine parameters")
        scale, scale_bias = linear_of(children["scale"], f"{name}.scale")
        shift, shift_bias = linear_of(children["bias"], f"{name}.bias")
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
    shape = (features, num_conditions) if has_condition else (features,)
    # Kernels read `features` elements of both, or rows of them with a condition.
    check_parameter(name, scale, shape)
    check_parameter(name, shift, shape)
    check_limit(f"its {name} has {features} features", features, backend.max_features)
    parameters: Norm[Tensor] = Norm(scale, shift)
    if has_condition:
        parameters = Norm(scale_map=Linear(scale, scale_bias), shift_map=Linear(shift, shift_bias))
    eps = EPS if inner.eps is None else inner.eps
    if eps <= 0.0:  # 0 is an absent norm
        raise cannot_fuse(f"its {name} has eps {eps}, and a positive number is needed")
    options = NormOptions(eps, type(inner) is not nn.RMSNorm)
    return NormModule(parameters, options, features, has_condition)


def _read_head_norm(norm: Submodule, name: str, channels: int, backend: Backend) -> NormModule:
    """Return the norm of queries or keys, over the channels of a head."""
    if type(norm) is nn.Identity:
        return NO_NORM_MODULE
    read = read_norm(norm, name, backend)
    if read.parameters.shift is not None:
        raise cannot_fuse(f"its {name} has a bias")
    if read.features != channels:
        got = f"its {name} is over {read.features} channels"
        raise cannot_fuse(f"{got}, and its heads have {channels}")
    return read


def linear_of(linear: Submodule, name: str) -> Linear[Tensor]:
    """Return weight and bias of a linear map, `name` in its block."""
    weight, bias = _read_parameters(linear, name)
    if weight is None:
        raise cannot_fuse(f"its {name} has no weight")
    return Linear(weight, bias)


def check_precision(*parameters: tuple) -> None:
    """Raise unless all of some parameters are float64, or none of them.

    PyTorch multiplies no matrices of both, also not under autocast.
    """
    are_double = [tensor.dtype is DOUBLE for tensor in leaves(parameters) if tensor is not None]
    if any(are_double) and not all(are_double):
        raise cannot_fuse("some of its parameters are float64, and others are not")


def _read_parameters(module: Submodule, module_name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return `weight` and `bias` of a module as its code looks them up, None where it has none.

    They may be buffers, or plain tensors, as replicas of DataParallel have.
    """
    read = []
    for name in ("weight", "bias"):
        parameter = getattr(module, name, None)
        if type(parameter) is not nn.Parameter:
            refusal = why_not_plain_tensor(f"its {module_name} has a {name}", parameter)
            if refusal is not None:
                raise CannotFuseError(refusal)
        read.append(parameter)
    return read[0], read[1]


def child_of(module: Submodule, name: str) -> Submodule:
    """Return a submodule, or None if there is none; the module may be anything."""
    return module._modules.get(name) if isinstance(module, nn.Module) else None


def check_parameter(name: str, parameter: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise unless a parameter, if there is one, has this shape."""
    if parameter is not None and parameter.shape != shape:
        raise cannot_fuse(
            f"its {name} has a parameter {tuple(parameter.shape)}, and {shape} is needed"
        )


def check_limit(got: str, number: int, limit: int) -> None:
    """Raise if the backend takes fewer than this number."""
    if number > limit:
        raise cannot_fuse(f"{got}, and at most {limit} are possible")


def cannot_fuse(text: str) -> CannotFuseError:
    return CannotFuseError(permanent(text))
