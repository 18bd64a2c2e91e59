"""What numbers among options must be. The only place that words it; what else must hold of an option, its own room says."""

from numbers import Integral, Real


def check_integer(name: str, value: object, least: int | None = 1, note: str = "") -> None:
    """Raise unless an option is a whole number, of Python or NumPy; to Python True is one.

    Parameters
    ----------
    name : str
        Of the option.
    value : object
        What was given.
    least : int
        The lowest number that it may be; None leaves its range to the caller.
    note : str
        For the message, behind what must hold: what the number is, or what else may come, as in ", or null".

    Raises
    ------
    ValueError
        When `value` is no whole number, or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number{note}, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}{note}, got {value}")


def check_number(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number; NaN and infinity are of that type."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")


def check_probability(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number in 0 .. 1."""
    check_number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a probability in 0 .. 1, got {value}")
