"""Forecast files for other tools: CF coordinates, grid dimensions in the order of the data, NetCDF and zarr."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray
from support.fields import arrange_all, fields_of
from support.own_data import LAT, LON, SMALL_RUN, TIMES, weather_file
from support.picture import colours

from anemoi_gt.app import rollout_command as rollout
from anemoi_gt.app import train_command as train
from anemoi_gt.app.datasets.field_dataset import FieldDataset
from anemoi_gt.app.datasets.field_states import FieldStates
from anemoi_gt.app.datasets.fields import Level
from anemoi_gt.app.datasets.roles import Roles
from anemoi_gt.app.datasets.sphere_advection import sphere
from anemoi_gt.app.datasets.xarray_reader import read_dataset
from anemoi_gt.app.forecast_file import (
    check_forecast_path,
    describe_forecast,
    join_starts,
    regular_axes,
    write_forecast,
)
from anemoi_gt.data.grids import octahedral, regional
from anemoi_gt.data.nodes import Nodes

pytestmark = pytest.mark.application

SMALL = [*SMALL_RUN, "hydra.run.dir=run"]
ROLLOUT = ("checkpoint=run/best.pt", "steps=3", "hydra.run.dir=forecast")


def train_on(start, weather):
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
    train_on(start, named(weather_file()))
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
        assert forecast.z_850.attrs["level"] == "850 hPa"
        assert forecast.latitude.attrs["units"] == "degrees_north"
        assert forecast.longitude.attrs["axis"] == "X"
        # After four steps a network is close to persistence: the wave is where the file has it.
        last = weather_file().t2m.values[-1]
        assert np.corrcoef(forecast.t2m.values[0].ravel(), last.ravel())[0, 1] > 0.8
    with xarray.open_dataset("forecast/rollout.nc", decode_times=False) as raw:
        assert raw.time.attrs["units"] == "seconds since 1970-01-01 00:00:00"
        assert raw.lead_time.attrs["units"] == "hours"
        assert np.array_equal(raw.lead_time, [6, 12, 18])
        assert raw.lead_time.attrs["standard_name"] == "forecast_period"
        assert raw.attrs["Conventions"].startswith("CF-")


def test_xarray_plots_a_map_of_the_forecast(trained, start):
    start(rollout, *ROLLOUT)
    import matplotlib.pyplot as plt

    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        mesh = forecast.t2m.isel(time=0).plot(figsize=(8, 6))
        assert mesh.axes.get_xlabel().startswith("longitude")
        assert mesh.axes.get_ylabel().startswith("latitude")
        mesh.figure.savefig("map.png")
        plt.close(mesh.figure)
    assert len(np.unique(colours("map.png"))) > 100


def test_a_rollout_of_a_read_forecast_has_its_variables(trained, start):
    """The library reads the file that `rollout` writes, on the same grid."""
    start(rollout, *ROLLOUT)
    fields = fields_of("forecast/rollout.nc")
    assert {"t2m", "z_500", "z_850", "tp"} <= set(fields.readers)
    assert len(fields.times) == 3
    assert np.array_equal(fields.nodes.lat, fields_of("weather.nc").nodes.lat)


def test_the_suffix_zarr_writes_a_zarr_with_the_same_content(trained, start):
    start(rollout, *ROLLOUT)
    start(rollout, *ROLLOUT, f"out={trained / 'elsewhere.zarr'}")
    with (
        xarray.open_dataset("forecast/rollout.nc") as one,
        xarray.open_dataset("elsewhere.zarr", engine="zarr") as two,
    ):
        xarray.testing.assert_equal(one, two)


def test_every_member_of_an_ensemble_has_a_forecast(workdir, start):
    members = [weather_file().isel(time=slice(0, 20)), weather_file().isel(time=slice(0, 20)) + 1]
    train_on(start, xarray.concat(members, "number").assign_coords(number=[3, 11]))
    start(rollout, *ROLLOUT, "start=2020-01-05")
    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        assert forecast.t2m.dims == ("number", "time", "latitude", "longitude")
        assert forecast.number.values.tolist() == [3, 11]
        assert forecast.attrs["title"] == "2020-01-05 00:00 UTC + 6 h, 3 steps, 2 members"
        assert 0.5 < float((forecast.t2m[1] - forecast.t2m[0]).mean()) < 1.5


def test_levels_members_and_cell_methods_of_the_data_are_in_the_forecast():
    weather = weather_file()
    weather = weather.rename(tp="u10").drop_vars("z").assign_coords(number=11)
    weather.t2m.attrs["cell_methods"] = "time: point"
    series, _ = read_dataset(weather)
    heights = {"t2m": 2.0, "u10": 10.0}
    at_heights = []
    for one in series:
        if one.key.parameter in heights:
            height = heights[one.key.parameter]
            level = Level("height", height, f"{height:g}", f"{height:g} m")
            at_heights.append(replace(one, key=one.key._replace(levels=(level,))))
    data = FieldDataset(FieldStates(arrange_all(at_heights), Roles(("t2m", "u10"), (), ()), 6.0, 1))
    data = data.starting_at("latest")
    forecast = describe_forecast(data, 0, np.zeros((1, 2, len(data.nodes), 2)))
    assert forecast.number == 11
    assert forecast.t2m.attrs["cell_methods"] == "time: point"
    assert forecast.t2m.attrs["coordinates"].split()[-2:] == ["number", "height"]
    assert forecast.u10.attrs["coordinates"].split()[-2:] == ["number", "height_2"]
    assert (forecast.height, forecast.height_2) == (2, 10)
    assert forecast.attrs["title"].endswith("member 11, 2 steps")


def forecast_of(source, variables):
    """Return one step of a forecast whose variables have the values 0, 1, ..."""
    states = FieldStates(fields_of(source), Roles(tuple(variables), (), ()), 6.0, 1)
    data = FieldDataset(states).starting_at("latest")
    return describe_forecast(data, 0, np.ones((1, 1, len(data.nodes), 1)) * range(len(variables)))


@pytest.mark.parametrize("name", ["height", "depth"])
@pytest.mark.parametrize(
    ("units", "metres"),
    [
        ("m", [2, 150]),
        ("metres", [2, 150]),
        ("cm", [0.02, 1.5]),
        ("km", [2000, 150_000]),
        ("ft", [0.6096, 45.72]),
    ],
)
def test_heights_and_depths_are_in_metres_whatever_their_units_in_the_data(name, units, metres):
    weather = weather_file()[["z"]].rename(level=name)
    weather = weather.assign_coords({name: [2.0, 150.0]})
    weather[name].attrs |= {"standard_name": name, "units": units}
    forecast = forecast_of(weather, ["z_2", "z_150"])
    np.testing.assert_allclose([forecast[name], forecast[f"{name}_2"]], metres)
    assert forecast[name].attrs["units"] == "m"
    # as from a file of the same levels in m
    same = weather.assign_coords({name: (name, metres, weather[name].attrs | {"units": "m"})})
    for label, z in zip(("2", "150"), fields_of(same).keys.values(), strict=True):
        key = fields_of(weather).keys[f"z_{label}"]
        assert key.matches(z)
        (level,) = key.levels  # as a checkpoint of 0.5.0 has it
        assert key.matches(key._replace(levels=(level._replace(value=float(label)),)))


def test_a_height_in_other_units_is_in_its_variable_only():
    weather = weather_file()[["t2m"]].assign_coords(height=500.0)
    weather.height.attrs |= {"standard_name": "height", "units": "fathom"}
    forecast = forecast_of(weather, ["t2m"])
    assert "height" not in forecast.coords
    assert forecast.t2m.attrs["level"] == "500 fathom"
    key = fields_of(weather).keys["t2m"]
    for other in ({"units": "m"}, {"standard_name": "air_pressure", "units": "hPa"}):
        weather.height.attrs |= other
        assert not key.matches(fields_of(weather).keys["t2m"])


def test_a_variable_keeps_its_name_where_a_coordinate_or_another_variable_would_get_it():
    weather = weather_file()
    weather.level.attrs |= {"standard_name": "height", "units": "m"}
    weather = weather.rename({"t2m": "z-500", "tp": "height"})
    forecast = forecast_of(weather, ["z-500", "z_500", "height"])
    values = {name: float(array[0, 0, 0]) for name, array in forecast.data_vars.items()}
    assert values == {"z_500_2": 0, "z_500": 1, "height": 2}
    assert forecast.z_500_2.attrs["long_name"] == "z-500"
    assert forecast.z_500.attrs["coordinates"].endswith(" height_2")
    assert forecast.height_2 == 500


def test_a_file_of_two_times_is_enough_to_start_from_the_latest(trained, start):
    weather_file().isel(time=slice(-2, None)).to_netcdf("now.nc")
    start(rollout, *ROLLOUT, "start=latest", "data.path=now.nc")
    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        assert forecast.forecast_reference_time == TIMES[-1]


def test_a_forecast_is_refused_if_forcings_that_change_end_before_its_last_step(
    workdir, start, error_line
):
    weather_file().to_netcdf("weather.nc")
    start(train, *SMALL, "data.forcings=[z_500,lsm]")
    error = error_line(start, rollout, *ROLLOUT, "start=latest")
    assert "needs the forcings of every step, the data end before step 1" in error


def test_a_start_outside_the_data_and_an_unknown_file_format_are_refused(
    trained, start, error_line
):
    error = error_line(start, rollout, *ROLLOUT, "start=2030-01-01")
    message = "start must be a time of the data, which are from 2020-01-01T00:00 to "
    assert message + "2020-01-10T18:00, got 2030" in error
    error = error_line(start, rollout, *ROLLOUT, "out=a.grib")
    assert "out must end in .nc or .zarr, for NetCDF or zarr, got" in error


def test_a_regular_grid_across_greenwich_is_written_with_continuous_longitudes(workdir, start):
    lon = np.array([354.0, 356.0, 358.0, 0.0, 2.0, 4.0])
    train_on(start, weather_file(lon=lon))
    start(rollout, *ROLLOUT, "start=latest")
    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        assert forecast.t2m.dims == ("time", "latitude", "longitude")
        assert np.array_equal(forecast.longitude, [-6, -4, -2, 0, 2, 4])
        last = weather_file(lon=lon).t2m.values[-1]
        assert np.corrcoef(forecast.t2m.values[0].ravel(), last.ravel())[0, 1] > 0.8


def rotated_file():
    """Return t2m on a rotated grid of rlat and rlon, as CORDEX writes it."""
    rlat, rlon = np.linspace(-3, 3, 9), np.linspace(-4, 4, 13)
    angle = np.deg2rad(30)
    lat = 50 + np.sin(angle) * rlon[None] + np.cos(angle) * rlat[:, None]
    lon = 10 + np.cos(angle) * rlon[None] - np.sin(angle) * rlat[:, None]
    source = weather_file()[["t2m"]].rename(latitude="rlat", longitude="rlon")
    source = source.assign_coords(
        rlat=("rlat", rlat, {"standard_name": "grid_latitude", "units": "degrees"}),
        rlon=("rlon", rlon, {"standard_name": "grid_longitude", "units": "degrees"}),
        lat=(("rlat", "rlon"), lat, {"standard_name": "latitude", "units": "degrees_north"}),
        lon=(("rlat", "rlon"), lon, {"standard_name": "longitude", "units": "degrees_east"}),
    )
    pole = {"grid_mapping_name": "rotated_latitude_longitude", "grid_north_pole_latitude": 40.0}
    source["rotated_pole"] = ((), 0, pole)
    source.t2m.attrs["grid_mapping"] = "rotated_pole"
    return source


def test_a_rotated_grid_keeps_its_dimensions_and_its_grid_mapping(workdir, start):
    source = rotated_file()
    train_on(start, source)
    start(rollout, *ROLLOUT)
    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        assert forecast.t2m.dims == ("time", "rlat", "rlon")
        assert np.array_equal(forecast.rlon, source.rlon)
        assert forecast.rlat.attrs["standard_name"] == "grid_latitude"
        assert np.array_equal(forecast.latitude, source.lat)
        assert forecast.t2m.attrs["grid_mapping"] == "rotated_pole"
        assert forecast.rotated_pole.attrs["grid_north_pole_latitude"] == 40
    again = fields_of("forecast/rollout.nc")
    assert list(again.readers) == ["t2m"]
    np.testing.assert_allclose(again.nodes.lat, source.lat.values.ravel())


# attributes that name other variables, CF conventions, appendix A
REFERENCES = (
    *("ancillary_variables", "bounds", "cell_measures", "climatology", "compress", "formula_terms"),
    *("geometry", "instance_dimension", "node_coordinates", "coordinates", "grid_mapping"),
)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.parametrize("starts", [["latest"], ["2020-01-05", "latest"]])
def test_a_forecast_file_names_no_variable_that_it_does_not_have(starts, suffix, tmp_path):
    source = rotated_file().assign_coords(height=2.0)
    source.height.attrs |= {"standard_name": "height", "units": "m", "positive": "up"}
    for name in ("t2m", "rlat", "rlon", "lat", "lon", "height", "time"):
        source[name].attrs |= dict.fromkeys(REFERENCES[:-2], "left_out")
        source[name].attrs |= {"cell_measures": "area: left_out", "formula_terms": "a: left_out"}
    source["left_out"] = source.rlat
    data = FieldDataset(FieldStates(fields_of(source), Roles(("t2m",), (), ()), 6.0, 1))
    forecasts = []
    for start in starts:
        states = np.zeros((1, 2, len(data.nodes), 1))
        forecasts.append(describe_forecast(data.starting_at(start), 0, states))
    path = tmp_path / f"forecast{suffix}"
    write_forecast(path, join_starts(forecasts))
    raw = xarray.open_dataset(path, decode_cf=False, engine={".nc": "netcdf4"}.get(suffix, "zarr"))
    for variable in raw.variables.values():
        for attribute in REFERENCES:
            assert set(variable.attrs.get(attribute, "").split()) <= set(raw.variables)
    assert raw.t2m.attrs["grid_mapping"] == "rotated_pole"
    assert "rotated_pole" not in raw.t2m.attrs["coordinates"].split()
    assert "coordinates" not in raw.attrs
    kept = {"standard_name": "grid_latitude", "units": "degrees"}
    assert {name: raw.rlat.attrs.get(name) for name in kept} == kept


def test_names_that_a_file_cannot_hold_are_distinct_with_the_original_in_long_name(workdir, start):
    weather = weather_file()[["t2m", "tp"]].rename({"t2m": "t 500", "tp": "t-500"})
    train_on(start, weather)
    start(rollout, *ROLLOUT)
    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        names = {name: array.attrs["long_name"] for name, array in forecast.data_vars.items()}
        assert names == {"t_500": "t 500", "t_500_2": "t-500"}
        assert forecast.t_500.mean() > 200 > forecast.t_500_2.mean()


def test_several_starts_are_in_one_file(trained, start):
    dates = ["2020-01-05", "2020-01-07T06"]
    start(rollout, *ROLLOUT, f"start=[{','.join(dates)}]")
    start(rollout, *ROLLOUT[:2], "hydra.run.dir=single", f"start={dates[1]}")
    with (
        xarray.open_dataset("forecast/rollout.nc", decode_timedelta=False) as forecast,
        xarray.open_dataset("single/rollout.nc") as single,
        xarray.open_dataset("forecast/rollout.nc", decode_coords=False) as raw,
    ):
        dims = ("forecast_reference_time", "lead_time", "latitude", "longitude")
        assert forecast.t2m.dims == dims
        starts = np.array(dates, "datetime64[ns]")
        assert np.array_equal(forecast.forecast_reference_time, starts)
        hours = np.array([6, 12, 18]) * np.timedelta64(1, "h")
        assert np.array_equal(forecast.time, starts[:, None] + hours)
        assert np.array_equal(forecast.t2m[1], single.t2m)
        assert raw.t2m.attrs["coordinates"] == "time"


def test_a_forecast_into_no_folder_is_refused_before_it_is_made(tmp_path):
    check_forecast_path(tmp_path / "forecast.nc")
    with pytest.raises(ValueError, match="out must be in a folder that exists, got .*nowhere"):
        check_forecast_path(tmp_path / "nowhere" / "forecast.nc")


def test_a_start_and_a_sample_exclude_each_other(trained, start, error_line):
    error = error_line(start, rollout, *ROLLOUT, "start=latest", "sample=0")
    assert "got start=latest and sample=0: leave one out" in error


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
    assert list(axes) == ["latitude", "longitude"]
    assert np.array_equal(axes["latitude"], lat)
    assert np.array_equal(axes["longitude"], lon)
    assert regular_axes(octahedral(4)) is None
    assert regular_axes(Nodes([1, 2, 3, 4], [0, 1, 2, 3])) is None


def test_only_netcdf_and_zarr_are_written():
    check_forecast_path(Path("a.nc"))
    with pytest.raises(ValueError, match="out must end in"):
        check_forecast_path(Path("a"))
