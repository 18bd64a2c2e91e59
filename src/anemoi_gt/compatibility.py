"""Releases of PyTorch and Triton that the tests have run with: the only place that knows them.

A release is its first two numbers, "2.13". Any other may well work; whoever meets one is told once, by a warning of a class
of its own that can be filtered. What the tests printed is in benchmarks/results/torch_versions_cpu.txt, and from a GPU in
benchmarks/results/tests_h200.txt.
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

TESTED = (  # PyTorch, and the Triton that it asks for
    ("2.10", "3.6"),
    ("2.11", "3.6"),
    ("2.13", "3.7"),
    ("2.15", "3.9"),
)


class UntestedVersionsWarning(UserWarning):
    """PyTorch and Triton are of releases that this package has not been tested with.

    Given once per process and backend, when attention is first computed; `python -m anemoi_gt info` tells beforehand.

    Examples
    --------
    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=UntestedVersionsWarning)
    """


def installed() -> tuple[str, str | None]:
    """Return the releases of PyTorch and Triton that are installed; None for Triton where it is missing."""
    try:
        triton = _release(version("triton"))
    except PackageNotFoundError:
        triton = None
    return _release(torch.__version__), triton


def why_untested(torch_release: str, triton_release: str | None) -> str | None:
    """Return what has not been tested of a pair, and what has, or None when it has been.

    Without Triton, None, PyTorch alone counts.
    """
    known = {pair[0] for pair in TESTED} if triton_release is None else set(TESTED)
    if (torch_release if triton_release is None else (torch_release, triton_release)) in known:
        return None
    met = f"PyTorch {torch_release}" + ("" if triton_release is None else f" with Triton {triton_release}")
    return f"{met} has not been tested; tested are " + ", ".join(f"{pair[0]} with {pair[1]}" for pair in TESTED)


def constant_when_traced(function: Callable) -> Callable:
    """Mark a function that torch.compile calls while it traces, whose result it keeps; it traces none of it.

    torch.compiler.assume_constant_result sets the same mark, but imports the compiler, for which a start takes twice as long.
    """
    function._dynamo_marked_constant = True
    return function


@cache
def _warn(backend: str) -> None:
    torch_release, triton_release = installed()
    reason = why_untested(torch_release, triton_release if backend == "triton" else None)
    if reason is not None:
        warnings.warn(f"anemoi_gt, backend {backend}: {reason}", UntestedVersionsWarning, stacklevel=3)


@constant_when_traced  # releases do not change; looking them up cannot be traced
def warn_if_untested(backend: str) -> None:
    """Warn, the first time in a process, when a backend is about to run on untested releases.

    Parameters
    ----------
    backend : {"triton", "torch"}
        For "torch", whether and which Triton is installed does not matter.
    """
    _warn(backend)


def _release(full: str) -> str:
    return ".".join(full.split(".")[:2])
