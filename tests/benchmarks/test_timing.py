"""Clocks: what a recording of calls is on a GPU, whose calls are stubs here, and on a CPU."""

import pytest
from suite.timing import Cpu, Gpu
from support.cuda_calls import stub_cuda_graphs

from anemoi_gt.training.cuda_graph import WARM_UP


@pytest.fixture
def order(monkeypatch):
    return stub_cuda_graphs(monkeypatch)


def test_a_recording_is_captured_after_a_warm_up_on_another_stream(order):
    Gpu.record(lambda: order.append("call"), 2)
    warm_up = ["side waits for current", "enter side", *["call"] * WARM_UP, "leave side", "current waits for side"]
    assert order == [*warm_up, "enter thread_local", "call", "call", "leave thread_local"]


def test_a_replay_makes_no_call(order):
    replay = Gpu.record(lambda: order.append("call"), 2)
    order.clear()
    replay()
    assert order == ["replay"]


def test_a_cpu_makes_all_calls_of_a_recording_each_time():
    made = []
    replay = Cpu.record(lambda: made.append("call"), 3)
    assert made == []
    replay()
    assert made == ["call"] * 3
