"""Names of the kernels that a call of an operator of the `triton` backend launches."""

from collections.abc import Sequence

import torch

from anemoi_gt.ops.tree import tree_of
from anemoi_gt.ops.triton_backend.plan import BoundKernel, Plan
from anemoi_gt.ops.triton_backend.planned_operator import PlannedOperator

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def kernel_names(
    operator: PlannedOperator, arguments: Sequence, needs: Sequence[bool]
) -> tuple[list[str], list[str]]:
    """Return the kernels of a forward pass, and of a backward pass if tensors need gradients.

    Assumes that only the first output has an incoming gradient.
    """
    options = arguments[operator.num_inputs : operator.num_arguments]
    plans = operator.passes(
        arguments[: operator.num_inputs], tree_of(operator.options_form, options)
    )
    forward = names_of(plans.forward_plan(save=any(needs)))
    if not any(needs):
        return forward, []
    has_grads = (True, *(False for _ in operator.outputs[1:]))
    plan, _ = plans.backward_plan(tuple(needs), has_grads)
    return forward, names_of(plan)


def names_of(plan: Plan) -> list[str]:
    """Return the names of the kernels of a plan, in order."""
    names = []
    for step in plan.steps:
        if isinstance(step, BoundKernel):
            dtypes = {}
            for name, location in zip(step.launch.tensors, step.locations, strict=True):
                if location is not None:
                    dtypes[name] = NAMES.get(location.buffer.dtype)
            names.append(step.launch.name(dtypes))
    return names
