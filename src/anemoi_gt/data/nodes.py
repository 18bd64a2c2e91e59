"""Nodes: the only definition of a set of points on the sphere, and of the frames that directions refer to.

Angles are degrees where people read them (`lat`, `lon`); everything geometric is computed from unit vectors in float64.
"""

from dataclasses import dataclass

import numpy as np

EARTH_RADIUS = 6.371e6  # m, mean radius


@dataclass(frozen=True, eq=False)
class Nodes:
    """Points on the sphere.

    Parameters
    ----------
    lat : numpy.ndarray
        Latitudes in degrees north, [N], within [-90, 90]. Kept as float64.
    lon : numpy.ndarray
        Longitudes in degrees east, [N], any range. Kept as float64.

    Raises
    ------
    ValueError
        If the two are not vectors of one length, hold a non-finite value, or a latitude lies beyond a pole.

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

    def __post_init__(self):
        for name in ("lat", "lon"):
            values = np.array(getattr(self, name), dtype=np.float64)
            values.flags.writeable = False
            object.__setattr__(self, name, values)
        if self.lat.ndim != 1 or self.lat.shape != self.lon.shape:
            raise ValueError(f"lat and lon must be vectors of one length, got {self.lat.shape} and {self.lon.shape}")
        if not (np.isfinite(self.lat).all() and np.isfinite(self.lon).all()):
            raise ValueError("lat and lon must be finite, got NaN or infinity")
        if len(self) and np.abs(self.lat).max() > 90:
            raise ValueError(f"lat must lie in [-90, 90] degrees, got {self.lat.min()} to {self.lat.max()}")

    def __len__(self):
        return len(self.lat)

    def __getitem__(self, index) -> "Nodes":
        """Return the chosen nodes; `index` is a slice, a mask or an array of positions."""
        return Nodes(self.lat[index], self.lon[index])

    @classmethod
    def from_xyz(cls, xyz: np.ndarray) -> "Nodes":
        """Return the nodes in the directions of the vectors `xyz` [N, 3], of any length but zero."""
        x, y, z = np.asarray(xyz, dtype=np.float64).T
        return cls(np.rad2deg(np.arctan2(z, np.hypot(x, y))), np.rad2deg(np.arctan2(y, x)))

    @property
    def radians(self) -> np.ndarray:
        """Latitude and longitude in radians, [N, 2] float64."""
        return np.deg2rad(np.stack([self.lat, self.lon], axis=-1))

    @property
    def xyz(self) -> np.ndarray:
        """Unit vectors [N, 3] float64: x to (0 N, 0 E), y to (0 N, 90 E), z to the north pole."""
        lat, lon = self.radians.T
        return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=-1)

    @property
    def east(self) -> np.ndarray:
        """Unit vectors [N, 3] float64 to the east; at a pole, the east of the node's longitude."""
        lon = self.radians[:, 1]
        return np.stack([-np.sin(lon), np.cos(lon), np.zeros_like(lon)], axis=-1)

    @property
    def north(self) -> np.ndarray:
        """Unit vectors [N, 3] float64 to the north; at a pole, the north of the node's longitude."""
        lat, lon = self.radians.T
        return np.stack([-np.sin(lat) * np.cos(lon), -np.sin(lat) * np.sin(lon), np.cos(lat)], axis=-1)

    @property
    def frame(self) -> np.ndarray:
        """Two unit vectors tangent at each node, [N, 2, 3] float64: the plane in which edge directions are given.

        The shortest rotation that takes the node to the north pole turns them to the x and the y axis. Unlike east and
        north they change smoothly across the north pole; at the south pole they follow the node's longitude.
        """
        sin, cos = np.sin(self.radians[:, 1, None]), np.cos(self.radians[:, 1, None])
        return np.stack([-self.east * sin - self.north * cos, self.east * cos - self.north * sin], axis=1)
