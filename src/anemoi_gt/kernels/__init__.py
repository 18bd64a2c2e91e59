"""Device code: Triton kernels of attention, sub-layers and graph building; no torch.

A module of kernels is imported, and Triton with it, when it is first used, as `kernels.forward`.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import a module of kernels."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
