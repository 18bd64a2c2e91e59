"""The page on a user's data, followed from an empty folder with a file of the Climate Data Store."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import xarray
from support.own_data import weather_file
from support.pages import FILE, ROOT, blocks

from anemoi_gt.app import evaluate_command as evaluate
from anemoi_gt.app import rollout_command as rollout
from anemoi_gt.app import train_command as train
from anemoi_gt.app.training.run_files import load_checkpoint
from anemoi_gt.data.grids import octahedral

pytestmark = pytest.mark.application

PAGE = ROOT / "docs" / "own_data.md"
SMALL = [
    "model.channels=8",
    "model.num_layers=1",
    "training.steps=4",
    "training.valid_every=2",
    "training.device=cpu",
]


def cds_file(path):
    """Write packed integers on descending latitudes, with `lsm` at every time and scalar coordinates; return the data."""
    times = np.datetime64("2020-01-01", "ns") + 6 * np.arange(60) * np.timedelta64(1, "h")
    lat = np.arange(60.0, 49.9, -0.5)
    lon = np.arange(-10.0, 5.1, 0.5)
    weather = weather_file(lat, lon, times)[["t2m", "tp", "lsm"]]
    is_land = np.cos(np.deg2rad(40 * lat))[:, None] + np.sin(np.deg2rad(30 * lon)) > 0
    lsm = weather.lsm.copy(data=is_land.astype("float32"))
    weather["lsm"] = lsm.expand_dims(time=times)
    weather = weather.rename(time="valid_time")
    weather = weather.assign_coords(number=0, expver=("valid_time", ["0001"] * len(times)))
    weather.t2m.attrs |= {"long_name": "2 metre temperature", "standard_name": "unknown"}
    packed = {"dtype": "int16", "_FillValue": -32767}
    encoding = {
        "t2m": packed | {"add_offset": 273.0, "scale_factor": 6e-4},
        "tp": packed | {"add_offset": 0.5, "scale_factor": 2e-5},
        "lsm": packed | {"add_offset": 0.5, "scale_factor": 2e-5},
    }
    weather.to_netcdf(path, encoding=encoding)
    return weather


@pytest.fixture
def workdir(tmp_path, monkeypatch, without_pictures):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_of_the_climate_data_store_becomes_a_forecast_that_xarray_shows_where_it_is(
    workdir, start, capsys
):
    source = cds_file("era5.nc")
    start(
        train,
        "data=xarray",
        "data.path=era5.nc",
        "data.diagnostics=[tp]",
        "hydra.run.dir=runs/era5",
        *SMALL,
    )
    output = capsys.readouterr().out
    assert "inputs that never change, taken as forcings without time: lsm" in output
    assert (
        "6 h forecasts of t2m [K], tp [m], from 2 input times\ndiagnostics, which are no inputs: tp\nforcings: "
        "lsm\n" in output
    )
    assert "training samples, starting 2020-01-01 06:00 to 2020-01-12 12:00 UTC\n" in output
    assert re.search(r"graph: 651 data nodes, \d+ hidden nodes; \d+ edges data to hidden, ", output)
    checkpoint = "checkpoint=runs/era5/best.pt"
    start(evaluate, checkpoint, "rollout=2", "hydra.run.dir=scores", "plots.variables=[tp]")
    scores = json.loads(Path("scores/rollout.json").read_text())
    assert {score["variable"] for score in scores} == {"t2m", "tp"}
    start(rollout, checkpoint, "steps=2", "start=latest", "hydra.run.dir=forecast")
    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        last = source.t2m.isel(valid_time=-1)
        assert forecast.forecast_reference_time == last.valid_time
        assert list(forecast.latitude.values) == list(source.latitude.values)
        first = forecast.t2m.isel(time=0)
        assert first.attrs == {"long_name": "2 metre temperature", "units": "K"}
        on_same_axes = first.drop_vars(["time", "lead_time", "forecast_reference_time"])
        assert float(xarray.corr(on_same_axes, last)) > 0.8
        # the correlation is lower if the rows are reversed
        assert float(xarray.corr(on_same_axes, last.copy(data=last.values[::-1]))) < 0.7


def test_the_config_of_the_page_runs_on_its_own_file(workdir, start):
    scripts = {FILE.match(code)[1]: code for code in blocks(PAGE, "python") if FILE.match(code)}
    exec(compile(scripts["make_weather.py"], "make_weather.py", "exec"), {})
    configs = [code for code in blocks(PAGE, "text") if code.startswith("# conf/")]
    assert len(configs) == 2
    for code in configs:
        path = Path(code.splitlines()[0].removeprefix("# "))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    start(train, "--config-dir", "conf", "data=mine", "hydra.run.dir=run", *SMALL)
    state = load_checkpoint(Path("run/last.pt"))
    assert state["step"] == 4
    assert state["schema"]["diagnostics"] == ["tp"]
    assert state["config"]["graph"]["refinement"] == 5


def icon_file():
    """Return t2m and rain on points without rows, in radians with bounds, as ICON writes them."""
    nodes = octahedral(8)
    region = (nodes.lat > 20) & (nodes.lat < 80)
    lat, lon = nodes.lat[region], nodes.lon[region]
    phase = np.deg2rad(3 * lon)[None] - np.arange(60)[:, None] / 5
    wave = np.sin(phase + np.deg2rad(4 * lat)).astype("float32")
    times = np.datetime64("2020-01-01", "ns") + 6 * np.arange(60) * np.timedelta64(1, "h")
    dims = ("time", "ncells")
    source = xarray.Dataset(
        {
            "clat_bnds": (("ncells", "vertices"), np.deg2rad(lat)[:, None] + np.zeros(3)),
            "clon_bnds": (("ncells", "vertices"), np.deg2rad(lon)[:, None] + np.zeros(3)),
            "t_2m": (dims, 280 + 5 * wave, {"units": "K", "coordinates": "clat clon"}),
            "tot_prec": (dims, wave.clip(0), {"units": "kg m-2", "coordinates": "clat clon"}),
        },
        {"time": times},
    )
    for name, axis, values in (("clat", "latitude", lat), ("clon", "longitude", lon)):
        attrs = {"standard_name": axis, "units": "radian", "bounds": f"{name}_bnds"}
        source[name] = ("ncells", np.deg2rad(values), attrs)
    return source, ("ncells",), lat, lon


def forecast_file():
    """Return t2m and rain by start and step, as the Climate Data Store writes forecasts."""
    times = np.datetime64("2020-01-01T06", "ns") + 6 * np.arange(60) * np.timedelta64(1, "h")
    weather = weather_file(times=times)[["t2m", "tp"]]
    dims = ("forecast_reference_time", "forecast_period")
    variables = {}
    for name, array in weather.items():
        values = array.values.reshape(30, 2, 9, 13)
        variables[name] = ((*dims, "latitude", "longitude"), values, array.attrs)
    source = xarray.Dataset(
        variables, {"latitude": weather.latitude, "longitude": weather.longitude}
    )
    start = times[::2] - np.timedelta64(6, "h")
    source = source.assign_coords(
        forecast_reference_time=(dims[0], start, {"standard_name": "forecast_reference_time"}),
        forecast_period=(dims[1], [6, 12], {"standard_name": "forecast_period", "units": "hours"}),
        valid_time=(dims, times.reshape(30, 2), {"standard_name": "time"}),
    )
    lat, lon = np.meshgrid(weather.latitude, weather.longitude, indexing="ij")
    return source, ("latitude", "longitude"), lat, lon


def rotated_file():
    """Return t2m and rain on a rotated grid with vertices, as CORDEX writes them."""
    rlat, rlon = np.linspace(-5, 5, 9), np.linspace(-7, 7, 13)
    lat, lon = 50 + 0.8 * rlat[:, None] + 0.6 * rlon, 10 - 0.6 * rlat[:, None] + 0.8 * rlon
    dims = ("rlat", "rlon")
    times = np.datetime64("2020-01-01", "ns") + 6 * np.arange(60) * np.timedelta64(1, "h")
    weather = weather_file(times=times)[["t2m", "tp"]].rename(latitude="rlat", longitude="rlon")
    corners = np.zeros((9, 13, 4))
    source = xarray.Dataset(
        {
            "lat_vertices": ((*dims, "vertices"), corners, {"units": "degrees_north"}),
            "lon_vertices": ((*dims, "vertices"), corners, {"units": "degrees_east"}),
            **{name: array.drop_vars(dims) for name, array in weather.items()},
            "rotated_pole": ((), 0, {"grid_mapping_name": "rotated_latitude_longitude"}),
        }
    )
    for name in ("t2m", "tp"):
        source[name].attrs |= {"grid_mapping": "rotated_pole"}
    attrs = {"standard_name": "latitude", "units": "degrees_north", "bounds": "lat_vertices"}
    source["lat"] = (dims, lat, attrs)
    attrs = {"standard_name": "longitude", "units": "degrees_east", "bounds": "lon_vertices"}
    source["lon"] = (dims, lon, attrs)
    source["rlat"] = ("rlat", rlat, {"standard_name": "grid_latitude", "units": "degrees"})
    source["rlon"] = ("rlon", rlon, {"standard_name": "grid_longitude", "units": "degrees"})
    return source, dims, lat, lon


@pytest.mark.parametrize("make_file", [forecast_file, icon_file, rotated_file])
def test_the_page_is_followed_with_files_of_other_tools(workdir, start, make_file, capsys):
    source, dims, lat, lon = make_file()
    source.to_netcdf("weather.nc")
    temperature, rain = (name for name in source.data_vars if name[0] == "t" and "bnds" not in name)
    start(
        train,
        "data=xarray",
        "data.path=weather.nc",
        f"data.diagnostics=[{rain}]",
        "hydra.run.dir=runs/weather",
        *SMALL,
    )
    output = capsys.readouterr().out
    assert f"6 h forecasts of {temperature} [K], {rain} [" in output
    assert "forcings: " not in output
    assert "45 training samples" in output or "46 training samples" in output
    checkpoint = "checkpoint=runs/weather/best.pt"
    start(evaluate, checkpoint, "rollout=2", "hydra.run.dir=scores")
    start(rollout, checkpoint, "steps=2", "start=latest", "hydra.run.dir=forecast")
    with xarray.open_dataset("forecast/rollout.nc") as forecast:
        assert forecast[temperature].dims == ("time", *dims)
        where = [forecast.latitude, forecast.longitude]
        if dims == ("latitude", "longitude"):
            where = np.meshgrid(*where, indexing="ij")
        np.testing.assert_allclose(where[0], lat, atol=1e-5)
        np.testing.assert_allclose(where[1], lon, atol=1e-5)
        newest = np.datetime64("2020-01-15T18") + (make_file is forecast_file) * np.timedelta64(
            6, "h"
        )
        assert forecast.forecast_reference_time == newest
        last = source[temperature].values.reshape(60, -1)[-1]
        first = forecast[temperature].isel(time=0).values.ravel()
        assert np.corrcoef(first, last)[0, 1] > 0.8


def test_a_global_graph_for_a_region_raises_and_names_a_fitting_graph(workdir, start, error_line):
    weather_file().to_netcdf("weather.nc")
    error = error_line(start, train, "data=xarray", "data.path=weather.nc", "graph=icosphere")
    assert "have no data near them: the data cover a region, take graph=default" in error


def test_variables_without_units_have_no_brackets(workdir, start, capsys):
    weather = weather_file()[["t2m", "tp"]]
    del weather.t2m.attrs["units"]
    weather.to_netcdf("weather.nc")
    start(train, "data=xarray", "data.path=weather.nc", "hydra.run.dir=run", *SMALL)
    output = capsys.readouterr().out
    assert "6 h forecasts of t2m, tp [m], from" in output
    assert "[]" not in output


def test_a_missing_variable_cannot_be_plotted(workdir, start, error_line):
    weather_file().to_netcdf("weather.nc")
    arguments = ("data=xarray", "data.path=weather.nc", "plots.variables=[t2m,q]", *SMALL)
    error = error_line(start, train, *arguments)
    assert "plots.variables must be among t2m, z_500, z_850, tp, got q" in error
