"""Checkpoints as files, written atomically and read without executing code."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anemoi_gt.training.atomic_write import atomic_write


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: `path` holds either the former one or this one, never a part.

    Parameters
    ----------
    path : Path
        Its folder exists.
    state : dict
        Tensors, numbers, strings, and dicts, lists and tuples of them.

    Raises
    ------
    OSError
        If it cannot be written; the former one stays whole.
    """
    with atomic_write(path) as file:
        torch.save(state, file)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, read without executing code.

    Parameters
    ----------
    path : Path
        From `save_checkpoint`.

    Returns
    -------
    dict
        With tensors on the CPU.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    OSError
        If the system cannot read it.
    ValueError
        If the file is not a checkpoint, or damaged.
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
    """Load the weights of a checkpoint into a model.

    Parameters
    ----------
    model : nn.Module
        On any device.
    state : dict
        From `load_checkpoint`.
    part : {"average", "model"}
        The averaged weights, which forecast, or those of the optimiser.

    Raises
    ------
    ValueError
        If the checkpoint has none, or those of another model.
    """
    if part not in state:
        raise ValueError(f"the checkpoint must hold {part!r}, got {', '.join(map(str, state)) or 'nothing'}")
    try:
        model.load_state_dict(state[part])
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"the checkpoint's weights must be those of the configured model: {_one_line(error)}"
        ) from error


def _one_line(error: Exception, length: int = 300) -> str:
    line = " ".join(str(error).split())
    return line if len(line) <= length else f"{line[:length]} ..."
