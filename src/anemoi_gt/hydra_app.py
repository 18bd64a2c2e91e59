"""What the Hydra applications share: objects from configs, the start from a command line, and the end with one sentence.

The only place that reads configs. The groups are in `anemoi_gt.configs`.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.data.datasets import ForecastDataset, Splits
from anemoi_gt.explanation import Explanation
from anemoi_gt.extras import import_extra
from anemoi_gt.ops.backends import BACKENDS, choose_backend
from anemoi_gt.training import TrainingConfig
from anemoi_gt.training.cuda_graph import check_device_records
from anemoi_gt.training.device import choose_device
from anemoi_gt.training.signals import Stopped

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

NEEDED = ("hydra", "tqdm", "matplotlib", "scipy")  # asked for at the start, not after an hour of training
GROUPS = ("attention", "data", "graph", "model", "training")
ERRORS_OF_PREPARATION = (ValueError, TypeError, ImportError, OSError)
ERRORS_OF_JOB = (FloatingPointError, OSError)  # others are mistakes of ours, and keep their traceback
PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", NoneType: "null"}


class Run(NamedTuple):
    """What a config describes."""

    splits: Splits
    model: nn.Module
    training: TrainingConfig


def build(config: "DictConfig") -> Run:
    """Make the objects that a config describes.

    Parameters
    ----------
    config : DictConfig
        With the groups attention, data, graph, model and training.

    Returns
    -------
    Run
        The model is on the CPU, with weights drawn from `training.seed`.

    Raises
    ------
    ValueError, TypeError, ImportError, OSError
        When a part of the config cannot be made; whatever its maker raised.
    """
    splits, training = build_data(config)
    return Run(splits, build_model(config, splits.train), training)


def build_data(config: "DictConfig") -> tuple[Splits, TrainingConfig]:
    """Check a config, and make what every process of a run has: the data set, and the numbers. Raises as `build` does."""
    check_groups(config)
    for group in GROUPS:
        check_types(group, config[group])
    training = instantiate(config.training)
    check_backend(instantiate(config.attention), choose_device(training.device))
    return instantiate(config.data), training


def build_model(config: "DictConfig", train: ForecastDataset) -> nn.Module:
    """Make the graph, and the model on it for these samples, on the CPU. Raises as `build` does."""
    graph = instantiate(config.graph)(train.nodes)
    torch.manual_seed(config.training.seed)
    make_model = instantiate(config.model)
    return make_model(graph, train.in_channels, train.out_channels, config=instantiate(config.attention))


def describe(config: "DictConfig") -> dict[str, Any]:
    """Return what `build` reads of a config as plain values: what checkpoints keep."""
    from omegaconf import OmegaConf

    check_groups(config)
    described = OmegaConf.to_container(config, resolve=True)
    return {group: described[group] for group in GROUPS}


def instantiate(config: "DictConfig"):
    """Make an object from its config, and raise what its maker raises instead of Hydra's wrapping of it."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(config)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


def check_groups(config: "DictConfig") -> None:
    """Raise a ValueError for a group that the command line has taken away."""
    missing = [group for group in GROUPS if group not in config]
    if missing:
        raise ValueError(f"the config must have the groups {', '.join(GROUPS)}, got none of {', '.join(missing)}")


def check_folder(arguments: list[str]) -> None:
    """Raise a ValueError where a folder that the arguments name for the run cannot be made, which Hydra answers with a traceback."""
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("hydra.run.dir=")]
    if not given:
        return
    if not given[-1]:
        raise ValueError("hydra.run.dir must name a folder, got nothing: the run would fill the folder that you are in")
    folder = Path(given[-1]).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        wrong = "cannot be written to" if there.is_dir() else "is no folder"
        raise ValueError(f"hydra.run.dir must be a folder that can be made, got {folder}: {there} {wrong}")


def check_types(group: str, config: "DictConfig") -> None:
    """Raise a ValueError for a value whose type is not what its maker's signature says; only plain types are checked."""
    from hydra.utils import get_object

    maker = get_object(config["_target_"])
    try:
        hints = get_type_hints(maker.__init__ if isinstance(maker, type) else maker)
    except NameError:  # a maker whose annotations are for type checkers only
        return
    for name, value in config.items():
        hint = hints.get(name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if set(kinds) <= PLAIN.keys() and not fits(value, kinds):
            wanted = " or ".join(PLAIN[kind] for kind in kinds)
            raise ValueError(f"{group}.{name} must be {wanted}, got {value!r}")


def fits(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of some plain types; a whole number is a number, true and false are none."""
    return type(value) in kinds or (type(value) is int and float in kinds)


def check_device(config: "DictConfig") -> TrainingConfig:
    """Return the numbers of a run; raise a ValueError where its device cannot do what they ask for. Data, graph and model are not made yet."""
    check_types("training", config.training)
    training = instantiate(config.training)
    if training.cuda_graph:
        check_device_records(choose_device(training.device))
    return training


def check_backend(attention: AttentionConfig, device: torch.device) -> str:
    """Return the attention backend that will run on this device; raise a ValueError now, not in the first step, when none can."""
    chosen = choose_backend(attention.backend, torch.empty(1, 1, 1, 16, device=device))
    return next(name for name, backend in BACKENDS.items() if backend is chosen)


def check_explain(where: Any) -> None:
    """Raise a ValueError unless the config's `explain` is null, "print" or the name of a file."""
    if not (where is None or (isinstance(where, str) and where)):
        raise ValueError(f"explain must be null, print or the name of a file, got {where!r}")


def tell(explanation: Explanation, where: str, folder: Path) -> None:
    """Log which kernels serve a model, or write it to a file.

    Parameters
    ----------
    explanation : Explanation
    where : str
        "print" logs the table. Anything else is a file, below `folder` unless it is absolute: plain values as JSON where it
        ends in .json, else the table.
    folder : Path
        The run's.
    """
    if where == "print":
        log.info("%s", explanation)
        return
    path = folder / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(explanation.to_dict(), indent=1) if path.suffix == ".json" else f"{explanation}\n")
    log.info("kernels of each layer: %s", path)


def is_multirun() -> bool:
    """Whether Hydra was asked for several runs, `--multirun`."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def output_folder() -> Path:
    """Return the folder that Hydra made for what this run leaves."""
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir)


def launch(name: str, prepare: Callable[["DictConfig"], Callable[[], Any]]) -> None:
    """Run a Hydra application with the arguments of the command line.

    What the user can mend ends with one sentence on standard error and exit status 1, a signal with 128 and its number.

    Parameters
    ----------
    name : str
        Of the primary config in `anemoi_gt.configs`, and of the module whose application it is.
    prepare : callable
        Makes the job from the composed config; whatever it raises is taken for a mistake in the config.
    """
    module = f"anemoi_gt.{name}"
    try:
        hydra = require_packages()
    except ImportError as error:
        stop(module, error)

    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    composed = []

    def run(config: "DictConfig"):
        composed.append(config)
        try:
            job = prepare(config)
        except MissingMandatoryValue as error:  # left at ???
            stop(module, ValueError(f"{error.full_key} must be given, as {error.full_key}=VALUE"))
        except OmegaConfBaseException as error:
            stop(module, ValueError(str(error).splitlines()[0]))
        except HydraException as error:
            stop(module, ValueError(" ".join(str(error).split())))
        except ERRORS_OF_PREPARATION as error:
            stop(module, error)
        try:
            return job()
        except ERRORS_OF_JOB as error:
            stop(module, error)
        except Stopped as stopped:
            go_on = f"resume=true hydra.run.dir={output_folder()} continues from there"
            end(f"{module}: {stopped}: {go_on}", stopped.exit_status)

    try:
        check_folder(sys.argv[1:])
    except ValueError as error:
        stop(module, error)
    sys.argv[1:] = [quote_null(argument) for argument in sys.argv[1:]]
    logging.raiseExceptions = False  # a log file on a full disk must not bury the sentence under tracebacks
    try:
        hydra.main(version_base="1.3", config_path="pkg://anemoi_gt.configs", config_name=name)(run)()
    except KeyboardInterrupt:
        end(f"{module}: interrupted", 130)
    except SystemExit as ended:
        if ended.code == 1 and not composed:  # Hydra has said what it cannot read, and does not say what there is
            end(f"{module}: nothing was started; python -m {module} --help lists all groups and options", 1)
        raise


def require_packages():
    """Import the packages of the extra `train`; returns Hydra."""
    hydra, *_ = (import_extra(module, "train") for module in NEEDED)
    return hydra


def stop(module: str, error: Exception) -> None:
    """Exit with the error as one sentence; the traceback goes to the log at DEBUG level (`hydra.verbose=true`)."""
    log.debug("where it happened", exc_info=error)
    end(f"{module}: {error}", 1)


def end(sentence: str, status: int) -> None:
    """Exit with a sentence on standard error."""
    print(sentence, file=sys.stderr)
    sys.exit(status)


def quote_null(argument: str) -> str:
    """Quote the null of `attention/precision=null`: Hydra cannot read a bare one where it wants the name of a choice."""
    groups = "|".join([*GROUPS, "sharding", "attention/backend", "attention/precision"])
    return re.sub(rf"^(\+?(?:{groups})(?:@[\w.]+)?)=null$", r"\1='null'", argument)
