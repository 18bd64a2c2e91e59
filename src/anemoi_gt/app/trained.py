"""Config and data schema of a run's checkpoint, with renamed options under their new names."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anemoi_gt.app.datasets.schema import DataSchema

log = logging.getLogger(__name__)

MOVED = {  # beginnings of the names in `_target_` of 0.2.0
    "anemoi_gt.training.": "anemoi_gt.app.training.",
    "anemoi_gt.data.field_dataset.": "anemoi_gt.app.datasets.field_dataset.",
    "anemoi_gt.data.sphere_advection.": "anemoi_gt.app.datasets.sphere_advection.",
    "anemoi_gt.data.era5_uk.": "anemoi_gt.app.datasets.era5_uk.",
}
REMOVED = {"attention": ("tile", "fixed_degree_kernels")}  # options of 0.2.0 that changed no result
CHANGE_NO_FORECAST = ("model.mapper_chunks", "model.checkpoint_groups", "model.dropout")


def current_target(target: str) -> str:
    """Return the name of a function or class in this version, for one in a config of 0.2.0."""
    for former, new in MOVED.items():
        if target.startswith(former):
            return new + target.removeprefix(former)
    return target


def current_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in a checkpoint with the names and options of this version."""
    current = {}
    for group, values in config.items():
        if isinstance(values, Mapping):
            values = {
                name: value for name, value in values.items() if name not in REMOVED.get(group, ())
            }
            if isinstance(values.get("_target_"), str):
                values["_target_"] = current_target(values["_target_"])
        current[group] = values
    return current


def schema_of(values: Mapping[str, Any] | None, path: Path) -> DataSchema | None:
    """Return the schema of a checkpoint, or None, with a warning, for 0.2.0, which had none.

    Raises ValueError if an entry is missing.
    """
    if values:
        return DataSchema.from_dict(dict(values))
    log.warning(
        "%s was written by 0.2.0, which did not keep the order of the variables, their units, "
        "means and standard deviations, and the grid: they come from the data now, and are correct "
        "only if these are the data of the run",
        path,
    )
    return None


def check_same_network(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if graph or network of a config differ from a checkpoint's.

    Weights of the same shapes may load nonetheless: other heads, or another radius of the edges.
    """
    before = dict(
        flatten({group: before[group] for group in ("graph", "model") if group in before})
    )
    now = dict(flatten({group: now[group] for group in ("graph", "model")}))
    for key, value in now.items():
        if key in before and before[key] != value and key not in CHANGE_NO_FORECAST:
            raise ValueError(f"{key} must be {before[key]}, as in the checkpoint, got {value}")


def flatten(values: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts by their path with dots; nothing for an empty one."""
    for name, value in values.items():
        path = f"{key}.{name}" if key else name
        if isinstance(value, Mapping):
            yield from flatten(value, path)
        else:
            yield path, value
