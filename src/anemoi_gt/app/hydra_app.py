"""A Hydra application as a process: its arguments, the folder of a run, errors and exit status."""

import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from anemoi_gt.app.command_line import ConfigError, hydra_main
from anemoi_gt.app.training.progress import Stopped
from anemoi_gt.app.training.run_files import load_checkpoint
from anemoi_gt.app.training.run_folder import config_of
from anemoi_gt.distributed import is_launched
from anemoi_gt.extras import import_extra

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

# imported at the start, so that a missing one does not end the run after an hour of training
REQUIRED_MODULES = ("hydra", "tqdm", "matplotlib", "scipy")
ERRORS_OF_PREPARATION = (ValueError, TypeError, ImportError, OSError, FloatingPointError)
# other errors are bugs, shown with their traceback
ERRORS_OF_JOB = (FloatingPointError, OSError, MemoryError, torch.OutOfMemoryError)


def store_config(config: dict[str, Any]) -> None:
    """Register the config of a checkpoint as Hydra's `run: of_checkpoint`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store("of_checkpoint", config, group="run", package="_global_")


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
    exits with status 1. After a signal, the status is 128 plus its number.

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
    except (ImportError, OSError, ValueError) as error:
        exit_with_error(module, error)

    def run(config: "DictConfig") -> Any:
        try:
            return prepare_job(prepare, config)()
        except Stopped as stopped:
            remedy = f"resume=true hydra.run.dir={output_folder()} continues the run"
            exit_with_error(module, f"{stopped}: {remedy}", stopped.exit_status)
        except (ConfigError, *ERRORS_OF_JOB) as error:
            exit_with_error(module, error)

    logging.raiseExceptions = False  # a log file on a full disk must not add tracebacks
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # by the console script, for imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        hydra_main(name, config_name, run)
    except (ConfigError, OSError) as error:  # OSError: the folder of the run cannot be made
        exit_with_error(module, error)
    except KeyboardInterrupt:
        exit_with_error(module, "interrupted", 130)


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
            store_config(config_of(load_checkpoint(path), path))
        return name

    run_command(name, prepare, choose_config)


def prepare_job(
    prepare: Callable[["DictConfig"], Callable[[], Any]], config: "DictConfig"
) -> Callable[[], Any]:
    """Return the job of an application; raise user errors as a ConfigError with one sentence."""
    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return prepare(config)
    except MissingMandatoryValue as error:  # left at ???
        raise ConfigError(f"{error.full_key} must be given, as {error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    except (HydraException, *ERRORS_OF_PREPARATION) as error:
        raise ConfigError(error) from error


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
