"""Flows: the closed form against the published wind, integrated in time."""

import numpy as np
import pytest

from anemoi_gt.data.flows import SECONDS_PER_HOUR, Flow, rotate
from anemoi_gt.data.grids import gaussian_latitudes, reduced_gaussian
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes
from anemoi_gt.data.sphere import Hills

X, Y, Z = np.eye(3)
PERIOD = 288.0
RADIANS_PER_HOUR = SECONDS_PER_HOUR / EARTH_RADIUS  # of 1 m/s


def published_wind(lat, lon, time, k):
    """Nair and Lauritzen (2010), case 4, in their words: u, v in radians per hour, times the radius."""
    moving = lon - 2 * np.pi * time / PERIOD
    fade = np.cos(np.pi * time / PERIOD)
    u = k * np.sin(moving) ** 2 * np.sin(2 * lat) * fade + 2 * np.pi / PERIOD * np.cos(lat)
    v = k * np.sin(2 * moving) * np.cos(lat) * fade
    return u, v


def published_velocity(xyz, time, k):
    nodes = Nodes.from_xyz(xyz)
    u, v = published_wind(*nodes.radians.T, time, k)
    return u[:, None] * nodes.east + v[:, None] * nodes.north


def integrate(xyz, start, end, k, steps):
    """Runge-Kutta of fourth order, back on the sphere after each step."""
    dt = (end - start) / steps
    for time in start + dt * np.arange(steps):
        k1 = published_velocity(xyz, time, k)
        k2 = published_velocity(xyz + dt / 2 * k1, time + dt / 2, k)
        k3 = published_velocity(xyz + dt / 2 * k2, time + dt / 2, k)
        k4 = published_velocity(xyz + dt * k3, time + dt, k)
        xyz = xyz + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        xyz /= np.linalg.norm(xyz, axis=1, keepdims=True)
    return xyz


def random_points(n=100, seed=0):
    return Nodes.from_xyz(np.random.default_rng(seed).standard_normal((n, 3))).xyz


def random_flow(seed=1, **options):
    frame, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))
    return Flow(frame[:, 0], frame[:, 1], **options)


@pytest.mark.parametrize("deformation", [0.0, 10.0])
@pytest.mark.parametrize("time", [0.0, 31.0, 144.0, 250.0])
def test_wind_is_the_published_one(deformation, time):
    xyz = random_points()
    expected = published_velocity(xyz, time, deformation / PERIOD) / RADIANS_PER_HOUR
    np.testing.assert_allclose(Flow(Z, Y, deformation).wind(xyz, time), expected, atol=1e-11)


@pytest.mark.parametrize(("start", "end"), [(0.0, 24.0), (200.0, 224.0), (120.0, 60.0), (0.0, 288.0)])
def test_closed_trajectories_are_those_of_the_published_wind(start, end):
    xyz = random_points()
    expected = integrate(xyz, start, end, 10 / PERIOD, steps=round(abs(end - start) * 4))
    np.testing.assert_allclose(Flow(Z, Y).transport(xyz, start, end), expected, atol=1e-6)


@pytest.mark.parametrize("deformation", [0.0, 10.0])
def test_velocity_is_the_derivative_of_the_trajectory(deformation):
    flow, xyz, time, dt = random_flow(deformation=deformation), random_points(), 77.0, 1e-3
    derivative = (flow.transport(xyz, time, time + dt) - flow.transport(xyz, time, time - dt)) / (2 * dt)
    np.testing.assert_allclose(derivative, flow.wind(xyz, time) * RADIANS_PER_HOUR, atol=1e-9)


@pytest.mark.parametrize("deformation", [0.0, 10.0, 40.0])
def test_every_particle_is_back_after_a_period(deformation):
    xyz = random_points()
    np.testing.assert_allclose(random_flow(deformation=deformation).transport(xyz, 0, PERIOD), xyz, atol=1e-13)


def test_deformation_is_far_from_the_start_at_half_time():
    xyz, flow = random_points(), random_flow()
    only_turned = Flow(flow.axis, flow.centre, deformation=0.0).transport(xyz, 0, PERIOD / 2)
    assert np.linalg.norm(flow.transport(xyz, 0, PERIOD / 2) - only_turned, axis=1).mean() > 0.5


def test_trajectories_compose_and_reverse():
    flow, xyz = random_flow(), random_points()
    there = flow.transport(flow.transport(xyz, 10, 60), 60, 170)
    np.testing.assert_allclose(there, flow.transport(xyz, 10, 170), atol=1e-13)
    np.testing.assert_allclose(flow.transport(there, 170, 10), xyz, atol=1e-13)


def test_wind_is_horizontal():
    xyz = random_points()
    np.testing.assert_allclose((random_flow().wind(xyz, 50) * xyz).sum(axis=1), 0, atol=1e-12)


def test_solid_body_rotation_blows_at_its_speed_around_its_axis():
    flow = random_flow(deformation=0.0)
    xyz = random_points()
    distance_to_axis = np.linalg.norm(np.cross(flow.axis, xyz), axis=1)
    speed = 2 * np.pi * EARTH_RADIUS / (PERIOD * SECONDS_PER_HOUR)  # 38.6 m/s
    np.testing.assert_allclose(np.linalg.norm(flow.wind(xyz, 9), axis=1), speed * distance_to_axis)


@pytest.mark.parametrize("hours", [24.0, 72.0, 144.0])
def test_wind_without_divergence_keeps_the_mass_and_the_extrema_of_a_tracer(hours):
    nodes, quadrature = gaussian_grid(120)
    hills = Hills(np.stack([X, -Y]), np.array([1.0, 0.5]), np.array([5.0, 10.0]))
    start, end = (hills(random_flow().transport(nodes.xyz, time, 0)) for time in (0.0, hours))
    assert np.average(end, weights=quadrature) == pytest.approx(np.average(start, weights=quadrature), rel=1e-9)
    assert np.average(end**2, weights=quadrature) == pytest.approx(np.average(start**2, weights=quadrature), rel=1e-9)
    assert end.min() > 0 and end.max() <= hills(np.stack([X, -Y])).max()


def gaussian_grid(rows):
    """A full Gaussian grid and its quadrature weights."""
    nodes = reduced_gaussian(np.full(rows, 2 * rows))
    slope = np.polynomial.legendre.legder([0] * rows + [1])
    roots = np.sin(np.deg2rad(gaussian_latitudes(rows)))
    weights = 2 / ((1 - roots**2) * np.polynomial.legendre.legval(roots, slope) ** 2)
    return nodes, np.repeat(weights, 2 * rows)


def test_rotation_is_anticlockwise_seen_from_the_tip_of_the_axis():
    np.testing.assert_allclose(rotate(X[None], Z, np.pi / 2), [Y], atol=1e-15)
    np.testing.assert_allclose(rotate(np.stack([X, X]), Z, np.array([0, np.pi])), [X, -X], atol=1e-15)


@pytest.mark.parametrize(("axis", "centre"), [(2 * Z, Y), (Z, Z), (Z, (Y + Z) / np.sqrt(2))])
def test_axis_and_centre_that_are_not_orthonormal_raise(axis, centre):
    with pytest.raises(ValueError, match="unit vectors at right angles"):
        Flow(axis, centre)


@pytest.mark.parametrize("period", [0.0, -1.0, np.nan])
def test_period_that_is_not_positive_raises(period):
    with pytest.raises(ValueError, match="period must be positive"):
        Flow(Z, Y, period=period)
