"""The application under torchrun: one model on four ranks, stopped, continued as two models of two ranks each, under two torchruns, as on two
hosts.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from omegaconf import OmegaConf

from anemoi_gt import train
from anemoi_gt.distributed.launcher import VARIABLES
from distributed.ranks import ROOT, free_port

DEVICE = "cuda" if torch.cuda.device_count() >= 4 else "cpu"  # NCCL where all ranks have a GPU
ARGUMENTS = [
    *("data.grid_name=O4", "data.train_size=8", "data.valid_size=2", "data.test_size=2", "graph.refinement=1"),
    *("training.steps=16", "training.warmup_steps=1", "training.batch_size=2", f"training.device={DEVICE}"),
    *("training.valid_every=8", "training.log_every=1", "hydra.run.dir=run"),
]
PATIENCE = 120  # s, on a busy machine


class Host(NamedTuple):
    """What torchrun is told of the host that it starts ranks on."""

    options: tuple[str, ...]
    variables: dict[str, str]


ONE_HOST = Host(("--standalone",), {})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder from which the application starts."""
    place = tmp_path_factory.mktemp("application")
    site = place / "site" / "anemoi_gt"
    site.mkdir(parents=True)
    for part in (ROOT / "src" / "anemoi_gt").iterdir():
        (site / part.name).symlink_to(part)
    (site / "configs").symlink_to(ROOT / "configs")
    return place


@contextmanager
def torchrun(place, ranks, *arguments, host=ONE_HOST):
    """Start the application on so many ranks of a host; the process of torchrun, which is at its end behind the block."""
    command = [sys.executable, "-m", "torch.distributed.run", *host.options, f"--nproc-per-node={ranks}"]
    environment = os.environ | {"PYTHONPATH": str(place / "site"), "OMP_NUM_THREADS": "1"} | host.variables
    command += ["-m", "anemoi_gt.train", *ARGUMENTS, *arguments]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=place, **pipes) as process:
        try:
            yield process
        finally:
            process.terminate()


def two_hosts():
    """Two of this one, with two of its GPUs each where it has them."""
    meeting = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    return [
        Host((*meeting, f"--node-rank={host}"), {"NCCL_HOSTID": f"host {host}", "CUDA_VISIBLE_DEVICES": gpus})
        for host, gpus in enumerate(("0,1", "2,3"))
    ]


def steps_in(folder):
    """The steps of the training records in a run's folder."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["step"] for record in map(json.loads, lines) if record["split"] == "train"]


def ranks_of(process):
    """The processes that torchrun started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, children))


@pytest.fixture(scope="module")
def stopped(place):
    """What torchrun said of one model on four ranks, of which one was told to stop after its first steps."""
    with torchrun(place, 4, "sharding=edges", "sharding.model=4") as process:
        end = time.monotonic() + PATIENCE
        while not steps_in(place / "run") and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(ranks_of(process)[2], signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE)
    return said


@pytest.fixture(scope="module")
def continued(place, stopped):
    """How two models ended, each on two ranks of a host, that continued the stopped run; and the steps that had been taken."""
    before = steps_in(place / "run")
    with ExitStack() as hosts:
        arguments = ("sharding=edges", "sharding.model=2", "resume=true")
        processes = [hosts.enter_context(torchrun(place, 2, *arguments, host=host)) for host in two_hosts()]
        said = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    return [process.returncode for process in processes], said, before


def test_a_signal_to_one_rank_stops_all_with_one_message_that_names_the_folder(place, stopped):
    messages = re.findall(r"^anemoi_gt.train: stopped by SIGTERM after step (\d+), .*$", stopped, re.MULTILINE)
    assert len(messages) == 1 and steps_in(place / "run")[-1] == int(messages[0]), stopped
    assert f"which is saved: resume=true hydra.run.dir={place / 'run'} continues from there\n" in stopped


def test_ranks_that_a_signal_stopped_exit_with_its_status(stopped):
    statuses = re.findall(r"exitcode *: (-?\d+)", stopped)
    assert statuses and set(statuses) == {"143"}, stopped


def test_two_hosts_continue_what_four_ranks_of_one_began(place, continued):
    statuses, said, before = continued
    assert statuses == [0, 0], said
    assert 0 < len(before) < 16 and steps_in(place / "run") == list(range(1, 17))


def test_a_run_on_ranks_leaves_what_one_process_leaves(place, continued):
    left = {path.name for path in (place / "run").iterdir()}
    assert left == {"best", "last", "best.pt", "metrics.jsonl", "scores.json", "forecast.png", "train.log", ".hydra"}
    assert {path.name for path in place.iterdir()} == {"site", "run"}


def test_the_bar_of_one_rank_counts_the_samples_of_all_models(continued):
    _, (first, other), _ = continued
    assert re.findall(r"(\d+)/32 ", first)[-1] == "32", first
    assert not re.findall(r"\d+/32 ", other), other


def test_a_config_that_differs_between_ranks_is_found_at_the_start(place):
    with torchrun(place, 2, "training.seed='${oc.decode:${oc.env:RANK}}'", "hydra.run.dir=other") as process:
        _, said = process.communicate(timeout=PATIENCE)
    problem = "anemoi_gt.train: training.seed must be the same on all ranks, got 1 on rank 1 and 0 on rank 0\n"
    assert process.returncode != 0 and said.count("must be the same") == said.count(problem) == 1, said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["training.batch_size=3"], "training.batch_size must be a multiple of the 2 ranks of the data axis, got 3"),
        (
            ["sharding=edges", "sharding.model=2", "model.mapper_chunks=2"],
            "model.mapper_chunks must be 1 under torchrun, got 2: a rank's part is a piece already",
        ),
    ],
    ids=["batch", "chunks"],
)
def test_what_ranks_cannot_share_is_refused_before_anything_is_made(place, arguments, sentence):
    # The data set cannot be made either, which nobody comes to say.
    with torchrun(place, 2, *arguments, "data.grid_name=nowhere", "hydra.run.dir=unshared") as process:
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert re.findall(r"^anemoi_gt.train: (.*)$", said, re.MULTILINE) == [sentence], said


def test_one_process_cannot_divide_a_model(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    sharding = {"_target_": "anemoi_gt.distributed.ShardingConfig", "strategy": "edges", "model": 2}
    with pytest.raises(ValueError, match="sharding=edges must be started on several ranks: torchrun"):
        train.prepare(OmegaConf.create({"sharding": sharding, "explain": None}))
