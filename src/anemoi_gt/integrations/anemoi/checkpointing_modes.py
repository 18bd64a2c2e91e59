"""Activation checkpointing modes per component of Anemoi.

    "none"   all activations are kept, nothing is recomputed
    "full"   the inputs of a chunk are kept, everything in it is recomputed

A chunk is what Anemoi checkpoints: `num_layers / num_chunks` layers of a processor, some
destinations of a mapper. Without gradients there is nothing to recompute, and PyTorch's checkpoint,
which reads the states of all random number generators first, is left out.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from anemoi_gt.integrations.anemoi.edge_lists import lookup
from anemoi_gt.integrations.anemoi.settings import SETTINGS
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces, wraps_any
from anemoi_gt.nn.activation_checkpointing import chunk_result


@replaces
def maybe_checkpoint(
    upstream: Callable,
    func: Callable,
    enabled: bool,  # noqa: FBT001  as upstream
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Checkpoint in the mode of the component whose chunk it is."""
    # not getattr with a default, which Dynamo would return
    component = func.__self__ if isinstance(func, MethodType) else None
    mode = _mode_of(component)
    if mode == "none" or not (enabled or mode) or not torch.is_grad_enabled():
        return func(*args, **kwargs)
    func, args = _with_bound_lists(func, args)
    # chunks of mappers are not
    is_in_turn = isinstance(component, Upstream.processor.GraphTransformerProcessor)
    run = _with_copied_results(func) if is_in_turn and torch.compiler.is_compiling() else func
    if mode is None:
        return upstream(run, enabled, *args, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _mode_of(component: object) -> str | None:
    """Return the mode of `install` for a component, None for its own switch."""
    settings = SETTINGS.everywhere
    modes = None if settings is None else settings.checkpointing
    if modes is None:
        return None
    if isinstance(component, Upstream.encoders):
        return modes.encoder
    if isinstance(component, Upstream.processor.BaseProcessor):
        return modes.processor
    return modes.decoder if isinstance(component, Upstream.decoders) else None


@wraps_any
def torchs_checkpoint(
    upstream: Callable,
    func: Callable,
    *args: Any,
    use_reentrant: bool,
    **kwargs: Any,
) -> Any:
    """Checkpoint as providers of edges do, and all of anemoi-models before 0.12.1."""
    if not torch.is_grad_enabled():
        return func(*args, **kwargs)
    func, args = _with_bound_lists(func, args)
    return upstream(func, *args, use_reentrant=use_reentrant, **kwargs)


def _with_bound_lists(func: Callable, args: tuple) -> tuple[Callable, tuple]:
    """Return a function that binds the cached edge lists of its arguments, and the other arguments.

    A checkpoint saves its tensors for the recomputation, and hooks on saved tensors (`save_on_cpu`)
    make copies of them. A copy of a list has no cache, so the recomputation would find another
    structure than the forward pass.
    """
    if torch.compiler.is_compiling():
        return func, args
    is_bound = [isinstance(arg, Tensor) and lookup(arg) is not None for arg in args]
    if not any(is_bound):
        return func, args

    def with_lists(*others: Any, **kwargs: Any) -> Any:
        saved = iter(others)
        arguments = [
            arg if bound else next(saved) for arg, bound in zip(args, is_bound, strict=True)
        ]
        return func(*arguments, **kwargs)

    unbound = [arg for arg, bound in zip(args, is_bound, strict=True) if not bound]
    # `with_lists` keeps only the lists
    args = tuple(arg if bound else None for arg, bound in zip(args, is_bound, strict=True))
    return with_lists, tuple(unbound)


def _with_copied_results(func: Callable) -> Callable:
    """Return a function whose floating-point results are copies, for `torch.compile`."""

    def copied(result: Any) -> Any:
        return (
            chunk_result(result)
            if isinstance(result, Tensor) and result.is_floating_point()
            else result
        )

    return lambda *args, **kwargs: tree_map(copied, func(*args, **kwargs))
