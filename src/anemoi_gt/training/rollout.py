"""Autoregressive rollouts.

    state_0 = the present,  state_n = reference_n + change_mean + model(inputs_n) * change_std

`ForecastDataset.advance` makes inputs_n and reference_n from the states before n. The first step is the forecast that
training scores.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from anemoi_gt.data.forecast_dataset import ForecastDataset
from anemoi_gt.option_checks import check_integer
from anemoi_gt.training.scores import Errors, Score, predict


class Outcome(NamedTuple):
    """Forecast and truth of one rollout step, [N, V] in physical units; truth is None beyond the end of the data."""

    forecast: Tensor
    truth: Tensor | None


class RolloutScores(NamedTuple):
    """Scores of the rollouts from all samples, by lead time, and the sample of median error at the last lead time.

    The scores are of the model and of the baselines; their `samples` is the number of rollouts with a truth at that
    lead time. Lead times without any truth are left out.
    """

    scores: list[Score]
    median_sample: int


def roll_out(model: nn.Module, dataset: ForecastDataset, i: int, steps: int) -> list[Outcome]:
    """Roll out a model in evaluation mode from sample i of a data set; return one outcome per step, on the CPU.

    Raises ValueError if the data set does not support rollouts (`advance`), or i or steps (at least 1) is out of range.
    """
    check_integer("steps", steps)
    if not 0 <= i < len(dataset):
        raise ValueError(f"i must be a sample index in [0, {len(dataset)}), got {i}")
    return list(_outcomes(model, dataset, i, steps))


def _outcomes(model: nn.Module, dataset: ForecastDataset, i: int, steps: int) -> Iterator[Outcome]:
    forecasts = []
    for _ in range(steps):
        step = dataset.advance(i, forecasts)
        forecasts.append(dataset.add_change(step.reference, predict(model, step.inputs)))
        yield Outcome(forecasts[-1], step.truth)


def score_rollouts(model: nn.Module, dataset: ForecastDataset, steps: int) -> RolloutScores:
    """Roll out from every sample as `roll_out` does, and score the model and the baselines until the truth ends.

    Raises ValueError if the data set does not support rollouts; FloatingPointError if forecasts become infinite or NaN.
    """
    check_integer("steps", steps)
    errors: list[Errors] = []  # by lead time, as far as the truth reaches
    baselines = [dataset.baselines(n + 1) for n in range(steps)]
    for i in range(len(dataset)):
        for n, (forecast, truth) in enumerate(_outcomes(model, dataset, i, steps)):
            if truth is None:
                break
            if n == len(errors):
                errors.append(Errors(dataset, (n + 1) * dataset.lead_time))
            errors[n].add("model", i, forecast, truth)
            for name, baseline in baselines[n].items():
                errors[n].add(name, i, baseline(i), truth)
    scores = [score for each in errors for score in each.scores()]
    if (diverged := next((score for score in scores if not math.isfinite(score.rmse)), None)) is not None:
        raise FloatingPointError(
            f"rollouts must stay finite, got an RMSE of {diverged.rmse} at {diverged.lead_time:g} h: take fewer steps"
        )
    return RolloutScores(scores, errors[-1].median_sample("model"))


def rollout_table(scores: list[Score]) -> str:
    """Return the RMSE of rollouts as a text table: a row per variable and lead time, a column per forecast."""
    names = list(dict.fromkeys(score.forecast for score in scores))
    width = max(12, *map(len, names))
    cells = {(score.variable, score.lead_time, score.forecast): score for score in scores}
    lines = []
    for variable, units in dict.fromkeys((score.variable, score.units) for score in scores):
        heading = f"RMSE of {variable} [{units}]"
        lines.append("".join([heading, *(f" {name:>{width}}" for name in names), f" {'samples':>8}"]))
        for lead_time in dict.fromkeys(score.lead_time for score in scores):
            row = [cells[variable, lead_time, name] for name in names]
            figures = "".join(f" {score.rmse:{width}.4f}" for score in row)
            lines.append(f"{f'{lead_time:g} h':{len(heading)}}{figures} {row[0].samples:8}")
    return "\n".join(lines)
