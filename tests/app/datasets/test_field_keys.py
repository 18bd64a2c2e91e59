"""Fields known by their keys: coordinates, times, labels and levels of files as other tools write them."""

import logging

import eccodes
import numpy as np
import pytest
import xarray
import zarr
from support.fields import fields_of
from support.grib import UK, message_values, write_messages
from support.own_data import LAT, LON, TIMES, weather_file

from anemoi_gt.app.datasets.field_dataset import field_data
from anemoi_gt.app.datasets.fields import group
from anemoi_gt.app.datasets.readers import read_files
from anemoi_gt.app.datasets.schema import DataSchema
from anemoi_gt.app.datasets.xarray_reader import read_dataset
from anemoi_gt.data.grids import octahedral

POINTS = octahedral(4)  # 208 points without rows of one size
DAY = np.timedelta64(1, "D")


def unstructured(**coordinates):
    """Return t2m of three times on `POINTS`, with coordinates on the dimension `cell`."""
    values = 280 + np.random.default_rng(0).random((3, len(POINTS)))
    return xarray.Dataset({"t2m": (("time", "cell"), values)}, {"time": TIMES[:3]} | coordinates)


def curvilinear(points="rho"):
    """Return latitudes and longitudes of a curved grid [4, 6] of a staggered model."""
    shift = {"rho": 0.0, "u": 0.5, "psi": 0.25}[points]
    lat, lon = np.meshgrid(np.linspace(50, 58, 4), np.linspace(0, 5, 6) + shift, indexing="ij")
    return lat + 0.1 * lon, lon


def assert_positions(fields, lat, lon):
    np.testing.assert_allclose(fields.nodes.lat, np.ravel(lat), atol=1e-6)
    np.testing.assert_allclose(fields.nodes.lon, np.ravel(lon), atol=1e-6)


# Coordinates


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_coordinates_in_radians_are_converted(dtype):
    """As in files of ICON, with points at the poles."""
    lat, lon = POINTS.lat.copy(), POINTS.lon
    lat[[0, -1]] = 90, -90
    attrs = {
        "clat": {"standard_name": "latitude", "units": "radian"},
        "clon": {"standard_name": "longitude", "units": "radian"},
    }
    source = unstructured(
        clat=("cell", np.deg2rad(lat).astype(dtype), attrs["clat"]),
        clon=("cell", np.deg2rad(lon).astype(dtype), attrs["clon"]),
    )
    fields = fields_of(source)
    np.testing.assert_allclose(fields.nodes.lat, lat, atol=1e-4)
    np.testing.assert_allclose(fields.nodes.lon, lon, atol=1e-4)


def test_coordinates_in_unknown_units_are_refused():
    source = unstructured(
        lat=("cell", POINTS.lat, {"units": "km"}), lon=("cell", POINTS.lon, {"units": "km"})
    )
    with pytest.raises(ValueError, match="lat of .* must be in degrees or radians, got 'km'"):
        fields_of(source)


def test_vertices_and_bounds_are_neither_the_grid_nor_variables():
    """As in files of CORDEX and CMIP, where vertices may come first."""
    lat, lon = curvilinear()
    corners = np.stack([lat, lat, lat + 1, lat + 1], axis=-1)
    dims = ("y", "x")
    source = xarray.Dataset(
        {
            "lat_vertices": ((*dims, "vertex"), corners, {"units": "degrees_north"}),
            "lon_vertices": ((*dims, "vertex"), corners, {"units": "degrees_east"}),
            "time_bnds": (("time", "bnds"), np.stack([TIMES[:3], TIMES[1:4]], axis=1)),
            "tas": (("time", *dims), np.random.default_rng(0).random((3, 4, 6))),
        },
        {
            "time": ("time", TIMES[:3], {"bounds": "time_bnds"}),
            "lat": (dims, lat, {"units": "degrees_north", "bounds": "lat_vertices"}),
            "lon": (dims, lon, {"units": "degrees_east", "bounds": "lon_vertices"}),
        },
    )
    fields = fields_of(source)
    assert list(fields.readers) == ["tas"]
    assert_positions(fields, lat, lon)


def test_bounds_that_an_attribute_names_are_no_forcings():
    lat, lon = (
        {"units": "radian", "bounds": "clat_bnds"},
        {"units": "radian", "bounds": "clon_bnds"},
    )
    corners = np.tile(np.deg2rad(POINTS.lat)[:, None], 3)
    source = unstructured(
        clat=("cell", np.deg2rad(POINTS.lat), lat | {"standard_name": "latitude"}),
        clon=("cell", np.deg2rad(POINTS.lon), lon | {"standard_name": "longitude"}),
    )
    source["clat_bnds"] = (("cell", "nv"), corners)
    source["clon_bnds"] = (("cell", "nv"), corners)
    assert list(fields_of(source).readers) == ["t2m"]


@pytest.mark.parametrize("named", ["by the attribute coordinates", "by their dimensions"])
def test_every_field_of_a_staggered_grid_has_its_own_points(named, tmp_path, caplog):
    """As in files of ROMS, whose psi points come first."""
    values = np.random.default_rng(0).random((3, 4, 6))
    data, coordinates = {}, {"ocean_time": TIMES[:3]}
    for points in ("psi", "rho", "u"):
        dims = (f"eta_{points}", f"xi_{points}")
        for name, axis, units in zip(
            ("lat", "lon"), curvilinear(points), ("degree_north", "degree_east"), strict=True
        ):
            data[f"{name}_{points}"] = (
                dims,
                axis,
                {"units": units, "standard_name": {"lat": "latitude", "lon": "longitude"}[name]},
            )
    for name, points in (("zeta", "rho"), ("temp", "rho"), ("u", "u")):
        attrs = {}
        if named == "by the attribute coordinates":
            attrs = {"coordinates": f"lon_{points} lat_{points} ocean_time"}
        data[name] = (("ocean_time", f"eta_{points}", f"xi_{points}"), values, attrs)
    xarray.Dataset(data, coordinates).to_netcdf(tmp_path / "roms.nc")
    with caplog.at_level(logging.INFO, "anemoi_gt"):
        fields = fields_of(str(tmp_path / "roms.nc"))
    assert list(fields.readers) == ["zeta", "temp"]
    assert_positions(fields, *curvilinear("rho"))
    assert "left out, because the grid is 4 x 6 points" in caplog.text
    assert ": u" in caplog.text


@pytest.mark.parametrize("has_positions", [True, False])
def test_axes_of_a_rotated_grid_in_units_of_latitudes_are_none(has_positions):
    source = weather_file()[["t2m"]].rename(latitude="rlat", longitude="rlon")
    for axis, direction in (("lat", "north"), ("lon", "east")):
        name = {"lat": "grid_latitude", "lon": "grid_longitude"}[axis]
        source[f"r{axis}"].attrs = {"standard_name": name, "units": f"degrees_{direction}"}
    lat, lon = source.rlat + 0.1 * source.rlon, -0.1 * source.rlat + source.rlon
    if has_positions:
        source["lat"] = lat.assign_attrs(units="degrees_north")
        source["lon"] = lon.assign_attrs(units="degrees_east")
        assert_positions(fields_of(source), lat.values, lon.values)
        return
    assert read_dataset(source)[0] == []


@pytest.mark.parametrize("named", [True, False])
def test_dimensions_that_count_rows_and_columns_are_no_positions(named, tmp_path):
    source = weather_file()[["t2m"]].rename(latitude="lat", longitude="lon")
    source = source.assign_coords(lat=np.arange(9), lon=np.arange(13))
    lat, lon = 50 + 0.5 * source.lat + 0.1 * source.lon, -0.1 * source.lat + source.lon
    source["nav_lat"] = lat.assign_attrs(units="degrees_north")
    source["nav_lon"] = lon.assign_attrs(units="degrees_east")
    if named:
        source.t2m.attrs["coordinates"] = "nav_lat nav_lon"
    source.to_netcdf(tmp_path / "ocean.nc")
    assert_positions(fields_of(str(tmp_path / "ocean.nc")), lat.values, lon.values)


def test_files_at_12_west_and_at_348_east_are_on_one_grid(tmp_path):
    weather_file(lon=LON - 2, times=TIMES[:20]).to_netcdf(tmp_path / "a.nc")
    weather_file(lon=LON + 358, times=TIMES[20:]).to_netcdf(tmp_path / "b.nc")
    assert np.array_equal(fields_of(str(tmp_path / "*.nc")).times, TIMES)


@pytest.mark.parametrize("kind", ["both 0 and 360", "0, 0 over land"])
def test_points_that_coincide_are_refused(kind):
    if kind == "both 0 and 360":
        source = weather_file(lon=np.linspace(0, 360, 13))
        place = "2 at 50.00 N 0.00 E|2 at 50.00 N 360.00 E"
    else:
        lat, lon = POINTS.lat.copy(), POINTS.lon.copy()
        lat[:5] = lon[:5] = 0
        source = unstructured(lat=("cell", lat), lon=("cell", lon))
        place = "5 at 0.00 N 0.00 E"
    with pytest.raises(ValueError, match=f"points of the grid must be distinct, .* ({place})"):
        fields_of(source)


def test_rows_at_the_poles_are_accepted():
    fields = fields_of(weather_file(lat=np.linspace(90, -90, 13), lon=np.arange(0, 360, 30.0)))
    assert len(fields.nodes) == 13 * 12


# Times


def cfgrib_layout(step=6):
    """Return t2m as cfgrib opens a forecast: times of starts, one step, and valid times."""
    source = weather_file(times=TIMES[:8])[["t2m"]]
    hours = np.timedelta64(step, "h").astype("timedelta64[ns]")
    valid = ("time", TIMES[:8] + hours, {"standard_name": "time"})
    source = source.assign_coords(step=hours, valid_time=valid)
    source.time.attrs["standard_name"] = "forecast_reference_time"
    source.step.attrs["standard_name"] = "forecast_period"
    return source


@pytest.mark.parametrize("without", [(), ("valid_time",)])
def test_a_scalar_step_dates_fields_at_their_valid_times(without, tmp_path):
    cfgrib_layout().drop_vars(without).to_netcdf(tmp_path / "forecast.nc")
    fields = fields_of(str(tmp_path / "forecast.nc"))
    assert np.array_equal(fields.times, TIMES[:8] + np.timedelta64(6, "h"))


@pytest.mark.parametrize(
    ("steps", "attributes", "shift"),
    [
        ((6, 12, 18, 24), {}, 0),
        ((6, 12, 18, 24), {"standard_name": "time"}, 0),
        ((6,), {"standard_name": "time"}, 0),
        ((6,), {}, 6),
    ],
)
def test_steps_that_change_along_the_times_are_those_of_valid_times(
    steps, attributes, shift, tmp_path
):
    """As of one forecast, or of the first steps of several; times of one step may be its starts."""
    along = ("time", np.resize(steps, 40), {"units": "hours"})
    source = weather_file()[["t2m"]].assign_coords(lead_time=along)
    source.time.attrs |= attributes
    source.to_netcdf(tmp_path / "forecast.nc")
    times = fields_of(str(tmp_path / "forecast.nc")).times
    assert np.array_equal(times, TIMES + np.timedelta64(shift, "h").astype("timedelta64[ns]"))


@pytest.mark.parametrize("kind", ["accum", "instant"])
def test_sums_at_several_steps_are_named_in_the_log(kind, tmp_path, caplog):
    """In GRIB these are sums of 6 and of 12 hours, two variables; cfgrib keeps the step only."""
    source = forecasts().rename(t2m="tp")
    source.tp.attrs["GRIB_stepType"] = kind
    source.to_netcdf(tmp_path / "cds.nc")
    fields_of(str(tmp_path / "cds.nc"))
    assert ("is accum at several steps, taken as over equal" in caplog.text) == (kind == "accum")


def test_forecasts_and_analyses_meet_at_the_valid_time(tmp_path):
    rain = cfgrib_layout().rename(t2m="tp")
    rain.to_netcdf(tmp_path / "tp.nc")
    weather_file(times=TIMES[1:9])[["t2m"]].to_netcdf(tmp_path / "t2m.nc")
    fields = fields_of(str(tmp_path / "*.nc"))
    assert np.array_equal(fields.times, TIMES[1:9])
    np.testing.assert_array_equal(fields.readers["tp"](0), rain.tp.values[0].ravel())


def forecasts(hours=(6, 12), starts=TIMES[:6:2], **names):
    """Return t2m by start and step, as the Climate Data Store writes forecasts; each value is the valid time."""
    steps = np.array(hours)
    valid = starts[:, None] + steps[None] * np.timedelta64(1, "h")
    since = (valid - TIMES[0]) / np.timedelta64(1, "h")
    values = np.broadcast_to(since[:, :, None, None], (*since.shape, len(LAT), len(LON)))
    dims = ("forecast_reference_time", "forecast_period")
    source = xarray.Dataset(
        {"t2m": ((*dims, "latitude", "longitude"), values.astype("float32"), {"units": "K"})},
        {
            "forecast_reference_time": (
                dims[0],
                starts,
                {"standard_name": "forecast_reference_time"},
            ),
            "forecast_period": (
                dims[1],
                steps,
                {"standard_name": "forecast_period", "units": "hours"},
            ),
            "valid_time": (dims, valid, {"standard_name": "time"}),
            "latitude": ("latitude", LAT, {"units": "degrees_north"}),
            "longitude": ("longitude", LON, {"units": "degrees_east"}),
        },
    )
    return source.rename(names)


@pytest.mark.parametrize("valid_time", [True, False])
@pytest.mark.parametrize(
    "names", [{}, {"forecast_reference_time": "time", "forecast_period": "step"}]
)
def test_starts_and_steps_become_valid_times_and_no_variables(names, valid_time, tmp_path):
    source = forecasts(**names)
    if not valid_time:
        source = source.drop_vars("valid_time")
    source.to_netcdf(tmp_path / "cds.nc")
    fields = fields_of(str(tmp_path / "cds.nc"))
    assert list(fields.readers) == ["t2m"]
    assert np.array_equal(fields.times, TIMES[1:7])
    for t, hours in enumerate((6, 12, 18, 24, 30, 36)):
        assert (fields.readers["t2m"](t) == hours).all()


def test_two_forecasts_of_one_time_are_refused_by_name(tmp_path):
    forecasts(hours=(6, 12), starts=TIMES[:4]).to_netcdf(tmp_path / "cds.nc")
    message = (
        "each field must be there once, got t2m .*, step 12 h, at 2020-01-01 12:00 of .* and t2m "
        ".*, step 6 h, at 2020-01-01 12:00 of .*: keep one start or one step|got t2m .*, step 6 h, "
        "at 2020-01-01 12:00 .* step 12 h, at"
    )
    with pytest.raises(ValueError, match=message):
        fields_of(str(tmp_path / "cds.nc"))


def test_a_grib_accumulation_stands_at_the_end_of_its_interval_beside_the_analysis(tmp_path):
    """Rain of 0 to 6 h of 00 UTC is known at 06 UTC, not at 00."""
    messages = []
    for day in range(3):
        date = {"dataDate": 20200101 + day, "dataTime": 0}
        messages.append(date | {"shortName": "tp", "stepRange": "0-6", "value": day})
        messages.append(date | {"shortName": "2t", "dataTime": 600, "value": 280 + day})
    write_messages(tmp_path / "a.grib", messages)
    fields = fields_of(str(tmp_path / "a.grib"))
    assert np.array_equal(fields.times, TIMES[1:13:4])
    assert [fields.readers["tp"](t)[0] for t in range(3)] == pytest.approx([0, 1, 2], abs=1e-3)


# Labels


def level_file(value, units="hPa", **changes):
    """Return t at one level, as a scalar coordinate."""
    source = weather_file()[["t2m"]].rename(t2m="t")
    return source.assign_coords(level=((), float(value), {"units": units})).assign_attrs(changes)


def test_a_checkpoint_of_one_level_refuses_another(tmp_path):
    for level in (500, 850):
        level_file(level).to_netcdf(tmp_path / f"{level}.nc")
    schema = field_data(str(tmp_path / "500.nc")).train.schema()
    schema = DataSchema.from_dict(schema.to_dict())
    field_data(str(tmp_path / "500.nc"), schema=schema)
    message = "t must have the keys of the checkpoint: level 500 hPa, not 850 hPa"
    with pytest.raises(ValueError, match=message):
        field_data(str(tmp_path / "850.nc"), schema=schema)


def test_a_checkpoint_finds_its_level_in_a_file_of_several_and_in_other_units(tmp_path):
    """The name of a variable depends on the others of its file."""
    source = weather_file()[["z"]]
    source.level.attrs["units"] = "hPa"
    source.isel(level=1).to_netcdf(tmp_path / "one.nc")
    in_pascals = source.assign_coords(level=("level", source.level.values * 100, {"units": "Pa"}))
    in_pascals.to_netcdf(tmp_path / "two.nc")
    one = field_data(str(tmp_path / "one.nc")).train
    assert one.variables == ("z",)
    two = field_data(str(tmp_path / "two.nc"), schema=one.schema()).train
    assert two.variables == ("z",)
    assert np.array_equal(two.truth(0), one.truth(0))


@pytest.mark.parametrize("diagnostics", [[], ["tp"]])
def test_a_variable_of_a_checkpoint_at_one_time_only_is_not_that_of_all_times(
    diagnostics, tmp_path
):
    source = weather_file()[["t2m", "tp"]]
    source.to_netcdf(tmp_path / "train.nc")
    options = {"diagnostics": diagnostics, "input_steps": 1}
    schema = field_data(str(tmp_path / "train.nc"), **options).train.schema()
    source[["t2m"]].isel(time=slice(36, 40)).to_netcdf(tmp_path / "new_t2m.nc")
    source[["tp"]].isel(time=slice(36, 37)).to_netcdf(tmp_path / "new_tp.nc")
    with pytest.raises(ValueError, match="got tp without time"):
        field_data(str(tmp_path / "new_*.nc"), **options, schema=schema)


def test_files_in_two_units_are_refused_by_name(tmp_path):
    weather_file(times=TIMES[:20])[["t2m"]].to_netcdf(tmp_path / "a.nc")
    celsius = weather_file(times=TIMES[20:])[["t2m"]]
    celsius["t2m"] = (celsius.t2m - 273.15).assign_attrs(units="degC")
    celsius.to_netcdf(tmp_path / "b.nc")
    message = r"one unit, got t2m \[K\], .* of .*a.nc and t2m \[degC\], .* of .*b.nc: convert one"
    with pytest.raises(ValueError, match=message):
        fields_of(str(tmp_path / "*.nc"))


def with_expver(layout):
    source = weather_file()[["t2m"]]
    if layout == "dimension":
        first = source.where(source.time < TIMES[20])
        second = source.where(source.time >= TIMES[20])
        return xarray.concat([first, second], "expver").assign_coords(expver=[1, 5])
    return source.assign_coords(expver=("time", ["0001"] * 20 + ["0005"] * 20))


def test_two_versions_of_an_experiment_are_no_variables_and_the_remedy_keeps_both():
    source = with_expver("dimension")
    message = "t2m .*, expver 1, at .* and t2m .*, expver 5, at .*: .*combine_first"
    with pytest.raises(ValueError, match=message):
        fields_of(source)
    remedy = source.sel(expver=1).combine_first(source.sel(expver=5))
    assert np.isfinite(fields_of(remedy).readers["t2m"](39)).all()


def test_a_version_that_follows_another_is_named_in_the_log(caplog):
    fields = fields_of(with_expver("along time"))
    assert list(fields.readers) == ["t2m"]
    assert np.array_equal(fields.times, TIMES)
    assert "t2m has fields of expver 0001 and 0005" in caplog.text


def test_a_mask_of_bools_is_a_forcing(tmp_path):
    weather = weather_file()
    weather["mask"] = weather.lsm > 0
    weather.to_netcdf(tmp_path / "weather.nc")
    fields = fields_of(str(tmp_path / "weather.nc"))
    assert np.array_equal(fields.readers["mask"](0), (weather.lsm > 0).values.ravel())
    in_memory = fields_of(weather)
    assert "mask" in in_memory.static


def test_missing_values_of_a_zarr_stay_missing(tmp_path):
    weather = weather_file()[["t2m"]]
    weather.t2m[5, 3, 4] = np.nan
    encoding = {"t2m": {"dtype": "int16", "_FillValue": 0, "add_offset": 280, "scale_factor": 1e-3}}
    weather.to_zarr(tmp_path / "a.zarr", zarr_format=2, encoding=encoding)
    assert np.isnan(fields_of(str(tmp_path / "a.zarr")).readers["t2m"](5)).sum() == 1


def test_a_zarr_of_anemoi_datasets_opened_as_xarray_gets_a_hint(tmp_path):
    store = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    for name in ("data", "latitudes", "longitudes", "dates"):
        array = store.create_array(name, data=np.zeros(3))
        array.attrs["_ARRAY_DIMENSIONS"] = ["time"]
    store.attrs["variables"] = ["t2m"]
    with pytest.raises(ValueError, match="is a zarr of anemoi-datasets: take data=anemoi"):
        fields_of(str(tmp_path / "a.zarr"))


def test_what_is_left_out_is_named_with_the_reason(tmp_path, caplog):
    weather = weather_file()
    weather["station"] = (("latitude", "longitude"), np.full((9, 13), "name"))
    weather["profile"] = ("time", np.zeros(40))
    weather.to_netcdf(tmp_path / "weather.nc")
    with caplog.at_level(logging.INFO, "anemoi_gt"):
        fields = fields_of(str(tmp_path / "weather.nc"))
    assert not {"station", "profile"} & set(fields.readers)
    assert "station, because its values are " in caplog.text
    assert "profile, because it has no latitudes on its dimensions, time: 40" in caplog.text


# GRIB


def hourly(count=3, **keys):
    return [{"dataDate": 20200101, "dataTime": 600 * t, "value": t} | keys for t in range(count)]


def test_every_message_is_read_once(tmp_path):
    messages = hourly(shortName="2t") + hourly(shortName="msl")
    write_messages(tmp_path / "a.grib", messages)
    series = read_files(str(tmp_path / "a.grib"))
    assert len(series) == len(messages)
    assert [one.read(0)[0] for one in series] == pytest.approx([0, 1, 2, 0, 1, 2], abs=1e-3)


def test_both_fields_of_one_message_are_read(tmp_path):
    """As u and v in files of NCEP."""
    message = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib2")
    parts = eccodes.codes_grib_multi_new()
    values = eccodes.codes_get_values(message)
    for start_section, name, value in ((0, "u", 1.0), (4, "v", 2.0)):
        eccodes.codes_set(message, "shortName", name)
        eccodes.codes_set_values(message, 0 * values + value)
        eccodes.codes_grib_multi_append(message, start_section, parts)
    with open(tmp_path / "uv.grib", "wb") as file:
        eccodes.codes_grib_multi_write(parts, file)
    fields = {one.key.parameter: one.read(0)[0] for one in read_files(str(tmp_path / "uv.grib"))}
    assert fields == {"u": 1, "v": 2}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, r"t2m .*, analysis, .*at 2020-01-01 06:00 of .* and t2m .*, analysis, "),
        ({"expver": "0005"}, "expver 0001, at .* and t2m .*, expver 0005, at .*combine_first"),
        (
            {"dataType": "fc", "dataTime": 0, "step": 6},
            r"start 2020-01-01 06:00 \+ 0 h, .* and t2m .*start 2020-01-01 00:00 \+ 6 h, .*: keep one "
            "start or one step",
        ),
    ],
)
def test_a_field_that_is_there_twice_is_refused_with_both(tmp_path, change, named):
    kind = change.get("dataType", "an")  # of all messages: another is another variable
    messages = hourly(shortName="2t", expver="0001", dataType=kind, sample="regular_ll_sfc_grib1")
    write_messages(tmp_path / "a.grib", [*messages, messages[1] | {"value": 9} | change])
    with pytest.raises(ValueError, match=f"each field must be there once, got .*{named}"):
        fields_of(str(tmp_path / "a.grib"))


def test_a_checkpoint_of_instants_refuses_means(tmp_path):
    """The mean of 2 m temperature has its parameter and level."""
    write_messages(tmp_path / "a.grib", hourly(40, shortName="2t", value=message_values))
    means = {"shortName": "2t", "productDefinitionTemplateNumber": 8, "stepRange": "0-6"}
    write_messages(tmp_path / "b.grib", hourly(3, typeOfStatisticalProcessing=0, **means))
    instant, mean = (read_files(str(tmp_path / name))[0].key for name in ("a.grib", "b.grib"))
    assert (instant.interval, mean.interval) == ("instant", "6h avg")
    assert not instant.matches(mean)
    assert instant.matches(instant._replace(interval=""))


def test_fields_of_two_members_are_not_one_member(tmp_path):
    ensemble = {"dataType": "pf", "productDefinitionTemplateNumber": 1}
    write_messages(
        tmp_path / "a.grib",
        hourly(shortName="2t", number=1, **ensemble)
        + hourly(shortName="10u", number=2, **ensemble),
    )
    message = "the same members, got 1 of t2m .*, member 1, .* and 2 of u10 .*, member 2"
    with pytest.raises(ValueError, match=message):
        fields_of(str(tmp_path / "a.grib"))


def test_members_keep_their_labels(tmp_path):
    messages = []
    for number in (3, 11):
        ensemble = {"dataType": "pf", "productDefinitionTemplateNumber": 1, "number": number}
        messages += [m | {"value": number} for m in hourly(shortName="2t", **ensemble)]
    write_messages(tmp_path / "a.grib", messages)
    fields = fields_of(str(tmp_path / "a.grib"))
    assert fields.members == ("3", "11")
    assert [fields.readers["t2m"](i)[0] for i in (0, 3)] == pytest.approx([3, 11], abs=1e-2)


@pytest.mark.parametrize("i_negative", [0, 1])
@pytest.mark.parametrize("j_positive", [0, 1])
@pytest.mark.parametrize("j_consecutive", [0, 1])
def test_every_way_of_scanning_has_its_values_at_their_points(
    tmp_path, i_negative, j_positive, j_consecutive
):
    scanning = {
        "iScansNegatively": i_negative,
        "jScansPositively": j_positive,
        "jPointsAreConsecutive": j_consecutive,
    }
    write_messages(tmp_path / "a.grib", hourly(shortName="2t", value=message_values, **scanning))
    fields = fields_of(str(tmp_path / "a.grib"))
    expected = message_values(fields.nodes.lat, fields.nodes.lon % 360)
    np.testing.assert_allclose(fields.readers["t2m"](1), expected, atol=0.01)
    assert sorted(zip(fields.nodes.lat, fields.nodes.lon % 360, strict=True)) == sorted(
        zip(UK.lat, UK.lon % 360, strict=True)
    )


def test_rows_of_alternating_direction_are_refused(tmp_path):
    write_messages(tmp_path / "a.grib", hourly(shortName="2t", alternativeRowScanning=1))
    with pytest.raises(ValueError, match="must scan all rows in one direction"):
        fields_of(str(tmp_path / "a.grib"))


def test_one_time_of_grib_is_enough_beside_others(tmp_path, caplog):
    """As for invariant fields in a file of their own."""
    surface = {"shortName": "z", "typeOfLevel": "surface", "level": 0}
    write_messages(tmp_path / "a.grib", hourly(1, dataDate=19400101, **surface))
    write_messages(tmp_path / "b.grib", hourly(3, shortName="2t"))
    with caplog.at_level(logging.INFO, "anemoi_gt"):
        fields = fields_of(str(tmp_path / "*.grib"))
    assert fields.static == {"z"}
    assert np.array_equal(fields.times, TIMES[:3])
    assert "of one time only, taken as without time: z" in caplog.text


def test_a_file_of_one_time_has_it(tmp_path):
    write_messages(tmp_path / "a.grib", hourly(1, shortName="2t"))
    assert np.array_equal(fields_of(str(tmp_path / "a.grib")).times, TIMES[:1])


def test_two_variables_that_would_get_one_name_are_refused():
    source = weather_file()[["z"]].rename(z="t")
    source["t_500"] = source.t.isel(level=0, drop=True)
    with pytest.raises(ValueError, match="distinct names, t_500 would be t .* and t_500"):
        fields_of(source)


def test_a_variable_that_is_not_chosen_need_not_fit(tmp_path):
    weather = weather_file()
    weather[["t2m"]].to_netcdf(tmp_path / "a.nc")
    weather[["tp"]].isel(time=slice(3, None)).to_netcdf(tmp_path / "b.nc")
    path = str(tmp_path / "*.nc")
    with pytest.raises(
        ValueError, match="must have the same times, tp .* is missing at 2020-01-01"
    ):
        field_data(path)
    assert len(group(read_files(path))) == 2
    assert field_data(path, variables=["t2m"]).train.variables == ("t2m",)
