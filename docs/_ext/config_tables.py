"""Tables of the Hydra configs, from their YAML files and the docstrings of their targets."""

import inspect
import json
import re
from functools import cache
from importlib.resources import files
from itertools import pairwise

from hydra import compose, initialize_config_module
from hydra.utils import get_object
from omegaconf import OmegaConf

import anemoi_gt

CONFIGS = files("anemoi_gt.configs")
ABSENT = object()


def group_reference(group: str) -> str:
    """Return the reference of a config group as Markdown.

    Parameters
    ----------
    group : str
        Such as "model".

    Raises
    ------
    LookupError
        When there is no such group, or the docstring of a target does not list an option.
    """
    names = choices(group)
    if not names:
        raise LookupError(f"no config group {group!r}")
    parts = [_list_of_choices(group, names)]
    values = {name: composed(group, name) for name in names}
    parts += _option_tables(values)
    inner: dict[str, dict[str, dict]] = {}  # options that are objects, by their name
    for choice, options in values.items():
        for name, value in options.items():
            if isinstance(value, dict) and "_target_" in value:
                inner.setdefault(name, {})[choice] = value
    for values_of_choice in inner.values():
        parts += _option_tables(values_of_choice)
    return "\n\n".join(parts) + "\n"


def groups() -> list[str]:
    """Return the names of all groups."""
    return sorted(
        entry.name for entry in CONFIGS.iterdir() if entry.is_dir() and choices(entry.name)
    )


def choices(group: str) -> list[str]:
    """Return the names of a group's options, those that others derive from first."""
    names = sorted(
        entry.name.removesuffix(".yaml")
        for entry in (CONFIGS / group).iterdir()
        if entry.name.endswith(".yaml")
    )
    return sorted(names, key=lambda name: bool(_parent(group, name)))


@cache
def composed(group: str, choice: str) -> dict:
    """Return the composed values of an option."""
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        return OmegaConf.to_container(compose("train", [f"{group}={choice}"])[group], resolve=True)


def _list_of_choices(group: str, names: list[str]) -> str:
    about = {name: (_parent(group, name), _heading_comment(group, name)) for name in names}
    if not any(parent or comment for parent, comment in about.values()):
        return "Choices of `" + group + "`: " + ", ".join(f"`{name}`" for name in names) + "."
    lines = []
    for name, (parent, comment) in about.items():
        origin = f", derived from {parent}" if parent else ""
        lines.append(f"- `{group}={name}`{origin}. {comment}".rstrip())
    return "\n".join(lines)


def _option_tables(values: dict[str, dict]) -> list[str]:
    """Return a table for each target of the values of choices."""
    targets = dict.fromkeys(options["_target_"] for options in values.values())
    return [
        _options_table(target, {n: v for n, v in values.items() if v["_target_"] == target})
        for target in targets
    ]


def _options_table(target: str, values: dict[str, dict]) -> str:
    described = meanings(target)
    names = list(
        dict.fromkeys(
            name for options in values.values() for name in options if not name.startswith("_")
        )
    )
    missing = [name for name in names if name not in described]
    if missing:
        raise LookupError(f"the docstring of {target} does not list {missing}")
    rows = [
        ["option", *(f"`{choice}`" for choice in values), "meaning"],
        ["---"] * (len(values) + 2),
    ]
    for name in names:
        cells = [_yaml(options.get(name, ABSENT)) for options in values.values()]
        rows.append([f"`{name}`", *cells, described[name].replace("|", r"\|")])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"Options of {{py:obj}}`{_public_name(target)}`:\n\n{table}"


def meanings(target: str) -> dict[str, str]:
    """Return the type and description of each parameter of a target, from its docstring."""
    lines = (inspect.getdoc(get_object(target)) or "").splitlines()
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


def _public_name(target: str) -> str:
    """Return the name of a target in the API reference."""
    name = target.rpartition(".")[2]
    return f"anemoi_gt.{name}" if name in anemoi_gt.__all__ else target


def _yaml(value) -> str:
    if value is ABSENT:
        return ""
    if isinstance(value, dict) and "_target_" in value:
        return f"`{value['_target_'].rpartition('.')[2]}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _text(group: str, choice: str) -> str:
    return (CONFIGS / group / f"{choice}.yaml").read_text()


def _heading_comment(group: str, choice: str) -> str:
    """Return the comment at the top of the file, up to the first indented line or `@` directive."""
    lines = []
    for line in _text(group, choice).splitlines():
        if not line.startswith("# ") or line.startswith(("#   ", "# @")):
            break
        lines.append(line.removeprefix("# "))
    return " ".join(lines)


def _parent(group: str, choice: str) -> str:
    """Return the option of the same group that this one derives from, or an empty string."""
    match = re.search(r"^defaults:\n  - ([a-z]\w*)$", _text(group, choice), re.MULTILINE)
    return f"`{match[1]}`" if match else ""
