"""Activation checkpointing that a CUDA graph can capture.

A recomputation decides again, from the hooks, settings and parameters that are there then: where
these have changed since the forward pass, it may save other tensors, and PyTorch raises a
CheckpointError. Nothing is kept of the forward pass but its inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anemoi_gt.custom_ops import define_operator


def checkpoint_activations(
    function: Callable[..., Tensor], *inputs: Any, device: torch.device, draws: bool
) -> Tensor:
    """Return `function(*inputs)`; save only the inputs, and recompute in the backward pass.

    `device` is where the function computes. If the function `draws` random numbers, as dropout
    does, backward must restore the generator state to draw the same. PyTorch cannot read that state
    while a CUDA graph is captured, and raises; without draws the state is not read during capture.
    Without gradients there is nothing to recompute, and no state is read.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    captured = (
        not torch.compiler.is_compiling()
        and device.type == "cuda"
        and torch.cuda.is_current_stream_capturing()
    )
    # The reentrant form runs the forward pass under no_grad, and the recomputation with gradients.
    return checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=draws or not captured
    )


@define_operator
def chunk_result(x: Tensor) -> Tensor:
    """Copy the result of a checkpointed chunk, so that compiled code keeps it for the next chunk.

    It does not keep one of several results of an operator, such as a fused sub-layer (torch 2.13,
    docs/contributing.md).
    """
    return x.clone()


torch.library.register_fake("anemoi_gt::chunk_result", torch.empty_like)
torch.library.register_autograd(chunk_result, lambda _, grad: grad)
