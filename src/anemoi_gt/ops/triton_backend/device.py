"""What PyTorch knows of a GPU, in the words in which tiles are chosen."""

from functools import lru_cache

import torch

from anemoi_gt.ops.triton_backend.tile_score import H200, Device

COPIED = 0.87  # part of what the memory's bus could carry that a copy attains on an H200
SUSTAINED = 1.755 / 1.98  # part of its highest clock at which an H200 ran what the predictions were fitted to


@lru_cache
def device_of(device: torch.device) -> Device:
    """Return what decides about tiles on `device`; the numbers of an H200 where it is no GPU, or one that is not there."""
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
