"""Readers of files, by format. Files are opened once, and fields are read when they are needed.

A reader returns the fields of one file, and why others were left out, by name.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from glob import glob
from pathlib import Path

import numpy as np

from anemoi_gt.app.datasets.fields import FieldError, Grid, Key, Series
from anemoi_gt.app.datasets.grib_reader import is_grib, read_grib
from anemoi_gt.app.datasets.xarray_reader import open_netcdf, open_zarr, read_dataset
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

log = logging.getLogger(__name__)


def read_files(path: str | Path | Sequence[str], format: str = "xarray") -> list[Series]:
    """Return the fields of files of a format in `READERS`.

    `path` is a file, the folder of a zarr, a pattern such as `data/*.nc`, or a list of these.
    Variables that are left out are logged with the reason.

    Raises FileNotFoundError if there is no such file; ImportError if xarray or the reader of a
    format is missing; ValueError if a file cannot be read, or holds no fields.
    """
    kind, read = READERS[format]
    files = _find(path)
    series: list[Series] = []
    reasons: list[str] = []
    for file in files:
        try:
            found, left_out = read(file)
        except (ImportError, FieldError):
            raise
        except Exception as error:  # each format raises errors of its own
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{file} must be {kind}, and cannot be read: {reason}") from error
        series += found
        reasons += [f"{name} of {file}, {reason}" for name, reason in left_out.items()]
        if left_out:
            texts = "; ".join(f"{name}, because {reason}" for name, reason in left_out.items())
            log.info("left out of %s: %s", file, texts)
    if not series:
        because = f": {'; '.join(reasons[:5])}" if reasons else ""
        raise ValueError(
            f"files must hold fields on latitudes and longitudes, found none in "
            f"{', '.join(files)}{because}"
        )
    return series


def _find(path: str | Path | Sequence[str]) -> list[str]:
    """Return the files of patterns, sorted; raise FileNotFoundError if a pattern has none."""
    is_list = isinstance(path, Sequence) and not isinstance(path, str)
    patterns: Sequence[object] = path if is_list else [path]  # type: ignore[assignment]
    files: list[str] = []
    for pattern in map(str, patterns):
        if "://" not in pattern:
            pattern = str(Path(pattern).expanduser())
        found = sorted(glob(pattern)) or [pattern]
        if "://" not in pattern and not Path(found[0]).exists():
            raise FileNotFoundError(f"no file {pattern}: give the data as data.path=FILE")
        files += found
    return files


def _read_file(file: str) -> tuple[list[Series], dict[str, str]]:
    """Read NetCDF, zarr or GRIB."""
    if "://" in file or Path(file).is_dir():
        return read_dataset(open_zarr(file), file)
    if is_grib(file):
        return read_grib(file)
    return read_dataset(open_netcdf(file), file)


def _read_anemoi(path: str) -> tuple[list[Series], dict[str, str]]:
    """Read a zarr of anemoi-datasets, whose metadata name variables, units and missing dates."""
    store = import_extra("zarr", "xarray").open(path, mode="r")
    data = store["data"]  # [T, V, members, N]
    variables = list(store.attrs["variables"])
    lat, lon, times = (np.asarray(store[key][:]) for key in ("latitudes", "longitudes", "dates"))
    times = times.astype("datetime64[s]")
    missing = np.array(store.attrs.get("missing_dates", []), "datetime64[s]")
    available = np.flatnonzero(~np.isin(times, missing))
    metadata = dict(store.attrs.get("variables_metadata") or {})
    nodes = Nodes(lat, lon)
    grid = Grid(nodes, ("node",), (len(nodes),))

    @lru_cache(1)  # one chunk holds all variables of a date
    def read_state(t: int) -> np.ndarray:
        return np.asarray(data[int(available[t])])

    def read(v: int, member: int, t: int) -> np.ndarray:
        return read_state(t)[v, member].astype(np.float32)

    num_members = data.shape[2]
    series = []
    for v, variable in enumerate(variables):
        units = dict(metadata.get(variable) or {}).get("units") or ""
        for member in range(num_members):
            series.append(
                Series(
                    key=Key(variable),
                    units=str(units),
                    grid=grid,
                    times=times[available].astype("datetime64[ns]"),
                    read=partial(read, v, member),
                    source=path,
                    member=str(member) if num_members > 1 else "",
                )
            )
    left_out = {f"the date {time}": "it is missing in the data set" for time in missing.tolist()}
    return series, left_out


# What the file of a format must be, and its reader.
READERS: dict[str, tuple[str, Callable[[str], tuple[list[Series], dict[str, str]]]]] = {
    "xarray": ("a NetCDF, zarr or GRIB file", _read_file),
    "anemoi": ("a zarr of anemoi-datasets", _read_anemoi),
}
