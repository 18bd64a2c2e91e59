"""Physical inputs of packages: the channels and references of the data sets, and the angles of the time."""

import numpy as np
import pytest
import torch
from support.own_data import weather_file
from support.weather import hourly_field

from anemoi_gt.app.datasets.era5_uk import split
from anemoi_gt.app.datasets.field_dataset import field_data
from anemoi_gt.app.datasets.physical import PhysicalModel, year_angle
from anemoi_gt.app.datasets.sphere_advection import sphere


@pytest.fixture(
    params=["sphere", "era5_uk 1 h", "era5_uk 24 h", "fields", "fields with diagnostics"]
)
def dataset(request, tmp_path):
    if request.param == "sphere":
        return sphere("O4", train_size=4).test
    if request.param.startswith("era5_uk"):
        return split(hourly_field(), int(request.param.split()[1])).test
    weather_file().to_netcdf(tmp_path / "weather.nc")
    diagnostics = ["tp"] if "diagnostics" in request.param else None
    return field_data(str(tmp_path / "weather.nc"), diagnostics=diagnostics, input_steps=3).test


def test_physical_inputs_give_the_channels_and_the_reference_of_the_data_set(dataset):
    inputs = dataset.physical_inputs()
    sample = tuple(part[None] for part in dataset.physical_sample(1))
    channels, reference = inputs(*sample)
    assert sample[0].shape[2] == len(inputs.names) == len(inputs.units)
    assert len(sample) == 1 + inputs.needs_time
    torch.testing.assert_close(channels[0], dataset.inputs(1))
    torch.testing.assert_close(reference[0], dataset.reference(1))


def test_fields_have_the_local_solar_time_and_the_day_of_the_year(tmp_path):
    weather_file().to_netcdf(tmp_path / "weather.nc")
    test = field_data(str(tmp_path / "weather.nc")).test
    time = test.start_time(1)
    day = (time - time.astype("datetime64[D]")) / np.timedelta64(24, "h")
    year = (time - time.astype("datetime64[Y]")) / np.timedelta64(31_556_952, "s")
    local = 2 * np.pi * day + np.deg2rad(test.nodes.lon)
    year = np.full_like(local, 2 * np.pi * year)
    expected = np.stack([np.sin(local), np.cos(local), np.sin(year), np.cos(year)], axis=1)
    np.testing.assert_allclose(test.inputs(1)[:, -4:], expected, atol=1e-6)


def test_a_physical_model_forecasts_like_the_data_set(dataset):
    torch.manual_seed(0)
    network = torch.nn.Linear(dataset.in_channels, dataset.out_channels)
    model = PhysicalModel(
        dataset.physical_inputs(), network, dataset.change_mean, dataset.change_std
    )
    sample = tuple(part[None] for part in dataset.physical_sample(1))
    with torch.no_grad():
        forecast, output = model(*sample), network(dataset.inputs(1))
        torch.testing.assert_close(forecast[0], dataset.forecast(1, output))
        error = (model.normalised_change(forecast, *sample)[0] - output).abs().max().item()
        assert error <= 4 * model.rounding(forecast) + 1e-5


DATES = [
    "1970-01-01",
    "1999-12-31T23",
    "2000-02-29T12",
    "2000-03-01",
    "2024-12-31T18",
    "2100-02-28",
    "2100-03-01",
]


def test_the_angle_of_the_year_follows_the_calendar():
    times = np.array([*DATES, "1969-07-20T20:17", "2020-12-31T23:59:59"], "datetime64[s]")
    since = (times - times.astype("datetime64[Y]")) / np.timedelta64(31_556_952, "s")
    angles = year_angle(torch.from_numpy(times.astype("int64")).double())
    np.testing.assert_allclose(angles, 2 * np.pi * since, atol=1e-12)
