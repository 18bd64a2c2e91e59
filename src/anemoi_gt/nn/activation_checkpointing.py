"""Activation checkpointing: the only place of the layers that asks PyTorch for it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute(function: Callable[..., Tensor], *inputs, device: torch.device, draws: bool) -> Tensor:
    """Return `function(*inputs)`, of which only the inputs are kept for backward; the rest is computed again there.

    Parameters
    ----------
    function : callable
    *inputs
        Anything.
    device : torch.device
        Where it computes.
    draws : bool
        Whether it draws random numbers, as dropout does. Backward draws them again from the state that the generator had. A
        CUDA graph that is being captured does not give that state: PyTorch then raises. Without draws the state is left
        alone there, and the pass can be captured.
    """
    traced = torch.compiler.is_compiling()
    captured = not traced and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=draws or not captured)
