"""Runs in processes of their own that are terminated, killed, or find the disk full, and are continued."""

import json
import os
import shutil
import signal
import time

import pytest
from support.applications import last_of_each
from support.forked import Program

from anemoi_gt.app.training.run_files import load_checkpoint

from .conftest import SMALL, assert_same, without_speed

pytestmark = pytest.mark.process

STEPS = 24
VALID_EVERY = 8
RUN = [
    *(*SMALL, "model.channels=8", "model.dropout=0.1", f"training.steps={STEPS}"),
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
    options = last_of_each([*RUN, f"hydra.run.dir={folder}", *arguments])
    return Program("-m", "anemoi_gt.train", *options, folder=folder.parent)


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
    send(process, signal.SIGTERM, folder, after=VALID_EVERY + 3 + 1)
    return folder, *finish(process)


def test_a_terminated_run_saves_and_prints_how_to_continue(terminated):
    folder, status, sentence = terminated
    step = load_checkpoint(folder / "last.pt")["step"]
    assert VALID_EVERY + 3 <= step < STEPS
    # nothing that was done is lost
    assert step == max(record["step"] for record in records(folder))
    assert status == 128 + signal.SIGTERM
    go_on = f"resume=true hydra.run.dir={folder} continues the run"
    assert (
        sentence
        == f"anemoi_gt.train: stopped by SIGTERM after step {step}, which is saved: {go_on}"
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert finish(start(folder))[0] == 0
    return folder


def resume_by_folder(folder):
    """Continue a run by its folder only, from another working directory."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    command = ("-m", "anemoi_gt.train", "resume=true", f"hydra.run.dir={folder}")
    return finish(Program(*command, folder=elsewhere))


def test_a_run_killed_before_its_first_checkpoint_starts_again_with_its_own_config(whole, tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    send(process, signal.SIGKILL, folder, after=VALID_EVERY // 2)
    assert process.finish(DEADLINE)[0] == -signal.SIGKILL
    assert not (folder / "last.pt").exists()
    assert resume_by_folder(folder)[0] == 0
    assert "holds no checkpoint: the run starts at step 0" in (folder / "train.log").read_text()
    assert_same_run(folder, whole)


def test_a_disk_that_is_full_at_the_first_best_checkpoint_loses_nothing(whole, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "best.pt.partial").symlink_to("/dev/full")
    status, sentence = finish(start(folder))
    assert status == 1
    assert f"could not write {folder / 'best.pt'}: No space left" in sentence
    assert not (folder / "best.pt").exists()
    assert load_checkpoint(folder / "last.pt")["step"] == VALID_EVERY
    assert resume_by_folder(folder)[0] == 0
    assert_same_run(folder, whole)


def test_a_best_checkpoint_without_the_last_one_is_kept(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "last.pt").unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    status, sentence = resume_by_folder(folder)
    assert status == 1
    assert "holds a run without its last checkpoint: a copy of best.pt" in sentence
    assert {path: path.read_bytes() for path in before} == before
    shutil.copy(folder / "best.pt", folder / "last.pt")  # as the sentence says
    assert resume_by_folder(folder)[0] == 0
    assert_same_run(folder, whole)


def test_a_second_start_in_the_folder_of_a_run_is_refused_and_touches_nothing(whole, tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    send(process, signal.SIGSTOP, folder, after=VALID_EVERY + 3)
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    owner = f"process {process.pid} on {os.uname().nodename}, started "
    for resume in ("true", "false"):
        status, sentence = finish(start(folder, f"resume={resume}"))
        assert status == 1
        assert f"one run at a time may train in {folder}, {owner}" in sentence
    assert {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()} == before
    os.kill(process.pid, signal.SIGCONT)
    assert finish(process)[0] == 0
    assert_same_run(folder, whole)


def test_of_two_runs_that_start_in_one_new_folder_one_trains(whole, tmp_path):
    folder = tmp_path / "run"
    outcomes = [finish(process) for process in [start(folder), start(folder)]]
    assert sorted(status for status, _ in outcomes) == [0, 1]
    (refused,) = (sentence for status, sentence in outcomes if status == 1)
    assert f"one run at a time may train in {folder}" in refused
    assert_same_run(folder, whole)


COMPILER = """#!/bin/sh
# A compiler that the signal to a run ends as well.
if [ -e {folder}/metrics.jsonl ]; then
    kill -{number} $(sed 's/.*"process": \\([0-9]*\\).*/\\1/' {folder}/.lock.owner)
    exit 1
fi
exec {compiler} "$@"
"""


def test_a_signal_that_also_ends_the_compiler_is_a_stop(tmp_path):
    folder = tmp_path / "run"
    compiler = tmp_path / "g++"
    script = COMPILER.format(
        folder=folder, number=int(signal.SIGTERM), compiler=shutil.which("g++")
    )
    compiler.write_text(script)
    compiler.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = ("-m", "anemoi_gt.train", *RUN, "training.compile=true", f"hydra.run.dir={folder}")
    status, sentence = finish(Program(*command, folder=tmp_path, environment=environment))
    assert status == 128 + signal.SIGTERM, sentence
    go_on = f"resume=true hydra.run.dir={folder} continues the run"
    assert sentence == (
        f"anemoi_gt.train: stopped by SIGTERM in step 1, which is not saved: {go_on}"
    )


def test_a_killed_run_continues_from_the_last_checkpoint_to_the_same_bits(whole, tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    send(process, signal.SIGKILL, folder, after=VALID_EVERY + 3)
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
