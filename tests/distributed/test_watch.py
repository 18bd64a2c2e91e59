"""A rank that dies, freezes or fails ends the job on all ranks, in time, with one message that names it."""

import re

import pytest
import torch
import torch.distributed as dist

from anemoi_gt.distributed.watch import TELLING, _Watch
from distributed.dying import TIMEOUT
from distributed.ranks import HERE, spawn

BUSY = 4.0  # s, for processes to end on a busy machine


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
    watch.store = dist.HashStore()
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
