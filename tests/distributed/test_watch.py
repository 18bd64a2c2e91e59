"""A rank that dies, freezes or fails ends the job on all ranks, in time, with one message that names it."""

import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from anemoi_gt.distributed.watch import TELLING, _Watch
from distributed.dying import TIMEOUT
from distributed.ranks import HERE, spawn

BUSY = 4.0  # s, for processes to end on a busy machine
OTHERS = [rank for rank in range(12) if rank != 4]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run a job to its end, once for each grief and rank; returns how its ranks ended, and the folder."""
    jobs = {}

    def run(kind, rank, ranks=2):
        if (kind, rank) not in jobs:
            folder = tmp_path_factory.mktemp(f"{kind}{rank}")
            jobs[kind, rank] = spawn([HERE / "dying.py", kind, rank, folder], ranks, timeout=60), folder
        return jobs[kind, rank]

    return run


GRIEFS = [("killed", 1, 3), ("killed", 0, 2), ("frozen", 2, 3)]  # rank 0 holds the store


@pytest.mark.parametrize(("kind", "rank", "ranks"), GRIEFS)
def test_all_ranks_end_within_the_timeout(job, kind, rank, ranks):
    ended, _ = job(kind, rank, ranks)
    output = "".join(end.output for end in ended)
    begin = float(re.search(r"grief at (\S+)", output)[1])
    assert all(end.status != 0 for end in ended), ended
    assert "came to the end" not in output and "still running" not in output, output
    assert all(end.time - begin < TIMEOUT + BUSY for end in ended if end is not ended[rank]), (begin, ended)


@pytest.mark.parametrize(("kind", "rank", "ranks"), GRIEFS)
def test_one_message_names_the_rank(job, kind, rank, ranks):
    output = "".join(end.output for end in job(kind, rank, ranks)[0])
    messages = re.findall(r"^anemoi_gt: .*$", output, re.MULTILINE)
    assert len(messages) == 1 and messages[0].startswith(f"anemoi_gt: rank {rank}"), output
    assert "Traceback" not in output


def test_one_message_names_all_ranks_of_a_host_that_is_gone(job):
    ended, _ = job("host_killed", 1, 3)
    output = "".join(end.output for end in ended)
    name = r"\(process \d+ on \S+\)"
    messages = re.findall(r"^anemoi_gt: .*$", output, re.MULTILINE)
    assert len(messages) == 1, output
    assert re.match(rf"anemoi_gt: rank 1 {name}, rank 2 {name} died or froze: no sign of life for ", messages[0]), (
        output
    )


@pytest.mark.parametrize(
    ("silent", "words"),
    [
        ([3], None),  # who is missed, 5, has come back in this moment
        ([5], "rank 5 (process 5 on a)"),
        ([0, 3, 5], "rank 0 (process 0 on a), rank 3 (process 3 on a), rank 5 (process 5 on a)"),
        (OTHERS, ", ".join(f"rank {rank} (process {rank} on a)" for rank in OTHERS[:8]) + ", and 3 more,"),
    ],
)
def test_ranks_whose_numbers_stand_still_are_silent_and_the_first_ones_are_named(monkeypatch, silent, words):
    watch, said = _Watch.__new__(_Watch), []
    watch.store, watch.world_size, watch.rank, watch.neighbour, watch.signature = dist.HashStore(), 12, 4, 5, ""
    watch.timeout, watch.period, watch.seen, watch.seen_at = 8.0, 1.0, "9 process 5 on a", time.monotonic() - 6.5
    for rank in range(watch.world_size):
        watch.store.set(f"beat {rank}", f"{9 if rank in silent else 10} process {rank} on a")
    watch.beats, watch.beats_at = [f"9 process {rank} on a" for rank in range(watch.world_size)], watch.seen_at + 4.5
    monkeypatch.setattr(watch, "_end", lambda message, speaks: said.append(message))
    watch.seen_at += 1  # not yet for long enough
    watch._look(10)
    assert not said
    watch.seen_at -= 1
    watch._look(11)
    assert [re.sub(r" for [\d.]+ s$", "", message) for message in said] == (
        [] if words is None else [f"{words} died or froze: no sign of life"]
    )


@pytest.mark.parametrize(
    ("rank", "local_rank", "speaks"), [(0, "0", False), (1, "1", True), (2, "0", True), (3, "1", False)]
)
@pytest.mark.parametrize("answer", ["none", "error"])
def test_a_store_that_does_not_answer_ends_a_rank_and_one_of_each_host_says_so(
    monkeypatch, rank, local_rank, speaks, answer
):
    monkeypatch.setattr(
        "anemoi_gt.distributed.watch._get_default_store", lambda: SimpleNamespace(clone=lambda: dist.HashStore())
    )
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    watch, said = _Watch(rank, 4, 0.4), []

    def look(count):
        if answer == "error":
            raise dist.DistNetworkError("its host is gone")
        assert watch.done.wait(60)

    def end(message, speaks):
        said.append((message, speaks))
        watch.done.set()

    monkeypatch.setattr(watch, "_look", look)
    monkeypatch.setattr(watch, "_end", end)
    watch.start()
    watch.join(60)
    reason = {"none": "frozen, or off the network", "error": "its host is gone"}[answer]
    assert said == [(f"rank 0 or its launcher, which holds the store, does not answer ({reason})", speaks)]


@pytest.mark.parametrize(("waits", "misses"), [([False] * 6, True), ([False] * 5 + [True], False)])
def test_a_rank_that_stood_still_itself_gives_the_store_time_to_answer(monkeypatch, waits, misses):
    watch, missed = _Watch.__new__(_Watch), []
    watch.timeout, watch.period = 8.0, 1.0
    monkeypatch.setattr(watch, "_miss_store", missed.append)
    answers = iter(waits)
    watch._miss_answer(SimpleNamespace(wait=lambda seconds: seconds == watch.period and next(answers)))
    assert bool(missed) == misses and not list(answers)


def test_a_rank_that_is_missed_and_comes_back_ends_nobody(monkeypatch):
    watch = _Watch.__new__(_Watch)
    watch.store, watch.world_size, watch.rank, watch.neighbour = dist.HashStore(), 2, 0, 1
    watch.timeout, watch.period, watch.seen, watch.seen_at, watch.beats = 8.0, 1.0, "", time.monotonic() - 100, []
    watch.store.set("beat 1", "9 process 1 on a")
    monkeypatch.setattr(watch, "_end", lambda message, speaks: pytest.fail(message))
    watch._look(1)  # it is there
    watch.seen_at -= 100
    watch._look(2)  # this rank did not run for long: nothing is known before another look
    assert watch.beats == ["2 " + watch._beat(2).partition(" ")[2], "9 process 1 on a"]
    watch.store.set("beat 1", "10 process 1 on a")
    watch._look(3)
    assert watch.beats == []


@pytest.mark.parametrize(("kind", "rank", "ranks"), GRIEFS)
def test_the_last_checkpoint_is_whole(job, kind, rank, ranks):
    _, folder = job(kind, rank, ranks)
    checkpoint = torch.load(folder / "last.pt", weights_only=True)
    assert checkpoint["step"] == 9 and checkpoint["state"].shape == (1000,)


@pytest.mark.parametrize("rank", [0, 1])  # rank 0 holds the store
def test_an_error_of_one_rank_is_told_once_with_its_rank(job, rank):
    ended, _ = job("failing", rank)
    note = f"on rank {rank}; all ranks end"
    said = [("this rank lost heart" in end.output, note in end.output, "anemoi_gt: " in end.output) for end in ended]
    assert said == [(here == rank, here == rank, False) for here in range(2)], ended
    assert [end.status for end in ended] == [1, 1], ended


@pytest.mark.parametrize(
    ("obituary", "waits"), [("rank 0 failed: ValueError: no", [TELLING]), ("rank 0 (a) died or froze", [])]
)
def test_a_rank_that_follows_leaves_time_to_the_one_that_tells_its_error(monkeypatch, obituary, waits):
    watch, slept = _Watch.__new__(_Watch), []
    watch.store, watch.holds_store = dist.HashStore(), False
    watch.store.set("obituary", f"{obituary} (told by rank 0)")
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("anemoi_gt.distributed.watch.leave", slept.append)
    watch._follow()
    assert slept == [*waits, 1]


def test_the_thread_of_a_rank_that_tells_its_error_does_not_end_it(monkeypatch):
    watch = _Watch.__new__(_Watch)
    watch.rank, watch.signature, watch.store = 1, " (told by rank 1)", dist.HashStore()
    watch.store.set("obituary", "")
    assert watch._write("rank 1 failed: ValueError: no")
    monkeypatch.setattr("anemoi_gt.distributed.watch.leave", lambda status: pytest.fail("ended before it told"))
    watch._look(1)


def test_an_error_of_all_ranks_is_told_by_one(job):
    ended, _ = job("all_failing", 0)
    assert sum("the config must have a heart" in end.output for end in ended) == 1, ended
    assert [end.status for end in ended] == [1, 1], ended


def test_a_job_without_grief_ends_in_silence(job):
    ended, _ = job("fine", 0)
    assert [end.status for end in ended] == [0, 0], ended
    assert all(end.output.endswith("came to the end\n") and "anemoi_gt:" not in end.output for end in ended)


def test_the_interpreter_waits_for_threads_that_are_late(job):
    ended, _ = job("late", 0)
    assert [(end.status, end.output.splitlines()[-1]) for end in ended] == [(0, "let go")] * 2, ended
