"""Code shared by the Hydra applications: objects from configs, folders, errors."""

import inspect
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import is_dataclass, make_dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_type_hints

import torch
from torch import nn

from anemoi_gt.app.command_line import GROUPS, OPTIONS, hydra_main
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset, Splits, load
from anemoi_gt.app.datasets.schema import DataSchema
from anemoi_gt.app.trained import check_same_network, current_config, current_target, schema_of
from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.capture_choice import check_capturable, device_unsupported_reason
from anemoi_gt.app.training.config import choose_device, cpu_threads
from anemoi_gt.app.training.memory_estimate import advice
from anemoi_gt.app.training.progress import Stopped
from anemoi_gt.app.training.run_files import load_checkpoint, load_weights
from anemoi_gt.app.training.run_folder import LOCK, own
from anemoi_gt.data.graphs import check_fit
from anemoi_gt.distributed import is_launched
from anemoi_gt.distributed.sharded_checkpoint import require_file
from anemoi_gt.explanation import explain
from anemoi_gt.extras import import_extra
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.ops.backend import Dtypes
from anemoi_gt.ops.backends import choose_backend
from anemoi_gt.toolchain import compile_problem

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch_geometric.data import HeteroData

log = logging.getLogger(__name__)

# imported at the start, so that a missing one does not end the run after an hour of training
REQUIRED_MODULES = ("hydra", "tqdm", "matplotlib", "scipy")
ERRORS_OF_PREPARATION = (ValueError, TypeError, ImportError, OSError, FloatingPointError)
ERRORS_OF_JOB = (FloatingPointError, OSError)  # other errors are bugs, shown with their traceback


class ConfigError(Exception):
    """The run cannot start as configured."""


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
    check_backend(instantiate(config.attention), choose_device(training.device))
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
    attention = instantiate(config.attention)
    return make_model(graph, train.in_channels, train.out_channels, config=attention)


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
    run = build(config, schema_of(state.get("schema"), path))
    load_weights(run.model, state)
    values = OmegaConf.to_container(config, resolve=True)
    check_same_network(current_config(state["config"]), values)
    run.model.to(choose_device(run.training.device)).eval()
    return run, state.get("step")


def store_config(config: Any, checkpoint: Path) -> None:
    """Register the config of a checkpoint as Hydra's `run: of_checkpoint`.

    Raises ValueError if the checkpoint has no config.
    """
    from hydra.core.config_store import ConfigStore

    if not isinstance(config, dict):
        raise ValueError(f"a checkpoint must contain the config of its run, {checkpoint} does not")
    ConfigStore.instance().store(
        "of_checkpoint", current_config(config), group="run", package="_global_"
    )


def describe(config: "DictConfig") -> dict[str, Any]:
    """Check a config; return its `GROUPS` as plain values, with an absolute `data.path`."""
    from omegaconf import OmegaConf

    def absolute(path: Any) -> Any:
        if isinstance(path, list):
            return [absolute(item) for item in path]
        if isinstance(path, str) and "://" not in path:
            return str(Path(path).expanduser().absolute())
        return path

    check_types(config, *GROUPS)
    values = OmegaConf.to_container(config, resolve=True)
    if "path" in values["data"]:
        values["data"]["path"] = absolute(values["data"]["path"])
    return {group: values[group] for group in GROUPS}


def instantiate(config: "DictConfig") -> Any:
    """Build an object from its config; raise its errors without Hydra's wrapper."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(config)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


def expand_home(argument: str) -> str:
    """Return a command-line argument with the home folder in place of ~ at the start of a path."""
    home = str(Path.home())
    return re.sub(r"(?<=[=\[,])~(?=/)", lambda _: home, argument)


def check_given_once(arguments: list[str]) -> None:
    """Raise ValueError if an option is given twice, of which Hydra would take the last."""
    given: dict[str, str] = {}
    for argument in arguments:
        key = argument.lstrip("+~").partition("=")[0]
        if argument.startswith("-") or "=" not in argument:
            continue
        if key in given:
            raise ValueError(
                f"{key} must be given once, got {given[key]} and {argument}: several values are a "
                f'list in quotes, "{key}=[...]"'
            )
        given[key] = argument


def hydra_problem(text: str, name: str) -> str:
    """Return what Hydra prints about the command line of an application as one sentence."""
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        text = f"there is no option {unknown[1]}"
    for end in ("\nConfig search path", "\nSee https", "\nSet the environment variable"):
        text = text.partition(end)[0]
    return (
        f"{' '.join(text.split())}: nothing was started; anemoi-gt {name} --help lists all groups "
        "and options"
    )


def argument_value(arguments: list[str], key: str) -> Any:
    """Return the value of the last KEY=VALUE as Hydra parses it.

    Return None if there is none or it cannot be parsed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    matching = [argument for argument in arguments if argument.startswith(f"{key}=")]
    if not matching:
        return None
    try:
        return OverridesParser.create().parse_override(matching[-1]).value()
    except HydraException:
        return None


def check_folder(arguments: list[str]) -> Path:
    """Return the existing folder in which Hydra will create the run folder.

    Raises ValueError if it cannot create one there.
    """
    value = argument_value(arguments, "hydra.run.dir")
    if value == "":
        raise ValueError(
            "hydra.run.dir must name a folder, got nothing: the run would write to the working "
            "directory"
        )
    folder = Path(str(value or "outputs")).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        # os.access would not see what only a write meets, such as a quota
        TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        raise ValueError(
            f"hydra.run.dir must be a folder that can be created, got {folder}: {existing}: "
            f"{error.strerror}"
        ) from error
    return existing


def remove_empty_run(existing: Path) -> None:
    """Remove the folder of a failed run, below `existing`, if it has only Hydra's files.

    The folder stays if another process trains in it, which may have created it at the same time.
    """
    folder = output_folder()
    if existing not in folder.parents:  # it existed before the run
        return
    with suppress(ValueError), own(folder):
        names = [path.name for path in folder.iterdir()]
        is_empty = all(name.startswith((LOCK, ".hydra")) or name.endswith(".log") for name in names)
        if not is_empty:
            return
        shutil.rmtree(folder)
        for parent in folder.parents[: folder.parents.index(existing)]:
            with suppress(OSError):  # not empty: it holds another run
                parent.rmdir()


def check_types(config: "DictConfig", *groups: str) -> None:
    """Convert the values of groups to the types in the signatures of their targets.

    Types that structured configs do not support are not checked. Raises ValueError for a wrong
    type, or if the command line removed a group.
    """
    from hydra.utils import get_object

    missing = [group for group in groups if group not in config]
    if missing:
        raise ValueError(
            f"the config must have the groups {', '.join(groups)}, got no {', '.join(missing)}"
        )
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


def check_options(config: "DictConfig", options: type) -> None:
    """Convert the options of a command to the types in its structured config.

    Raises ValueError for a wrong type, and MissingMandatoryValue for an option without a value.
    """
    for name, kind in get_type_hints(options).items():
        if name not in config:  # a run that continues has no init_from
            continue
        if is_dataclass(kind):
            for inner, inner_kind in get_type_hints(kind).items():
                value = config[name][inner]
                config[name][inner] = as_type(f"{name}.{inner}", value, inner_kind)
        else:
            config[name] = as_type(name, config[name], kind)


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


def check_device(config: "DictConfig") -> TrainingConfig:
    """Return the training config; raise ValueError if its device does not support it."""
    training = instantiate(config.training)
    device = choose_device(training.device)
    if training.cuda_graph:
        check_capturable(device_unsupported_reason(device))
    problem = compile_problem(device) if training.compile else None
    if problem is not None:
        raise ValueError(f"training.compile must be false here, got true: {problem}")
    return training


def check_backend(attention: KernelConfig, device: torch.device) -> str:
    """Return the name of the attention backend for a device; raise ValueError if none can run."""
    return choose_backend(attention.backend, {}, Dtypes(torch.float32), device).name


def check_explain(target: Any) -> None:
    """Raise ValueError unless `explain` is null, "print" or the name of a file."""
    is_text = isinstance(target, str) and target != ""
    if target is not None and not is_text:
        raise ValueError(f"explain must be null, print or the name of a file, got {target!r}")


def write_explanation(
    model: nn.Module, dataset: ForecastDataset, training: TrainingConfig, target: str
) -> str:
    """Return for the log which kernels a model runs on the first batch, or the file that says so.

    The target is "print", or a file in the folder of the run unless it is absolute: JSON if it ends
    in .json, otherwise text.
    """
    batch = next(load(dataset, training.batch_size, next(model.parameters()).device))
    with cpu_threads(training.threads):
        explanation = explain(model, batch.inputs)
    if target == "print":
        return str(explanation)
    path = output_folder() / target
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(explanation.to_dict(), indent=1))
    else:
        path.write_text(f"{explanation}\n")
    return f"kernels of each layer: {path}"


def is_multirun() -> bool:
    """Return whether Hydra runs with `--multirun`."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def output_folder() -> Path:
    """Return the folder that Hydra created for this run."""
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir)


def run_command(
    name: str,
    prepare: Callable[["DictConfig"], Callable[[], Any]],
    choose_config: Callable[[], str],
) -> None:
    """Run a Hydra application with the command-line arguments.

    After an error that the user can fix, the process prints one sentence on standard error and
    exits with status 1. After a signal, the status is 128 plus its number. A run that cannot start
    leaves no folder.

    `name` is the name of the application's module. `prepare` returns the job for the composed
    config; its errors are reported as errors in the config. `choose_config` returns the name of the
    primary config in `anemoi_gt.configs`.
    """
    module = f"anemoi_gt.{name}"
    sys.argv[1:] = [expand_home(argument) for argument in sys.argv[1:]]
    try:
        check_given_once(sys.argv[1:])
        for required in REQUIRED_MODULES:
            import_extra(required, "train")
        config_name = choose_config()
        existing = check_folder(sys.argv[1:])
    except (ImportError, OSError, ValueError) as error:
        exit_with_error(module, error)

    printed = StringIO()  # by Hydra, before the config is composed
    capture = ExitStack()

    def run(config: "DictConfig") -> Any:
        error: BaseException | str
        capture.close()
        try:
            return prepare_job(name, prepare, config)()
        except Stopped as stopped:
            message = f"{stopped}: {resume_command(output_folder())}"
            exit_with_error(module, message, stopped.exit_status)
        except (RuntimeError, MemoryError) as caught:
            if not is_out_of_memory(caught):
                raise
            error = out_of_memory(config, caught)
        except (ConfigError, KeyboardInterrupt, *ERRORS_OF_JOB) as caught:
            error = caught
        remove_empty_run(existing)
        if isinstance(error, KeyboardInterrupt):
            raise error
        exit_with_error(module, error)

    logging.raiseExceptions = False  # a log file on a full disk must not add tracebacks
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt == signal.SIG_DFL:  # set by the console script while packages are imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    capture.enter_context(redirect_stderr(printed))
    try:
        hydra_main(config_name, run)
    except KeyboardInterrupt:
        capture.close()
        exit_with_error(module, "interrupted", 130)
    except SystemExit as ended:
        capture.close()
        text = printed.getvalue()
        if ended.code == 1 and text:  # of a command line that it cannot parse
            exit_with_error(module, hydra_problem(text, name))
        sys.stderr.write(text)
        raise
    finally:
        capture.close()
        if interrupt == signal.SIG_DFL:
            signal.signal(signal.SIGINT, interrupt)


def run_command_on_checkpoint(
    name: str, prepare: Callable[["DictConfig"], Callable[[], Any]]
) -> None:
    """Run a Hydra application on the config of the checkpoint that the command line names."""

    def choose_config() -> str:
        if is_launched():
            raise ValueError(f"{name} runs in one process, without torchrun: anemoi-gt {name} ...")
        matching = [argument for argument in sys.argv if argument.startswith("checkpoint=")]
        if matching:  # without one, --help still works, and Hydra reports it as missing
            value = argument_value(matching, "checkpoint")
            if not isinstance(value, str):
                raise ValueError(
                    f"checkpoint must name one file, got {matching[-1]!r}; quote names with spaces "
                    "or special characters twice: \"checkpoint='run (1)/best.pt'\""
                )
            path = Path(value)
            require_file(path)
            store_config(load_checkpoint(path).get("config"), path)
        return name

    run_command(name, prepare, choose_config)


def prepare_job(
    name: str, prepare: Callable[["DictConfig"], Callable[[], Any]], config: "DictConfig"
) -> Callable[[], Any]:
    """Return the job of an application; raise user errors as a ConfigError with one sentence."""
    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        check_options(config, OPTIONS[name])
        return prepare(config)
    except MissingMandatoryValue as error:  # left at ???
        raise ConfigError(f"{error.full_key} must be given, as {error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    except (HydraException, *ERRORS_OF_PREPARATION) as error:
        raise ConfigError(error) from error


def resume_command(folder: Path) -> str:
    """Return the shell command that continues a run; under torchrun, on rank 0's host."""
    override = f"hydra.run.dir={folder}"
    if not re.fullmatch(r"[\w./=-]+", override):  # quoted for Hydra, then for the shell
        escaped = str(folder).replace("'", "\\'")
        override = shlex.quote(f"hydra.run.dir='{escaped}'")
    if "RANK" not in os.environ:
        return f"anemoi-gt train resume=true {override}"
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    command = ["torchrun"]
    if hosts > 1:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        command += [f"--nnodes={hosts}", "--node-rank=0"]
        command += [f"--master-addr={address}", f"--master-port={port}"]
    command += [f"--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']}", "-m", "anemoi_gt.train"]
    command += [argument for argument in sys.argv[1:] if argument.startswith("sharding")]
    command += ["resume=true", override]
    if hosts > 1:
        command.append(" # on the other hosts with their --node-rank")
    return " ".join(command)


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return whether a GPU or the host ran out of memory; PyTorch has no type for the latter."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or "DefaultCPUAllocator" in str(error)


def out_of_memory(config: "DictConfig", error: RuntimeError | MemoryError) -> str:
    """Return an error message with advice for a run that ran out of memory."""
    training = config.get("training", {})
    remedy = advice(config.get("model", {}), training)
    if not isinstance(error, torch.OutOfMemoryError):
        return f"out of memory of the host: {remedy}"
    size = ""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()
        size = f", {properties.total_memory / 1e9:.0f} GB of {properties.name}"
    if training.get("cuda_graph", False) is not False:
        remedy += (
            "; training.cuda_graph=false shares the memory of a step with validation, which a CUDA "
            "graph does not"
        )
    return f"out of GPU memory{size}: {remedy}"


def exit_with_error(module: str, error: Exception | str, status: int = 1) -> NoReturn:
    """Print one sentence on standard error and exit; log the traceback at level DEBUG.

    `hydra.verbose=true` shows the traceback.
    """
    if isinstance(error, Exception):
        log.debug("traceback", exc_info=error)
        message = " ".join(str(error).split())
    else:
        message = error
    rank = f"[rank{os.environ['RANK']}]: " if "RANK" in os.environ else ""
    # one call, so that the output of several ranks does not interleave
    sys.stderr.write(f"{rank}{module}: {message}\n")
    sys.exit(status)
