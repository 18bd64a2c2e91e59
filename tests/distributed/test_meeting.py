"""Ranks that meet before they join; what differs between them is in `test_application`."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from anemoi_gt.distributed.meeting import code_in_use, leave_last, meeting
from distributed.ranks import free_port


@pytest.fixture
def as_rank_0(monkeypatch):
    """Be rank 0 of some, as torchrun would say it."""

    def of(size):
        named = {"RANK": 0, "WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for name, value in named.items():
            monkeypatch.setenv(name, str(value))

    return of


def test_a_rank_that_does_not_come_is_missed_in_time(as_rank_0):
    as_rank_0(2)
    with pytest.raises(TimeoutError, match="^all ranks must start within 1 s of each other, got: "), meeting({}, 1.0):
        pass


def test_one_rank_meets_itself(as_rank_0):
    as_rank_0(1)
    with meeting({"seed": 0}, 5.0):
        came = True
    assert came


@pytest.fixture
def meet(monkeypatch, tmp_path):
    """Let rank 0 meet rank 1, as two threads; returns what rank 0 is told of it, None for nothing."""

    def met(*values):
        store, here = dist.FileStore(str(tmp_path / "store"), 2), threading.local()
        monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, here.rank, 2)]))
        monkeypatch.setattr("anemoi_gt.distributed.meeting.leave_last", lambda status: None)

        def say(rank):
            here.rank = rank
            try:
                with meeting(values[rank], 30.0):
                    return None
            except ValueError as error:
                return str(error)

        with ThreadPoolExecutor() as threads:
            told, _ = threads.map(say, range(2))
        return told

    return met


def test_values_may_come_in_any_order(meet):
    assert meet({"seed": 0, "depth": 1}, {"depth": 1, "seed": 0}) is None


@pytest.mark.parametrize(("here", "said"), [({"norm": 1}, "1"), ({}, "no such value"), ({"norm": None}, "None")])
def test_values_that_are_written_differently_differ(meet, here, said):
    problem = f"norm must be the same on all ranks, got 1.0 on rank 1 and {said} on rank 0"
    assert meet(here, {"norm": 1.0}) == problem


def test_the_code_in_use_is_told_by_the_content_of_its_files(tmp_path, monkeypatch):
    before = code_in_use()
    assert before == code_in_use() and before["the version of torch"] == torch.__version__
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    (package / "room" / "a.py").write_text("x = 1")
    monkeypatch.setattr("anemoi_gt.distributed.meeting.__file__", str(package / "room" / "a.py"))
    other = code_in_use()["the code of anemoi_gt"]
    assert re.fullmatch("[0-9a-f]{16}", other) and other != before["the code of anemoi_gt"]
    (package / "room" / "a.py").write_text("x = 2")
    assert code_in_use()["the code of anemoi_gt"] != other


def test_those_who_leave_last_outlive_the_signal_of_the_launcher(monkeypatch):
    heard = []
    monkeypatch.setattr("signal.signal", lambda *said: heard.append(said))
    monkeypatch.setattr("time.sleep", lambda seconds: heard.append(seconds))
    with pytest.raises(SystemExit) as left:
        leave_last(143)
    assert left.value.code == 143 and [str(said[0]) for said in heard[:1]] == ["15"] and heard[1] >= 0.5
