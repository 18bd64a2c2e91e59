"""Scores of forecasts in physical units, and the table that compares a model with the baselines of its data set."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from anemoi_gt.data.datasets import ForecastDataset

Forecast = Callable[[int], Tensor]  # sample number -> [N, V], physical units, on the CPU


@dataclass(frozen=True)
class Score:
    """How good one way to forecast is, for one variable, over the samples and, by area, all nodes of a data set.

    Attributes
    ----------
    forecast, variable, units : str
        What is forecast by whom.
    lead_time : float
        Hours from the present to the truth.
    samples : int
        Forecasts that were scored.
    rmse : float
        Root of the mean squared error.
    bias : float
        Mean of forecast less truth.
    """

    forecast: str
    variable: str
    units: str
    lead_time: float
    samples: int
    rmse: float
    bias: float


def model_forecast(model: nn.Module, dataset: ForecastDataset) -> Forecast:
    """Return the forecasts that a model makes from the samples of a data set."""
    device = next(model.parameters()).device

    @torch.no_grad()
    def forecast(i: int) -> Tensor:
        output = model(dataset.inputs(i).unsqueeze(0).to(device)).squeeze(0)
        return dataset.forecast(i, output.cpu())

    return forecast


def score(forecasts: dict[str, Forecast], dataset: ForecastDataset) -> list[Score]:
    """Score every way to forecast on all samples of a data set.

    Parameters
    ----------
    forecasts : dict
        Forecasts by name.
    dataset : ForecastDataset
        Gives the truth and the weights.

    Returns
    -------
    list of Score
        Variable by variable, in the order of `forecasts`.
    """
    errors = Errors(dataset)
    for i in range(len(dataset)):
        truth = dataset.truth(i)
        for name, forecast in forecasts.items():
            errors.add(name, forecast(i), truth)
    return errors.scores(dataset.lead_time)


class Errors:
    """Collects forecasts and truths of one lead time, and scores them.

    Parameters
    ----------
    dataset : ForecastDataset
        Whose variables they are of.
    """

    def __init__(self, dataset: ForecastDataset):
        self._dataset = dataset
        self._moments: dict[str, list[Tensor]] = {}  # for each sample [2, V]: weighted mean of error^2 and of error

    def add(self, name: str, forecast: Tensor, truth: Tensor) -> None:
        """Count the forecast [N, V] of one sample, made by `name`."""
        error = (forecast - truth).double()
        moments = (torch.stack([error.square(), error]) * self._dataset.weights[:, None]).mean(dim=1)
        self._moments.setdefault(name, []).append(moments)

    def sample_rmse(self, name: str) -> Tensor:
        """Return the root mean squared errors of the samples forecast by `name`, first variable, [samples] float64."""
        return torch.stack([moments[0, 0].sqrt() for moments in self._moments[name]])

    def scores(self, lead_time: float) -> list[Score]:
        """Return the scores over the samples, variable by variable, in the order in which the names came."""
        means = {name: torch.stack(samples).mean(dim=0) for name, samples in self._moments.items()}
        variables = zip(self._dataset.variables, self._dataset.units, strict=True)
        return [
            Score(
                name,
                variable,
                units,
                lead_time,
                samples=len(self._moments[name]),
                rmse=mean[0, v].sqrt().item(),
                bias=mean[1, v].item(),
            )
            for v, (variable, units) in enumerate(variables)
            for name, mean in means.items()
        ]


def sample_rmse(forecast: Forecast, dataset: ForecastDataset) -> Tensor:
    """Return the root mean squared error of the first variable in each sample, by area, [samples] float64."""
    errors = Errors(dataset)
    for i in range(len(dataset)):
        errors.add("forecast", forecast(i), dataset.truth(i))
    return errors.sample_rmse("forecast")


def place_of_median(errors: Tensor) -> int:
    """Return where the median of some numbers stands, the lower one of two."""
    order = errors.argsort()
    return int(order[(len(order) - 1) // 2])


def as_records(scores: list[Score]) -> list[dict]:
    """Return the scores as plain dicts, for JSON."""
    return [asdict(score) for score in scores]


def as_table(scores: list[Score]) -> str:
    """Return the scores as aligned text, a line for each forecast of each variable.

    Examples
    --------
    >>> from dataclasses import replace
    >>> model = Score("model", "tracer", "kg/kg", lead_time=12, samples=64, rmse=0.01, bias=0.0)
    >>> print(as_table([model, replace(model, forecast="persistence", rmse=0.1, bias=-0.002)]))
    tracer [kg/kg]         RMSE        bias
    model                0.0100      0.0000
    persistence          0.1000     -0.0020
    """
    width = max(len(score.forecast) for score in scores)
    lines, variable = [], None
    for score in scores:
        if score.variable != variable:
            variable = score.variable
            heading = f"{variable} [{score.units}]"
            width = max(width, len(heading))
            lines.append(f"{heading:{width}} {'RMSE':>12} {'bias':>11}")
        lines.append(f"{score.forecast:{width}} {score.rmse:12.4f} {score.bias:11.4f}")
    return "\n".join(lines)
