"""The era5_uk data set: figures of its baselines, and splits that see nothing of a later one's truths."""

import sys
from datetime import datetime

import numpy as np
import pytest
import torch

from anemoi_gt.data.datasets import Splits
from anemoi_gt.data.era5_uk import FIRST_TEST_HOUR, FIRST_VALID_HOUR, era5_uk, split
from anemoi_gt.data.grids import regional
from anemoi_gt.data.hourly import HourlyField

HOURS, LEAD = 744, 6
FIRST_HOUR = np.datetime64("2019-03-01T00")


def made_up_field(hours=HOURS, seed=0):
    """Random hourly fields on six points."""
    values = 280 + 5 * torch.randn(hours, 6, generator=torch.Generator().manual_seed(seed))
    return HourlyField(regional([58.0, 57.0], [-1.0, 0.0, 1.0]), FIRST_HOUR + np.arange(hours), values)


def altered_from(hour):
    """The made-up field with other values from `hour` on."""
    field = made_up_field()
    values = torch.cat([field.values[:hour], made_up_field(seed=1).values[hour:]])
    return HourlyField(field.nodes, field.times, values)


@pytest.fixture(scope="module")
def made_up():
    return split(made_up_field(), LEAD)


@pytest.fixture(scope="module")
def real(era5_path):
    return era5_uk(era5_path)


def starts_and_truths(part):
    """Hours since the start of the month, read off the titles."""
    starts = [datetime.fromisoformat(part.title(i).split(" UTC")[0]) for i in range(len(part))]
    starts = [round((start - datetime(2019, 3, 1)).total_seconds() / 3600) for start in starts]
    return starts, [start + part.lead_time for start in starts]


def rmse(forecast, part):
    return torch.stack([forecast(i) - part.truth(i) for i in range(len(part))]).square().mean().sqrt().item()


@pytest.mark.parametrize("lead_time", [1, 6, 24])
def test_each_split_keeps_to_its_days(lead_time):
    days = {"train": (0, 24), "valid": (24, 26), "test": (26, 31)}
    for part, (first, end) in zip(split(made_up_field(), lead_time), days.values(), strict=True):
        starts, truths = starts_and_truths(part)
        assert starts == list(range(max(24 * first, 24), 24 * end - lead_time))
        assert truths[-1] == 24 * end - 1  # every hour that can be forecast is


def test_truth_is_the_field_after_the_lead_time(made_up):
    starts, truths = starts_and_truths(made_up.test)
    values = made_up_field().values
    torch.testing.assert_close(made_up.test.truth(5)[:, 0], values[truths[5]], rtol=0, atol=0)
    torch.testing.assert_close(made_up.test.present(5)[:, 0], values[starts[5]], rtol=0, atol=0)
    yesterday = made_up.test.baselines()["same hour yesterday"](5)
    torch.testing.assert_close(yesterday[:, 0], values[truths[5] - 24], rtol=0, atol=0)


@pytest.mark.parametrize(("hour", "earlier"), [(FIRST_VALID_HOUR, 1), (FIRST_TEST_HOUR, 2)])
def test_later_days_change_nothing_in_earlier_splits(made_up, hour, earlier):
    for part, same in list(zip(made_up, split(altered_from(hour), LEAD), strict=True))[:earlier]:
        for i in (0, len(part) - 1):
            torch.testing.assert_close(part[i], same[i], rtol=0, atol=0)
        torch.testing.assert_close(part.change_std, same.change_std, rtol=0, atol=0)


def test_inputs_do_not_know_the_future(made_up):
    """Nothing after the start of a test forecast reaches its inputs, its reference or its baselines."""
    part, i = made_up.test, 40
    start = starts_and_truths(part)[0][i]
    blind = split(altered_from(start + 1), LEAD).test
    torch.testing.assert_close(blind.inputs(i), part.inputs(i), rtol=0, atol=0)
    torch.testing.assert_close(blind.reference(i), part.reference(i), rtol=0, atol=0)
    for name, forecast in part.baselines().items():
        torch.testing.assert_close(blind.baselines()[name](i), forecast(i), rtol=0, atol=0)
    assert not torch.equal(split(altered_from(start), LEAD).test.inputs(i), part.inputs(i))


def test_shorter_ridge_has_not_seen_the_validation_days(made_up):
    changed = split(altered_from(FIRST_VALID_HOUR), LEAD)
    short, long = "ridge per point, 24 days", "ridge per point, 26 days"
    slopes = [part.valid.baselines()[name].args[0].slope for name in (short, long) for part in (made_up, changed)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=0, atol=0)
    assert not torch.allclose(slopes[2], slopes[3])


@pytest.mark.parametrize("lead_time", [1, 5, 6, 24])
def test_channels_have_their_names_and_are_normalised(lead_time):
    train = split(made_up_field(), lead_time).train
    inputs = torch.stack([sample.inputs for sample in train])
    target = torch.stack([sample.target for sample in train])
    assert inputs.shape[1:] == (6, len(train.input_names)) and len(set(train.input_names)) == train.in_channels
    torch.testing.assert_close(
        inputs[..., :-6].flatten(0, 1).std(0), torch.ones(train.in_channels - 6), rtol=0.05, atol=0
    )
    assert target.std().item() == pytest.approx(1, rel=0.02) and abs(target.mean().item()) < 0.02
    assert f"change in the last {24 - lead_time} h" in train.input_names or lead_time == 24


def test_scores_are_unweighted(made_up):
    assert torch.equal(made_up.test.weights, torch.ones(6))


def test_real_field_is_the_month_of_hours_over_the_uk(real):
    assert [len(part) for part in real] == [546, 42, 114]
    nodes = real.train.nodes
    assert len(nodes) == 33 * 49
    assert (nodes.lat.max(), nodes.lat.min(), nodes.lon.min(), nodes.lon.max()) == (58, 50, -10, 2)
    assert real.test.title(0) == "2019-03-27 00:00 UTC + 6 h"
    assert real.test.title(113) == "2019-03-31 17:00 UTC + 6 h"
    assert min(real.test.truth(i).min() for i in range(114)) > 250
    assert max(real.test.truth(i).max() for i in range(114)) < 300


@pytest.mark.parametrize(
    ("baseline", "kelvin"),
    [
        ("persistence", 2.790),
        ("same hour yesterday", 1.541),
        ("ridge per point, 26 days", 1.484),
        ("ridge per point, 24 days", 1.649),
    ],
)
def test_baselines_have_their_known_errors(real, baseline, kelvin):
    assert rmse(real.test.baselines()[baseline], real.test) == pytest.approx(kelvin, abs=1e-3)


def test_file_is_read_without_leaving_an_index_beside_it(real, era5_path, tmp_path):
    copy = tmp_path / "field.grib"
    with open(era5_path, "rb") as file:
        copy.write_bytes(file.read())
    splits = era5_uk(copy)
    torch.testing.assert_close(splits.test[3], real.test[3], rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == [copy]


def test_null_path_fetches_with_the_tutorial(era5_path, real, monkeypatch):
    xarray = pytest.importorskip("xarray")
    asked = []

    def fetch(name, **options):
        asked.append(name)
        return xarray.open_dataset(era5_path, **options)

    monkeypatch.setattr(xarray.tutorial, "open_dataset", fetch)
    assert isinstance(era5_uk(None), Splits)
    assert asked == ["era5-2mt-2019-03-uk.grib"]


def test_missing_file_raises_and_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.grib.*null to fetch it"):
        era5_uk(tmp_path / "no.grib")


def test_missing_package_raises_and_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)  # as if not installed
    with pytest.raises(ImportError, match=r"xarray is needed.*pip install 'anemoi-gt\[era5\]'"):
        era5_uk("anything.grib")


@pytest.mark.parametrize("lead_time", [0, 25])
def test_lead_time_beyond_a_day_raises(lead_time):
    with pytest.raises(ValueError, match=f"1 to 24 hours, got {lead_time}"):
        split(made_up_field(), lead_time)


def test_month_that_ends_before_the_first_test_forecast_raises():
    with pytest.raises(ValueError, match="more than 630 hours, got 630"):
        split(made_up_field(hours=630), LEAD)


def test_field_with_a_missing_hour_raises():
    field = made_up_field()
    keep = np.arange(HOURS) != 100
    with pytest.raises(ValueError, match="an hour apart"):
        HourlyField(field.nodes, field.times[keep], field.values[keep])


def test_field_with_a_gap_raises():
    field = made_up_field()
    values = field.values.clone()
    values[3, 2] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        HourlyField(field.nodes, field.times, values)


def test_field_of_another_shape_raises():
    field = made_up_field()
    with pytest.raises(ValueError, match=r"\[744, 6\], times by nodes, got \(744, 5\)"):
        HourlyField(field.nodes, field.times, field.values[:, :5])
