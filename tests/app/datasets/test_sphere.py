"""The sphere data set: flows against the published wind integrated in time, and exact, held-out samples."""

import numpy as np
import pytest
import torch
from support.refusals import raises, refused

from anemoi_gt.app.datasets import sphere_advection
from anemoi_gt.app.datasets.sphere_advection import (
    SECONDS_PER_HOUR,
    Case,
    Flow,
    Hills,
    rotate,
    sphere,
)
from anemoi_gt.data.grids import gaussian_latitudes, octahedral, reduced_gaussian
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes, area_weights

X, Y, Z = np.eye(3)
PERIOD = 288.0
RADIANS_PER_HOUR = SECONDS_PER_HOUR / EARTH_RADIUS  # of 1 m/s
SIZES = {"train_size": 24, "valid_size": 4, "test_size": 6}


def published_velocity(xyz, time, k):
    """Nair and Lauritzen (2010), case 4, in their formulas; radians per hour."""
    nodes = Nodes.from_xyz(xyz)
    lat, lon = nodes.radians.T
    moving, decay = lon - 2 * np.pi * time / PERIOD, np.cos(np.pi * time / PERIOD)
    u = k * np.sin(moving) ** 2 * np.sin(2 * lat) * decay + 2 * np.pi / PERIOD * np.cos(lat)
    v = k * np.sin(2 * moving) * np.cos(lat) * decay
    return u[:, None] * nodes.east + v[:, None] * nodes.north


def integrate(xyz, start, end, k, steps):
    """Fourth-order Runge-Kutta, normalised to the sphere after each step."""
    dt = (end - start) / steps
    for time in start + dt * np.arange(steps):
        k1 = published_velocity(xyz, time, k)
        k2 = published_velocity(xyz + dt / 2 * k1, time + dt / 2, k)
        k3 = published_velocity(xyz + dt / 2 * k2, time + dt / 2, k)
        k4 = published_velocity(xyz + dt * k3, time + dt, k)
        xyz = xyz + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        xyz /= np.linalg.norm(xyz, axis=1, keepdims=True)
    return xyz


@pytest.fixture(scope="module")
def xyz():
    return Nodes.from_xyz(np.random.default_rng(0).standard_normal((100, 3))).xyz


def random_flow(**options):
    frame, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))
    return Flow(frame[:, 0], frame[:, 1], **options)


@pytest.mark.parametrize("deformation", [0.0, 10.0])
@pytest.mark.parametrize("time", [0.0, 31.0, 144.0, 250.0])
def test_wind_is_the_published_one(xyz, deformation, time):
    expected = published_velocity(xyz, time, deformation / PERIOD) / RADIANS_PER_HOUR
    np.testing.assert_allclose(Flow(Z, Y, deformation).wind(xyz, time), expected, atol=1e-11)


@pytest.mark.parametrize(
    ("start", "end"), [(0.0, 24.0), (200.0, 224.0), (120.0, 60.0), (0.0, 288.0)]
)
def test_closed_form_trajectories_follow_the_published_wind(xyz, start, end):
    expected = integrate(xyz, start, end, 10 / PERIOD, steps=round(abs(end - start) * 4))
    np.testing.assert_allclose(Flow(Z, Y).transport(xyz, start, end), expected, atol=1e-6)


@pytest.mark.parametrize("deformation", [0.0, 10.0])
def test_wind_is_horizontal_and_the_derivative_of_the_trajectory(xyz, deformation):
    flow, time, dt = random_flow(deformation=deformation), 77.0, 1e-3
    derivative = (flow.transport(xyz, time, time + dt) - flow.transport(xyz, time, time - dt)) / (
        2 * dt
    )
    np.testing.assert_allclose(derivative, flow.wind(xyz, time) * RADIANS_PER_HOUR, atol=1e-9)
    np.testing.assert_allclose((flow.wind(xyz, time) * xyz).sum(axis=1), 0, atol=1e-12)


@pytest.mark.parametrize("deformation", [0.0, 10.0, 40.0])
def test_every_particle_returns_after_a_period_from_far_at_half_of_it(xyz, deformation):
    flow, rotation = random_flow(deformation=deformation), random_flow(deformation=0.0)
    np.testing.assert_allclose(flow.transport(xyz, 0, PERIOD), xyz, atol=1e-13)
    apart = flow.transport(xyz, 0, PERIOD / 2) - rotation.transport(xyz, 0, PERIOD / 2)
    assert (np.linalg.norm(apart, axis=1).mean() > 0.5) == (deformation > 0)


def gaussian_grid(rows):
    """A full Gaussian grid and its quadrature weights."""
    nodes = reduced_gaussian(np.full(rows, 2 * rows))
    slope = np.polynomial.legendre.legder([0] * rows + [1])
    roots = np.sin(np.deg2rad(gaussian_latitudes(rows)))
    weights = 2 / ((1 - roots**2) * np.polynomial.legendre.legval(roots, slope) ** 2)
    return nodes, np.repeat(weights, 2 * rows)


@pytest.mark.parametrize("hours", [24.0, 72.0, 144.0])
def test_divergence_free_wind_conserves_mass_and_bounds_of_a_tracer(hours):
    nodes, quadrature = gaussian_grid(120)
    hills = Hills(np.stack([X, -Y]), np.array([1.0, 0.5]), np.array([5.0, 10.0]))
    start, end = (hills(random_flow().transport(nodes.xyz, time, 0)) for time in (0.0, hours))
    assert np.average(end, weights=quadrature) == pytest.approx(
        np.average(start, weights=quadrature), rel=1e-9
    )
    assert np.average(end**2, weights=quadrature) == pytest.approx(
        np.average(start**2, weights=quadrature), rel=1e-9
    )
    assert end.min() > 0
    assert end.max() <= hills(np.stack([X, -Y])).max()


def test_rotation_is_anticlockwise_seen_from_the_tip_of_the_axis():
    np.testing.assert_allclose(rotate(X[None], Z, np.pi / 2), [Y], atol=1e-15)
    np.testing.assert_allclose(
        rotate(np.stack([X, X]), Z, np.array([0, np.pi])), [X, -X], atol=1e-15
    )


@refused(
    *(
        (pair, PERIOD, "orthogonal unit vectors")
        for pair in ((2 * Z, Y), (Z, Z), (Z, (Y + Z) / np.sqrt(2)))
    ),
    *(((Z, Y), period, "period must be positive") for period in (0.0, -1.0, np.nan)),
)
def test_invalid_flow_raises(wrong, message):
    vectors, period = wrong
    raises(lambda: Flow(*vectors, period=period), message)


def test_tracer_in_solid_body_rotation_is_the_rotated_tracer():
    case = Case(Flow(Z, Y, 0.0), Hills(np.eye(3), np.ones(3), np.full(3, 5.0)), 7.0)
    xyz, hours = octahedral(16).xyz, 30.0
    expected = case.hills(rotate(xyz, Z, -2 * np.pi * hours / PERIOD))
    np.testing.assert_allclose(case.tracer(xyz, hours), expected, atol=1e-13)
    np.testing.assert_allclose(case.tracer(xyz, PERIOD), case.hills(xyz), atol=1e-13)


@pytest.fixture(scope="module")
def splits():
    return sphere("O12", **SIZES)


def test_samples_follow_only_from_seed_and_index(splits):
    for part, same in zip(
        splits, sphere("O12", train_size=24, valid_size=9, test_size=9), strict=True
    ):
        for i in (3, 0):
            torch.testing.assert_close(part[i], same[i], rtol=0, atol=0)
    assert not torch.allclose(
        splits.train[0].inputs, sphere("O12", **SIZES, seed=1).train[0].inputs, atol=0.1
    )


def test_fields_that_are_computed_in_blocks_have_the_same_bits(splits):
    case = splits.train.case(1)
    nodes = np.random.default_rng(0).standard_normal((2 * sphere_advection.BLOCK + 5, 3))
    nodes /= np.linalg.norm(nodes, axis=1, keepdims=True)
    for field in (lambda xyz: case.tracer(xyz, 6), lambda xyz: case.flow.wind(xyz, 6)):
        np.testing.assert_array_equal(sphere_advection.in_blocks(field, nodes), field(nodes))


def test_no_two_samples_share_a_flow(splits):
    axes = np.stack([part.case(i).flow.axis for part in splits for i in range(len(part))])
    assert (axes @ axes.T - np.eye(len(axes))).max() < 1 - 1e-6


@pytest.mark.parametrize(
    ("flows", "deformations"),
    [(["rotation", "deformation"], {0.0, 10.0}), (["rotation"], {0.0}), (["deformation"], {10.0})],
)
def test_flows_are_drawn_from_the_given_kinds_and_named_in_the_title(flows, deformations):
    part = sphere("O8", flows=flows, lead_time=36, **SIZES).train
    assert {part.case(i).flow.deformation for i in range(len(part))} == deformations
    assert (
        part.title(0)
        == f"{'deformational flow' if part.case(0).flow.deformation else 'solid-body rotation'}, "
        "36 h"
    )


def test_inputs_are_of_order_one_and_as_named(splits):
    inputs = torch.stack([sample.inputs for sample in splits.train])
    assert inputs.shape == (24, len(octahedral(12)), splits.train.in_channels)
    assert inputs.dtype == torch.float32
    std = inputs[..., :5].flatten(0, 1).std(dim=0)
    assert ((std > 0.5) & (std < 2)).all()
    # sine and cosine of latitude
    np.testing.assert_allclose(inputs[3, :, 5:7].square().sum(-1), 1, rtol=1e-6)
    tracer = (
        inputs[2, :, 0] * splits.train.statistics.tracer_std + splits.train.statistics.tracer_mean
    )
    torch.testing.assert_close(tracer[:, None], splits.train.present(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("channel", "hours"), [(1, 0.0), (3, 12.0)])
def test_wind_channels_are_the_wind_in_the_frame_of_the_edges(splits, channel, hours):
    train = splits.train
    i = next(i for i in range(len(train)) if train.case(i).flow.deformation)  # a wind that changes
    case = train.case(i)
    components = (
        train.inputs(i)[:, channel : channel + 2].double().numpy() * train.statistics.wind_std
    )
    wind = np.einsum("ni,nid->nd", components, train.nodes.frame)
    np.testing.assert_allclose(wind, case.flow.wind(train.nodes.xyz, case.start + hours), atol=1e-4)


def test_normalisation_is_from_the_training_samples_and_weights_are_areas(splits):
    assert splits.train.statistics is splits.valid.statistics is splits.test.statistics
    change = torch.stack([splits.train[i].target for i in range(24)])
    assert change.square().mean().sqrt().item() == pytest.approx(1, rel=1e-3)
    np.testing.assert_allclose(splits.test.weights, area_weights(octahedral(12)), rtol=1e-6)


@refused(
    ({"flows": ["vortex"]}, r"one or more of rotation, deformation, got \['vortex'\]"),
    ({"flows": []}, "one or more of"),
    ({"lead_time": 0.0}, "lead_time must be positive and finite, in hours, got 0"),
    ({"test_size": 0}, "test_size must be at least 1, got 0"),
    ({"grid_name": "F32"}, 'such as "O96"'),
)
def test_option_out_of_range_raises(wrong, message):
    raises(lambda: sphere(**{"grid_name": "O8", **SIZES, **wrong}), message)
