"""Checkpoints as files, written atomically and read without executing code."""

import io
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anemoi_gt.training.atomic_write import atomic_write


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: `path` holds either the former one or this one, never a part.

    The folder exists. `state` holds tensors, numbers, strings, and dicts, lists and tuples of them. Raises OSError if
    it cannot be written.
    """
    with atomic_write(path) as file:
        torch.save(state, file)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a file of `save_checkpoint`, with tensors on the CPU, read without executing code.

    Raises FileNotFoundError if there is no such file; OSError if the system cannot read it; ValueError if the file is
    not a checkpoint, or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}: give the last.pt or best.pt that a run left in its folder")
    content = path.read_bytes()
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # of a dozen types
        raise ValueError(f"a checkpoint must be a whole file that training wrote, {path} cannot be read") from error
    if not isinstance(state, dict):
        raise ValueError(f"a checkpoint must hold a dict of states, {path} holds a {type(state).__name__}")
    return state


def load_weights(model: nn.Module, state: dict[str, Any], part: str = "average") -> None:
    """Load a checkpoint's weights into a model: the averaged ones, which forecast, or those of the optimiser.

    `part` is "average" or "model". Raises ValueError if the checkpoint has none, or those of another model.
    """
    weights = _weights(state, part)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        why = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(f"the checkpoint's weights must be those of the configured model: {why}") from error


def load_fitting_weights(model: nn.Module, state: dict[str, Any]) -> list[str]:
    """Load the averaged weights of a checkpoint that fit a model; return those of the model that stay as they are.

    Raises ValueError if the checkpoint has no weights, or none fit.
    """
    own, given = model.state_dict(), _weights(state, "average")
    fitting = {name: given[name] for name in own if name in given and given[name].shape == own[name].shape}
    if not fitting:
        raise ValueError("the checkpoint must have weights of the configured model, none fits by name and shape")
    model.load_state_dict(fitting, strict=False)
    return [
        f"{name} {list(own[name].shape)}, {list(given[name].shape) if name in given else 'absent'} in the file"
        for name in own
        if name not in fitting
    ]


def _weights(state: dict[str, Any], part: str) -> dict[str, Any]:
    if part not in state:
        raise ValueError(f"the checkpoint must hold {part!r}, got {', '.join(map(str, state)) or 'nothing'}")
    return state[part]
