"""Implementations side by side, one module each, with the same names.

    TITLE                           name in tables
    PACKAGES                        distributions whose versions belong to its figures
    unsupported_reason(problem, device)     the reason that it cannot run a problem, or None
    attention(operands)             a function without arguments that returns out, like grad_out

The inputs of all are projected queries, keys and values, and raw attributes with the weight and
bias that embed them.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

NAMES = ("anemoi_gt", "anemoi", "pyg")
DEFAULT = {"cuda": ("anemoi_gt", "anemoi"), "cpu": ("anemoi_gt", "pyg")}


def load(name: str) -> ModuleType:
    """Import a baseline, but not the package that it wraps."""
    return import_module(f"suite.baselines.{name}")


def missing(package: str, distribution: str) -> str | None:
    """Return the error for a missing package, or None."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # of a parent package
        spec = None
    return None if spec else f"{distribution} is not installed"
