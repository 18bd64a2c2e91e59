"""Devices on which the Triton kernels run, and the reason when they cannot.

Triton itself is imported where it is used.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from anemoi_gt.toolchain import driver_problem
from anemoi_gt.torch_compat import constant_when_traced

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported_reason(query: Tensor) -> str | None:
    """Return why the Triton kernels do not support a query like this one, or None if they do."""
    if query.dtype not in DTYPES:
        return (
            f"its kernels take float16, bfloat16 or float32, got {query.dtype}; use backend "
            "'torch' for others"
        )
    if _is_missing():
        return "the package triton is missing; pip install 'anemoi-gt[triton]'"
    if query.device.type == "cuda":
        return _driver_problem()
    return None if interpreted() else _needs_gpu(query)


def auto_unsupported_reason(query: Tensor) -> str | None:
    """Return why `auto` rejects the kernels: the interpreter is slow and must be asked for."""
    return unsupported_reason(query) or (_needs_gpu(query) if query.device.type != "cuda" else None)


def _needs_gpu(query: Tensor) -> str:
    return (
        f"its kernels run on a GPU, got tensors on {query.device}; move them, or use backend "
        "'torch'"
    )


@constant_when_traced  # packages do not come and go; find_spec cannot be traced before torch 2.12
def _is_missing() -> bool:
    return find_spec("triton") is None


@constant_when_traced
def _driver_problem() -> str | None:
    return None if interpreted() else driver_problem()


@constant_when_traced
def interpreted() -> bool:
    """Return whether Triton was imported with its interpreter, which runs kernels on the CPU."""
    from triton.runtime import JITFunction

    from anemoi_gt.kernels.forward import edge_attention_fwd

    return not isinstance(edge_attention_fwd, JITFunction)
