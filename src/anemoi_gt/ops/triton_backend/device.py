"""Devices on which the Triton kernels run: the reason when they cannot, and the facts that decide about tiles.

Triton itself is imported where it is used.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from anemoi_gt.compatibility import constant_when_traced
from anemoi_gt.ops.triton_backend.tile_score import H200, Device

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
COPIED = 0.87  # part of the memory bus's peak that a copy attains on an H200
SUSTAINED = 1.755 / 1.98  # part of its highest clock at which an H200 ran the kernels that predictions were fitted to


def unsupported_reason(query: Tensor) -> str | None:
    """Return why the Triton kernels cannot serve a query like this one, or None when they can."""
    if query.dtype not in DTYPES:
        return f"its kernels take float16, bfloat16 or float32, got {query.dtype}; use backend 'torch' for others"
    if _is_missing():
        return "the package triton is missing; pip install 'anemoi-gt[triton]'"
    if query.device.type != "cuda" and not interpreted():
        return _needs_gpu(query)
    return None


def auto_unsupported_reason(query: Tensor) -> str | None:
    """Return why `auto` rejects the Triton kernels: the interpreter, slow and for tests, must be asked for."""
    return unsupported_reason(query) or (_needs_gpu(query) if query.device.type != "cuda" else None)


def _needs_gpu(query: Tensor) -> str:
    return f"its kernels run on a GPU, got tensors on {query.device}; move them, or use backend 'torch'"


@constant_when_traced  # packages do not come and go; find_spec cannot be traced before torch 2.12
def _is_missing() -> bool:
    return find_spec("triton") is None


@constant_when_traced
def interpreted() -> bool:
    """Return whether Triton was imported with its interpreter, which runs kernels on the CPU."""
    from triton.runtime import JITFunction

    from anemoi_gt.kernels.forward import edge_attention_fwd

    return not isinstance(edge_attention_fwd, JITFunction)


@lru_cache
def device_of(device: torch.device) -> Device:
    """Return the facts that decide about tiles on `device`; those of an H200 where it is no GPU or an absent one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200
    found = torch.cuda.get_device_properties(device)
    bus = 2e3 * getattr(found, "memory_clock_rate", 0) * getattr(found, "memory_bus_width", 0) / 8  # kHz, bits
    return Device(
        processors=found.multi_processor_count,
        registers=found.regs_per_multiprocessor,
        warps=found.max_threads_per_multi_processor // found.warp_size,
        lanes=found.warp_size,
        shared=getattr(found, "shared_memory_per_block_optin", 0) or H200.shared,
        clock=SUSTAINED * 1e3 * getattr(found, "clock_rate", 0) or H200.clock,  # kHz
        bandwidth=COPIED * bus or H200.bandwidth,
    )
