"""Reports of a model: scores beside the baselines, as text and JSON, and plots."""

import json
import logging
from pathlib import Path

from torch import nn

from anemoi_gt.data.datasets import ForecastDataset
from anemoi_gt.training.atomic_write import atomic_write
from anemoi_gt.training.plots.rollout_plot import draw_rollout_plot
from anemoi_gt.training.plots.training_plot import draw_training_plot
from anemoi_gt.training.rollout import roll_out, rollout_table, score_rollouts
from anemoi_gt.training.scores import Score, as_records, as_table, model_forecast, score

log = logging.getLogger(__name__)


def write_report(folder: Path, model: nn.Module, test: ForecastDataset, records: list[dict]) -> list[Score]:
    """Score a model and the baselines on the test samples, and plot one forecast; return the scores, the model's first.

    Writes `scores.json` and `forecast.png` to an existing folder. The model is in evaluation mode; `records` are the
    run's metrics.
    """
    forecast = model_forecast(model, test)
    scores = score({"model": forecast, **test.baselines()}, test)
    write_scores(folder / "scores.json", scores)
    log.info("scores of %d test forecasts, %g h:\n%s", len(test), test.lead_time, as_table(scores))
    draw_training_plot(folder / "forecast.png", test, forecast, scores, records)
    _log_files(folder, "forecast.png", "scores.json")
    return scores


def write_rollout_report(folder: Path, model: nn.Module, test: ForecastDataset, steps: int) -> list[Score]:
    """Score rollouts of `steps` steps from the test samples, and plot one; return the scores by lead time.

    Writes `rollout.json` and `rollout.png` to an existing folder. The model is in evaluation mode. Raises ValueError if
    the data set does not support rollouts.
    """
    scores, sample = score_rollouts(model, test, steps)
    write_scores(folder / "rollout.json", scores)
    log.info("rollouts of %d steps from %d test samples:\n%s", steps, len(test), rollout_table(scores))
    outcomes = roll_out(model, test, sample, len({score.lead_time for score in scores}))
    draw_rollout_plot(folder / "rollout.png", test, sample, outcomes, scores)
    _log_files(folder, "rollout.png", "rollout.json")
    return scores


def write_scores(path: Path, scores: list[Score]) -> None:
    """Write scores as a JSON list of records."""
    with atomic_write(path) as file:
        file.write((json.dumps(as_records(scores), indent=2) + "\n").encode())


def _log_files(folder: Path, *names: str) -> None:
    for name in names:
        log.info("written: %s", folder / name)
