"""Names of the kernels that one call of the `triton` backend launches, from its plans."""

from collections.abc import Sequence

import torch
from torch import Tensor

from anemoi_gt.ops.operands import AttentionOperands, Needs
from anemoi_gt.ops.triton_backend.edge_attention_triton import backward_plan, forward_plan
from anemoi_gt.ops.triton_backend.plan import BoundKernel, Plan
from anemoi_gt.ops.triton_backend.sizes import IndexTensors

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def kernel_names(
    operands: AttentionOperands[Tensor],
    index: IndexTensors[Tensor],
    scale: float,
    dropout_p: float,
    needs: Needs,
) -> tuple[list[str], list[str]]:
    """Return the kernel names of a forward pass, and of a backward pass for `needs`."""
    specs: list[tuple[Sequence[int], torch.dtype] | None] = []
    for tensor in (*operands, *index):
        specs.append(None if tensor is None else (tensor.shape, tensor.dtype))
    specs.append(((1,), torch.int64) if dropout_p > 0 else None)
    forward = forward_plan(tuple(specs), scale, dropout_p, save=True)
    if not any(needs):
        return names_of(forward), []
    out, _, *saved = [
        None if result is None else (result.shape, result.dtype) for result in forward.results
    ]
    backward = backward_plan((*specs, *saved, out, None), scale, dropout_p, needs)
    return names_of(forward), names_of(backward)


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
