"""The objects that a config describes: data, graph, model, and hyperparameters of the training."""

import inspect
import logging
from dataclasses import make_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch
from torch import nn

from anemoi_gt.app.command_line import GROUPS
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset, Splits
from anemoi_gt.app.datasets.schema import DataSchema
from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.config import choose_device
from anemoi_gt.app.training.run_files import load_checkpoint, load_weights
from anemoi_gt.app.training.run_folder import (
    check_same_network,
    config_of,
    current_target,
    schema_of,
)
from anemoi_gt.data.graphs import check_fit
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.ops.backend import Dtypes
from anemoi_gt.ops.backends import choose_backend

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch_geometric.data import HeteroData

log = logging.getLogger(__name__)


class Run(NamedTuple):
    """The objects that a config describes."""

    splits: Splits
    model: nn.Module
    training: TrainingConfig


def build(config: "DictConfig", schema: DataSchema | None = None) -> Run:
    """Build the objects of a config; the model is on the CPU, with `training.seed` as seed.

    With the `schema` of a trained model, the data set uses its variables, order and normalisation;
    for a new model it is None. Raises the ValueError, TypeError, ImportError or OSError of the
    object that cannot be built.
    """
    splits, training = build_data(config, schema)
    return Run(splits, build_model(config, splits.train), training)


def build_data(
    config: "DictConfig", schema: DataSchema | None = None
) -> tuple[Splits, TrainingConfig]:
    """Check a config and build the objects that every rank needs: data set and training config.

    Raises like `build`.
    """
    check_types(config, *GROUPS)
    training = instantiate(config.training)
    check_backend(instantiate(config.kernels), choose_device(training.device))
    splits = instantiate(config.data) if schema is None else build_same_data(config.data, schema)
    return splits, training


def build_same_data(config: "DictConfig", schema: DataSchema) -> Splits:
    """Build a data set for a trained model; raise ValueError if its schema differs."""
    from hydra.utils import get_object, instantiate

    make_splits = instantiate(config, _partial_=True)
    if "schema" in inspect.signature(get_object(config["_target_"])).parameters:
        return make_splits(schema=schema)
    splits = make_splits()
    schema.check_same(splits.train.schema())
    return Splits(*(split.normalised_by(schema.normalisation) for split in splits))


def build_model(config: "DictConfig", train: ForecastDataset) -> nn.Module:
    """Build the graph and the model for a data set, on the CPU. Raises like `build`."""
    graph = instantiate(config.graph)(train.nodes)
    check_fit(graph)
    log.info("graph: %s", describe_graph(graph))
    torch.manual_seed(config.training.seed)  # here, so that data and graph do not change weights
    make_model = instantiate(config.model)
    kernels = instantiate(config.kernels)
    return make_model(graph, train.in_channels, train.out_channels, config=kernels)


def describe_graph(graph: "HeteroData") -> str:
    """Describe the number of nodes and edges of each type, for the log."""
    nodes = ", ".join(f"{graph[name].num_nodes} {name} nodes" for name in graph.node_types)
    edges = ", ".join(
        f"{graph[kind].num_edges} edges {kind[0]} to {kind[2]}" for kind in graph.edge_types
    )
    return f"{nodes}; {edges}"


def build_trained(config: "DictConfig") -> tuple[Run, int | None]:
    """Build the objects of a checkpoint's config, with its weights, on the configured device.

    Returns the run and the step of the checkpoint, None if unknown.
    """
    from omegaconf import OmegaConf

    path = Path(config.checkpoint)
    state = load_checkpoint(path)
    run = build(config, schema_of(state, path))
    load_weights(run.model, state)
    values = OmegaConf.to_container(config, resolve=True)
    check_same_network(config_of(state, path), values)
    run.model.to(choose_device(run.training.device)).eval()
    return run, state.get("step")


def instantiate(config: "DictConfig") -> Any:
    """Build an object from its config; raise its errors without Hydra's wrapper."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(config)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


def describe(config: "DictConfig") -> dict[str, Any]:
    """Return the `GROUPS` of a config as plain values, with an absolute `data.path`."""
    from omegaconf import OmegaConf

    def absolute(path: Any) -> Any:
        if isinstance(path, list):
            return [absolute(item) for item in path]
        if isinstance(path, str) and "://" not in path:
            return str(Path(path).expanduser().absolute())
        return path

    values = OmegaConf.to_container(config, resolve=True)
    if "path" in values["data"]:
        values["data"]["path"] = absolute(values["data"]["path"])
    return {group: values[group] for group in GROUPS}


def check_types(config: "DictConfig", *groups: str) -> None:
    """Convert the values of groups to the types in the signatures of their targets.

    Types that structured configs do not support are not checked. Raises ValueError for a wrong
    type.
    """
    from hydra.utils import get_object

    for group in groups:
        config[group]["_target_"] = current_target(config[group]["_target_"])
        target = get_object(config[group]["_target_"])
        try:
            # mypy warns that a subclass may have another __init__, but this is the class itself.
            function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
            hints = get_type_hints(function)
        except NameError:  # an annotation that is imported for type checkers only
            continue
        for name, value in config[group].items():
            config[group][name] = as_type(f"{group}.{name}", value, hints.get(name, Any))


def as_type(name: str, value: Any, kind: Any) -> Any:
    """Return the value of a config as an annotated type; raise ValueError if it has another.

    A value is returned as it is if structured configs do not support the type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ValidationError

    schema = _schema(kind)
    if schema is None:
        return value
    try:
        return OmegaConf.merge(schema, {"value": value})["value"]
    except ValidationError:
        named = kind.__name__ if isinstance(kind, type) else kind
        remedy = f': write "{name}=[{value}]"' if "list" in str(kind) else ""
        raise ValueError(f"{name} must be {named}, got {value!r}{remedy}") from None


@cache  # takes a millisecond, and options share types
def _schema(kind: Any) -> "DictConfig | None":
    """Return a structured config with a value of this type, or None for an unsupported type."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.structured(make_dataclass("Schema", [("value", kind)]))
    except OmegaConfBaseException:
        return None


def check_backend(kernels: KernelConfig, device: torch.device) -> str:
    """Return the name of the backend for a device; raise ValueError if none can run."""
    return choose_backend(kernels.backend, {}, Dtypes(torch.float32), device).name
