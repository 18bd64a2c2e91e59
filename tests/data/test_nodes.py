"""Nodes: coordinates, the tangent frame of directions, and area weights."""

from functools import cache

import numpy as np
import pytest
from support.refusals import raises, refused

from anemoi_gt.data import nodes as nodes_module
from anemoi_gt.data.grids import classic, octahedral, regional
from anemoi_gt.data.meshes import icosphere
from anemoi_gt.data.nodes import Nodes, area_weights, row_weights


@pytest.fixture(scope="module")
def nodes():
    return Nodes.from_xyz(np.random.default_rng(0).standard_normal((200, 3)))


def test_vectors_and_angles_are_inverse(nodes):
    again = Nodes.from_xyz(3.0 * nodes.xyz)
    np.testing.assert_allclose(again.lat, nodes.lat, atol=1e-12)
    np.testing.assert_allclose(again.lon, nodes.lon, atol=1e-12)


@pytest.mark.parametrize(
    ("lat", "lon", "xyz"), [(0, 0, [1, 0, 0]), (0, 90, [0, 1, 0]), (90, 17, [0, 0, 1])]
)
def test_xyz_axes_point_to_greenwich_90_east_and_the_north_pole(lat, lon, xyz):
    np.testing.assert_allclose(Nodes([lat], [lon]).xyz, [xyz], atol=1e-15)


def test_east_north_and_up_are_a_right_handed_orthonormal_basis(nodes):
    np.testing.assert_allclose(np.cross(nodes.east, nodes.north), nodes.xyz, atol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(nodes.north, axis=1), 1)
    step = 1e-6
    np.testing.assert_array_less(nodes.lat, Nodes.from_xyz(nodes.xyz + step * nodes.north).lat)
    np.testing.assert_allclose(
        Nodes.from_xyz(nodes.xyz + step * nodes.east).lat, nodes.lat, atol=1e-9
    )


def test_frame_is_rotated_to_x_and_y_by_the_shortest_rotation_to_the_north_pole(nodes):
    pole = np.array([0.0, 0.0, 1.0])
    for up, frame in zip(nodes.xyz, nodes.frame, strict=True):
        skew = np.cross(np.eye(3), np.cross(up, pole))  # Rodrigues' formula
        rotation = np.eye(3) + skew + skew @ skew / (1 + up @ pole)
        np.testing.assert_allclose(rotation @ up, pole, atol=1e-12)
        np.testing.assert_allclose(rotation @ frame.T, np.eye(3)[:, :2], atol=1e-12)


def test_frame_is_continuous_at_the_north_pole():
    around = Nodes(np.full(8, 90 - 1e-9), np.arange(0, 360, 45))
    np.testing.assert_allclose(around.frame, np.broadcast_to(np.eye(3)[:2], (8, 2, 3)), atol=1e-10)


def test_coordinates_are_copied_and_read_only():
    lat = np.zeros(3)
    nodes = Nodes(lat, np.zeros(3))
    lat[0] = 45
    with pytest.raises(ValueError, match="read-only"):
        nodes.lat[0] = 45
    assert nodes.lat[0] == 0


@pytest.mark.parametrize(
    ("area", "expected"),
    [
        ((60, -10, 40, 10), [1, 1, 0, 0, 0, 1]),
        ((60, 350, 40, 370), [1, 1, 0, 0, 0, 1]),
        ((60, 170, 40, -170), [0, 0, 1, 0, 0, 0]),
        ((50, 0, 50 - 1e-9, 10), [1, 1, 0, 0, 0, 0]),
        ((60, -180, 40, 180), [1, 1, 1, 0, 0, 1]),
        ((90, 5, -90, 5), [1, 1, 1, 1, 1, 1]),
        ((90, -170, -90, -10), [0, 0, 0, 0, 1, 1]),
    ],
)
def test_area_lies_between_its_parallels_and_from_west_eastwards_to_east(area, expected):
    nodes = Nodes([50, 50, 50, 70, -60, 50], [0, 10, 180, 0, -90, 350])
    np.testing.assert_array_equal(nodes.inside(area), np.array(expected, dtype=bool))


FOUR_NUMBERS = "area must be four numbers, north, west, south and east"
AREAS = (None, (60, 0, 40), (60, 0, np.nan, 10))


@refused(
    *((Nodes([50], [0]).inside, [area], f"{FOUR_NUMBERS} in degrees, got") for area in AREAS),
    *(
        (Nodes([50], [0]).inside, [(40, 0, north, 10)], "north above south, got")
        for north in (60, 40)
    ),
    (Nodes.from_xyz, [np.ones(3)], r"\[N, 3\].*\(3,\)"),
    (Nodes.from_xyz, [np.zeros((2, 3))], "nonzero length"),
    (Nodes, ([0.0, 1.0], [0.0]), r"equal length, got \(2,\) and \(1,\)"),
    (Nodes, ([[0.0]], [[0.0]]), "vectors"),
    *((Nodes, ends, "finite") for ends in (([np.nan], [0.0]), ([0.0], [np.inf]))),
    (Nodes, ([90.5], [0.0]), r"\[-90, 90\].*90.5"),
    (area_weights, [Nodes([0.0, 0, 90, -90, 0], [0.0, 90, 0, 0, 0])], "[Dd]uplicate"),
)
def test_invalid_coordinates_and_areas_raise(wrong, message):
    call, options = wrong
    raises(lambda: call(*options), message)


@pytest.mark.parametrize(
    "nodes", [octahedral(32), icosphere(4).nodes], ids=["octahedral", "icosphere"]
)
def test_area_weighted_mean_is_the_integral_over_the_globe(nodes):
    weights, (x, y, z) = area_weights(nodes), nodes.xyz.T
    assert weights.min() > 0
    assert weights.mean() == pytest.approx(1, rel=1e-14)
    for values, integral in (
        (z, pytest.approx(0, abs=1e-10)),
        (z**2, pytest.approx(1 / 3, rel=2e-3)),
        (x**2 * y**2, pytest.approx(1 / 15, rel=4e-3)),
    ):
        assert np.average(values, weights=weights) == integral


def test_area_of_a_gaussian_row_is_its_quadrature_weight():
    nodes = octahedral(24)
    _, row = np.unique(-nodes.lat, return_inverse=True)
    _, quadrature = np.polynomial.legendre.leggauss(48)
    share = np.bincount(row, area_weights(nodes)) / len(nodes)
    # Voronoi cells differ at the poles
    np.testing.assert_allclose(share[1:-1], quadrature[1:-1] / 2, rtol=3e-2)
    np.testing.assert_allclose(share.sum(), 1)


def test_large_grids_in_rows_have_the_areas_of_bands_and_others_of_cells(monkeypatch):
    grid, mesh = octahedral(48), icosphere(4).nodes
    cells = [area_weights(nodes) for nodes in (grid, mesh)]
    monkeypatch.setattr(nodes_module, "LARGE", 1000)
    np.testing.assert_allclose(area_weights(grid), cells[0], rtol=7e-3)
    assert len(np.unique(area_weights(grid))) <= 96 < len(np.unique(cells[0]))
    np.testing.assert_array_equal(area_weights(mesh), cells[1])


GRIDS = {
    "regular": regional(np.linspace(88, -88, 45), np.arange(0, 360, 4.0)),
    "with poles": regional(np.linspace(90, -90, 46), np.arange(0, 360, 4.0)),
    "closed": regional(np.linspace(88, -88, 45), np.arange(-180, 181, 4.0)),
    "octahedral": octahedral(48),
    "classic": classic(48),
}


@cache
def cells_of(name):
    """Return the areas of the cells of a global grid."""
    nodes = GRIDS[name]
    if name.startswith(("octahedral", "classic")):
        return area_weights(nodes)
    lower, upper = (np.clip(nodes.lat + side, -90, 90) for side in (-2, 2))
    return np.sin(np.deg2rad(upper)) - np.sin(np.deg2rad(lower))


def islands(nodes):
    """Return which points lie on one of nine islands."""
    centres = np.random.default_rng(0).normal(size=(3, 9))
    return (nodes.xyz @ centres > 1.6).any(axis=1)


PARTS = {
    "all": lambda nodes: np.ones(len(nodes), dtype=bool),
    "region across Greenwich": lambda nodes: nodes.inside((60, -30, -20, 50)),
    "islands": islands,
    "without some rows": lambda nodes: (np.abs(nodes.lat - 50) > 9) & (nodes.lon % 360 < 200),
    "every second point": lambda nodes: np.random.default_rng(0).random(len(nodes)) < 0.5,
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", GRIDS)
def test_weights_of_a_part_of_a_grid_are_the_areas_of_its_cells(name, part):
    inside = PARTS[part](GRIDS[name])
    assert inside.sum() > 30
    nodes, cells = GRIDS[name][inside], cells_of(name)[inside]
    ratio = row_weights(nodes) / cells
    ratio /= np.median(ratio)
    is_off = np.abs(ratio - 1) > 0.03
    # in a row of a reduced grid with one or two points, the spacing is unknown
    assert is_off.mean() <= (0.01 if name in ("octahedral", "classic") else 0)
    assert ratio.max() < 8


def test_a_single_point_at_a_pole_has_the_cap():
    grid = regional(np.linspace(80, -80, 17), np.arange(0, 360, 10.0))
    nodes = Nodes([*grid.lat, 90.0, -90.0], [*grid.lon, 0.0, 0.0])
    np.testing.assert_allclose(row_weights(nodes), area_weights(nodes), rtol=2e-2)


def symmetric_projection():
    """Return points of a conical projection: each latitude twice, at both sides."""
    x, y = np.meshgrid(np.linspace(-10, 10, 20), np.linspace(40, 60, 21))
    return Nodes((y - 0.02 * x**2).ravel(), (x / np.cos(np.deg2rad(y))).ravel())


def stations():
    """Return points at random, rounded to hundredths of degrees."""
    vectors = Nodes.from_xyz(np.random.default_rng(0).standard_normal((50_000, 3)))
    return Nodes(vectors.lat.round(2), vectors.lon.round(2))


@pytest.mark.parametrize(
    "nodes",
    [*(icosphere(r).nodes for r in (1, 2, 3, 4)), symmetric_projection(), stations()],
    ids=["mesh 1", "mesh 2", "mesh 3", "mesh 4", "projection", "stations"],
)
def test_points_that_share_latitudes_by_symmetry_or_rounding_are_no_grid_in_rows(nodes):
    assert len(np.unique(nodes.lat.round(4))) <= len(nodes) / 2
    assert row_weights(nodes) is None
