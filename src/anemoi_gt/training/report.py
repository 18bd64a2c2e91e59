"""What a run leaves behind for people: the scores against the baselines, as text and as JSON, and the picture."""

import json
import logging
from pathlib import Path

from torch import nn

from anemoi_gt.data.datasets import ForecastDataset
from anemoi_gt.training.picture import draw_picture
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
    (folder / "scores.json").write_text(json.dumps(as_records(scores), indent=2) + "\n", encoding="utf-8")
    log.info("scores of %d test forecasts, %g h:\n%s", len(test), test.lead_time, as_table(scores))
    draw_picture(folder / "forecast.png", test, forecast, scores, records)
    for name in ("forecast.png", "scores.json"):
        log.info("written: %s", folder / name)
    return scores
