"""Calls to time: a pass of a baseline on its operands."""

from collections.abc import Callable

import torch

from suite.operands import Operands
from suite.timing import Gpu


class Refused(Exception):
    """A baseline does not support something; the message is the reason."""


def forward(operands: Operands, attend: Callable) -> Callable:
    """Return a call of the attention without gradients."""

    def call():
        with torch.no_grad():
            return attend()

    return call


def forward_backward(operands: Operands, attend: Callable) -> Callable:
    """Return a call of the attention with the gradients of all leaves."""
    leaves = operands.leaves
    return lambda: torch.autograd.grad(attend(), leaves, operands.grad_out)


def replay(operands: Operands, attend: Callable) -> Callable:
    """Return the same replayed from a CUDA graph, which removes the host time.

    Raises
    ------
    Refused
        Without a GPU.
    """
    if operands.query.device.type != "cuda":
        raise Refused("CUDA graphs need a GPU")
    return Gpu.record(forward_backward(operands, attend))


CALLS = {"forward": forward, "forward_backward": forward_backward, "replay": replay}
