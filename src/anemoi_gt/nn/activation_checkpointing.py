"""Activation checkpointing that a CUDA graph can capture."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(function: Callable[..., Tensor], *inputs, device: torch.device, draws: bool) -> Tensor:
    """Return `function(*inputs)`, keeping only the inputs for the backward pass, which calls the function again.

    `device` is that of the computation. If the function `draws` random numbers, as dropout does, backward must restore
    the generator state to draw the same. PyTorch cannot read that state while a CUDA graph is captured, and raises;
    without draws the state is not read during capture.
    """
    traced = torch.compiler.is_compiling()
    captured = not traced and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=draws or not captured)
