"""All keys of a field are equal, or they are two fields: every key, coordinate and attribute is changed once."""

import eccodes
import numpy as np
import pytest
import zarr
from support.fields import arrange_all, fields_of
from support.grib import write_messages
from support.own_data import LAT, LON, TIMES, weather_file

from anemoi_gt.app.datasets.field_dataset import FieldDataset, field_data
from anemoi_gt.app.datasets.field_states import FieldStates
from anemoi_gt.app.datasets.fields import FieldError, Key, Level
from anemoi_gt.app.datasets.grib_reader import INSTANTS, MAY_DIFFER, MISSING
from anemoi_gt.app.datasets.readers import read_files
from anemoi_gt.app.datasets.roles import Roles
from anemoi_gt.app.datasets.schema import DataSchema
from anemoi_gt.app.datasets.xarray_reader import KEYS, read_dataset

GRIB1 = "regular_ll_sfc_grib1"
GRIB2 = "regular_ll_sfc_grib2"
# Messages of each kind: sample, and keys that are set in this order.
MESSAGES = {
    "edition 1, level": (GRIB1, {"indicatorOfTypeOfLevel": 100, "level": 500, "shortName": "t"}),
    "edition 1, layer": (GRIB1, {"indicatorOfTypeOfLevel": 112, "shortName": "stl1"}),
    "edition 1, sum": (GRIB1, {"shortName": "tp", "timeRangeIndicator": 4, "P2": 6}),
    "edition 1, member": (GRIB1, {"shortName": "2t", "marsType": "pf", "perturbationNumber": 3}),
    "analysis": (GRIB2, {"shortName": "2t"}),
    "unknown": (GRIB2, {"parameterCategory": 1, "parameterNumber": 231}),
    "member": (GRIB2, {"productDefinitionTemplateNumber": 1, "shortName": "2t", "perturbationNumber": 3}),
    "mean": (GRIB2, {"productDefinitionTemplateNumber": 2, "shortName": "2t"}),
    "probability": (GRIB2, {"productDefinitionTemplateNumber": 5, "shortName": "2t"}),
    "percentile": (GRIB2, {"productDefinitionTemplateNumber": 6, "shortName": "2t"}),
    "sum": (GRIB2, {"productDefinitionTemplateNumber": 8, "shortName": "tp"}),
    "sum of a member": (GRIB2, {"productDefinitionTemplateNumber": 11, "shortName": "tp"}),
    "tile": (GRIB2, {"productDefinitionTemplateNumber": 55, "parameterNumber": 17}),
    "chemical": (GRIB2, {"productDefinitionTemplateNumber": 40, "parameterCategory": 20}),
    "layer": (
        GRIB2,
        {
            "typeOfFirstFixedSurface": 106,
            "scaleFactorOfFirstFixedSurface": 2,
            "scaledValueOfFirstFixedSurface": 10,
            "typeOfSecondFixedSurface": 106,
            "scaleFactorOfSecondFixedSurface": 2,
            "scaledValueOfSecondFixedSurface": 40,
            "shortName": "t",
        },
    ),
}  # fmt: skip
# Keys that are read in another form than coded, so that they must count as well.
LEVEL_KEYS = ("level", "scaledValueOfFirstFixedSurface", "scaledValueOfSecondFixedSurface")
SIZES = ("section", "numberOfSection", "NV")


def new_message(kind, t):
    sample, keys = MESSAGES[kind]
    message = eccodes.codes_grib_new_from_samples(sample)
    for key, value in ({"dataDate": 20200101, "dataTime": 600 * t} | keys).items():
        eccodes.codes_set(message, key, value)
    return message


def product_keys(message):
    """Return the coded keys of the product section, and the type of processed data."""
    section = "section4Length" if eccodes.codes_get(message, "edition") == 2 else "section1Length"
    names = ["typeOfProcessedData", "discipline"] if section == "section4Length" else []
    inside = False
    iterator = eccodes.codes_keys_iterator_new(message)
    eccodes.codes_skip_computed(iterator)
    while eccodes.codes_keys_iterator_next(iterator):
        name = eccodes.codes_keys_iterator_get_name(iterator)
        if name.startswith("section") and name.endswith("Length"):
            inside = name == section
        if inside and not name.startswith(SIZES):
            names.append(name)
    eccodes.codes_keys_iterator_delete(iterator)
    return names


def write_with_half_changed(path, kind, key, value):
    """Write two messages, and change a key in one of them; return whether ecCodes takes the value."""
    with open(path, "wb") as file:
        for t in range(2):
            message = new_message(kind, t)
            try:
                if t == 1:
                    eccodes.codes_set(message, key, value)
                    if eccodes.codes_get(message, key, int) != value:
                        return False
                eccodes.codes_write(message, file)
            except eccodes.CodesInternalError:
                return False
            finally:
                eccodes.codes_release(message)
    return True


def field_data_schema():
    """Return the schema of a small data set."""
    fields = fields_of(weather_file()[["t2m"]])
    roles = Roles(("t2m",), (), ())
    return FieldDataset(FieldStates(fields, roles, 6.0, 1)).schema()


def number_of_variables(source):
    """Return the number of variables that are read, 0 if they are refused."""
    try:
        return len(fields_of(source).readers)
    except (ValueError, FieldError):
        return 0


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_key_of_the_product_that_changes_makes_two_variables_or_a_refusal(kind, tmp_path):
    path = str(tmp_path / "a.grib")
    tried, joined = [], []
    message = new_message(kind, 0)
    keys = [key for key in product_keys(message) if key in LEVEL_KEYS or not MAY_DIFFER.match(key)]
    for key in keys:
        coded = eccodes.codes_get(message, key, int)
        changed = {coded + 1, 7} - {coded, MISSING + 1}
        if key == "timeRangeIndicator":
            changed -= set(INSTANTS)
        for value in sorted(changed):
            if write_with_half_changed(path, kind, key, value):
                tried.append(key)
                if number_of_variables(path) == 1:
                    joined.append((key, coded, value))
    assert len(set(tried)) >= 0.7 * len(keys)  # others are read-only, or depend on others
    assert joined == []


def surfaces(kind, scale, first, second=None):
    """Return the keys of a level, or of a layer with a second surface."""
    keys = {"shortName": "t"}
    for which, value in (("First", first), ("Second", second)):
        if value is not None:
            keys |= {
                f"typeOf{which}FixedSurface": kind,
                f"scaleFactorOf{which}FixedSurface": scale,
                f"scaledValueOf{which}FixedSurface": value,
            }
    return keys


def at_level(kind, level, name="t"):
    return {"shortName": name, "typeOfLevel": kind, "level": level}


OF_ENSEMBLE = {"shortName": "2t", "productDefinitionTemplateNumber": 2}
VARIABLES = [  # keys of several fields by the names of their variables
    {"tp_6h": {"shortName": "tp", "stepRange": "0-6"}, "tp_3h": {"shortName": "tp", "stepRange": "3-6"}},
    {"z_500": at_level("isobaricInhPa", 500, "z"), "z_sfc": at_level("surface", 0, "z")},
    {
        "t_500": at_level("isobaricInhPa", 500),
        "t_ml500": at_level("hybrid", 500),
        "t_ml90": at_level("hybrid", 90),
    },
    {"t_0-0.1": surfaces(106, 2, 0, 10), "t_0.1-0.4": surfaces(106, 2, 10, 40)},
    {"t_1.5": surfaces(103, 1, 15), "t_2.4": surfaces(103, 1, 24)},
    {"t_50000-70000": surfaces(100, 0, 50000, 70000), "t_50000-85000": surfaces(100, 0, 50000, 85000)},
    {f"t2m_derivedForecast{n}": OF_ENSEMBLE | {"derivedForecast": n} for n in (0, 4)},
]  # fmt: skip


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("fields", VARIABLES, ids=" ".join)
def test_fields_at_common_times_are_variables_with_names_of_their_keys(files, fields, tmp_path):
    messages = [[] for _ in range(files)]
    for n, keys in enumerate(fields.values()):
        messages[n % files] += [{"dataTime": 600 * t, "value": 1 + n} | keys for t in range(3)]
    for n, part in enumerate(messages):
        write_messages(tmp_path / f"{n}.grib", part)
    read = fields_of(str(tmp_path / "*.grib")).readers
    expected = {name: 1 + n for n, name in enumerate(fields)}
    assert {name: read[name](1)[0] for name in read} == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("template", "key", "values"),
    [(2, "derivedForecast", (0, 4)), (6, "percentileValue", (10, 90)), (0, "discipline", (0, 2))],
)
def test_a_checkpoint_of_one_field_refuses_another(template, key, values, tmp_path):
    for value in values:
        keys = {"productDefinitionTemplateNumber": template, "shortName": "2t", key: value}
        if key == "discipline":
            keys = {"parameterCategory": 0, "parameterNumber": 231, key: value}
        messages = []
        for t in range(40):
            date = {"dataDate": 20200101 + t // 4, "dataTime": 600 * (t % 4)}
            messages.append(keys | date | {"value": lambda lat, lon, t=t: lat + t * lon})
        write_messages(tmp_path / f"{value}.grib", messages)
    one, other = (str(tmp_path / f"{value}.grib") for value in values)
    schema = DataSchema.from_dict(field_data(one).train.schema().to_dict())
    assert len(field_data(one, schema=schema).train) > 0
    with pytest.raises(ValueError, match=f"{key} {values[0]}, not {values[1]}|lacks param_0_0_231"):
        field_data(other, schema=schema)


def test_keys_of_a_checkpoint_of_0_4_0_are_compared_as_far_as_they_were_kept():
    level = ["depthBelowLandLayer", 0.0, "0", "depthBelowLandLayer 0"]
    values = field_data_schema().to_dict() | {"keys": [["t", ["t", [level], "instant"]]]}
    (key,) = DataSchema.from_dict(values).keys.values()
    layer = Level("depthBelowLandLayer", 0.0, "0-0.1", "", 0.1)
    assert key.matches(Key("t", (layer,), "instant", (("derivedForecast", 4),)))
    assert not key.matches(Key("t", (layer._replace(value=0.1),), "instant"))


def test_a_refusal_quotes_the_key_that_differs(tmp_path):
    keys = {"shortName": "2t", "productDefinitionTemplateNumber": 6}
    messages = [
        keys | {"percentileValue": 10 if t < 2 else 90, "dataTime": 600 * t} for t in range(4)
    ]
    write_messages(tmp_path / "a.grib", messages)
    with pytest.raises(ValueError, match="their keys differ: percentileValue 90, not 10"):
        fields_of(str(tmp_path / "a.grib"))


@pytest.mark.parametrize("processed", [255, 5, 3])
@pytest.mark.parametrize("edition", [1, 2])
def test_a_member_that_one_variable_lacks_is_refused_and_not_the_control(
    edition, processed, tmp_path
):
    messages = []
    for name, members in (("2t", 3), ("10u", 2)):
        for member in range(members):
            keys = {"sample": GRIB1, "perturbationNumber": member}
            if edition == 2:
                keys = {
                    "productDefinitionTemplateNumber": 1,
                    "perturbationNumber": member,
                    "typeOfEnsembleForecast": 1 if member == 0 else 3,
                    "typeOfProcessedData": 4 if processed == 3 and member > 0 else processed,
                }
            messages += [keys | {"shortName": name, "dataTime": 600 * t} for t in range(2)]
    write_messages(tmp_path / "a.grib", messages)
    with pytest.raises(ValueError, match="the same members, got 0, 1, 2 of t2m .* and 0, 1 of u10"):
        fields_of(str(tmp_path / "a.grib"))


def test_values_of_9999_are_values_beside_a_bitmap(tmp_path):
    message = eccodes.codes_grib_new_from_samples(GRIB2)
    values = np.linspace(0, 9998, eccodes.codes_get(message, "numberOfPoints")).round()
    values[-100:] = 9999
    values[0] = 1e9
    for key, value in (("shortName", "vis"), ("missingValue", 1e9), ("bitmapPresent", 1)):
        eccodes.codes_set(message, key, value)
    eccodes.codes_set(message, "bitsPerValue", 24)
    eccodes.codes_set_values(message, values)
    with open(tmp_path / "a.grib", "wb") as file:
        eccodes.codes_write(message, file)
    (one,) = read_files(str(tmp_path / "a.grib"))
    assert np.flatnonzero(np.isnan(one.read(0))).tolist() == [0]


# NetCDF and zarr


def halves(change):
    """Return the series of two data sets of t2m at different times; the second one is changed."""
    first, second = (weather_file(times=part)[["t2m"]] for part in (TIMES[:4], TIMES[4:8]))
    for part in (first, second):
        part.t2m.attrs |= {key: "one" for key in KEYS if key != "GRIB_typeOfLevel"}
        part.t2m.attrs["cell_methods"] = "area: mean"
    return [one for part in (first, change(second)) for one in read_dataset(part)[0]]


def with_bounds(begin, end, times=TIMES[4:8], method="time: sum"):
    def change(source):
        source.time.attrs["bounds"] = "time_bnds"
        bounds = np.stack([times + np.timedelta64(h, "h") for h in (begin, end)], axis=1)
        source["time_bnds"] = (("time", "bnds"), bounds)
        source.t2m.attrs["cell_methods"] = method
        return source

    return change


CHANGES = {
    **{f"attribute {key}": lambda s, key=key: s.assign(t2m=s.t2m.assign_attrs({key: "other"})) for key in KEYS},
    **{f"no attribute {key}": lambda s, key=key: s.assign(t2m=s.t2m.assign_attrs({key: ""})) for key in KEYS if key != "GRIB_typeOfLevel"},
    "number without attributes": lambda s: s.assign_coords(isobaricInhPa=500),
    "pressure": lambda s: s.assign_coords(level=((), 500.0, {"units": "hPa"})),
    "text": lambda s: s.assign_coords(experiment="ssp585"),
    "bool": lambda s: s.assign_coords(is_mean=True),
    "duration": lambda s: s.assign_coords(window=np.timedelta64(6, "h")),
    "not a number": lambda s: s.assign_coords(percentile=np.nan),
    "member": lambda s: s.assign_coords(number=11),
    "bounds": with_bounds(-6, 0),
    "units": lambda s: s.assign(t2m=s.t2m.assign_attrs(units="degC")),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_scalar_coordinate_or_attribute_that_changes_makes_two_variables_or_a_refusal(name):
    assert len(arrange_all(halves(lambda s: s)).readers) == 1
    series = halves(CHANGES[name])
    with pytest.raises(ValueError, match="got|is missing at"):
        arrange_all(series)  # at different times


@pytest.mark.parametrize("key", ["isobaricInhPa", "number", "height"])
def test_a_level_or_member_that_changes_along_time_is_refused(key):
    """As xarray joins scalar coordinates of several files in time."""
    source = weather_file()[["t2m"]]
    one = source.assign_coords({key: ("time", [500] * 40)})
    assert list(fields_of(one).readers) == ["t2m"]
    two = source.assign_coords({key: ("time", [500] * 20 + [850] * 20)})
    with pytest.raises(
        FieldError, match=f"t2m of .* must have one {key} at all times, got 500 and 850"
    ):
        fields_of(two)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ((500, 850), {"t_500", "t_850"}),
        ((0.07, 0.28), {"t_0.07", "t_0.28"}),
        (("ssp126", "ssp585"), {"t_ssp126", "t_ssp585"}),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_scalar_coordinates_without_attributes_tell_variables_apart(values, names, order):
    source = weather_file()[["t2m"]].rename(t2m="t")
    parts = [source.assign_coords(which=values[i]) + i for i in order]
    fields = arrange_all([one for part in parts for one in read_dataset(part)[0]])
    assert set(fields.readers) == names


def test_a_level_in_float32_is_that_in_float64():
    source = weather_file()[["t2m"]]
    parts = [
        source.isel(time=slice(4 * i, 4 * i + 4)).assign_coords(depth=dtype(0.07))
        for i, dtype in enumerate((np.float32, np.float64))
    ]
    fields = arrange_all([one for part in parts for one in read_dataset(part)[0]])
    assert list(fields.readers) == ["t2m"]


def test_a_sum_stands_at_the_end_of_its_bounds_as_in_grib():
    """A sum that is stamped with its beginning would hold the next six hours."""
    sums = with_bounds(0, 6, TIMES[:8])(weather_file(times=TIMES[:8])[["t2m"]]).rename(t2m="tp")
    sums = sums.assign(tp=sums.tp.assign_attrs(cell_methods="time: sum"))
    analysis = weather_file(times=TIMES[1:9])[["t2m"]]
    fields = arrange_all(read_dataset(sums)[0] + read_dataset(analysis)[0])
    assert np.array_equal(fields.times, TIMES[1:9])
    assert fields.keys["tp"].interval == "6h sum"
    np.testing.assert_array_equal(fields.readers["tp"](0), sums.tp.values[0].ravel())


def test_bounds_are_those_of_the_times_that_are_read():
    """As in files of NEMO, which also have the centres of intervals as a coordinate."""
    source = with_bounds(0, 6, TIMES[:8], "time: mean")(weather_file(times=TIMES[:8])[["t2m"]])
    centre = ("time", TIMES[:8] + np.timedelta64(3, "h"), {"standard_name": "time"})
    source = source.assign_coords(a_centre=centre).set_coords("a_centre")
    source.time.attrs["standard_name"] = "time"
    assert np.array_equal(fields_of(source[["t2m", "time_bnds"]]).times, TIMES[1:9])


def test_sums_and_instants_of_one_axis_share_the_times_between_its_ends(caplog):
    source = with_bounds(0, 6, TIMES[:8])(weather_file(times=TIMES[:8])[["t2m"]])
    source["t"] = (source.t2m * 2).assign_attrs(cell_methods="time: point")
    with caplog.at_level("INFO", "anemoi_gt"):
        fields = fields_of(source)
    assert np.array_equal(fields.times, TIMES[1:8])
    np.testing.assert_array_equal(fields.readers["t2m"](0), source.t2m.values[0].ravel())
    np.testing.assert_array_equal(fields.readers["t"](0), source.t.values[1].ravel())
    assert "times from 2020-01-01 06:00 to 2020-01-02 18:00 are common" in caplog.text


@pytest.mark.parametrize("method", ["time: point", "area: mean time: point"])
def test_an_instant_stands_at_its_time_in_spite_of_bounds(method):
    source = with_bounds(0, 6, TIMES[:8], method)(weather_file(times=TIMES[:8])[["t2m"]])
    assert np.array_equal(fields_of(source).times, TIMES[:8])


def test_time_bounds_without_cell_methods_are_intervals_and_logged(caplog):
    source = with_bounds(0, 6, TIMES[:8], "")(weather_file(times=TIMES[:8])[["t2m"]])
    with caplog.at_level("INFO", "anemoi_gt"):
        fields = fields_of(source)
    assert np.array_equal(fields.times, TIMES[1:9])
    assert "t2m of the data set has time bounds and no cell_methods" in caplog.text


@pytest.mark.parametrize(
    ("west", "south"),
    [("degrees_west", "degrees_south"), ("degree_W", "degree_S"), ("degreesW", "degreesS")],
)
def test_degrees_west_and_south_are_negative(west, south):
    source = weather_file()[["t2m"]].assign_coords(
        longitude=("longitude", np.arange(10.0, 23.0), {"units": west}),
        latitude=("latitude", np.arange(9.0), {"units": south}),
    )
    fields = fields_of(source)
    assert fields.nodes.lon.min() == -22
    assert fields.nodes.lat.min() == -8


@pytest.mark.parametrize(
    "attributes", [{"valid_min": np.float32(-5)}, {"valid_range": np.float32([-5, 400])}]
)
def test_values_beyond_the_valid_range_are_missing(attributes, tmp_path, caplog):
    weather = weather_file()[["t2m"]]
    weather.t2m[0, 0, 0] = -9999
    weather.t2m.attrs |= attributes
    weather.to_netcdf(tmp_path / "a.nc")
    with caplog.at_level("INFO", "anemoi_gt"):
        read = fields_of(str(tmp_path / "a.nc")).readers["t2m"](0)
    assert np.flatnonzero(np.isnan(read)).tolist() == [0]
    assert "values of t2m beyond its valid range, -5 to " in caplog.text


def test_a_valid_range_of_packed_values_is_unpacked(tmp_path):
    weather = weather_file()[["t2m"]]
    packed = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32767}
    weather.t2m.attrs["valid_range"] = np.int16([-500, 400])
    weather.to_netcdf(tmp_path / "a.nc", encoding={"t2m": packed})
    read = fields_of(str(tmp_path / "a.nc")).readers["t2m"](0)
    expected = weather.t2m.values[0].ravel()
    assert np.isnan(read).tolist() == (expected > 284.005).tolist()
    assert np.isnan(read).any()


@pytest.mark.parametrize("year", ["2300", "0001"])
def test_years_beyond_nanoseconds_are_refused(year, tmp_path):
    source = weather_file()[["t2m"]].isel(time=slice(4)).drop_vars("time")
    source["time"] = ("time", np.arange(4.0), {"units": f"days since {year}-01-01"})
    source.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(ValueError, match="not dates of the standard calendar, from 1678 to 2261"):
        fields_of(str(tmp_path / "a.nc"))


def test_the_remedy_for_another_calendar_works(tmp_path):
    source = weather_file()[["t2m"]].convert_calendar("360_day", align_on="date")
    source.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(ValueError, match="not dates of the standard calendar"):
        fields_of(str(tmp_path / "a.nc"))
    assert len(fields_of(source.convert_calendar("standard", align_on="date")).times) > 30


def new_array(store, name, dims, **options):
    """Make an array whose fill value is 0, with the names of its dimensions as xarray reads them."""
    if store.metadata.zarr_format == 3:
        return store.create_array(name, dimension_names=dims, fill_value=0, **options)
    array = store.create_array(name, fill_value=0, **options)
    array.attrs["_ARRAY_DIMENSIONS"] = dims
    return array


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("written", [True, False])
def test_zeros_of_a_raw_zarr_are_values_and_those_of_chunks_that_were_not_written_are_logged(
    written, zarr_format, tmp_path, caplog
):
    """Format 2 fills chunks that were not written with 0, which says nothing about missing values."""
    values = np.zeros((40, 9, 13), "float32")
    values[:, 3] = 1
    store = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=zarr_format)
    arrays = {"time": np.arange(40) * 6, "lat": LAT, "lon": LON}
    for name, array in arrays.items():
        axis = new_array(store, name, [name], shape=array.shape, dtype=array.dtype)
        axis[:] = array
    store["time"].attrs["units"] = "hours since 2020-01-01"
    rain = new_array(
        *(store, "tp", ["time", "lat", "lon"]), shape=(40, 9, 13), chunks=(10, 9, 13), dtype="f4"
    )
    times = 40 if written else 20
    rain[:times] = values[:times]
    fields = fields_of(str(tmp_path / "a.zarr"))
    assert np.array_equal(fields.times, TIMES)
    for t, expected in ((0, values[0]), (39, values[39] if written else 0 * values[39])):
        assert np.array_equal(fields.readers["tp"](t), expected.ravel())
    warned = "2 of 4 chunks of tp were not written, their values are read as 0" in caplog.text
    assert warned == (not written)
    assert written == (caplog.text == "")


@pytest.mark.parametrize(("zarr_format", "expected"), [(2, np.nan), (3, 280.0)])
def test_chunks_that_were_not_written_of_a_packed_zarr_are_missing_or_logged(
    zarr_format, expected, tmp_path, caplog
):
    """Format 3 has zeros there, which are no missing values and are unpacked."""
    packed = {"dtype": "int16", "scale_factor": 1e-3, "add_offset": 280.0, "_FillValue": -32767}
    weather = weather_file()[["t2m"]]
    path = tmp_path / "a.zarr"
    weather.to_zarr(
        path, encoding={"t2m": packed | {"chunks": (10, 9, 13)}}, zarr_format=zarr_format
    )
    (path / "t2m" / {2: "3.0.0", 3: "c/3/0/0"}[zarr_format]).unlink()
    read = fields_of(str(path)).readers["t2m"]
    np.testing.assert_allclose(read(29), weather.t2m.values[29].ravel(), atol=1e-3)
    np.testing.assert_array_equal(read(39), np.full(9 * 13, expected, "f4"))
    warned = "1 of 4 chunks of t2m were not written, their values are read as 280" in caplog.text
    assert warned == np.isfinite(expected)
