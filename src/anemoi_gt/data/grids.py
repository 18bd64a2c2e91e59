"""Grids of fields: global reduced Gaussian grids and regional latitude-longitude grids.

A reduced Gaussian grid is defined by its row lengths: row i of n lies on the i-th Gaussian
latitude, north first, and has lengths[i] equally spaced points from longitude 0 eastwards.
Octahedral grids (Malardel et al. 2016) and classic ones (Hortal and Simmons 1991) differ only in
the lengths: the former follow a formula, the latter are in `classic_grids.txt`.

References
----------
Malardel, S. et al. (2016), A new grid for the IFS, ECMWF Newsletter 146, 23-28.
Hortal, M. and Simmons, A. J. (1991), Use of reduced Gaussian grids in spectral models, Mon. Wea.
Rev. 119, 1057-1074.
"""

import re
from importlib.resources import files

import numpy as np
from numpy.typing import ArrayLike

from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra
from anemoi_gt.option_checks import check_integer


def gaussian_latitudes(n: int) -> np.ndarray:
    """Return the n Gaussian latitudes, [n] float64, in degrees, north to south.

    They are the arcsines of the roots of the Legendre polynomial P_n, and exactly antisymmetric
    about the equator. Raises ValueError if n is not positive, ImportError without scipy.

    Examples
    --------
    >>> gaussian_latitudes(2).round(4)
    array([ 35.2644, -35.2644])
    """
    check_integer("n", n, note=", the number of latitudes")
    roots, _ = import_extra("scipy.special", "graphs").roots_legendre(n)
    return np.rad2deg(np.arcsin(roots[::-1]))


def reduced_gaussian(lengths: ArrayLike) -> Nodes:
    """Return a reduced Gaussian grid with these row lengths.

    `lengths` are the numbers of points in each row. Rows are ordered from north to south, each from
    longitude 0 eastwards. Raises ValueError if `lengths` is empty, or a length is not a positive
    integer.
    """
    lengths = np.asarray(lengths)
    is_integer_vector = lengths.ndim == 1 and lengths.dtype.kind in "iu"
    if not is_integer_vector or len(lengths) == 0 or lengths.min() < 1:
        raise ValueError(
            f"lengths must be a vector of positive integers, the points in each row, got {lengths}"
        )
    row_starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    position = np.arange(lengths.sum()) - row_starts
    return Nodes(
        np.repeat(gaussian_latitudes(len(lengths)), lengths),
        360 * position / np.repeat(lengths, lengths),
    )


def octahedral(n: int) -> Nodes:
    """Return the octahedral reduced Gaussian grid O<n>: 2n rows of 20, 24, ..., 24, 20 points.

    n is the number of rows between a pole and the equator; the grid has 4n (n + 9) points. Raises
    ValueError if n is not positive.

    Examples
    --------
    >>> len(octahedral(96))
    40320
    """
    check_integer("n", n, note=", the number of rows between a pole and the equator")
    half = 16 + 4 * np.arange(1, n + 1)
    return reduced_gaussian(np.concatenate([half, half[::-1]]))


def classic(n: int) -> Nodes:
    """Return the classic reduced Gaussian grid N<n> of ECMWF's reanalyses; ERA5 is on N320.

    n is the number of rows between a pole and the equator, one of the sixteen in
    `classic_grids.txt`, from 32 to 2000. Raises ValueError if n is not an integer, or not in the
    table.

    Examples
    --------
    >>> len(classic(320))
    542080
    """
    return reduced_gaussian(classic_row_lengths(n))


def classic_row_lengths(n: int) -> np.ndarray:
    """Return the number of points in each row of N<n>, from north to south.

    Raises ValueError as `classic` does.
    """
    check_integer("n", n, least=None, note=", the number of rows between a pole and the equator")
    text = files("anemoi_gt.data").joinpath("classic_grids.txt").read_text()
    table = {
        int(name): runs.split() for name, runs in re.findall(r"^N(\d+):([^N]*)", text, re.MULTILINE)
    }
    if n not in table:
        raise ValueError(
            f"N{n} must be one of {', '.join(f'N{known}' for known in table)}; for another grid "
            "pass its row lengths to reduced_gaussian"
        )
    # LENGTHxROWS from pole to equator, or LENGTH of a single row
    runs = (run.partition("x") for run in table[n])
    half = np.concatenate([np.full(int(rows or 1), int(length)) for length, _, rows in runs])
    return np.concatenate([half, half[::-1]])


def grid(name: str) -> Nodes:
    """Return a global grid by name: "O<n>" (octahedral reduced Gaussian) or "N<n>" (classic).

    Raises ValueError for any other name, or a classic grid that is not in the table.
    """
    match = re.fullmatch(r"([ON])([1-9]\d*)", name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(
            'grid must be "O" or "N" followed by a number of rows, such as "O96" or "N320", got '
            f"{name!r}"
        )
    family = {"O": octahedral, "N": classic}[match[1]]
    return family(int(match[2]))


def regional(lat: ArrayLike, lon: ArrayLike) -> Nodes:
    """Return the grid of two axes in degrees, in any order: node i * n_lon + j is (lat[i], lon[j]).

    Raises ValueError if an axis is not a vector.
    """
    lat, lon = np.asarray(lat), np.asarray(lon)
    if lat.ndim != 1 or lon.ndim != 1:
        raise ValueError(
            f"lat and lon must be vectors, the axes of the grid, got {lat.shape} and {lon.shape}"
        )
    lat2d, lon2d = np.meshgrid(lat, lon, indexing="ij")
    return Nodes(lat2d.ravel(), lon2d.ravel())
