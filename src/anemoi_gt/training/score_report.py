"""Reports of a model: scores beside the baselines, as text and JSON, and plots."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

from torch import nn

from anemoi_gt.data.forecast_dataset import ForecastDataset
from anemoi_gt.training.atomic_write import atomic_write
from anemoi_gt.training.plots import draw_rollout_plot, draw_training_plot
from anemoi_gt.training.rollout import roll_out, rollout_table, score_rollouts
from anemoi_gt.training.scores import Score, as_table, measure, model_forecast

log = logging.getLogger(__name__)


def write_report(folder: Path, model: nn.Module, test: ForecastDataset, records: list[dict]) -> None:
    """Score a model and the baselines on the test samples, and plot the forecast of median error.

    Writes `scores.json`, with the model's scores first, and `forecast.png` to an existing folder. The model is in
    evaluation mode; `records` are the run's metrics.
    """
    forecast = model_forecast(model, test)
    errors = measure({"model": forecast, **test.baselines()}, test)
    scores, sample = errors.scores(), errors.median_sample("model")
    write_scores(folder / "scores.json", scores)
    log.info("scores of %d test forecasts, %g h:\n%s", len(test), test.lead_time, as_table(scores))
    draw_training_plot(folder / "forecast.png", test, sample, forecast(sample), scores, records)
    log.info("written: %s\nwritten: %s", folder / "forecast.png", folder / "scores.json")


def write_rollout_report(folder: Path, model: nn.Module, test: ForecastDataset, steps: int) -> None:
    """Score rollouts of `steps` steps from the test samples, and plot the one of median error.

    Writes `rollout.json`, by lead time, and `rollout.png` to an existing folder. The model is in evaluation mode.
    Raises ValueError if the data set does not support rollouts.
    """
    scores, sample = score_rollouts(model, test, steps)
    write_scores(folder / "rollout.json", scores)
    log.info("rollouts of %d steps from %d test samples:\n%s", steps, len(test), rollout_table(scores))
    outcomes = roll_out(model, test, sample, len({score.lead_time for score in scores}))
    draw_rollout_plot(folder / "rollout.png", test, sample, outcomes, scores)
    log.info("written: %s\nwritten: %s", folder / "rollout.png", folder / "rollout.json")


def write_scores(path: Path, scores: list[Score]) -> None:
    """Write scores as a JSON list of records."""
    with atomic_write(path) as file:
        file.write((json.dumps([asdict(score) for score in scores], indent=2) + "\n").encode())
