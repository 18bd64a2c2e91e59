"""Consensus of all ranks on errors and values, so that no rank hangs in a collective."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOST_PEER = (  # in messages of gloo and NCCL (torch 2.13)
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("remote process exit", "ncclRemoteError"),
)


def raise_on_all_ranks(
    problem: str | None, group: dist.ProcessGroup, error: type[Exception] = ValueError
) -> None:
    """Raise the same `error` on all ranks, with failing ranks and first problem. Collective.

    `problem` is this rank's; None: it has none.
    """
    problems = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    if failing := [rank for rank, text in enumerate(problems) if text is not None]:
        raise _of_all_ranks(error(f"{_ranks(failing)}: {problems[failing[0]]}"), group)


@contextmanager
def consensus(group: dist.ProcessGroup) -> Iterator[None]:
    """Raise a ValueError of the block on all ranks. Collective at its end.

    The block itself must not contain collectives.
    """
    problem = None
    try:
        yield
    except ValueError as error:
        problem = str(error)
    raise_on_all_ranks(problem, group)


def check_same(values: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Raise on all ranks unless every value is the same on all ranks. Collective.

    Call it before any collective that would hang.

    `values` are plain values by name. The ValueError has the name of one and the ranks that differ
    from rank 0.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, dict(values), group=group)
    for name in dict.fromkeys(name for values in of_ranks for name in values):
        # Compared as text: 1 is not 1.0, and NaN is NaN.
        first, *others = (
            repr(values[name]) if name in values else "no such value" for values in of_ranks
        )
        if wrong := [rank for rank, other in enumerate(others, 1) if other != first]:
            got = f"{others[wrong[0] - 1]} on {_ranks(wrong)} and {first} on rank 0"
            raise _of_all_ranks(
                ValueError(f"{name} must be the same on all ranks, got {got}"), group
            )


def check_finite(loss: Tensor, step: int, group: dist.ProcessGroup) -> None:
    """Raise on all ranks unless the loss is finite on every rank. Collective; synchronises.

    `loss` is this rank's scalar. The FloatingPointError has the `step` and the ranks whose loss is
    not finite.
    """
    value = float(loss)
    problem = (
        None if math.isfinite(value) else f"the loss must stay finite, got {value} at step {step}"
    )
    raise_on_all_ranks(problem, group, FloatingPointError)


def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's `value` on all ranks. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def run_on_rank0(function: Callable[[], Any]) -> Any:
    """Return on all ranks the result of `function()`, which only rank 0 calls. Collective.

    Result or exception are sent by pickle. Use it for what ranks could see differently, such as a
    folder on a network file system. Raises on all ranks what `function` raises on rank 0.
    """
    value, error = None, None
    if dist.get_rank() == 0:
        try:
            value = function()
        except Exception as raised:  # whatever it is, all ranks raise it
            error = raised
    value, error = broadcast_from_rank0((value, error))
    if error is not None:
        raise _of_all_ranks(error, dist.group.WORLD)
    return value


def is_consequence(error: BaseException) -> bool:
    """Return whether an error follows from another rank's: a lost rank, or the same error."""
    if isinstance(error, dist.DistNetworkError) or any(text in str(error) for text in LOST_PEER):
        return True
    return getattr(error, "is_repeated", False)


def fingerprint(*tensors: Tensor) -> str:
    """Return a text that is equal on two ranks if dtypes, shapes and bits of their tensors are."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        # to be viewed as bytes: a single element may have any stride
        flat = flat.as_strided(flat.shape, (1,))
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _of_all_ranks(error: Exception, group: dist.ProcessGroup | None) -> Exception:
    """Return an error that all ranks of a group raise; reporting it from one rank is enough."""
    vars(error)["is_repeated"] = dist.get_rank(group) > 0
    return error


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
