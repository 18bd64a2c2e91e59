"""Fill uninitialised memory with NaN, so that a row that no kernel writes cannot pass by accident."""

from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory():
    """Fill every uninitialised tensor: NaN for floats, the largest value for integers."""
    # PyTorch fills uninitialised memory only in this mode
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
