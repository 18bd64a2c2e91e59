"""Building and rebuilding of Anemoi's models: log lines, and settings of swapped blocks."""

from collections.abc import Callable
from typing import Any

import torch

from anemoi_gt.integrations.anemoi import report
from anemoi_gt.integrations.anemoi.settings import SETTINGS
from anemoi_gt.integrations.anemoi.upstream import wraps_any


@wraps_any
def build_model(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the settings of swapped blocks when a model is rebuilt, as after a graph change."""
    before = _settings_by_path(self)
    result = upstream(self, *args, **kwargs)
    if before:
        of_others = next(iter(before.values()))
        for path, block in report.blocks_of(self):
            SETTINGS.choose(block, before.get(path, of_others))
    return result


def _settings_by_path(interface: Any) -> dict:
    if "_modules" not in vars(interface):  # called from `__init__`, before any module is registered
        return {}
    chosen = {path: SETTINGS.chosen(block) for path, block in report.blocks_of(interface)}
    return {path: settings for path, settings in chosen.items() if settings is not None}


@wraps_any
def update_metadata(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Log it if a model that was just built has no block that anemoi_gt computes."""
    result = upstream(self, *args, **kwargs)
    report.after_build(self.model)  # its own forward pass defines the paths of its blocks
    return result


@wraps_any
def assert_valid_sharding(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Register a model at the start of its forward pass."""
    if not torch.compiler.is_compiling():
        report.add_model(self)
    return upstream(self, *args, **kwargs)
