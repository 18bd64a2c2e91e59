"""The kernels that calls of the `triton` backend launch; nothing is launched."""

from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch

from anemoi_gt.kernels.launch import Launch

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Launched(NamedTuple):
    """One launch: the kernel's name in a profile, its grid and constants, and which tensors are there."""

    name: str
    grid: tuple[int, ...]
    constants: dict
    tensors: frozenset[str]


@contextmanager
def noted_launches():
    """Yield a list that grows by each launch inside."""
    launches = []

    def note(launch, ordered):
        tensors = {
            name: x for name, x in zip(launch.tensors, ordered, strict=True) if x is not None
        }
        name = launch.name({name: DTYPES.get(x.dtype) for name, x in tensors.items()})
        launches.append(Launched(name, launch.grid, launch.constants, frozenset(tensors)))

    with mock.patch.object(Launch, "on", note):
        yield launches
