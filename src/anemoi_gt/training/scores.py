"""Scores of forecasts in physical units, and tables that compare a model with the baselines of its data set."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from anemoi_gt.data.datasets import ForecastDataset

Forecast = Callable[[int], Tensor]  # sample index -> [N, V], physical units, on the CPU


@dataclass(frozen=True)
class Score:
    """Score of one forecast method for one variable, over all samples and nodes, weighted by the data set's weights.

    Attributes
    ----------
    forecast, variable, units : str
        Name of the method, the variable and its units.
    lead_time : float
        Hours from the present to the truth.
    samples : int
        Number of scored forecasts.
    rmse : float
        Root mean squared error.
    bias : float
        Mean of forecast minus truth.
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
    device = next(model.parameters()).device

    @torch.no_grad()
    def forecast(i: int) -> Tensor:
        output = model(dataset.inputs(i).unsqueeze(0).to(device)).squeeze(0)
        return dataset.forecast(i, output.cpu())

    return forecast


def score(forecasts: dict[str, Forecast], dataset: ForecastDataset) -> list[Score]:
    """Score forecasts, by name, on all samples of a data set: variable by variable, in the order of `forecasts`."""
    errors = Errors(dataset)
    for i in range(len(dataset)):
        truth = dataset.truth(i)
        for name, forecast in forecasts.items():
            errors.add(name, forecast(i), truth)
    return errors.scores(dataset.lead_time)


class Errors:
    """Errors of the forecasts of one lead time, accumulated sample by sample, and their scores."""

    def __init__(self, dataset: ForecastDataset):
        self._dataset = dataset
        self._moments: dict[str, list[Tensor]] = {}  # per sample [2, V]: weighted means of error^2 and error

    def add(self, name: str, forecast: Tensor, truth: Tensor) -> None:
        """Add the forecast [N, V] of one sample by method `name`."""
        error = (forecast - truth).double()
        moments = (torch.stack([error.square(), error]) * self._dataset.weights[:, None]).mean(dim=1)
        self._moments.setdefault(name, []).append(moments)

    def sample_rmse(self, name: str) -> Tensor:
        """Return the RMSE of the first variable in each sample forecast by `name`, [samples] float64."""
        return torch.stack([moments[0, 0].sqrt() for moments in self._moments[name]])

    def scores(self, lead_time: float) -> list[Score]:
        """Return the scores over the samples, variable by variable, in the order in which names were added."""
        means = {name: torch.stack(samples).mean(dim=0) for name, samples in self._moments.items()}
        variables = zip(self._dataset.variables, self._dataset.units, strict=True)
        return [
            Score(
                name, variable, units, lead_time, len(self._moments[name]), mean[0, v].sqrt().item(), mean[1, v].item()
            )
            for v, (variable, units) in enumerate(variables)
            for name, mean in means.items()
        ]


def sample_rmse(forecast: Forecast, dataset: ForecastDataset) -> Tensor:
    """Return the RMSE of the first variable in each sample, [samples] float64."""
    errors = Errors(dataset)
    for i in range(len(dataset)):
        errors.add("forecast", forecast(i), dataset.truth(i))
    return errors.sample_rmse("forecast")


def median_index(errors: Tensor) -> int:
    """Return the index of the median, the lower one of two."""
    order = errors.argsort()
    return int(order[(len(order) - 1) // 2])


def as_records(scores: list[Score]) -> list[dict]:
    """Return the scores as plain dicts for JSON."""
    return [asdict(score) for score in scores]


def as_table(scores: list[Score]) -> str:
    """Return the scores as a text table, one line for each forecast of each variable.

    Examples
    --------
    >>> from dataclasses import replace
    >>> model = Score("model", "tracer", "kg/kg", lead_time=12, samples=64, rmse=0.01, bias=0.0)
    >>> print(as_table([model, replace(model, forecast="persistence", rmse=0.1, bias=-0.002)]))
    tracer [kg/kg]         RMSE        bias
    model                0.0100      0.0000
    persistence          0.1000     -0.0020
    """
    width = max(len(name) for score in scores for name in (score.forecast, f"{score.variable} [{score.units}]"))
    lines, variable = [], None
    for score in scores:
        if score.variable != variable:
            variable = score.variable
            heading = f"{variable} [{score.units}]"
            lines.append(f"{heading:{width}} {'RMSE':>12} {'bias':>11}")
        lines.append(f"{score.forecast:{width}} {score.rmse:12.4f} {score.bias:11.4f}")
    return "\n".join(lines)
