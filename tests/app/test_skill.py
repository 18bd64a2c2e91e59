"""Skill: shortened runs of the application's configs learn to forecast.

The bounds are about 10% above what these runs reach, which is less than the full runs do.
"""

import json
from contextlib import ExitStack

import pytest
from hydra import compose, initialize_config_module

from anemoi_gt.app.objects import build
from anemoi_gt.app.train_command import train
from anemoi_gt.app.training import Trainer

pytestmark = [pytest.mark.application, pytest.mark.nightly]


@pytest.fixture
def scores_of_run(without_pictures, tmp_path):
    """Train from the configs, and return the RMSE of each forecast on the test samples by name."""

    def scores_of_run(*overrides):
        with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
            config = compose(
                "train", ["training.device=cpu", "training.valid_every=100", *overrides]
            )
        run = build(config)
        trainer = Trainer(run.model, run.splits, run.training, tmp_path, {})
        train(trainer, None, ExitStack())
        return {
            score["forecast"]: score["rmse"]
            for score in json.loads((tmp_path / "scores.json").read_text())
        }

    return scores_of_run


def test_a_short_run_on_the_sphere_halves_the_error_of_persistence(scores_of_run):
    rmse = scores_of_run(
        "data.grid_name=O8", "data.train_size=512", "data.valid_size=16", "training.steps=400"
    )
    assert rmse["model"] < rmse["persistence"] / 2


def test_a_short_run_on_real_weather_beats_persistence_and_yesterday(era5_path, scores_of_run):
    rmse = scores_of_run("data=era5_uk", f"data.path={era5_path}", "training.steps=100")
    assert rmse["persistence"] == pytest.approx(2.79, abs=0.005)
    assert rmse["same hour yesterday"] == pytest.approx(1.54, abs=0.005)
    assert rmse["model"] < 0.5 * rmse["persistence"]
    assert rmse["model"] < 0.95 * rmse["same hour yesterday"]
