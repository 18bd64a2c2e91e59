"""Nodes on the sphere: positions, tangent frames for directions, and area weights.

`lat` and `lon` are in degrees; all geometry is computed from unit vectors in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from anemoi_gt.extras import import_extra

EARTH_RADIUS = 6.371e6  # m, mean radius
LARGE = 2**20  # points
SAME = 1e-4  # degrees between points that are the same, as the ends of a closed row
POLE = 1e-3  # degrees from a pole
MOST = 0.9  # of the gaps of a grid in rows are multiples of a spacing,
SPARSE = 10  # and half of them less than so many: rounded positions of stations are no grid


@dataclass(frozen=True, eq=False)
class Nodes:
    """Points on the sphere.

    Raises ValueError if latitudes and longitudes are not finite vectors of equal length, or a
    latitude is outside [-90, 90].

    Parameters
    ----------
    lat : array_like
        Latitudes in degrees north, [N], within [-90, 90]. Kept as float64.
    lon : array_like
        Longitudes in degrees east, [N], any range. Kept as float64.

    Examples
    --------
    >>> nodes = Nodes(lat=[0.0, 90.0], lon=[180.0, 0.0])
    >>> len(nodes)
    2
    >>> nodes.xyz.round(12) + 0.0
    array([[-1.,  0.,  0.],
           [ 0.,  0.,  1.]])
    """

    lat: np.ndarray
    lon: np.ndarray

    def __init__(self, lat: ArrayLike, lon: ArrayLike):
        for name, axis in (("lat", lat), ("lon", lon)):
            values = np.array(axis, dtype=np.float64)
            values.flags.writeable = False
            object.__setattr__(self, name, values)
        if self.lat.ndim != 1 or self.lat.shape != self.lon.shape:
            raise ValueError(
                f"lat and lon must be vectors of equal length, got {self.lat.shape} and "
                f"{self.lon.shape}"
            )
        if not (np.isfinite(self.lat).all() and np.isfinite(self.lon).all()):
            raise ValueError("lat and lon must be finite, got NaN or infinity")
        if len(self) and np.abs(self.lat).max() > 90:
            raise ValueError(
                f"lat must lie in [-90, 90] degrees, got {self.lat.min()} to {self.lat.max()}"
            )

    def __len__(self) -> int:
        return len(self.lat)

    def __getitem__(self, index: slice | np.ndarray) -> "Nodes":
        """Return the selected nodes; `index` is a slice, a mask or an array of positions."""
        return Nodes(self.lat[index], self.lon[index])

    @classmethod
    def from_xyz(cls, xyz: ArrayLike) -> "Nodes":
        """Return the nodes in the directions of vectors [N, 3] of any nonzero length.

        Raises ValueError if the shape is not [N, 3], or a vector is zero.
        """
        xyz = np.asarray(xyz, dtype=np.float64)
        if xyz.ndim != 2 or xyz.shape[1] != 3:
            raise ValueError(f"xyz must be [N, 3], one vector per node, got {xyz.shape}")
        if not xyz.any(axis=1).all():
            raise ValueError("xyz must be vectors of nonzero length, got zeros")
        x, y, z = xyz.T
        return cls(np.rad2deg(np.arctan2(z, np.hypot(x, y))), np.rad2deg(np.arctan2(y, x)))

    @property
    def radians(self) -> np.ndarray:
        """Latitude and longitude in radians, [N, 2] float64."""
        return np.deg2rad(np.stack([self.lat, self.lon], axis=-1))

    @property
    def stored(self) -> np.ndarray:
        """Latitude and longitude in radians as a graph stores them, [N, 2] float32."""
        return self.radians.astype(np.float32)

    @property
    def xyz(self) -> np.ndarray:
        """Unit vectors [N, 3] float64: x to (0 N, 0 E), y to (0 N, 90 E), z to the north pole."""
        return unit_vectors(self.radians)

    @property
    def east(self) -> np.ndarray:
        """Unit vectors [N, 3] float64 to the east; at a pole, the east of the node's longitude."""
        lon = self.radians[:, 1]
        return np.stack([-np.sin(lon), np.cos(lon), np.zeros_like(lon)], axis=-1)

    @property
    def north(self) -> np.ndarray:
        """Unit vectors [N, 3] float64 to the north; at a pole, north along the node's longitude."""
        lat, lon = self.radians.T
        return np.stack(
            [-np.sin(lat) * np.cos(lon), -np.sin(lat) * np.sin(lon), np.cos(lat)], axis=-1
        )

    @property
    def frame(self) -> np.ndarray:
        """Two unit tangent vectors at each node, [N, 2, 3] float64: the basis of edge directions.

        The shortest rotation from the node to the north pole maps them to the x axis and the y
        axis. Unlike east and north, they are continuous across the north pole; at the south pole,
        they depend on the node's longitude.
        """
        sin, cos = np.sin(self.radians[:, 1, None]), np.cos(self.radians[:, 1, None])
        return np.stack(
            [-self.east * sin - self.north * cos, self.east * cos - self.north * sin], axis=1
        )

    def inside(self, area: Sequence[float]) -> np.ndarray:
        """Return a mask [N] of the nodes between two parallels and two meridians, inclusive.

        `area` is north, west, south, east in degrees, in the order of ECMWF's archive. It extends
        eastwards from west to east, possibly across the date line, and around the globe if both are
        the same meridian. Raises ValueError if `area` is not four finite numbers, or north is not
        above south.

        Examples
        --------
        >>> Nodes(lat=[50, 50, 50], lon=[170, -170, 0]).inside((60, 160, 40, -160))
        array([ True,  True, False])
        """
        bounds = np.asarray(area, dtype=np.float64)
        if bounds.shape != (4,) or not np.isfinite(bounds).all():
            raise ValueError(
                f"area must be four numbers, north, west, south and east in degrees, got {area}"
            )
        north, west, south, east = bounds
        if north <= south:
            raise ValueError(
                f"area must be north, west, south, east with north above south, got {area}"
            )
        width = (east - west) % 360 or 360.0
        return (self.lat <= north) & (self.lat >= south) & ((self.lon - west) % 360 <= width)


def unit_vectors(radians: np.ndarray) -> np.ndarray:
    """Return unit vectors [N, 3] from latitudes and longitudes in radians, [N, 2]."""
    lat, lon = radians.T
    return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=-1)


def area_weights(nodes: Nodes) -> np.ndarray:
    """Return the areas of the nodes' Voronoi cells on the sphere, scaled to mean 1, [N] float64.

    Raises ValueError if two nodes coincide, there are fewer than four nodes, or all lie on one
    circle.

    For grids in rows with more than a million points, Voronoi cells would take minutes: they have
    `row_weights`. On octahedral grids, these differ from the areas of the cells by at most 0.7%.
    """
    weights = row_weights(nodes) if len(nodes) > LARGE else None
    if weights is not None:
        return weights
    voronoi = import_extra("scipy.spatial", "graphs").SphericalVoronoi
    try:
        areas = voronoi(nodes.xyz).calculate_areas()
    except ValueError as error:
        raise ValueError(
            "nodes must be at least four, spread over the globe, all at distinct positions, got "
            f"{len(nodes)}: {error}"
        ) from error
    return areas / areas.mean()


def row_weights(nodes: Nodes) -> np.ndarray | None:
    """Return area weights of mean 1, [N] float64, of a regular or reduced grid, or a part of one.

    None unless points lie in rows of constant latitude with even spacing, of which points may be
    missing, as over sea. A cell is as high as its row's band, which ends half-way to the next rows,
    or at a pole that is within one row spacing; it is as wide as the spacing.
    """
    rows, row, points = np.unique(nodes.lat.round(4), return_inverse=True, return_counts=True)
    gaps, of_row = _gaps(nodes.lon % 360, row, points)
    if len(rows) < 2 or len(gaps) <= len(nodes) / 2:
        return None
    spacing, steps = _spacings(gaps, np.zeros_like(of_row), 1)
    if _are_even(steps):  # a regular grid: one spacing
        width = np.full(len(rows), spacing)
    else:  # a reduced one: about the same distance in all rows
        spacing, steps = _spacings(gaps, of_row, len(rows))
        cos = np.cos(np.deg2rad(rows))
        is_known = (points >= 3) & (np.bincount(of_row, ~_are_integers(steps), len(rows)) == 0)
        if not (_are_even(steps) and is_known.any()):
            return None
        # where points are too few, or too far apart: as wide as in most rows
        typical = np.median((spacing * cos)[is_known])
        is_known &= spacing * cos < 1.5 * typical
        width = np.where(is_known, spacing, np.minimum(typical / cos, 360 / points))
    width[(points == 1) & (np.abs(rows) > 90 - POLE)] = 360.0
    weights = (_band_heights(rows) * width)[row]
    return weights / weights.mean()


def _gaps(lon: np.ndarray, row: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the gaps between neighbours in each row, but for the largest, and their rows.

    The largest may be what lies outside of a region.
    """
    order = np.lexsort((lon, row))
    lon, row = lon[order], row[order]
    last = np.cumsum(points) - 1
    first = last - points + 1
    gaps = np.append(np.diff(lon), 0.0)
    gaps[last] = lon[first] + 360 - lon[last]
    gaps = gaps[np.lexsort((gaps, row))]
    is_kept = gaps > SAME
    is_kept[last] = False
    return gaps[is_kept], row[is_kept]


def _spacings(
    gaps: np.ndarray, group: np.ndarray, num_groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the spacing of each group of gaps, NaN without any, and the gaps in its steps."""
    smallest = np.full(num_groups, np.inf)
    np.minimum.at(smallest, group, gaps)
    is_single = gaps < 1.5 * smallest[group]
    # the mean of all, because longitudes in files are rounded
    total = np.bincount(group, gaps * is_single, num_groups)
    count = np.bincount(group, is_single, num_groups)
    spacing = np.divide(total, count, out=np.full(num_groups, np.nan), where=count > 0)
    return spacing, gaps / spacing[group]


def _are_even(steps: np.ndarray) -> bool:
    """Return whether most gaps are whole steps of a lattice, and at least half are short."""
    return bool(_are_integers(steps).mean() > MOST and np.median(steps) < SPARSE)


def _are_integers(steps: np.ndarray) -> np.ndarray:
    integers = np.round(steps)
    return np.abs(steps - integers) <= np.minimum(0.02 * integers, 0.1)


def _band_heights(rows: np.ndarray) -> np.ndarray:
    """Return the heights of the bands of latitudes, sorted ascending, on a unit sphere.

    Rows may be missing where latitudes have even spacing.
    """
    gaps = np.diff(rows)
    steps = gaps / gaps.min()
    if _are_integers(steps).all():
        gaps /= np.round(steps)
    south = rows - np.append(gaps[:1], gaps) / 2
    north = rows + np.append(gaps, gaps[-1:]) / 2
    if rows[0] - gaps[0] <= -90:
        south[0] = -90.0
    if rows[-1] + gaps[-1] >= 90:
        north[-1] = 90.0
    return np.sin(np.deg2rad(north)) - np.sin(np.deg2rad(south))
