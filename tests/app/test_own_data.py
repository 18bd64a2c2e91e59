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
        "6 h forecasts of t2m [K], tp [m], from 2 input times\nof these no inputs: tp\nforcings: "
        "lsm\n" in output
    )
    assert "training samples, starting 2020-01-01 06:00 to 2020-01-12 12:00 UTC\n" in output
    assert re.search(r"graph: 651 data nodes, \d+ hidden nodes; \d+ edges data to hidden, ", output)
    assert re.search(r"memory of a step: about [\d.]+ MB: state [\d.]+ [Mk]B, graph ", output)
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


def test_a_global_graph_for_a_region_raises_and_names_a_fitting_graph(workdir, start, error_line):
    weather_file().to_netcdf("weather.nc")
    error = error_line(start, train, "data=xarray", "data.path=weather.nc", "graph=icosphere")
    assert "have no data near them: the data cover a region, take graph=default" in error


def test_a_missing_variable_cannot_be_plotted(workdir, start, error_line):
    weather_file().to_netcdf("weather.nc")
    arguments = ("data=xarray", "data.path=weather.nc", "plots.variables=[t2m,q]", *SMALL)
    error = error_line(start, train, *arguments)
    assert "plots.variables must be among t2m, z_500, z_850, tp, got q" in error
