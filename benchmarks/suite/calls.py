"""What one timed call is: a pass of a peer on its operands, or the making of a structure."""

from collections.abc import Callable

import torch

from suite.operands import Operands

WARM_UP = 3  # calls before a capture, as PyTorch asks for


class Refused(Exception):
    """A peer does not do something; says why."""


def forward(operands: Operands, attend: Callable) -> Callable:
    """Attention as in inference."""

    def call():
        with torch.no_grad():
            return attend()

    return call


def forward_backward(operands: Operands, attend: Callable) -> Callable:
    """Attention and the gradients of all leaves."""
    leaves, arriving = operands.leaves, operands.grad_out
    return lambda: torch.autograd.grad(attend(), leaves, arriving)


def replay(operands: Operands, attend: Callable) -> Callable:
    """The same captured in a CUDA graph, which leaves the host nothing to do.

    Raises
    ------
    Refused
        Without a GPU.
    """
    if operands.query.device.type != "cuda":
        raise Refused("CUDA graphs need a GPU")
    call = forward_backward(operands, attend)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    return captured.replay


CALLS = {"forward": forward, "forward_backward": forward_backward, "replay": replay}
