"""Verdicts that all ranks share, so that none goes on alone into a collective that the others never enter."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def raise_on_all_ranks(problem: str | None, group: dist.ProcessGroup, error: type[Exception] = ValueError) -> None:
    """Raise the same error on all ranks when one of them has a problem. Collective.

    Parameters
    ----------
    problem : str, optional
        What is wrong here; None when nothing is.
    group : ProcessGroup
    error : type of exception

    Raises
    ------
    ValueError, or `error`
        On all ranks, naming those that have a problem and what the first of them said.
    """
    problems = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    wrong = [rank for rank, said in enumerate(problems) if said is not None]
    if wrong:
        raise error(f"{_ranks(wrong)}: {problems[wrong[0]]}")


@contextmanager
def agreed(group: dist.ProcessGroup) -> Iterator[None]:
    """Raise on all ranks the ValueError that one of them raises in the block, where nothing is collective. Collective at its end."""
    problem = None
    try:
        yield
    except ValueError as error:
        problem = str(error)
    raise_on_all_ranks(problem, group)


def check_same(values: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Raise on all ranks unless every value is the same on all of them. Collective; call it before anything that could hang.

    Parameters
    ----------
    values : mapping of str to plain values
        By name, for the message.
    group : ProcessGroup

    Raises
    ------
    ValueError
        On all ranks, naming the value and the ranks that differ from rank 0.
    """
    everywhere = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, dict(values), group=group)
    problem = difference(everywhere)
    if problem is not None:
        raise ValueError(problem)


def difference(everywhere: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what is wrong with the values of all ranks, by rank, which must be the same; or None."""
    for name in dict.fromkeys(name for there in everywhere for name in there):
        # As text: 1 is not 1.0, and NaN is NaN.
        first, *others = (repr(there[name]) if name in there else "no such value" for there in everywhere)
        wrong = [rank for rank, there in enumerate(others, 1) if there != first]
        if wrong:
            there = others[wrong[0] - 1]
            return f"{name} must be the same on all ranks, got {there} on {_ranks(wrong)} and {first} on rank 0"
    return None


def check_finite(loss: Tensor, step: int, group: dist.ProcessGroup) -> None:
    """Raise on all ranks unless the loss is finite on every one of them. Collective; waits for the device.

    Parameters
    ----------
    loss : Tensor
        Scalar, this rank's own.
    step : int
        For the message.
    group : ProcessGroup
        All ranks of the job.

    Raises
    ------
    FloatingPointError
        On all ranks, naming those whose loss is not finite.
    """
    value = float(loss)
    problem = None if math.isfinite(value) else f"the loss must stay finite, got {value} at step {step}"
    raise_on_all_ranks(problem, group, FloatingPointError)


def broadcast_from_rank0(value: Any) -> Any:
    """Return what rank 0 of all ranks has for `value`. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def run_on_rank0(function: Callable[[], Any]) -> Any:
    """Return on all ranks what `function()` returns on rank 0 of all, which alone calls it. Collective.

    For what ranks must not see differently, such as a folder on a file system that is slow to agree with itself.

    Parameters
    ----------
    function : callable
        What it returns or raises travels to the other ranks.

    Raises
    ------
    Exception
        On all ranks, what it raises.
    """
    value, error = None, None
    if dist.get_rank() == 0:
        try:
            value = function()
        except Exception as raised:  # whatever it is, all ranks raise it
            error = raised
    value, error = broadcast_from_rank0((value, error))
    if error is not None:
        raise error
    return value


def fingerprint(*tensors: Tensor) -> str:
    """A short text that two ranks share when their tensors have the same dtypes, shapes and bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        flat = flat.as_strided(flat.shape, (1,))  # a lone number may have any stride, which cannot be viewed as bytes
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
