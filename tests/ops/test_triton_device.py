"""The bandwidth of a copy, from the properties that PyTorch reports. No GPU is needed."""

from types import SimpleNamespace

import pytest
import torch

from anemoi_gt.ops.triton_backend.device import H200_BANDWIDTH, copy_bandwidth


@pytest.fixture
def bandwidth_of(monkeypatch):
    """Bandwidth of a GPU with the given properties, none for no GPU."""

    def bandwidth_of(name, **properties):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
        copy_bandwidth.cache_clear()
        return copy_bandwidth(torch.device(name))

    yield bandwidth_of
    copy_bandwidth.cache_clear()


@pytest.mark.parametrize("name", ["cpu", "meta", "cuda:0"])
def test_without_a_gpu_the_bandwidth_is_that_of_an_h200(name, bandwidth_of):
    assert bandwidth_of(name) == H200_BANDWIDTH


def test_the_bandwidth_follows_from_the_memory_bus(bandwidth_of):
    assert bandwidth_of("cuda:0", memory_clock_rate=1_215_000, memory_bus_width=5120) == pytest.approx(0.87 * 1555.2e9)


def test_an_unknown_memory_clock_gives_the_bandwidth_of_an_h200(bandwidth_of):
    assert bandwidth_of("cuda:0", memory_bus_width=5120) == H200_BANDWIDTH
