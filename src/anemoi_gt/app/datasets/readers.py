"""Readers of files, by format. Files are opened once, and fields are read when they are needed."""

import logging
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from anemoi_gt.app.datasets.anemoi_reader import read_anemoi as read_anemoi_zarr
from anemoi_gt.app.datasets.fields import FieldError, Series
from anemoi_gt.app.datasets.grib_reader import is_grib, read_grib
from anemoi_gt.app.datasets.xarray_reader import open_netcdf, open_zarr, read_dataset

log = logging.getLogger(__name__)


def read_files(path: str | Path | Sequence[str]) -> list[Series]:
    """Return the fields of NetCDF, zarr or GRIB files.

    `path` is a file, the folder of a zarr, a pattern such as `data/*.nc`, or a list of these.
    Variables that are left out are logged with the reason.

    Raises FileNotFoundError if there is no such file; ImportError if xarray or the reader of a
    format is missing; ValueError if a file cannot be read, or holds no fields.
    """
    files = _find(path)
    series: list[Series] = []
    reasons: dict[str, str] = {}
    for file in files:
        found, left_out = _read(file)
        series += found
        reasons |= {name: f"{name} of {file}, {reason}" for name, reason in left_out.items()}
        if left_out:
            _log_left_out(file, left_out)
    if not series:
        because = f": {'; '.join(list(reasons.values())[:5])}" if reasons else ""
        raise ValueError(
            f"files must hold fields on latitudes and longitudes, found none in "
            f"{', '.join(files)}{because}"
        )
    return series


def _log_left_out(file: str, left_out: dict[str, str]) -> None:
    reasons = "; ".join(f"{name}, because {reason}" for name, reason in left_out.items())
    log.info("left out of %s: %s", file, reasons)


def read_anemoi(path: str | Path) -> list[Series]:
    """Return the fields of a zarr of anemoi-datasets. Raises like `read_files`."""
    (file, *more) = _find(path)
    if more:
        raise ValueError(f"data=anemoi reads one zarr, got {file}, {', '.join(more)}")
    series, left_out = read_anemoi_zarr(file)
    if left_out:
        _log_left_out(file, left_out)
    return series


READERS: dict[str, Callable[[Any], list[Series]]] = {"xarray": read_files, "anemoi": read_anemoi}


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


def _read(file: str) -> tuple[list[Series], dict[str, str]]:
    """Return the fields of a file, and why others were left out."""
    try:
        if "://" in file or Path(file).is_dir():
            opened = open_zarr(file)
        elif is_grib(file):
            return read_grib(file)
        else:
            opened = open_netcdf(file)
    except (ImportError, FieldError):
        raise
    except Exception as error:  # each format raises errors of its own
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{file} must be a NetCDF, zarr or GRIB file, and cannot be read: {reason}"
        ) from error
    return read_dataset(opened, file)
