"""anemoi_gt in models of Anemoi: in all (`install`), in one (`swap_layers`), by config.

`CUDAGraphCallback` and `InstallCallback` are imported when they are used: they need Lightning.
"""

from importlib import import_module

from anemoi_gt.integrations.anemoi.captured_step import capture_step
from anemoi_gt.integrations.anemoi.installation import (
    Installation,
    graph_transformer_backward_mapper,
    graph_transformer_forward_mapper,
    graph_transformer_processor,
    install,
    installed,
    swap_layers,
    uninstall,
)
from anemoi_gt.integrations.anemoi.without_flash_attn import flash_attn_stand_in

__all__ = [
    "CUDAGraphCallback",
    "InstallCallback",
    "Installation",
    "capture_step",
    "flash_attn_stand_in",
    "graph_transformer_backward_mapper",
    "graph_transformer_forward_mapper",
    "graph_transformer_processor",
    "install",
    "installed",
    "swap_layers",
    "uninstall",
]


def __getattr__(name: str) -> object:
    if name in ("CUDAGraphCallback", "InstallCallback"):
        module = import_module("anemoi_gt.integrations.anemoi.cuda_graph_callback")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
