"""What a GPU is to the choice of tiles, from what PyTorch tells of it. No GPU is needed."""

from types import SimpleNamespace

import pytest
import torch

from anemoi_gt.ops.triton_backend.device import device_of
from anemoi_gt.ops.triton_backend.tile_score import H200

FOUND = {
    "multi_processor_count": 108, "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "warp_size": 32,
    "shared_memory_per_block_optin": 166_912, "clock_rate": 1_410_000, "memory_clock_rate": 1_215_000, "memory_bus_width": 5120,
}  # fmt: skip


@pytest.fixture
def told(monkeypatch):
    """Let PyTorch tell this of its only GPU; returns what becomes of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def told(**properties):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
        device_of.cache_clear()
        return device_of(torch.device("cuda", 0))

    yield told
    device_of.cache_clear()


@pytest.mark.parametrize("name", ["cpu", "meta", "cuda:0"])
def test_where_no_gpu_is_the_numbers_are_those_of_an_h200(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device_of.cache_clear()
    assert device_of(torch.device(name)) == H200


def test_numbers_are_those_of_the_device(told):
    device = told(**FOUND)
    assert device[:5] == (108, 65536, 64, 32, 166_912)
    assert device.clock < 1.41e9 and device.bandwidth == pytest.approx(0.87 * 1555.2e9)


def test_what_this_pytorch_does_not_tell_is_that_of_an_h200(told):
    known = {name: number for name, number in FOUND.items() if name not in ("clock_rate", "memory_clock_rate")}
    known.pop("shared_memory_per_block_optin")
    device = told(**known)
    assert (device.clock, device.bandwidth, device.shared) == (H200.clock, H200.bandwidth, H200.shared)
    assert device.processors == 108
