"""Dtypes of edge attention: the configured precision, else autocast's, else query's."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from anemoi_gt.ops.tensors import AttentionOperands

# at import: torch.compile cannot trace is_autocast_available before torch 2.12
AUTOCAST_DEVICES = frozenset(
    name for name in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(name)
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast_operands(
    precision: str | None, operands: AttentionOperands[Tensor]
) -> tuple[AttentionOperands[Tensor], torch.dtype]:
    """Return all operands in one dtype, and the output dtype: the query's, or autocast's."""
    query = operands.query
    dtype = autocast_dtype(query) if precision is None else DTYPES[precision]
    out_dtype = dtype if precision is None else query.dtype
    for operand in operands:
        if operand is not None and operand.dtype != dtype:
            return operands.map(lambda operand: operand.to(dtype)), out_dtype
    return operands, out_dtype


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of a tensor: autocast's, if active, or its own.

    float64 is never cast.
    """
    if x.dtype == torch.float64 or not autocast_is_active(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def autocast_is_active(device_type: str) -> bool:
    """Return whether autocast is enabled on this device type; some, such as meta, have none."""
    return device_type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager:
    """Return a context in which autocast does not round the operands of matrix products."""
    if autocast_is_active(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return a float32 tensor in autocast's dtype, any other unchanged.

    Otherwise each of several matrix products of one tensor would make, save and differentiate its
    own copy.
    """
    if x.dtype == torch.float32 and autocast_is_active(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, softmax and lse for operands of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scratch_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of intermediates between kernels: float32 or the 16-bit operand dtype."""
    return torch.float32 if dtype == torch.float64 else dtype
