"""Rollouts: forecasts that go on from forecasts, lead time after lead time.

    state_0 = the present,  state_n = reference_n + change_mean + model(inputs_n) * change_std

where inputs_n and reference_n are made from the states before n and from nothing that comes later; the data set makes
them (`ForecastDataset.advance`). The first step is the forecast that training scores.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.data.datasets import ForecastDataset
from anemoi_gt.option_checks import check_integer
from anemoi_gt.training.scores import Errors, Score, place_of_median


class Outcome(NamedTuple):
    """What one step of a rollout came to, [N, V] in physical units; truth is None where the data end before."""

    forecast: Tensor
    truth: Tensor | None


class RolloutScores(NamedTuple):
    """How good the rollouts from all samples of a data set are.

    Attributes
    ----------
    scores : list of Score
        Lead time by lead time, those of the model and of persistence; `samples` says how many rollouts had a truth there.
        A lead time where none had is left out.
    median_sample : int
        The sample of median error, among those with a truth at the last of these lead times.
    """

    scores: list[Score]
    median_sample: int


@torch.no_grad()
def roll_out(model: nn.Module, dataset: ForecastDataset, i: int, steps: int) -> list[Outcome]:
    """Forecast some steps from a sample, each from the forecasts before it.

    Parameters
    ----------
    model : nn.Module
        In evaluation mode.
    dataset : ForecastDataset
        One that can `advance`.
    i : int
        Number of the sample to start from.
    steps : int
        How many lead times to go.

    Returns
    -------
    list of Outcome
        One for each step, on the CPU.

    Raises
    ------
    ValueError
        If the data set's inputs do not follow from forecasts, there is no such sample, or steps is below 1.
    """
    check_integer("steps", steps)
    if not 0 <= i < len(dataset):
        raise ValueError(f"i must be a sample in 0 .. {len(dataset) - 1}, got {i}")
    device, outcomes = next(model.parameters()).device, []
    for _ in range(steps):
        step = dataset.advance(i, [outcome.forecast for outcome in outcomes])
        output = model(step.inputs.unsqueeze(0).to(device)).squeeze(0).cpu()
        outcomes.append(Outcome(dataset.add_change(step.reference, output), step.truth))
    return outcomes


def score_rollouts(model: nn.Module, dataset: ForecastDataset, steps: int) -> RolloutScores:
    """Roll out from every sample, and score the model and persistence against the truths that there are.

    Parameters
    ----------
    model, dataset, steps
        As in `roll_out`.

    Returns
    -------
    RolloutScores
        The scores, and which sample to look at.

    Raises
    ------
    ValueError
        If the data set's inputs do not follow from forecasts.
    FloatingPointError
        If forecasts grow beyond all bounds.
    """
    check_integer("steps", steps)
    errors = [Errors(dataset) for _ in range(steps)]
    with_truth: list[list[int]] = [[] for _ in range(steps)]
    for i in range(len(dataset)):
        present = dataset.present(i)
        for n, (forecast, truth) in enumerate(roll_out(model, dataset, i, steps)):
            if truth is not None:
                errors[n].add("model", forecast, truth)
                errors[n].add("persistence", present, truth)
                with_truth[n].append(i)
    scored = sum(bool(samples) for samples in with_truth)
    scores = [score for n in range(scored) for score in errors[n].scores((n + 1) * dataset.lead_time)]
    diverged = next((score for score in scores if not math.isfinite(score.rmse)), None)
    if diverged is not None:
        raise FloatingPointError(
            f"rollouts must stay finite, got an RMSE of {diverged.rmse} at {diverged.lead_time:g} h: take fewer steps"
        )
    last = scored - 1
    return RolloutScores(scores, with_truth[last][place_of_median(errors[last].sample_rmse("model"))])


def rollout_table(scores: list[Score]) -> str:
    """Return the RMSE of rollouts as aligned text: a line for each variable and lead time, a column for each forecast."""
    names = list(dict.fromkeys(score.forecast for score in scores))
    cells = {(score.variable, score.lead_time, score.forecast): score for score in scores}
    lines = []
    for variable, units in dict.fromkeys((score.variable, score.units) for score in scores):
        heading = f"RMSE of {variable} [{units}]"
        lines.append("".join([heading, *(f" {name:>12}" for name in names), f" {'samples':>8}"]))
        for lead_time in dict.fromkeys(score.lead_time for score in scores):
            row = [cells[variable, lead_time, name] for name in names]
            label = f"{lead_time:g} h"
            lines.append(
                "".join([f"{label:{len(heading)}}", *(f" {s.rmse:12.4f}" for s in row), f" {row[0].samples:8}"])
            )
    return "\n".join(lines)
