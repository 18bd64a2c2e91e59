"""Scores of forecasts in physical units, and tables that compare a model with the baselines of its data set."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anemoi_gt.data.forecast_dataset import ForecastDataset

Forecast = Callable[[int], Tensor]  # sample index -> [N, V], physical units, on the CPU


@dataclass(frozen=True)
class Score:
    """Score of one forecast method for one variable, over all samples and nodes, weighted by the data set's weights.

    `forecast` is the name of the method, `lead_time` the hours from the present to the truth, and `samples` the number
    of scored forecasts. Root mean squared error and bias, the mean of forecast minus truth, are in `units`.
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
    """Return a model's output [N, out_channels] on the CPU for the inputs [N, in_channels] of one sample."""
    device = next(model.parameters()).device
    return model(inputs.unsqueeze(0).to(device)).squeeze(0).cpu()


def measure(forecasts: dict[str, Forecast], dataset: ForecastDataset) -> "Errors":
    """Compute forecasts, by name, once for each sample of a data set; return their errors, which give the scores."""
    errors = Errors(dataset, dataset.lead_time)
    for i in range(len(dataset)):
        truth = dataset.truth(i)
        for name, forecast in forecasts.items():
            errors.add(name, i, forecast(i), truth)
    return errors


class Errors:
    """Errors of the forecasts of one lead time (hours), accumulated sample by sample, and their scores."""

    def __init__(self, dataset: ForecastDataset, lead_time: float):
        self._dataset, self._lead_time = dataset, lead_time
        self._moments: dict[str, dict[int, Tensor]] = {}  # by sample [2, V]: weighted means of error^2 and error

    def add(self, name: str, i: int, forecast: Tensor, truth: Tensor) -> None:
        """Add the forecast [N, V] of sample i by method `name`."""
        error = (forecast - truth).double()
        moments = (torch.stack([error.square(), error]) * self._dataset.weights[:, None]).mean(dim=1)
        self._moments.setdefault(name, {})[i] = moments

    def median_sample(self, name: str) -> int:
        """Return the sample of median error of the first variable as forecast by `name`, the lower one of two."""
        order = sorted(self._moments[name], key=lambda i: self._moments[name][i][0, 0].item())
        return order[(len(order) - 1) // 2]

    def scores(self) -> list[Score]:
        """Return the scores over the samples, variable by variable, in the order in which names were added."""
        means = {name: torch.stack([*samples.values()]).mean(dim=0) for name, samples in self._moments.items()}
        return [
            Score(
                *(name, variable, units, self._lead_time, len(self._moments[name])),
                rmse=mean[0, v].sqrt().item(),
                bias=mean[1, v].item(),
            )
            for v, (variable, units) in enumerate(zip(self._dataset.variables, self._dataset.units, strict=True))
            for name, mean in means.items()
        ]


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
