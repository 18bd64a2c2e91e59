"""Custom operators from functions whose arguments may be tuples, and their derivatives, in PyTorch's dispatcher.

An operator's schema is flat. A function takes operands that belong together as one NamedTuple; `flat_arguments` turns
each into its fields, in order.

The dispatcher's private functions save 0.15 to 0.7 ms a call. They are in `_private_dispatcher`; without them, in
another version of PyTorch, `torch.library.register_autograd` serves. `assert_async` and `is_transformed` have public
fallbacks too.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

NAMESPACE = "anemoi_gt"
NO_FORWARD_MODE = (
    "forward-mode derivatives are not supported by edge_attention, got an operand with a tangent "
    "(torch.func.jvp, torch.autograd.forward_ad); use torch.autograd.grad, or plain PyTorch operations where "
    "tangents are needed"
)
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # what it registers lives as long as it does


def flat_arguments(function: Callable) -> Callable:
    """Return `function` with the fields of each parameter annotated as a NamedTuple in the parameter's place."""
    groups, parameters = [], []
    for parameter in inspect.signature(function).parameters.values():
        kind = parameter.annotation
        fields = get_type_hints(kind) if hasattr(kind, "_fields") else None
        flat = {parameter.name: kind} if fields is None else fields
        groups.append((None if fields is None else kind._make, len(flat)))
        parameters += [inspect.Parameter(n, parameter.POSITIONAL_OR_KEYWORD, annotation=a) for n, a in flat.items()]
    if all(make is None for make, _ in groups):
        return function

    @wraps(function)
    def flat_function(*args):
        grouped, start = [], 0
        for make, size in groups:
            grouped.append(args[start] if make is None else make(args[start : start + size]))
            start += size
        return function(*grouped)

    flat_function.__signature__ = inspect.signature(function).replace(parameters=parameters)
    return flat_function


def define_operator(function: Callable) -> torch._ops.OpOverload:
    """Register `function` as `torch.ops.anemoi_gt.<its name>`, with a schema from its annotations; return the operator.

    It must not mutate its arguments nor return them. `torch.library.custom_op` checks that at every call, which costs
    more than the launch of a kernel (0.7 ms a call with torch 2.11 on Python 3.12); here `opcheck` does, in the tests.
    """
    name, flat = f"{NAMESPACE}::{function.__name__}", flat_arguments(function)
    schema = torch.library.infer_schema(flat, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default")(flat)
    operator = getattr(torch.ops.anemoi_gt, function.__name__).default
    operator.function = flat  # for calls that bypass the dispatcher
    return operator


class _Dispatcher(NamedTuple):
    """Private parts of PyTorch's dispatcher."""

    after_autograd: object  # key set
    below_autograd: Callable  # makes the context in which autograd is skipped
    any_requires_grad: Callable


def _private_dispatcher() -> _Dispatcher | None:
    """Return the private parts of PyTorch that make calls cheap; None where this version does not have them."""
    try:
        if "with_keyset" not in inspect.signature(torch.library.Library.impl).parameters:
            return None
        _ = torch._ops.OpOverload.redispatch
        names = ("_after_autograd_keyset", "_AutoDispatchBelowAutograd", "_any_requires_grad")
        return _Dispatcher(*(getattr(torch._C, name) for name in names))
    except AttributeError:
        return None


_DISPATCHER = _private_dispatcher()


_HAS_TRANSFORMS = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Return a context in which the device of `tensor` is current."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.get_device())


def is_transformed() -> bool:
    """Return whether a transform of torch.func (grad, vmap, ...) is active; in traced code that is PyTorch's matter.

    True without PyTorch's private function that knows: what serves transforms serves all calls, with more host time.
    """
    return not torch.compiler.is_compiling() and _HAS_TRANSFORMS()


_MODES = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_PROFILES = getattr(torch.autograd, "_profiler_enabled", lambda: True)
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list, torch.dtype))


def is_plain(*args) -> bool:
    """Return whether only autograd concerns an operator call with `args`: then it may bypass the dispatcher.

    Not in traced code, transforms of torch.func, dispatch modes and profilers, which look for operators, for tensors of
    other classes or without memory, or without PyTorch's private functions that tell.
    """
    if torch.compiler.is_compiling() or _HAS_TRANSFORMS() or _MODES() or _PROFILES() or torch.jit.is_tracing():
        return False
    return _PLAIN.issuperset(map(type, args)) and not next(arg.is_meta for arg in args if isinstance(arg, Tensor))


class _SavedOnce:
    """The context of an autograd function; checkpointing lets `saved_tensors` be read only once."""

    def __init__(self, ctx):
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors

    def __getattr__(self, name: str) -> object:
        return getattr(self._ctx, name)


# False without PyTorch's private function: then PyTorch's own error says that a batch is not supported.
_IS_BATCHED_BY_AUTOGRAD = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)


def by_batch_entry(backward: Callable) -> Callable:
    """Let `backward(ctx, *gradients)` take batched gradients: it is called for each entry.

    They are those of `torch.autograd.grad(is_grads_batched=True)` and `jacobian(vectorize=True)`, which run PyTorch's
    older vmap: `is_transformed` does not see it, and it has no rule for lists of results.
    """

    @wraps(backward)
    def backward_of_batch(ctx, *gradients):
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        batched = [gradient is not None and _IS_BATCHED_BY_AUTOGRAD(gradient) for gradient in gradients]
        if not any(batched):
            return backward(ctx, *gradients)

        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        unwrapped = [
            torch._remove_batch_dim(gradient, level, 1, 0) if wrapped else gradient
            for gradient, wrapped in zip(gradients, batched, strict=True)
        ]
        size = unwrapped[batched.index(True)].shape[0]
        ctx = _SavedOnce(ctx)
        entries = []
        for i in range(size):
            pairs = zip(unwrapped, batched, strict=True)
            entry = [rows[i] if wrapped else rows for rows, wrapped in pairs]
            entries.append(backward(ctx, *entry))
        results = []
        for values in zip(*entries, strict=True):
            if values[0] is None:
                results.append(None)
            else:
                results.append(torch._add_batch_dim(torch.stack(values), 0, level))
        return tuple(results)

    return backward_of_batch


def needs_gradient(*operands: Tensor | None) -> bool:
    """Return whether a gradient of an operand may be asked for; under torch.func, whose wrappers hide it, always."""
    if not torch.is_grad_enabled():
        return False
    return any(operand is not None and operand.requires_grad for operand in operands) or is_transformed()


def define_gradient(operator: torch._ops.OpOverload, setup_context: Callable, backward: Callable) -> Callable:
    """Make `operator` differentiable, as `torch.library.register_autograd` does for operators of any schema.

    Return what is to be called in place of `operator`: the same, and under transforms of torch.func, which take no
    gradient that is registered with the dispatcher, an autograd function above it.

    `register_autograd` reads the schema at every call, argument by argument (0.15 ms with 18 arguments, torch 2.11 on
    Python 3.12). Our operators have no defaults, keyword-only arguments or lists of tensors, so this is not needed.

    `operator` is of `define_operator`. `setup_context(ctx, inputs, output)` and `backward(ctx, *output gradients)` are
    those of `register_autograd`; the latter returns a tuple of a gradient or None for each argument.
    """
    private = _DISPATCHER
    backward = by_batch_entry(backward)
    if private is None:
        torch.library.register_autograd(operator, backward, setup_context=setup_context)
        return transformable(operator, setup_context, backward)

    def below(keyset, args):
        if keyset is None:
            return operator.function(*args)
        with private.below_autograd():
            return operator.redispatch(keyset & private.after_autograd, *args)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args_and_keyset):  # the keyset last, so that ctx.needs_input_grad begins with the arguments
            *args, keyset = args_and_keyset
            output = below(keyset, args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx, *gradients):
            return *backward(ctx, *gradients), None

    def autograd(keyset, *args):
        if torch.is_grad_enabled() and private.any_requires_grad(*args):
            return Differentiable.apply(*args, keyset)
        return below(keyset, args)

    _LIBRARY.impl(operator.name().partition("::")[2], autograd, "Autograd", with_keyset=True)
    dispatched = transformable(operator, setup_context, backward)
    return lambda *args: autograd(None, *args) if is_plain(*args) else dispatched(*args)


def transformable(operator: torch._ops.OpOverload, setup_context: Callable, backward: Callable) -> Callable:
    """Return a function that calls `operator`, through an autograd function while torch.func transforms it."""
    keep_context, differentiate = setup_context, backward

    class Transformed(torch.autograd.Function):
        setup_context = staticmethod(keep_context)
        backward = staticmethod(differentiate)

        @staticmethod
        def forward(*args):
            results = operator(*args)
            return tuple(results) if isinstance(results, list) else results

        @staticmethod
        def jvp(ctx, *_):
            raise RuntimeError(NO_FORWARD_MODE)

        @staticmethod
        def vmap(info, in_dims, *args):
            def entry(i: int) -> list:
                pairs = zip(args, in_dims, strict=True)
                return [arg.select(dim, i) if isinstance(dim, int) else arg for arg, dim in pairs]

            results = zip(*(Transformed.apply(*entry(i)) for i in range(info.batch_size)), strict=True)
            results = tuple(torch.stack(entries) for entries in results)
            return results, (0,) * len(results)

    def call(*args):
        return Transformed.apply(*args) if is_transformed() else operator(*args)

    call.function = operator.function
    return call


def call_unrecorded(operator: Callable, *args):
    """Call `operator` where a backward pass calls it: past autograd, unless that records a second derivative."""
    if not torch.is_grad_enabled() and is_plain(*args):
        return operator.function(*args)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or _DISPATCHER is None or is_transformed():
        return operator(*args)
    with _DISPATCHER.below_autograd():
        return operator(*args)


_ASSERT_ASYNC = getattr(torch, "_assert_async", None)


def assert_async(holds: Tensor, claim: str) -> None:
    """Raise RuntimeError with `claim` unless `holds` [], without waiting: on a GPU from a device-side assertion.

    Part of the graph in compiled and captured code. Without PyTorch's private operator the host reads `holds`.
    """
    if _ASSERT_ASYNC is not None:
        _ASSERT_ASYNC(holds, claim)
    elif not bool(holds):
        raise RuntimeError(claim)


def refuse_second_derivative(operator: torch._ops.OpOverload) -> Callable:
    """Make `operator`, the backward of edge attention, refuse a backward of its own; return what is to be called."""
    torch.library.register_autograd(operator, _refuse_second_derivative)
    return transformable(operator, lambda ctx, inputs, output: None, _refuse_second_derivative)


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError(
        "double backward is not supported by edge_attention, got a backward through its backward (create_graph=True); "
        "use plain PyTorch operations where a second derivative is needed"
    )


def refuse_forward_mode(*operands: Tensor | None) -> None:
    """Raise RuntimeError where an operand carries a tangent, which an operator of ours would drop silently."""
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", 0) < 0:  # nobody asks for tangents
        return
    if any(operand is not None and forward_ad.unpack_dual(operand).tangent is not None for operand in operands):
        raise RuntimeError(NO_FORWARD_MODE)
