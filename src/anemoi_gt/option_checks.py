"""Checks of numeric options, shared by all packages."""

import math
from numbers import Integral, Real
from typing import Any, TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether `value` is a Python or NumPy integer; rejects bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(name: str, value: object, least: int | None = 1, note: str = "") -> None:
    """Raise ValueError unless `value` is a Python or NumPy integer, at least `least` if set.

    Rejects bool. `note` extends the message with the meaning or other allowed values, as in ", or
    null".
    """
    if not is_integer(value):
        raise ValueError(f"{name} must be an integer{note}, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}{note}, got {value}")


def check_number(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a real number of Python or NumPy.

    Rejects bool; accepts NaN and infinity.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value!r}")


def check_positive(name: str, value: Any, note: str = "") -> None:
    """Raise ValueError unless `value` is positive and finite; `note` extends the message."""
    check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite{note}, got {value}")


def check_probability(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a number in 0 .. 1."""
    check_number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a probability in 0 .. 1, got {value}")
