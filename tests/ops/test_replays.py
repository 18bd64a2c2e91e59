"""Replays of a plan's runs: what recurs is captured once, and captures must be earned."""

import pytest
import torch

from anemoi_gt.ops.triton_backend import plan as plans
from anemoi_gt.ops.triton_backend import replays as policy
from anemoi_gt.ops.triton_backend.plan import PlanBuilder
from anemoi_gt.ops.triton_backend.replays import MAX_BALANCE, MAX_GRAPHS, MAX_SEEN, Replays


class Runs:
    """Replays whose graphs call the run that they captured; counts what happens."""

    def __init__(self, allocates=0, capture=None):
        self.launches = []
        self.captures = 0
        self.allocates = allocates
        self.allocated = 0
        self.replays = Replays(capture or self.capture, lambda: self.allocated)

    def capture(self, run):
        self.captures += 1
        return run

    def __call__(self, key):
        def run():
            self.launches.append(key)
            self.allocated += self.allocates

        self.replays.run((key,), run)

    @property
    def counts(self):
        return self.replays.num_launched, self.captures, self.replays.num_replayed


def test_the_second_run_on_the_same_addresses_is_captured_and_later_ones_replayed():
    runs = Runs()
    for _ in range(8):  # the sixth that recurs shows that most do, and what a run allocates
        runs("a")
    assert runs.counts == (8, 1, 0)
    for _ in range(5):
        runs("a")
        runs("b")
    assert runs.counts == (10, 2, 8)
    assert runs.launches == 8 * ["a"] + 5 * ["a", "b"]  # each run once


@pytest.mark.parametrize("is_after_a_steady_loop", [False, True])
def test_where_few_addresses_recur_nothing_is_captured(is_after_a_steady_loop):
    runs = Runs()
    if is_after_a_steady_loop:
        for _ in range(20):
            for key in range(4):
                runs(key)
        for key in range(1000, 1008):
            runs(key)
    before = runs.captures
    random = torch.Generator().manual_seed(0)
    for number in range(2000):
        recurs = torch.rand((), generator=random) < 0.1  # 0.06 were measured
        runs(("old", int(number / 7)) if recurs else number)
    assert len(set(runs.launches)) < len(runs.launches)
    assert runs.captures == before


def test_a_run_that_allocates_much_is_never_captured():
    runs = Runs(allocates=policy.MAX_ALLOCATED + 1)
    for _ in range(1000):
        runs("a")
    assert runs.counts == (1000, 0, 0)


def test_with_an_allocator_that_does_not_count_nothing_is_captured(monkeypatch):
    def refuse():
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    runs = Runs()
    runs.replays.allocated = policy.allocated_bytes
    for stats in (refuse, dict):
        monkeypatch.setattr(torch.cuda, "memory_stats", stats)
        for _ in range(9):
            runs("a")
    assert runs.counts == (18, 0, 0)


def test_the_least_recently_replayed_graph_is_dropped(monkeypatch):
    monkeypatch.setattr(policy, "MAX_BALANCE", 1e9)
    runs = Runs()
    for _ in range(9):
        runs(0)
    for key in range(1, MAX_GRAPHS):
        for _ in range(3):
            runs(key)
    runs(0)  # now the second is the oldest
    for _ in range(2):
        runs("new")
    kept = [graph.key for graph in runs.replays.graphs.values()]
    assert sorted(kept, key=str) == sorted([(0,), ("new",), *zip(range(2, MAX_GRAPHS))], key=str)


def test_two_runs_of_the_same_hash_are_told_apart():
    keys = -1, -2
    assert hash(keys[:1]) == hash(keys[1:])
    runs = Runs()
    for _ in range(20):
        for key in keys:
            runs(key)
    assert runs.launches == 20 * [*keys]
    assert runs.replays.num_replayed > 0


def test_addresses_that_never_recur_are_forgotten_and_cost_no_capture():
    runs = Runs()
    for key in range(10 * MAX_SEEN):
        runs(key)
    assert runs.captures == 0
    assert len(runs.replays.seen) <= MAX_SEEN


def test_captures_that_are_not_replayed_end():
    runs = Runs()
    for key in range(1000):  # each recurs once, when it is captured
        for _ in range(2):
            runs(key)
    assert runs.captures > MAX_BALANCE / 2
    assert runs.captures <= MAX_BALANCE + 1000 * 2 * policy.LAUNCH_EARNS
    assert len(runs.replays.graphs) <= MAX_GRAPHS


def test_a_long_loop_without_replays_saves_up_for_no_more_captures_than_a_new_plan():
    runs = Runs()
    for key in range(1000):
        runs(key)
    assert runs.replays.balance == MAX_BALANCE


def test_a_loop_that_becomes_steady_is_replayed():
    runs = Runs()
    for key in range(500):
        for _ in range(2):
            runs(key)
    assert runs.replays.balance < 1
    for _ in range(300):  # launches earn a capture, and its replays the next
        for key in "abcd":
            runs(key)
    before = runs.replays.num_replayed
    for key in "abcd":
        runs(key)
    assert runs.replays.num_replayed == before + 4


def test_a_capture_that_fails_is_logged_and_ends_captures(caplog):
    def capture(run):
        raise torch.OutOfMemoryError("no memory")

    runs = Runs(capture=capture)
    for _ in range(600):
        runs("a")
    assert runs.launches == 600 * ["a"]
    (record,) = caplog.records
    assert "capturing failed: no memory" in record.message


def test_while_another_thread_captures_a_run_is_launched():
    runs = Runs(capture=lambda run: None)
    for _ in range(9):
        runs("a")
    assert runs.launches == 9 * ["a"]
    assert not runs.replays.graphs


def test_the_log_says_once_how_many_runs_were_replayed(caplog):
    runs = Runs()
    with caplog.at_level("INFO"):
        for _ in range(3000):
            runs("a")
    (record,) = caplog.records
    assert record.message == (
        "992 of the first 1000 runs of a plan were replayed, from 1 CUDA graphs"
    )


def plan_of(num_steps, *, replay=True):
    builder = PlanBuilder([((4,), torch.float32)])
    x = builder.inputs[0]
    for _ in range(num_steps):
        following = builder.empty_like(x)
        builder.compute(lambda source, target: torch.add(source, 1, out=target), x, following)
        x = following
    return builder.finish([x], replay=replay)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Run plans as on the default stream of a GPU."""
    monkeypatch.setattr(plans, "fast_launch_device", lambda: 0)
    monkeypatch.setattr(plans, "current_stream", lambda gpu: 0)


def runs_of(plan, x, number=6):
    """Run a plan, with its results at the same addresses each time; return the last result."""
    for _ in range(number):
        (result,) = plan.run([x])
        value = result.clone()
        del result
    return value


def test_a_plan_replays_on_the_addresses_of_a_run(as_on_a_gpu, monkeypatch):
    plan = plan_of(3)
    keys = []

    def run(key, launch):
        keys.append(key)
        launch()

    monkeypatch.setattr(plan.replays, "run", run)
    x, y = torch.zeros(4), torch.ones(4)
    (of_x,), (of_y,) = plan.run([x]), plan.run([y])
    assert torch.equal(of_x, x + 3)
    assert torch.equal(of_y, y + 3)
    first, second = keys
    assert {x.data_ptr(), of_x.data_ptr()} <= set(first)
    assert {y.data_ptr(), of_y.data_ptr()} <= set(second)


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.use_deterministic_algorithms(mode=True),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(
            torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
        ),
        lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    ],
)
def test_settings_of_products_are_in_the_key(as_on_a_gpu, monkeypatch, change):
    plan = plan_of(3)
    keys = []
    monkeypatch.setattr(plan.replays, "run", lambda key, launch: keys.append(key[:2]))
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        plan.run([torch.zeros(4)])
        plan.run([torch.zeros(4)])
        change()
        plan.run([torch.zeros(4)])
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.backends.cuda.matmul.fp32_precision = before
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("name", ["stream", "profiler", "tuned products"])
def test_elsewhere_a_plan_launches(as_on_a_gpu, monkeypatch, name):
    plan = plan_of(3)
    changes = {
        "stream": ("current_stream", lambda gpu: 1234),
        "profiler": ("fast_launch_device", lambda: None),
        "tuned products": ("product_settings", lambda: None),
    }
    monkeypatch.setattr(plans, *changes[name])
    x = torch.zeros(4)
    assert torch.equal(runs_of(plan, x), x + 3)
    assert plan.replays.num_launched == 0


def test_a_plan_of_few_steps_or_of_a_config_without_replay_has_no_graphs():
    assert plan_of(3).replays is not None
    assert plan_of(2).replays is None
    assert plan_of(3, replay=False).replays is None
