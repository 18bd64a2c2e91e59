"""A checkpoint holds its training period: scores on training samples are named, and a run continues on its own samples."""

import numpy as np
import pytest
import torch
import xarray
from support.own_data import SMALL_RUN, TIMES, weather_file

from anemoi_gt.app import evaluate_command as evaluate
from anemoi_gt.app import train_command as train
from anemoi_gt.app.datasets.field_dataset import field_data
from anemoi_gt.app.datasets.forecast_dataset import starts_in_training
from anemoi_gt.app.datasets.schema import DataSchema
from anemoi_gt.app.train_command import describe_data

SMALL = [*SMALL_RUN, "hydra.run.dir=run"]


@pytest.fixture
def workdir(tmp_path, monkeypatch, without_pictures):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path="weather.nc", **times):
    weather_file().isel(time=slice(*times.get("part", (None,)))).to_netcdf(path)


def test_a_schema_has_first_and_last_start_of_each_member(tmp_path):
    members = [weather_file()[["t2m"]], weather_file()[["t2m"]] + 1]
    source = xarray.concat(members, "number").assign_coords(number=[3, 11])
    source.to_netcdf(tmp_path / "all.nc")
    schema = field_data(str(tmp_path / "all.nc")).train.schema()
    period = ("2020-01-01 06:00", "2020-01-08 12:00")
    assert schema.periods == (("3", *period), ("11", *period))
    schema = DataSchema.from_dict(schema.to_dict())
    assert schema.periods == (("3", *period), ("11", *period))
    source.sel(number=[11]).isel(time=slice(20)).to_netcdf(tmp_path / "same.nc")
    source.sel(number=[11]).isel(time=slice(20)).assign_coords(number=[12]).to_netcdf(
        tmp_path / "new.nc"
    )
    for name, expected in (("same", True), ("new", False)):
        test = field_data(str(tmp_path / f"{name}.nc"), schema=schema).test
        count, text = starts_in_training(test)
        assert count == len(test) * expected
        assert bool(text) == expected


def test_checkpoints_before_0_5_have_no_period(tmp_path):
    write(tmp_path / "a.nc")
    values = field_data(str(tmp_path / "a.nc")).train.schema().to_dict()
    del values["periods"], values["missing"]
    schema = DataSchema.from_dict(values)
    assert schema.periods == ()
    assert starts_in_training(field_data(str(tmp_path / "a.nc"), schema=schema).test) == (0, "")


@pytest.mark.parametrize("days", [0, 3, 60])
@pytest.mark.parametrize("part", [slice(None), slice(20)])
def test_only_the_mean_of_all_training_samples_is_the_training_mean(days, part, tmp_path):
    write(tmp_path / "a.nc")
    data = field_data(str(tmp_path / "a.nc"))
    times = TIMES + np.timedelta64(days, "D").astype("timedelta64[ns]")
    weather_file(times=times).isel(time=part).to_netcdf(tmp_path / "later.nc")
    test = field_data(str(tmp_path / "later.nc"), schema=data.train.schema()).test
    are_same = days == 0 and part == slice(None)
    assert list(test.baselines()) == ["persistence"] + ["training mean"] * are_same
    if are_same:
        states = [data.train.present(i) for i in range(len(data.train))]
        mean = torch.stack(states).double().mean(dim=0)
        np.testing.assert_allclose(test.baselines()["training mean"](0), mean, rtol=1e-6)


@pytest.mark.application
def test_evaluation_on_training_samples_and_a_run_on_other_samples_are_named(
    workdir, start, error_line, capsys
):
    write()
    start(train, *SMALL)
    write("first_half.nc", part=(20,))
    capsys.readouterr()
    start(evaluate, "checkpoint=run/best.pt", "data.path=first_half.nc", "hydra.run.dir=scores")
    assert (
        "1 of 1 test samples start in the training period, 2020-01-01 06:00 to 2020-01-08 12:00"
        in capsys.readouterr().out
    )
    start(evaluate, "checkpoint=run/best.pt", "hydra.run.dir=scores")
    assert "training period" not in capsys.readouterr().out
    resume = ("hydra.run.dir=run", "resume=true", "training.steps=6", "data.path=first_half.nc")
    error = error_line(start, train, *resume)
    assert (
        "continued with its training samples, which start 2020-01-01 06:00 to 2020-01-08 12:00; those of the data start 2020-01-01 06:00 to 2020-01-04 12:00: give data.train"
        in error
    )
    dates = ["[2020-01-01,2020-01-03]", "2020-01-04", "2020-01-05"]
    splits = [
        f"data.train={dates[0]}",
        *(
            f"data.{name}=[{date},{date}]"
            for name, date in zip(("valid", "test"), dates[1:], strict=True)
        ),
    ]
    start(train, *resume, *splits)
    assert "3 of 3 validation samples start in the training period" in capsys.readouterr().out
    start(evaluate, "checkpoint=run/last.pt", "hydra.run.dir=scores")
    assert "3 of 3 test samples start in the training period" in capsys.readouterr().out


@pytest.mark.application
def test_the_best_weights_start_again_on_the_validation_samples_of_a_file_that_has_grown(
    workdir, start, capsys
):
    write(part=(36,))
    periods = {"train": ("01", "05"), "test": ("06", "07"), "valid": ("08", "31")}
    dates = [
        f"data.{name}=[2020-01-{first},2020-01-{last}]" for name, (first, last) in periods.items()
    ]
    start(train, *SMALL, *dates)
    write("longer.nc")
    capsys.readouterr()
    start(train, "hydra.run.dir=run", "resume=true", "training.steps=6", "data.path=longer.nc")
    first, former, now = "2020-01-08 00:00", "2020-01-09 12:00", "2020-01-10 12:00"
    assert (
        f"number=7, starts=['{first}', '{former}'], data.valid=['2020-01-08', '2020-01-31'], and "
        f"are number=11, starts=['{first}', '{now}'], data.valid"
    ) in capsys.readouterr().out


def test_the_log_has_the_number_of_samples_whose_times_are_missing(tmp_path):
    write(tmp_path / "a.nc")
    assert "left out" not in describe_data(field_data(str(tmp_path / "a.nc")))
    weather_file(times=np.delete(TIMES, [10, 36])).to_netcdf(tmp_path / "gap.nc")
    lines = describe_data(field_data(str(tmp_path / "gap.nc"))).splitlines()
    assert lines[-3].startswith("26 training samples")
    assert lines[-3].endswith("; 2 of 28 are left out, because times are missing")
    assert "left out" not in lines[-2]
    assert lines[-1].endswith("; 2 of 3 are left out, because times are missing")
