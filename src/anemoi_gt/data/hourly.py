"""Hourly values on a grid, and the file of `era5_uk` that holds some. The only place that reads GRIB."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.data.grids import regional
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

TUTORIAL_NAME = "era5-2mt-2019-03-uk.grib"


@dataclass(frozen=True, eq=False)
class HourlyField:
    """Hourly values of one variable on a grid, in memory.

    Parameters
    ----------
    nodes : Nodes
        N grid points.
    times : numpy.ndarray
        [T] datetime64, an hour apart.
    values : Tensor
        [T, N] float32, K.

    Raises
    ------
    ValueError
        If hours are missing, or values are not finite.
    """

    nodes: Nodes
    times: np.ndarray
    values: Tensor

    def __post_init__(self):
        if self.values.shape != (len(self.times), len(self.nodes)):
            raise ValueError(
                f"values must be [{len(self.times)}, {len(self.nodes)}], times by nodes, got {tuple(self.values.shape)}"
            )
        steps = np.diff(self.times)
        if not (steps == np.timedelta64(1, "h")).all():
            raise ValueError(f"times must be an hour apart, got steps of {np.unique(steps)}")
        if not torch.isfinite(self.values).all():
            raise ValueError("2 m temperature must be finite everywhere, got NaN or infinity")

    def part(self, rows: Tensor) -> "HourlyField":
        """Return a copy of the values at some of the points, by their numbers [n] int64."""
        return HourlyField(self.nodes[rows.numpy()], self.times, self.values[:, rows])


def read_era5_uk(path: str | Path | None) -> HourlyField:
    """Read the file of `era5_uk`.

    Parameters
    ----------
    path : str, Path or None
        The GRIB file; None fetches it once with `xarray.tutorial`, which keeps it in the user's cache.

    Returns
    -------
    HourlyField
        2 m temperature.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ImportError
        If xarray or cfgrib is missing.
    ValueError
        If the file holds no 2 m temperature, or not every hour of it.
    """
    xarray = import_extra("xarray", "era5")
    import_extra("cfgrib", "era5")
    options = {"engine": "cfgrib", "backend_kwargs": {"indexpath": ""}}  # no index file: the folder may be read-only
    if path is None:
        import_extra("pooch", "era5")
        source = xarray.tutorial.open_dataset(TUTORIAL_NAME, **options)
    elif Path(path).is_file():
        source = xarray.open_dataset(path, **options)
    else:
        raise FileNotFoundError(f"no file {path}: give the place of {TUTORIAL_NAME}, or null to fetch it")
    with source:
        if "t2m" not in source:
            raise ValueError(f"the file must hold 2 m temperature (t2m), got {sorted(source.data_vars)}")
        field = source["t2m"].transpose("time", "latitude", "longitude")
        nodes = regional(field.latitude.values, field.longitude.values)
        values = torch.from_numpy(field.values.reshape(len(field), len(nodes)))
        return HourlyField(nodes, field.time.values, values)
