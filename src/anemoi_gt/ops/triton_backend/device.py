"""Devices on which the Triton kernels run, and the reason when they cannot.

Triton itself is imported where it is used.
"""

from importlib.util import find_spec

import torch

from anemoi_gt import kernels
from anemoi_gt.ops.backend import Dtypes, Sizes
from anemoi_gt.refusal import Refusal, not_faster, permanent
from anemoi_gt.toolchain import driver_problem
from anemoi_gt.torch_compat import constant_when_traced

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
DTYPES = (*SIXTEEN_BITS, torch.float32)


def why_not(sizes: Sizes, dtypes: Dtypes, device: torch.device) -> Refusal | None:
    """Return why the Triton kernels do not run a call, or None if they do; they take all sizes.

    The interpreter can, but is slow and must be asked for by name.
    """
    if dtypes.products not in DTYPES:
        return permanent(
            f"its kernels take float16, bfloat16 or float32, got {dtypes.products}; use backend "
            "'torch' for others"
        )
    if _is_missing():
        return permanent("the package triton is missing; pip install 'anemoi-gt[triton]'")
    if device.type == "cuda":
        problem = _driver_problem()
        return None if problem is None else permanent(problem)
    needs_gpu = (
        f"its kernels run on a GPU, got tensors on {device}; move them, or use backend 'torch'"
    )
    return not_faster(needs_gpu) if interpreted() else permanent(needs_gpu)


def is_faster_fused(dtypes: Dtypes) -> bool:
    """Return whether sub-layers are faster than modules: under 16-bit autocast.

    They cast, pad and pack rows and parameters in passes that they make anyway.
    """
    return dtypes.is_autocast and dtypes.products in SIXTEEN_BITS


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

    return not isinstance(kernels.forward.edge_attention_fwd, JITFunction)
