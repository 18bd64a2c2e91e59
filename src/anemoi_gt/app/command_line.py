"""Command line of the Hydra applications: their options and the help. It does not import PyTorch.

The config groups are in `anemoi_gt.configs`.
"""

import re
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anemoi_gt.extras import import_extra

if TYPE_CHECKING:
    from omegaconf import DictConfig

GROUPS = ("data", "graph", "kernels", "model", "training")


class ConfigError(Exception):
    """The config cannot be composed, or the run cannot start as configured."""


def hydra_main(name: str, config_name: str, run: Callable[["DictConfig"], Any]) -> None:
    """Compose the config that the command line describes, and run a function on it.

    `name` names the application, `config_name` a primary config in `anemoi_gt.configs`. With
    `--help`, print the help and exit. Raises ConfigError with one sentence if the config
    cannot be composed.
    """
    hydra = import_extra("hydra", "train")
    from hydra.core.utils import env_override
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    main = hydra.main(
        version_base="1.3", config_path="pkg://anemoi_gt.configs", config_name=config_name
    )
    try:
        with env_override({"HYDRA_FULL_ERROR": "1"}):  # errors are raised, not printed
            main(run)()
    except (HydraException, OmegaConfBaseException) as error:
        text = str(error)
        unknown = re.search(r"Could not override '([^']+)'", text)
        if unknown:
            text = f"there is no option {unknown[1]}"
        for end in ("\nConfig search path", "\nSee https"):
            text = text.partition(end)[0]
        raise ConfigError(
            f"{' '.join(text.split())}: nothing was started; anemoi-gt {name} --help lists all "
            "groups and options"
        ) from error


def print_help(name: str) -> None:
    """Print the help of an application for the arguments of the command line, and exit."""
    try:
        hydra_main(name, name, lambda config: config)
    except (ImportError, ConfigError) as error:
        sys.exit(f"anemoi_gt.{name}: {error}")


def current_spelling(argument: str) -> str:
    """Return an argument with the group `kernels` in place of `attention`, its name in 0.4."""
    current = re.sub(r"^\+*attention=default$", "kernels=auto", argument)
    current = re.sub(r"^\+*attention[/.](\w+=)", r"kernels.\1", current)
    if current != argument:
        message = f"{argument} will be refused in 0.6.0: write {current}"
        warnings.warn(message, FutureWarning, stacklevel=2)  # which users of commands see
    return current
