"""Forecasts of fields from files: readers that agree, samples of the right times and channels, and refusals."""

import shutil
import sys

import eccodes
import numpy as np
import pytest
import torch
import xarray
import zarr
from support.fields import fields_of, fields_of_anemoi
from support.own_data import TIMES, weather_file

from anemoi_gt.app.datasets.field_dataset import field_data
from anemoi_gt.app.datasets.field_states import cell_weights
from anemoi_gt.app.scores import score_rollouts
from anemoi_gt.data.graphs import check_fit, icosphere_graph, limited_area_graph
from anemoi_gt.data.grids import classic, octahedral, regional
from anemoi_gt.data.nodes import Nodes, area_weights


@pytest.fixture
def file(tmp_path):
    """The path of a NetCDF file."""
    weather_file().to_netcdf(tmp_path / "weather.nc")
    return str(tmp_path / "weather.nc")


def values(fields, names=("lsm", "t2m", "tp", "z_500", "z_850")):
    return np.stack([[fields.readers[name](t) for name in names] for t in range(len(fields.times))])


def assert_same_fields(actual, expected):
    assert np.array_equal(actual.times, expected.times)
    assert actual.units == expected.units
    np.testing.assert_allclose(actual.nodes.radians, expected.nodes.radians)
    assert np.array_equal(values(actual), values(expected))


def write(source, folder, kind):
    """Write the weather in one way; return what to pass as path."""
    if kind == "zarr":
        source.to_zarr(folder / "weather.zarr", consolidated=False)
        return folder / "weather.zarr"
    parts = {"times": [source.isel(time=slice(k, k + 16)) for k in (16, 32, 0)]}
    parts["times"] = [part.assign(lsm=source.lsm) for part in parts["times"]]
    parts["variables"] = [source[["t2m", "tp"]], source[["z"]], source[["lsm"]]]
    for n, part in enumerate(parts[kind]):
        part.to_netcdf(folder / f"part_{n}.nc")
    return (
        str(folder / "part_*.nc")
        if kind == "times"
        else [str(folder / f"part_{n}.nc") for n in range(3)]
    )


@pytest.mark.parametrize("kind", ["zarr", "times", "variables"])
def test_a_zarr_and_files_by_times_or_variables_hold_the_fields_of_one_file(file, tmp_path, kind):
    (tmp_path / kind).mkdir()
    assert_same_fields(fields_of(write(weather_file(), tmp_path / kind, kind)), fields_of(file))


def write_grib(path, sample, states, **keys):
    """Write states [T, N], one every six hours, with a sample message of ecCodes."""
    with open(path, "wb") as file:
        for n, state in enumerate(states):
            message = eccodes.codes_grib_new_from_samples(sample)
            keys |= {"dataDate": 20200101 + n // 4, "dataTime": 600 * (n % 4)}
            for key, value in keys.items():
                eccodes.codes_set(message, key, value)
            eccodes.codes_set_values(message, state)
            eccodes.codes_write(message, file)


def test_grib_on_regular_and_reduced_grids_is_read(tmp_path):
    rng = np.random.default_rng(0)
    grid = {
        "Ni": 4,
        "Nj": 3,
        "iDirectionIncrementInDegrees": 2.0,
        "jDirectionIncrementInDegrees": 2.0,
    }
    for which, lat, lon in (("First", 58.0, 350.0), ("Last", 54.0, 356.0)):
        grid |= {
            f"{axis}Of{which}GridPointInDegrees": x
            for axis, x in (("latitude", lat), ("longitude", lon))
        }
    cases = {
        "regular_ll_sfc_grib2": (
            regional([58, 56, 54], [350, 352, 354, 356]),
            grid | {"shortName": "2t"},
        ),
        "reduced_gg_pl_32_grib2": (classic(32), {"shortName": "t", "level": 850}),
    }
    for sample, (nodes, keys) in cases.items():
        states = 280 + rng.random((5, len(nodes)))
        write_grib(tmp_path / sample, sample, states, **keys)
        fields = fields_of(tmp_path / sample)
        np.testing.assert_allclose(fields.nodes.xyz, nodes.xyz, atol=1e-7)
        assert np.array_equal(fields.times, TIMES[:5])
        (name,) = fields.readers
        np.testing.assert_allclose(values(fields, [name])[:, 0], states, atol=1e-3)  # packed


@pytest.mark.parametrize("kind", ["reduced", "curvilinear"])
def test_reduced_and_curvilinear_grids_have_the_nodes_of_their_coordinates(kind):
    grid = octahedral(4)
    if kind == "reduced":
        dims, lat, lon = ("values",), grid.lat, grid.lon
    else:
        dims = ("y", "x")
        lat, lon = np.meshgrid(np.linspace(50, 58, 4), np.linspace(0, 5, 6), indexing="ij")
    state = np.random.default_rng(0).random((3, *lat.shape))
    attrs = [{"units": units} for units in ("degrees_north", "degrees_east")]
    source = xarray.Dataset(
        {"t": (("time", *dims), state)}, {"time": TIMES[:3], "nav": (dims, lat, attrs[0])}
    )
    fields = fields_of(source.assign_coords(other=(dims, lon, attrs[1])))
    assert np.array_equal(fields.nodes.lat, lat.ravel())
    assert np.array_equal(fields.nodes.lon, lon.ravel())
    assert np.array_equal(values(fields, ["t"])[:, 0], state.reshape(3, -1).astype("float32"))


def test_a_zarr_of_anemoi_datasets_is_read_without_its_missing_dates(tmp_path):
    fields = fields_of(weather_file())
    names = sorted(fields.readers)
    store = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    arrays = {
        "data": values(fields, names)[:, :, None],
        "latitudes": fields.nodes.lat,
        "longitudes": fields.nodes.lon,
    }
    for name, array in (arrays | {"dates": TIMES.astype("datetime64[s]").astype("int64")}).items():
        store.create_array(name, data=array)
    store.attrs.update(
        {"variables": names, "missing_dates": [str(TIMES[5].astype("datetime64[s]"))]}
    )
    read = fields_of_anemoi(tmp_path / "a.zarr")
    assert np.array_equal(read.times, np.delete(TIMES, 5))
    assert list(read.readers) == names
    assert np.array_equal(values(read, names), np.delete(values(fields, names), 5, axis=0))


def test_a_zarr_of_anemoi_datasets_has_units_and_members(tmp_path):
    values = np.random.default_rng(0).random((40, 2, 3, 208)).astype("float32")
    nodes = octahedral(4)
    store = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    dates = TIMES.astype("datetime64[s]").astype("int64")
    arrays = {"data": values, "latitudes": nodes.lat, "longitudes": nodes.lon, "dates": dates}
    for name, array in arrays.items():
        store.create_array(name, data=array)
    metadata = {"2t": {"units": "K"}, "tp": {}}
    store.attrs.update({"variables": ["2t", "tp"], "variables_metadata": metadata})
    read = fields_of_anemoi(tmp_path / "a.zarr")
    assert read.units == {"2t": "K", "tp": ""}
    assert read.members == ("0", "1", "2")
    assert np.array_equal(read.readers["tp"](2 * 40 + 5), values[5, 1, 2])


def test_samples_have_normalised_inputs_of_past_times_and_change_from_the_present(file):
    splits = field_data(file, diagnostics=["tp"], input_steps=3, lead_time=12)
    train, (fields, state) = splits.train, (fields_of(file), weather_file())
    assert train.variables == ("t2m", "z_500", "z_850", "tp")
    assert train.units == ("K", "m", "m", "m")
    channels = [
        f"{name}{step}" for step in (" -24 h", " -12 h", "") for name in train.variables[:3]
    ]
    assert train.input_names[:10] == (*channels, "lsm")
    assert train.title(0) == "2020-01-02 00:00 UTC + 12 h"  # four times after the first
    target = state.t2m.values[6].ravel() - state.t2m.values[4].ravel()
    change = train[0].target * train.change_std + train.change_mean
    np.testing.assert_allclose(change[:, 0], target, atol=1e-4)
    # a diagnostic is no change
    np.testing.assert_allclose(change[:, 3], fields.readers["tp"](6), atol=1e-5)
    inputs = torch.stack([train[i].inputs for i in range(len(train))])
    std = (inputs - inputs.mean(dim=(0, 1))).square().mean(dim=(0, 1)).sqrt()[:10]
    torch.testing.assert_close(std, torch.ones(10), atol=0.15, rtol=0)
    torch.testing.assert_close(inputs[2, :, 3], inputs[0, :, 6])  # one lead time earlier
    forecast = train.forecast(0, train[0].target)[:, 0]
    truth = train.truth(0)[:, 0]
    assert torch.equal(forecast.round(decimals=2), truth.round(decimals=2))


DATES = {
    "train": ["2020-01-01", "2020-01-05"],
    "valid": ["2020-01-06", "2020-01-07"],
    "test": ["2020-01-08", "2020-02"],
}


def test_splits_follow_dates_and_samples_with_missing_times_are_left_out(tmp_path):
    weather_file(times=np.delete(TIMES, 6)).to_netcdf(tmp_path / "gap.nc")
    splits = field_data(str(tmp_path / "gap.nc"), **DATES)
    starts = [[part.title(i).split(" UTC")[0] for i in range(len(part))] for part in splits]
    named = [str(time)[:16].replace("T", " ") for time in TIMES]
    assert starts == [[*named[1:5], *named[8:19]], named[20:27], named[28:39]]


def test_a_rollout_of_the_truth_has_the_inputs_of_later_samples_and_needs_its_forcings(file):
    test = field_data(file, forcings=["z_500", "lsm"], **DATES).test
    step = test.advance(0, [test.truth(0), test.truth(1)])
    assert torch.equal(step.inputs, test.inputs(2))
    assert torch.equal(step.truth, test.truth(2))
    assert torch.equal(step.reference, test.reference(2))
    last = len(test) - 1
    assert test.advance(last, [test.truth(last)]).truth is None
    with pytest.raises(
        ValueError, match="needs the forcings of every step, the data end before step 2"
    ):
        test.advance(last, [test.truth(last)] * 2)
    model = torch.nn.Linear(test.in_channels, test.out_channels)
    scores = score_rollouts(model, test, 30).scores
    assert {score.forecast for score in scores} == {"model", "persistence", "training mean"}
    assert max(score.lead_time for score in scores) == 6 * len(test)


@pytest.mark.parametrize(
    "nodes", [octahedral(16), regional(np.linspace(85, -85, 18), np.arange(0, 360, 10.0))]
)
def test_weights_of_rows_are_the_areas_of_cells(nodes):
    np.testing.assert_allclose(cell_weights(nodes), area_weights(nodes), atol=0.02)


def test_weights_are_one_on_an_irregular_region():
    rng = np.random.default_rng(0)
    assert torch.equal(
        cell_weights(Nodes(rng.uniform(50, 60, 9), rng.uniform(0, 9, 9))), torch.ones(9)
    )


@pytest.mark.parametrize(
    "nodes", [octahedral(8), regional(np.linspace(58, 50, 9), np.linspace(-10, 2, 13))]
)
def test_the_default_graph_fits_any_grid_and_a_global_one_does_not_fit_a_region(nodes):
    check_fit(limited_area_graph(nodes, margin=None))
    with pytest.raises(
        ValueError, match=r"the graph must fit the data, \d+ of its 10242 hidden nodes have no data"
    ):
        check_fit(icosphere_graph(nodes, refinement=5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, "format must be one of xarray, anemoi, got 'csv'"),
        ({"variables": ["t3m"]}, "must be among .*z_850.*, in one role each, got t3m missing"),
        ({"variables": ["t2m"], "forcings": ["t2m"]}, "in one role each, got t2m twice"),
        ({"variables": ["lsm"]}, "in one role each, got lsm without time"),
        ({"variables": []}, "must be among .*z_850.*, got none, and no diagnostics"),
        (
            {"lead_time": 5},
            r"must have 2 inputs and a truth 5 h apart, got none in the 40 times 6 h apart of "
            r".*weather.nc",
        ),
        ({"lead_time": 0}, "lead_time must be positive"),
        (
            {"train": ["2020-01-01", "2020-01-05"]},
            "valid must be a first and a last date, .*in all splits or in none",
        ),
        (
            {key: ["2020-01-01", "2020-01-05"] for key in ("train", "valid", "test")},
            "must not share times, got 20 in",
        ),
        ({"path": "nowhere.nc"}, "no file nowhere.nc: give the data as data.path=FILE"),
        ({"path": __file__}, "must be a NetCDF, zarr or GRIB file, and cannot be read"),
    ],
)
def test_what_does_not_fit_the_file_is_named(file, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        field_data(**{"path": file} | options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda s: s.where(s.time != TIMES[3]),
            FloatingPointError,
            "t2m must be finite, got nan at 58.00 N -10.00 E, 2020-01-01 18:00: leave it out",
        ),
        (
            lambda s: s[["t2m"]] * 0,
            ValueError,
            "must be among t2m, .* got none that changes with time",
        ),
        (
            lambda s: s.rename(latitude="row"),
            ValueError,
            "must hold fields on latitudes and longitudes, found none in .*broken.nc: .*t2m of "
            ".*broken.nc, it has no latitudes on its dimensions, time: 40, row: 9, longitude: 13",
        ),
        (lambda s: s.isel(time=0, drop=True), ValueError, "got none that changes with time"),
    ],
)
def test_a_file_that_cannot_train_a_model_is_refused(tmp_path, change, error, message):
    change(weather_file()).to_netcdf(tmp_path / "broken.nc")
    with pytest.raises(error, match=message):
        field_data(str(tmp_path / "broken.nc"))


@pytest.mark.parametrize("content", [b"GRIB" + bytes(range(256)) * 9, b"no message"])
def test_a_damaged_grib_file_is_refused_without_a_traceback(tmp_path, capfd, content):
    (tmp_path / "bad.grib").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"bad.grib must be a NetCDF, zarr or GRIB file, and cannot be read: \w+"
    ):
        fields_of(tmp_path / "bad.grib")
    assert "Traceback" not in capfd.readouterr().err


def ensemble(weather):
    return xarray.concat([weather, weather + 1], "number").assign_coords(number=[0, 1])


def test_every_member_of_an_ensemble_has_samples_of_its_own_and_no_variables(tmp_path):
    ensemble(weather_file()[["t2m", "z"]]).to_netcdf(tmp_path / "weather.nc")
    train = field_data(str(tmp_path / "weather.nc"), input_steps=1).train
    assert train.variables == ("t2m", "z_500", "z_850")
    count = len(train) // 2
    assert train.title(0) == "2020-01-01 00:00 UTC + 6 h, member 0"
    assert train.title(count) == "2020-01-01 00:00 UTC + 6 h, member 1"
    torch.testing.assert_close(train.present(count), train.present(0) + 1)
    torch.testing.assert_close(train.truth(count), train.truth(0) + 1)


def test_members_in_several_files_are_joined_in_time(tmp_path):
    weather = ensemble(weather_file()[["t2m"]])
    weather.to_netcdf(tmp_path / "all.nc")
    for n in range(2):
        weather.isel(time=slice(20 * n, 20 * n + 20)).to_netcdf(tmp_path / f"part_{n}.nc")
    whole, parts = fields_of(str(tmp_path / "all.nc")), fields_of(str(tmp_path / "part_*.nc"))
    assert parts.members == whole.members == ("0", "1")
    assert all(np.array_equal(parts.readers["t2m"](i), whole.readers["t2m"](i)) for i in range(80))


@pytest.mark.parametrize("named", [False, True])
def test_a_constant_with_a_time_dimension_is_a_forcing_without_time(tmp_path, named):
    weather = weather_file()
    weather["lsm"] = weather.lsm.expand_dims(time=TIMES)
    weather.to_netcdf(tmp_path / "cds.nc")
    train = field_data(str(tmp_path / "cds.nc"), forcings=["lsm"] if named else None).train
    assert train.forcings == train.constants == ("lsm",)
    assert [name for name in train.input_names if "lsm" in name] == ["lsm"]
    last = len(train) - 1
    assert train.advance(last, [train.truth(last)] * 90).truth is None  # beyond the end of the file


@pytest.mark.parametrize("from_state", [None, 33, 39])
def test_a_constant_of_the_training_that_changes_later_is_named(from_state, tmp_path, caplog):
    weather = weather_file()
    weather["ice"] = weather.lsm.expand_dims(time=TIMES).copy()
    weather["lsm"] = weather.lsm.expand_dims(time=TIMES)
    if from_state is not None:
        weather.ice[from_state:] += 1
    weather.to_netcdf(tmp_path / "ice.nc")
    expected = f"change in {tmp_path / 'ice.nc'}, and never in the training samples: ice; "
    with caplog.at_level("WARNING", "anemoi_gt"):
        splits = field_data(str(tmp_path / "ice.nc"))
        assert splits.train.constants == ("ice", "lsm")
        assert (expected in caplog.text) == (from_state is not None)
        caplog.clear()
        field_data(str(tmp_path / "ice.nc"), schema=splits.train.schema())
        assert (expected in caplog.text) == (from_state is not None)
        caplog.clear()
        now = weather.isel(time=slice(-1, None))  # a forecast from these: nothing to compare
        now.to_netcdf(tmp_path / "now.nc")
        schema = field_data(str(tmp_path / "ice.nc"), input_steps=1).train.schema()
        caplog.clear()
        field_data(str(tmp_path / "now.nc"), input_steps=1, schema=schema)
        assert "training samples" not in caplog.text


def test_a_variable_that_is_constant_in_the_control_only_is_no_constant(tmp_path):
    weather = ensemble(weather_file()[["t2m", "lsm"]])
    weather["pattern"] = (weather.t2m - 280) * weather.number  # perturbations, 0 in the control
    weather["lsm"] = weather.lsm.expand_dims(time=TIMES)  # another in each member
    weather.to_netcdf(tmp_path / "members.nc")
    train = field_data(str(tmp_path / "members.nc")).train
    assert train.variables == ("t2m", "pattern")
    assert train.constants == ("lsm",)


def test_a_constant_that_is_to_be_forecast_is_refused_with_the_remedy(tmp_path):
    weather = weather_file()
    weather["lsm"] = weather.lsm.expand_dims(time=TIMES)
    weather.to_netcdf(tmp_path / "cds.nc")
    with pytest.raises(ValueError, match=r"lsm does not: leave it out of .*data.forcings=\[lsm\]"):
        field_data(str(tmp_path / "cds.nc"), variables=["t2m", "lsm"])


def test_a_level_has_its_units():
    weather = weather_file()
    weather.level.attrs["units"] = "hPa"
    keys = fields_of(weather).keys
    assert {name: key.text() for name, key in keys.items()} == {
        "t2m": "",
        "z_500": "500 hPa",
        "z_850": "850 hPa",
        "tp": "",
        "lsm": "",
    }


def test_a_duplicate_time_raises():
    twice = xarray.concat(
        [weather_file()[["t2m"]].isel(time=slice(0, 3)), weather_file()[["t2m"]]], "time"
    )
    message = r"each field must be there once, got t2m \[K\], at 2020-01-01 00:00 of .*: keep one"
    with pytest.raises(ValueError, match=message):
        fields_of(twice)


def test_packed_integers_on_descending_latitudes_are_read_as_their_values(tmp_path):
    packed = {"dtype": "int16", "scale_factor": 0.001, "add_offset": 280.0, "_FillValue": -32767}
    weather_file().to_netcdf(tmp_path / "packed.nc", encoding={"t2m": packed})
    read = fields_of(str(tmp_path / "packed.nc")).readers["t2m"](3)
    np.testing.assert_allclose(read, weather_file().t2m.values[3].ravel(), atol=1e-3)


def test_files_that_do_not_fit_each_other_are_refused(file, tmp_path):
    shutil.copy(file, tmp_path / "same.nc")
    message = "each field must be there once, got t2m .* of .*same.nc and t2m .* of .*weather.nc"
    with pytest.raises(ValueError, match=message):
        fields_of(str(tmp_path / "*.nc"))
    weather_file(lat=np.linspace(50, 40, 9)).drop_vars("tp").to_netcdf(tmp_path / "grid.nc")
    message = (
        r"on one grid, got .* on 9 x 13 points, 58.00 N -10.00 E to .* and .* on 9 x 13 points, 50"
    )
    with pytest.raises(ValueError, match=message):
        fields_of([file, str(tmp_path / "grid.nc")])
    other = weather_file(times=TIMES[1:])[["t2m"]].rename(t2m="t")
    other.to_netcdf(tmp_path / "times.nc")
    message = r"same times, t \[K\], at .* of .*times.nc is missing at 2020-01-01 00:00, where there is t2m"
    with pytest.raises(ValueError, match=message):
        fields_of([file, str(tmp_path / "times.nc")])


def test_a_run_logs_a_table_of_its_variables(file, caplog):
    with caplog.at_level("INFO", "anemoi_gt"):
        field_data(file, diagnostics=["tp"])
    table = next(record.message for record in caplog.records if "in the file" in record.message)
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["name", "in", "the", "file", "level", "units", "role", "mean", "deviation", "smallest", "largest", "missing"]  # fmt: skip
    assert rows[2][:6] == ["z_500", "z", "level", "500", "m", "variable"]
    assert [row[0] for row in rows[1:]] == ["t2m", "z_500", "z_850", "tp", "lsm"]
    assert [row[-6] for row in rows[1:]] == ["variable", "variable", "variable", "diagnostic", "constant"]  # fmt: skip
    assert [float(number) for number in rows[4][-3:-1]] == pytest.approx([0, 1], abs=1e-2)


def test_the_table_counts_missing_values_of_all_variables(tmp_path, caplog):
    weather = weather_file()
    weather.t2m[3, 0, 0] = np.nan
    weather.tp[4, :, 0] = np.nan
    weather.to_netcdf(tmp_path / "gaps.nc")
    with caplog.at_level("INFO", "anemoi_gt"), pytest.raises(FloatingPointError, match="must be"):
        field_data(str(tmp_path / "gaps.nc"))
    table = next(record.message for record in caplog.records if "in the file" in record.message)
    missing = {line.split()[0]: line.split()[-1] for line in table.splitlines()[1:]}
    assert missing == {"t2m": "1", "z_500": "0", "z_850": "0", "tp": "9", "lsm": "0"}


def test_a_missing_package_is_named_with_its_extra(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"pip install 'anemoi-gt\[xarray\]'"):
        fields_of(file)


def test_jittered_times_are_dates(tmp_path):
    """As hours that are fractions of days."""
    weather = weather_file()[["t2m"]].rename(time="Time")
    jitter = (np.arange(40) % 3 - 1) * np.timedelta64(70, "ms")
    weather.assign_coords(Time=TIMES + jitter).to_netcdf(tmp_path / "jitter.nc")
    assert np.array_equal(fields_of(str(tmp_path / "jitter.nc")).times, TIMES)


@pytest.mark.parametrize("name", ["", "a.zarr.zip"])
def test_what_is_no_file_of_fields_is_refused(name, file, tmp_path):
    """A folder of files that is no zarr, and a file of another format."""
    path = tmp_path / name
    if name:
        path.write_bytes(b"x")
    with pytest.raises(ValueError, match="must be a NetCDF, zarr or GRIB file, and cannot be read"):
        fields_of(str(path))


@pytest.mark.parametrize("t", [0, 5, -1])
def test_a_time_without_a_date_is_refused(tmp_path, t):
    """As of a record that was laid out and never written."""
    times = TIMES.copy()
    times[t] = np.datetime64("NaT")
    weather_file().assign_coords(time=times).to_netcdf(tmp_path / "weather.nc")
    with pytest.raises(ValueError, match="must have a date at every time, got NaT"):
        field_data(str(tmp_path / "weather.nc"))


def test_times_that_are_no_dates_are_refused(tmp_path):
    weather = weather_file()
    weather.convert_calendar("noleap").to_netcdf(tmp_path / "model.nc")
    with pytest.raises(ValueError, match="among lsm, .* at dates of the standard calendar"):
        field_data(str(tmp_path / "model.nc"))
    weather[["t2m"]].assign_coords(time=TIMES.astype(str)).to_netcdf(tmp_path / "text.nc")
    reason = "its times are not dates of the standard calendar, from 1678 to 2261"
    with pytest.raises(ValueError, match=reason):
        fields_of(str(tmp_path / "text.nc"))


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("name", ["time", "Time"])
def test_a_dimension_of_times_without_dates_is_none_of_levels(name, moving, tmp_path):
    """As WRF writes its times, as text: each would be a variable. It repeats positions at each time."""
    weather = weather_file()[["t2m"]].rename(time=name).drop_vars(name)
    weather["Times"] = (name, np.datetime_as_string(TIMES, "s").astype("S19"))
    for axis, direction in (("latitude", "north"), ("longitude", "east")):
        values = weather.t2m * 0 + weather[axis] if moving else weather[axis]
        weather[f"X{axis}"] = values.assign_attrs(units=f"degree_{direction}")
    weather = weather.drop_vars(("latitude", "longitude"))
    weather.to_netcdf(tmp_path / "wrf.nc")
    with pytest.raises(ValueError, match="found none in .*: ") as caught:
        fields_of(str(tmp_path / "wrf.nc"))
    reasons = str(caught.value).split(": ", 1)[1].split("; ")
    assert [reason.split(" ")[0] for reason in reasons] == ["t2m", "Times"]
    assert reasons[0].endswith(
        "its times are not dates of the standard calendar, from 1678 to 2261"
    )


def test_a_start_between_two_times_names_them(file):
    test = field_data(file).test
    with pytest.raises(ValueError, match="nearest: 2020-01-02T06:00 and 2020-01-02T12:00"):
        test.starting_at("2020-01-02T08")


def test_irregular_times_are_told_by_their_spacing(tmp_path):
    times = TIMES + np.arange(40) * np.timedelta64(7, "m")
    times = times + (np.arange(40) % 2) * np.timedelta64(1, "h")
    weather_file(times=times).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(ValueError, match="40 times 5.1.* to 7.1.* h apart"):
        field_data(str(tmp_path / "a.nc"))
