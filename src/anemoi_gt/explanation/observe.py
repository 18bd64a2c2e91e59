"""Watching a model compute: the only place that listens to modules and to PyTorch's dispatcher, for as long as one call takes.

Nothing is written on the modules: hooks of a module's own would change what some of them do, for those of Anemoi compute
otherwise where a hook watches a part of them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from anemoi_gt.custom_ops import NAMESPACE

ATTENTIONS = {f"{NAMESPACE}::edge_attention_{backend}": backend for backend in ("torch", "triton")}


class Call(NamedTuple):
    """One attention, as its operator was called."""

    module: nn.Module | None  # the innermost one that was computing
    operator: str
    backend: str
    arguments: dict[str, Any]  # by the names of the operator's schema
    records: bool  # whether gradients were recorded


class Watch(TorchDispatchMode):
    """Hands the attentions that this thread computes, and what module does, to `see`; keeps none of their tensors."""

    def __init__(self, see: Callable[[Call], None]):
        super().__init__()
        self._see = see
        self._thread = threading.get_ident()
        self._inside: list[tuple[nn.Module | None, bool]] = [(None, torch.is_grad_enabled())]

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name().partition(".")[0]
        if name in ATTENTIONS:
            names = [argument.name for argument in operator._schema.arguments]
            arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
            module, records = self._inside[-1]
            self._see(Call(module, name, ATTENTIONS[name], arguments, records))
        return operator(*args, **(kwargs or {}))

    def enter(self, module: nn.Module, inputs) -> None:
        """Note that a module begins; gradients are asked about here, for inside of an operator none are recorded."""
        if threading.get_ident() == self._thread:
            self._inside.append((module, torch.is_grad_enabled()))

    def leave(self, module: nn.Module, inputs, output) -> None:
        """Note that a module ends, also by an exception."""
        if threading.get_ident() == self._thread:
            self._inside.pop()


@contextmanager
def watching(see: Callable[[Call], None]) -> Iterator[None]:
    """Call `see` with each attention computed inside, when it comes: a list of them all would hold every layer's operands."""
    watch = Watch(see)
    hooks = [register_module_forward_pre_hook(watch.enter), register_module_forward_hook(watch.leave, always_call=True)]
    try:
        with watch:
            yield
    finally:
        for hook in hooks:
            hook.remove()
