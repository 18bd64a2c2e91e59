"""Anemoi's graph transformers with our attention: everywhere (`install`), in one model, or from a config."""

from anemoi_gt.integrations.anemoi.patch import (
    Installation,
    graph_transformer_backward_mapper,
    graph_transformer_forward_mapper,
    graph_transformer_processor,
    install,
    installed,
    swap_layers,
    uninstall,
)

__all__ = [
    "Installation",
    "graph_transformer_backward_mapper",
    "graph_transformer_forward_mapper",
    "graph_transformer_processor",
    "install",
    "installed",
    "swap_layers",
    "uninstall",
]
