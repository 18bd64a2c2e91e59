"""The rule for modules that this library replaces: plain, or refused by a value.

A fused sub-layer, or an attention that reads the weight of an edge embedding, computes the result
of a module without calling it. That is right for a module that computes what its class did when its
code was read: one of exactly this class, with these methods, without hooks, and with the children
and attributes that it was read with. `TABLE` says what this is for each kind of module, and
`why_not_plain` is the only function that asks. It takes 2 us and 0.4 us a module, so nothing is
remembered between calls: the answer depends on mutable modules.

Functions are compared by identity with those recorded when a class was recognised: its methods, and
what these call of other modules, such as `torch.nn.functional.linear`, which is read from their
bytecode. Classes of PyTorch, PyG and this library are recognised when they are first seen, if their
methods are defined in their own package; classes of Anemoi by `recognise`, from hashes of their
methods.

What decides over the result of a plain function counts as well: a mode of `__torch_function__`, and
parameters of a class with one of its own.
"""

import dis
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from anemoi_gt.ops import activations
from anemoi_gt.refusal import Refusal, permanent, transient
from anemoi_gt.torch_compat import (
    constant_when_traced,
    function_modes,
    num_function_modes,
)

# Roles in which a module may serve, as messages name them.
LINEAR = "a torch.nn.Linear"
PYG_LINEAR = "PyG's Linear"
LAYER_NORM = "a LayerNorm"
RMS_NORM = "an RMSNorm"
CONDITIONAL_NORM = "a ConditionalLayerNorm"
IDENTITY = "a torch.nn.Identity"
ACTIVATION = f"one of {activations.KIND_NAMES} of torch.nn"
SEQUENTIAL = "a torch.nn.Sequential"
MLP = "an MLP"
GATED_LINEAR = "a gated linear map"
SUM = "PyG's SumAggregation"
BLOCK = "a block of anemoi_gt"
ATTENTION = "a GraphTransformerConv"
INTERACTION = "an InteractionConv"
PYG_ATTENTION = "PyG's TransformerConv"
ANEMOI_BLOCK = "Anemoi's graph-transformer block"
ANEMOI_MAPPER_BLOCK = "Anemoi's graph-transformer mapper block"
ANEMOI_ATTENTION = "Anemoi's attention"
ANEMOI_GRAPH_CONV = "Anemoi's GraphConv"
ANEMOI_PROVIDER = "Anemoi's StaticGraphProvider"

# Registries of hooks that a call of a module runs. Hooks with keyword arguments, and those that
# always run, are in them too. Hooks on state dicts do not run in a call.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PYG_HOOKS = tuple(
    f"_{method}_forward_{when}hooks"
    for method in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_", "")
)


class Kind(NamedTuple):
    """What the result of modules of one class depends on.

    A test compares it with the code of the class: each attribute of `self` that its methods read is
    a field of this record.
    """

    role: str
    methods: tuple[str, ...] = ("forward",)  # that are not called
    networks: tuple[str, ...] = ()  # methods that are called unless they are plain, one by one
    read: tuple[str, ...] = ()  # attributes, parameters and children that we read instead
    children: tuple[tuple[str, str], ...] = ()  # (name, role), that must be plain as well
    fixed: tuple[tuple[str, tuple], ...] = ()  # (attribute, admitted values)
    tools: tuple[tuple[str, tuple], ...] = ()  # as `fixed`, for attributes that a tool sets
    ignored: tuple[str, ...] = ()  # attributes that are read and change no result
    runs_hooks: bool = True  # whether its own call is skipped, and with it hooks of modules
    registries: tuple[str, ...] = ()  # of further hooks that it runs
    own_hook: str | None = None  # a method that the class registers as a hook of itself
    subclasses: bool = False  # subclasses that override nothing of this are as plain


# What PyG's message passing reads (2.8). It generates `propagate` and `collect` of a class when the
# first layer of the class is built.
MESSAGE_PASSING: dict[str, Any] = {
    "methods": (
        *("propagate", "collect", "message", "aggregate", "update", "_collect", "_check_input"),
        *("_index_select", "_index_select_safe", "_lift", "_set_size"),
    ),
    "children": (("aggr_module", SUM),),
    "fixed": (("node_dim", (0,)), ("fuse", (False,)), ("_decomposed_layers", (1,))),
    "tools": (("_explain", (None, False)),),
    "ignored": (
        # properties, and what a constructor derives from the methods
        *("explain", "decomposed_layers", "inspector", "_user_args", "_fused_user_args"),
        # only read where `fuse` or `_explain` is True
        *("message_and_aggregate", "explain_message", "SUPPORTS_FUSED_EDGE_INDEX"),
        "_alpha",  # `message` writes it, for the attention weights
    ),
    "registries": PYG_HOOKS,
}
GENERATED = ("propagate", "collect")
# of the edge update of a graph network, besides `node_dim`
FIXED_OF_EDGES = (*MESSAGE_PASSING["fixed"][1:], ("flow", ("source_to_target",)))
OF_ATTENTION = ("heads", "out_channels", "dropout", "training", "flow")
NORM = Kind(LAYER_NORM, read=("normalized_shape", "weight", "bias", "eps"))
PROJECTIONS = ("lin_query", "lin_key", "lin_value", "lin_self", "lin_edge", "projection")
OWN_BLOCK = Kind(
    BLOCK,
    methods=(
        *("attend", "normed_sides", "normed", "make_query", "key_value", "combine"),
        *("edge_operands", "source_norm", "_split_heads"),
    ),
    read=(
        *PROJECTIONS,
        *("layer_norm_attention", "layer_norm_attention_src", "q_norm", "k_norm"),
        *("edge_pre_mlp", "num_heads", "config", "dropout", "training"),
    ),
    runs_hooks=False,
    subclasses=True,
)
ANEMOI_BLOCKS = Kind(
    ANEMOI_BLOCK,
    methods=(
        *("get_qkve", "prepare_qkve_edge_sharding", "_apply_qk_norm", "attention_block"),
        *("apply_gt", "_forward_edges_sharded_attention", "_forward_heads_sharded_attention"),
        *("_forward_edges_shard_strategy", "_forward_heads_shard_strategy"),
        *("_get_or_build_cached_halo_info", "shard_qkve_heads", "shard_output_seq"),
    ),
    networks=("run_node_dst_mlp", "run_node_src_mlp"),
    read=(
        *PROJECTIONS,
        *("q_norm", "k_norm", "qk_norm", "edge_pre_mlp", "conv"),
        *("layer_norm_mlp_dst", "node_dst_mlp", "layer_norm_mlp_src", "node_src_mlp"),
        *("num_heads", "out_channels_conv"),
    ),
    ignored=(
        # the choice between two implementations of its attention, by `conv`
        *("graph_attention_backend", "_attention_backend_applied", "set_attention_function"),
        *("_cached_halo_info", "_cached_halo_cache_specs", "__class__"),  # of Anemoi's exchange
    ),
    runs_hooks=False,
    subclasses=True,
)
# class: what the result of its modules depends on
TABLE: dict[str, Kind] = {
    "torch.nn.modules.linear.Linear": Kind(LINEAR, read=("weight", "bias")),
    "torch.nn.modules.linear.Identity": Kind(IDENTITY),
    "torch.nn.modules.normalization.LayerNorm": NORM,
    "torch.nn.modules.normalization.RMSNorm": Kind(
        RMS_NORM, read=("normalized_shape", "weight", "eps")
    ),
    **{
        f"{activation.kind.__module__}.{activation.kind.__name__}": Kind(
            ACTIVATION, read=activation.attributes, ignored=("inplace",)
        )
        for activation in activations.ACTIVATIONS.values()
    },
    "torch.nn.modules.container.Sequential": Kind(
        SEQUENTIAL, methods=("forward", "__iter__"), read=("_modules",)
    ),
    "anemoi_gt.nn.norm.AutocastLayerNorm": NORM,
    "anemoi_gt.nn.norm.ConditionalLayerNorm": Kind(
        CONDITIONAL_NORM, read=("norm", "scale", "bias")
    ),
    "anemoi_gt.nn.mapper.FieldExtractor": Kind(SEQUENTIAL),
    "anemoi_gt.nn.mlp.MLP": Kind(MLP, read=("mlp",)),
    "anemoi_gt.nn.mlp.NormedMLP": Kind(MLP, read=("mlp", "layer_norm")),
    "anemoi_gt.nn.mlp.GatedLinear": Kind(GATED_LINEAR, read=("gate_proj", "value_proj", "gating")),
    "anemoi_gt.nn.block.GraphTransformerProcessorBlock": OWN_BLOCK,
    "anemoi_gt.nn.block.GraphTransformerMapperBlock": OWN_BLOCK,
    "anemoi_gt.nn.conv.GraphTransformerConv": Kind(
        ATTENTION,
        **MESSAGE_PASSING | {"methods": (*MESSAGE_PASSING["methods"], "_split_heads")},
        read=("lin_edge", *OF_ATTENTION),
        runs_hooks=False,
        subclasses=True,
    ),
    "anemoi_gt.nn.interaction_network.InteractionConv": Kind(
        INTERACTION,
        **MESSAGE_PASSING | {"fixed": (("node_dim", (-2,)), *FIXED_OF_EDGES)},
        read=("edge_mlp", "sum_of"),
        runs_hooks=False,
        subclasses=True,
    ),
    "torch_geometric.nn.dense.linear.Linear": Kind(
        PYG_LINEAR, read=("weight", "bias"), own_hook="initialize_parameters"
    ),
    "torch_geometric.nn.aggr.basic.SumAggregation": Kind(
        SUM, methods=("__call__", "forward", "reduce"), ignored=("_deterministic",)
    ),
    "torch_geometric.nn.conv.transformer_conv.TransformerConv": Kind(
        PYG_ATTENTION,
        **MESSAGE_PASSING | {"methods": ("forward", *MESSAGE_PASSING["methods"])},
        read=(
            *("lin_query", "lin_key", "lin_value", "lin_edge", "lin_skip", "lin_beta"),
            *("concat", "root_weight", *OF_ATTENTION),
        ),
        runs_hooks=False,  # they are moved to the layer that takes its place
        subclasses=True,
    ),
    "anemoi.models.layers.normalization.AutocastLayerNorm": NORM,
    "anemoi.models.layers.normalization.ConditionalLayerNorm": Kind(
        CONDITIONAL_NORM,
        read=("norm", "scale", "bias"),
        ignored=("autocast",),  # the dtype of its result, which a linear map under autocast casts
    ),
    "anemoi.models.layers.mlp.MLP": Kind(MLP, read=("mlp", "layer_norm")),
    "anemoi.models.layers.mlp.GatedMLPLayer": Kind(
        GATED_LINEAR, read=("gate_proj", "value_proj", "gating")
    ),
    "anemoi.models.layers.conv.GraphTransformerConv": Kind(
        ANEMOI_ATTENTION,
        **MESSAGE_PASSING | {"methods": ("forward", *MESSAGE_PASSING["methods"])},
        read=OF_ATTENTION,
    ),
    "anemoi.models.layers.conv.GraphConv": Kind(
        ANEMOI_GRAPH_CONV,
        **MESSAGE_PASSING
        | {
            "methods": ("forward", *MESSAGE_PASSING["methods"]),
            "fixed": (("node_dim", (-2, 0)), *FIXED_OF_EDGES),  # the same of rows [N, F]
        },
        read=("edge_mlp",),
    ),
    "anemoi.models.layers.block.GraphTransformerProcessorBlock": ANEMOI_BLOCKS,
    "anemoi.models.layers.block.GraphTransformerMapperBlock": ANEMOI_BLOCKS,
    "anemoi.models.layers.graph_provider.StaticGraphProvider": Kind(
        ANEMOI_PROVIDER, methods=("_expand_edges",), runs_hooks=False, subclasses=True
    ),
}


# What of a module itself must be looked at: methods that are looked up on it, whether a call of it
# is skipped and so are its hooks, and the row of a layer of PyG, which has more to check.
Checks = tuple[tuple[str, ...], bool, Kind | None]
Asked = tuple[str, Any, tuple[str, ...]]  # name, module, roles


def _checks_of(row: Kind) -> Checks:
    # `__call__` is looked up on the class
    methods = tuple(name for name in row.methods if name != "__call__")
    if row.runs_hooks:
        methods = (*methods, "_call_impl")
    return methods, row.runs_hooks, row if row.registries else None


class Methods(NamedTuple):
    """Methods of a class as they were when their code was recognised."""

    owner: type
    names: tuple[str, ...]
    read: Callable[[type], tuple]  # returns those that the class has now
    functions: tuple[Callable, ...]

    @classmethod
    def of(cls, owner: type, row: Kind) -> "Methods":
        """Return the methods that a row of `TABLE` names and a class has."""
        wanted = row.methods
        if row.runs_hooks:
            wanted = tuple(dict.fromkeys((*row.methods, "__call__", "_call_impl")))
        names = tuple(name for name in wanted if hasattr(owner, name))
        if len(names) == 1:
            names *= 2  # attrgetter of one name returns no tuple
        read = attrgetter(*names)
        return cls(owner, names, read, read(owner))


class Called(NamedTuple):
    """A function that a recognised method calls, and where the method looks it up."""

    namespace: dict[str, Any]  # of a module
    name: str
    recorded: Callable


class Recognised(NamedTuple):
    """A class as it was when its code was recognised."""

    role: str | None  # None for a class without a row in `TABLE`
    class_name: str  # qualified, of the class of `TABLE`, from which a subclass inherits
    methods: tuple[Methods, ...]  # of the class, and of its bases that `super()` calls
    networks: dict[str, Callable | str]  # by name; or why its body is not known
    called: tuple[Called, ...]  # by these methods
    answer: Checks | str  # or why its code is not recognised


UNKNOWN = Recognised(None, "", (), {}, (), "")
_RECOGNISED: dict[type, Recognised] = {}
_OWN_PACKAGES = ("torch", "torch_geometric", "anemoi_gt")  # recognised without `recognise`


def why_not_plain(*asked: Asked) -> Refusal | None:
    """Return why one of some modules must be called for its result, or None if all are plain.

    Parameters
    ----------
    *asked : tuple of (str, nn.Module or None, tuple of str)
        Each module with its name in its block or layer, for the text, and roles of `TABLE`, of
        which its class must have one; the name of the block or layer itself is "". Modules of a
        sub-layer are asked for together, each before its children.
    """
    classes = _of_classes(tuple([type(module) for _, module, _ in asked]))
    runs_hooks = False
    for (name, module, roles), (role, answer) in zip(asked, classes, strict=True):
        if role not in roles:
            return permanent(_other_role(name, module, roles))
        if isinstance(answer, str):
            return permanent(f"{_subject(name)} {answer}")
        if isinstance(answer, Refusal):
            return transient(f"{_subject(name)} {answer.text}")
        methods, module_hooks, row = answer
        attributes = module.__dict__
        for method in methods:
            if method in attributes and not _is_generated(module, method):
                return permanent(
                    f"{_subject(name)} has a {method} set on it, which would be skipped"
                )
        if module_hooks:
            runs_hooks = True
            if (
                attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
            ) and not _has_only_own_hook(module):
                return transient(f"{_subject(name)} has hooks, which would be skipped")
        if row is None:
            continue
        for registry in row.registries:
            if attributes[registry]:
                return transient(f"{_subject(name)} has hooks, which would be skipped")
        for attribute, values in row.fixed:
            if getattr(module, attribute, values[0]) not in values:
                return permanent(f"{_subject(name)} has another {attribute} than {values[0]!r}")
        for attribute, values in row.tools:
            if getattr(module, attribute, values[0]) not in values:
                return transient(f"{_subject(name)} is watched by an explainer")
        for child, child_role in row.children:
            child_name = f"{name}.{child}" if name else child
            refusal = why_not_plain((child_name, module._modules.get(child), (child_role,)))
            if refusal is not None:
                return refusal
    may_have_global_hooks = (
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
        # it makes no guard for whether a registry is empty, but for a loop over it (torch 2.13)
        or torch.compiler.is_compiling()
    )
    if runs_hooks and may_have_global_hooks and has_global_hooks():
        return transient("hooks are registered for all modules, which would be skipped")
    if torch.compiler.is_compiling() or num_function_modes():
        mode = function_modes()
        if mode:
            return transient(f"the mode {mode} is active, which may change what functions return")
    return None


def why_not_plain_tensor(subject: str, tensor: Tensor | None) -> Refusal | None:
    """Return why functions of a tensor may return something else than of a `torch.Tensor`.

    It is of a subclass with data of its own, as DTensor and quantisation of other libraries have,
    or with a `__torch_function__` or `__torch_dispatch__` of its own. `subject` begins the text.
    """
    kind: Any = type(tensor)
    if tensor is None or kind in (nn.Parameter, Tensor) or _is_plain_subclass(kind):
        return None
    return permanent(f"{subject} of the tensor subclass {qualified_name(kind)}")


@constant_when_traced
def _is_plain_subclass(kind: Any) -> bool:
    if hasattr(kind, "__tensor_flatten__"):
        return False
    if kind.__module__.startswith("torch._subclasses."):  # of an export, which traces with them
        return True
    if kind.__torch_dispatch__ != Tensor.__torch_dispatch__:
        return False
    functions: list[Any] = [kind.__torch_function__, Tensor.__torch_function__]
    of_kind, of_tensor = [getattr(function, "__func__", function) for function in functions]
    return of_kind in (of_tensor, nn.Parameter.__torch_function__)


def why_not_plain_method(module: nn.Module, name: str) -> Refusal | None:
    """Return why a method in `networks` of a row must be called, or None if it is plain."""
    reason = _of_method(type(module), name)
    if reason is not None:
        return permanent(f"it {reason}")
    if name in module.__dict__:
        return permanent(f"it has a {name} set on it, which would be skipped")
    return None


@constant_when_traced
def _of_method(kind: type, name: str) -> str | None:
    """Return why a method of `networks` is another one than was recognised, or None."""
    recognised = _RECOGNISED.get(kind) or _recognised(kind)
    function = recognised.networks.get(name)
    if isinstance(function, str):
        return function
    if function is None:
        return f"is a {qualified_name(kind)}, whose {name} is not known"
    if getattr(kind, name) is function:
        return None
    return _why_other_method(kind, recognised.class_name, name)


def why_overridden(kind: type, base: type) -> str | None:
    """Return what a subclass of a class of `TABLE` overrides of what it computes, or None."""
    row = TABLE[qualified_name(base)]
    fixed = (*row.children, *row.fixed, *row.tools)
    names = {"__call__", "_call_impl", *row.methods, *row.read, *(name for name, _ in fixed)}
    for subclass in kind.__mro__[: kind.__mro__.index(base)]:
        for name, value in vars(subclass).items():
            if name in names and not (name in GENERATED and _is_generated_for(subclass, value)):
                return f"overrides {name}"
    return None


def recognise(
    kind: type, unknown_body: Callable[[Callable], str | None] | None = None
) -> str | None:
    """Recognise a class of `TABLE` by its methods as they are now; return why not, or None.

    `unknown_body` returns why the body of a method that the package of the class defines is not
    known, or None. Without it, all that the package defines is.
    """
    class_name = qualified_name(kind)
    row = TABLE[class_name]
    methods = [Methods.of(kind, row)]
    for base in kind.__mro__[1:]:
        if qualified_name(base) in TABLE:
            methods.append(Methods.of(base, TABLE[qualified_name(base)]))
    reason = None
    for of_class in methods:
        for name, function in zip(of_class.names, of_class.functions, strict=True):
            unknown = _why_unknown(kind, of_class.owner, name, function, unknown_body)
            reason = reason or unknown
    networks: dict[str, Callable | str] = {}
    for name in row.networks:
        network: Callable | None = getattr(kind, name, None)
        if network is not None:
            networks[name] = _why_unknown(kind, kind, name, network, unknown_body) or network
    answer = _checks_of(row) if reason is None else reason
    functions: list[Callable] = []
    for of_class in methods:
        functions += of_class.functions
    called = tuple(_called_by((*functions, *filter(callable, networks.values()))))
    for lookup in called:
        if _is_foreign(lookup):
            answer = reason = reason or _why_replaced(lookup)
    _RECOGNISED[kind] = Recognised(row.role, class_name, tuple(methods), networks, called, answer)
    return reason


def _called_by(functions: tuple[Callable, ...]) -> Iterator[Called]:
    """Yield the functions that methods look up in modules of other packages than this one.

    A replacement of this library calls what it replaces, or computes the same.
    """
    seen = set()
    for function in functions:
        function = getattr(function, "fget", function)  # of a property
        function = original_of(function)
        code: Any = getattr(function, "__code__", None)
        for namespace, name in _lookups(code, getattr(function, "__globals__", {})):
            key = id(namespace), name
            value = namespace[name]
            is_own = _package(namespace.get("__name__", "")) == "anemoi_gt"
            if key not in seen and callable(value) and not isinstance(value, type) and not is_own:
                seen.add(key)
                yield Called(namespace, name, value)


def _lookups(code: CodeType | None, names: dict) -> Iterator[tuple[dict, str]]:
    """Yield where code looks up names that are no modules: `F.linear` as ("linear", of F)."""
    if code is None:
        return
    for constant in code.co_consts:  # functions within functions, and comprehensions
        if isinstance(constant, CodeType):
            yield from _lookups(constant, names)
    namespace = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL":
            namespace = names
        elif instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD") or namespace is None:
            namespace = None
            continue
        if name not in namespace:  # a builtin function
            namespace = None
        elif isinstance(namespace[name], ModuleType):
            namespace = vars(namespace[name])
        else:
            yield namespace, name
            namespace = None


def _why_replaced(called: Called) -> str:
    return f"calls {called.namespace['__name__']}.{called.name}, which was replaced"


def _is_foreign(called: Called) -> bool:
    """Return whether a function was made in the program of a user: neither built in nor installed.

    Functions of one package are used by others, so it may be of any of those that are recognised.
    """
    names = getattr(called.recorded, "__globals__", None)
    if names is None:
        return not isinstance(called.recorded, BuiltinFunctionType)
    package = _package(names.get("__name__", ""))
    own = _package(called.namespace["__name__"])
    return package not in (own, "einops", *_OWN_PACKAGES)


def _why_unknown(
    kind: type,
    owner: type,
    name: str,
    function: Callable,
    unknown_body: Callable[[Callable], str | None] | None,
) -> str | None:
    """Return why a method is not the code of its class that was read, or None.

    A replacement of this library computes what it replaces.
    """
    function = original_of(function)
    defined_in = _defining_class(owner, name)
    if not _is_defined_in(function, defined_in):
        return f"is a {qualified_name(kind)}, whose {name} was replaced"
    if unknown_body is None or _is_generated_for(defined_in, function):
        return None
    if _package(defined_in.__module__) != _package(kind.__module__):
        return None
    unknown = unknown_body(function)
    return None if unknown is None else f"is a {qualified_name(kind)}, and of its {name}, {unknown}"


def original_of(function: Any) -> Any:
    """Return what a replacement of this library replaces; anything else as it is.

    A user's function that wraps a replacement has its attributes, but wraps another function.
    """
    replaced = getattr(function, "replaces", None)
    if replaced is None or getattr(function, "__wrapped__", None) is not replaced:
        return function
    return original_of(replaced)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs hooks, or a `forward` that was set on it.

    PyTorch's spectral norm and pruning are such hooks, offloading and quantisation of other
    libraries such a `forward`.
    """
    is_set = "forward" in module.__dict__
    return is_set or any(getattr(module, registry) for registry in MODULE_HOOKS)


def forget(package: str) -> None:
    """Forget the classes of a package and their subclasses, so that they are recognised again."""
    for kind, recognised in list(_RECOGNISED.items()):
        if _package(recognised.class_name) == package:
            del _RECOGNISED[kind]


@constant_when_traced
def qualified_name(kind: type) -> str:
    """Return module and name of a class, for messages: other libraries have a `Linear` too.

    Constant while torch.compile traces, where the names of classes are not what they seem.
    """
    return f"{kind.__module__}.{kind.__qualname__}"


@constant_when_traced
def _of_classes(
    kinds: tuple[type, ...],
) -> tuple[tuple[str | None, Checks | Refusal | str], ...]:
    """Return of each class its role, and what to check of its modules or why none is plain."""
    answers: dict[type, tuple[str | None, Checks | Refusal | str]] = {}
    for kind in kinds:
        if kind in answers:
            continue
        answer: Checks | Refusal | str
        role, class_name, methods, _, called, answer = _RECOGNISED.get(kind) or _recognised(kind)
        for owner, names, read, functions in methods:
            # of the class as it is now: methods are patched at any time
            if read(owner) != functions and not isinstance(answer, str):
                answer = _why_other_methods(owner, names, functions, class_name) or answer
        for lookup in called:
            namespace, name, recorded = lookup  # takes half the time of its attributes
            if namespace.get(name) is not recorded and not isinstance(answer, str):
                answer = transient(_why_replaced(lookup))
        answers[kind] = role, answer
    return tuple([answers[kind] for kind in kinds])


def _why_other_methods(
    owner: type, names: tuple[str, ...], functions: tuple[Callable, ...], class_name: str
) -> Refusal | str | None:
    """Return which method of a class is another one than was recognised, or None."""
    for name, function in zip(names, functions, strict=True):
        current = getattr(owner, name)
        if current is function:
            continue
        if name in GENERATED and _is_generated_for(_defining_class(owner, name), current):
            continue
        if _defining_class(owner, name) is nn.Module:
            if _is_defined_in(current, nn.Module):
                continue  # PyTorch's own tracers replace __call__ for all modules
            return transient(f"is called by nn.Module.{name}, which was replaced")
        return _why_other_method(owner, class_name, name)
    return None


def _why_other_method(kind: type, class_name: str, name: str) -> str:
    if qualified_name(kind) == class_name:
        return f"is a {class_name}, whose {name} was replaced"
    return f"is a {qualified_name(kind)}, which overrides {name}"


def _recognised(kind: type) -> Recognised:
    """Return a class as it is recognised at first sight, or a base class of it."""
    for base in kind.__mro__:
        if base not in _RECOGNISED:
            if qualified_name(base) not in TABLE or _package(base.__module__) not in _OWN_PACKAGES:
                continue
            recognise(base)
        recognised = _RECOGNISED[base]
        if isinstance(recognised.answer, str) and _package(recognised.class_name) in _OWN_PACKAGES:
            del _RECOGNISED[base]  # it is patched now, and recognised when the patch has gone
        if base is kind:
            return recognised
        return _as_subclass(kind, base, recognised)
    return UNKNOWN


def _as_subclass(kind: type, base: type, recognised: Recognised) -> Recognised:
    """Return and keep what is recognised of a subclass, which may override attributes too."""
    if not TABLE[recognised.class_name].subclasses:
        return UNKNOWN
    overridden = why_overridden(kind, base)
    if overridden is not None:
        reason = f"is a {qualified_name(kind)}, which {overridden}"
        return recognised._replace(answer=reason)
    inherited, *of_bases = recognised.methods
    inherited = inherited._replace(owner=kind)
    recognised = recognised._replace(methods=(inherited, *of_bases))
    if not isinstance(recognised.answer, str):
        _RECOGNISED[kind] = recognised
    return recognised


def has_global_hooks() -> bool:
    """Return whether foreign global module hooks exist; this library's only observe."""
    registries = (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )
    for registry in registries:
        for hook in registry.values():
            if _package(getattr(hook, "__module__", "")) != "anemoi_gt":
                return True
    return False


def _has_only_own_hook(module: nn.Module) -> bool:
    """Return whether all hooks of a module are the one that its class registers itself."""
    name = TABLE[qualified_name(type(module))].own_hook
    own = getattr(type(module), name) if name else None
    hooks = [hook for registry in MODULE_HOOKS for hook in getattr(module, registry).values()]
    return own is not None and all(getattr(hook, "__func__", None) is own for hook in hooks)


def _is_generated(module: nn.Module, name: str) -> bool:
    """Return whether a method on a module is what PyG sets there: explainers leave it."""
    function = getattr(module.__dict__[name], "__func__", None)
    if name not in GENERATED or function is None:
        return False
    kind = type(module)
    return _is_generated_for(kind, function) or function is vars(kind).get("_orig_propagate")


def _is_generated_for(kind: type, function: Callable | None) -> bool:
    """Return whether PyG (2.8) generated a method of message passing for a class."""
    module = f"{kind.__module__}_{kind.__name__}_propagate"
    return getattr(function, "__globals__", {}).get("__name__") == module


def _is_defined_in(function: Any, owner: type) -> bool:
    """Return whether a method or property of a class is code of its package, or PyG's."""
    function = getattr(function, "fget", function)
    package = _package(getattr(function, "__globals__", {}).get("__name__", ""))
    return package == _package(owner.__module__) or _is_generated_for(owner, function)


def _defining_class(kind: type, name: str) -> type:
    """Return the class from which a class has a method."""
    return next((base for base in kind.__mro__ if name in vars(base)), kind)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _other_role(name: str, module: Any, roles: tuple[str, ...]) -> str:
    """Return why a module that has none of some roles is not plain."""
    needed = " or ".join(roles)
    if module is None:
        return f"it has no {name}, and {needed} is needed"
    return f"{_subject(name)} is a {qualified_name(type(module))}, and {needed} is needed"


def _subject(name: str) -> str:
    return f"its {name}" if name else "it"
