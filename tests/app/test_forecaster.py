"""Forecasts from Python: the dataset of the rollout command, from any date, file and folder."""

from pathlib import Path

import pytest
import xarray
from support.own_data import weather_file

from anemoi_gt.app import rollout_command as rollout
from anemoi_gt.app.forecaster import Forecaster


@pytest.fixture
def checkpoint(trained):
    """The best checkpoint of a run, trained on weather.nc in the working directory."""
    return trained / "run" / "best.pt"


@pytest.mark.application
def test_a_forecast_is_the_file_of_the_rollout_command(checkpoint, start, monkeypatch):
    arguments = (f"checkpoint={checkpoint}", "steps=3", "start=latest", "training.device=cpu")
    start(rollout, *arguments, "hydra.run.dir=written")
    expected = xarray.open_dataset("written/rollout.nc", decode_timedelta=False).load()
    monkeypatch.chdir(checkpoint.parent)  # anywhere
    forecaster = Forecaster(str(checkpoint), device="cpu")
    forecast = forecaster.forecast(steps=3)
    xarray.testing.assert_allclose(forecast, expected, rtol=1e-6)
    assert forecast.t2m.attrs["units"] == "K"
    # from other files, with the same model, and an earlier date
    times = weather_file().isel(time=slice(0, 30))
    times.to_netcdf("earlier.nc")
    date = str(times.time.values[-1])[:13]
    for path in ("earlier.nc", Path("earlier.nc"), ["earlier.nc"]):
        earlier = forecaster.forecast(path, start=date, steps=1)
        assert earlier.sizes["time"] == 1
        assert str(earlier.forecast_reference_time.values).startswith(date)


@pytest.mark.application
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "1999-01-01"}, "start must be a time of the data"),
        ({"path": "other.nc"}, "t2m"),
    ],
)
def test_what_cannot_be_forecast_is_refused(checkpoint, options, message):
    weather_file().drop_vars("t2m").to_netcdf("other.nc")
    with pytest.raises(ValueError, match=message):
        Forecaster(checkpoint).forecast(**options)


def test_a_file_that_is_no_checkpoint_of_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        Forecaster(tmp_path / "best.pt")
