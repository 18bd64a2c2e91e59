"""Scores of forecasts in physical units, and tables that compare a model with its baselines.

A forecast has one lead time; a rollout is autoregressive:

    state_0 = the present,  state_n = reference_n + change_mean + model(inputs_n) * change_std

`ForecastDataset.advance` computes inputs_n and reference_n from earlier states. The first step of a
rollout is a forecast.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset, aligned, with_units
from anemoi_gt.option_checks import check_integer

Forecast = Callable[[int], Tensor]  # sample index -> [N, V], physical units, on the CPU


@dataclass(frozen=True)
class Score:
    """Score of one forecast method for one variable, over all samples and nodes.

    Nodes have the weights of the data set. `forecast` is the name of the method, `lead_time` the
    hours from the present to the truth, and `samples` the number of scored forecasts. The root mean
    squared error and the bias (mean of forecast minus truth) are in `units`.
    """

    forecast: str
    variable: str
    units: str
    lead_time: float
    samples: int
    rmse: float
    bias: float


def model_forecast(model: nn.Module, dataset: ForecastDataset) -> Forecast:
    """Return a model's forecast as a function of the sample index."""
    return lambda i: dataset.forecast(i, predict(model, dataset.inputs(i)))


@torch.no_grad()
def predict(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's output [N, out_channels] on the CPU for one sample [N, in_channels]."""
    device = next(model.parameters()).device
    return model(inputs.unsqueeze(0).to(device)).squeeze(0).cpu()


def measure(forecasts: dict[str, Forecast], dataset: ForecastDataset) -> "Errors":
    """Compute named forecasts once per sample of a data set; return their errors."""
    errors = Errors(dataset, dataset.lead_time)
    for i in range(len(dataset)):
        truth = dataset.truth(i)
        for name, forecast in forecasts.items():
            errors.add(name, i, forecast(i), truth)
    return errors


class Errors:
    """Errors and scores of forecasts at one lead time (hours), accumulated sample by sample."""

    def __init__(self, dataset: ForecastDataset, lead_time: float):
        self._dataset = dataset
        self._lead_time = lead_time
        # by method and sample: weighted means of error^2 and error, [2, V]
        self._moments: dict[str, dict[int, Tensor]] = {}

    def add(self, name: str, i: int, forecast: Tensor, truth: Tensor) -> None:
        """Add the forecast [N, V] of sample i by method `name`.

        Where the truth is NaN, a variable has no values and its weight is 0.
        """
        error = torch.where(truth.isnan(), 0.0, forecast - truth)
        error = error.double()  # float32 sums over millions of nodes would round
        weights = self._dataset.weights
        if weights.ndim == 1:
            weights = weights[:, None]
        weighted = torch.stack([error.square(), error]) * weights
        self._moments.setdefault(name, {})[i] = weighted.mean(dim=1)

    def median_sample(self, name: str) -> int:
        """Return the sample for which method `name` has its median error in the first variable.

        Of an even number of samples, return the lower of the two in the middle.
        """
        moments = self._moments[name]
        ascending = sorted(moments, key=lambda i: moments[i][0, 0].item())
        return ascending[(len(ascending) - 1) // 2]

    def scores(self) -> list[Score]:
        """Return the scores over all samples, by variable, then in the order methods were added."""
        means = {}
        for name, samples in self._moments.items():
            means[name] = torch.stack([*samples.values()]).mean(dim=0)
        scores = []
        for v, variable in enumerate(self._dataset.variables):
            for name, mean in means.items():
                score = Score(
                    forecast=name,
                    variable=variable,
                    units=self._dataset.units[v],
                    lead_time=self._lead_time,
                    samples=len(self._moments[name]),
                    rmse=mean[0, v].sqrt().item(),
                    bias=mean[1, v].item(),
                )
                scores.append(score)
        return scores


def as_table(scores: list[Score]) -> str:
    """Return the scores as a text table, with one line per variable and forecast method.

    Examples
    --------
    >>> from dataclasses import replace
    >>> model = Score("model", "tracer", "kg/kg", lead_time=12, samples=64, rmse=0.01, bias=0.0)
    >>> print(as_table([model, replace(model, forecast="persistence", rmse=0.1, bias=-0.002)]))
    tracer [kg/kg]    RMSE     bias
    model           0.0100   0.0000
    persistence     0.1000  -0.0020
    """
    rows = []
    variable = None
    for score in scores:
        if score.variable != variable:
            variable = score.variable
            error_format = _error_format(scores, variable)
            rows.append([with_units(variable, score.units), "RMSE", "bias"])
        errors = (score.rmse, score.bias)
        rows.append([score.forecast, *(f"{error:{error_format}}" for error in errors)])
    return aligned(rows)


def _error_format(scores: list[Score], variable: str) -> str:
    """Return the number format for the errors of a variable."""
    largest = max(score.rmse for score in scores if score.variable == variable)
    if largest >= 0.01:
        return ".4f"
    # Four decimals would leave no digit of, for example, specific humidity in kg/kg.
    return ".3e"


class Outcome(NamedTuple):
    """Forecast and truth of a rollout step, [N, V], physical; truth is None beyond the data."""

    forecast: Tensor
    truth: Tensor | None


class RolloutScores(NamedTuple):
    """Scores of rollouts from all samples, and the sample with the median error at the end.

    `scores` are by lead time, for the model and the baselines. Their `samples` is the number of
    rollouts with a truth at that lead time; lead times without any truth are left out.
    """

    scores: list[Score]
    median_sample: int


def roll_out(model: nn.Module, dataset: ForecastDataset, i: int, steps: int) -> list[Outcome]:
    """Roll out a model from sample i; return one outcome per step, on the CPU.

    The model must be in evaluation mode. Raises ValueError if the data set does not support
    rollouts (`advance`) or `steps` is below 1, and IndexError if `i` is out of range.
    """
    check_integer("steps", steps)
    dataset.check_sample(i)
    return list(_outcomes(model, dataset, i, steps))


def _outcomes(model: nn.Module, dataset: ForecastDataset, i: int, steps: int) -> Iterator[Outcome]:
    forecasts: list[Tensor] = []
    for _ in range(steps):
        step = dataset.advance(i, forecasts)
        forecasts.append(dataset.add_change(step.reference, predict(model, step.inputs)))
        yield Outcome(forecasts[-1], step.truth)


def score_rollouts(model: nn.Module, dataset: ForecastDataset, steps: int) -> RolloutScores:
    """Roll out from every sample; score model and baselines at all lead times that have a truth.

    Raises ValueError if the data set does not support rollouts, and FloatingPointError if forecasts
    become infinite or NaN.
    """
    check_integer("steps", steps)
    errors: list[Errors] = []  # one per lead time that has a truth
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
    scores = [score for step_errors in errors for score in step_errors.scores()]
    for score in scores:
        if not math.isfinite(score.rmse):
            raise FloatingPointError(
                f"rollouts must stay finite, got an RMSE of {score.rmse} at {score.lead_time:g} h: "
                "take fewer steps"
            )
    return RolloutScores(scores, errors[-1].median_sample("model"))


def rollout_table(scores: list[Score]) -> str:
    """Return the RMSE of rollouts as a text table, with one row per variable and lead time."""
    names = list(dict.fromkeys(score.forecast for score in scores))
    cells = {(score.variable, score.lead_time, score.forecast): score for score in scores}
    rows = []
    for variable, units in dict.fromkeys((score.variable, score.units) for score in scores):
        rows.append([with_units(f"RMSE of {variable}", units), *names, "samples"])
        error_format = _error_format(scores, variable)
        for lead_time in dict.fromkeys(score.lead_time for score in scores):
            row = [cells[variable, lead_time, name] for name in names]
            errors = [f"{score.rmse:{error_format}}" for score in row]
            rows.append([f"{lead_time:g} h", *errors, str(row[0].samples)])
    return aligned(rows)
