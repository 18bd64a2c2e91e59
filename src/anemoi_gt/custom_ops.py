"""Registration of custom operators, and queries about the context of their calls.

The schema of an operator is flat, but functions here take related operands as a NamedTuple, which
`flat_arguments` replaces by its fields. An operator costs 0.15 to 0.7 ms of host time per call
(torch 2.11). So eager calls of the `triton` backend that are `is_plain` use autograd functions
instead; operators are for traced code.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anemoi_gt.torch_compat import forward_mode_is_active, is_transformed, is_watched

NAMESPACE = "anemoi_gt"
NO_FORWARD_MODE = (
    "forward-mode derivatives are not supported by edge_attention, got an operand with a tangent "
    "(torch.func.jvp, torch.autograd.forward_ad); use torch.autograd.grad, or plain PyTorch "
    "operations where tangents are needed"
)


def flat_arguments(function: Callable) -> Callable:
    """Return `function` with each parameter annotated as a NamedTuple replaced by its fields.

    The NamedTuple may be generic in the type of its fields, as in `Pair[Tensor]`.
    """
    groups = []
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        kind = parameter.annotation
        fields = _field_annotations(kind) if hasattr(kind, "_fields") else None
        flat = {parameter.name: kind} if fields is None else fields
        groups.append((None if fields is None else kind._make, len(flat)))
        for name, annotation in flat.items():
            parameters.append(
                inspect.Parameter(name, parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
            )
    if all(make is None for make, _ in groups):
        return function

    @wraps(function)
    def flat_function(*args):
        grouped = []
        start = 0
        for make, size in groups:
            if make is None:
                grouped.append(args[start])
            else:
                grouped.append(make(args[start : start + size]))
            start += size
        return function(*grouped)

    signature = inspect.signature(function).replace(parameters=parameters)
    vars(flat_function)["__signature__"] = signature  # read by `inspect.signature`
    return flat_function


def _field_annotations(kind: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a NamedTuple with at most one type parameter."""
    annotations = get_type_hints(get_origin(kind) or kind)
    for argument in get_args(kind):
        for name, annotation in annotations.items():
            if isinstance(annotation, TypeVar):
                annotations[name] = argument
            elif getattr(annotation, "__parameters__", ()):  # `T | None`
                annotations[name] = annotation[argument]
    return annotations


def define_operator(function: Callable) -> torch._ops.OpOverload:
    """Register `function` as `torch.ops.anemoi_gt.<its name>`; return the operator.

    The schema is inferred from the annotations. `function` must not mutate its arguments or return
    them. `torch.library.custom_op` checks this in every call, which costs more than a kernel launch
    (0.7 ms per call with torch 2.11 on Python 3.12); here, the tests check it with `opcheck`.
    """
    name = f"{NAMESPACE}::{function.__name__}"
    flat = flat_arguments(function)
    schema = torch.library.infer_schema(flat, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default")(flat)
    operator = getattr(torch.ops.anemoi_gt, function.__name__).default
    operator.function = flat  # called directly to bypass the dispatcher
    return operator


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Return a context in which the device of `tensor` is current."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.get_device())


_PLAIN = frozenset(
    (Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list, torch.dtype)
)


def is_plain(*args) -> bool:
    """Return whether the call of an operator with `args` can skip the dispatcher.

    False in traced code and under torch.func transforms, dispatch modes and profilers, which need
    the operator; for tensor subclasses and meta tensors; and if PyTorch's private queries are
    unavailable.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_watched():
        return False
    if not _PLAIN.issuperset(map(type, args)):
        return False
    first_tensor = next(arg for arg in args if isinstance(arg, Tensor))
    return not first_tensor.is_meta


def needs_gradient(*operands: Tensor | None) -> bool:
    """Return whether a gradient of an operand may be needed; always True under torch.func."""
    if not torch.is_grad_enabled():
        return False
    if any(operand is not None and operand.requires_grad for operand in operands):
        return True
    return is_transformed()


def refuse_second_derivative(operator: torch._ops.OpOverload) -> None:
    """Make the derivative of `operator`, which is itself a first derivative, raise RuntimeError."""
    torch.library.register_autograd(operator, _refuse_second_derivative)


def _refuse_second_derivative(_ctx, *_):
    raise RuntimeError(
        "double backward is not supported by edge_attention, got a backward through its backward "
        "(create_graph=True); use plain PyTorch operations where a second derivative is needed"
    )


def refuse_forward_mode(*operands: Tensor | None) -> None:
    """Raise RuntimeError if an operand has a tangent, which an operator would drop silently."""
    if torch.compiler.is_compiling() or not forward_mode_is_active():
        return
    for operand in operands:
        if operand is not None and forward_ad.unpack_dual(operand).tangent is not None:
            raise RuntimeError(NO_FORWARD_MODE)
