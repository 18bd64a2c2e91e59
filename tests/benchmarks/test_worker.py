"""Processes that measure: what they answer, and that they outlive what goes wrong."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from suite import graphs, schedule
from suite.calls import Refused
from suite.operands import rotation
from suite.timing import Cpu, Gpu, measure
from suite.worker import Peer, Worker, answer


def raising(error):
    def method(*_):
        raise error

    return SimpleNamespace(check=method)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (Refused("no GPU"), ("refused", "no GPU")),
        (AssertionError("out: RMS error"), ("refused", "wrong: out: RMS error")),
        (torch.OutOfMemoryError("CUDA out of memory"), ("refused", "out of memory")),
        (RuntimeError("illegal access"), ("broken", "RuntimeError: illegal access")),
    ],
)
def test_what_goes_wrong_is_told(error, verdict):
    assert answer(raising(error), "check", ()) == verdict


def test_a_peer_checks_and_times_every_pass(tiny, tmp_path):
    problem = tiny(passes=("forward", "forward_backward", "structure", "structure_unstable"))
    graphs.build([problem.graph], tmp_path)
    peer = Peer("ours", "cpu", tmp_path)
    peer.check(problem)
    for kind in problem.passes:
        times, peak = peer.time(problem, kind)
        assert len(times) >= Cpu.FEWEST and min(times) > 0 and peak is None


@pytest.mark.parametrize(("name", "kind"), [("eager", "structure"), ("ours", "replay"), ("anemoi", "forward")])
def test_a_pass_that_a_peer_or_device_lacks_is_refused(tiny, tmp_path, name, kind):
    graphs.build([tiny().graph], tmp_path)
    with pytest.raises(Refused):
        Peer(name, "cpu", tmp_path).time(tiny(), kind)


def test_a_broken_process_is_replaced(tiny, tmp_path):
    problem = tiny()
    with Worker("eager", "cpu", tmp_path) as worker:
        with pytest.raises(Refused, match="broken: FileNotFoundError"):
            worker.call("check", problem)
        graphs.build([problem.graph], tmp_path)
        worker.call("check", problem)
        worker.process.kill()
        with pytest.raises(Refused, match="ended with exit code -9"):
            worker.call("check", problem)
    assert not worker.process.is_alive()


class Stub:
    """Answers like a worker, and writes down what it is asked."""

    def __init__(self, asked, name, times=(2.0, 4.0), refuses=()):
        self.asked, self.name, self.times, self.refuses = asked, name, times, refuses

    def call(self, method, problem=None, kind=None):
        self.asked.append((self.name, method, kind))
        if method in self.refuses or kind in self.refuses:
            raise Refused("not today")
        return {"copy_speed": 1e9, "check": None, "time": (list(self.times), 7)}[method]


def test_only_what_is_right_counts_as_checked(tiny, tmp_path, monkeypatch):
    def start(name, device, folder):
        return nullcontext(Stub([], name, refuses=("check",) if name == "pyg" else ()))

    monkeypatch.setattr(schedule, "Worker", start)
    found = schedule.warm([tiny("a"), tiny("b")], ("ours", "pyg"), "cpu", tmp_path, processes=2)
    assert found == {("a", "ours"), ("b", "ours")}


@pytest.fixture
def measured(tiny):
    def run(right=(), **stubs):
        asked, problem = [], tiny()
        workers = {name: Stub(asked, name, **options) for name, options in stubs.items()}
        done = schedule.Run({str(problem.graph): (9, 7, 30)}, "cpu", {("tiny", name) for name in right})
        done.measure([problem], workers, lambda run: None)
        return done, asked

    return run


def test_peers_are_timed_in_turns(measured):
    done, asked = measured(ours={}, pyg={"times": (6.0, 8.0)})
    timed = [name for name, method, kind in asked if (method, kind) == ("time", "forward")]
    assert timed == ["ours", "pyg"] * Cpu.ROUNDS
    medians = {(line["peer"], line["pass"]): line["median_ms"] for line in done.results}
    assert medians[("ours", "forward")] == 3.0 and medians[("pyg", "forward_backward")] == 7.0


def test_what_is_wrong_is_never_timed(measured):
    done, asked = measured(ours={"refuses": ("check",)})
    assert not any(method == "time" for _, method, _ in asked)
    assert [line["reason"] for line in done.results] == ["not today", "not today"]


def test_what_was_right_already_is_not_checked_again(measured):
    _, asked = measured(right=("ours",), ours={})
    assert ("ours", "check", None) not in asked


def test_one_pass_may_fail_alone(measured):
    done, _ = measured(ours={"refuses": ("forward",)})
    assert [line.get("reason") for line in done.results] == ["not today", None]


def test_achieved_speed_is_bytes_over_the_median(measured):
    done, _ = measured(ours={})
    line = done.results[0]
    nbytes = 4 * 16 * (2 * 7 + 2 * 9) + 4 * 2 * 7 + 30 * (4 * 3 + 4)
    assert line["bytes_per_second"] == pytest.approx(nbytes / 3e-3)
    assert line["quartiles_ms"] == [2.0, 4.0] and line["peak_bytes"] == 7


def test_events_stand_around_each_call_and_nothing_waits_between(monkeypatch):
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("event")

        def elapsed_time(self, end):
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    assert Gpu.times([lambda: order.append("a"), lambda: order.append("b")]) == [1.5, 1.5]
    assert order == ["event", "a", "event", "event", "b", "event", "wait"]


def test_peak_memory_is_counted_above_what_is_there(monkeypatch):
    held = {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 100, "max_memory_allocated": 350}
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert Gpu.peak_bytes(lambda: None) == 250


def test_calls_take_turns_after_a_warm_up():
    order = []
    clock = SimpleNamespace(
        WARM_UP=3,
        BUDGET=0.0,
        FEWEST=4,
        MOST=9,
        synchronize=lambda: order.append("wait"),
        times=lambda calls: [c() for c in calls],
    )
    assert measure(clock, [lambda: order.append("a"), lambda: order.append("b")]) == [None] * 4
    assert order == [*"abaa"[:3], "wait", "a", "wait", *"abab"]


@pytest.mark.parametrize(("cache", "sets"), [(0, 1), (25, 1), (50, 2), (10**9, 32)])
def test_sets_of_operands_outgrow_the_cache(cache, sets):
    made = rotation(lambda seed: SimpleNamespace(nbytes=100, seed=seed), cache)
    assert [one.seed for one in made] == list(range(sets))
