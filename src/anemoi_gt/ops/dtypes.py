"""The one rule for dtypes: precision, else autocast, else the dtype of query."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

AUTOCAST_DEVICES = frozenset(  # asked here, because torch.compile cannot trace the question before torch 2.12
    name for name in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(name)
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast_operands(
    precision: str | None, query: Tensor, *others: Tensor | None
) -> tuple[list[Tensor | None], torch.dtype]:
    """Bring all operands to one dtype.

    Returns
    -------
    operands : list of Tensor or None
        query and `others` in the dtype in which they are read.
    out_dtype : torch.dtype
        What the caller gets back: the dtype of query, or autocast's when autocast made the choice.
    """
    dtype = out_dtype = query.dtype
    if precision is not None:
        dtype = DTYPES[precision]
    elif autocast_is_active(query.device.type) and query.dtype != torch.float64:
        dtype = out_dtype = torch.get_autocast_dtype(query.device.type)
    return [None if operand is None else operand.to(dtype) for operand in (query, *others)], out_dtype


def autocast_is_active(device_type: str) -> bool:
    """Whether autocast chooses dtypes on devices of this type; some, such as meta, have none."""
    return device_type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager:
    """Keep autocast from rounding the operands of matrix products, where dtypes have been chosen."""
    return torch.autocast(device_type, enabled=False) if autocast_is_active(device_type) else nullcontext()


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return float32 in the dtype in which autocast has matrix products read it, everything else as it is.

    Several of them that read one tensor would each make, keep and differentiate a copy of their own.
    """
    if x.dtype == torch.float32 and autocast_is_active(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, softmax and lse for operands of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scratch_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what passes between kernels: float32 for float32, 16-bit dtypes as themselves."""
    return torch.float32 if dtype == torch.float64 else dtype
