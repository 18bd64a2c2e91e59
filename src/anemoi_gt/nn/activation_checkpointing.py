"""Activation checkpointing that a CUDA graph can capture, and recomputations that decide nothing.

A recomputation must save the tensors that its forward pass saved, so a layer must take the same
path although a hook has come or gone in between: `as_in_forward`.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anemoi_gt.custom_ops import define_operator
from anemoi_gt.refusal import Refusal
from anemoi_gt.torch_compat import in_backward_pass


def checkpoint_activations(
    function: Callable[..., Tensor], *inputs: Any, device: torch.device, draws: bool
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
    if not torch.compiler.is_compiling():
        function = keeping_answers(function)
    # The reentrant form runs the forward pass under no_grad, and the recomputation with gradients.
    return checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=draws or not captured
    )


Refusals = tuple[Refusal | None, ...]


class _CheckpointedCall:
    """The answers of layers in a checkpointed call of a function, in order."""

    def __init__(self) -> None:
        self.answers: list[tuple] = []
        self.position: int | None = None  # in a recomputation: index of the next question

    def answer(self, answers: tuple) -> tuple:
        """Return the answers of the first call, which are these in the first call."""
        if self.position is None:
            self.answers.append(answers)
            return answers
        if self.position >= len(self.answers):  # more questions than in the first call
            return answers
        self.position += 1
        return self.answers[self.position - 1]


_CALL: ContextVar[_CheckpointedCall | None] = ContextVar("checkpointed call", default=None)
# by module and question, in the last forward pass
_LAST: WeakKeyDictionary[nn.Module, dict[str, Refusals]] = WeakKeyDictionary()


def keeping_answers(function: Callable) -> Callable:
    """Wrap a function to checkpoint; its recomputations take the answers of its first call."""
    call = _CheckpointedCall()
    has_run = False

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:
            call.position = 0
        has_run = True
        token = _CALL.set(call)
        try:
            return function(*args, **kwargs)
        finally:
            _CALL.reset(token)

    return run


def as_in_forward(module: nn.Module, question: str, answers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the answers to a question in this call; in a recomputation, of its forward pass.

    Each answer is a `Refusal` or something else. In a function of `keeping_answers`, the forward
    pass is its first call. Elsewhere, inside a backward pass, it is the last call of `module`
    outside of one, as checkpoints of other libraries give no more to go by: what was refused stays
    refused, and so does what is refused now, such as a module to which a hook has been added.
    """
    if torch.compiler.is_compiling():
        return answers
    call = _CALL.get()
    if call is not None:
        return call.answer(answers)
    last = _LAST.get(module)
    if in_backward_pass():
        refused = None if last is None else last.get(question)
        return answers if refused is None else _with_refusals(answers, refused)
    refusals = tuple([answer if isinstance(answer, Refusal) else None for answer in answers])
    if last is not None:
        last[question] = refusals
    elif any(refusals):
        _LAST[module] = {question: refusals}
    return answers


def _with_refusals(answers: tuple, refusals: Refusals) -> tuple:
    """Return the answers, those that were refused as these refusals."""
    return tuple(
        [
            answer if refusal is None else refusal
            for answer, refusal in zip(answers, refusals, strict=True)
        ]
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
