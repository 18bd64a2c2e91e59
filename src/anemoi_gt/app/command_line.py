"""Command line of the Hydra applications: their options and the help. It does not import PyTorch.

The config groups are in `anemoi_gt.configs`.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_type_hints

from anemoi_gt.extras import import_extra

if TYPE_CHECKING:
    from omegaconf import DictConfig

GROUPS = ("attention", "data", "graph", "model", "training")


@dataclass(kw_only=True)
class PlotOptions:
    """Options of the plots of a run.

    Parameters
    ----------
    variables : list of str, optional
        Variables to plot. None plots the first three.
    """

    variables: list[str] | None


@dataclass(kw_only=True)
class TrainOptions:
    """Options of `anemoi-gt train` outside the groups.

    Parameters
    ----------
    resume : bool
        True continues the run in hydra.run.dir with its config, from its last.pt if there is one,
        or starts it there.
    init_from : str, optional
        Start a new run from the weights of this checkpoint that fit the model.
    explain : str, optional
        Report which kernels each layer runs, before training: print, or a file in hydra.run.dir
        (JSON if .json).
    plots : PlotOptions
        Options of the plots.
    """

    resume: bool
    init_from: str | None
    explain: Any  # `check_explain` refuses true, which a str would take as a name
    plots: PlotOptions


@dataclass(kw_only=True)
class EvaluateOptions:
    """Options of `anemoi-gt evaluate` outside the config of the run.

    Parameters
    ----------
    checkpoint : str
        File best.pt or last.pt of a run.
    rollout : int
        Autoregressive steps; 1 disables rollouts.
    explain : str, optional
        Report which kernels each layer runs: print, or a file in hydra.run.dir (JSON if .json).
    plots : PlotOptions
        Options of the plots.
    """

    checkpoint: str
    rollout: int
    explain: Any  # `check_explain` refuses true, which a str would take as a name
    plots: PlotOptions


@dataclass(kw_only=True)
class RolloutOptions:
    """Options of `anemoi-gt rollout` outside the config of the run.

    Parameters
    ----------
    checkpoint : str
        File best.pt or last.pt of a run.
    steps : int
        Autoregressive steps.
    sample : int, optional
        Test sample from which the forecast starts, from 0, or from the last, -1. None is the last.
    start : str or list of str, optional
        In place of a sample: latest, a date such as 2020-01-31T18, or several dates. Needs no
        truth.
    out : str
        File of the forecast, in hydra.run.dir unless absolute: zarr if it ends in .zarr, else
        NetCDF.
    """

    checkpoint: str
    steps: int
    sample: int | None
    start: Any
    out: str


@dataclass(kw_only=True)
class ExportOptions:
    """Options of `anemoi-gt export` outside the config of the run.

    Parameters
    ----------
    checkpoint : str
        File best.pt or last.pt of a run.
    out : str
        File of the package, NAME.pt2.
    max_batch : int
        Maximum batch size; 1 fixes it.
    precision : {"32-true", "bf16-mixed", "16-mixed"}
        Precision of the package, with the names of training.precision.
    """

    checkpoint: str
    out: str
    max_batch: int
    precision: str


OPTIONS: dict[str, type] = {  # by the name of the application, hydra.job.name
    "train": TrainOptions,
    "evaluate": EvaluateOptions,
    "rollout": RolloutOptions,
    "export": ExportOptions,
}


def hydra_main(config_name: str, run: Callable[["DictConfig"], Any]) -> None:
    """Compose the config that the command line describes, and run a function on it.

    `config_name` is the name of a primary config in `anemoi_gt.configs`. With `--help`, print the
    help and exit.
    """
    hydra = import_extra("hydra", "train")
    from omegaconf import OmegaConf

    sys.argv[1:] = [quote_null(argument) for argument in sys.argv[1:]]
    # OmegaConf 2.4 renamed it; before, the short name is that of a function without `replace`
    register = OmegaConf.register_resolver
    if "replace" not in inspect.signature(register).parameters:
        register = OmegaConf.register_new_resolver
    register("anemoi_gt_options", options_help, replace=True)
    main = hydra.main(
        version_base="1.3", config_path="pkg://anemoi_gt.configs", config_name=config_name
    )
    main(run)()


def print_help(name: str) -> None:
    """Print the help of an application for the arguments of the command line, and exit."""
    try:
        hydra_main(name, lambda config: config)
    except ImportError as error:
        sys.exit(f"anemoi_gt.{name}: {error}")


def quote_null(argument: str) -> str:
    """Quote the null in `attention/precision=null`, because Hydra does not accept it unquoted."""
    groups = "|".join([*GROUPS, "sharding", "attention/backend", "attention/precision"])
    return re.sub(rf"^(\+?(?:{groups})(?:@[\w.]+)?)=null$", r"\1='null'", argument)


def options_help(*, _root_: "DictConfig") -> str:
    """Return one line per option of a composed config: name, value and short description."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(_root_, resolve=False)
    options = OPTIONS[_root_.hydra.job.name]
    rows = []
    for name, kind in get_type_hints(options).items():
        if kind is PlotOptions:
            rows += option_rows(f"{name}.", kind, values[name])
        elif name in values:  # a run that continues has no init_from
            rows += option_rows("", options, {name: values[name]})
    for group in _root_:
        if group == "hydra" or OmegaConf.is_missing(_root_, group):
            continue
        if not OmegaConf.is_dict(_root_[group]):
            continue
        values = OmegaConf.to_container(_root_[group], resolve=True)
        if "_target_" in values:
            rows += option_rows(f"{group}.", values["_target_"], values)
    width = min(45, max(len(name) for name, _ in rows))
    return "\n".join(f"{name:{width}}  {meaning}" for name, meaning in rows).replace("$", "$$")


def option_rows(prefix: str, target: str | type, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return NAME=VALUE, and type and first sentence of the meaning, of each option of a target."""
    described = meanings(target)
    rows = []
    for name, value in values.items():
        if name.startswith("_"):
            continue
        if isinstance(value, dict) and "_target_" in value:
            rows += option_rows(f"{prefix}{name}.", value["_target_"], value)
            continue
        if not isinstance(value, str):
            value = json.dumps(value)
        kind, _, meaning = re.sub(r"[*`]", "", described.get(name, "")).partition(". ")
        first_sentence = re.split(r"(?<=[a-z0-9)])[.;] ", meaning)[0].rstrip(".")
        help_text = f"{kind}: {first_sentence}" if first_sentence else kind
        rows.append((f"{prefix}{name}={value}", help_text))
    return rows


def meanings(target: str | type) -> dict[str, str]:
    """Return the type and description of each parameter of a callable, from its docstring.

    `target` is a class or the full name of a callable.
    """
    text = docstring(target) if isinstance(target, str) else inspect.getdoc(target) or ""
    lines = text.splitlines()
    begin = lines.index("Parameters") + 2 if "Parameters" in lines else len(lines)
    described: dict[str, str] = {}
    names: list[str] = []
    for line, below in pairwise([*lines[begin:], ""]):
        if below.startswith("---"):  # the heading of the next section
            break
        if line and not line.startswith(" "):
            name, _, kind = line.partition(" : ")
            names = name.split(", ")
            described |= dict.fromkeys(names, f"*{kind}.*".replace('"', "") if kind else "")
        elif line:
            described |= {name: f"{described[name]} {line.strip()}".strip() for name in names}
    return described


def docstring(target: str) -> str:
    """Return the docstring of a class or function; `target` is its full name.

    Those of this package are read from the source, because importing them takes PyTorch.
    """
    from hydra.utils import get_object

    module, _, name = target.rpartition(".")
    package, *inside = module.split(".")
    if package != "anemoi_gt":
        return inspect.getdoc(get_object(target)) or ""
    path = files(package).joinpath(*inside)
    if path.is_dir():
        source = path.joinpath("__init__.py").read_text()
    else:
        source = files(package).joinpath(*inside[:-1], f"{inside[-1]}.py").read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return docstring(f"{node.module}.{alias.name}")
    raise LookupError(f"{module} must define or import {name}")
