"""Checkpoints on disk: a file under its name is always a whole one."""

import os
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that `path` holds either the former one or this one, never a part.

    Parameters
    ----------
    path : Path
        Where to; the folder exists.
    state : dict
        Tensors, numbers, strings, and dicts and lists of them.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine can leave an empty file under the new name
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint; nothing in it is executed.

    Parameters
    ----------
    path : Path
        What `save_checkpoint` wrote.
    device : torch.device or str
        Where its tensors go.

    Returns
    -------
    dict
        The state.
    """
    return torch.load(path, map_location=device, weights_only=True)
