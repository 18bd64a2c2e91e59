"""Import of optional packages, with the install command if one is missing."""

from importlib import import_module
from types import ModuleType


def import_extra(module: str, extra: str) -> ModuleType:
    """Import `module`, such as "scipy.spatial", which `extra` of this package installs.

    Raises
    ------
    ImportError
        If it is not installed, with the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is needed here and could not be imported ({error}): pip install 'anemoi-gt[{extra}]'"
        ) from error
