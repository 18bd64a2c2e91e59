"""Winds on the sphere whose trajectories are known in closed form.

One family holds both flows used here. On the unit sphere, with axis a, centre b at right angles to it, period T:

    dx/dt = w a x x  +  2 k cos(pi t / T) <b(t), x> (x x b(t)),   w = 2 pi / T,   b(t) = b turned about a by w t

k = 0 is solid-body rotation. With k > 0 it is the fourth case of Nair and Lauritzen (2010): seen from the turning frame
its stream function is k cos(pi t / T) <b, y>^2, which with b on the equator at 90 E reads k sin^2(lon) cos^2(lat) cos(pi t / T).

Seen from that frame <b, y> never changes, because the velocity is at right angles to b. So every particle circles b at
its own rate, and the time that the cosine leaves is s = (T / pi) (sin(pi t1 / T) - sin(pi t0 / T)):

    y(t1) = y(t0) turned about b by -2 k <b, y> s

Nothing has to be integrated in time. After one period every particle is back where it began.

References
----------
Nair, R. D. and Lauritzen, P. H. (2010), A class of deformational flow test cases for linear transport problems on the
sphere, J. Comput. Phys. 229, 8868-8887, section 3.
Lauritzen, P. H. et al. (2012), A standard test case suite for two-dimensional linear transport on the sphere, Geosci.
Model Dev. 5, 887-901, section 2: the same in dimensions, with T = 12 days and k T = 10.
"""

from dataclasses import dataclass

import numpy as np

from anemoi_gt.data.nodes import EARTH_RADIUS

SECONDS_PER_HOUR = 3600.0


def rotate(x: np.ndarray, axis: np.ndarray, angle: float | np.ndarray) -> np.ndarray:
    """Turn vectors about an axis, anticlockwise seen from its tip (Rodrigues' formula).

    Parameters
    ----------
    x : numpy.ndarray
        [N, 3] vectors.
    axis : numpy.ndarray
        [3], of length 1.
    angle : float or numpy.ndarray
        Radians, one for all or [N].

    Returns
    -------
    numpy.ndarray
        [N, 3].
    """
    cos, sin = np.cos(angle)[..., None], np.sin(angle)[..., None]
    return x * cos + np.cross(axis, x) * sin + axis * (x @ axis)[:, None] * (1 - cos)


@dataclass(frozen=True, eq=False)
class Flow:
    """A wind on the Earth with exact trajectories: solid-body rotation, with or without deformation.

    Parameters
    ----------
    axis : array_like
        [3], unit vector about which everything turns once in a period.
    centre : array_like
        [3], unit vector at right angles to `axis`: where the deformation is centred at time 0.
    deformation : float
        k T, the strength of the deformation; 10 in the test case, 0 for solid-body rotation.
    period : float
        T in hours.

    Raises
    ------
    ValueError
        If the vectors are not of length 1 and at right angles, or the period is not positive.
    """

    axis: np.ndarray
    centre: np.ndarray
    deformation: float = 10.0
    period: float = 288.0

    def __post_init__(self):
        for name in ("axis", "centre"):
            vector = np.asarray(getattr(self, name), dtype=np.float64)
            if vector.shape != (3,):
                raise ValueError(f"{name} must be a vector [3], got {vector.shape}")
            object.__setattr__(self, name, vector)
        gram = np.stack([self.axis, self.centre]) @ np.stack([self.axis, self.centre]).T
        if not np.allclose(gram, np.eye(2), atol=1e-12):
            raise ValueError(f"axis and centre must be unit vectors at right angles, got {self.axis} and {self.centre}")
        if not self.period > 0:
            raise ValueError(f"period must be positive, in hours, got {self.period}")

    @property
    def angular_speed(self) -> float:
        """Speed w of the solid-body part, radians per hour."""
        return 2 * np.pi / self.period

    def wind(self, xyz: np.ndarray, time: float) -> np.ndarray:
        """Return the velocity at the points `xyz` [N, 3] at `time` (hours): [N, 3], in m/s, tangent to the sphere."""
        centre = rotate(self.centre[None], self.axis, self.angular_speed * time)[0]
        strength = 2 * self.deformation / self.period * np.cos(np.pi * time / self.period)
        radians_per_hour = self.angular_speed * np.cross(self.axis, xyz) + strength * (xyz @ centre)[
            :, None
        ] * np.cross(xyz, centre)
        return radians_per_hour * EARTH_RADIUS / SECONDS_PER_HOUR

    def transport(self, xyz: np.ndarray, start: float, end: float) -> np.ndarray:
        """Follow particles with the wind.

        Parameters
        ----------
        xyz : numpy.ndarray
            [N, 3], where they are at time `start`, on the unit sphere.
        start, end : float
            Hours; an end before the start follows them back.

        Returns
        -------
        numpy.ndarray
            [N, 3], where they are at time `end`.
        """
        y = rotate(xyz, self.axis, -self.angular_speed * start)
        phase = np.pi / self.period
        effective_time = (np.sin(phase * end) - np.sin(phase * start)) / phase
        y = rotate(y, self.centre, -2 * self.deformation / self.period * (y @ self.centre) * effective_time)
        return rotate(y, self.axis, self.angular_speed * end)
