"""A variable without values at the same points at all times, as of the sea: filled with the mean, without weight."""

import numpy as np
import pytest
import torch
from support.own_data import weather_file

from anemoi_gt.app.datasets import field_states
from anemoi_gt.app.datasets.field_dataset import field_data
from anemoi_gt.app.datasets.fields import minutes
from anemoi_gt.app.datasets.physical import PhysicalModel
from anemoi_gt.app.datasets.schema import DataSchema
from anemoi_gt.app.forecast_file import describe_forecast
from anemoi_gt.app.plots import MapImage
from anemoi_gt.app.scores import measure, model_forecast, roll_out, score_rollouts
from anemoi_gt.app.training.step import weighted_mse

LAND = np.zeros((9, 13), dtype=bool)
LAND[:4, :6] = True
VARIABLES = ("sst", "rain", "t2m")


def ocean_file(path, change=lambda source: source):
    """Write sst and rain without values over land, t2m and a static depth of the sea; return the data."""
    weather = weather_file()[["t2m", "tp", "lsm"]].rename(tp="rain", lsm="depth")
    weather["sst"] = (weather.t2m + 1).assign_attrs(units="K")
    weather["depth"] = weather.depth + 50
    for name in ("sst", "rain", "depth"):
        weather[name] = weather[name].where(~LAND)
    change(weather[["sst", "rain", "t2m", "depth"]]).to_netcdf(path)
    return weather


@pytest.fixture
def data(tmp_path):
    ocean_file(tmp_path / "ocean.nc")
    return field_data(str(tmp_path / "ocean.nc"), diagnostics=["rain"])


def column(dataset, name):
    return dataset.variables.index(name)


def test_statistics_are_those_of_the_sea(data):
    train = data.train
    sst = np.stack([train.present(i)[:, column(train, "sst")] for i in range(len(train))])
    weights = train.states.node_weights.numpy()[~LAND.ravel()]
    sea = sst[:, ~LAND.ravel()].astype("f8")
    mean = (sea * weights).sum() / (len(sea) * weights.sum())
    spread = np.sqrt(((sea - mean) ** 2 * weights).sum() / (len(sea) * weights.sum()))
    statistics = dict(
        zip(
            train.states.names,
            zip(train.statistics.mean, train.statistics.std, strict=True),
            strict=True,
        )
    )
    assert statistics["sst"] == pytest.approx((mean, spread), rel=1e-5)
    assert 3 < statistics["sst"][1] < 4  # K: filled with 0 it would be 100
    assert statistics["depth"][0] == pytest.approx(50.5, abs=0.2)


def test_samples_are_finite_and_filled_with_the_mean(data):
    train = data.train
    inputs, target = train[0]
    assert torch.isfinite(inputs).all()
    assert torch.isfinite(target).all()
    land = torch.from_numpy(LAND.ravel())
    for name in ("sst", "depth"):
        assert (inputs[land, train.input_names.index(name)] == 0).all()
    assert (inputs[land, train.input_names.index("t2m")] != 0).all()


def test_loss_has_the_mean_over_the_sea_whatever_a_model_says_of_land(data):
    train = data.train
    target = train[0].target[None]
    torch.testing.assert_close(train.weights.mean(dim=0), torch.ones(3))
    output = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    loss = weighted_mse(output, target, train.weights)
    output[:, LAND.ravel(), column(train, "sst")] = 1e6
    assert torch.equal(weighted_mse(output, target, train.weights), loss)
    of_variables = []
    for name in train.variables:
        v = column(train, name)
        nodes = np.ones(LAND.size, bool) if name == "t2m" else ~LAND.ravel()
        squares = (output - target)[0, nodes, v].square() * train.states.node_weights[nodes]
        of_variables.append(squares.sum() / train.states.node_weights[nodes].sum())
    torch.testing.assert_close(loss, torch.stack(of_variables).mean())


def test_scores_and_rollouts_are_of_the_sea_and_nan_over_land(data):
    test = data.test
    model = torch.nn.Linear(test.in_channels, test.out_channels)
    forecast = model_forecast(model, test)(0)
    for name in test.variables:
        expected = LAND.ravel() if name != "t2m" else np.zeros(LAND.size, bool)
        assert np.array_equal(forecast[:, column(test, name)].isnan(), expected)
    scores = measure({"model": model_forecast(model, test), **test.baselines()}, test).scores()
    assert all(np.isfinite(score.rmse) for score in scores)
    persistence = next(s for s in scores if (s.forecast, s.variable) == ("persistence", "sst"))
    errors = np.stack(
        [(test.present(i) - test.truth(i))[:, column(test, "sst")] for i in range(len(test))]
    )
    weights = test.states.node_weights.numpy()[~LAND.ravel()]
    mean = (errors[:, ~LAND.ravel()] ** 2 * weights).sum() / (len(errors) * weights.sum())
    assert persistence.rmse == pytest.approx(np.sqrt(mean), rel=1e-5)
    assert all(np.isfinite(score.rmse) for score in score_rollouts(model, test, 3).scores)
    outcomes = roll_out(model, test, 0, 2)
    states = np.stack([outcome.forecast.numpy() for outcome in outcomes])[None]
    written = describe_forecast(test, 0, states)
    assert np.array_equal(np.isnan(written.sst.values[1]), LAND)
    assert np.array_equal(np.isnan(written.rain.values[1]), LAND)
    assert np.isfinite(written.t2m).all()


def test_a_package_forecasts_the_sea_with_any_values_over_land(data):
    test = data.test
    model = torch.nn.Linear(test.in_channels, test.out_channels)
    package = PhysicalModel(test.physical_inputs(), model, test.change_mean, test.change_std)
    fields, time = test.physical_sample(0)
    expected = model_forecast(model, test)(0)
    sea = torch.from_numpy(~LAND.ravel())
    land = [n for n, name in enumerate(package.inputs.names) if name.startswith("sst")]
    for value in (fields[~sea][:, land], torch.nan, 0.0):
        fields[torch.nonzero(~sea), torch.tensor(land)] = value
        forecast = package(fields[None], time[None])[0]
        torch.testing.assert_close(forecast[sea], expected[sea])


def test_a_checkpoint_holds_the_points_without_values(data, tmp_path):
    schema = DataSchema.from_dict(data.train.schema().to_dict())
    assert set(schema.missing) == {"sst", "rain", "depth"}
    assert np.array_equal(schema.missing["sst"], LAND.ravel())
    again = field_data(str(tmp_path / "ocean.nc"), diagnostics=["rain"], schema=schema)
    for one, other in zip(data.train[3], again.train[3], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(data.train.weights, again.train.weights)

    def without_land(source):
        source["sst"] = source.t2m + 1
        return source

    ocean_file(tmp_path / "other.nc", without_land)
    other = field_data(str(tmp_path / "other.nc"), diagnostics=["rain"], schema=schema).test
    with pytest.raises(
        FloatingPointError, match="sst must have values at the same points at all times, got 28"
    ):
        other.inputs(0)


@pytest.mark.parametrize("time", [0, 3, 12, 34, 39])
@pytest.mark.parametrize(
    ("name", "expected"),
    [("sst", "have values at the same points at all times"), ("t2m", "be finite")],
)
def test_points_that_are_missing_at_some_times_only_are_refused(
    time, name, expected, tmp_path, monkeypatch
):
    def change(source):
        source[name][time, 8, 8] = np.nan
        return source

    weather = ocean_file(tmp_path / "ocean.nc", change)
    date = minutes(weather.time.values[time])
    message = f"{name} must {expected}, got nan at 50.00 N -2.00 E, {date}: leave it out"
    with pytest.raises(FloatingPointError, match=message):  # in any split
        field_data(str(tmp_path / "ocean.nc"))
    monkeypatch.setattr(field_states, "CACHE_BYTES", 0)  # read again in training
    with pytest.raises(FloatingPointError, match=message):
        for split in field_data(str(tmp_path / "ocean.nc")):
            [split[i] for i in range(len(split))]


def test_a_variable_without_any_value_is_refused(tmp_path):
    def change(source):
        source["sst"] = source.sst * np.nan
        return source

    ocean_file(tmp_path / "ocean.nc", change)
    with pytest.raises(ValueError, match="sst must have values, got none at any point"):
        field_data(str(tmp_path / "ocean.nc"), variables=["sst", "t2m"])


def test_maps_are_transparent_over_land(data):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    image = MapImage(data.test.nodes)
    axes = figure.add_subplot(projection=image.projection)
    values = data.test.present(0)[:, column(data.test, "sst")].numpy()
    drawn = image.draw(axes, values).get_array()
    filled = image.draw(axes, np.nan_to_num(values, nan=280.0)).get_array()
    share = np.ma.getmaskarray(np.ma.masked_invalid(drawn)).mean()
    assert 0.1 < share < 0.3
    assert np.isfinite(filled).all()
    assert np.nanmin(drawn) >= np.nanmin(values)  # no value of land has a part in the coast


# Fill values, counters, months


@pytest.mark.parametrize("time", [7, 34, 39])
@pytest.mark.parametrize("value", [-9999, 1e20, 9.969209968386869e36, -1e10, -32767])
def test_an_undeclared_fill_value_is_an_error_that_names_the_point(value, time, tmp_path):
    weather = weather_file()
    weather.t2m[time, 2, 3] = value
    weather.to_netcdf(tmp_path / "a.nc")
    message = f"t2m must have its fill value declared, got {np.float32(value):g} at 56.00 N -7.00 E, {minutes(weather.time.values[time])}, .*_FillValue"
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        field_data(str(tmp_path / "a.nc"))


@pytest.mark.parametrize("kind", ["storms", "glacier", "mask"])
def test_skewed_variables_have_no_fill_values(kind, tmp_path):
    weather = weather_file()
    rng = np.random.default_rng(0)
    values = rng.gamma(0.02, 1e-3, weather.tp.shape)
    if kind == "glacier":
        values = rng.random(weather.tp.shape) * (rng.random(weather.tp.shape) < 0.1)
        values[:, 3, 3] = 10
    if kind == "mask":
        values = (rng.random(weather.tp.shape) < 1e-3).astype(float)
    weather["tp"] = weather.tp.copy(data=values.astype("float32"))
    weather.to_netcdf(tmp_path / "a.nc")
    assert len(field_data(str(tmp_path / "a.nc"), diagnostics=["tp"]).train) > 0


def test_counters_and_short_sums_are_named_in_the_log(tmp_path, caplog):
    weather = weather_file()[["t2m", "tp"]]
    weather["rainnc"] = weather.tp.cumsum("time").assign_attrs(units="mm")
    weather.time.attrs["bounds"] = "time_bnds"
    ends = weather.time.values
    weather["time_bnds"] = (
        ("time", "bnds"),
        np.stack([ends - np.timedelta64(1, "h"), ends], axis=1),
    )
    for name in weather.data_vars:
        weather[name].attrs["cell_methods"] = "time: sum" if name == "tp" else "time: point"
    weather.to_netcdf(tmp_path / "a.nc")
    with caplog.at_level("INFO", "anemoi_gt"):
        field_data(str(tmp_path / "a.nc"), diagnostics=["tp"])
    lines = [record.message for record in caplog.records]
    assert [line.split(" ")[0] for line in lines if "never decreases" in line] == ["rainnc"]
    assert [line for line in lines if "lead time is" in line] == [
        "tp is of 1h sum, and the lead time is 6 h: forecasts are of the last 1h of it"
    ]


@pytest.mark.parametrize(("unit", "named"), [("M", "months, 28 to 31"), ("Y", "years, 365 to 366")])
def test_calendar_months_and_years_are_refused(unit, named, tmp_path):
    times = np.arange(np.datetime64("2000", unit), np.datetime64("2000", unit) + 40)
    weather_file(times=times.astype("datetime64[ns]")).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(
        ValueError, match=f"times must be a constant step apart, those of .* are {named}"
    ):
        field_data(str(tmp_path / "a.nc"), lead_time=744)
