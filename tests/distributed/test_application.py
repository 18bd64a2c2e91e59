import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from anemoi_gt import train
from anemoi_gt.distributed.start import TORCHRUN
from distributed.ranks import ROOT

ARGUMENTS = [
    *("data.grid_name=O4", "data.train_size=8", "data.valid_size=2", "data.test_size=2", "graph.refinement=1"),
    *("training.steps=4", "training.warmup_steps=1", "training.batch_size=2", "training.device=cpu"),
    *("training.valid_every=2", "training.log_every=1", "hydra.run.dir=run"),
]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """Run the application on two ranks; returns how it ended and the folder that it ran in."""
    place = tmp_path_factory.mktemp("application")
    site = place / "site" / "anemoi_gt"
    site.mkdir(parents=True)
    for part in (ROOT / "src" / "anemoi_gt").iterdir():
        (site / part.name).symlink_to(part)
    (site / "configs").symlink_to(ROOT / "configs")

    def run(*arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = os.environ | {"PYTHONPATH": str(place / "site"), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [*command, "-m", "anemoi_gt.train", *ARGUMENTS, *arguments],
            env=environment,
            cwd=place,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return ended, place / "run"

    return run


def test_torchrun_trains_one_model_on_two_ranks_and_continues_it(torchrun):
    ended, folder = torchrun("sharding=edges", "sharding.model=2")
    assert ended.returncode == 0, ended.stderr
    left = {path.name for path in folder.iterdir()}
    assert left == {"best", "last", "best.pt", "metrics.jsonl", "scores.json", "forecast.png", "train.log", ".hydra"}
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 2, 3, 4, 4]
    assert {path.name for path in folder.parent.iterdir()} == {"site", "run"}
    refused, _ = torchrun("sharding=edges", "sharding.model=2")
    assert refused.returncode != 0 and refused.stderr.count("holds a run: resume=true continues it") == 1, (
        refused.stderr
    )


def test_one_process_cannot_divide_a_model(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    sharding = {"_target_": "anemoi_gt.distributed.ShardingConfig", "strategy": "edges", "model": 2}
    with pytest.raises(ValueError, match="sharding=edges must be started on several ranks: torchrun"):
        train.prepare(OmegaConf.create({"sharding": sharding}))
