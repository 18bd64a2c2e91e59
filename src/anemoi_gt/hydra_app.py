"""Common parts of the Hydra applications: objects from configs, the command line, and errors as one sentence.

The config groups are in `anemoi_gt.configs`.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.data.datasets import ForecastDataset, Splits
from anemoi_gt.extras import import_extra
from anemoi_gt.kernel_report import Explanation
from anemoi_gt.ops.backends import BACKENDS, choose_backend
from anemoi_gt.training import TrainingConfig
from anemoi_gt.training.cuda_graph import check_device_has_cuda_graphs
from anemoi_gt.training.device import choose_device
from anemoi_gt.training.memory import advice
from anemoi_gt.training.signals import Stopped

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

NEEDED = ("hydra", "tqdm", "matplotlib", "scipy")  # imported at the start, not after an hour of training
GROUPS = ("attention", "data", "graph", "model", "training")
ERRORS_OF_PREPARATION = (ValueError, TypeError, ImportError, OSError)
ERRORS_OF_JOB = (FloatingPointError, OSError)  # others are bugs, and keep their traceback
PLAIN = {bool: "true or false", int: "an integer", float: "a number", str: "a string", NoneType: "null"}


class Run(NamedTuple):
    """Objects that a config describes."""

    splits: Splits
    model: nn.Module
    training: TrainingConfig


def build(config: "DictConfig") -> Run:
    """Build the objects that a config describes, the model on the CPU with weights drawn from `training.seed`.

    Raises ValueError, TypeError, ImportError or OSError of the constructor of the object that cannot be built.
    """
    splits, training = build_data(config)
    return Run(splits, build_model(config, splits.train), training)


def build_data(config: "DictConfig") -> tuple[Splits, TrainingConfig]:
    """Check a config and build its data set and training config, which every rank has. Raises as `build` does."""
    check_groups(config)
    for group in GROUPS:
        check_types(group, config[group])
    training = instantiate(config.training)
    check_backend(instantiate(config.attention), choose_device(training.device))
    return instantiate(config.data), training


def build_model(config: "DictConfig", train: ForecastDataset) -> nn.Module:
    """Build the graph and the model for a data set, on the CPU. Raises as `build` does."""
    graph = instantiate(config.graph)(train.nodes)
    torch.manual_seed(config.training.seed)
    make_model = instantiate(config.model)
    return make_model(graph, train.in_channels, train.out_channels, config=instantiate(config.attention))


def describe(config: "DictConfig") -> dict[str, Any]:
    """Return the groups that `build` reads as plain values, for checkpoints."""
    from omegaconf import OmegaConf

    check_groups(config)
    described = OmegaConf.to_container(config, resolve=True)
    return {group: described[group] for group in GROUPS}


def instantiate(config: "DictConfig"):
    """Build an object from its config; errors are those of its constructor, not wrapped by Hydra."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(config)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


def check_groups(config: "DictConfig") -> None:
    """Raise a ValueError if the command line has removed a group."""
    missing = [group for group in GROUPS if group not in config]
    if missing:
        raise ValueError(f"the config must have the groups {', '.join(GROUPS)}, got no {', '.join(missing)}")


def check_folder(arguments: list[str]) -> None:
    """Raise a ValueError if the folder in `hydra.run.dir` cannot be created, for which Hydra prints a traceback."""
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("hydra.run.dir=")]
    if not given:
        return
    if not given[-1]:
        raise ValueError("hydra.run.dir must name a folder, got nothing: the run would write to the working directory")
    folder = Path(given[-1]).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        wrong = "is not writable" if there.is_dir() else "is not a folder"
        raise ValueError(f"hydra.run.dir must be a folder that can be created, got {folder}: {there} {wrong}")


def check_types(group: str, config: "DictConfig") -> None:
    """Raise a ValueError for a value whose type is not that of its target's signature; only plain types are checked."""
    from hydra.utils import get_object

    target = get_object(config["_target_"])
    try:
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)
    except NameError:  # annotations for type checkers only
        return
    for name, value in config.items():
        hint = hints.get(name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if set(kinds) <= PLAIN.keys() and not fits(value, kinds):
            expected = " or ".join(PLAIN[kind] for kind in kinds)
            raise ValueError(f"{group}.{name} must be {expected}, got {value!r}")


def fits(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return True if a value has one of some plain types; an integer is a number, a bool is not."""
    return type(value) in kinds or (type(value) is int and float in kinds)


def check_device(config: "DictConfig") -> TrainingConfig:
    """Return the training config; raise a ValueError if its device does not support it."""
    check_types("training", config.training)
    training = instantiate(config.training)
    if training.cuda_graph:
        check_device_has_cuda_graphs(choose_device(training.device))
    return training


def check_backend(attention: AttentionConfig, device: torch.device) -> str:
    """Return the name of the attention backend for a device; raise a ValueError if none can run."""
    chosen = choose_backend(attention.backend, torch.empty(1, 1, 1, 16, device=device))
    return next(name for name, backend in BACKENDS.items() if backend is chosen)


def check_explain(target: Any) -> None:
    """Raise a ValueError unless `explain` is null, "print" or the name of a file."""
    if not (target is None or (isinstance(target, str) and target)):
        raise ValueError(f"explain must be null, print or the name of a file, got {target!r}")


def write_explanation(explanation: Explanation, target: str, folder: Path) -> None:
    """Log which kernels serve a model (target "print"), or write it to a file.

    A target is below the folder of the run unless it is absolute: JSON if it ends in .json, else the table.
    """
    if target == "print":
        log.info("%s", explanation)
        return
    path = folder / target
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(explanation.to_dict(), indent=1) if path.suffix == ".json" else f"{explanation}\n")
    log.info("kernels of each layer: %s", path)


def is_multirun() -> bool:
    """Return True under Hydra's `--multirun`."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def output_folder() -> Path:
    """Return the folder that Hydra created for this run."""
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir)


def launch(name: str, prepare: Callable[["DictConfig"], Callable[[], Any]]) -> None:
    """Run a Hydra application with the arguments of the command line.

    Errors that the user can fix end with one sentence on standard error and exit status 1, a signal with 128 and its
    number.

    Parameters
    ----------
    name : str
        Of the primary config in `anemoi_gt.configs`, and of the module of the application.
    prepare : callable
        Returns the job for the composed config; its errors are reported as errors in the config.
    """
    module = f"anemoi_gt.{name}"
    try:
        hydra = require_packages()
    except ImportError as error:
        exit_with_error(module, error)

    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    composed = []

    def run(config: "DictConfig"):
        composed.append(config)
        try:
            job = prepare(config)
        except MissingMandatoryValue as error:  # left at ???
            exit_with_error(module, ValueError(f"{error.full_key} must be given, as {error.full_key}=VALUE"))
        except OmegaConfBaseException as error:
            exit_with_error(module, ValueError(str(error).splitlines()[0]))
        except HydraException as error:
            exit_with_error(module, ValueError(" ".join(str(error).split())))
        except torch.OutOfMemoryError:
            exit_with_error(module, out_of_memory(config))
        except ERRORS_OF_PREPARATION as error:
            exit_with_error(module, error)
        try:
            return job()
        except torch.OutOfMemoryError:
            exit_with_error(module, out_of_memory(config))
        except ERRORS_OF_JOB as error:
            exit_with_error(module, error)
        except Stopped as stopped:
            go_on = f"resume=true hydra.run.dir={output_folder()} continues from there"
            exit_with_error(module, f"{stopped}: {go_on}", stopped.exit_status)

    try:
        check_folder(sys.argv[1:])
    except ValueError as error:
        exit_with_error(module, error)
    sys.argv[1:] = [quote_null(argument) for argument in sys.argv[1:]]
    logging.raiseExceptions = False  # a log file on a full disk must not add tracebacks
    try:
        hydra.main(version_base="1.3", config_path="pkg://anemoi_gt.configs", config_name=name)(run)()
    except KeyboardInterrupt:
        exit_with_error(module, "interrupted", 130)
    except SystemExit as ended:
        if ended.code == 1 and not composed:  # Hydra has printed what it cannot read
            exit_with_error(module, f"nothing was started; python -m {module} --help lists all groups and options")
        raise


def out_of_memory(config: "DictConfig") -> str:
    """Return a sentence with advice for a run that does not fit into the memory of its GPU."""
    properties = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    size = "" if properties is None else f", {properties.total_memory / 1e9:.0f} GB of {properties.name}"
    return f"out of GPU memory{size}: {advice(config.get('model', {}), config.get('training', {}))}"


def require_packages():
    """Import the packages of the extra `train`; return Hydra."""
    hydra, *_ = (import_extra(module, "train") for module in NEEDED)
    return hydra


def exit_with_error(module: str, error: Exception | str, status: int = 1) -> NoReturn:
    """Exit with one sentence on standard error; the traceback goes to the log at DEBUG level (`hydra.verbose=true`)."""
    log.debug("traceback", exc_info=error if isinstance(error, Exception) else None)
    rank = f"[rank{os.environ['RANK']}]: " if "RANK" in os.environ else ""
    sys.stderr.write(f"{rank}{module}: {error}\n")  # in one call, so that lines of several ranks do not mix
    sys.exit(status)


def quote_null(argument: str) -> str:
    """Quote the null of `attention/precision=null`, which Hydra cannot parse as the name of a choice."""
    groups = "|".join([*GROUPS, "sharding", "attention/backend", "attention/precision"])
    return re.sub(rf"^(\+?(?:{groups})(?:@[\w.]+)?)=null$", r"\1='null'", argument)
