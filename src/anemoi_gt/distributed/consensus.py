"""Consensus between ranks on errors and values, so that no rank hangs in a collective."""

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
TIMED_OUT = ("Timed out waiting", "wait timeout after")  # in messages of gloo and the store


def raise_on_all_ranks(
    problem: str | None, group: dist.ProcessGroup, error: type[Exception] = ValueError
) -> None:
    """Raise the same `error` on all ranks if any rank has a problem. Collective.

    `problem` describes this rank's problem; None if there is none. The message names the failing
    ranks and has the first problem.
    """
    problems = [None] * dist.get_world_size(group)
    # also without a problem: another rank may have one, and waits here
    dist.all_gather_object(problems, problem, group=group)
    failing = [rank for rank, text in enumerate(problems) if text is not None]
    if failing:
        raise _mark_common(error(f"{_names(failing)}: {problems[failing[0]]}"), group)


@contextmanager
def consensus(group: dist.ProcessGroup) -> Iterator[None]:
    """Raise a ValueError of the block on all ranks. Collective when the block ends.

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

    Call it before collectives that would hang otherwise. `values` are plain values by name. The
    ValueError names a value that differs and the ranks that differ from rank 0.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, dict(values), group=group)
    names = dict.fromkeys(name for values in gathered for name in values)  # ordered, no duplicates
    for name in names:
        # Compared as text, so that 1 differs from 1.0, and NaN equals NaN.
        texts = [repr(values[name]) if name in values else "no such value" for values in gathered]
        different = [rank for rank, text in enumerate(texts) if text != texts[0]]
        if different:
            got = f"{texts[different[0]]} on {_names(different)} and {texts[0]} on rank 0"
            error = ValueError(f"{name} must be the same on all ranks, got {got}")
            raise _mark_common(error, group)


def check_finite(loss: Tensor, step: int, group: dist.ProcessGroup) -> None:
    """Raise on all ranks unless the loss is finite on every rank. Collective; synchronises.

    `loss` is the scalar loss of this rank. The FloatingPointError names the `step` and the ranks
    whose loss is not finite.
    """
    value = float(loss)
    problem = None
    if not math.isfinite(value):
        problem = f"the loss must stay finite, got {value} at step {step}"
    raise_on_all_ranks(problem, group, FloatingPointError)


def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's `value` on all ranks. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def run_on_rank0(function: Callable[[], Any]) -> Any:
    """Call `function` on rank 0 and return its result on all ranks. Collective.

    The result is pickled. Use it for anything that ranks could see differently, such as a folder on
    a network file system. Raises on all ranks the exception that `function` raises on rank 0.
    """
    value = None
    error = None
    if dist.get_rank() == 0:
        try:
            value = function()
        except Exception as raised:  # of any type: all ranks raise it
            error = raised
    value, error = broadcast_from_rank0((value, error))
    if error is not None:
        raise _mark_common(error, dist.group.WORLD)
    return value


def is_consequence(error: BaseException) -> bool:
    """Return whether an error is due to another rank: that rank was lost, or reports the error."""
    if isinstance(error, dist.DistNetworkError) or any(text in str(error) for text in LOST_PEER):
        return True
    return getattr(error, "is_repeated", False)


def is_timeout(error: BaseException) -> bool:
    """Return whether an error says that a rank did not take part in a collective in time."""
    return any(text in str(error) for text in TIMED_OUT)


def fingerprint(*tensors: Tensor) -> str:
    """Return a hash of the dtypes, shapes and bits of tensors."""
    digest = hashlib.sha256()  # not hash(), which differs between processes
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        # A single element may have any stride, and only stride 1 can be viewed as bytes.
        flat = flat.as_strided(flat.shape, (1,))
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _mark_common(error: Exception, group: dist.ProcessGroup | None) -> Exception:
    """Mark an error that all ranks of a group raise, so that only rank 0 reports it."""
    vars(error)["is_repeated"] = dist.get_rank(group) > 0
    return error


def _names(ranks: list[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
