"""The application under torchrun: stopped, resumed on another mesh and on two hosts, and with a failing rank."""

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
from hydra import compose, initialize_config_module
from support.applications import last_of_each
from support.forked import Program

from anemoi_gt.app import train_command as train
from anemoi_gt.app.training.run_files import load_checkpoint
from anemoi_gt.app.training.run_folder import own
from anemoi_gt.app.training.sharded import write_as_file
from anemoi_gt.distributed.process_group import VARIABLES
from anemoi_gt.distributed.sharded_checkpoint import load_values
from distributed.ranks import HERE, free_port

pytestmark = pytest.mark.ranks

DEVICE = "cuda" if torch.cuda.device_count() >= 4 else "cpu"  # NCCL if all ranks have a GPU
if torch.cuda.device_count() >= 2:
    OF_TWO_RANKS = (
        "training.device=cuda",
        "training.cuda_graph=true",
        "training.precision=16-mixed",
    )
else:
    OF_TWO_RANKS = ("training.device=cpu",)
ARGUMENTS = [
    "data.grid_name=O4",
    "data.train_size=8",
    "data.valid_size=2",
    "data.test_size=2",
    "graph.refinement=1",
    "training.steps=12",
    "training.warmup_steps=1",
    "training.batch_size=2",
    f"training.device={DEVICE}",
    "training.valid_every=4",
    "training.log_every=1",
    "hydra.run.dir=run",
    "model.mapper_chunks=2",
    "model.channels=32",
    "model.num_layers=1",
]
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
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("application")


@contextmanager
def torchrun(folder, ranks, *arguments, host=ONE_HOST, script=("-m", "anemoi_gt.train")):
    """Start the application on some ranks of a host; yield the torchrun process, and terminate it at the end."""
    command = [
        "-m",
        "torch.distributed.run",
        *host.options,
        f"--nproc-per-node={ranks}",
        *script,
        *last_of_each([*ARGUMENTS, *arguments]),
    ]
    process = Program(*command, folder=folder, environment=host.variables)
    try:
        yield process
    finally:
        process.terminate()
        process.join()


def finish(process):
    status, output, error = process.finish(PATIENCE)
    return status, output + error


def two_hosts():
    """Return two hosts on this machine, with two of its GPUs each if it has them."""
    rendezvous = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    hosts = []
    for host, gpus in enumerate(("0,1", "2,3")):
        variables = {"NCCL_HOSTID": f"host {host}", "CUDA_VISIBLE_DEVICES": gpus}
        hosts.append(Host((*rendezvous, f"--node-rank={host}"), variables))
    return hosts


def steps_in(folder):
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    records = map(json.loads, path.read_text().splitlines())
    return [record["step"] for record in records if record["split"] == "train"]


def ranks_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, children))


def start_on_two_hosts(hosts, folder, name, ranks, *arguments):
    """Start some ranks on each of two hosts, enter them in `hosts`, and return them once the run has records."""
    options = ("sharding=edges", f"sharding.model={2 * ranks}", f"hydra.run.dir={name}")
    started = []
    for host in two_hosts():
        job = torchrun(folder, ranks, *options, *arguments, host=host)
        started.append(hosts.enter_context(job))
    end = time.monotonic() + PATIENCE
    while not steps_in(folder / name) and all(host.is_alive() for host in started):
        assert time.monotonic() < end
        time.sleep(0.02)
    return started


@pytest.fixture(scope="module")
def stopped(folder):
    """Outputs of one model on two hosts of two ranks, the second of which received SIGTERM as Slurm sends it."""
    with ExitStack() as hosts:
        started = start_on_two_hosts(hosts, folder, "run", 2)
        os.kill(started[1].pid, signal.SIGTERM)
        return [finish(host)[1] for host in started]


@pytest.fixture(scope="module")
def continued(folder, stopped):
    """Statuses and outputs of two hosts, with a model each, that resumed the stopped run; and its former steps.

    The parameters of the two models are divided among all four ranks.
    """
    before = steps_in(folder / "run")
    with ExitStack() as hosts:
        sharding = ("sharding=edges", "sharding.model=2", "sharding.parameters=true")
        arguments = (*sharding, "resume=true")
        processes = []
        for host in two_hosts():
            processes.append(hosts.enter_context(torchrun(folder, 2, *arguments, host=host)))
        (status, output), (other_status, other_output) = map(finish, processes)
        return (status, other_status), (output, other_output), before


def test_a_signal_to_one_host_stops_both_with_one_message_that_names_the_folder(folder, stopped):
    output, other = stopped
    pattern = r"anemoi_gt.train: stopped by SIGTERM after step (\d+), which is saved: (.*)$"
    messages = re.findall(pattern, output, re.MULTILINE)
    assert len(messages) == 1, output
    assert "stopped by" not in other, other
    ((step, rest),) = messages
    assert steps_in(folder / "run")[-1] == int(step), output
    assert load_values(folder / "run" / "last", "step") == int(step)
    assert rest == f"resume=true hydra.run.dir={folder / 'run'} continues the run"
    # the exit status after SIGTERM, of ranks that received none
    assert set(re.findall(r"exitcode *: (-?\d+)", output)) == {"143"}, output


def test_two_hosts_with_a_model_each_resume_the_run_of_one_model_on_four_ranks(folder, continued):
    statuses, outputs, before = continued
    assert statuses == (0, 0), outputs
    assert 0 < len(before) < 12
    assert steps_in(folder / "run") == list(range(1, 13))
    # the same files as after a run of one process
    files = {path.name for path in (folder / "run").iterdir()}
    assert files == {
        "best",
        "last",
        "best.pt",
        "metrics.jsonl",
        "scores.json",
        "forecast.png",
        "train.log",
        ".hydra",
    }


def test_only_one_rank_shows_the_progress_bar_which_counts_steps(continued):
    _, (first, other), _ = continued
    assert re.findall(r"(\d+)/12 ", first)[-1] == "12", first
    assert not re.findall(r"\d+/12 ", other), other


def test_the_error_of_a_host_that_lost_the_other_says_so(folder):
    options = ("training.device=cpu", "training.steps=4000")
    with ExitStack() as hosts:
        first, second = start_on_two_hosts(hosts, folder, "lost_host", 1, *options)
        for process in (second.pid, *ranks_of(second)):
            os.kill(process, signal.SIGKILL)
        status, output = finish(first)
    assert status != 0
    assert "another host, or a rank there, was lost" in output, output


def test_a_job_in_the_folder_of_another_run_is_refused_on_all_ranks_with_one_message(folder):
    run = folder / "owned"
    run.mkdir()
    options = ("sharding=edges", "sharding.model=2", f"hydra.run.dir={run}", "resume=true")
    with own(run), torchrun(folder, 2, *options) as process:
        status, output = finish(process)
        files = {path.name for path in run.iterdir()}
    assert status != 0, output
    owner = f"one run at a time may train in {run}, process {os.getpid()} on "
    assert output.count(f"anemoi_gt.train: {owner}") == 1, output
    assert files == {".lock", ".lock.owner", "train.log"}


def test_a_config_that_ranks_cannot_share_is_refused_before_anything_is_built(folder):
    # The data set cannot be built either, which no rank reports.
    seeds = "training.seed='${oc.decode:${oc.env:RANK}}'"
    options = (seeds, "data.grid_name=nowhere", "hydra.run.dir=unshared")
    with torchrun(folder, 2, *options) as process:
        status, output = finish(process)
    reports = re.findall(r"^\[rank(\d)\]: anemoi_gt.train: (.*)$", output, re.MULTILINE)
    message = "training.seed must be the same on all ranks, got 1 on rank 1 and 0 on rank 0"
    assert status != 0, output
    # One rank reports a consensus, and torchrun ends the others as soon as a rank has ended.
    assert reports == [("0", message)], output
    assert f"ValueError: {message}" in output[output.index("Root Cause") :], output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["sharding=edges", "sharding.model=2"], "sharding=edges"),
        (["sharding.parameters=true"], "sharding.parameters=true"),
    ],
    ids=["model", "parameters"],
)
def test_one_process_cannot_divide_a_model_or_its_parameters(monkeypatch, options, named):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        config = compose("train", options)
    with pytest.raises(ValueError, match=f"^{named} must be started on several ranks: torchrun"):
        train.prepare(config)


SHARDED = (*OF_TWO_RANKS, "sharding=edges", "sharding.model=2")


@contextmanager
def failing(folder, kind, restarts, *arguments):
    """Start a job of two ranks, the second of which fails before step 6; yield its process and run folder."""
    run = folder / kind
    script = [f"--max-restarts={restarts}", str(HERE / "failing_rank.py"), kind, "1", "6"]
    options = (f"hydra.run.dir={run}", *arguments)
    with torchrun(folder, 2, *options, script=script) as process:
        yield process, run


@pytest.fixture(scope="module", autouse=True)
def frozen(folder):
    """A job with a frozen rank, started before the other tests: it takes most of a minute to end."""
    with failing(folder, "frozen", 0, *SHARDED, f"sharding.timeout={TIMEOUT}") as job:
        yield job


def outcome(process, until="the end"):
    """Return the status and output of a failing job, and the seconds from the failure to its end or another event."""
    status, output = finish(process)
    times = {event: float(time) for event, time in re.findall(r"(\w+) at (\d{9,}\.\d+)", output)}
    times["the end"] = max(file.stat().st_mtime for file in process.files)
    return status, output, times[until] - min(times.values())


def assert_checkpoint_is_whole(folder, step):
    write_as_file(folder / "last.pt")
    assert load_checkpoint(folder / "last.pt")["step"] == step


@pytest.fixture(scope="module")
def raised(folder):
    """Run folder and outcome of a job in which a rank raised; it trains a graph network."""
    with failing(folder, "raising", 0, *SHARDED, "model=graph_network") as (process, run):
        return run, *outcome(process)


def test_a_rank_that_raises_ends_the_job_at_once_and_torchrun_reports_the_error(raised):
    run, status, output, seconds = raised
    assert status != 0, output
    assert seconds < BUSY, output
    report = output[output.index("Root Cause") :]
    assert "rank      : 1 " in report, output
    assert "RuntimeError: a bug on this rank only" in report, output
    assert_checkpoint_is_whole(run, 4)


def test_a_killed_rank_ends_all_at_once_and_a_restart_continues_with_the_sharding_of_the_run(
    folder, raised
):
    # the run of the rank that raised, which no option divides among ranks
    (folder / "killed").mkdir()
    shutil.copytree(raised[0] / "last", folder / "killed" / "last")
    shutil.copy(raised[0] / "metrics.jsonl", folder / "killed")
    with failing(folder, "killed", 1, *OF_TWO_RANKS, "resume=true") as (process, run):
        status, output, seconds = outcome(process, until="restarted")
    assert status == 0, output
    assert seconds < BUSY, output
    assert steps_in(run) == list(range(1, 13))
    assert (run / "scores.json").exists()
    assert "2 ranks, 2 of them for a model" in output, output
    config = load_values(run / "last", "config")
    assert config["model"]["processor"]["_target_"] == "anemoi_gt.nn.GNNProcessor"
    expected = {"strategy": "edges", "model": 2, "parameters": False, "timeout": 300.0}
    assert config["sharding"] == expected


def test_a_frozen_rank_ends_the_job_within_the_timeout_and_the_time_to_kill_it(frozen):
    process, run = frozen
    status, output, seconds = outcome(process)
    assert status != 0, output
    assert TIMEOUT <= seconds < TIMEOUT + KILLED_AFTER + BUSY, output
    assert "Timed out waiting" in output, output
    assert "forcefully exiting via 9" in output, output
    assert f"did not take part in time, sharding.timeout={TIMEOUT:g} s: it froze" in output, output
    assert_checkpoint_is_whole(run, 4)
