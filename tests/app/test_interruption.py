"""Runs in processes of their own that are terminated, killed, or find the disk full, and are continued."""

import json
import os
import shutil
import signal
import time

import pytest
from support.forked import Program

from anemoi_gt.app.training.run_files import load_checkpoint

from .conftest import SMALL, assert_same, without_speed

STEPS, VALID_EVERY = 30, 10
RUN = [
    *(
        *SMALL,
        "model.num_layers=1",
        "model.channels=8",
        "model.dropout=0.1",
        f"training.steps={STEPS}",
    ),
    *(
        f"training.valid_every={VALID_EVERY}",
        "training.log_every=1",
        "training.threads=1",
        "resume=true",
    ),
]
DEADLINE = 120  # s, for a run of a few


def start(folder, *arguments):
    """Start the application; runs of one folder are one run."""
    return Program(
        "-m", "anemoi_gt.train", *RUN, f"hydra.run.dir={folder}", *arguments, folder=folder.parent
    )


def finish(process):
    """Wait for a process; return its exit status and the last line of its standard error."""
    status, _, error = process.finish(DEADLINE)
    assert "Traceback" not in error
    return status, error.splitlines()[-1]


def send(process, number, folder, after):
    """Send a signal when `after` steps have been recorded."""
    deadline, metrics = time.monotonic() + DEADLINE, folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < after:
        assert process.is_alive(), "it ended before the signal"
        assert time.monotonic() < deadline, "it ended before the signal"
        time.sleep(0.002)
    os.kill(process.pid, number)


def records(folder):
    return without_speed(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def assert_same_run(folder, other):
    assert records(folder) == records(other)
    assert (folder / "scores.json").read_text() == (other / "scores.json").read_text()
    for name in ("last.pt", "best.pt"):
        actual = load_checkpoint(folder / name)
        expected = load_checkpoint(other / name)
        for part in ("step", "model", "average"):
            assert_same(actual[part], expected[part], f"{name}: {part}")


@pytest.fixture(scope="module")
def terminated(tmp_path_factory):
    """The folder of a run that received SIGTERM, its exit status and last line."""
    folder = tmp_path_factory.mktemp("terminated") / "run"
    process = start(folder)
    # one record for each step, and one of the validation
    send(process, signal.SIGTERM, folder, after=VALID_EVERY + 5 + 1)
    return folder, *finish(process)


def test_a_terminated_run_saves_and_prints_how_to_continue(terminated):
    folder, status, sentence = terminated
    step = load_checkpoint(folder / "last.pt")["step"]
    assert VALID_EVERY + 5 <= step < STEPS
    # nothing that was done is lost
    assert step == max(record["step"] for record in records(folder))
    assert status == 128 + signal.SIGTERM
    go_on = f"anemoi-gt train resume=true hydra.run.dir={folder}"
    assert (
        sentence
        == f"anemoi_gt.train: stopped by SIGTERM after step {step}, which is saved: {go_on}"
    )


def test_a_killed_run_continues_from_the_last_checkpoint_to_the_same_bits(tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert finish(start(whole))[0] == 0
    process = start(folder)
    send(process, signal.SIGKILL, folder, after=VALID_EVERY + 5)
    assert process.finish(DEADLINE)[0] == -signal.SIGKILL
    assert (
        load_checkpoint(folder / "last.pt")["step"]
        < max(record["step"] for record in records(folder))
        < STEPS
    )
    assert finish(start(folder))[0] == 0
    assert_same_run(folder, whole)


def test_a_full_disk_ends_the_run_with_one_sentence_and_the_last_checkpoint_whole(
    terminated, tmp_path
):
    folder = shutil.copytree(terminated[0], tmp_path / "run")
    before = (folder / "last.pt").read_bytes()
    (folder / "last.pt.partial").symlink_to("/dev/full")  # where every write finds no space left
    status, sentence = finish(start(folder))
    assert status == 1
    assert (
        sentence
        == f"anemoi_gt.train: could not write {folder / 'last.pt'}: No space left on device"
    )
    assert (folder / "last.pt").read_bytes() == before
    assert not (folder / "last.pt.partial").is_symlink()
