"""Evaluation of a checkpoint: the scores of the end of training, from the checkpoint alone."""

import json
import logging
import sys
from copy import copy

import pytest
import torch

from anemoi_gt import evaluate, train
from anemoi_gt.data.datasets import ForecastDataset
from anemoi_gt.data.sphere import SphereDataset
from anemoi_gt.training.checkpoint import load_checkpoint, save_checkpoint

SMALL = [
    *("data.grid_name=O4", "data.train_size=8", "data.valid_size=2", "data.test_size=3", "graph.refinement=1"),
    *("model.num_layers=1", "training.steps=6", "training.warmup_steps=1", "training.valid_every=2"),
    *("training.learning_rate=0.1", "training.device=cpu"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a small run."""
    folder = tmp_path_factory.mktemp("trained")
    root = logging.getLogger()
    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((root, "handlers"), (root, "level"), (logging, "raiseExceptions")):
            patch.setattr(place, name, copy(getattr(place, name)))  # so that they are put back
        patch.setattr(sys, "argv", ["anemoi_gt.train", *SMALL, f"hydra.run.dir={folder}"])
        train.main()
    return folder


@pytest.fixture
def evaluated(monkeypatch, logging_as_before, tmp_path):
    """Evaluate with arguments; returns the folder of the results."""

    def evaluated(*arguments):
        monkeypatch.setattr(sys, "argv", ["anemoi_gt.evaluate", *arguments, f"hydra.run.dir={tmp_path}"])
        evaluate.main()
        return tmp_path

    return evaluated


@pytest.fixture
def refusal(evaluated, capsys):
    """Evaluate with arguments that are refused; returns the last line that it says."""

    def refusal(*arguments):
        with pytest.raises(SystemExit) as exit_:
            evaluated(*arguments)
        assert exit_.value.code == 1
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error.splitlines()[-1]

    return refusal


def scores(folder, name="scores.json"):
    return json.loads((folder / name).read_text())


def test_the_scores_of_the_best_checkpoint_are_those_of_the_end_of_training(trained, evaluated, capsys):
    folder = evaluated(f"checkpoint={trained / 'best.pt'}")
    assert (folder / "scores.json").read_bytes() == (trained / "scores.json").read_bytes()
    assert (folder / "forecast.png").read_bytes() == (trained / "forecast.png").read_bytes()
    assert f"{scores(trained)[0]['rmse']:.4f}" in capsys.readouterr().out
    assert not (folder / "rollout.json").exists()


def test_the_weights_are_the_averaged_ones_of_the_checkpoint_that_is_named(
    trained, evaluated, without_pictures, tmp_path
):
    state = load_checkpoint(trained / "best.pt")
    for part, value in (("model", float("nan")), ("average", 0.0)):
        for weights in state[part].values():
            weights.fill_(value)
    save_checkpoint(tmp_path / "zero.pt", state)
    model, persistence = scores(evaluated(f"checkpoint={tmp_path / 'zero.pt'}"))
    assert model["rmse"] == persistence["rmse"]  # no change is forecast


def test_a_checkpoint_alone_is_enough(trained, evaluated, tmp_path):
    checkpoint = tmp_path / "elsewhere" / "model.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes((trained / "best.pt").read_bytes())
    folder = evaluated(f"checkpoint={checkpoint}")
    assert scores(folder) == scores(trained) and (folder / "forecast.png").stat().st_size > 10_000


def test_a_value_on_the_command_line_changes_that_of_the_run(trained, evaluated, without_pictures):
    assert scores(evaluated(f"checkpoint={trained / 'best.pt'}", "data.test_size=2"))[0]["samples"] == 2


def test_a_rollout_leaves_scores_by_lead_time_and_a_picture(trained, evaluated, without_pictures, capsys):
    folder = evaluated(f"checkpoint={trained / 'best.pt'}", "rollout=3")
    rollout = scores(folder, "rollout.json")
    assert [(s["forecast"], s["lead_time"]) for s in rollout] == [
        (name, lead_time) for lead_time in (12.0, 24.0, 36.0) for name in ("model", "persistence")
    ]
    assert rollout[:2] == scores(folder)
    assert f"written: {folder / 'rollout.png'}" in capsys.readouterr().out


def test_a_checkpoint_that_ranks_left_in_a_folder_is_refused_with_the_way_to_a_file(refusal, tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / ".metadata").write_bytes(b"of ranks")
    said = refusal(f"checkpoint={tmp_path / 'best.pt'}")
    assert said.startswith(
        f"anemoi_gt.evaluate: a checkpoint must be one file, {tmp_path / 'best'} is that of several ranks"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=nowhere.pt"], "no checkpoint nowhere.pt: give the last.pt or best.pt"),
        ([], "checkpoint must be given, as checkpoint=VALUE"),
        (["checkpoint={trained}/scores.json"], "a checkpoint must be a whole file that training wrote, "),
        (["checkpoint=null"], "checkpoint must name one file, got 'checkpoint=null'"),
        (["checkpoint=run (1)/best.pt"], "checkpoint must name one file, got 'checkpoint=run (1)/best.pt'"),
        (["checkpoint=a.pt,b.pt"], "checkpoint must name one file, got 'checkpoint=a.pt,b.pt'"),
        (["checkpoint={trained}/best.pt", "rollout=0"], "rollout must be a whole number of steps, at least 1, got 0"),
        (
            ["checkpoint={trained}/best.pt", "rollout=far"],
            "rollout must be a whole number of steps, at least 1, got 'far'",
        ),
        (
            ["checkpoint={trained}/best.pt", "model.channels=64"],
            "the checkpoint's weights must be those of the configured",
        ),
    ],
)
def test_a_mistake_is_one_sentence(trained, refusal, arguments, message):
    sentence = refusal(*(argument.format(trained=trained) for argument in arguments))
    assert sentence.startswith("anemoi_gt.evaluate: ") and message in sentence


def test_torchrun_is_refused_for_one_process_does_it_all(refusal, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert "one process does it all, torchrun would start several" in refusal("checkpoint=best.pt")


def test_a_rollout_that_the_data_set_does_not_know_is_refused_before_scoring(trained, refusal, monkeypatch, tmp_path):
    monkeypatch.setattr(SphereDataset, "advance", ForecastDataset.advance)
    sentence = refusal(f"checkpoint={trained / 'best.pt'}", "rollout=2")
    assert "a rollout needs a data set whose inputs follow from forecasts, SphereDataset has none" in sentence
    assert not (tmp_path / "scores.json").exists()


def test_a_part_of_a_checkpoint_is_refused(trained, refusal, tmp_path):
    part = tmp_path / "part.pt"
    part.write_bytes((trained / "best.pt").read_bytes()[:-1000])
    assert "a checkpoint must be a whole file" in refusal(f"checkpoint={part}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"average": {}}, "a checkpoint must hold the config of its run"),
        (torch.zeros(2), "a checkpoint must hold a dict of states"),
    ],
)
def test_what_others_saved_is_refused(content, message, refusal, tmp_path):
    save_checkpoint(tmp_path / "other.pt", content)
    assert message in refusal(f"checkpoint={tmp_path / 'other.pt'}")
