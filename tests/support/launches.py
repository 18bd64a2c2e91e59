"""Kernels that calls of the `triton` backend would launch; no kernel runs."""

from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch

from anemoi_gt.kernels.launch import Launch

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Launched(NamedTuple):
    """One launch: the name of the kernel in a profile, its grid, its constants, and the names of its tensors."""

    name: str
    grid: tuple[int, ...]
    constants: dict
    tensors: frozenset[str]


@contextmanager
def noted_launches():
    """Yield a list to which each launch in the context is added."""
    launches = []

    def note(launch, ordered):
        tensors = {}
        for name, tensor in zip(launch.tensors, ordered, strict=True):
            if tensor is not None:
                tensors[name] = tensor
        name = launch.name({name: DTYPES.get(x.dtype) for name, x in tensors.items()})
        launches.append(Launched(name, launch.grid, launch.constants, frozenset(tensors)))

    with mock.patch.object(Launch, "on", note):
        yield launches
