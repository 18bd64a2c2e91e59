"""Fields from files: NetCDF, zarr and GRIB through xarray, and zarrs of anemoi-datasets.

Files are opened once, and fields are read when they are needed.
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

# possible names of an ensemble dimension
MEMBERS = ("number", "member", "ensemble_member", "realization")
# attributes of a variable that are copied to forecast files
COPIED_ATTRIBUTES = ("long_name", "standard_name", "GRIB_cfName")
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
        Units of each variable, CF attributes such as `standard_name`, and the level, such as "500
        hPa", if there is one.
    readers : dict of str to callable
        A function per variable, from the index of a state, `member * T + time`, to values [N]
        float32.
    static : frozenset of str
        Variables without time, such as orography, whose readers ignore the index.
    members : int
        Number of ensemble members; each has T states.
    source : str
        Name of the files, for messages.
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
        """Return the same fields, in which variables that do not change are marked as static."""
        first = {name: _always_first(self.readers[name]) for name in names}
        return replace(self, readers=self.readers | first, static=self.static | frozenset(first))


def _always_first(reader: Callable[[int], np.ndarray]) -> Callable[[int], np.ndarray]:
    """Return a reader that returns the first state for any index."""
    first = lru_cache(1)(partial(reader, 0))
    return lambda _: first()


def read_xarray(path: str | Path | Sequence[str]) -> Fields:
    """Open NetCDF, zarr or GRIB files on one grid, which may be regular, reduced or irregular.

    `path` is a file, the folder of a zarr, a pattern such as `data/*.nc`, or a list of these. Grid
    and times come from the coordinates. A variable with levels becomes one variable per level, such
    as `t_850`. Files with the same variables are concatenated in time; files with different
    variables are merged, and must have the same times.

    Raises FileNotFoundError if there is no such file; ImportError if xarray or the reader of a
    format is missing; ValueError if a file cannot be read, lacks coordinates, or does not fit the
    others.
    """
    patterns = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    files: list[str] = []
    for pattern in patterns:
        files += _find(str(pattern))
    parts: list[Fields] = []
    for file in files:
        parts += [read_dataset(opened, file) for opened in _open(file)]
    if not parts:
        raise ValueError(f"files must hold fields, found none in {', '.join(files)}")
    if not all(_is_same_grid(part.nodes, parts[0].nodes) for part in parts):
        sizes = ", ".join(str(len(part.nodes)) for part in parts)
        raise ValueError(f"files must be on one grid, got grids of {sizes} nodes")
    by_names: dict[frozenset, list[Fields]] = {}
    for part in parts:
        by_names.setdefault(frozenset(part.readers), []).append(part)
    return _join([_concatenate(same) for same in by_names.values()])


def _is_same_grid(nodes: Nodes, other: Nodes) -> bool:
    return len(nodes) == len(other) and np.allclose(nodes.radians, other.radians, atol=1e-6)


def read_dataset(source: "xarray.Dataset", name: str = "the data set") -> Fields:
    """Return the fields of an xarray data set.

    Each member along a dimension such as `number` is a separate state. Any other dimension apart
    from grid and time is split into variables, one per level. Raises ValueError, with the `name` of
    the data set, if it lacks coordinates, has a time twice, or has a non-standard calendar.
    """
    lat, lon = (_coordinate(source, axis, name) for axis in UNITS)
    lat, lon = import_extra("xarray", "xarray").broadcast(lat, lon)
    nodes = Nodes(lat.values.ravel(), lon.values.ravel())
    time = _time_axis(source, name)
    times = np.empty(0, "datetime64[ns]") if time is None else time.values
    order = np.argsort(times, kind="stable")
    times = times[order]
    is_duplicate = np.diff(times) <= np.timedelta64(0)
    if is_duplicate.any():
        duplicate = np.datetime_as_string(times[1:][is_duplicate][0], unit="m")
        raise ValueError(
            f"{name} must hold each time once, got {duplicate} twice: keep one, as by "
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
        time_dim = None
        if time is not None and time.dims[0] in array.dims:
            time_dim = time.dims[0]
        member_dim = member if member in array.dims else None
        axes = _Axes(lat.dims, time_dim, member_dim)
        for variable, level, values in _levels(str(key), array, axes.names()):
            attrs = array.attrs
            units[variable] = str(attrs.get("units", attrs.get("GRIB_units", "")))
            attributes[variable] = {k: str(attrs[k]) for k in COPIED_ATTRIBUTES if k in attrs}
            if level:
                levels[variable] = level
            readers[variable] = partial(_values, values, axes, order)
            if time_dim is None:
                static.add(variable)
    members = 1 if member is None else source.sizes[member]
    return Fields(
        nodes, times, units, readers, frozenset(static), members, attributes, levels, name
    )


class _Axes(NamedTuple):
    """The dimensions of a variable without levels: grid, and time and members or None."""

    grid: tuple
    time: str | None
    member: str | None

    def names(self) -> set:
        return {*self.grid, self.time, self.member} - {None}


def _time_axis(source: "xarray.Dataset", name: str) -> "xarray.DataArray | None":
    """Return the time coordinate, or None; raise ValueError for a non-standard calendar."""
    for array in source.coords.values():
        calendar = None
        if array.dtype.kind == "O" and array.size > 0:
            calendar = getattr(array.values.flat[0], "calendar", None)
        if calendar is not None:
            raise ValueError(
                f"{name} must have dates in the standard calendar, got {calendar}: convert it in "
                "xarray by convert_calendar('standard')"
            )
    axes = [c for c in source.coords.values() if c.ndim == 1 and c.dtype.kind == "M"]
    for axis in axes:
        if axis.name == axis.dims[0]:
            return axis
    return axes[0] if axes else None


def read_anemoi(path: str | Path) -> Fields:
    """Open a zarr of anemoi-datasets; missing dates and all members but the first are left out.

    Raises FileNotFoundError if there is no such folder; ImportError if zarr is missing; ValueError
    if it is not a zarr of anemoi-datasets.
    """
    zarr = import_extra("zarr", "xarray")
    (path,) = _find(str(path))
    try:
        store = zarr.open(path, mode="r")
        data = store["data"]
        variables = list(store.attrs["variables"])
        lat, lon, times = (
            np.asarray(store[key][:]) for key in ("latitudes", "longitudes", "dates")
        )
    except Exception as error:  # the type depends on the zarr version
        raise _unreadable(path, "a zarr of anemoi-datasets", error) from error
    times = times.astype("datetime64[s]")
    missing = np.array(store.attrs.get("missing_dates", []), "datetime64[s]")
    available = np.flatnonzero(~np.isin(times, missing))

    @lru_cache(1)  # one chunk holds all variables of a date
    def read_state(t: int) -> np.ndarray:
        return np.asarray(data[int(available[t])])[:, 0]

    def read(v: int, t: int) -> np.ndarray:
        return read_state(t)[v]

    readers: dict[str, Callable[[int], np.ndarray]] = {}
    for v, variable in enumerate(variables):
        readers[variable] = partial(read, v)
    units = dict.fromkeys(variables, "")
    return Fields(Nodes(lat, lon), times[available], units, readers, source=path)


READERS: dict[str, Callable[[Any], Fields]] = {"xarray": read_xarray, "anemoi": read_anemoi}


def _find(pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted; raise FileNotFoundError if there is none."""
    files = sorted(glob(pattern)) or [pattern]
    if "://" not in pattern and not Path(files[0]).exists():
        raise FileNotFoundError(f"no file {pattern}: give the data as data.path=FILE")
    return files


def _open(file: str) -> list["xarray.Dataset"]:
    """Open a file. A GRIB file may have several sets of levels, each of which is a data set."""
    xarray = import_extra("xarray", "xarray")
    try:
        if "://" in file or Path(file).is_dir():
            import_extra("zarr", "xarray")
            message = "Failed to open Zarr store with consolidated"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message, RuntimeWarning)
                opened = xarray.open_dataset(file, engine="zarr")
            # Without consolidated metadata, zarr 3 lists arrays in random order.
            return [opened[sorted(opened.data_vars, key=str)]]
        with open(file, "rb") as head:
            is_grib = head.read(4) == b"GRIB" or Path(file).suffix.startswith(".gr")
        if is_grib:
            # without an index file, because the folder may be read-only
            options = {"indexpath": "", "errors": "raise"}
            datasets = []
            for opened in import_cfgrib().open_datasets(file, backend_kwargs=options):
                scalars = [key for key, c in opened.coords.items() if c.ndim == 0]
                datasets.append(opened.drop_vars(scalars))
            return datasets
        return [xarray.open_dataset(file, engine="netcdf4")]
    except ImportError:
        raise
    except Exception as error:  # each format raises errors of its own
        raise _unreadable(file, "a NetCDF, zarr or GRIB file", error) from error


def import_cfgrib() -> ModuleType:
    """Import cfgrib, after pyproj if it is installed: with wheels, the other order crashes."""
    with suppress(ImportError):
        import_module("pyproj")
    return import_extra("cfgrib", "era5")


def _unreadable(file: str, kind: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return ValueError(f"{file} must be {kind}, and cannot be read: {reason}")


def _coordinate(source: "xarray.Dataset", axis: str, name: str) -> "xarray.DataArray":
    """Find the latitudes or longitudes of a data set by name or CF attributes."""
    for key, array in source.variables.items():
        has_name = str(key).lower() in (axis, axis[:3])
        has_standard_name = array.attrs.get("standard_name") == axis
        has_units = array.attrs.get("units") in UNITS[axis]
        if has_name or has_standard_name or has_units:
            return source[key]
    variables = ", ".join(map(str, source.variables)) or "no variables"
    raise ValueError(f"{name} must have the coordinates latitude and longitude, got {variables}")


def _levels(
    name: str, array: "xarray.DataArray", dims: set, level: str = ""
) -> Iterator[tuple[str, str, "xarray.DataArray"]]:
    """Yield name, level and array of each level; without levels, of the variable itself.

    Levels are along all dimensions except `dims`.
    """
    level_dims = [dim for dim in array.dims if dim not in dims]
    if not level_dims:
        yield name, level, array
        return
    dim = level_dims[0]
    units = str(array[dim].attrs.get("units", ""))
    for index, value in enumerate(array[dim].values):
        label = _label(value, index)
        level_name = name if array.sizes[dim] == 1 else f"{name}_{label}"
        level_text = f"{level} {dim} {label} {units}".strip()
        yield from _levels(level_name, array.isel({dim: index}), dims, level_text)


def _label(value: Any, index: int) -> str:
    """Return a coordinate as part of a name: a number, a duration in hours, or else its index."""
    if isinstance(value, np.timedelta64):  # which NumPy also treats as an integer
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
    """Concatenate files with the same variables in time."""
    parts = sorted(parts, key=lambda part: part.times[:1].tolist())
    first = parts[0]
    if len(parts) == 1 or len(first.times) == 0:  # static fields are the same in every file
        return first
    for earlier, later in pairwise(parts):
        if earlier.times[-1] >= later.times[0]:
            begin, end = np.datetime_as_string([later.times[0], earlier.times[-1]], unit="m")
            raise ValueError(
                f"files with the same variables must not overlap in time, {later.source} begins at "
                f"{begin} and {earlier.source} ends at {end}"
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
        i = bisect_right(begins, time) - 1
        part = parts[i]
        return part.readers[variable](member * len(part.times) + time - begins[i])

    readers = dict(first.readers)
    for variable in first.readers:
        if variable not in first.static:
            readers[variable] = partial(read, variable)
    source = f"{first.source} to {parts[-1].source}"
    return replace(first, times=times, readers=readers, source=source)


def _join(parts: list[Fields]) -> Fields:
    """Merge files with different variables at the same times."""
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
