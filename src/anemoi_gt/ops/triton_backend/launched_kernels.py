"""Names of the kernels that one call of the `triton` backend launches.

The code of a call runs on tensors without memory, on a problem that notes launches instead of making them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.operands import AttentionOperands, Needs
from anemoi_gt.ops.triton_backend import launch
from anemoi_gt.ops.triton_backend.op import gradients
from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}  # as Triton calls them


@dataclass(frozen=True)
class NotedProblem(Problem):
    """A problem whose launches are noted by name."""

    names: list[str] = field(default_factory=list)

    def launch(self, launch_of: Callable[..., Launch], *how) -> Callable[..., None]:
        """Return a function that notes a launch on tensors by name."""
        bound = launch_of(self.sizes, *how)

        def note(**tensors: Tensor | None) -> None:
            dtypes = {name: DTYPES.get(tensor.dtype) for name, tensor in tensors.items() if tensor is not None}
            self.names.append(bound.name(dtypes))

        return note


def kernel_names(
    operands: AttentionOperands, index: IndexTensors, options: Options, needs: Needs
) -> tuple[list[str], list[str]]:
    """Return the kernels of a forward pass, and of a backward pass for the gradients that are needed."""
    operands, index = (type(group)(*map(_without_memory, group)) for group in (operands, index))
    problem = NotedProblem(operands, index, options)
    out, _, *saved = launch.attend(problem)
    forward = [*problem.names]
    if any(needs):
        gradients(problem, launch.Saved(*saved), torch.empty_like(out), None, list(needs))
    return forward, problem.names[len(forward) :]


def _without_memory(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
