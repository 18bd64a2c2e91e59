"""The rule for modules that this library replaces: plain, or refused by a value.

A fused sub-layer, or an attention that reads the weight of an edge embedding, computes the result
of a module without calling it. That is right for a module of a class in `TABLE` whose functions are
those that were read: every one that the class and its bases up to nn.Module define, but for
`NOT_COMPUTING`, and what these look up in other modules, such as `torch.nn.functional.linear`,
which is read from their bytecode. No attribute of the module takes the place of one or of a child,
no hook is registered, and a layer of message passing has the attributes of its row. `why_not_plain`
is the only function that asks; what was read from modules may be kept while they are unchanged
(`nn.unchanged`).

What a class held when it was recognised is compared as a whole, in C: 1 us a class, and 0.5 us a
module. Classes of PyTorch, PyG and this library are recognised when they are first seen, if their
functions are defined in their own package or a base's; classes of Anemoi by `recognise`, from
hashes of their bodies.

What decides over the result of a plain function counts as well: a mode of `__torch_function__`, and
parameters of a class with one of its own.
"""

import dis
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
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
    is_exporting,
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
ANEMOI_ATTENTION = "Anemoi's attention"
ANEMOI_GRAPH_CONV = "Anemoi's GraphConv"
ANEMOI_PROVIDER = "Anemoi's StaticGraphProvider"
ANEMOI_WINDOW = "Anemoi's SDPAAttentionWrapper"

# Registries of hooks that a call of a module runs. Hooks with keyword arguments, and those that
# always run, are in them too. Hooks on state dicts do not run in a call.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
PYG_HOOKS = tuple(
    f"_{method}_forward_{when}hooks"
    for method in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_", "")
)


class Kind(NamedTuple):
    """Conditions for a module of one class to be plain, besides the functions of its classes."""

    role: str
    # A layer of PyG's message passing: attributes, and the values that are admitted. It has the
    # hooks, the aggregation and the switch of explainers of `PYG_HOOKS`, `AGGREGATION`, `EXPLAIN`.
    messages: tuple[tuple[str, tuple], ...] = ()
    # What of a call runs all the same, "forward" and "hooks": subclasses may override the former.
    keeps: tuple[str, ...] = ()


# What a layer of message passing reads besides its functions (PyG 2.8).
MESSAGES = (("node_dim", (0,)), ("fuse", (False,)), ("_decomposed_layers", (1,)))
AGGREGATION = "aggr_module"
EXPLAIN = "_explain"  # None or False unless an explainer watches
# It generates both for a class when the first layer of the class is built.
GENERATED = ("propagate", "collect")
# of the edge update of a graph network, besides `node_dim`
MESSAGES_OF_EDGES = (*MESSAGES[1:], ("flow", ("source_to_target",)))
CALL = ("forward", "hooks")
# Functions of a class that change no result of its modules. Every other one counts.
NOT_COMPUTING = frozenset(
    (
        *("__init__", "__setstate__", "__repr__", "extra_repr", "reset_parameters"),
        *("_orig_propagate", "_jinja_propagate"),  # which PyG keeps for explainers
        # of Anemoi: the choice of `conv`, and methods around those that are replaced
        *("set_attention_function", "get_edges", "edge_dim", "is_sparse"),
    )
)
# class: what decides besides its functions
TABLE: dict[str, Kind] = {
    "torch.nn.modules.linear.Linear": Kind(LINEAR),
    "torch.nn.modules.linear.Identity": Kind(IDENTITY),
    "torch.nn.modules.normalization.LayerNorm": Kind(LAYER_NORM),
    "torch.nn.modules.normalization.RMSNorm": Kind(RMS_NORM),
    **{
        f"{activation.kind.__module__}.{activation.kind.__name__}": Kind(ACTIVATION)
        for activation in activations.ACTIVATIONS.values()
    },
    "torch.nn.modules.container.Sequential": Kind(SEQUENTIAL),
    "anemoi_gt.nn.norm.AutocastLayerNorm": Kind(LAYER_NORM),
    "anemoi_gt.nn.norm.ConditionalLayerNorm": Kind(CONDITIONAL_NORM),
    "anemoi_gt.nn.mapper.FieldExtractor": Kind(SEQUENTIAL),
    "anemoi_gt.nn.mlp.MLP": Kind(MLP),
    "anemoi_gt.nn.mlp.NormedMLP": Kind(MLP),
    "anemoi_gt.nn.mlp.GatedLinear": Kind(GATED_LINEAR),
    "anemoi_gt.nn.block.GraphTransformerProcessorBlock": Kind(BLOCK, keeps=CALL),
    "anemoi_gt.nn.block.GraphTransformerMapperBlock": Kind(BLOCK, keeps=CALL),
    "anemoi_gt.nn.conv.GraphTransformerConv": Kind(ATTENTION, MESSAGES, keeps=CALL),
    "anemoi_gt.nn.interaction_network.InteractionConv": Kind(
        INTERACTION, (("node_dim", (-2,)), *MESSAGES_OF_EDGES), keeps=CALL
    ),
    "torch_geometric.nn.dense.linear.Linear": Kind(PYG_LINEAR),
    "torch_geometric.nn.aggr.basic.SumAggregation": Kind(SUM),
    "torch_geometric.nn.conv.transformer_conv.TransformerConv": Kind(
        PYG_ATTENTION,
        MESSAGES,
        keeps=("hooks",),  # they are moved to the layer that takes its place
    ),
    "anemoi.models.layers.normalization.AutocastLayerNorm": Kind(LAYER_NORM),
    "anemoi.models.layers.normalization.ConditionalLayerNorm": Kind(CONDITIONAL_NORM),
    "anemoi.models.layers.mlp.MLP": Kind(MLP),
    "anemoi.models.layers.mlp.GatedMLPLayer": Kind(GATED_LINEAR),
    "anemoi.models.layers.conv.GraphTransformerConv": Kind(ANEMOI_ATTENTION, MESSAGES),
    "anemoi.models.layers.conv.GraphConv": Kind(
        ANEMOI_GRAPH_CONV,
        (("node_dim", (-2, 0)), *MESSAGES_OF_EDGES),  # the same of rows [N, F]
    ),
    **{
        f"anemoi.models.layers.block.GraphTransformer{name}Block": Kind(ANEMOI_BLOCK, keeps=CALL)
        for name in ("Processor", "Mapper")
    },
    "anemoi.models.layers.graph_provider.StaticGraphProvider": Kind(ANEMOI_PROVIDER, keeps=CALL),
    "anemoi.models.layers.attention.SDPAAttentionWrapper": Kind(ANEMOI_WINDOW, keeps=CALL),
}


# What of a module itself must be looked at: the functions that no attribute of it may shadow,
# whether a call of it is skipped and with it its hooks, the row of a layer of message passing, and
# functions of subclasses, which may not shadow its attributes and children. It is no NamedTuple,
# whose class torch.compile would guard on (2.11).
Checks = tuple[tuple[str, ...], bool, Kind | None, tuple[str, ...]]
Asked = tuple[str, Any, tuple[str, ...]]  # name, module, roles


class Recognised(NamedTuple):
    """A class as it was when its code was recognised."""

    role: str | None  # None for a class without a row in `TABLE`
    class_name: str  # qualified, of the class of `TABLE`, from which a subclass inherits
    # of the class and its bases below nn.Module: what each holds, and what it held
    classes: tuple[tuple[Mapping[str, Any], dict[str, Any]], ...]
    # where functions of the class look up others: what is there, names of these, and what they were
    called: tuple[tuple[dict[str, Any], tuple[str, ...], list[Any]], ...]
    answer: Checks | str  # or why its code is not recognised


UNKNOWN = Recognised(None, "", (), (), "")
HELD_BY_MODULE = vars(nn.Module).items()
MODULE_CALL = {name: vars(nn.Module)[name] for name in ("__call__", "_call_impl")}.items()
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
    names, modules, wanted = zip(*asked, strict=True)
    classes = _of_classes(tuple(map(type, modules)))
    skips_call = False
    is_traced = torch.compiler.is_compiling()
    for name, module, roles, (role, answer) in zip(names, modules, wanted, classes, strict=True):
        if role not in roles:
            return permanent(_other_role(name, module, roles))
        if isinstance(answer, str):
            return permanent(f"{_subject(name)} {answer}")
        if isinstance(answer, Refusal):
            return transient(f"{_subject(name)} {answer.text}")
        functions, skips_its_call, row, added = answer
        attributes = module.__dict__
        for looked_up in (*functions, *module._modules):
            if looked_up in attributes and not _is_generated(module, looked_up):
                return permanent(
                    f"{_subject(name)} has a {looked_up} set on it, which would be skipped"
                )
        for function in added:
            if function in attributes or function in module._modules:
                kind = qualified_name(type(module))
                return permanent(f"{_subject(name)} is a {kind}, which overrides {function}")
        if skips_its_call:
            skips_call = True
            if (
                attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
            ):
                return transient(f"{_subject(name)} has hooks, which would be skipped")
        if row is None:
            continue
        for registry in PYG_HOOKS:
            if attributes[registry]:
                return transient(f"{_subject(name)} has hooks, which would be skipped")
        for attribute, values in row.messages:
            if getattr(module, attribute, values[0]) not in values:
                return permanent(f"{_subject(name)} has another {attribute} than {values[0]!r}")
        if getattr(module, EXPLAIN, None):
            return transient(f"{_subject(name)} is watched by an explainer")
        child_name = f"{name}.{AGGREGATION}" if name else AGGREGATION
        refusal = why_not_plain((child_name, module._modules.get(AGGREGATION), (SUM,)))
        if refusal is not None:
            return refusal
    if skips_call and (is_traced or any(GLOBAL_HOOKS)) and has_global_hooks():
        return transient("hooks are registered for all modules, which would be skipped")
    if is_traced or num_function_modes():
        mode = function_modes()
        if mode:
            return transient(f"the mode {mode} is active, which may change what functions return")
    return None


def modules_alone_decide() -> bool:
    """Return whether plain modules compute what they would: no mode, hooks for all, or trace."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or is_exporting()
        or num_function_modes()
        or any(GLOBAL_HOOKS)
        or not MODULE_CALL <= HELD_BY_MODULE
    )


class Namespaces(NamedTuple):
    """Namespaces of classes, and of the functions that their code looks up."""

    held: list[Mapping[str, Any]]  # by classes, as it is
    recorded: list[dict[str, Any]]  # as it was
    # where functions of classes look up others, as in `Recognised`
    called: list[tuple[dict[str, Any], tuple[str, ...], list[Any]]]

    def are_as_recorded(self) -> bool:
        """Return whether nothing changed."""
        if self.held != self.recorded:
            return False
        for namespace, names, looked_up in self.called:
            if [*map(namespace.get, names)] != looked_up:
                return False
        return True


def namespaces_of(kinds: tuple[type, ...]) -> Namespaces | None:
    """Return the namespaces of classes that are as they were recognised, None if one is not."""
    held: list[Mapping[str, Any]] = []
    recorded: list[dict[str, Any]] = []
    called: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for kind, (role, answer) in zip(kinds, _of_classes(kinds), strict=True):
        if role is None or type(answer) is not tuple:
            return None
        recognised = _RECOGNISED[kind]
        for now, then in recognised.classes:
            held.append(now)
            recorded.append(then)
        for namespace, names, looked_up in recognised.called:
            functions = called.setdefault(id(namespace), (namespace, {}))[1]
            functions.update(zip(names, looked_up, strict=True))
    looked_up_in = [(there, tuple(names), list(names.values())) for there, names in called.values()]
    return Namespaces(held, recorded, looked_up_in)


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


def why_overridden(kind: type, base: type) -> str | None:
    """Return what a subclass of a class of `TABLE` overrides of what it computes, or None."""
    row = TABLE[qualified_name(base)]
    names = {"__call__", "_call_impl", "__getattr__", "__getattribute__"}
    names |= {attribute for attribute, _ in row.messages}
    names |= {name for name, _, _ in _functions_of(base, row)}
    names.update(GENERATED if row.messages else ())
    for subclass in kind.__mro__[: kind.__mro__.index(base)]:
        for name, value in vars(subclass).items():
            if name in names and not (name in GENERATED and _is_generated_for(subclass, value)):
                return f"overrides {name}"
    return None


def _counts(name: str, row: Kind) -> bool:
    """Return whether a function of a class in `TABLE` decides over the result of its modules."""
    if name in NOT_COMPUTING:
        return False
    return name != "forward" or "forward" not in row.keeps


def _functions_of(kind: type, row: Kind) -> Iterator[tuple[str, type, Any]]:
    """Yield name, class and value of each function that counts, of a class and its bases."""
    for base in _classes_of(kind):
        for name, value in vars(base).items():
            if _is_function(value) and _counts(name, row):
                yield name, base, value


def _classes_of(kind: type) -> list[type]:
    """Return a class and its bases below nn.Module, in the order of resolution."""
    return [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]


def _is_function(value: Any) -> bool:
    is_wrapped = isinstance(value, (property, staticmethod, classmethod))
    return is_wrapped or (callable(value) and not isinstance(value, type))


def recognise(
    kind: type, unknown_body: Callable[[Callable], str | None] | None = None
) -> str | None:
    """Recognise a class of `TABLE` by its functions as they are now; return why not, or None.

    `unknown_body` returns why the body of a function that the package of the class defines is not
    known, or None. Without it, all that the package defines is.
    """
    class_name = qualified_name(kind)
    row = TABLE[class_name]
    reason = None
    functions: dict[str, None] = {}
    computing = []
    for name, owner, function in _functions_of(kind, row):
        reason = reason or _why_unknown(kind, owner, name, function, unknown_body)
        functions[name] = None
        computing.append(function)
    if row.messages:  # generated or not yet
        functions |= dict.fromkeys(GENERATED)
    skips_call = "hooks" not in row.keeps
    classes: list[tuple[Mapping[str, Any], dict[str, Any]]] = []
    for base in _classes_of(kind):
        classes.append((vars(base), dict(vars(base))))
    if skips_call:
        functions["_call_impl"] = None
        refusal = _why_call_changed()
        if refusal is not None:
            reason = reason or refusal.text
    recorded: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for namespace, name in _called_by(computing):
        recorded.setdefault(id(namespace), (namespace, {}))[1][name] = namespace[name]
        if _is_foreign(namespace, name):
            reason = reason or _why_replaced(namespace, name)
    called = []
    for namespace, functions_there in recorded.values():
        called.append((namespace, tuple(functions_there), list(functions_there.values())))
    functions.pop("__call__", None)  # which is looked up on the class
    answer: Checks = (tuple(functions), skips_call, row if row.messages else None, ())
    _RECOGNISED[kind] = Recognised(
        row.role, class_name, tuple(classes), tuple(called), reason or answer
    )
    return reason


def _called_by(functions: list[Callable]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield namespace and name of each function of another package that functions look up.

    A replacement of this library calls what it replaces, or computes the same.
    """
    for function in functions:
        function = getattr(function, "fget", function)  # of a property
        function = getattr(function, "__func__", function)
        function = original_of(function)
        code: Any = getattr(function, "__code__", None)
        for namespace, name in _lookups(code, getattr(function, "__globals__", {})):
            value = namespace[name]
            package = _package(namespace.get("__name__", ""))
            is_own = package == "anemoi_gt" or package in sys.stdlib_module_names
            if callable(value) and not isinstance(value, type) and not is_own:
                yield namespace, name


def _lookups(code: CodeType | None, names: dict) -> Iterator[tuple[dict, str]]:
    """Yield where code looks up names that are no modules: `F.linear` as ("linear", of F)."""
    if code is None:
        return
    for dotted_name in _global_names(code):
        namespace = names
        for name in dotted_name:
            if name not in namespace:  # a builtin function
                break
            if not isinstance(namespace[name], ModuleType):
                yield namespace, name
                break
            namespace = vars(namespace[name])


@cache  # reading bytecode is nine tenths of the time of `install`
def _global_names(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the global names in code with what follows: `F.linear` is ("F", "linear")."""
    names: list[tuple[str, ...]] = []
    for constant in code.co_consts:  # functions within functions, and comprehensions
        if isinstance(constant, CodeType):
            names += _global_names(constant)
    is_continued = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            names.append((instruction.argval,))
            is_continued = True
        elif is_continued and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names[-1] += (instruction.argval,)
        else:
            is_continued = False
    return tuple(names)


def _why_replaced(namespace: dict[str, Any], name: str) -> str:
    return f"calls {namespace['__name__']}.{name}, which was replaced"


def _is_foreign(namespace: dict[str, Any], name: str) -> bool:
    """Return whether a function was made in the program of a user: neither built in nor installed.

    Functions of one package are used by others, so it may be of any of those that are recognised.
    """
    function = namespace[name]
    names = getattr(function, "__globals__", None)
    if names is None:
        return not isinstance(function, BuiltinFunctionType)
    package = _package(names.get("__name__", ""))
    return package not in (_package(namespace["__name__"]), "einops", *_OWN_PACKAGES)


def _why_unknown(
    kind: type,
    owner: type,
    name: str,
    function: Any,
    unknown_body: Callable[[Callable], str | None] | None,
) -> str | None:
    """Return why a function of a class is not the code of its class that was read, or None.

    A replacement of this library computes what it replaces.
    """
    function = original_of(getattr(function, "__func__", function))
    if not _is_defined_in(function, owner):
        return f"is a {qualified_name(kind)}, whose {name} was replaced"
    function = getattr(function, "fget", function)
    package = _package(getattr(function, "__globals__", {}).get("__name__", ""))
    if unknown_body is None or package != _package(kind.__module__):
        return None
    if _is_generated_for(owner, function):
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
        recognised = _RECOGNISED.get(kind) or _recognised(kind)
        role, _, classes, called, answer = recognised
        if type(answer) is tuple:
            # as they are now: functions of classes and modules are patched at any time
            for held, recorded in classes:
                if held != recorded:
                    answer = _why_changed(kind, recognised) or answer
                    break
            for namespace, names, looked_up in called:
                if [*map(namespace.get, names)] != looked_up:
                    answer = transient(_why_called_changed(namespace, names, looked_up))
        answers[kind] = role, answer
    if not MODULE_CALL <= HELD_BY_MODULE:
        refusal = _why_call_changed()
        if refusal is not None:
            for kind, (role, answer) in answers.items():
                if type(answer) is tuple and answer[1]:
                    answers[kind] = role, refusal
    return tuple(map(answers.__getitem__, kinds))


def _why_changed(kind: type, recognised: Recognised) -> Refusal | str | None:
    """Return which function of a class is another one than was recognised, or None.

    Differences that do not count are recorded, so that they are not compared again; what was
    recorded before stays as it was, for those who compare with it.
    """
    row = TABLE[recognised.class_name]
    held, recorded = zip(*recognised.classes, strict=True)
    for index, owner in enumerate(_classes_of(kind)):
        for name in {**recorded[index], **held[index]}:
            if held[index].get(name) is recorded[index].get(name) or not _counts(name, row):
                continue
            function = _resolved(name, held[index:])
            before = _resolved(name, recorded[index:])
            if name in GENERATED:
                if _is_generated_for(owner, function):
                    continue
            elif before is None or not (_is_function(before) or _is_function(function)):
                continue  # a new name, which nothing that is known looks up
            if original_of(function) is original_of(before):
                continue
            return _why_other_method(kind, recognised.class_name, name)
    classes = tuple((now, dict(now)) for now, _ in recognised.classes)
    _RECOGNISED[kind] = recognised._replace(classes=classes)
    return None


def _resolved(name: str, classes: Sequence[Mapping[str, Any]]) -> Any:
    """Return an attribute of a class from what it and its bases hold, or held."""
    for held in classes:
        if name in held:
            return held[name]
    return getattr(nn.Module, name, None)


def _why_called_changed(namespace: dict[str, Any], names: Sequence[str], recorded: list) -> str:
    pairs = zip(names, recorded, strict=True)
    changed = [name for name, function in pairs if namespace.get(name) is not function]
    return _why_replaced(namespace, changed[0])


def _why_call_changed() -> Refusal | None:
    """Return that nn.Module calls modules otherwise, or None for what PyTorch's tracers replace."""
    for name, _ in MODULE_CALL:
        if not _is_defined_in(getattr(nn.Module, name), nn.Module):
            return transient(f"is called by nn.Module.{name}, which was replaced")
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
    if "hooks" not in TABLE[recognised.class_name].keeps:
        return UNKNOWN
    overridden = why_overridden(kind, base)
    if overridden is not None:
        reason = f"is a {qualified_name(kind)}, which {overridden}"
        return recognised._replace(answer=reason)
    if isinstance(recognised.answer, str):
        return recognised
    subclasses = kind.__mro__[: kind.__mro__.index(base)]
    added = []
    classes = []
    for subclass in subclasses:
        classes.append((vars(subclass), dict(vars(subclass))))
        added += [name for name, value in vars(subclass).items() if _is_function(value)]
    recognised = recognised._replace(
        classes=(*classes, *recognised.classes),
        answer=(*recognised.answer[:3], tuple(added)),
    )
    _RECOGNISED[kind] = recognised
    return recognised


def has_global_hooks() -> bool:
    """Return whether foreign global module hooks exist; this library's only observe."""
    for registry in GLOBAL_HOOKS:
        for hook in registry.values():
            if _package(getattr(hook, "__module__", "")) != "anemoi_gt":
                return True
    return False


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
    """Return whether a function of a class is code of its package or of a base's, or PyG's."""
    function = getattr(function, "fget", function)
    package = _package(getattr(function, "__globals__", {}).get("__name__", ""))
    # of a base's: decorators of PyTorch, and what PyG keeps on a class of another package
    packages = [_package(base.__module__) for base in owner.__mro__]
    return package in packages or _is_generated_for(owner, function)


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
