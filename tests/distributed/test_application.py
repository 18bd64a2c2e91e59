"""The application under torchrun: stopped, continued on another mesh and on two hosts, and a rank that fails."""

import json
import os
import re
import shutil
import signal
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from omegaconf import OmegaConf
from support.forked import Program

from anemoi_gt.app import train_command as train
from anemoi_gt.app.training.run_files import load_checkpoint
from anemoi_gt.app.training.sharded import write_as_file
from anemoi_gt.distributed.process_group import VARIABLES
from anemoi_gt.distributed.sharded_checkpoint import load_values
from distributed.ranks import HERE, free_port

DEVICE = "cuda" if torch.cuda.device_count() >= 4 else "cpu"  # NCCL if all ranks have a GPU
OF_TWO_RANKS = (
    ("training.device=cuda", "training.cuda_graph=true", "training.precision=16-mixed")
    if torch.cuda.device_count() >= 2
    else ("training.device=cpu",)
)
ARGUMENTS = [
    *(
        "data.grid_name=O4",
        "data.train_size=8",
        "data.valid_size=2",
        "data.test_size=2",
        "graph.refinement=1",
    ),
    *(
        "training.steps=16",
        "training.warmup_steps=1",
        "training.batch_size=2",
        f"training.device={DEVICE}",
    ),
    *(
        "training.valid_every=8",
        "training.log_every=1",
        "hydra.run.dir=run",
        "model.mapper_chunks=3",
    ),
]
# A rank fails before a certain step, however fast the steps are.
SMALL_MODEL = ("model.channels=32", "model.num_layers=1")
PATIENCE = 120  # s, on a busy machine
BUSY = 10.0  # s, for processes to end on a busy machine
TIMEOUT = 10.0  # s, of collectives
KILLED_AFTER = 30.0  # s, by torchrun, when a rank does not react to SIGTERM


class Host(NamedTuple):
    """Options and environment of torchrun on a host."""

    options: tuple[str, ...]
    variables: dict[str, str]


ONE_HOST = Host(("--standalone",), {})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("application")


@contextmanager
def torchrun(place, ranks, *arguments, host=ONE_HOST, script=("-m", "anemoi_gt.train")):
    """Start the application on some ranks of a host; yield the process of torchrun, which ends with the block."""
    command = [
        "-m",
        "torch.distributed.run",
        *host.options,
        f"--nproc-per-node={ranks}",
        *script,
        *ARGUMENTS,
    ]
    process = Program(*command, *arguments, folder=place, environment=host.variables)
    try:
        yield process
    finally:
        process.terminate()
        process.join()


def finish(process):
    status, output, error = process.finish(PATIENCE)
    return status, output + error


def two_hosts():
    """Two hosts on this one, with two of its GPUs each if it has them."""
    meeting = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    return [
        Host(
            (*meeting, f"--node-rank={host}"),
            {"NCCL_HOSTID": f"host {host}", "CUDA_VISIBLE_DEVICES": gpus},
        )
        for host, gpus in enumerate(("0,1", "2,3"))
    ]


def steps_in(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["step"] for record in map(json.loads, lines) if record["split"] == "train"]


def ranks_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, children))


@pytest.fixture(scope="module")
def stopped(place):
    """Output of torchrun for one model on four ranks, of which one received a signal after its first steps."""
    with torchrun(place, 4, "sharding=edges", "sharding.model=4") as process:
        end = time.monotonic() + PATIENCE
        while not steps_in(place / "run") and process.is_alive() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(ranks_of(process)[2], signal.SIGTERM)
        return finish(process)[1]


@pytest.fixture(scope="module")
def continued(place, stopped):
    """Statuses and outputs of two models on two ranks of a host each, that continued the stopped run; steps before."""
    before = steps_in(place / "run")
    with ExitStack() as hosts:
        arguments = ("sharding=edges", "sharding.model=2", "resume=true")
        processes = [
            hosts.enter_context(torchrun(place, 2, *arguments, host=host)) for host in two_hosts()
        ]
        return *zip(*map(finish, processes), strict=True), before


def test_a_signal_to_one_rank_stops_all_with_one_message_that_names_the_folder(place, stopped):
    messages = re.findall(
        r"anemoi_gt.train: stopped by SIGTERM after step (\d+), (.*)$", stopped, re.MULTILINE
    )
    assert len(messages) == 1 and steps_in(place / "run")[-1] == int(messages[0][0]), stopped
    command = (
        "torchrun --nproc-per-node=4 -m anemoi_gt.train sharding=edges sharding.model=4 resume=true"
    )
    assert messages[0][1] == f"which is saved: {command} hydra.run.dir={place / 'run'}"
    assert set(re.findall(r"exitcode *: (-?\d+)", stopped)) == {"143"}, stopped  # its status


def test_two_hosts_with_a_model_each_continue_what_one_model_on_four_ranks_began(place, continued):
    statuses, outputs, before = continued
    assert statuses == (0, 0), outputs
    assert 0 < len(before) < 16 and steps_in(place / "run") == list(range(1, 17))
    # a run on ranks leaves what one process leaves
    left = {path.name for path in (place / "run").iterdir()}
    assert left == {
        "best",
        "last",
        "best.pt",
        "metrics.jsonl",
        "scores.json",
        "forecast.png",
        "train.log",
        ".hydra",
    }


def test_the_progress_bar_is_of_one_rank_and_counts_steps(continued):
    _, (first, other), _ = continued
    assert re.findall(r"(\d+)/16 ", first)[-1] == "16", first
    assert not re.findall(r"\d+/16 ", other), other


SEEDS = "training.seed='${oc.decode:${oc.env:RANK}}'"


@pytest.mark.parametrize(
    ("arguments", "sentence", "speakers"),
    [
        (SEEDS, "seed must be the same on all ranks, got 1 on rank 1 and 0 on rank 0", 1),
        (
            "training.batch_size=3",
            "batch_size must be a multiple of the 2 ranks of the data axis, got 3",
            2,
        ),
    ],
    ids=["seed", "batch"],
)
def test_a_config_that_ranks_cannot_share_is_refused_before_anything_is_built(
    place, arguments, sentence, speakers
):
    # The data set cannot be built either, which no rank reports.
    with torchrun(
        place, 2, *arguments.split(), "data.grid_name=nowhere", "hydra.run.dir=unshared"
    ) as process:
        status, output = finish(process)
    said = re.findall(r"^\[rank\d\]: anemoi_gt.train: training\.(.*)$", output, re.MULTILINE)
    assert status != 0 and said == [sentence] * speakers, output  # a consensus has one speaker
    last = [line for line in output.splitlines() if line.strip(" =")][-1]
    assert last == f"  ValueError: training.{sentence}", output
    # torchrun's own, and two frames of a rank's
    assert output.count("Traceback") == 1 + speakers, output


def test_one_process_cannot_divide_a_model(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    sharding = {"_target_": "anemoi_gt.distributed.ShardingConfig", "strategy": "edges", "model": 2}
    with pytest.raises(
        ValueError, match="sharding=edges must be started on several ranks: torchrun"
    ):
        train.prepare(OmegaConf.create({"sharding": sharding, "explain": None}))


@contextmanager
def failing(place, kind, restarts, *arguments, rank=1):
    """Start a job of two ranks of which one fails before step 10; yield its process and folder."""
    folder = place / kind
    script = [f"--max-restarts={restarts}", str(HERE / "failing_rank.py"), kind, str(rank), "10"]
    options = [
        *OF_TWO_RANKS,
        *SMALL_MODEL,
        "sharding=edges",
        "sharding.model=2",
        f"hydra.run.dir={folder}",
        *arguments,
    ]
    with torchrun(place, 2, *options, script=script) as process:
        yield process, folder


@pytest.fixture(scope="module", autouse=True)
def frozen(place):
    """A job with a frozen rank, started before the other tests: it takes most of a minute to end."""
    with failing(place, "frozen", 0, f"sharding.timeout={TIMEOUT}") as job:
        yield job


def outcome(process, until="the end"):
    """Status and output of a failing job, and seconds from the failure to its end or to what it says with a time."""
    status, output = finish(process)
    times = {event: float(time) for event, time in re.findall(r"(\w+) at (\d{9,}\.\d+)", output)}
    times["the end"] = max(file.stat().st_mtime for file in process.files)
    return status, output, times[until] - min(times.values())


def assert_checkpoint_is_whole(folder, step):
    write_as_file(folder / "last.pt")
    assert load_checkpoint(folder / "last.pt")["step"] == step


@pytest.fixture(scope="module")
def raised(place):
    """Folder and outcome of a job of which a rank raised."""
    with failing(place, "raising", 0) as (process, folder):
        return folder, *outcome(process)


def test_a_rank_that_raises_ends_the_job_at_once_and_torchrun_reports_the_error(raised):
    folder, status, output, seconds = raised
    assert status != 0 and seconds < BUSY, output
    report = output[output.index("Root Cause") :]
    assert "rank      : 1 " in report and "RuntimeError: a bug on this rank alone" in report, output
    assert_checkpoint_is_whole(folder, 8)


def test_a_run_that_is_resumed_without_sharding_keeps_its_own(place, raised):
    folder = place / "without sharding"
    shutil.copytree(raised[0] / "last", folder / "last")
    with torchrun(place, 2, *OF_TWO_RANKS, f"hydra.run.dir='{folder}'", "resume=true") as process:
        status, output = finish(process)
    assert status == 0 and "2 ranks, 2 of them for a model" in output, output
    assert "sharding changes" not in output, output
    assert load_values(folder / "last", "config")["sharding"] == {
        "strategy": "edges",
        "model": 2,
        "timeout": 300.0,
    }


def test_the_log_states_that_the_sharding_changes(continued):
    before = "sharding=edges sharding.model=4 sharding.timeout=300.0"
    after = "sharding=edges sharding.model=2 sharding.timeout=300.0"
    assert f"sharding changes from {before} to {after}" in continued[1][0]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ([], ["sharding=edges", "sharding.model=2", "sharding.timeout=9.0"]),
        (["sharding.timeout=60"], ["sharding=edges", "sharding.model=2"]),
        (["+sharding.model=4"], ["sharding=edges", "sharding.timeout=9.0"]),
        (["sharding=none"], []),
        (["sharding.strategy=none"], []),
    ],
)
def test_the_sharding_of_a_run_is_kept_as_far_as_the_command_does_not_give_it(arguments, kept):
    assert (
        train.former_sharding({"strategy": "edges", "model": 2, "timeout": 9.0}, arguments) == kept
    )
    assert train.former_sharding({}, arguments) == []  # a checkpoint that does not tell


def test_a_killed_rank_ends_all_at_once_and_a_restart_continues_from_the_checkpoint(place):
    with failing(place, "killed", 1, "resume=true") as (process, folder):
        status, output, seconds = outcome(process, until="restarted")
    assert status == 0 and seconds < BUSY, output
    assert steps_in(folder) == list(range(1, 17)) and (folder / "scores.json").exists()


def test_a_frozen_rank_ends_the_job_within_the_timeout_and_the_time_to_kill_it(frozen):
    process, folder = frozen
    status, output, seconds = outcome(process)
    assert status != 0 and TIMEOUT <= seconds < TIMEOUT + KILLED_AFTER + BUSY, output
    assert "Timed out waiting" in output and "Signal 9 (SIGKILL)" in output, output
    assert_checkpoint_is_whole(folder, 8)
