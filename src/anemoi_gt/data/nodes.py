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

    For global grids with more than a million points in rows, Voronoi cells would take minutes. Each
    point then gets an equal share of its row's band, which ends half-way to the next rows. On
    octahedral grids, these areas differ from the cells by at most 0.7%.
    """
    if len(nodes) > LARGE and len(np.unique(nodes.lat)) < len(nodes) / 100:
        return row_weights(nodes)
    voronoi = import_extra("scipy.spatial", "graphs").SphericalVoronoi
    try:
        areas = voronoi(nodes.xyz).calculate_areas()
    except ValueError as error:
        raise ValueError(
            "nodes must be at least four, spread over the globe, all at distinct positions, got "
            f"{len(nodes)}: {error}"
        ) from error
    return areas / areas.mean()


def row_weights(nodes: Nodes) -> np.ndarray:
    """Return area weights of mean 1, [N] float64, of a grid in rows.

    The points of a row share the area of its band. Bands end half-way to the next rows, or at a
    pole that is within one row spacing.
    """
    rows, row, points = np.unique(nodes.lat.round(4), return_inverse=True, return_counts=True)
    beyond = np.clip([2 * rows[0] - rows[1], 2 * rows[-1] - rows[-2]], -90, 90)
    ends = np.where(np.abs(beyond) == 90, beyond, (beyond + rows[[0, -1]]) / 2)
    bounds = np.concatenate([ends[:1], (rows[1:] + rows[:-1]) / 2, ends[1:]])
    weights = (np.diff(np.sin(np.deg2rad(bounds))) / points)[row]
    return weights / weights.mean()
