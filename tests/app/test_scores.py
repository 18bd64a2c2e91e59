"""Scores in physical units."""

import json
import math
from dataclasses import replace

import pytest
import torch

from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.evaluate_command import write_scores
from anemoi_gt.app.scores import Score, as_table, measure, model_forecast, rollout_table
from anemoi_gt.data.nodes import Nodes


class TwoNodes(ForecastDataset):
    """Two samples of two variables on two nodes, the first with three quarters of the weight."""

    nodes = Nodes([0.0, 10.0], [0.0, 0.0])
    weights = torch.tensor([1.5, 0.5])
    variables, units, lead_time = ("temperature", "wind"), ("K", "m/s"), 6.0
    input_names = ("temperature",)
    change_mean, change_std = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 4.0])

    def __len__(self):
        return 2

    def inputs(self, i):
        return torch.tensor([[float(i)], [1.0]])

    def present(self, i):
        return torch.tensor([[280.0, 5.0], [290.0, -5.0]])

    def truth(self, i):
        return self.present(i) + torch.tensor([[1.0, 0.0], [2.0, 4.0]]) * (i + 1)

    title = str


class FiveSamples(TwoNodes):
    def __len__(self):
        return 5


def test_scores_of_persistence_agree_with_a_computation_by_hand():
    temperature, wind = measure({"persistence": TwoNodes().present}, TwoNodes()).scores()
    assert temperature.rmse == pytest.approx(
        math.sqrt((0.75 * 1 + 0.25 * 4 + 0.75 * 4 + 0.25 * 16) / 2)
    )
    assert temperature.bias == pytest.approx(-(0.75 * 1 + 0.25 * 2 + 0.75 * 2 + 0.25 * 4) / 2)
    assert wind.rmse == pytest.approx(math.sqrt((0.25 * 16 + 0.25 * 64) / 2))


def test_model_forecast_is_in_physical_units():
    model = torch.nn.Linear(1, 2)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.zeros_(model.bias)
    forecast = model_forecast(model, TwoNodes())(1)
    assert forecast.tolist() == [[280 + 1 + 2, 5 + 4], [290 + 1 + 2, -5 + 4]]
    assert not forecast.requires_grad


def test_table_has_every_forecast_variable_and_unit():
    dataset = TwoNodes()
    table = as_table(
        measure({"model": dataset.truth, "persistence": dataset.present}, dataset).scores()
    )
    names = [line.split()[0] for line in table.splitlines()]
    assert names == ["temperature", "model", "persistence", "wind", "model", "persistence"]
    assert "temperature [K]" in table
    assert "wind [m/s]" in table
    assert len({len(line) for line in table.splitlines()}) == 1


@pytest.mark.parametrize("table", (as_table, rollout_table))
def test_errors_far_below_one_are_not_rounded_to_zero(table):
    humidity = Score("model", "q", "kg/kg", lead_time=6, samples=5, rmse=2.345e-5, bias=-1.2e-6)
    temperature = replace(humidity, variable="t", units="K", rmse=0.75, bias=-0.1)
    lines = table([humidity, temperature]).splitlines()
    assert "2.345e-05" in lines[1]
    assert "0.7500" in lines[3]


def test_median_sample_has_the_median_error_of_the_first_variable():
    dataset = FiveSamples()
    errors = [3.0, -1.0, 0.0, 4.0, 2.0]  # and the opposite order in the second variable
    forecasts = {"model": lambda i: dataset.truth(i) + torch.tensor([errors[i], 9 - errors[i]])}
    assert measure(forecasts, dataset).median_sample("model") == errors.index(2.0)


def test_scores_are_written_as_records_of_plain_values(tmp_path):
    write_scores(
        tmp_path / "scores.json", measure({"persistence": TwoNodes().present}, TwoNodes()).scores()
    )
    (first, *_) = json.loads((tmp_path / "scores.json").read_text())
    assert list(first) == ["forecast", "variable", "units", "lead_time", "samples", "rmse", "bias"]
    assert [type(value) for value in first.values()] == [str, str, str, float, int, float, float]
