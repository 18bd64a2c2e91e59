"""Fields from NetCDF and zarr: xarray opens files, cf-xarray finds the coordinates of each field.

A coordinate is recognised by its attributes (standard name, units; CF conventions, chapter 4), or
by a usual name if it has none. Two arrays are of one variable if their names, `KEYS` and scalar
coordinates without a role are equal, and the intervals that their time bounds tell.
"""

import logging
import re
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from anemoi_gt.app.datasets.fields import (
    INSTANT,
    FieldError,
    Grid,
    Key,
    Level,
    Series,
    minutes,
    rounded,
)
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

if TYPE_CHECKING:
    import xarray

log = logging.getLogger(__name__)

# Roles of coordinates: standard names, and the names of those without attributes.
STANDARD_NAMES = {
    "latitude": "latitude",
    "longitude": "longitude",
    "time": "time",
    "start": "forecast_reference_time",
    "step": "forecast_period",
    "member": "realization",
}
NAMES = {
    "latitude": ("lat", "latitude"),
    "longitude": ("lon", "longitude"),
    "time": ("valid_time", "time"),
    "start": ("forecast_reference_time", "init_time", "reference_time"),
    "step": ("step", "forecast_period", "lead_time", "leadtime", "prediction_timedelta"),
    "member": ("number", "member", "ensemble_member", "realization"),
    "version": ("expver",),
}
LABELS = ("member", "version", "step")  # roles of dimensions that are no levels
POLE = 1e-5  # degrees from a pole, or from the meridians of 90 degrees, that are rounded to it
DEGREES = re.compile("(degrees?|deg)?_?(north|n|east|e|true|(?P<negative>south|s|west|w))?")
RADIANS = ("radian", "radians", "rad")
PRESSURE = {"Pa": 0.01, "hPa": 1.0, "mbar": 1.0, "mb": 1.0, "millibar": 1.0, "millibars": 1.0}
METRES = dict.fromkeys(("", "m", "metre", "metres", "meter", "meters"), 1.0)
METRES |= {"km": 1e3, "cm": 0.01, "ft": 0.3048, "foot": 0.3048, "feet": 0.3048}
VERTICAL = ("surface", "height", "heightAboveGround", "depth", "hybrid", "level", "lev", "plev")
MODEL_LEVEL = ("model_level_number", "hybrid", "model_level")
# attributes of a variable that must be equal at all times; the others are about grid and packing
KEYS = ("standard_name", "cell_methods", "GRIB_stepType", "GRIB_dataType", "GRIB_typeOfLevel")
# Attributes that are copied to forecast files, of a variable and of a coordinate of its grid.
# Others, such as bounds, may name variables that the forecast does not have.
COPIED_ATTRIBUTES = ("long_name", "standard_name", "cell_methods", "GRIB_cfName")
COPIED_OF_COORDINATES = ("long_name", "standard_name", "units", "axis")
TIME_METHOD = re.compile(r"\btime:(?: *\w+:)* *(\w+)")  # in cell_methods
GRID_MAPPING = ("grid_mapping_name", "crs_wkt", "spatial_ref")  # attributes of one


class LeftOutError(Exception):
    """A variable cannot be read as fields, for the reason of the message."""


def read_dataset(
    source: "xarray.Dataset", name: str = "the data set"
) -> tuple[list[Series], dict[str, str]]:
    """Return the fields of an xarray data set, and why variables were left out, by name.

    Raises FieldError, with the `name` of the data set, for coordinates that are ambiguous or have
    unknown units.
    """
    source, roles = _with_roles(source)
    not_fields = _described_variables(source)
    reader = _DatasetReader(source, roles, not_fields, name)
    series: list[Series] = []
    left_out: dict[str, str] = {}
    for key in source.data_vars:
        if key in not_fields:
            continue
        try:
            series += reader.series(str(key), source[key])
        except LeftOutError as reason:
            left_out[str(key)] = str(reason)
    return series, left_out


def _with_roles(source: "xarray.Dataset") -> tuple["xarray.Dataset", dict[Hashable, str]]:
    """Return a data set in which all that have a role are coordinates, and the roles by name."""
    import_extra("cf_xarray", "xarray")  # registers the accessor `cf`
    roles: dict[Hashable, str] = {}
    # cf-xarray looks among coordinates, where not every file has its latitudes
    everything = source.set_coords(list(source.data_vars))
    standard_names = everything.cf.standard_names
    for role, standard_name in STANDARD_NAMES.items():
        roles |= dict.fromkeys(standard_names.get(standard_name, ()), role)
    for role in ("latitude", "longitude"):  # by their units, such as degrees_north
        for key in everything.cf.coordinates.get(role, ()):
            # of a rotated grid, which may have the units of latitudes
            if source[key].attrs.get("standard_name") != f"grid_{role}":
                roles.setdefault(key, role)
    positions = {"latitude", "longitude"} & set(roles.values())
    # a dimension lat may count rows, where attributes tell the latitudes
    named = {role: names for role, names in NAMES.items() if role not in positions}
    for key, variable in source.variables.items():
        if key in roles or "standard_name" in variable.attrs:
            continue
        for role, names in named.items():
            if str(key).lower() in names:
                roles[key] = role
    for dim in source.dims:
        if dim not in source.variables and str(dim).lower() in NAMES["time"]:
            roles[dim] = "time"  # without dates, it must not be taken for levels
    if roles.get("valid_time") == "time" and roles.get("time") == "time":
        roles["time"] = "start"  # of forecasts, as cfgrib names it
    return source.set_coords([key for key in roles if key in source.data_vars]), roles


def _described_variables(source: "xarray.Dataset") -> set[Hashable]:
    """Return the bounds and grid mappings that attributes of other variables name."""
    names: set[Hashable] = set()
    for bounds in source.cf.bounds.values():
        names.update(bounds)
    for variable in source.variables.values():
        described = variable.attrs | variable.encoding
        for attribute in ("bounds", "climatology", "grid_mapping"):
            names.update(str(described.get(attribute, "")).replace(":", " ").split())
    return names


@dataclass
class _DatasetReader:
    """The fields of one data set; grids that several variables share are made once."""

    source: "xarray.Dataset"
    roles: Mapping[Hashable, str]
    described: Collection[Hashable]  # bounds and grid mappings
    name: str
    _grids: dict[tuple, Grid] = field(default_factory=dict)

    @cached_property
    def names_coordinates(self) -> bool:
        """True if variables name their coordinates: xarray attaches scalar ones to all."""
        return any("coordinates" in v.encoding for v in self.source.variables.values())

    def series(self, name: str, array: "xarray.DataArray") -> Iterator[Series]:
        """Yield the fields of a variable. Raises LeftOutError if it has none."""
        if array.dtype.kind not in "fiub":
            raise LeftOutError(f"its values are {array.dtype}, and not numbers")
        grid = self._grid(array)
        attributes = _copied(array, COPIED_ATTRIBUTES)
        units = str(array.attrs.get("units", array.attrs.get("GRIB_units", "")))
        others = tuple((key, str(array.attrs[key])) for key in KEYS if key in array.attrs)
        self._check_constant(array)
        self._log_several_steps(array)
        array, interval = self._at_ends(array)
        valid_range = _valid_range(array)
        for levels, labels, part in self._split(array, grid.dims):
            times, time_dim, origin = self._times(array, part)
            yield Series(
                key=Key(name, levels, interval, others),
                units=units,
                grid=grid,
                times=times,
                read=partial(_read, part, grid.dims, time_dim, valid_range),
                source=self.name,
                member=labels.get("member", ""),
                versions=self._versions(part, labels, time_dim),
                origin=origin,
                attributes=attributes,
            )

    def _check_constant(self, array: "xarray.DataArray") -> None:
        """Raise FieldError if member or level of a field change along its times.

        As scalar coordinates of several files do, if xarray joins them in time.
        """
        time_dims = tuple(self._time_dims(array))
        for key, coordinate in array.coords.items():
            is_level = str(key).startswith((*VERTICAL, "isobaric"))
            is_level |= coordinate.attrs.get("units") in PRESSURE
            if coordinate.dims != time_dims or not (is_level or self.roles.get(key) == "member"):
                continue
            values = list(dict.fromkeys(map(str, coordinate.values.ravel().tolist())))
            if len(values) > 1:
                raise FieldError(
                    f"{array.name} of {self.name} must have one {key} at all times, got "
                    f"{' and '.join(values[:2])}: make it a dimension, or read files of one"
                )

    def _log_several_steps(self, array: "xarray.DataArray") -> None:
        """Warn of sums and means at several steps, whose intervals cfgrib does not keep."""
        kind = array.attrs.get("GRIB_stepType", INSTANT)
        if kind != INSTANT and any(step.size > 1 for step in self._find(array, "step")):
            log.warning(
                "%s of %s is %s at several steps, taken as over equal intervals: if they are since "
                "the start of the forecast, take differences between steps",
                *(array.name, self.name, kind),
            )

    def _find(self, array: "xarray.DataArray", role: str) -> list["xarray.DataArray"]:
        """Return the coordinates of a field that have a role."""
        return [c for key, c in array.coords.items() if self.roles.get(key) == role]

    def _grid(self, array: "xarray.DataArray") -> Grid:
        """Return the grid of a field, from its own latitudes and longitudes."""
        lat, lon = (self._position(array, axis) for axis in ("latitude", "longitude"))
        dims = tuple(str(dim) for dim in array.dims if dim in {*lat.dims, *lon.dims})
        mapping = str(array.attrs.get("grid_mapping", array.encoding.get("grid_mapping", "")))
        key = (lat.name, lon.name, dims, mapping)
        if key not in self._grids:
            self._grids[key] = self._new_grid(
                array, lat, lon, dims, mapping.split(":", maxsplit=1)[0]
            )
        return self._grids[key]

    def _new_grid(
        self,
        array: "xarray.DataArray",
        lat: "xarray.DataArray",
        lon: "xarray.DataArray",
        dims: tuple[str, ...],
        mapping: str,
    ) -> Grid:
        lat, lon = (self._in_degrees(axis) for axis in (lat, lon))
        lat, lon = (
            axis.transpose(*dims).values.ravel()
            for axis in import_extra("xarray", "xarray").broadcast(lat, lon)
        )
        try:
            nodes = Nodes(lat, lon)
        except ValueError as error:
            raise FieldError(f"{self.name}, {array.name}: {error}") from error
        coordinates = {}
        for dim in dims:
            if dim in array.coords and array[dim].dtype.kind in "fiu":
                coordinates[dim] = (array[dim].values, _copied(array[dim], COPIED_OF_COORDINATES))
        described = None
        if mapping in self.source.variables:
            described = (mapping, dict(self.source[mapping].attrs))
        shape = tuple(array.sizes[dim] for dim in dims)
        return Grid(nodes, dims, shape, coordinates, described)

    def _position(self, array: "xarray.DataArray", axis: str) -> "xarray.DataArray":
        """Return the latitudes or longitudes of a field."""
        found = [c for c in self._find(array, axis) if c.ndim > 0]
        if not found:
            raise LeftOutError(f"it has no {axis}s on its dimensions, {_sizes(array)}")
        named = str(array.encoding.get("coordinates", "")).split()
        own = [c for c in found if c.name in named] or [c for c in found if c.name in array.dims]
        found = own or found
        if len(found) > 1:
            names = " and ".join(str(c.name) for c in found)
            raise FieldError(
                f"{array.name} of {self.name} must have one coordinate of {axis}, got {names}: "
                "name the right one in its attribute coordinates, or drop the other"
            )
        (position,) = found
        times = self._time_dims(array)
        moving = [dim for dim in position.dims if dim in times or self.roles.get(dim) == "step"]
        if moving:  # as WRF repeats the positions for each time
            first = position.isel(dict.fromkeys(moving, 0), drop=True)
            if not bool((position == first).all()):
                raise LeftOutError("its grid moves")
            return first
        return position

    def _in_degrees(self, position: "xarray.DataArray") -> "xarray.DataArray":
        """Return latitudes or longitudes in degrees. Raises FieldError for unknown units."""
        units = str(position.attrs.get("units", "")).lower()
        if units in RADIANS:
            degrees = np.rad2deg(position.astype("float64"))
            # pi / 2 in float32 is more than 90 degrees
            return degrees.where(abs(abs(degrees) - 90) > POLE, np.sign(degrees) * 90)
        direction = DEGREES.fullmatch(units)
        if direction is not None:
            return -position if direction["negative"] else position
        raise FieldError(
            f"{position.name} of {self.name} must be in degrees or radians, got {units!r}: correct "
            "its attribute units"
        )

    def _split(
        self, array: "xarray.DataArray", grid_dims: tuple[str, ...]
    ) -> Iterator[tuple[tuple[Level, ...], dict[str, str], "xarray.DataArray"]]:
        """Yield the parts of a field at each position along all dimensions but grid and time.

        With their levels, and their labels by role: "member" and "version".
        """
        time_dims = self._time_dims(array)
        dims = [dim for dim in array.dims if dim not in grid_dims and dim not in time_dims]
        scalar_levels = self._scalar_levels(array)
        scalars = [key for key, coordinate in array.coords.items() if coordinate.ndim == 0]
        array = array.assign_coords({dim: array[dim] for dim in dims})
        for position in product(*(range(array.sizes[dim]) for dim in dims)):
            part = array.isel(dict(zip(dims, position, strict=True)))
            levels = [_level(part[dim]) for dim in dims if self.roles.get(dim) not in LABELS]
            labels = {}
            for key in (*scalars, *dims):
                if key in self.roles:
                    labels[self.roles[key]] = str(part[key].values)
            yield (*scalar_levels, *levels), labels, part

    def _time_dims(self, array: "xarray.DataArray") -> set[Hashable]:
        """Return the dimension of times or starts, if there is one; steps are split."""
        dims = {dim for dim in array.dims if self.roles.get(dim) in ("time", "start")}
        for key, coordinate in array.coords.items():
            is_date = coordinate.dtype.kind == "M" and coordinate.ndim == 1
            if is_date or self.roles.get(key) in ("time", "start"):
                dims |= {dim for dim in coordinate.dims if self.roles.get(dim) != "step"}
        if len(dims) > 1:
            names = " and ".join(map(str, sorted(dims, key=str)))
            raise LeftOutError(f"its times have several dimensions, {names}")
        return dims

    def _scalar_levels(self, array: "xarray.DataArray") -> list[Level]:
        """Return what a field has one value of: its scalar coordinates without a role."""
        levels = []
        named = set(str(array.encoding.get("coordinates", "")).split())
        named |= set(str(self.source.encoding.get("coordinates", "")).split())
        for key, coordinate in array.coords.items():
            if self.names_coordinates and key not in named:
                continue
            is_described = key in self.described or set(GRID_MAPPING) & set(coordinate.attrs)
            if coordinate.ndim > 0 or key in self.roles or is_described:
                continue
            if coordinate.dtype.kind == "M":  # a date, which may differ
                continue
            level = _level(coordinate)
            if level.value == 0 and array.attrs.get("GRIB_typeOfLevel") == str(key):
                level = Level(level.kind, None, "", level.kind)  # cfgrib's 0 for none
            levels.append(level)
        if not levels and array.attrs.get("GRIB_typeOfLevel") == "surface":
            levels.append(Level("surface", None, "", "surface"))
        return levels

    def _times(
        self, array: "xarray.DataArray", part: "xarray.DataArray"
    ) -> tuple[np.ndarray, Hashable | None, str]:
        """Return the valid times of a part, their dimension, and start or step of a forecast.

        `array` is the whole field, whose dimensions tell starts from valid times.
        """
        time = self._valid_time(part)
        (step, *_) = [*self._find(array, "step"), None]
        starts = [dates for dates in self._find(part, "start") if dates.dtype.kind == "M"]
        start = starts[0] if starts else None
        if time is not None and start is None and step is not None:
            # Without a coordinate of starts, `time` is one if the steps do not follow it.
            tells = "standard_name" in time.attrs or len(np.unique(step)) > 1
            follows = set(step.dims) <= set(time.dims) and tells
            if not follows and time.name != "valid_time":
                start = time
                time = None
        origin = ""
        if step is not None:
            (step,) = self._find(part, "step")[:1]
            if step.ndim == 0:
                origin = f"step {_hours(step) / np.timedelta64(1, 'h'):g} h"
        if time is None and start is not None:
            time = start if step is None else start + _hours(step)
        if time is None:
            if any(self.roles.get(dim) in ("time", "start") for dim in part.dims):
                raise LeftOutError(
                    "its times are not dates of the standard calendar, from 1678 to 2261"
                )
            if step is not None and step.ndim > 0:
                raise LeftOutError("its steps have no start")
            return np.empty(0, "datetime64[ns]"), None, origin
        if start is not None and start.ndim == 0:
            origin = f"start {minutes(start.values)}, {origin}".removesuffix(", ")
        time_dim = time.dims[0] if time.ndim else None
        seconds = time.dt.round("s").values  # hours as fractions of days are off by less
        if np.isnat(seconds).any():
            raise FieldError(f"{array.name} of {self.name} must have a date at every time, got NaT")
        return np.atleast_1d(seconds).astype("datetime64[ns]"), time_dim, origin

    def _valid_time(self, part: "xarray.DataArray") -> "xarray.DataArray | None":
        """Return the coordinate of valid times: by its role, or the only one with dates."""
        found = [c for c in self._find(part, "time") if c.dtype.kind == "M"]
        if not found:
            for key, coordinate in part.coords.items():
                if coordinate.dtype.kind == "M" and key not in self.roles:
                    found.append(coordinate)
        found.sort(key=lambda c: (c.name != "valid_time", c.name not in part.dims, c.ndim == 0))
        return found[0] if found else None

    def _versions(
        self, part: "xarray.DataArray", labels: Mapping[str, str], time_dim: Hashable | None
    ) -> tuple[str, ...]:
        """Return the versions of the experiment, of which a part has one or several in time."""
        values = [labels["version"]] if "version" in labels else []
        for coordinate in self._find(part, "version"):
            if coordinate.dims == (time_dim,):
                values = coordinate.values.tolist()
        return tuple(dict.fromkeys(map(str, values)))

    def _at_ends(self, array: "xarray.DataArray") -> tuple["xarray.DataArray", str]:
        """Return a field at the ends of its intervals, and their length and kind, such as "6h sum".

        The intervals are the bounds of its times, unless `cell_methods` tell values of instants.
        """
        found = TIME_METHOD.search(str(array.attrs.get("cell_methods", "")))
        method = found[1] if found else ""
        time = self._valid_time(array)
        if method == "point" or time is None:
            return array, ""
        bounds = self.source.variables.get(time.attrs.get("bounds", time.encoding.get("bounds")))
        if bounds is None or bounds.ndim != time.ndim + 1 or bounds.dtype.kind != "M":
            if method:
                log.info(
                    "%s of %s is a %s over times without bounds: taken as at their ends",
                    *(array.name, self.name, method),
                )
            return array, ""
        begin, end = bounds.values.min(axis=-1), bounds.values.max(axis=-1)
        lengths = np.unique((end - begin) / np.timedelta64(1, "h"))
        if not lengths.any():
            return array, ""
        if not method:
            log.info(
                "%s of %s has time bounds and no cell_methods: taken as at the ends of its "
                "intervals; 'time: point' tells instants",
                *(array.name, self.name),
            )
        ends = array.assign_coords({time.name: (time.dims, end, time.attrs)})
        length = f"{lengths[0]:g}h" if len(lengths) == 1 else "varying"
        return ends, f"{length} {method or 'unknown'}"


def _copied(array: "xarray.DataArray", names: Collection[str]) -> dict[str, str]:
    """Return the attributes of these names that an array has."""
    return {name: str(array.attrs[name]) for name in names if name in array.attrs}


def _sizes(array: "xarray.DataArray") -> str:
    return ", ".join(f"{dim}: {size}" for dim, size in array.sizes.items()) or "none"


def _hours(step: "xarray.DataArray") -> Any:
    """Return forecast steps as durations. Raises LeftOutError for unknown units."""
    if step.dtype.kind == "m":
        return step
    units = str(step.attrs.get("units", ""))
    pandas = import_extra("pandas", "xarray")
    try:
        durations = pandas.to_timedelta(step.values.ravel(), units.removesuffix("s") or units)
    except ValueError:
        raise LeftOutError(f"the units of its {step.name} must be hours, got {units!r}") from None
    return step.copy(data=durations.round("ms").values.reshape(step.shape))


def _level(coordinate: "xarray.DataArray") -> Level:
    """Return the level of a scalar coordinate."""
    value = coordinate.values[()]
    name = str(coordinate.name)
    attrs = coordinate.attrs
    units = str(attrs.get("units", ""))
    if isinstance(value, np.timedelta64):  # which NumPy also treats as an integer
        hours = value / np.timedelta64(1, "h")
        return Level(name, float(hours), f"{hours:g}h", f"{name} {hours:g} h")
    if not isinstance(value, np.number) or np.isnan(value):
        text = value.decode() if isinstance(value, bytes) else str(value)
        return Level(name, text, text, f"{name} {text}")
    label = f"{value:g}"
    if units in PRESSURE:
        hectopascals = rounded(float(value) * PRESSURE[units])
        return Level("pressure", hectopascals, label, f"{label} {units}")
    if name == "surface":
        return Level("surface", None, "", "surface")
    standard_name = str(attrs.get("standard_name", ""))
    text = f"{label} {units}" if units not in ("", "1") else f"{name} {label}"
    kind = ""
    if name in MODEL_LEVEL or standard_name in MODEL_LEVEL:
        kind = "model level"
    elif standard_name in ("height", "depth") or name == "heightAboveGround":
        kind = "depth" if standard_name == "depth" else "height"
        if units in METRES:
            value = value * METRES[units]
        else:  # a kind of its own, so that it is no level of the same number in metres
            kind = f"{kind}_{units}"
    elif standard_name:
        kind = standard_name
    elif name not in VERTICAL:
        kind = name
    return Level(kind, rounded(float(value)), label, text)


def _valid_range(array: "xarray.DataArray") -> tuple[float, float] | None:
    """Return the smallest and largest valid value that attributes tell, unpacked; None if none.

    As in netCDF4, values beyond them are missing; xarray ignores them.
    """
    attrs = array.attrs
    limits = np.array([-np.inf, np.inf])
    scale, offset = (array.encoding.get(key) for key in ("scale_factor", "add_offset"))
    for i, key in enumerate(("valid_min", "valid_max")):
        limit = np.atleast_1d(attrs.get("valid_range", attrs.get(key, ())))
        if limit.dtype.kind not in "fiu" or len(limit) not in (1, 2):
            continue
        limits[i] = limit[i if len(limit) == 2 else 0]
        if limit.dtype.kind in "iu" and (scale, offset) != (None, None):  # of the packed values
            # half a step, because values are unpacked in float32
            step = 1.0 if scale is None else float(scale)
            limits[i] = limits[i] * step + float(offset or 0.0) + (i - 0.5) * abs(step)
    low, high = sorted(limits)  # a negative scale turns them round
    if np.isinf([low, high]).all():
        return None
    log.info("values of %s beyond its valid range, %g to %g, are missing", array.name, low, high)
    return low, high


def _read(
    part: "xarray.DataArray",
    grid_dims: tuple[str, ...],
    time_dim: Hashable | None,
    valid_range: tuple[float, float] | None,
    index: int,
) -> np.ndarray:
    """Return the values of a field at the time of an index, [N] float32; NaN if not valid."""
    if time_dim is not None and time_dim in part.dims:
        part = part.isel({time_dim: index})
    values = part.transpose(*grid_dims).values.reshape(-1).astype(np.float32)
    if valid_range is not None:
        low, high = valid_range
        values[(values < low) | (values > high)] = np.nan
    return values


def open_netcdf(path: str) -> "xarray.Dataset":
    """Open a NetCDF file. Values with a unit of time stay numbers."""
    xarray = import_extra("xarray", "xarray")
    return xarray.open_dataset(path, engine="netcdf4", decode_timedelta=False)


def open_zarr(path: str) -> "xarray.Dataset":
    """Open a zarr.

    Format 2 stores a fill value for chunks that were not written, by default 0, which xarray takes
    as missing. A variable whose fill value is 0 and that is not packed has values of 0. Format 3
    declares missing values apart from it. Chunks that were not written, and are read as values, are
    logged.

    Raises FieldError for a zarr of anemoi-datasets.
    """
    xarray = import_extra("xarray", "xarray")
    zarr = import_extra("zarr", "xarray")
    with warnings.catch_warnings():
        message = "Failed to open Zarr store with consolidated"
        warnings.filterwarnings("ignore", message, RuntimeWarning)
        raw = xarray.open_dataset(path, engine="zarr", decode_cf=False)
    if "variables" in raw.attrs and {"data", "latitudes", "dates"} <= set(raw.variables):
        raise FieldError(f"{path} is a zarr of anemoi-datasets: take data=anemoi")
    store = zarr.open(path, mode="r")
    for key, variable in raw.variables.items():
        is_packed = {"scale_factor", "add_offset"} & set(variable.attrs)
        fill = variable.attrs.get("_FillValue")
        if not is_packed and np.isscalar(fill) and fill == 0:
            del raw[key].attrs["_FillValue"]
        if key not in raw.data_vars or not variable.dims:
            continue
        array = store[key]
        unwritten = array.fill_value or 0  # format 2 may have none
        is_missing = unwritten != unwritten or unwritten == raw[key].attrs.get("_FillValue")
        missing = 0 if is_missing else array.nchunks - array.nchunks_initialized
        if missing:
            scale = variable.attrs.get("scale_factor", 1)
            value = unwritten * scale + variable.attrs.get("add_offset", 0)
            log.warning(
                "%s: %d of %d chunks of %s were not written, their values are read as %g",
                *(path, missing, array.nchunks, key, value),
            )
    # Without consolidated metadata, zarr 3 lists arrays in random order.
    opened = xarray.decode_cf(raw, decode_timedelta=False)
    return opened[sorted(opened.data_vars, key=str)]
