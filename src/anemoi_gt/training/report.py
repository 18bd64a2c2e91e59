"""What a run leaves behind for people: the scores against the baselines, as text and as JSON, and the picture."""

import json
import logging
from pathlib import Path

from torch import nn

from anemoi_gt.data.datasets import ForecastDataset
from anemoi_gt.training.atomic_write import atomic_write
from anemoi_gt.training.plots.rollout_plot import draw_rollout
from anemoi_gt.training.plots.training_plot import draw_picture
from anemoi_gt.training.rollout import roll_out, rollout_table, score_rollouts
from anemoi_gt.training.scores import Score, as_records, as_table, model_forecast, score

log = logging.getLogger(__name__)


def write_report(folder: Path, model: nn.Module, test: ForecastDataset, records: list[dict]) -> list[Score]:
    """Score a model on the test samples beside the baselines, and draw one of its forecasts.

    Parameters
    ----------
    folder : Path
        Gets `scores.json` and `forecast.png`; it exists.
    model : nn.Module
        In evaluation mode.
    test : ForecastDataset
        The test samples.
    records : list of dict
        The run's metrics.

    Returns
    -------
    list of Score
        Those of the model first.
    """
    forecast = model_forecast(model, test)
    scores = score({"model": forecast, **test.baselines()}, test)
    write_scores(folder / "scores.json", scores)
    log.info("scores of %d test forecasts, %g h:\n%s", len(test), test.lead_time, as_table(scores))
    draw_picture(folder / "forecast.png", test, forecast, scores, records)
    _name_files(folder, "forecast.png", "scores.json")
    return scores


def write_rollout_report(folder: Path, model: nn.Module, test: ForecastDataset, steps: int) -> list[Score]:
    """Score the rollouts from the test samples at each lead time, and draw one of them.

    Parameters
    ----------
    folder : Path
        Gets `rollout.json` and `rollout.png`; it exists.
    model : nn.Module
        In evaluation mode.
    test : ForecastDataset
        The test samples.
    steps : int
        How many lead times to go.

    Returns
    -------
    list of Score
        Lead time by lead time, those of the model first.

    Raises
    ------
    ValueError
        If the data set's inputs do not follow from forecasts.
    """
    scores, sample = score_rollouts(model, test, steps)
    write_scores(folder / "rollout.json", scores)
    log.info("rollouts of %d steps from %d test samples:\n%s", steps, len(test), rollout_table(scores))
    outcomes = [outcome for outcome in roll_out(model, test, sample, steps) if outcome.truth is not None]
    draw_rollout(folder / "rollout.png", test, sample, outcomes, scores)
    _name_files(folder, "rollout.png", "rollout.json")
    return scores


def write_scores(path: Path, scores: list[Score]) -> None:
    """Write scores as JSON, one record each."""
    with atomic_write(path) as file:
        file.write((json.dumps(as_records(scores), indent=2) + "\n").encode())


def _name_files(folder: Path, *names: str) -> None:
    for name in names:
        log.info("written: %s", folder / name)
