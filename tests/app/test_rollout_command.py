"""Rollouts: each forecast from the previous one, scored by lead time wherever there is a truth."""

import numpy as np
import pytest
import torch
from support.picture import assert_every_map_has_content
from support.refusals import raises, refused
from support.weather import HOURS, hourly_field

from anemoi_gt.app.datasets.era5_uk import FIRST_TEST_HOUR, HourlyField, split
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.evaluate_command import write_rollout_report
from anemoi_gt.app.plots import drawn_steps
from anemoi_gt.app.scores import measure, model_forecast, roll_out, rollout_table, score_rollouts

pytestmark = pytest.mark.application


class InputModel(torch.nn.Module):
    """A model whose output depends on every input."""

    def __init__(self, in_channels):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-0.3, 0.5, in_channels))

    def forward(self, x):
        return torch.tanh(x @ self.weight)[..., None]


@pytest.fixture(scope="module")
def weather():
    return split(hourly_field(), lead_time=1).test


@pytest.fixture(params=["sphere", "era5_uk"])
def dataset(request, splits, weather):
    return splits.test if request.param == "sphere" else weather


@pytest.fixture
def model(dataset):
    return InputModel(dataset.in_channels).eval()


def test_forecasts_and_scores_at_the_first_lead_time_equal_trainings(dataset, model):
    for i in (0, len(dataset) - 1):
        first, *_ = roll_out(model, dataset, i, 3)
        assert torch.equal(first.forecast, model_forecast(model, dataset)(i))
        assert torch.equal(first.truth, dataset.truth(i))
    rollouts = [
        s for s in score_rollouts(model, dataset, 2).scores if s.lead_time == dataset.lead_time
    ]
    named = dataset.baselines() | {"model": model_forecast(model, dataset)}
    assert len(rollouts) == 1 + len(dataset.baselines(1))
    assert (
        rollouts
        == measure({one.forecast: named[one.forecast] for one in rollouts}, dataset).scores()
    )


def test_rollout_on_the_sphere_agrees_with_a_computation_by_hand(splits):
    dataset, model = splits.test, InputModel(splits.test.in_channels)
    case, statistics = dataset.case(1), dataset.statistics
    tracer = dataset.present(1)
    for n, outcome in enumerate(roll_out(model, dataset, 1, 3)):
        # the position is constant, tracer and wind change with the step
        inputs = dataset.inputs(1).clone()
        inputs[:, 0] = (tracer[:, 0] - statistics.tracer_mean) / statistics.tracer_std
        for k in (0, 1):
            wind = case.flow.wind(dataset.nodes.xyz, case.start + (n + k) * dataset.lead_time)
            along = np.einsum("nid,nd->ni", dataset.nodes.frame, wind) / statistics.wind_std
            inputs[:, 1 + 2 * k : 3 + 2 * k] = torch.from_numpy(along)
        with torch.no_grad():
            tracer = tracer + model(inputs) * statistics.change_std
        torch.testing.assert_close(outcome.forecast, tracer.float())
        exact = case.tracer(dataset.nodes.xyz, (n + 1) * dataset.lead_time)
        torch.testing.assert_close(outcome.truth[:, 0], torch.from_numpy(exact).float())


def test_rollout_of_weather_equals_forecasts_from_a_field_continued_by_forecasts(weather):
    model, start = InputModel(weather.in_channels), weather.starts[3]
    outcomes = roll_out(model, weather, 3, 30)  # beyond the 24 h of the inputs
    values = weather.field.values.clone()
    for n, outcome in enumerate(outcomes, start):
        continued = type(weather)(
            HourlyField(weather.nodes, weather.field.times, values), range(n, n + 1), lead_time=1
        )
        torch.testing.assert_close(outcome.forecast, model_forecast(model, continued)(0))
        values[n + 1] = outcome.forecast[:, 0]


def test_lead_times_are_scored_over_the_samples_with_a_truth(weather):
    steps, samples = 4, len(weather)
    assert weather.starts == range(FIRST_TEST_HOUR, HOURS - 1)
    rollouts = score_rollouts(InputModel(weather.in_channels), weather, steps)
    numbers = [(s.lead_time, s.samples) for s in rollouts.scores if s.forecast == "model"]
    assert numbers == [(n, samples - n + 1) for n in range(1, steps + 1)]
    assert roll_out(InputModel(weather.in_channels), weather, samples - 1, 2)[1].truth is None
    assert rollouts.median_sample <= samples - steps


def test_error_at_a_lead_time_compares_its_forecasts_and_truths(splits):
    dataset, model = splits.test, InputModel(splits.test.in_channels)
    at_end = [roll_out(model, dataset, i, 3)[-1] for i in range(len(dataset))]
    squares = [((o.forecast - o.truth)[:, 0].square() * dataset.weights).mean() for o in at_end]
    rollouts = score_rollouts(model, dataset, 3)
    (last,) = (
        s for s in rollouts.scores if (s.forecast, s.lead_time) == ("model", 3 * dataset.lead_time)
    )
    assert last.rmse == pytest.approx(torch.stack(squares).mean().sqrt().item(), rel=1e-5)
    assert squares[rollouts.median_sample] == sorted(squares)[1]


class Growing(InputModel):
    def forward(self, x):
        return x[..., :1] * 1e12 * self.weight[0]


def test_divergent_rollouts_raise(splits):
    with pytest.raises(
        FloatingPointError, match=r"rollouts must stay finite, got an RMSE of (inf|nan) at \d+ h"
    ):
        score_rollouts(Growing(splits.test.in_channels), splits.test, 8)


@refused(
    (lambda model, data: roll_out(model, data, 0, 0), "steps must be at least 1, got 0"),
    (
        lambda _, data: ForecastDataset.advance(data, 0, []),
        "implements advance\\(\\), Era5UkDataset does not",
    ),
    (
        lambda *_: split(hourly_field(), 6).test.advance(0, []),
        "needs data.lead_time=1, because inputs include",
    ),
)
def test_rollout_out_of_range_raises(weather, wrong, message):
    raises(lambda: wrong(InputModel(weather.in_channels), weather), message)


@pytest.mark.parametrize("i", [-1, 119])
def test_a_sample_that_is_not_there_is_an_index_error(weather, i):
    with pytest.raises(IndexError, match=r"sample index must be in \[0, 119\)"):
        roll_out(InputModel(weather.in_channels), weather, i, 1)


def test_table_has_a_row_for_each_lead_time(splits):
    table = rollout_table(
        score_rollouts(InputModel(splits.test.in_channels), splits.test, 3).scores
    ).splitlines()
    assert table[0].split() == [
        "RMSE",
        "of",
        "tracer",
        "[kg/kg]",
        "model",
        "persistence",
        "samples",
    ]
    assert [line.split()[:2] for line in table[1:]] == [["12", "h"], ["24", "h"], ["36", "h"]]
    assert len({len(line) for line in table}) == 1


@pytest.mark.parametrize(("steps", "drawn"), [(2, [1, 2]), (4, [1, 2, 3, 4]), (10, [1, 4, 7, 10])])
def test_plot_has_maps_of_the_first_the_last_and_two_steps_between(steps, drawn):
    assert drawn_steps(steps) == drawn


def test_every_map_of_the_plot_of_a_region_has_content(weather, tmp_path):
    # of the sphere: test_evaluate_command
    write_rollout_report(tmp_path, InputModel(weather.in_channels).eval(), weather, 5)
    assert_every_map_has_content(tmp_path / "rollout.png")
