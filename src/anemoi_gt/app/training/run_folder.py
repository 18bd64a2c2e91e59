"""The folder of a run: its owner while it trains, and the state from which the run continues.

Config and data schema of a checkpoint are read with the names and options of this version.

.lock, .lock.owner    held by the process that trains
.hydra/config.yaml    the config, from which a run starts again that has no checkpoint
last.pt               of one process, or the folder last/ of torchrun: continues the run
best.pt               of one process, and of torchrun at its end; best/ of torchrun
metrics.jsonl         records since step 1
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anemoi_gt.app.datasets.schema import DataSchema
from anemoi_gt.app.training.run_files import atomic_write, load_checkpoint, sharded
from anemoi_gt.distributed.ownership import Ownership
from anemoi_gt.distributed.sharded_checkpoint import find_checkpoint, load_values

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

LAST = "last.pt"
BEST = "best.pt"
METRICS = "metrics.jsonl"
LOCK = ".lock"
CONFIG = ".hydra/config.yaml"
ONE_PROCESS = "one process"
TORCHRUN = "torchrun"
REMEDY = {ONE_PROCESS: "resume=true without torchrun", TORCHRUN: "resume=true with torchrun"}
ELSEWHERE = "another hydra.run.dir starts a new one"
MOVED = {  # prefixes of `_target_` in configs of 0.2.0
    "anemoi_gt.training.": "anemoi_gt.app.training.",
    "anemoi_gt.data.field_dataset.": "anemoi_gt.app.datasets.field_dataset.",
    "anemoi_gt.data.sphere_advection.": "anemoi_gt.app.datasets.sphere_advection.",
    "anemoi_gt.data.era5_uk.": "anemoi_gt.app.datasets.era5_uk.",
}
RENAMED = {"attention": "kernels"}  # groups of 0.4.0
REMOVED = {"kernels": ("tile", "fixed_degree_kernels")}  # options of 0.2.0 that affected speed
NOT_IN_FORECASTS = ("model.mapper_chunks", "model.checkpoint_groups", "model.dropout")


def own(folder: Path) -> Ownership:
    """Return a context in which no other process trains in an existing folder."""
    return Ownership(
        folder / LOCK,
        f"one run at a time may train in {folder}",
        "wait for its end, or choose another hydra.run.dir",
    )


def find_run(last: str | Path) -> Path | None:
    """Return the last checkpoint of a run, a file or folder, or None. `last` is the file."""
    last = Path(last)
    return last if last.exists() else find_checkpoint(sharded(last))


def read_run(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, or config and schema of a folder of several ranks."""
    if path.is_file():
        return load_checkpoint(path)
    return {name: load_values(path, name) for name in ("config", "schema")}


def checkpoint_to_continue(folder: Path, writer: str, *, resume: bool) -> Path | None:
    """Return the checkpoint from which a run continues, or None if it starts at step 0.

    `writer` is the current launch, ONE_PROCESS or TORCHRUN; each continues only runs of its own
    kind. Raises ValueError if the folder holds a run, but `resume` is False, the run is of the
    other kind, or its last checkpoint is missing.
    """
    last = find_run(folder / LAST)
    if last is not None:
        former_writer = ONE_PROCESS if last.name == LAST else TORCHRUN
        if writer != former_writer:
            raise ValueError(
                f"{folder} holds a run of {former_writer}, in {last.name}: "
                f"{REMEDY[former_writer]} continues it, {ELSEWHERE}"
            )
        if not resume:
            raise ValueError(f"{folder} holds a run: resume=true continues it, {ELSEWHERE}")
        return last
    best = find_run(folder / BEST)
    if best is not None:
        missing = best.with_name(best.name.replace("best", "last", 1))
        raise ValueError(
            f"{folder} holds a run without its last checkpoint: a copy of {best.name} named "
            f"{missing.name} continues it from its best step, {ELSEWHERE}"
        )
    if has_records(folder) and not resume:
        raise ValueError(
            f"{folder} holds a run that ended before its first checkpoint: resume=true starts it "
            f"again, {ELSEWHERE}"
        )
    return None


def has_records(folder: Path) -> bool:
    """Return whether a run in the folder has taken steps."""
    path = folder / METRICS
    return path.exists() and path.stat().st_size > 0


def write_config(folder: Path, config: "DictConfig", description: dict[str, Any]) -> None:
    """Write the composed config to `.hydra`.

    Hydra itself would write it before the folder is owned, over the config of a run that trains.
    `description` has the values of groups with absolute paths, so that the run can start again from
    any working directory.
    """
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    if values.get("init_from") is not None:
        values["init_from"] = str(Path(values["init_from"]).absolute())
    path = folder / CONFIG
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        file.write(OmegaConf.to_yaml(OmegaConf.create(values | description)).encode())


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the config in a folder, with this version's names, or None if it has none."""
    from omegaconf import OmegaConf

    path = folder / CONFIG
    if not path.is_file():
        return None
    config: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    return current_config(config)


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


def config_of(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the config in the state of a checkpoint, with the names and options of this version.

    Raises ValueError if it has none.
    """
    config = state.get("config")
    if not isinstance(config, Mapping):
        raise ValueError(f"a checkpoint must contain the config of its run, {path} does not")
    return current_config(config)


def schema_of(state: Mapping[str, Any], path: Path) -> DataSchema | None:
    """Return the schema of a checkpoint; for one of 0.2.0, which has none, warn and return None.

    Raises ValueError if an entry is missing.
    """
    if state.get("schema"):
        return DataSchema.from_dict(dict(state["schema"]))
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
    for key in dict.fromkeys([*before, *now]):  # an option that is left out has its default
        former, value = before.get(key), now.get(key)
        if former != value and key not in NOT_IN_FORECASTS:
            raise ValueError(f"{key} must be {former}, as in the checkpoint, got {value}")


def flatten(values: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of nested dicts, with dots in the path; nothing for an empty dict."""
    for name, value in values.items():
        path = f"{key}.{name}" if key else name
        if isinstance(value, Mapping):
            yield from flatten(value, path)
        else:
            yield path, value
