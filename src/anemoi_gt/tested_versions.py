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
    ("2.9", "3.5"),
    ("2.10", "3.6"),
    ("2.11", "3.6"),
    ("2.13", "3.7"),
    ("2.15", "3.9"),
)


class UntestedVersionsWarning(UserWarning):
    """Warning that the installed releases of PyTorch and Triton are untested with this package.

    Issued once per process and backend, at the first call of an operator; `anemoi-gt info` lists it
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
    installed = f"PyTorch {torch_release}"
    if triton_release is None:
        is_tested = any(torch_release == pair[0] for pair in TESTED)
    else:
        is_tested = (torch_release, triton_release) in TESTED
        installed += f" with Triton {triton_release}"
    if is_tested:
        return None
    tested = ", ".join(f"{pair[0]} with {pair[1]}" for pair in TESTED)
    return f"{installed} has not been tested; tested are {tested}"


@cache
def _warn(backend: str) -> None:
    torch_release, triton_release = installed()
    if backend != "triton":
        triton_release = None
    reason = why_untested(torch_release, triton_release)
    if reason is not None:
        message = f"anemoi_gt, backend {backend}: {reason}"
        warnings.warn(message, UntestedVersionsWarning, stacklevel=3)


@constant_when_traced  # releases do not change; looking them up cannot be traced
def warn_if_untested(backend: str) -> None:
    """Warn once per process if `backend` runs on untested releases; "torch" ignores Triton."""
    _warn(backend)


def _release(full: str) -> str:
    return ".".join(full.split(".")[:2])
