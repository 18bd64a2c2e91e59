"""Fields from GRIB files: each message is a field, with the coordinates and scanning of ecCodes.

Two messages are of one variable if all keys of their product sections are equal, but `MAY_DIFFER`.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from anemoi_gt.app.datasets.fields import (
    INSTANT,
    FieldError,
    Grid,
    Key,
    Level,
    OtherKeys,
    Series,
    minutes,
    rounded,
)
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

Get = Callable[[str], Any]  # a key of one message, or None; a message is a handle of ecCodes

# Keys of the product section, of edition 1 or 2, by which messages of one variable may differ.
MAY_DIFFER = re.compile(
    # dates and steps, which the valid time and the interval tell, and the version
    "(yearOfCentury|centuryOfReferenceTimeOfData|month|day|hour|minute|second)$"
    "|(year|month|day|hour|minute|second)OfEndOfOverallTimeInterval"
    "|forecastTime|indicatorOfUnit(ForForecastTime|OfTimeRange)|unitOfTimeRange|P1$|P2$"
    "|experimentVersionNumber"
    # values of the level, which are read as floats
    "|level$|scale(Factor|dValue)Of(First|Second)FixedSurface"
    # the model that made the field, its class, what it waited for, and how many fields it lacked
    "|generatingProcessIdentifier|backgroundProcess|marsClass|(hours|minutes)AfterDataCutoff"
    "|number(OfMissing|Missing)"
    # sizes, the number of the grid, and bits of packing
    "|section|numberOfSection|gridDefinition|decimalScaleFactor|reserved|padding"
)
INSTANTS = (0, 1, 10)  # time range indicators of edition 1, by the size of the step
MISSING = 2**31 - 1  # a key of edition 2 that is coded as missing
IMPOSSIBLE = -1e300  # no value of a field: decoded for missing ones
# Keys by which members may differ, with their values if only some may: control and perturbed
MEMBER: dict[str, tuple[int, ...]] = {
    "perturbationNumber": (),
    "typeOfEnsembleForecast": (),
    "typeOfProcessedData": (3, 4),
    "marsType": (10, 11),
}
HECTOPASCALS = {"isobaricInhPa": 0.01, "isobaricInPa": 0.01}  # of a value of edition 2, in Pa
LEVELS = {"hybrid": "model level", "heightAboveGround": "height", "depthBelowSea": "depth"}


def read_grib(path: str) -> tuple[list[Series], dict[str, str]]:
    """Return the fields of a GRIB file, one per message, and why others were left out, by name.

    Raises ImportError if ecCodes is missing, ValueError if the file cannot be read.
    """
    eccodes = import_extra("eccodes", "era5")
    series: list[Series] = []
    left_out: dict[str, str] = {}
    grids: dict[str, Grid] = {}
    split: dict[OtherKeys, tuple[OtherKeys, OtherKeys]] = {}
    with open(path, "rb") as file:
        eccodes.codes_grib_multi_support_reset_file(file)
        for message, offset, part in _messages(eccodes, file):
            get = partial(_get, eccodes, message)
            name = _parameter(get)
            if get("gridType") in ("sh", None):
                left_out[name] = "its coefficients are spectral, and not values at points"
                continue
            grid_key = get("md5GridSection")
            if grid_key not in grids:
                grids[grid_key] = _grid(eccodes, message, path)
            read = partial(_read, path, offset, part)
            keys = _product_keys(eccodes, message)
            if keys not in split:  # messages of one variable and member share them
                split[keys] = _split(keys)
            series.append(_series(get, name, split[keys], grids[grid_key], read, path))
    if not series and not left_out:
        raise EOFError("it holds no message")
    return series, left_out


def _messages(eccodes: ModuleType, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Yield the handle of each field, the offset of its message, and its number in the message.

    A message of GRIB 2 may hold several fields, such as u and v.
    """
    last = -1
    part = 0
    while (message := eccodes.codes_grib_new_from_file(file)) is not None:
        try:
            offset = eccodes.codes_get(message, "offset", int)
            part = part + 1 if offset == last else 0
            last = offset
            yield message, offset, part
        finally:
            eccodes.codes_release(message)


def _get(eccodes: ModuleType, message: int, key: str) -> Any:
    """Return a key of a message, or None if the message does not have it."""
    try:
        value = eccodes.codes_get(message, key)
    except eccodes.KeyValueNotFoundError:
        return None
    return None if value in ("unknown", "undef") else value


def _product_keys(eccodes: ModuleType, message: int) -> OtherKeys:
    """Return the keys of the product section but `MAY_DIFFER`, and the type of processed data."""
    values: dict[str, Any] = {}
    section = "section1Length"  # of edition 1, which has no type of processed data
    if eccodes.codes_get(message, "edition", int) == 2:
        section = "section4Length"
        for name in ("discipline", "typeOfProcessedData"):
            values[name] = _coded(eccodes, message, name)
    inside = False
    iterator = eccodes.codes_keys_iterator_new(message)
    try:
        eccodes.codes_skip_computed(iterator)
        while eccodes.codes_keys_iterator_next(iterator):  # in the order of the message
            name = eccodes.codes_keys_iterator_get_name(iterator)
            if re.fullmatch(r"section\dLength", name):
                inside = name == section
            if inside and not MAY_DIFFER.match(name):
                values[name] = _coded(eccodes, message, name)
    finally:
        eccodes.codes_keys_iterator_delete(iterator)
    if values.get("timeRangeIndicator") in INSTANTS:
        values["timeRangeIndicator"] = 0
    return tuple(values.items())


def _coded(eccodes: ModuleType, message: int, name: str) -> Any:
    """Return the value of a key as it is coded: two codes of a table may have one text."""
    kind = float if eccodes.codes_get_native_type(message, name) is float else int
    try:
        return eccodes.codes_get(message, name, kind)
    except eccodes.ArrayTooSmallError:
        return tuple(eccodes.codes_get_array(message, name, kind).tolist())
    except eccodes.CodesInternalError:  # text
        return eccodes.codes_get(message, name, str)


def _parameter(get: Get) -> str:
    """Return the name of a parameter, such as t2m, as the Climate Data Store does in NetCDF."""
    name = get("cfVarName") or get("shortName")
    if name:
        return name
    numbers = ("discipline", "parameterCategory", "parameterNumber")
    if get("edition") == 1:
        numbers = ("centre", "table2Version", "indicatorOfParameter")
    return "_".join(["param", *(str(get(key)) for key in numbers)])


def _split(keys: OtherKeys) -> tuple[OtherKeys, OtherKeys]:
    """Return the keys of the variable, and those by which members of a variable may differ."""
    if "perturbationNumber" not in dict(keys):
        return keys, ()
    of_member = []
    for name, value in keys:
        if name in MEMBER and (not MEMBER[name] or value in MEMBER[name]):
            of_member.append((name, value))
    return tuple(pair for pair in keys if pair not in of_member), tuple(of_member)


def _series(
    get: Get,
    name: str,
    keys: tuple[OtherKeys, OtherKeys],
    grid: Grid,
    read: Callable[[int], np.ndarray],
    path: str,
) -> Series:
    """Return the field of a message, with the keys of its variable and of its member."""
    attributes = {"long_name": get("name"), "standard_name": get("cfName")}
    number = get("perturbationNumber")
    step = str(get("stepRange") or "0")
    reference = _time(get("dataDate"), get("dataTime"))
    origin = "analysis" if get("dataType") == "an" else f"start {minutes(reference)} + {step} h"
    return Series(
        key=Key(name, _levels(get), _interval(step, get("stepType")), keys[0]),
        units=str(get("units") or ""),
        grid=grid,
        times=np.array([_time(get("validityDate"), get("validityTime"))]),
        read=read,
        source=path,
        member="" if number is None else str(number),
        member_keys=keys[1],
        versions=(str(get("expver")),) if get("expver") else (),
        origin=origin,
        attributes={key: str(value) for key, value in attributes.items() if value},
    )


def _levels(get: Get) -> tuple[Level, ...]:
    """Return the level of a message; the height of 2 m temperature is part of its parameter."""
    kind = str(get("typeOfLevel") or "")
    value, bottom = _surfaces(get)
    height = re.match(r"\d+", str(get("shortName") or ""))
    is_named = height is not None and value in (0, int(height[0])) and bottom is None
    if is_named and kind in ("surface", "heightAboveGround"):
        return (Level("surface", None, "", "surface"),)
    if kind in ("", "surface", "meanSea", "entireAtmosphere") and value == 0 and bottom is None:
        return (Level(kind or "surface", None, "", kind),)
    if kind in HECTOPASCALS:
        return (Level("pressure", value, f"{value:g}", f"{value:g} hPa"),)
    label = f"{value:g}" if bottom is None else f"{value:g}-{bottom:g}"
    return (Level(LEVELS.get(kind, kind), value, label, f"{kind} {label}", bottom),)


def _surfaces(get: Get) -> tuple[float, float | None]:
    """Return the values of the first and the second surface, in hPa for pressure levels."""
    kind = get("typeOfLevel")
    if get("edition") == 1:
        scale = 0.01 if kind == "isobaricInPa" else 1.0
        top, below = (float(get(key) or 0) for key in ("topLevel", "bottomLevel"))
        return rounded(top * scale), None if below == top else rounded(below)
    scale = HECTOPASCALS.get(kind, 1.0)
    values = []
    for surface in ("First", "Second"):
        factor, scaled = (
            get(f"{part}Of{surface}FixedSurface") for part in ("scaleFactor", "scaledValue")
        )
        value = None
        if scaled not in (None, MISSING):
            value = rounded(scaled / 10.0 ** (0 if factor == MISSING else factor) * scale)
        values.append(value)
    return values[0] or 0.0, values[1]


def _interval(step: str, kind: str | None) -> str:
    """Return length and kind of an accumulation, such as "6h accum" for the steps "0-6".

    Steps are in hours, unless a letter follows them, such as 0-30m.
    """
    first, _, last = step.partition("-")
    if kind in (None, INSTANT) or not last:
        return INSTANT
    unit = last.lstrip("0123456789")
    length = int(last.removesuffix(unit)) - int(first.rstrip("smhD") or 0)
    return f"{length}{unit or 'h'} {kind}"


def _time(date: int, time: int) -> np.datetime64:
    """Return the time of a date 20190331 and a time of day 1800.

    Raises FieldError for a year that NumPy's nanoseconds cannot hold.
    """
    if not 1678 <= date // 10000 <= 2261:
        raise FieldError(f"years must be from 1678 to 2261, got the date {date}")
    day = np.datetime64(f"{date // 10000:04d}-{date // 100 % 100:02d}-{date % 100:02d}", "ns")
    return day + np.timedelta64(time // 100 * 60 + time % 100, "m")


def _grid(eccodes: ModuleType, message: int, path: str) -> Grid:
    """Return the grid of a message, with its rows and columns if all rows are of one size."""
    if _get(eccodes, message, "alternativeRowScanning"):
        # ecCodes lists the points as if all rows had the direction of the first.
        raise FieldError(
            f"{path} must scan all rows in one direction, got alternativeRowScanning=1: convert it "
            "by grib_set -s swapScanningAlternativeRows=1"
        )
    lat, lon = (eccodes.codes_get_array(message, key) for key in ("latitudes", "longitudes"))
    rows, columns = (_get(eccodes, message, key) or 0 for key in ("Nj", "Ni"))
    if rows * columns != len(lat):  # of other grids, one is missing
        return Grid(Nodes(lat, lon), ("node",), (len(lat),))
    if _get(eccodes, message, "jPointsAreConsecutive"):
        rows, columns = columns, rows
    return Grid(Nodes(lat, lon), ("y", "x"), (rows, columns))


def _read(path: str, offset: int, part: int, _: int) -> np.ndarray:
    """Return the values of a field, [N] float32; NaN where they are missing."""
    eccodes = import_extra("eccodes", "era5")
    values = np.empty(0)
    with open(path, "rb") as file:
        # ecCodes keeps fields of a message that it has not returned yet by the address of the file
        # object, which may have been reused since another file was closed.
        eccodes.codes_grib_multi_support_reset_file(file)
        file.seek(offset)
        for _ in range(part + 1):
            message = eccodes.codes_grib_new_from_file(file)
            try:
                # The default, 9999, is also a value, such as of visibility.
                eccodes.codes_set(message, "missingValue", IMPOSSIBLE)
                values = eccodes.codes_get_values(message)
                values[values == IMPOSSIBLE] = np.nan
            finally:
                eccodes.codes_release(message)
    return values.astype(np.float32)


def is_grib(path: str) -> bool:
    """Return whether a file is GRIB, by its first bytes or its suffix."""
    with open(path, "rb") as file:
        return file.read(4) == b"GRIB" or Path(path).suffix.startswith(".gr")
