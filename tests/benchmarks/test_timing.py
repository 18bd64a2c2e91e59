"""Clocks: what a recording of calls is on a GPU, whose calls are stubs here, and on a CPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from suite.timing import Cpu, Gpu


@pytest.fixture
def order(monkeypatch):
    """What is done, in order, in place of a GPU."""
    done = []

    @contextmanager
    def within(name):
        done.append(f"enter {name}")
        yield
        done.append(f"leave {name}")

    def stream(name):
        return SimpleNamespace(name=name, wait_stream=lambda other: done.append(f"{name} waits for {other.name}"))

    current = stream("current")
    graph = SimpleNamespace(replay=lambda: done.append("replay"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within(stream.name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)

    def capture(captured, capture_error_mode):
        return within(f"capture, {capture_error_mode}") if captured is graph else None

    monkeypatch.setattr(torch.cuda, "graph", capture)
    return done


def test_a_recording_is_captured_after_a_warm_up_on_another_stream(order):
    Gpu.record(lambda: order.append("call"), 2)
    warm_up = ["side waits for current", "enter side", *["call"] * Gpu.WARM_UP, "leave side", "current waits for side"]
    assert order == [*warm_up, "enter capture, thread_local", "call", "call", "leave capture, thread_local"]


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
