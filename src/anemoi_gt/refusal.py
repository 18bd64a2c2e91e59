"""Refusal: the reason why a faster implementation does not serve a call, as a value.

Control flow reads the kind, people read the text.
"""

from enum import Enum
from typing import NamedTuple


class RefusalKind(Enum):
    """What follows from a refusal."""

    PERMANENT = "permanent"  # a named backend raises, "auto" falls back
    TRANSIENT = "transient"  # a hook or a trace, which comes and goes: every backend falls back
    NOT_FASTER = "not faster"  # it could run if it were asked for by name


class Refusal(NamedTuple):
    """Why something is not computed as requested."""

    kind: RefusalKind
    text: str  # for people; "it" or "its" is the block or layer

    def raise_if_named(self, backend: str, layer: object, fallback: str) -> None:
        """Raise ValueError if it is permanent and a backend is named; `fallback` is of "auto"."""
        if backend != "auto" and self.kind is RefusalKind.PERMANENT:
            raise ValueError(
                f"attention backend {backend!r} cannot run {layer}: {self.text}; backend 'auto' "
                f"{fallback}"
            )


def permanent(text: str) -> Refusal:
    """Return a refusal that makes a named backend raise."""
    return Refusal(RefusalKind.PERMANENT, text)


def transient(text: str) -> Refusal:
    """Return a refusal for as long as a tool is active."""
    return Refusal(RefusalKind.TRANSIENT, text)


def not_faster(text: str) -> Refusal:
    """Return a refusal of something that could run but would not be faster."""
    return Refusal(RefusalKind.NOT_FASTER, text)
