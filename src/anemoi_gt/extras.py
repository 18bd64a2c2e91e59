"""Import of optional packages, with the install command if one is missing."""

from importlib import import_module
from types import ModuleType


def import_extra(module: str, extra: str) -> ModuleType:
    """Import `module`; if it is missing, raise ImportError with the install command of `extra`."""
    try:
        return import_module(module)
    except ImportError as error:
        remedy = f"pip install 'anemoi-gt[{extra}]'"
        raise ImportError(
            f"{module} is needed here and could not be imported ({error}): {remedy}"
        ) from error
