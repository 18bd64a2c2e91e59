"""Fields from files: NetCDF, zarr and GRIB by xarray, and zarrs of anemoi-datasets.

Files are opened once, and each field is read when it is needed.
"""

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from glob import glob
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

if TYPE_CHECKING:
    import xarray

# names of the dimension of an ensemble
MEMBERS = (
    "number",
    "member",
    "ensemble_member",
    "realization",
)
# attributes of a variable that a forecast file gets
PASSED_ON = (
    "long_name",
    "standard_name",
    "GRIB_cfName",
)
UNITS = {
    "latitude": ("degrees_north", "degree_north"),
    "longitude": ("degrees_east", "degree_east"),
}


@dataclass(frozen=True, eq=False)
class Fields:
    """Fields of several variables on one set of N nodes, by time and ensemble member.

    Parameters
    ----------
    times : np.ndarray
        [T] datetime64, ascending; [0] if no variable depends on time.
    units, attributes, levels
        By variable: its units, CF attributes such as `standard_name`, and its level, such as "500
        hPa", if it has one.
    readers : dict of str to callable
        By variable. A reader takes the index of a state, `member * T + time`, and returns values
        [N] float32.
    static : frozenset of str
        The variables without time, such as orography, whose readers ignore the index.
    members : int
        Number of ensemble members; each has T states.
    source : str
        The files, for messages.
    """

    nodes: Nodes
    times: np.ndarray
    units: dict[str, str]
    readers: dict[str, Callable[[int], np.ndarray]]
    static: frozenset[str] = frozenset()
    members: int = 1
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    levels: dict[str, str] = field(default_factory=dict)
    source: str = "the data"

    def with_static(self, names: Iterable[str]) -> "Fields":
        """Return the same fields with variables that do not change taken as those without time."""
        first = {name: _always_first(self.readers[name]) for name in names}
        return replace(self, readers=self.readers | first, static=self.static | frozenset(first))


def _always_first(reader: Callable[[int], np.ndarray]) -> Callable[[int], np.ndarray]:
    first = lru_cache(1)(partial(reader, 0))
    return lambda _: first()


def read_xarray(path: str | Path | Sequence[str]) -> Fields:
    """Return the fields of NetCDF, zarr or GRIB files on one grid, regular, reduced or irregular.

    `path` is a file, the folder of a zarr, a pattern such as `data/*.nc`, or a list of these. Grid
    and times come from the coordinates. A variable with levels is one variable per level, such as
    `t_850`. Files with the same variables follow each other in time; those with others are joined
    at the same times.

    Raises FileNotFoundError if there is no such file; ImportError if xarray or the reader of a
    format is missing; ValueError if a file cannot be read, lacks coordinates, or does not fit the
    others.
    """
    patterns = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    files = [file for pattern in patterns for file in _find(str(pattern))]
    parts = [read_dataset(part, file) for file in files for part in _open(file)]
    if not parts:
        raise ValueError(f"files must hold fields, found none in {', '.join(files)}")
    nodes = parts[0].nodes
    if not all(
        len(p.nodes) == len(nodes) and np.allclose(p.nodes.radians, nodes.radians, atol=1e-6)
        for p in parts
    ):
        raise ValueError(
            "files must be on one grid, got grids of "
            f"{', '.join(str(len(p.nodes)) for p in parts)} nodes"
        )
    by_names: dict[frozenset, list[Fields]] = {}
    for fields in parts:
        by_names.setdefault(frozenset(fields.readers), []).append(fields)
    return _join([_concatenate(same) for same in by_names.values()])


def read_dataset(source: "xarray.Dataset", name: str = "the data set") -> Fields:
    """Return the fields of an xarray data set.

    Each member along a dimension such as `number` is a separate state. Every other dimension
    besides grid and time makes variables, one per level. Raises ValueError, with its `name`, if it
    lacks coordinates, holds a time twice, or has another calendar.
    """
    lat, lon = (_coordinate(source, axis, name) for axis in UNITS)
    lat, lon = import_extra("xarray", "xarray").broadcast(lat, lon)
    nodes = Nodes(lat.values.ravel(), lon.values.ravel())
    time = _time_axis(source, name)
    times = np.empty(0, "datetime64[ns]") if time is None else time.values
    order = np.argsort(times, kind="stable")
    times = times[order]
    if (np.diff(times) <= np.timedelta64(0)).any():
        twice = np.datetime_as_string(times[1:][np.diff(times) <= np.timedelta64(0)][0], unit="m")
        raise ValueError(
            f"{name} must hold each time once, got {twice} twice: keep one, as by "
            "drop_duplicates('time')"
        )
    member = next((dim for dim in source.dims if str(dim).lower() in MEMBERS), None)
    units: dict[str, str] = {}
    attributes: dict[str, dict[str, str]] = {}
    levels: dict[str, str] = {}
    readers: dict[str, Callable[[int], np.ndarray]] = {}
    static: set[str] = set()
    for key, array in source.data_vars.items():
        if not set(lat.dims) <= set(array.dims) or array.dtype.kind not in "fiu":
            continue
        over = time.dims[0] if time is not None and time.dims[0] in array.dims else None
        axes = _Axes(lat.dims, over, member if member in array.dims else None)
        for variable, level, one in _levels(str(key), array, axes.names()):
            units[variable] = str(array.attrs.get("units", array.attrs.get("GRIB_units", "")))
            attributes[variable] = {k: str(array.attrs[k]) for k in PASSED_ON if k in array.attrs}
            if level:
                levels[variable] = level
            readers[variable] = partial(_values, one, axes, order)
            if over is None:
                static.add(variable)
    members = 1 if member is None else source.sizes[member]
    return Fields(
        nodes, times, units, readers, frozenset(static), members, attributes, levels, name
    )


class _Axes(NamedTuple):
    """The dimensions of a variable without levels: grid, time and ensemble members, or None."""

    grid: tuple
    time: str | None
    member: str | None

    def names(self) -> set:
        return {*self.grid, self.time, self.member} - {None}


def _time_axis(source: "xarray.Dataset", name: str) -> "xarray.DataArray | None":
    """Return the time coordinate, or None; raise ValueError for a non-standard calendar."""
    for array in source.coords.values():
        calendar = (
            getattr(array.values.flat[0], "calendar", None)
            if array.dtype.kind == "O" and array.size
            else None
        )
        if calendar is not None:
            raise ValueError(
                f"{name} must have dates in the standard calendar, got {calendar}: convert it in "
                "xarray by "
                "convert_calendar('standard')"
            )
    axes = [c for c in source.coords.values() if c.ndim == 1 and c.dtype.kind == "M"]
    return next((c for c in axes if c.name == c.dims[0]), axes[0] if axes else None)


def read_anemoi(path: str | Path) -> Fields:
    """Return the fields of an anemoi-datasets zarr, without missing dates and of member 0 only.

    Raises FileNotFoundError if there is no such folder; ImportError if zarr is missing; ValueError
    if it is another.
    """
    zarr = import_extra("zarr", "xarray")
    (path,) = _find(str(path))
    try:
        store = zarr.open(path, mode="r")
        data, variables = store["data"], list(store.attrs["variables"])
        lat, lon, times = (
            np.asarray(store[key][:]) for key in ("latitudes", "longitudes", "dates")
        )
    except Exception as error:  # the type depends on the zarr version
        raise _unreadable(path, "a zarr of anemoi-datasets", error) from error
    times = times.astype("datetime64[s]")
    present = np.flatnonzero(
        ~np.isin(times, np.array(store.attrs.get("missing_dates", []), "datetime64[s]"))
    )
    # all variables are one chunk
    state = lru_cache(1)(lambda t: np.asarray(data[int(present[t])])[:, 0])
    readers: dict[str, Callable[[int], np.ndarray]] = {}
    for v, variable in enumerate(variables):
        readers[variable] = partial(lambda v, t: state(t)[v], v)
    return Fields(
        Nodes(lat, lon), times[present], dict.fromkeys(variables, ""), readers, source=path
    )


READERS: dict[str, Callable[[Any], Fields]] = {"xarray": read_xarray, "anemoi": read_anemoi}


def _find(pattern: str) -> list[str]:
    files = sorted(glob(pattern)) or [pattern]
    if "://" not in pattern and not Path(files[0]).exists():
        raise FileNotFoundError(f"no file {pattern}: give the data as data.path=FILE")
    return files


def _open(file: str) -> list["xarray.Dataset"]:
    """Open a file; a GRIB file may hold several grids of levels, each a data set."""
    xarray = import_extra("xarray", "xarray")
    try:
        if "://" in file or Path(file).is_dir():
            import_extra("zarr", "xarray")
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "Failed to open Zarr store with consolidated", RuntimeWarning
                )
                opened = xarray.open_dataset(file, engine="zarr")
            # Without consolidated metadata zarr 3 lists arrays in another order in every process.
            return [opened[sorted(opened.data_vars, key=str)]]
        with open(file, "rb") as head:
            is_grib = head.read(4) == b"GRIB" or Path(file).suffix.startswith(".gr")
        if is_grib:  # no index file: the folder may be read-only
            parts = import_cfgrib().open_datasets(
                file, backend_kwargs={"indexpath": "", "errors": "raise"}
            )
            return [
                part.drop_vars([key for key, c in part.coords.items() if c.ndim == 0])
                for part in parts
            ]
        return [xarray.open_dataset(file, engine="netcdf4")]
    except ImportError:
        raise
    except Exception as error:  # each format has its own
        raise _unreadable(file, "a NetCDF, zarr or GRIB file", error) from error


def import_cfgrib() -> ModuleType:
    """Import cfgrib, after pyproj if cartopy is installed: the other order crashes with wheels."""
    with suppress(ImportError):
        import_module("pyproj")
    return import_extra("cfgrib", "era5")


def _unreadable(file: str, kind: str, error: Exception) -> ValueError:
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return ValueError(f"{file} must be {kind}, and cannot be read: {why}")


def _coordinate(source: "xarray.Dataset", axis: str, name: str) -> "xarray.DataArray":
    """Return the latitudes or longitudes of a data set, by CF attributes or by name."""
    for key, array in source.variables.items():
        by_name = str(key).lower() in (axis, axis[:3])
        if (
            by_name
            or array.attrs.get("standard_name") == axis
            or array.attrs.get("units") in UNITS[axis]
        ):
            return source[key]
    variables = ", ".join(map(str, source.variables))
    raise ValueError(
        f"{name} must have the coordinates latitude and longitude, got "
        f"{variables or 'no variables'}"
    )


def _levels(
    name: str, array: "xarray.DataArray", dims: set, level: str = ""
) -> Iterator[tuple[str, str, "xarray.DataArray"]]:
    """Yield names, levels and arrays of a variable's levels, the variable itself if it has none."""
    other = next((dim for dim in array.dims if dim not in dims), None)
    if other is None:
        yield name, level, array
        return
    units = str(array[other].attrs.get("units", ""))
    for index, value in enumerate(array[other].values):
        label = _label(value, index)
        one_level = f"{level} {other} {label} {units}".strip()
        one_name = name if array.sizes[other] == 1 else f"{name}_{label}"
        yield from _levels(one_name, array.isel({other: index}), dims, one_level)


def _label(value: Any, index: int) -> str:
    """Return a coordinate as a part of a name: a number, a duration in hours, else its index."""
    if isinstance(value, np.timedelta64):  # NumPy counts it among the integers
        return f"{value / np.timedelta64(1, 'h'):g}h"
    return f"{value:g}" if isinstance(value, np.number) else str(index)


def _values(array: "xarray.DataArray", axes: _Axes, order: np.ndarray, index: int) -> np.ndarray:
    """Return the values of a state, `member * T + time`, [N] float32."""
    selected = {}
    if axes.time is not None:
        selected[axes.time] = int(order[index % len(order)])
    if axes.member is not None:
        selected[axes.member] = index // len(order)
    return array.isel(selected).transpose(*axes.grid).values.reshape(-1).astype(np.float32)


def _concatenate(parts: list[Fields]) -> Fields:
    """Join files of the same variables in time."""
    parts = sorted(parts, key=lambda part: part.times[:1].tolist())
    first, *others = parts
    if not others or not len(first.times):  # static fields are the same in every file
        return first
    for one, next_one in pairwise(parts):
        if one.times[-1] >= next_one.times[0]:
            begin, end = np.datetime_as_string([next_one.times[0], one.times[-1]], unit="m")
            raise ValueError(
                f"files with the same variables must not overlap in time, {next_one.source} "
                f"begins at {begin} and "
                f"{one.source} ends at {end}"
            )
    if len({part.members for part in parts}) > 1:
        counts = ", ".join(f"{part.members} in {part.source}" for part in parts)
        raise ValueError(
            f"files with the same variables must have the same number of members, got {counts}"
        )
    times = np.concatenate([part.times for part in parts])
    begins = np.cumsum([0, *(len(part.times) for part in parts)]).tolist()

    def read(variable: str, index: int) -> np.ndarray:
        member, time = divmod(index, len(times))
        part = bisect_right(begins, time) - 1
        return parts[part].readers[variable](member * len(parts[part].times) + time - begins[part])

    readers = {
        variable: partial(read, variable)
        for variable in first.readers
        if variable not in first.static
    }
    source = f"{first.source} to {parts[-1].source}"
    return replace(first, times=times, readers=first.readers | readers, source=source)


def _join(parts: list[Fields]) -> Fields:
    """Join files of different variables at the same times."""
    dated = [part for part in parts if len(part.times)]
    if not dated:
        raise ValueError(
            "files must have a time coordinate of dates in the standard calendar, found none"
        )
    first = dated[0]
    if not all(np.array_equal(part.times, first.times) for part in dated):
        counts = ", ".join(str(len(part.times)) for part in dated)
        raise ValueError(
            f"files with different variables must have the same times, got {counts} times"
        )
    if len({part.members for part in dated}) > 1:
        counts = ", ".join(f"{part.members} in {part.source}" for part in dated)
        raise ValueError(
            f"files with different variables must have the same number of members, got {counts}"
        )
    joined: dict[str, Any] = {"units": {}, "readers": {}, "attributes": {}, "levels": {}}
    for part in parts:
        for name, values in joined.items():
            values |= getattr(part, name)
    static = frozenset().union(*(part.static for part in parts))
    source = ", ".join(part.source for part in parts)
    return replace(first, nodes=parts[0].nodes, static=static, source=source, **joined)
