"""Compiled blocks without Inductor, which takes a minute per process: traced code runs operator by operator."""

from contextlib import contextmanager
from unittest.mock import patch

from torch import nn


@contextmanager
def without_inductor():
    """Have `nn.Module.compile` use the backend `aot_eager`, which has none of Inductor's options."""
    original = nn.Module.compile

    def compile_without(module, *, options=None, **arguments):
        original(module, backend="aot_eager", **arguments)

    with patch.object(nn.Module, "compile", compile_without):
        yield
