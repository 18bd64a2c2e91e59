"""The era5_uk data set: scores of its baselines, ridge regression, and splits without leaks from later data."""

import hashlib
import shutil
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from support.refusals import raises, refused
from support.weather import HOURS, POINTS, hourly_field

from anemoi_gt.app.datasets.era5_uk import (
    FIRST_TEST_HOUR,
    FIRST_VALID_HOUR,
    HourlyField,
    era5_uk,
    fit_ridge,
    split,
)
from anemoi_gt.app.datasets.forecast_dataset import Splits

LEAD = 6
FIRST_HOUR = np.datetime64("2019-03-01T00")


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def splits():
    return split(hourly_field(), LEAD)


@pytest.fixture(scope="module")
def real(era5_path):
    return era5_uk(era5_path)


def starts_and_truths(part):
    """Hours since the start of the month, from the titles."""
    starts = [datetime.fromisoformat(part.title(i).split(" UTC")[0]) for i in range(len(part))]
    starts = [round((start - datetime(2019, 3, 1)).total_seconds() / 3600) for start in starts]
    return starts, [start + part.lead_time for start in starts]


@pytest.mark.parametrize("lead_time", [1, 6, 24])
def test_each_split_stays_within_its_days(lead_time):
    for part, (first, end) in zip(
        split(hourly_field(), lead_time), [(0, 24), (24, 26), (26, 31)], strict=True
    ):
        starts, truths = starts_and_truths(part)
        assert starts == list(range(max(24 * first, 24), 24 * end - lead_time))
        assert truths[-1] == 24 * end - 1  # the last hour is forecast


def test_truth_is_the_field_after_the_lead_time_and_scores_are_unweighted(splits):
    starts, truths = starts_and_truths(splits.test)
    assert torch.equal(splits.test.weights, torch.ones(6))
    values = hourly_field().values
    assert torch.equal(splits.test.truth(5)[:, 0], values[truths[5]])
    assert torch.equal(splits.test.present(5)[:, 0], values[starts[5]])
    assert torch.equal(
        splits.test.baselines()["same hour yesterday"](5)[:, 0], values[truths[5] - 24]
    )


@pytest.mark.parametrize(("hour", "earlier"), [(FIRST_VALID_HOUR, 1), (FIRST_TEST_HOUR, 2)])
def test_later_days_change_nothing_in_earlier_splits(splits, hour, earlier):
    changed = split(hourly_field(changed_from=hour), LEAD)
    for part, same in zip(splits[:earlier], changed[:earlier], strict=True):
        for i in (0, len(part) - 1):
            torch.testing.assert_close(part[i], same[i], rtol=0, atol=0)
        assert torch.equal(part.change_std, same.change_std)


def test_inputs_reference_and_baselines_do_not_depend_on_the_future(splits):
    part, i = splits.test, 40
    start = starts_and_truths(part)[0][i]
    blind = split(hourly_field(changed_from=start + 1), LEAD).test
    assert torch.equal(blind.inputs(i), part.inputs(i))
    assert torch.equal(blind.reference(i), part.reference(i))
    for name, forecast in part.baselines().items():
        assert torch.equal(blind.baselines()[name](i), forecast(i)), name
    assert not torch.equal(
        split(hourly_field(changed_from=start), LEAD).test.inputs(i), part.inputs(i)
    )


def test_only_the_longer_ridge_regression_depends_on_the_validation_days(splits):
    changed = split(hourly_field(changed_from=FIRST_VALID_HOUR), LEAD)
    before, after = (part.train.baselines() for part in (splits, changed))
    same = {
        name: torch.equal(before[name](3), after[name](3))
        for name in before
        if name.startswith("ridge")
    }
    assert same == {"ridge per point, 24 days": True, "ridge per point, 26 days": False}


@pytest.mark.parametrize("penalty", [0.0, 7.0, 1e9])
def test_ridge_minimises_squared_error_plus_penalty_at_each_point(penalty):
    examples, points, features = 40, 6, 3
    x, y = draw(examples, points, features, seed=0) + 5, draw(examples, points, seed=1) - 3
    prediction = torch.stack(list(map(fit_ridge(x, y, penalty), x)))
    for n in range(points):
        a, b = x[:, n].double().numpy(), y[:, n].double().numpy()
        rows = np.concatenate([a - a.mean(0), np.sqrt(penalty) * np.eye(features)])
        slope, *_ = np.linalg.lstsq(
            rows, np.concatenate([b - b.mean(), np.zeros(features)]), rcond=None
        )
        np.testing.assert_allclose(prediction[:, n], b.mean() + (a - a.mean(0)) @ slope, atol=1e-5)


@pytest.mark.parametrize("lead_time", [1, 5, 6, 24])
def test_channels_are_named_and_normalised(lead_time):
    train = split(hourly_field(), lead_time).train
    inputs, target = (torch.stack(fields) for fields in zip(*train, strict=True))
    assert inputs.shape[1:] == (6, len(train.input_names))
    assert len(set(train.input_names)) == train.in_channels
    std = inputs[..., :-6].flatten(0, 1).std(0)
    torch.testing.assert_close(std, torch.ones(train.in_channels - 6), rtol=0.05, atol=0)
    assert target.std().item() == pytest.approx(1, rel=0.02)
    assert abs(target.mean().item()) < 0.02
    assert f"change in the last {24 - lead_time} h" in train.input_names or lead_time == 24


def test_real_field_is_the_month_of_hours_over_the_uk(real):
    assert [len(part) for part in real] == [546, 42, 114]
    lat, lon = real.train.nodes.lat, real.train.nodes.lon
    assert len(lat) == 33 * 49
    assert (lat.max(), lat.min(), lon.min(), lon.max()) == (58, 50, -10, 2)
    assert real.test.title(0) == "2019-03-27 00:00 UTC + 6 h"
    assert real.test.title(113) == "2019-03-31 17:00 UTC + 6 h"
    assert min(real.test.truth(i).min() for i in range(114)) > 250
    assert max(real.test.truth(i).max() for i in range(114)) < 300


def test_baselines_have_their_known_errors(real):
    def rmse(forecast):
        return (
            torch.stack([forecast(i) - real.test.truth(i) for i in range(114)])
            .square()
            .mean()
            .sqrt()
            .item()
        )

    known = {"persistence": 2.790, "same hour yesterday": 1.541}  # kelvin
    known |= {"ridge per point, 26 days": 1.484, "ridge per point, 24 days": 1.649}
    assert {
        name: rmse(forecast) for name, forecast in real.test.baselines().items()
    } == pytest.approx(known, abs=1e-3)


def test_file_is_read_without_leaving_an_index_next_to_it(real, era5_path, tmp_path):
    copy = shutil.copyfile(era5_path, tmp_path / "field.grib")
    torch.testing.assert_close(era5_uk(copy).test[3], real.test[3], rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == [copy]


def test_null_path_downloads_the_file_of_xarrays_tutorial_once(era5_path, real, monkeypatch):
    asked = []

    def retrieve(url, known_hash, **_):
        asked.append((url.rsplit("/", 1)[1], known_hash))
        return era5_path

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    assert isinstance(era5_uk(None), Splits)
    digest = hashlib.sha256(Path(era5_path).read_bytes()).hexdigest()
    assert asked == [("era5-2mt-2019-03-uk.grib", f"sha256:{digest}")]


def test_missing_file_or_package_raises_and_says_how_to_get_it(monkeypatch, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no file .*no\.grib: give the data as data.path=FILE"
    ):
        era5_uk(tmp_path / "no.grib")
    (tmp_path / "a.grib").write_bytes(b"GRIB")
    monkeypatch.setitem(sys.modules, "eccodes", None)  # as if not installed
    with pytest.raises(ImportError, match=r"eccodes is needed.*pip install 'anemoi-gt\[era5\]'"):
        era5_uk(tmp_path / "a.grib")


def test_without_a_network_the_message_asks_for_the_file(monkeypatch):
    def refused(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(pooch, "retrieve", refused)
    said = r"could not download era5-2mt-2019-03-uk.grib .*: give the file as data.path=FILE"
    with pytest.raises(OSError, match=said):
        era5_uk(None)


TIMES = FIRST_HOUR + np.arange(HOURS)
VALUES = 280 + draw(HOURS, 6, seed=0)
PRESENT = np.arange(HOURS) != 100


@refused(
    *(
        (lambda hours=hours: split(hourly_field(), hours), f"1 to 24 hours, got {hours}")
        for hours in (0, 25)
    ),
    (lambda: split(hourly_field(), 6.5), "lead_time must be an integer, got 6.5"),
    (lambda: split(hourly_field(hours=630), LEAD), "more than 630 hours, got 630"),
    (lambda: HourlyField(POINTS, TIMES[PRESENT], VALUES[PRESENT]), "an hour apart"),
    (lambda: HourlyField(POINTS, TIMES, VALUES.where(VALUES[3, 2] != VALUES, torch.nan)), "finite"),
)
def test_invalid_field_or_lead_time_raises(wrong, message):
    raises(wrong, message)
