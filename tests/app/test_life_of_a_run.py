"""A run on a user's data: started, resumed, extended, fine-tuned and evaluated by short commands."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray
from omegaconf import OmegaConf
from support.own_data import SMALL_RUN, weather_file
from support.pages import ROOT

from anemoi_gt.app import evaluate_command as evaluate
from anemoi_gt.app import objects
from anemoi_gt.app import rollout_command as rollout
from anemoi_gt.app import train_command as train
from anemoi_gt.app.training.run_files import load_checkpoint

pytestmark = pytest.mark.application


@pytest.fixture
def workdir(tmp_path, monkeypatch, without_pictures):
    """A working directory with a NetCDF file."""
    monkeypatch.chdir(tmp_path)
    weather_file().to_netcdf("weather.nc")
    return tmp_path


@pytest.fixture
def begun(trained):
    """The folder of a run."""
    return trained / "run"


def state(folder):
    return load_checkpoint(folder / "last.pt")


def test_a_run_is_resumed_by_nothing_but_its_folder_and_with_more_steps(begun, start, capsys):
    config = state(begun)["config"]
    start(train, "resume=true", f"hydra.run.dir={begun}")
    assert state(begun)["config"] == config
    assert "continues after step 4" in capsys.readouterr().out
    start(train, "resume=true", f"hydra.run.dir={begun}", "training.steps=6")
    assert state(begun)["step"] == 6
    assert state(begun)["config"]["training"]["steps"] == 6
    lines = map(json.loads, (begun / "metrics.jsonl").read_text().splitlines())
    rates = {line["step"]: line["learning_rate"] for line in lines if line["split"] == "train"}
    assert rates[6] == pytest.approx(1e-3 * 6 / 7)  # by the longer schedule
    # the complete command is valid, too
    start(train, *SMALL_RUN, "training.steps=6", "resume=true", f"hydra.run.dir={begun}")


def test_a_resumed_run_plots_the_variables_that_it_was_started_with(workdir, start):
    def plots():
        return OmegaConf.load("run/.hydra/config.yaml").plots.variables

    run = ("resume=true", "hydra.run.dir=run")
    start(train, *SMALL_RUN, "hydra.run.dir=run", "plots.variables=[tp,t2m]")
    start(train, *run)
    assert plots() == ["tp", "t2m"]
    start(train, *run, "plots.variables=[t2m]")
    assert plots() == ["t2m"]


def test_a_continued_run_refuses_fewer_steps_and_another_model(begun, start, error_line):
    arguments = ("resume=true", f"hydra.run.dir={begun}")
    error = error_line(start, train, *arguments, "training.steps=3")
    assert "was written with training.steps=4, not 3" in error
    error = error_line(start, train, *arguments, "model.channels=16")
    assert "was written with model.channels=8, not 16" in error


def test_fine_tuning_starts_from_weights_and_names_those_that_do_not_fit(begun, start, capsys):
    capsys.readouterr()
    start(train, *SMALL_RUN, "init_from=run/best.pt", "hydra.run.dir=runs/b", "data.input_steps=1")
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("weights loaded from run/best.pt"))
    names = re.findall(r"([\w.]+) \[8, \d+\], \[8, \d+\] in the file", line)
    assert names == ["encoder.data.emb_nodes_src.weight", "decoder.data.emb_nodes_dst.weight"]
    before = load_checkpoint(begun / "best.pt")["average"]
    config = state(Path("runs/b"))["config"]
    config["training"] = config["training"] | {"device": "cpu"}
    config = OmegaConf.create(config | {"init_from": "run/best.pt"})
    model = train.build_model(config, objects.build(config).splits)
    weights = model.state_dict()
    for name in before:
        if "emb_nodes" not in name:
            assert (weights[name] == before[name]).all(), name


def test_evaluation_and_rollouts_from_another_folder(begun, start, monkeypatch):
    (begun.parent / "elsewhere").mkdir()
    monkeypatch.chdir(begun.parent / "elsewhere")
    start(evaluate, "checkpoint=../run/best.pt", "hydra.run.dir=scores")
    expected = json.loads((begun / "scores.json").read_text())
    assert json.loads(Path("scores/scores.json").read_text()) == expected
    start(rollout, "checkpoint=../run/best.pt", "steps=3", "sample=0", "hydra.run.dir=forecast")
    with xarray.open_dataset("forecast/rollout.nc", engine="netcdf4") as forecast:
        assert forecast.t2m.dims == ("time", "latitude", "longitude")
        assert forecast.t2m.attrs["units"] == "K"
        assert forecast.sizes["time"] == 3
        assert forecast.title.endswith("+ 6 h, 3 steps")
        assert abs(forecast.t2m - 280).max() < 50
        assert np.isclose(forecast.latitude[0], 58)


def test_a_rollout_without_steps_or_sample_is_refused(begun, start, error_line):
    arguments = (start, rollout, "checkpoint=run/best.pt")
    assert "steps must be at least 1, got 0" in error_line(*arguments, "steps=0")
    error = error_line(*arguments, "sample=9")
    assert "sample must be one of the 3 test samples, -1 the last, got 9" in error


def test_your_own_configs_and_their_target_are_found(workdir, start, monkeypatch):
    (workdir / "conf" / "data").mkdir(parents=True)
    (workdir / "conf" / "data" / "mine.yaml").write_text("_target_: my_weather.splits\n")
    (workdir / "my_weather.py").write_text(
        "from anemoi_gt.app.datasets.field_dataset import field_data\n\n\ndef splits():\n    return "
        "field_data('weather.nc')\n"
    )
    monkeypatch.syspath_prepend("")
    start(train, "--config-dir", "conf", "data=mine", *SMALL_RUN[2:])
    (folder,) = Path("outputs/mine").iterdir()
    assert state(folder)["step"] == 4


@pytest.mark.parametrize("folder", ["outputs", "a/file"])
def test_a_folder_that_cannot_be_created_is_reported_in_one_sentence(
    workdir, start, error_line, folder
):
    (workdir / Path(folder).parts[0]).write_text("a file")
    arguments = [] if folder == "outputs" else [f"hydra.run.dir={folder}"]
    error = error_line(start, train, *arguments)
    assert re.fullmatch(r"anemoi_gt.train: \[Errno \d+\] (File exists|Not a directory): .*", error)


INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT

class Interrupt:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from anemoi_gt_command import main
main()
"""


@pytest.mark.process
def test_an_interrupt_while_packages_are_imported_prints_nothing():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", INTERRUPTED, "train"]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert result.returncode == -signal.SIGINT
    assert result.stderr == b""
