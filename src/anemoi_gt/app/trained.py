"""Config and data schema of a checkpoint, with the names and options of this version."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anemoi_gt.app.datasets.schema import DataSchema

log = logging.getLogger(__name__)

MOVED = {  # prefixes of `_target_` in configs of 0.2.0
    "anemoi_gt.training.": "anemoi_gt.app.training.",
    "anemoi_gt.data.field_dataset.": "anemoi_gt.app.datasets.field_dataset.",
    "anemoi_gt.data.sphere_advection.": "anemoi_gt.app.datasets.sphere_advection.",
    "anemoi_gt.data.era5_uk.": "anemoi_gt.app.datasets.era5_uk.",
}
RENAMED = {"attention": "kernels"}  # groups of 0.4.0
REMOVED = {"kernels": ("tile", "fixed_degree_kernels")}  # options of 0.2.0 that affected speed
NOT_IN_FORECASTS = ("model.mapper_chunks", "model.checkpoint_groups", "model.dropout")


def current_target(target: str) -> str:
    """Return the current name of a `_target_`, which may be from a config of 0.2.0."""
    for former, new in MOVED.items():
        if target.startswith(former):
            return new + target.removeprefix(former)
    return target


def current_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a checkpoint with the names and options of this version."""
    current = {}
    for former_group, values in config.items():
        group = RENAMED.get(former_group, former_group)
        if isinstance(values, Mapping):
            values = dict(values)
            for option in REMOVED.get(group, ()):
                values.pop(option, None)
            if isinstance(values.get("_target_"), str):
                values["_target_"] = current_target(values["_target_"])
        current[group] = values
    return current


def config_of(config: Any, path: Path) -> dict[str, Any]:
    """Return the config in a checkpoint, with the names and options of this version.

    Raises ValueError if it has none.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"a checkpoint must contain the config of its run, {path} does not")
    return current_config(config)


def schema_of(values: Mapping[str, Any] | None, path: Path) -> DataSchema | None:
    """Return the schema of a checkpoint; for one of 0.2.0, which has none, warn and return None.

    Raises ValueError if an entry is missing.
    """
    if values:
        return DataSchema.from_dict(dict(values))
    log.warning(
        "%s was written by 0.2.0, which did not keep the order of the variables, their units, "
        "means and standard deviations, and the grid: they are taken from the data, and are "
        "correct only if these are the data of the run",
        path,
    )
    return None


def check_same_network(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if graph or network of a config differ from those in a checkpoint.

    Loading the weights is no sufficient check: with a different number of heads, or a different
    edge radius, weights still have the same shapes.
    """
    groups = ("graph", "model")
    before = dict(flatten({group: before[group] for group in groups if group in before}))
    now = dict(flatten({group: now[group] for group in groups}))
    for key, value in now.items():
        if key in before and before[key] != value and key not in NOT_IN_FORECASTS:
            raise ValueError(f"{key} must be {before[key]}, as in the checkpoint, got {value}")


def flatten(values: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of nested dicts, with dots in the path; nothing for an empty dict."""
    for name, value in values.items():
        path = f"{key}.{name}" if key else name
        if isinstance(value, Mapping):
            yield from flatten(value, path)
        else:
            yield path, value
