"""Uninitialised memory holds NaN, so that a row that a kernel does not write cannot pass by luck."""

from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory():
    """Fill every uninitialised tensor: NaN for floats, the largest value for integers."""
    # PyTorch fills uninitialised memory only in this mode
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
