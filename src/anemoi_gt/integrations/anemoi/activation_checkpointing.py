"""Activation checkpointing of Anemoi's components in words of memory, instead of each component's own switch.

    "none"        all activations are kept, nothing is recomputed
    "selective"   results of the attention and of matrix products are kept; norms, activations and casts are recomputed
    "full"        the inputs of a chunk are kept, everything in it is recomputed

A chunk is what Anemoi checkpoints: `num_layers / num_chunks` layers of a processor, some destinations of a mapper.
A selective checkpoint around compiled code would be wrong, because compiled code overwrites results that were kept; it
raises. Compiled around the checkpoint, as where a whole processor or mapper is compiled, it is right.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from anemoi_gt.custom_ops import NAMESPACE
from anemoi_gt.integrations.anemoi.attention import SETTINGS
from anemoi_gt.integrations.anemoi.edge_cache import edge_structure, lookup
from anemoi_gt.integrations.anemoi.upstream import Upstream, replaces
from anemoi_gt.nn.activation_checkpointing import copy_result

MODES = "none", "selective", "full"
_is_fake = getattr(torch._subclasses.fake_tensor, "is_fake", lambda _: False)  # False refuses "selective" in tracers
_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}
_COMPILED = "_functorch/_aot_autograd"  # the part of PyTorch that runs compiled code, in the path of its files


@dataclass(frozen=True)
class Checkpointing:
    """The mode of each component, one of `MODES`, or None for its own switch."""

    encoder: str | None = None  # forward mappers
    processor: str | None = None
    decoder: str | None = None  # backward mappers

    @classmethod
    def of(cls, choice: str | Mapping[str, str | None] | None) -> "Checkpointing":
        """Return the modes of a choice: one for all components, or one by name of a component."""
        names = [field.name for field in fields(cls)]
        modes = dict(choice) if isinstance(choice, Mapping) else dict.fromkeys(names, choice)
        if not set(modes) <= set(names) or not all(mode in (None, *MODES) for mode in modes.values()):
            raise ValueError(
                f"activation_checkpointing must be one of {', '.join(MODES)}, or one for some of {', '.join(names)}, "
                f"or None for the switches of Anemoi's config, got {choice!r}"
            )
        return cls(**modes)


@replaces("func enabled args kwargs")
def maybe_checkpoint(upstream, func, enabled, *args, **kwargs):
    """Checkpoint in the mode of the component whose chunk it is."""
    component, name = func.__self__, func.__name__  # not getattr with a default, which Dynamo would return
    mode = _mode_of(component)
    if mode == "none" or not (enabled or mode):
        return func(*args, **kwargs)
    func, args = _with_bound_lists(func, args)
    is_in_turn = isinstance(component, Upstream.processor.GraphTransformerProcessor)  # chunks of mappers are not
    run = _with_copied_results(func) if is_in_turn and torch.compiler.is_compiling() else func
    if mode is None:
        return upstream(run, enabled, *args, **kwargs)
    if mode == "full" or name == "prepare_edge_sharding_wrapper":  # which has neither
        return checkpoint(run, *args, use_reentrant=False, **kwargs)
    run = run if torch.compiler.is_compiling() else _without_cast_cache()(run)
    return checkpoint(run, *args, use_reentrant=False, context_fn=_selective, **kwargs)


def _mode_of(component: nn.Module | None) -> str | None:
    """Return the mode of `install` for a component, None for its own switch."""
    if (modes := SETTINGS.everywhere and SETTINGS.everywhere.checkpointing) is None:
        return None
    if isinstance(component, Upstream.mapper.GraphTransformerForwardMapper):
        return modes.encoder
    if isinstance(component, Upstream.processor.GraphTransformerProcessor):
        return modes.processor
    return modes.decoder if isinstance(component, Upstream.mapper.GraphTransformerBackwardMapper) else None


def _with_bound_lists(func: Callable, args: tuple) -> tuple[Callable, tuple]:
    """Return a function that holds the cached edge lists among its arguments, and the arguments without them.

    A checkpoint saves its tensors for the recomputation, and hooks on saved tensors (`save_on_cpu`) make copies of
    them. A copy of a list has no cache, so the recomputation would find another structure than the forward pass.
    """
    is_bound = [isinstance(arg, Tensor) and lookup(arg) is not None for arg in args]
    if torch.compiler.is_compiling() or not any(is_bound):
        return func, args

    def with_lists(*others, **kwargs):
        others = iter(others)
        arguments = [arg if bound else next(others) for arg, bound in zip(args, is_bound, strict=True)]
        return func(*arguments, **kwargs)

    held = [arg for arg, bound in zip(args, is_bound, strict=True) if not bound]
    args = [arg if bound else None for arg, bound in zip(args, is_bound, strict=True)]  # the others are not kept
    return with_lists, tuple(held)


def _with_copied_results(func: Callable) -> Callable:
    """Return a function whose floating-point results are copies, for `torch.compile`."""

    def copied(result):
        return copy_result(result) if isinstance(result, Tensor) and result.is_floating_point() else result

    return lambda *args, **kwargs: tree_map(copied, func(*args, **kwargs))


@contextmanager
def _without_cast_cache() -> Iterator[None]:
    """Have autocast cast weights at each use.

    A recomputation must run the operators of the forward pass, where autocast would find what other chunks have cast.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _policy(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
    is_ours = operator.namespace == NAMESPACE and operator is not edge_structure
    if is_ours and not torch.compiler.is_compiling() and not any(map(_is_fake, args)) and _runs_compiled():
        raise ValueError(
            "activation_checkpointing='selective' must not be around compiled code, which overwrites what is kept, got "
            "blocks compiled one by one: compile whole processors and mappers, or choose 'full' or 'none'"
        )
    return CheckpointPolicy.MUST_SAVE if is_ours or operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _runs_compiled() -> bool:
    """Return True if an operator that is called here was called by code of torch.compile."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != maybe_checkpoint.function.__name__:
        if _COMPILED in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


_selective = partial(create_selective_checkpoint_contexts, _policy)
