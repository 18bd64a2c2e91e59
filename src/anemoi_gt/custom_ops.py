"""Registration of our operators with PyTorch. The only place that talks to the dispatcher."""

from collections.abc import Callable

import torch

NAMESPACE = "anemoi_gt"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # what it registers lives as long as it does


def define_operator(function: Callable) -> torch._ops.OpOverload:
    """Register `function` as `torch.ops.anemoi_gt.<its name>`, with a schema from its annotations, and return the operator.

    It must not mutate its arguments nor return them. `torch.library.custom_op` checks that at every call, which costs more
    than the launch of a kernel (0.7 ms a call with torch 2.11 on Python 3.12); here `opcheck` does, in the tests.
    """
    name = f"{NAMESPACE}::{function.__name__}"
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default")(function)
    return getattr(torch.ops.anemoi_gt, function.__name__).default


def define_gradient(operator: torch._ops.OpOverload, setup_context: Callable, backward: Callable) -> None:
    """Make `operator` differentiable, as `torch.library.register_autograd` does for operators of any schema.

    That reads the whole schema again at every call, argument by argument (0.15 ms a call with 18 arguments, torch 2.11 on
    Python 3.12). An operator of ours has no defaults that the dispatcher could have left out, no keyword-only arguments and
    no lists of tensors, so nothing of it is needed.

    Parameters
    ----------
    operator : torch._ops.OpOverload
        Of `define_operator`.
    setup_context : callable (ctx, inputs, output)
    backward : callable (ctx, *output gradients)
        Returns a tuple of a gradient or None for each argument.
    """

    def below(keyset, args):
        keyset = keyset & torch._C._after_autograd_keyset
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset, *args)

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
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Differentiable.apply(*args, keyset)
        return below(keyset, args)

    _LIBRARY.impl(operator._opname, autograd, "Autograd", with_keyset=True)


def call_unrecorded(operator: torch._ops.OpOverload, *args):
    """Call `operator` where a backward pass calls it: past autograd, unless that records a second derivative."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)
