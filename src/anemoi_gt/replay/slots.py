"""Slots of values that a module, its children, and their dictionaries hold as attributes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Path = tuple[Any, ...]  # keys from a module to a value
Slot = tuple[dict, Any]  # a dictionary, such as `vars` of a module, and a key
_NOTHING = object()


def values_of(module: nn.Module, accepts: Callable[[str, Any], bool]) -> dict[Path, Any]:
    """Return values in a module, its children, dictionaries and Anemoi objects, by path.

    `accepts` gets the name of an attribute and its value, or a value in its dictionaries.
    """
    values = {}
    seen = set()
    left: list[tuple[Path, str, dict]] = [((), "", vars(module))]
    while left:
        path, outer, holder = left.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for key, value in holder.items():
            name = outer or str(key)
            if accepts(name, value):
                values[*path, key] = value
            elif isinstance(value, dict):
                left.append(((*path, key), name, value))
            elif hasattr(value, "__dict__") and (
                isinstance(value, nn.Module) or type(value).__module__.startswith("anemoi.")
            ):
                left.append(((*path, key), "", vars(value)))
    return values


def slot_at(module: nn.Module, path: Path) -> Slot:
    """Return the slot at a path, whose dictionary must be there."""
    holder = vars(module)
    for key in path[:-1]:
        value = holder[key]
        holder = value if isinstance(value, dict) else vars(value)
    return holder, path[-1]


def value_at(module: nn.Module, path: Path) -> Any:
    """Return the value at a path, None if there is none."""
    try:
        holder, key = slot_at(module, path)
    except (KeyError, TypeError):  # a dictionary, or a module, is gone
        return None
    return holder.get(key)


@contextmanager
def replaced_values(replacements: Iterable[tuple[Slot, Any]]) -> Iterator[None]:
    """Replace the values of slots during the block, and restore the former values afterwards."""
    before = []
    try:
        for (holder, key), value in replacements:
            before.append((holder, key, holder.get(key, _NOTHING)))
            holder[key] = value
        yield
    finally:
        for holder, key, value in reversed(before):
            if value is _NOTHING:
                del holder[key]
            else:
                holder[key] = value
