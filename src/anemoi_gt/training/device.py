"""Device and CPU threads of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda". Raises ValueError if "cuda" is requested and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("training.device must be cpu or auto, got cuda: PyTorch finds no CUDA device")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Set the number of PyTorch's CPU threads in the block and restore it afterwards; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
