"""Explanations of the options of the applications, from docstrings and from the comments of primary configs."""

import inspect
import json
import re
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig


def meanings(target: str) -> dict[str, str]:
    """Return type and description of each parameter of a function or class, from its NumPy docstring."""
    from hydra.utils import get_object

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


def options_help(*, _root_: "DictConfig") -> str:
    """Return a line for each option of a composed config: name, value, and the first sentence of its description."""
    from omegaconf import OmegaConf

    text = files("anemoi_gt.configs").joinpath(f"{_root_.hydra.job.name}.yaml").read_text()
    rows = re.findall(r"^(\w+: \S+)  # (.*)$", text, re.MULTILINE)
    rows = [(option.replace(": ", "=", 1), meaning) for option, meaning in rows]
    for group, option, meaning in re.findall(r"^(plots):\n  (\w+: \S+)  # (.*)$", text, re.MULTILINE):
        rows.append((f"{group}.{option.replace(': ', '=', 1)}", meaning))
    for group in _root_:
        if group == "hydra" or OmegaConf.is_missing(_root_, group) or not OmegaConf.is_dict(_root_[group]):
            continue
        values = OmegaConf.to_container(_root_[group], resolve=True)
        if "_target_" not in values:
            continue
        described = meanings(values["_target_"])
        for option, value in values.items():
            if not option.startswith("_"):
                kind, _, meaning = re.sub(r"[*`]", "", described.get(option, "")).partition(". ")
                first = re.split(r"(?<=[a-z0-9)])[.;] ", meaning)[0].rstrip(".")
                value = value if isinstance(value, str) else json.dumps(value)
                rows.append((f"{group}.{option}={value}", f"{kind}: {first}" if first else kind))
    width = min(45, max(len(option) for option, _ in rows))
    return "\n".join(f"{option:{width}}  {meaning}" for option, meaning in rows).replace("$", "$$")
