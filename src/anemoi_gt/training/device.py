"""Where a run computes: which device, and on how many CPU threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def choose_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" means here.

    Raises
    ------
    ValueError
        If "cuda" is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("training.device must be cpu or auto here: PyTorch finds no CUDA device")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Run PyTorch on so many CPU threads inside, and on as many as before afterwards; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
