"""Forecast files with CF conventions, for xarray, CDO and ncview, as NetCDF or zarr.

    (number, time, latitude, longitude)    a regular grid, in the order of the data
    (number, time, y, x)                   a projection, with its coordinates and grid mapping
    (number, time, node)                   any other grid, with the dimension of the data

Several ensemble members have the dimension `number`, with their labels; one with a label has it as
a scalar coordinate. Heights, depths and pressures are scalar coordinates of their variables.
Without dates, the dimension `lead_time` replaces `time`. With several starts,
`forecast_reference_time` is the first dimension, `lead_time` replaces `time`, and `time` is the
valid time of both.
"""

import re
from collections.abc import Container, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from einops import rearrange

from anemoi_gt.app.datasets.fields import Grid
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.training.run_files import annotate_oserror
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra
from anemoi_gt.version import __version__

if TYPE_CHECKING:
    import xarray

SUFFIXES = (".nc", ".zarr")
VERTICAL: dict[str, dict[str, str]] = {  # attributes of scalar coordinates, by kind of level
    "height": {"standard_name": "height", "units": "m", "positive": "up"},
    "depth": {"standard_name": "depth", "units": "m", "positive": "down"},
    "pressure": {"standard_name": "air_pressure", "units": "hPa", "positive": "down"},
}
LATITUDE = {"standard_name": "latitude", "long_name": "latitude", "units": "degrees_north"}
LONGITUDE = {"standard_name": "longitude", "long_name": "longitude", "units": "degrees_east"}
# Encoded by hand, because xarray would write units with a T, which not every tool reads.
CALENDAR = {"units": "seconds since 1970-01-01 00:00:00", "calendar": "standard"}
TIME = {
    "standard_name": "time",
    "long_name": "valid time",
    "comment": "of sums and means, the end of the interval",
    "axis": "T",
} | CALENDAR
START = {
    "standard_name": "forecast_reference_time",
    "long_name": "start of the forecast",
} | CALENDAR
LEAD_TIME = {
    "standard_name": "forecast_period",
    "long_name": "time since the start of the forecast",
    "units": "hours",
}


def check_forecast_path(path: Path) -> None:
    """Raise ValueError unless the suffix of a path selects a format, and its folder exists."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"out must end in {' or '.join(SUFFIXES)}, for NetCDF or zarr, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"out must be in a folder that exists, got {path}")


def write_forecast(path: Path, forecast: "xarray.Dataset") -> None:
    """Write a forecast as NetCDF or zarr. Raises an OSError that names `path` on failure."""
    with annotate_oserror(path):
        if path.suffix == ".zarr":
            forecast.to_zarr(path, mode="w")
        else:
            forecast.to_netcdf(path, engine="netcdf4")


def describe_forecast(
    dataset: ForecastDataset, sample: int, states: np.ndarray
) -> "xarray.Dataset":
    """Return a forecast as a data set with coordinates and attributes.

    Parameters
    ----------
    dataset : ForecastDataset
        The data set of the samples from which the forecast starts.
    sample : int
        The sample of the first member; the samples of the other members follow it.
    states : np.ndarray
        [members, steps, N, V], physical.
    """
    members, steps, _, _ = states.shape
    when, coordinates = _time_coordinates(dataset, sample, steps)
    horizontal, shape, positions = _grid_coordinates(dataset.nodes, dataset.grid)
    coordinates |= positions
    dims = (when, *horizontal)
    labels = [dataset.member(sample + m) for m in range(members)]
    names = {"standard_name": "realization", "long_name": "ensemble member"}
    if members > 1:
        dims = ("number", *dims)
        coordinates["number"] = ("number", _labels(labels), names)
    elif labels != [""]:
        coordinates["number"] = ((), _labels(labels)[0], names)
    shared = [name for name in coordinates if name not in dims]
    encoding = {}
    if dataset.grid is not None and dataset.grid.mapping is not None:
        # in CF, the attributes of a grid mapping count, not its value
        mapping, mapping_attributes = dataset.grid.mapping
        coordinates[mapping] = ((), np.int32(0), mapping_attributes)
        encoding["grid_mapping"] = mapping  # from an attribute, xarray would make it a coordinate
    vertical: dict[tuple, str] = {}  # names of scalar coordinates, by kind and value
    variables: dict[str, tuple] = {}
    fields = rearrange(states, "members steps nodes variables -> variables members steps nodes")
    for name, units, field in zip(dataset.variables, dataset.units, fields, strict=True):
        values = field.reshape(members, steps, *shape)
        if members == 1:
            values = values[0]
        attributes = variable_attributes(dict(dataset.attributes.get(name, {})), units)
        key = dataset.keys.get(name)
        own = list(shared)
        if key is not None and key.text():
            attributes["level"] = key.text()
            for level in key.levels:
                if level.kind in VERTICAL and level.value is not None:
                    place = (level.kind, level.value)
                    if place not in vertical:
                        taken = {*coordinates, *dataset.variables}
                        vertical[place] = _distinct_name(level.kind, taken)
                        coordinates[vertical[place]] = ((), level.value, VERTICAL[level.kind])
                    own.append(vertical[place])
        if own:  # otherwise xarray names all scalar coordinates for all variables
            attributes["coordinates"] = " ".join(own)
        written = _distinct_name(name, {*variables, *dataset.variables} - {name})
        if written != name:
            described = attributes.get("long_name")
            attributes["long_name"] = name if described is None else f"{described} ({name})"
        variables[written] = (dims, values, attributes, encoding)
    title = f"{dataset.title(sample)}, {steps} steps"
    if members > 1:
        title = f"{title.replace(f', member {labels[0]}', '')}, {members} members"
    about = {"Conventions": "CF-1.11", "title": title, "source": f"anemoi_gt {__version__}"}
    forecast = import_extra("xarray", "xarray").Dataset(variables, coordinates, about)
    for coordinate in forecast.coords.values():
        coordinate.encoding["_FillValue"] = None  # CF allows none in coordinates
    return forecast


def join_starts(forecasts: "Sequence[xarray.Dataset]") -> "xarray.Dataset":
    """Join forecasts from several dates, of the same steps, along `forecast_reference_time`."""
    first = forecasts[0]
    if len(forecasts) == 1:
        return first
    # override: all forecasts are of one data set, so their other coordinates are equal
    joined = import_extra("xarray", "xarray").concat(
        [forecast.swap_dims(time="lead_time") for forecast in forecasts],
        "forecast_reference_time",
        data_vars="all",
        coords=["time"],
        compat="override",
    )
    del joined.time.attrs["axis"]  # which is of the start now
    for variable in joined.data_vars.values():  # start and lead time are dimensions now
        others = [name for name in variable.attrs["coordinates"].split() if name not in joined.dims]
        variable.attrs["coordinates"] = " ".join(["time", *others])
    joined.attrs["title"] = f"{len(forecasts)} forecasts, {first.attrs['title']} and later starts"
    return joined


def _labels(labels: Sequence[str]) -> np.ndarray:
    """Return the labels of ensemble members: numbers, if all are."""
    return np.array([int(label) for label in labels] if all(map(str.isdigit, labels)) else labels)


def _distinct_name(name: str, taken: Container[str]) -> str:
    """Return a name of letters, digits and underscores that is not taken, as CF recommends."""
    cleaned = re.sub(r"\W", "_", name)
    candidates = chain([cleaned], (f"{cleaned}_{n}" for n in count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _time_coordinates(
    dataset: ForecastDataset, sample: int, steps: int
) -> tuple[str, dict[str, tuple]]:
    """Return the name of the time dimension, and its coordinates."""
    hours = np.arange(1, steps + 1) * float(dataset.lead_time)
    start = dataset.start_time(sample)
    if start is None:
        return "lead_time", {"lead_time": ("lead_time", hours, LEAD_TIME)}
    seconds = (start - np.datetime64(0, "s")) / np.timedelta64(1, "s")
    return "time", {
        "time": ("time", seconds + 3600 * hours, TIME),
        "lead_time": ("time", hours, LEAD_TIME),
        "forecast_reference_time": ((), seconds, START),
    }


def _grid_coordinates(
    nodes: Nodes, grid: Grid | None
) -> tuple[tuple[str, ...], tuple[int, ...], dict[str, tuple]]:
    """Return the dimensions of a grid, their sizes, and the coordinates."""
    if grid is None:
        grid = Grid(nodes, ("node",), (len(nodes),))
    axes = regular_axes(nodes, grid.shape)
    if axes is not None:
        attributes = {"latitude": LATITUDE | {"axis": "Y"}, "longitude": LONGITUDE | {"axis": "X"}}
        on_axes: dict[str, tuple] = {}
        for name, axis in axes.items():
            on_axes[name] = (name, axis, attributes[name])
        return tuple(axes), tuple(len(axis) for axis in axes.values()), on_axes
    positions: dict[str, tuple] = {
        "latitude": (grid.dims, nodes.lat.reshape(grid.shape), LATITUDE),
        "longitude": (grid.dims, nodes.lon.reshape(grid.shape), LONGITUDE),
    }
    for dim, (values, attributes) in grid.coordinates.items():
        positions[dim] = (dim, values, attributes)
    return grid.dims, grid.shape, positions


def variable_attributes(attributes: dict[str, Any], units: str) -> dict[str, str]:
    """Select the CF attributes of a forecast variable from the attributes of the data."""
    standard_name = attributes.get("standard_name", attributes.get("GRIB_cfName", "unknown"))
    described = {}
    if standard_name != "unknown":  # cfgrib's value for unknown names
        described["standard_name"] = standard_name
    for name in ("long_name", "cell_methods"):
        if name in attributes:
            described[name] = attributes[name]
    if units:
        described["units"] = units
    return described


def regular_axes(nodes: Nodes, shape: tuple[int, ...] = ()) -> dict[str, np.ndarray] | None:
    """Return latitudes and longitudes of a regular grid, in the order of its dimensions.

    `shape` is that of the data; without two dimensions, rows of constant latitude are searched.
    Longitudes across Greenwich are continued, such as 350 to 370 degrees as -10 to 10. Returns None
    for other grids.

    Examples
    --------
    >>> regular_axes(Nodes([50, 50, 49, 49], [359, 0, 359, 0]))
    {'latitude': array([50., 49.]), 'longitude': array([-1.,  0.])}
    """
    if len(shape) != 2:
        columns = int((nodes.lat == nodes.lat[0]).cumprod().sum())
        shape = (len(nodes) // columns, columns)
    if min(shape) < 2 or np.prod(shape) != len(nodes):
        return None
    lat, lon = nodes.lat.reshape(shape), nodes.lon.reshape(shape)
    names = ("latitude", "longitude")
    if not (lat == lat[:, :1]).all():  # perhaps the first dimension is the longitude
        names = ("longitude", "latitude")
        lat, lon = lat.T, lon.T
    is_regular = (lat == lat[:, :1]).all() and (lon == lon[:1]).all()
    rows, columns_of = lat[:, 0], _continued(lon[0])
    if not is_regular or not _is_monotonic(rows) or not _is_monotonic(columns_of):
        return None
    axes = {"latitude": rows, "longitude": columns_of}
    return {name: axes[name] for name in names}


def _continued(lon: np.ndarray) -> np.ndarray:
    """Return longitudes without a jump of 360 degrees, if they have one."""
    if np.abs(np.diff(lon)).max() <= 180:
        return lon
    continued = np.unwrap(lon, period=360)
    return continued - 360 if continued.max() >= 360 else continued


def _is_monotonic(axis: np.ndarray) -> bool:
    steps = np.diff(axis)
    return bool((steps > 0).all() or (steps < 0).all())
