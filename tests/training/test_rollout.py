"""Rollouts: each forecast from the one before, scored by lead time against the truths that there are."""

import numpy as np
import pytest
import torch
from support.picture import colours

from anemoi_gt.data.era5_uk import FIRST_TEST_HOUR, HourlyField, split
from anemoi_gt.data.grids import regional
from anemoi_gt.training.plots.rollout_plot import drawn_steps
from anemoi_gt.training.report import write_rollout_report
from anemoi_gt.training.rollout import roll_out, rollout_table, score_rollouts
from anemoi_gt.training.scores import model_forecast, score

HOURS = 744


class OfInputs(torch.nn.Module):
    """A model that any change of its inputs changes."""

    def __init__(self, in_channels):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-0.3, 0.5, in_channels))

    def forward(self, x):
        return torch.tanh(x @ self.weight)[..., None]


def hourly_field(seed=0, changed_from=HOURS):
    """A month of made-up temperatures on six points; another month's from an hour on."""
    values = [280 + 5 * torch.randn(HOURS, 6, generator=torch.Generator().manual_seed(s)) for s in (seed, seed + 1)]
    times = np.datetime64("2019-03-01T00") + np.arange(HOURS)
    return HourlyField(
        regional([58.0, 57.0], [-1.0, 0.0, 1.0]), times, torch.cat([values[0][:changed_from], values[1][changed_from:]])
    )


@pytest.fixture(scope="module")
def weather():
    """Test samples of hourly temperature, an hour ahead."""
    return split(hourly_field(), lead_time=1).test


@pytest.fixture(params=["sphere", "era5_uk"])
def dataset(request, splits, weather):
    return splits.test if request.param == "sphere" else weather


@pytest.fixture
def model(dataset):
    return OfInputs(dataset.in_channels).eval()


def test_the_first_step_is_the_forecast_that_training_scores(dataset, model):
    forecast = model_forecast(model, dataset)
    for i in (0, len(dataset) - 1):
        (first, *_) = roll_out(model, dataset, i, 3)
        assert torch.equal(first.forecast, forecast(i))
        assert torch.equal(first.truth, dataset.truth(i))


def test_scores_at_the_first_lead_time_are_those_of_training(dataset, model):
    rollouts = [s for s in score_rollouts(model, dataset, 2).scores if s.lead_time == dataset.lead_time]
    assert rollouts == score({"model": model_forecast(model, dataset), "persistence": dataset.present}, dataset)


def test_a_rollout_on_the_sphere_is_what_is_computed_by_hand(splits):
    dataset, model = splits.test, OfInputs(splits.test.in_channels)
    case, statistics = dataset.case(1), dataset.statistics
    tracer = dataset.present(1)
    for n, outcome in enumerate(roll_out(model, dataset, 1, 3)):
        inputs = dataset.inputs(1).clone()  # the position stays, tracer and wind are those of the step
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


def test_a_rollout_of_weather_is_the_forecast_from_a_field_whose_hours_to_come_are_the_forecasts(weather):
    model, start = OfInputs(weather.in_channels), weather.starts[3]
    outcomes, values = roll_out(model, weather, 3, 30), weather.field.values.clone()  # beyond the 24 h that inputs see
    for n, outcome in enumerate(outcomes):
        known = HourlyField(weather.nodes, weather.field.times, values)
        as_if_true = type(weather)(known, range(start + n, start + n + 1), lead_time=1)
        for name in ("change_mean", "change_std", "_mean", "_anomaly_std", "_lag_std"):
            setattr(as_if_true, name, getattr(weather, name))
        expected = model_forecast(model, as_if_true)(0)
        torch.testing.assert_close(outcome.forecast, expected)
        values[start + n + 1] = outcome.forecast[:, 0]


def test_a_rollout_sees_nothing_that_comes_after_its_start(weather):
    other = split(hourly_field(changed_from=weather.starts[3] + 1), lead_time=1).test
    model = OfInputs(weather.in_channels)
    for outcome, same in zip(roll_out(model, weather, 3, 4), roll_out(model, other, 3, 4), strict=True):
        assert torch.equal(outcome.forecast, same.forecast)
        assert not torch.equal(outcome.truth, same.truth)


def test_lead_times_without_truth_are_scored_over_the_samples_that_have_one(weather):
    steps, samples = 4, len(weather)
    assert weather.starts == range(FIRST_TEST_HOUR, HOURS - 1)
    rollouts = score_rollouts(OfInputs(weather.in_channels), weather, steps)
    assert [(s.lead_time, s.samples) for s in rollouts.scores if s.forecast == "model"] == [
        (n, samples - n + 1) for n in range(1, steps + 1)
    ]
    assert roll_out(OfInputs(weather.in_channels), weather, samples - 1, 2)[1].truth is None
    assert rollouts.median_sample <= samples - steps


def test_the_error_at_a_lead_time_is_of_its_forecasts_and_truths(splits):
    dataset, model = splits.test, OfInputs(splits.test.in_channels)
    at_end = [roll_out(model, dataset, i, 3)[-1] for i in range(len(dataset))]
    squares = [((o.forecast - o.truth)[:, 0].square() * dataset.weights).mean() for o in at_end]
    rollouts = score_rollouts(model, dataset, 3)
    (last,) = (s for s in rollouts.scores if (s.forecast, s.lead_time) == ("model", 3 * dataset.lead_time))
    assert last.rmse == pytest.approx(torch.stack(squares).mean().sqrt().item(), rel=1e-5)
    assert squares[rollouts.median_sample] == sorted(squares)[1]


def test_a_rollout_that_grows_beyond_all_bounds_is_refused(splits):
    class Growing(OfInputs):
        def forward(self, x):
            return x[..., :1] * 1e12 * self.weight[0]

    with pytest.raises(FloatingPointError, match=r"rollouts must stay finite, got an RMSE of (inf|nan) at \d+ h"):
        score_rollouts(Growing(splits.test.in_channels), splits.test, 8)


def test_longer_lead_times_of_weather_are_refused_with_the_reason():
    dataset = split(hourly_field(), lead_time=6).test
    with pytest.raises(ValueError, match=r"needs data.lead_time=1: the inputs name every hour, got 6"):
        roll_out(OfInputs(dataset.in_channels), dataset, 0, 2)


def test_a_data_set_whose_inputs_do_not_follow_from_forecasts_is_refused(splits):
    class Fixed(type(splits.test)):
        advance = type(splits.test).__mro__[1].advance

    dataset = Fixed.__new__(Fixed)
    with pytest.raises(
        ValueError, match="a rollout needs a data set whose inputs follow from forecasts, Fixed has none"
    ):
        dataset.advance(0, [])


def test_the_table_has_a_line_for_each_lead_time(splits):
    table = rollout_table(score_rollouts(OfInputs(splits.test.in_channels), splits.test, 3).scores).splitlines()
    assert table[0].split() == ["RMSE", "of", "tracer", "[kg/kg]", "model", "persistence", "samples"]
    assert [line.split()[:2] for line in table[1:]] == [["12", "h"], ["24", "h"], ["36", "h"]]
    assert len({len(line) for line in table}) == 1


@pytest.mark.parametrize(("steps", "drawn"), [(2, [1, 2]), (4, [1, 2, 3, 4]), (10, [1, 4, 7, 10])])
def test_first_and_last_step_are_drawn_and_two_between(steps, drawn):
    assert drawn_steps(steps) == drawn


def test_the_picture_of_a_rollout_has_maps_and_is_not_empty(dataset, model, tmp_path):
    write_rollout_report(tmp_path, model, dataset, 5)
    pixels = colours(tmp_path / "rollout.png")
    height, width = pixels.shape
    assert 1600 <= width <= 3000 and 800 <= height <= 1600
    for row in range(3):
        for column in range(4):
            panel = pixels[row * height // 3 : (row + 1) * height // 3, column * width // 6 : (column + 1) * width // 6]
            assert len(np.unique(panel)) > 30, (row, column)


@pytest.mark.parametrize(
    ("i", "steps", "message"),
    [
        (0, 0, "steps must be at least 1, got 0"),
        (-1, 1, "i must be a sample in 0 .. "),
        (9999, 1, "i must be a sample in 0"),
    ],
)
def test_rollout_from_no_sample_or_of_no_step_is_refused(weather, i, steps, message):
    with pytest.raises(ValueError, match=message):
        roll_out(OfInputs(weather.in_channels), weather, i, steps)


def test_scores_of_no_step_are_refused(weather):
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        score_rollouts(OfInputs(weather.in_channels), weather, 0)
