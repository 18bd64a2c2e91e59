"""States of PyTorch's global random number generators, from which dropout draws."""

import torch
from torch import Tensor


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators: the CPU's, and the GPU's if `device` is a GPU."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the generators; the GPU's only if `states` has its state."""
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
