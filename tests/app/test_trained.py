"""A run carries what its forecasts depend on: other files with the same data give the same forecasts, or are refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from support.own_data import SMALL_RUN, TIMES, weather_file
from support.weather import hourly_field

from anemoi_gt.app import evaluate_command as evaluate
from anemoi_gt.app import export_command as export
from anemoi_gt.app import rollout_command as rollout
from anemoi_gt.app import train_command as train
from anemoi_gt.app.datasets.era5_uk import split
from anemoi_gt.app.datasets.field_dataset import field_data
from anemoi_gt.app.datasets.schema import DataSchema
from anemoi_gt.app.datasets.sphere_advection import sphere
from anemoi_gt.app.training.run_files import load_checkpoint, save_checkpoint
from anemoi_gt.app.training.run_folder import check_same_network

pytestmark = pytest.mark.application

SMALL = [*SMALL_RUN, "hydra.run.dir=run"]
CHECKPOINT = "checkpoint=run/best.pt"


def rmse(folder):
    return [score["rmse"] for score in json.loads((Path(folder) / "scores.json").read_text())]


def evaluated(start, path, folder):
    start(evaluate, CHECKPOINT, f"data.path={path}", f"hydra.run.dir={folder}")
    return rmse(folder)


def test_a_file_with_its_variables_in_another_order_gives_the_same_scores(trained, start):
    weather = weather_file()
    weather[["lsm", "tp", "z", "t2m"]].to_netcdf("other.nc")
    assert evaluated(start, "other.nc", "netcdf") == rmse("run")
    weather[["z", "t2m", "lsm", "tp"]].to_zarr("other.zarr", consolidated=False)
    assert evaluated(start, "other.zarr", "zarr") == rmse("run")


def test_a_zarr_lists_its_variables_in_one_order_in_every_process(tmp_path):
    for n, names in enumerate((["tp", "t2m", "z", "lsm"], ["z", "lsm", "t2m", "tp"])):
        weather_file()[names].to_zarr(tmp_path / f"{n}.zarr", consolidated=False)
    first, second = (field_data(str(tmp_path / f"{n}.zarr")).train for n in range(2))
    assert first.variables == second.variables == ("t2m", "tp", "z_500", "z_850")


def test_a_forecast_from_a_part_of_the_file_equals_the_forecast_from_the_whole_file(trained, start):
    # the last test sample is the same
    weather_file().isel(time=slice(10, None)).to_netcdf("tail.nc")
    options = (CHECKPOINT, "steps=3")
    start(rollout, *options, "data.path=weather.nc", "hydra.run.dir=whole")
    start(rollout, *options, "data.path=tail.nc", "hydra.run.dir=tail")
    with (
        xarray.open_dataset("whole/rollout.nc") as whole,
        xarray.open_dataset("tail/rollout.nc") as tail,
    ):
        assert whole.attrs["title"] == tail.attrs["title"]
        assert np.array_equal(whole.t2m, tail.t2m)
        assert np.array_equal(whole.z_850, tail.z_850)


def test_a_resumed_run_keeps_its_normalisation(trained, start):
    before = load_checkpoint(Path("run/last.pt"))["schema"]
    weather_file().isel(time=slice(8, None)).to_netcdf("moved.nc")
    splits = [
        f"data.{name}=[2020-01-{days[0]},2020-01-{days[1]}]"
        for name, days in (("train", ("03", "07")), ("valid", ("08", "08")), ("test", ("09", "10")))
    ]
    arguments = ("resume=true", "hydra.run.dir=run", "training.steps=6", "data.path=moved.nc")
    start(train, *arguments, *splits)
    after = load_checkpoint(Path("run/last.pt"))
    assert after["step"] == 6
    assert after["schema"].pop("periods") == [
        *before.pop("periods"),
        ["", "2020-01-03 06:00", "2020-01-07 12:00"],
    ]
    assert after["schema"] == before


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (
            lambda s: s.drop_vars("tp"),
            (),
            "the data must hold the variables of the checkpoint, t2m, .* lacks tp",
        ),
        (lambda s: s.drop_vars("lsm"), (), "weather.nc lacks lsm"),
        (
            lambda s: s.assign(t2m=(s.t2m - 273.15).assign_attrs(units="degC")),
            (),
            "t2m must be in K, as in the checkpoint, got degC: convert the data",
        ),
        (
            lambda s: s.isel(latitude=slice(None, None, -1)),
            (),
            "whose node 0 is at 58.00 N -10.00 E, got 50.00 N -10.00 E",
        ),
        (
            lambda s: s.isel(latitude=slice(4)),
            (),
            "the grid must have the 117 nodes of the checkpoint, got 52 nodes",
        ),
        (
            lambda s: s.isel(time=slice(None, None, 2)),
            (),
            "a truth 6 h apart, got none in the 20 times 12 h apart of .*weather.nc",
        ),
        (
            lambda s: s,
            ("data.lead_time=12",),
            "the lead time, in hours, must be 6, as in the checkpoint, got 12",
        ),
        (
            lambda s: s,
            ("data.input_steps=1",),
            "the number of input steps must be 2, as in the checkpoint, got 1",
        ),
        (
            lambda s: s,
            ("data.variables=[z_500,t2m,tp,z_850]",),
            "the variables, in this order, must be t2m, z_500, z_850, tp, as in the checkpoint, "
            "got z_500, t2m",
        ),
        (lambda s: s, ("model.heads=2",), "model.heads must be 4, as in the checkpoint, got 2"),
        # without the option, the weights fit a network with another number of heads
        (lambda s: s, ("~model.heads",), "model.heads must be 4, as in the checkpoint, got None"),
    ],
)
def test_data_or_a_network_that_differ_from_the_checkpoint_are_refused(
    trained, start, error_line, change, arguments, message
):
    changed = change(weather_file())
    Path("weather.nc").unlink()
    changed.to_netcdf("weather.nc")
    error = error_line(start, evaluate, CHECKPOINT, *arguments)
    assert error.startswith("anemoi_gt.evaluate: ")
    assert re.search(message, error), error


@pytest.mark.parametrize("group", ["graph", "model"])
@pytest.mark.parametrize("changed", [{}, {"a": 1, "b": 2}, {"a": 2}], ids=["less", "more", "other"])
def test_an_option_that_is_taken_away_or_added_is_another_network(group, changed):
    config = {"graph": {}, "model": {}}
    with pytest.raises(ValueError, match=f"{group}.[ab] must be (1|None), as in the checkpoint"):
        check_same_network(config | {group: {"a": 1}}, config | {group: changed})
    without_value = {"a": 1, "c": None, "none": {}}
    check_same_network(config | {group: {"a": 1}}, config | {group: without_value})


def convert_to_0_2_0(path):
    """Convert a checkpoint to the format of 0.2.0, without a schema and with its names and options."""
    state = load_checkpoint(path)
    del state["schema"]
    state["config"]["training"]["_target_"] = "anemoi_gt.training.TrainingConfig"
    state["config"]["data"]["_target_"] = "anemoi_gt.data.field_dataset.field_data"
    former = {"tile": None, "fixed_degree_kernels": True}
    state["config"]["attention"] = state["config"].pop("kernels") | former
    state["config"]["attention"]["_target_"] = "anemoi_gt.AttentionConfig"
    save_checkpoint(path, state)


def test_a_checkpoint_of_0_2_0_is_evaluated_and_continued_with_a_sentence_on_what_it_lacks(
    trained, start, capsys
):
    for name in ("best.pt", "last.pt"):
        convert_to_0_2_0(trained / "run" / name)
    start(evaluate, CHECKPOINT, "hydra.run.dir=scores")
    message = "was written by 0.2.0, which did not keep the order of the variables, their units, means and standard deviations"
    assert message in capsys.readouterr().out
    assert rmse("scores") == rmse("run")
    start(train, "resume=true", "hydra.run.dir=run", "training.steps=6")
    assert message in capsys.readouterr().out
    assert load_checkpoint(Path("run/last.pt"))["schema"]["variables"] == [
        "t2m",
        "z_500",
        "z_850",
        "tp",
    ]


def convert_to_0_3_0(path):
    """Convert a checkpoint to the format of 0.3.0, without keys and extremes of variables."""
    state = load_checkpoint(path)
    schema = state["schema"]
    del schema["keys"]
    schema["levels"] = [["z_500", "level 500"], ["z_850", "level 850"]]
    schema["normalisation"] = [
        [name, values]
        for name, values in schema["normalisation"]
        if name not in ("smallest", "largest")
    ]
    del state["config"]["graph"]["connect_all"]
    save_checkpoint(path, state)


def test_a_checkpoint_of_0_3_0_finds_its_variables_by_name_with_a_warning(trained, start, capsys):
    for name in ("best.pt", "last.pt"):
        convert_to_0_3_0(trained / "run" / name)
    start(evaluate, CHECKPOINT, "hydra.run.dir=scores")
    message = "written by 0.3.0, which did not keep the levels and intervals of all variables"
    assert message in capsys.readouterr().out
    assert rmse("scores") == rmse("run")
    start(train, "resume=true", "hydra.run.dir=run", "training.steps=6")
    assert load_checkpoint(Path("run/last.pt"))["step"] == 6


def test_a_checkpoint_of_0_4_0_is_evaluated_exported_and_continued(trained, start, capsys):
    for name in ("best.pt", "last.pt"):
        state = load_checkpoint(trained / "run" / name)
        state["config"]["attention"] = state["config"].pop("kernels")
        save_checkpoint(trained / "run" / name, state)
    start(evaluate, CHECKPOINT, "kernels.backend=torch", "hydra.run.dir=scores")
    assert rmse("scores") == rmse("run")
    start(train, "resume=true", "hydra.run.dir=run", "training.steps=6", "kernels.backend=torch")
    assert load_checkpoint(Path("run/last.pt"))["config"]["kernels"]["backend"] == "torch"
    capsys.readouterr()
    start(export, CHECKPOINT, "out=a.pt2", "kernels.backend=torch", "--cfg", "job")
    assert "\nkernels:\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "change"),
    [(evaluate, lambda t: t + 250), (rollout, lambda t: t.where(t < 284, -9999))],
)
def test_inputs_far_from_the_training_samples_are_warned_of_once(
    trained, start, capsys, command, change
):
    weather = weather_file()
    start(command, CHECKPOINT, "hydra.run.dir=same")
    assert "standard deviations beyond" not in capsys.readouterr().out
    weather["t2m"] = change(weather.t2m).assign_attrs(units="K")
    weather.to_netcdf("other.nc")
    start(command, CHECKPOINT, "data.path=other.nc", "hydra.run.dir=other")
    assert capsys.readouterr().out.count("standard deviations beyond the") == 1


@pytest.mark.parametrize("kind", ["fields", "sphere", "era5_uk"])
def test_a_schema_survives_a_checkpoint_bit_for_bit(kind, tmp_path):
    if kind == "fields":
        weather_file().to_netcdf(tmp_path / "weather.nc")
        data = field_data(str(tmp_path / "weather.nc"), diagnostics=["tp"]).train
    else:
        data = {
            "sphere": lambda: sphere("O4", train_size=4),
            "era5_uk": lambda: split(hourly_field(), 6),
        }[kind]().train
    save_checkpoint(tmp_path / "a.pt", {"schema": data.schema().to_dict()})
    schema = DataSchema.from_dict(load_checkpoint(tmp_path / "a.pt")["schema"])
    schema.check_same(data.schema())
    again = data.normalised_by(schema.normalisation)
    assert torch.equal(again[0].inputs, data[0].inputs)
    assert torch.equal(again[0].target, data[0].target)


def test_statistics_of_generated_data_come_from_the_checkpoint():
    few, many = sphere("O4", train_size=2).train, sphere("O4", train_size=32).train
    assert not torch.equal(few[0].target, many[0].target)
    assert torch.equal(few.normalised_by(many.schema().normalisation)[0].target, many[0].target)


def test_a_date_that_is_not_in_the_data_is_refused(tmp_path):
    weather_file().to_netcdf(tmp_path / "weather.nc")
    test = field_data(str(tmp_path / "weather.nc")).test
    latest = test.starting_at("latest")
    assert len(latest) == 1
    assert latest.start_time(0) == TIMES[-1]
    with pytest.raises(
        ValueError, match="start must be a time of the data, which are from 2020-01-01T00:00 to"
    ):
        test.starting_at("2021-01-01")
    with pytest.raises(
        ValueError, match="start must be latest or a date, such as 2020-01-31T18, got soon"
    ):
        test.starting_at("soon")
    with pytest.raises(
        ValueError,
        match="start must have 2 input times in the data, 6 h apart, 2020-01-01 does not",
    ):
        test.starting_at("2020-01-01")
