"""Evaluation: the scores of the end of training, from nothing but the checkpoint."""

import json
import sys
from functools import partial

import pytest
import torch
from support.applications import logging_as_before
from support.picture import assert_every_map_has_content

from anemoi_gt.app import evaluate_command as evaluate
from anemoi_gt.app import train_command as train
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.datasets.sphere_advection import SphereDataset
from anemoi_gt.app.training.run_files import load_checkpoint, save_checkpoint

from . import conftest

pytestmark = pytest.mark.application

RUN = ("training.steps=6", "training.valid_every=2", "training.learning_rate=0.1")
SMALL = [*conftest.SMALL, *RUN]


def write_values(path, dataset, sample, forecast, *values):
    path.write_text(repr((dataset.title(sample), forecast.tolist(), *values)))


@pytest.fixture(scope="module", autouse=True)
def values_in_place_of_plots():
    """Write what would be plotted: drawing it takes longer than a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "draw_training_plot", write_values)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a small run, and return its folder."""
    folder = tmp_path_factory.mktemp("trained")
    with logging_as_before(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["anemoi_gt.train", *SMALL, f"hydra.run.dir={folder}"])
        train.main()
    return folder


@pytest.fixture
def evaluated(start, tmp_path):
    return lambda *arguments: start(evaluate, *arguments, f"hydra.run.dir={tmp_path}") or tmp_path


@pytest.fixture
def refusal(evaluated, error_line):
    return partial(error_line, evaluated)


NO_FILES = "null", "run (1)/best.pt", "a.pt,b.pt"


def scores(folder, name="scores.json"):
    return json.loads((folder / name).read_text())


def test_scores_and_plot_of_the_best_checkpoint_equal_the_end_of_training(
    trained, evaluated, capsys
):
    folder = evaluated(f"checkpoint={trained / 'best.pt'}")
    assert (folder / "scores.json").read_bytes() == (trained / "scores.json").read_bytes()
    assert (folder / "forecast.png").read_bytes() == (trained / "forecast.png").read_bytes()
    assert f"{scores(trained)[0]['rmse']:.4f}" in capsys.readouterr().out
    assert not (folder / "rollout.json").exists()


def test_weights_are_the_averaged_ones_of_a_checkpoint_that_needs_no_other_file(
    trained, evaluated, tmp_path
):
    state = load_checkpoint(trained / "best.pt")
    for part, value in (("model", float("nan")), ("average", 0.0)):
        for weights in state[part].values():
            weights.fill_(value)
    save_checkpoint(tmp_path / "zero.pt", state)
    model, persistence = scores(evaluated(f"checkpoint={tmp_path / 'zero.pt'}"))
    assert model["rmse"] == persistence["rmse"]  # a forecast of no change


def test_command_line_overrides_the_config_of_the_run(trained, evaluated):
    assert (
        scores(evaluated(f"checkpoint={trained / 'best.pt'}", "data.test_size=2"))[0]["samples"]
        == 2
    )


def test_rollout_writes_scores_by_lead_time_and_a_plot_whose_maps_have_content(
    trained, evaluated, capsys
):
    folder = evaluated(f"checkpoint={trained / 'best.pt'}", "rollout=4")
    rollout = scores(folder, "rollout.json")
    lead_times = (12.0, 24.0, 36.0, 48.0)
    expected = [(name, time) for time in lead_times for name in ("model", "persistence")]
    assert [(s["forecast"], s["lead_time"]) for s in rollout] == expected
    assert rollout[:2] == scores(folder)
    assert f"written: {folder / 'rollout.png'}" in capsys.readouterr().out
    assert_every_map_has_content(folder / "rollout.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=nowhere.pt"], "no checkpoint nowhere.pt: give the last.pt or best.pt"),
        (["checkpoint={trained}"], "give the last.pt or best.pt that a run left in its folder"),
        ([], "checkpoint must be given, as checkpoint=VALUE"),
        (
            ["checkpoint={trained}/scores.json"],
            "a checkpoint must be a whole file that training wrote, ",
        ),
        *(
            ([f"checkpoint={name}"], f"checkpoint must name one file, got 'checkpoint={name}'")
            for name in NO_FILES
        ),
        (["checkpoint={trained}/best.pt", "rollout=0"], "rollout must be at least 1, got 0"),
        (["checkpoint={trained}/best.pt", "rollout=far"], "rollout must be an integer, got 'far'"),
        (
            ["checkpoint={trained}/best.pt", "model.channels=64"],
            "the checkpoint's weights must fit the config",
        ),
    ],
)
def test_invalid_arguments_end_with_one_sentence(trained, refusal, arguments, message):
    sentence = refusal(*(argument.format(trained=trained) for argument in arguments))
    assert sentence.startswith("anemoi_gt.evaluate: ")
    assert message in sentence


def test_torchrun_raises(refusal, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert "evaluate runs in one process, without torchrun" in refusal("checkpoint=best.pt")


def test_data_set_without_rollouts_raises_before_scoring(trained, refusal, monkeypatch, tmp_path):
    monkeypatch.setattr(SphereDataset, "advance", ForecastDataset.advance)
    sentence = refusal(f"checkpoint={trained / 'best.pt'}", "rollout=2")
    assert (
        "a rollout needs a data set that implements advance(), SphereDataset does not" in sentence
    )
    assert not (tmp_path / "scores.json").exists()


def write_sharded(path, trained):
    path.with_suffix("").mkdir()
    (path.with_suffix("") / ".metadata").write_bytes(b"of ranks")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            write_sharded,
            "the checkpoint must be one file, got the folder {folder}/checkpoint of several ranks",
        ),
        (
            lambda path, trained: path.write_bytes((trained / "best.pt").read_bytes()[:-1000]),
            "must be a whole file",
        ),
        (
            lambda path, trained: save_checkpoint(path, {"average": {}}),
            "must contain the config of its run",
        ),
        (
            lambda path, trained: save_checkpoint(path, torch.zeros(2)),
            "a checkpoint must hold a dict of states",
        ),
    ],
    ids=["sharded", "truncated", "without config", "tensor"],
)
def test_file_that_is_no_checkpoint_of_a_run_raises(trained, refusal, write, message, tmp_path):
    write(tmp_path / "checkpoint.pt", trained)
    assert message.format(folder=tmp_path) in refusal(f"checkpoint={tmp_path / 'checkpoint.pt'}")
