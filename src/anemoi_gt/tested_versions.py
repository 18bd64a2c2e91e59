"""Releases of PyTorch and Triton that the tests have run with, and a warning about others.

A release is the first two numbers of a version, "2.13". Others may well work: one warning per
process, which can be filtered by its class. Test logs are in
benchmarks/results/torch_versions_cpu.txt and, of a GPU, tests_h200.txt.
"""

import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from anemoi_gt.torch_compat import constant_when_traced

# PyTorch, the Triton that it requires
TESTED = (
    ("2.10", "3.6"),
    ("2.11", "3.6"),
    ("2.13", "3.7"),
    ("2.15", "3.9"),
)


class UntestedVersionsWarning(UserWarning):
    """Warning that the installed releases of PyTorch and Triton are untested with this package.

    Issued once per process and backend, when attention is first computed; `anemoi-gt info` lists it
    before.

    Examples
    --------
    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=UntestedVersionsWarning)
    """


def installed() -> tuple[str, str | None]:
    """Return the installed releases of PyTorch and Triton, None if Triton is missing."""
    try:
        triton = _release(version("triton"))
    except PackageNotFoundError:
        triton = None
    return _release(torch.__version__), triton


def why_untested(torch_release: str, triton_release: str | None) -> str | None:
    """Return a sentence about untested releases, or None; without Triton only PyTorch counts."""
    known = {pair[0] for pair in TESTED} if triton_release is None else set(TESTED)
    if (torch_release if triton_release is None else (torch_release, triton_release)) in known:
        return None
    installed = f"PyTorch {torch_release}" + (
        "" if triton_release is None else f" with Triton {triton_release}"
    )
    return f"{installed} has not been tested; tested are " + ", ".join(
        f"{pair[0]} with {pair[1]}" for pair in TESTED
    )


@cache
def _warn(backend: str) -> None:
    torch_release, triton_release = installed()
    if (
        reason := why_untested(torch_release, triton_release if backend == "triton" else None)
    ) is not None:
        warnings.warn(
            f"anemoi_gt, backend {backend}: {reason}", UntestedVersionsWarning, stacklevel=3
        )


@constant_when_traced  # releases do not change; looking them up cannot be traced
def warn_if_untested(backend: str) -> None:
    """Warn once per process if `backend` runs on untested releases; "torch" ignores Triton."""
    _warn(backend)


def _release(full: str) -> str:
    return ".".join(full.split(".")[:2])
