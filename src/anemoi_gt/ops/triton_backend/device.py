"""Memory bandwidth of a GPU, for the lower bounds that `explain` reports."""

from functools import lru_cache

import torch

H200_BANDWIDTH = 4.27e12  # bytes per second of a copy on an H200
COPIED = 0.87  # part of the bus rate that a copy attains on an H200


@lru_cache
def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy attains on `device`; those of an H200 if they are not known."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200_BANDWIDTH
    found = torch.cuda.get_device_properties(device)
    bus = 2e3 * getattr(found, "memory_clock_rate", 0) * getattr(found, "memory_bus_width", 0) / 8  # kHz, bits
    return COPIED * bus or H200_BANDWIDTH
