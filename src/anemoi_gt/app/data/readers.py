"""Fields from files: NetCDF, zarr and GRIB by xarray, and zarrs of anemoi-datasets.

Files are opened once, and each field is read when it is needed.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from glob import glob
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

if TYPE_CHECKING:
    import xarray

UNITS = {"latitude": ("degrees_north", "degree_north"), "longitude": ("degrees_east", "degree_east")}


@dataclass(frozen=True, eq=False)
class Fields:
    """Fields of several variables on one set of N nodes, by time.

    `times` [T] datetime64 are ascending, [0] if no variable depends on time. `units` and `readers` are by variable; a
    reader takes the index of a time and returns values [N] float32. `static` are the variables without time, such as
    orography, whose readers ignore the index.
    """

    nodes: Nodes
    times: np.ndarray
    units: dict[str, str]
    readers: dict[str, Callable[[int], np.ndarray]]
    static: frozenset[str] = frozenset()


def read_xarray(path: str | Path | Sequence[str]) -> Fields:
    """Return the fields of NetCDF, zarr or GRIB files on one grid, regular, reduced or irregular.

    `path` is a file, the folder of a zarr, a pattern such as `data/*.nc`, or a list of these. Grid and times are those
    of the coordinates. A variable with levels is one variable per level, such as `t_850`. Files with the same variables
    follow each other in time; those with others are joined at the same times.

    Raises FileNotFoundError if there is no such file; ImportError if xarray or the reader of a format is missing;
    ValueError if a file cannot be read, lacks coordinates, or does not fit the others.
    """
    patterns = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    files = [file for pattern in patterns for file in _find(str(pattern))]
    parts = [read_dataset(part, file) for file in files for part in _open(file)]
    if not parts:
        raise ValueError(f"files must hold fields, found none in {', '.join(files)}")
    nodes = parts[0].nodes
    if not all(len(p.nodes) == len(nodes) and np.allclose(p.nodes.radians, nodes.radians, atol=1e-6) for p in parts):
        raise ValueError(f"files must be on one grid, got grids of {', '.join(str(len(p.nodes)) for p in parts)} nodes")
    by_names: dict[frozenset, list[Fields]] = {}
    for fields in parts:
        by_names.setdefault(frozenset(fields.readers), []).append(fields)
    return _join([_concatenate(same) for same in by_names.values()])


def read_dataset(source: "xarray.Dataset", name: str = "the data set") -> Fields:
    """Return the fields of an xarray data set; raise a ValueError, with its `name`, if it lacks coordinates."""
    lat, lon = (_coordinate(source, axis, name) for axis in UNITS)
    lat, lon = import_extra("xarray", "xarray").broadcast(lat, lon)
    nodes = Nodes(lat.values.ravel(), lon.values.ravel())
    axes = [c for c in source.coords.values() if c.ndim == 1 and c.dtype.kind == "M"]
    time = next((c for c in axes if c.name == c.dims[0]), axes[0] if axes else None)
    times = np.empty(0, "datetime64[ns]") if time is None else time.values
    order = np.argsort(times, kind="stable")
    units, readers, static = {}, {}, set()
    for key, array in source.data_vars.items():
        if not set(lat.dims) <= set(array.dims) or array.dtype.kind not in "fiu":
            continue
        over_time = time is not None and time.dims[0] in array.dims
        for variable, field in _levels(str(key), array, {*lat.dims, *(time.dims if over_time else ())}):
            units[variable] = str(array.attrs.get("units", array.attrs.get("GRIB_units", "")))
            readers[variable] = partial(_values, field, lat.dims, time.dims[0] if over_time else None, order)
            static |= set() if over_time else {variable}
    return Fields(nodes, times[order], units, readers, frozenset(static))


def read_anemoi(path: str | Path) -> Fields:
    """Return the fields of a zarr that anemoi-datasets wrote, without its missing dates; of an ensemble, member 0.

    Raises FileNotFoundError if there is no such folder; ImportError if zarr is missing; ValueError if it is another.
    """
    zarr = import_extra("zarr", "xarray")
    (path,) = _find(str(path))
    try:
        store = zarr.open(path, mode="r")
        data, variables = store["data"], list(store.attrs["variables"])
        lat, lon, times = (np.asarray(store[key][:]) for key in ("latitudes", "longitudes", "dates"))
    except Exception as error:  # of any type: zarr has versions
        raise _unreadable(path, "a zarr of anemoi-datasets", error) from error
    times = times.astype("datetime64[s]")
    there = np.flatnonzero(~np.isin(times, np.array(store.attrs.get("missing_dates", []), "datetime64[s]")))
    state = lru_cache(1)(lambda t: np.asarray(data[int(there[t])])[:, 0])  # all variables are one chunk
    readers = {variable: partial(lambda v, t: state(t)[v], v) for v, variable in enumerate(variables)}
    return Fields(Nodes(lat, lon), times[there], dict.fromkeys(variables, ""), readers)


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
            return [xarray.open_dataset(file, engine="zarr")]
        with open(file, "rb") as head:
            is_grib = head.read(4) == b"GRIB" or Path(file).suffix.startswith(".gr")
        if is_grib:  # no index file: the folder may be read-only
            parts = import_cfgrib().open_datasets(file, backend_kwargs={"indexpath": "", "errors": "raise"})
            return [part.drop_vars([key for key, c in part.coords.items() if c.ndim == 0]) for part in parts]
        return [xarray.open_dataset(file, engine="netcdf4")]
    except ImportError:
        raise
    except Exception as error:  # each format has its own
        raise _unreadable(file, "a NetCDF, zarr or GRIB file", error) from error


def import_cfgrib() -> ModuleType:
    """Import cfgrib, after pyproj if cartopy brought it: with wheels of both, the other order crashes the process."""
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
        if by_name or array.attrs.get("standard_name") == axis or array.attrs.get("units") in UNITS[axis]:
            return source[key]
    found = ", ".join(map(str, source.variables))
    raise ValueError(f"{name} must have the coordinates latitude and longitude, got {found or 'no variables'}")


def _levels(name: str, array: "xarray.DataArray", dims: set[str]):
    """Yield the names and arrays of a variable's levels, the variable itself if it has none."""
    if (other := next((dim for dim in array.dims if dim not in dims), None)) is None:
        yield name, array
        return
    for index, value in enumerate(array[other].values):
        label = f"{value:g}" if np.issubdtype(array[other].dtype, np.number) else str(index)
        yield from _levels(name if array.sizes[other] == 1 else f"{name}_{label}", array.isel({other: index}), dims)


def _values(array, dims, time, order, t):
    field = array if time is None else array.isel({time: int(order[t])})
    return field.transpose(*dims).values.reshape(-1).astype(np.float32)


def _concatenate(parts: list[Fields]) -> Fields:
    """Join files of the same variables in time."""
    first, *others = parts = sorted(parts, key=lambda part: part.times[:1].tolist())
    if not others or not len(first.times):  # static fields are the same in every file
        return first
    times = np.concatenate([part.times for part in parts])
    if (np.diff(times) <= np.timedelta64(0)).any():
        raise ValueError("files with the same variables must not overlap in time, got some times twice")
    begins = np.cumsum([0, *(len(part.times) for part in parts)]).tolist()

    def read(variable: str, t: int) -> np.ndarray:
        p = bisect_right(begins, t) - 1
        return parts[p].readers[variable](t - begins[p])

    readers = {variable: partial(read, variable) for variable in first.readers if variable not in first.static}
    return Fields(first.nodes, times, first.units, first.readers | readers, first.static)


def _join(parts: list[Fields]) -> Fields:
    """Join files of different variables at the same times."""
    if (times := next((part.times for part in parts if len(part.times)), None)) is None:
        raise ValueError("files must have a time coordinate of dates in the standard calendar, found none")
    if not all(np.array_equal(part.times, times) for part in parts if len(part.times)):
        counts = ", ".join(str(len(part.times)) for part in parts)
        raise ValueError(f"files with different variables must have the same times, got {counts} times")
    units = {name: unit for part in parts for name, unit in part.units.items()}
    readers = {name: read for part in parts for name, read in part.readers.items()}
    return Fields(parts[0].nodes, times, units, readers, frozenset().union(*(part.static for part in parts)))
