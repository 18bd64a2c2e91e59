"""Global random generators of a run: PyTorch's on CPU and GPU (dropout), Python's and NumPy's (data sets)."""

import random
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed all global generators."""
    torch.manual_seed(seed)  # on every device
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  this is about the global generator


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all global generators, with the GPU's if `device` is one, for a checkpoint."""
    name, keys, *numpy_rest = np.random.get_state()  # noqa: NPY002
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, keys.tolist(), *numpy_rest)}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore all global generators; a GPU's is left alone if `states` has none."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
