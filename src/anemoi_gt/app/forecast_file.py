"""Forecast files with CF conventions, for xarray, CDO and ncview, as NetCDF or zarr.

    (number, time, latitude, longitude)    a regular grid, in the order of the data
    (number, time, node)                   any other grid

The dimension `number` exists if there are several ensemble members. Without dates, the dimension
`lead_time` replaces `time`.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.training.run_files import annotate_oserror
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra
from anemoi_gt.version import __version__

if TYPE_CHECKING:
    import xarray

SUFFIXES = (".nc", ".zarr")
LATITUDE = {"standard_name": "latitude", "long_name": "latitude", "units": "degrees_north"}
LONGITUDE = {"standard_name": "longitude", "long_name": "longitude", "units": "degrees_east"}
LEAD_TIME = {
    "standard_name": "forecast_period",
    "long_name": "time since the start of the forecast",
    "units": "hours",
}


def check_forecast_path(path: Path) -> None:
    """Raise ValueError unless the suffix of a path selects a forecast format."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"out must end in {' or '.join(SUFFIXES)}, for NetCDF or zarr, got {path}")


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
    horizontal, shape, positions = _grid_coordinates(dataset.nodes)
    coordinates |= positions
    dims = (when, *horizontal)
    if members > 1:
        dims = ("number", *dims)
        names = {"standard_name": "realization", "long_name": "ensemble member"}
        coordinates["number"] = ("number", np.arange(members), names)
    variables = {}
    for v, (name, units) in enumerate(zip(dataset.variables, dataset.units, strict=True)):
        values = states[..., v].reshape(members, steps, *shape)
        if members == 1:
            values = values[0]
        attributes = variable_attributes(dict(dataset.attributes.get(name, {})), units)
        if name in dataset.levels:
            attributes["level"] = dataset.levels[name]
        variables[re.sub(r"\W", "_", name)] = (dims, values, attributes)
    title = f"{dataset.title(sample)}, {steps} steps"
    about = {"Conventions": "CF-1.11", "title": title, "source": f"anemoi_gt {__version__}"}
    forecast = import_extra("xarray", "xarray").Dataset(variables, coordinates, about)
    for coordinate in forecast.coords.values():
        coordinate.encoding["_FillValue"] = None  # CF allows none in coordinates
    return forecast


def _time_coordinates(
    dataset: ForecastDataset, sample: int, steps: int
) -> tuple[str, dict[str, tuple]]:
    """Return the name of the time dimension, and its coordinates."""
    hours = np.arange(1, steps + 1) * float(dataset.lead_time)
    start = dataset.start_time(sample)
    if start is None:
        return "lead_time", {"lead_time": ("lead_time", hours, LEAD_TIME)}
    # Encoded by hand, because xarray would write units with a T, which not every tool reads.
    units = f"hours since {np.datetime_as_string(start, unit='s').replace('T', ' ')}"
    calendar = {"units": units, "calendar": "standard"}
    time = {"standard_name": "time", "long_name": "valid time", "axis": "T"} | calendar
    reference = {
        "standard_name": "forecast_reference_time",
        "long_name": "start of the forecast",
    } | calendar
    return "time", {
        "time": ("time", hours, time),
        "lead_time": ("time", hours, LEAD_TIME),
        "forecast_reference_time": ((), 0.0, reference),
    }


def _grid_coordinates(nodes: Nodes) -> tuple[tuple[str, ...], tuple[int, ...], dict[str, tuple]]:
    """Return the dimensions of a grid, their sizes, and the coordinates."""
    axes = regular_axes(nodes)
    if axes is None:
        positions = {
            "latitude": ("node", nodes.lat, LATITUDE),
            "longitude": ("node", nodes.lon, LONGITUDE),
        }
        return ("node",), (len(nodes),), positions
    lat, lon = axes
    positions = {
        "latitude": ("latitude", lat, LATITUDE | {"axis": "Y"}),
        "longitude": ("longitude", lon, LONGITUDE | {"axis": "X"}),
    }
    return ("latitude", "longitude"), (len(lat), len(lon)), positions


def variable_attributes(attributes: dict[str, Any], units: str) -> dict[str, str]:
    """Select the CF attributes of a forecast variable from the attributes of the data."""
    standard_name = attributes.get("standard_name", attributes.get("GRIB_cfName", "unknown"))
    described = {}
    if standard_name != "unknown":  # cfgrib's value for unknown names
        described["standard_name"] = standard_name
    if "long_name" in attributes:
        described["long_name"] = attributes["long_name"]
    if units:
        described["units"] = units
    return described


def regular_axes(nodes: Nodes) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the latitudes and longitudes of a regular grid in row order, or None for other grids.

    Examples
    --------
    >>> regular_axes(Nodes([50, 50, 49, 49], [0, 1, 0, 1]))
    (array([50., 49.]), array([0., 1.]))
    """
    columns = int((nodes.lat == nodes.lat[0]).cumprod().sum())
    if columns < 2 or len(nodes) % columns or len(nodes) == columns:
        return None
    lat = nodes.lat.reshape(-1, columns)
    lon = nodes.lon.reshape(-1, columns)
    is_regular = (lat == lat[:, :1]).all() and (lon == lon[:1]).all()
    if not is_regular or not _is_monotonic(lat[:, 0]) or not _is_monotonic(lon[0]):
        return None
    return lat[:, 0], lon[0]


def _is_monotonic(axis: np.ndarray) -> bool:
    steps = np.diff(axis)
    return bool((steps > 0).all() or (steps < 0).all())
