"""Results of reading modules, kept while the modules are unchanged.

    answer = reading((block,), key, read, is_kept)    read(), unless it was kept and nothing changed

An answer may depend on its key and on what `Snapshot` compares: the modules, those below them,
their classes and parameters. All of it is compared in each call, in C: 30 us for a block of 17
modules, where reading it takes 100. A value that can change in place cannot be compared with what
it was, so that answers are kept only of modules whose attributes are numbers, names, settings or
empty containers. Of others they are read in each call, and so they are where more than modules
decides: while PyTorch traces, in a mode, with hooks for all modules.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn.layer_kernels import LayerKernels
from anemoi_gt.nn.plain import MODULE_HOOKS, Namespaces, modules_alone_decide, namespaces_of
from anemoi_gt.refusal import Refusal, RefusalKind

Answer = TypeVar("Answer")

# Attributes of modules that decide nothing: bookkeeping of nn.Module, whose hooks, modules and
# parameters are compared by themselves, and what generated methods of PyG (2.8) read.
NOT_READ = (vars(nn.Module()).keys() - {"training", "_buffers"}) | {
    *("inspector", "_user_args", "_fused_user_args", "_edge_user_args"),
    "layer_kernels",  # constructors
}
# values that cannot change in place
FROZEN = (bool, int, float, str, type(None), torch.dtype, KernelConfig, LayerKernels)
CONTAINERS = (dict, list, set)
MOST_MODULES = 200  # of a snapshot; a block has about 20
hooks_of = itemgetter(*MODULE_HOOKS)
# `torch.utils.swap_tensors` exchanges all of two tensors, their classes too, in place
kind_of_parameter = attrgetter("__class__", "dtype", "shape")


class CannotKeepError(Exception):
    """Something of a module may change without a trace; never leaves this file."""


class Snapshot(NamedTuple):
    """Modules as they were. It holds their parameters, and nothing that holds the modules."""

    kinds: list[type]
    read: list[Callable[[dict[str, Any]], Any]]  # of the attributes of a module, those that count
    values: list[Any]  # what each of these returned
    numbers: list[int]  # of attributes
    names: list[str]  # of children and parameters
    parameters: list[nn.Parameter | None]
    kinds_of_parameters: list[tuple[type, torch.dtype, torch.Size]]
    namespaces: Namespaces  # of classes and of what they call

    @classmethod
    def of(cls, roots: tuple[nn.Module, ...]) -> "Snapshot":
        """Take a snapshot of modules and all below them. Raise CannotKeepError."""
        modules, attributes, tables = _walk(roots, MOST_MODULES)
        kinds = list(map(type, modules))
        namespaces = namespaces_of(tuple(dict.fromkeys(kinds)))
        parameters = _parameters_in(tables)
        if namespaces is None or _have_hooks(attributes) or not all(map(_is_plain, parameters)):
            raise CannotKeepError
        read: list[Callable] = []
        values: list[Any] = []
        for of_module in attributes:
            # two at least, because of one name it would be no tuple
            names = [name for name in of_module if name not in NOT_READ]
            read.append(itemgetter("training", *names))
            values.append(tuple(map(_frozen, read[-1](of_module))))
        return cls(
            kinds=kinds,
            read=read,
            values=values,
            numbers=list(map(len, attributes)),
            names=[*chain.from_iterable(tables)],
            parameters=parameters,
            kinds_of_parameters=_kinds_of(parameters),
            namespaces=namespaces,
        )

    def is_of(self, roots: tuple[nn.Module, ...]) -> bool:
        """Return whether modules are as they were."""
        try:
            modules, attributes, tables = _walk(roots, len(self.kinds))
            if list(map(type, modules)) != self.kinds:
                return False
            values = [
                read(of_module) for read, of_module in zip(self.read, attributes, strict=True)
            ]
            parameters = _parameters_in(tables)
            return (
                values == self.values
                and list(map(len, attributes)) == self.numbers
                and [*chain.from_iterable(tables)] == self.names
                and all(map(is_, parameters, self.parameters))
                and _kinds_of(parameters) == self.kinds_of_parameters
                and not _have_hooks(attributes)
                and self.namespaces.are_as_recorded()
            )
        # an attribute has gone, or became a tensor or array of several elements, which is no bool
        except (CannotKeepError, KeyError, RuntimeError, ValueError):
            return False


class Reading(NamedTuple):
    """An answer, and what it was read from."""

    key: tuple
    snapshot: Snapshot
    answer: Any


_READINGS: WeakKeyDictionary[nn.Module, Reading] = WeakKeyDictionary()


def reading(
    roots: tuple[nn.Module, ...],
    key: tuple,
    read: Callable[[], Answer],
    is_kept: Callable[[Answer], bool],
) -> Answer:
    """Return the result of `read`, or the one kept for this key while the modules are unchanged.

    Parameters
    ----------
    roots : tuple of nn.Module
        What is read, with all modules below. One answer is kept, with the first of them.
    key : tuple
        Whatever else decides, with values that cannot change.
    read : callable
        Reads the modules.
    is_kept : callable
        Whether an answer may be kept: it must depend on nothing else.
    """
    owner = roots[0]
    if not isinstance(owner, nn.Module) or not modules_alone_decide():
        return read()
    kept = _READINGS.get(owner)
    if kept is not None:
        if kept.key == key and kept.snapshot.is_of(roots):
            return kept.answer
        _READINGS.pop(owner, None)  # unless another thread did
    answer = read()
    if is_kept(answer):
        with suppress(CannotKeepError):
            _READINGS[owner] = Reading(key, Snapshot.of(roots), answer)
    return answer


def none_refused(answer: Any) -> bool:
    """Return whether an answer is and holds no refusal but of what would not be faster."""
    parts = (answer,) if isinstance(answer, Refusal) else answer
    refusals = [part for part in parts if isinstance(part, Refusal)]
    return all(refusal.kind is RefusalKind.NOT_FASTER for refusal in refusals)


def _walk(
    roots: tuple[nn.Module, ...], limit: int
) -> tuple[list[nn.Module], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return modules and all below them, their attributes, and their children and parameters."""
    modules = list(roots)
    attributes: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    for module in modules:  # which grow
        of_module = module.__dict__
        attributes.append(of_module)
        children = of_module["_modules"]
        tables += (children, of_module["_parameters"])
        if children:
            modules += [child for child in children.values() if child is not None]
            if len(modules) > limit:  # or one that is below itself would never end
                raise CannotKeepError
    return modules, attributes, tables


def _parameters_in(tables: list[dict[str, Any]]) -> list[nn.Parameter | None]:
    return [*chain.from_iterable([table.values() for table in tables[1::2]])]


def _kinds_of(
    parameters: Iterable[nn.Parameter | None],
) -> list[tuple[type, torch.dtype, torch.Size]]:
    return [kind_of_parameter(parameter) for parameter in parameters if parameter is not None]


def _have_hooks(attributes: list[dict[str, Any]]) -> bool:
    return any(chain.from_iterable(map(hooks_of, attributes)))


def _is_plain(parameter: nn.Parameter | None) -> bool:
    """Return whether a parameter can be held: its hooks may hold its module."""
    if parameter is None:
        return True
    has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return type(parameter) is nn.Parameter and not vars(parameter) and not has_hooks


def _frozen(value: Any) -> Any:
    """Return a value that cannot change, or a copy of an empty container. Raise CannotKeepError."""
    kind = type(value)
    if kind in FROZEN or isinstance(value, type):
        return value
    if kind is tuple:
        return tuple(map(_frozen, value))
    if isinstance(value, CONTAINERS) and not value:
        return kind()
    # functions of Anemoi on a GPU, which hold no module
    if kind is FunctionType and value.__closure__ is None:
        return value
    if kind is MethodType and isinstance(value.__self__, type):  # `apply` of an autograd function
        return value
    raise CannotKeepError
