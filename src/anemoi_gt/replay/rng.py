"""States of the global random number generators: PyTorch (dropout), Python, NumPy (data sets)."""

import random
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed all global random number generators."""
    torch.manual_seed(seed)  # on every device
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  this is about the global generator


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all global generators, with the GPU generator if `device` is a GPU."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002  a dict
    inner = numpy_state["state"]
    legacy = (
        "MT19937",
        inner["key"].tolist(),
        inner["pos"],
        numpy_state["has_gauss"],
        numpy_state["gauss"],
    )
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": legacy}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore all global generators; the GPU generator only if `states` has its state."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
