"""Compiled blocks without Inductor, which takes a minute in each process: what was traced runs operator by operator."""

from contextlib import contextmanager
from functools import partialmethod
from unittest.mock import patch

from torch import nn


@contextmanager
def without_inductor():
    """Let `nn.Module.compile` take the backend `aot_eager` in the block."""
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        yield
