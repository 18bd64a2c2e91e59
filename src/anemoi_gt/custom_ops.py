"""Registration of custom operators, and queries about the context of their calls.

An operator costs 0.15 to 0.7 ms of host time per call (torch 2.11). `is_plain` says which calls may
do without. Differentiable operators are `anemoi_gt.ops.operator.Operator`s.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from anemoi_gt.torch_compat import (
    is_transformed,
    num_dispatch_modes,
    profiler_is_enabled,
    transforms_are_active,
)

NAMESPACE = "anemoi_gt"


def define_operator(function: Callable) -> torch._ops.OpOverload:
    """Register `function` as `torch.ops.anemoi_gt.<its name>`; return the operator."""
    return register(function.__name__, function)


def register(name: str, function: Callable) -> torch._ops.OpOverload:
    """Register `function` as `torch.ops.anemoi_gt.<name>`; return the operator.

    The schema is inferred from the annotations. `function` must not mutate its arguments or return
    them. `torch.library.custom_op` checks this in every call, which costs more than a kernel launch
    (0.7 ms per call with torch 2.11 on Python 3.12); here, the tests check it with `opcheck`.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(f"{NAMESPACE}::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"{NAMESPACE}::{name}", "default")(function)
    return getattr(torch.ops.anemoi_gt, name).default


def on_device(device: torch.device) -> AbstractContextManager:
    """Return a context in which a device is current."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


_PLAIN = frozenset(
    (Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list, torch.dtype)
)


def is_plain(*args: Any) -> bool:
    """Return whether the call of an operator with `args` can skip the dispatcher.

    False in traced code and under torch.func transforms, dispatch modes and profilers, which need
    the operator; for tensor subclasses and meta tensors; and if PyTorch's private queries are
    unavailable.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    # no function of its own: this is asked in every call of an operator
    if transforms_are_active() or num_dispatch_modes() or profiler_is_enabled():
        return False
    if not _PLAIN.issuperset(map(type, args)):
        return False
    for arg in args:
        if isinstance(arg, Tensor):
            return not arg.is_meta
    raise ValueError("an operator must have a tensor among its arguments, got none")


def needs_gradient(*operands: Tensor | None) -> bool:
    """Return whether a gradient of an operand may be needed; always True under torch.func."""
    if not torch.is_grad_enabled():
        return False
    for operand in operands:
        if operand is not None and operand.requires_grad:
            return True
    return is_transformed()
