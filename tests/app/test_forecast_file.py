"""Forecast files for other tools: CF coordinates, grid dimensions in the order of the data, NetCDF and zarr."""

from pathlib import Path

import numpy as np
import pytest
import xarray
from support.own_data import LAT, LON, SMALL_RUN, TIMES, weather_file
from support.picture import colours

from anemoi_gt.app import rollout_command as rollout
from anemoi_gt.app import train_command as train
from anemoi_gt.app.datasets.readers import read_xarray
from anemoi_gt.app.datasets.sphere_advection import sphere
from anemoi_gt.app.forecast_file import check_forecast_path, describe_forecast, regular_axes
from anemoi_gt.data.grids import octahedral, regional
from anemoi_gt.data.nodes import Nodes

pytestmark = pytest.mark.application

SMALL = [*SMALL_RUN, "hydra.run.dir=run"]
ROLLOUT = ("checkpoint=run/best.pt", "steps=3", "hydra.run.dir=forecast")


def trained(start, weather):
    weather.to_netcdf("weather.nc")
    start(train, *SMALL)


@pytest.fixture
def workdir(tmp_path, monkeypatch, without_pictures):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(weather):
    weather.t2m.attrs |= {"standard_name": "air_temperature", "long_name": "2 metre temperature"}
    weather.level.attrs["units"] = "hPa"
    return weather


def test_a_forecast_of_a_regular_grid_is_a_map_of_latitude_and_longitude_in_the_order_of_the_file(
    workdir, start
):
    trained(start, named(weather_file()))
    start(rollout, *ROLLOUT, "start=latest")
    with xarray.open_dataset("forecast/rollout.nc", engine="netcdf4") as forecast:
        assert forecast.t2m.dims == ("time", "latitude", "longitude")
        assert np.array_equal(forecast.latitude, LAT)
        assert np.array_equal(forecast.longitude, LON)
        lead_times = np.array([6, 12, 18]) * np.timedelta64(1, "h")
        assert np.array_equal(forecast.time, TIMES[-1] + lead_times)
        assert forecast.forecast_reference_time == TIMES[-1]
        assert forecast.t2m.attrs["standard_name"] == "air_temperature"
        assert forecast.t2m.attrs["units"] == "K"
        assert forecast.t2m.attrs["long_name"] == "2 metre temperature"
        assert forecast.z_850.attrs["level"] == "level 850 hPa"
        assert forecast.latitude.attrs["units"] == "degrees_north"
        assert forecast.longitude.attrs["axis"] == "X"
        # After four steps a network is close to persistence: the wave is where the file has it.
        last = weather_file().t2m.values[-1]
        assert np.corrcoef(forecast.t2m.values[0].ravel(), last.ravel())[0, 1] > 0.8
    with xarray.open_dataset("forecast/rollout.nc", decode_times=False) as raw:
        assert raw.time.attrs["units"] == "hours since 2020-01-10 18:00:00"
        assert raw.lead_time.attrs["units"] == "hours"
        assert np.array_equal(raw.lead_time, [6, 12, 18])
        assert raw.lead_time.attrs["standard_name"] == "forecast_period"
        assert raw.attrs["Conventions"].startswith("CF-")


def test_xarray_plots_a_map_of_the_forecast(workdir, start):
    trained(start, weather_file())
    start(rollout, *ROLLOUT)
    import matplotlib.pyplot as plt

    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        mesh = forecast.t2m.isel(time=0).plot(figsize=(8, 6))
        assert mesh.axes.get_xlabel().startswith("longitude")
        assert mesh.axes.get_ylabel().startswith("latitude")
        mesh.figure.savefig("map.png")
        plt.close(mesh.figure)
    assert len(np.unique(colours("map.png"))) > 100


def test_a_rollout_of_a_read_forecast_has_its_variables(workdir, start):
    """The library reads the file that `rollout` writes, on the same grid."""
    trained(start, weather_file())
    start(rollout, *ROLLOUT)
    fields = read_xarray("forecast/rollout.nc")
    assert {"t2m", "z_500", "z_850", "tp"} <= set(fields.readers)
    assert len(fields.times) == 3
    assert np.array_equal(fields.nodes.lat, read_xarray("weather.nc").nodes.lat)


def test_the_suffix_zarr_writes_a_zarr_with_the_same_content(workdir, start):
    trained(start, weather_file())
    start(rollout, *ROLLOUT)
    start(rollout, *ROLLOUT, f"out={workdir / 'elsewhere.zarr'}")
    with (
        xarray.open_dataset("forecast/rollout.nc") as one,
        xarray.open_dataset("elsewhere.zarr", engine="zarr") as two,
    ):
        xarray.testing.assert_equal(one, two)


def test_every_member_of_an_ensemble_has_a_forecast(workdir, start):
    members = [weather_file().isel(time=slice(0, 20)), weather_file().isel(time=slice(0, 20)) + 1]
    trained(start, xarray.concat(members, "number").assign_coords(number=[0, 1]))
    start(rollout, *ROLLOUT, "start=2020-01-05")
    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        assert forecast.t2m.dims == ("number", "time", "latitude", "longitude")
        assert forecast.sizes["number"] == 2
        assert 0.5 < float((forecast.t2m[1] - forecast.t2m[0]).mean()) < 1.5


def test_a_file_of_two_times_is_enough_to_start_from_the_latest(workdir, start):
    trained(start, weather_file())
    weather_file().isel(time=slice(-2, None)).to_netcdf("now.nc")
    start(rollout, *ROLLOUT, "start=latest", "data.path=now.nc")
    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        assert forecast.forecast_reference_time == TIMES[-1]


def test_a_start_outside_the_data_and_an_unknown_file_format_are_refused(
    workdir, start, error_line
):
    trained(start, weather_file())
    error = error_line(start, rollout, *ROLLOUT, "start=2030-01-01")
    message = "start must be a time of the data, which are from 2020-01-01T00:00 to "
    assert message + "2020-01-10T18:00, got 2030" in error
    error = error_line(start, rollout, *ROLLOUT, "out=a.grib")
    assert "out must end in .nc or .zarr, for NetCDF or zarr, got" in error
    assert not Path("forecast").exists()


def test_data_without_dates_have_lead_times_and_other_grids_have_nodes():
    test = sphere("O4", train_size=2).test
    forecast = describe_forecast(test, 0, np.zeros((1, 2, len(test.nodes), 1)))
    assert forecast.tracer.dims == ("lead_time", "node")
    assert np.array_equal(forecast.lead_time, [12, 24])
    assert forecast.latitude.dims == ("node",)


@pytest.mark.parametrize("lat", [[50.0, 49.0, 48.0], [48.0, 49.0, 50.0]])
def test_axes_of_a_grid_are_found_in_either_order_and_no_others(lat):
    lon = [170.0, 180.0, 190.0]
    axes = regular_axes(regional(np.array(lat), np.array(lon)))
    assert np.array_equal(axes[0], lat)
    assert np.array_equal(axes[1], lon)
    assert regular_axes(octahedral(4)) is None
    assert regular_axes(Nodes([1, 2, 3, 4], [0, 1, 2, 3])) is None


def test_only_netcdf_and_zarr_are_written():
    check_forecast_path(Path("a.nc"))
    with pytest.raises(ValueError, match="out must end in"):
        check_forecast_path(Path("a"))
