"""Fields from GRIB files: each message is a field, with the coordinates and scanning of ecCodes."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from anemoi_gt.app.datasets.fields import INSTANT, FieldError, Grid, Key, Level, Series
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

Get = Callable[[str], Any]  # a key of one message, or None; a message is a handle of ecCodes

PRESSURE = {"isobaricInhPa": 1.0, "isobaricInPa": 0.01}  # in hPa
LEVELS = {"hybrid": "model level", "heightAboveGround": "height", "depthBelowSea": "depth"}
ENSEMBLE = ("cf", "pf")  # control and perturbed forecasts
# Grids whose points ecCodes lists row by row, with sizes of rows and columns.
ROWS = {
    "regular_ll": ("Nj", "Ni"),
    "regular_gg": ("Nj", "Ni"),
    "rotated_ll": ("Nj", "Ni"),
    "lambert": ("Ny", "Nx"),
    "polar_stereographic": ("Ny", "Nx"),
    "mercator": ("Nj", "Ni"),
    "lambert_azimuthal_equal_area": ("Ny", "Nx"),
}


def read_grib(path: str) -> tuple[list[Series], dict[str, str]]:
    """Return the fields of a GRIB file, one per message, and why others were left out, by name.

    Raises ImportError if ecCodes is missing, ValueError if the file cannot be read.
    """
    eccodes = import_extra("eccodes", "era5")
    series: list[Series] = []
    left_out: dict[str, str] = {}
    grids: dict[str, Grid] = {}
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
            series.append(_series(get, name, grids[grid_key], read, path))
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


def _parameter(get: Get) -> str:
    """Return the name of a parameter, such as t2m, as the Climate Data Store does in NetCDF."""
    return get("cfVarName") or get("shortName") or f"param{get('paramId')}"


def _series(
    get: Get, name: str, grid: Grid, read: Callable[[int], np.ndarray], path: str
) -> Series:
    """Return the field of a message."""
    attributes = {"long_name": get("name"), "standard_name": get("cfName")}
    is_member = get("dataType") in ENSEMBLE or bool(get("number"))
    step = str(get("stepRange") or "0")
    reference = _time(get("dataDate"), get("dataTime"))
    origin = "analysis" if get("dataType") == "an" else f"start {_text(reference)} + {step} h"
    return Series(
        key=Key(name, _levels(get), _interval(step, get("stepType"))),
        units=str(get("units") or ""),
        grid=grid,
        times=np.array([_time(get("validityDate"), get("validityTime"))]),
        read=read,
        source=path,
        member=str(get("number")) if is_member and get("number") is not None else "",
        version=str(get("expver") or ""),
        origin=origin,
        attributes={key: str(value) for key, value in attributes.items() if value},
    )


def _levels(get: Get) -> tuple[Level, ...]:
    """Return the level of a message; the height of 2 m temperature is part of its parameter."""
    kind = str(get("typeOfLevel") or "")
    if str(get("shortName") or "")[:1].isdigit() and kind in ("surface", "heightAboveGround"):
        kind = "surface"
    value = float(get("level") or 0)
    if kind in PRESSURE:
        hectopascals = value * PRESSURE[kind]
        units = kind.removeprefix("isobaricIn")
        return (Level("pressure", hectopascals, f"{value:g}", f"{value:g} {units}"),)
    if kind in ("", "surface", "meanSea", "entireAtmosphere"):
        return (Level(kind or "surface", None, "", kind),)
    return (Level(LEVELS.get(kind, kind), value, f"{value:g}", f"{kind} {value:g}"),)


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
    """Return the time of a date 20190331 and a time of day 1800."""
    day = np.datetime64(f"{date // 10000:04d}-{date // 100 % 100:02d}-{date % 100:02d}", "ns")
    return day + np.timedelta64(time // 100 * 60 + time % 100, "m")


def _text(time: np.datetime64) -> str:
    return np.datetime_as_string(time, unit="m").replace("T", " ")


def _grid(eccodes: ModuleType, message: int, path: str) -> Grid:
    """Return the grid of a message, with its rows and columns if all rows are of one size."""
    if _get(eccodes, message, "alternativeRowScanning"):
        # ecCodes lists the points as if all rows had the direction of the first.
        raise FieldError(
            f"{path} must scan all rows in one direction, got alternativeRowScanning=1: convert it "
            "by grib_set -s swapScanningAlternativeRows=1"
        )
    lat, lon = (eccodes.codes_get_array(message, key) for key in ("latitudes", "longitudes"))
    kind = eccodes.codes_get(message, "gridType")
    shape: tuple[int, ...] = (len(lat),)
    if kind in ROWS:
        shape = tuple(_get(eccodes, message, key) or 0 for key in ROWS[kind])
        if _get(eccodes, message, "jPointsAreConsecutive"):
            shape = shape[::-1]
    nodes = Nodes(lat, lon)
    if np.prod(shape) != len(lat):
        shape = (len(lat),)
    dims = ("node",) if len(shape) == 1 else ("y", "x")
    return Grid(nodes, dims, shape)


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
                values = eccodes.codes_get_values(message)
                if eccodes.codes_get(message, "bitmapPresent"):
                    missing = eccodes.codes_get(message, "missingValue", float)
                    values[values == missing] = np.nan
            finally:
                eccodes.codes_release(message)
    return values.astype(np.float32)


def is_grib(path: str) -> bool:
    """Return whether a file is GRIB, by its first bytes or its suffix."""
    with open(path, "rb") as file:
        return file.read(4) == b"GRIB" or Path(path).suffix.startswith(".gr")
