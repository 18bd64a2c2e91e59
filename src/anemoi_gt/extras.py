"""Optional packages: the only place that says how to install a missing one."""

from importlib import import_module
from types import ModuleType


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a package that one of our extras installs.

    Parameters
    ----------
    module : str
        What to import, such as "scipy.spatial".
    extra : str
        The extra of this package that brings it.

    Returns
    -------
    module
        The imported module.

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
