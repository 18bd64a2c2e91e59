"""Activation checkpointing that a CUDA graph can capture."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anemoi_gt.custom_ops import define_operator


def checkpoint_activations(
    function: Callable[..., Tensor], *inputs, device: torch.device, draws: bool
) -> Tensor:
    """Return `function(*inputs)`; save only the inputs, and recompute in the backward pass.

    `device` is where the function computes. If the function `draws` random numbers, as dropout
    does, backward must restore the generator state to draw the same. PyTorch cannot read that state
    while a CUDA graph is captured, and raises; without draws the state is not read during capture.
    """
    captured = (
        not torch.compiler.is_compiling()
        and device.type == "cuda"
        and torch.cuda.is_current_stream_capturing()
    )
    return checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=draws or not captured
    )


@define_operator
def chunk_result(x: Tensor) -> Tensor:
    """Copy the result of a checkpointed chunk, so that compiled code keeps it for the next chunk.

    It does not keep one of several results of an operator, such as a fused sub-layer (torch 2.13,
    docs/upstream.md).
    """
    return x.clone()


torch.library.register_fake("anemoi_gt::chunk_result", torch.empty_like)
torch.library.register_autograd(chunk_result, lambda _, grad: grad)
