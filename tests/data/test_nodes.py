"""Nodes: coordinates, and the frame that directions refer to."""

import numpy as np
import pytest

from anemoi_gt.data.nodes import Nodes


def random_nodes(n=200, seed=0):
    return Nodes.from_xyz(np.random.default_rng(seed).standard_normal((n, 3)))


def test_vectors_and_angles_are_inverse():
    nodes = random_nodes()
    again = Nodes.from_xyz(3.0 * nodes.xyz)
    np.testing.assert_allclose(again.lat, nodes.lat, atol=1e-12)
    np.testing.assert_allclose(again.lon, nodes.lon, atol=1e-12)


@pytest.mark.parametrize(("lat", "lon", "xyz"), [(0, 0, [1, 0, 0]), (0, 90, [0, 1, 0]), (90, 17, [0, 0, 1])])
def test_axes_point_where_they_should(lat, lon, xyz):
    np.testing.assert_allclose(Nodes([lat], [lon]).xyz, [xyz], atol=1e-15)


def test_east_north_and_up_are_a_right_handed_basis():
    nodes = random_nodes()
    np.testing.assert_allclose(np.cross(nodes.east, nodes.north), nodes.xyz, atol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(nodes.north, axis=1), 1)


def test_north_leads_to_the_pole_and_east_along_the_parallel():
    nodes, step = random_nodes(), 1e-6
    np.testing.assert_array_less(nodes.lat, Nodes.from_xyz(nodes.xyz + step * nodes.north).lat)
    np.testing.assert_allclose(Nodes.from_xyz(nodes.xyz + step * nodes.east).lat, nodes.lat, atol=1e-9)


def test_frame_is_what_the_shortest_rotation_to_the_north_pole_turns_to_x_and_y():
    nodes, pole = random_nodes(), np.array([0.0, 0.0, 1.0])
    for up, frame in zip(nodes.xyz, nodes.frame, strict=True):
        skew = np.cross(np.eye(3), np.cross(up, pole))  # Rodrigues, with sine and cosine put in
        rotation = np.eye(3) + skew + skew @ skew / (1 + up @ pole)
        np.testing.assert_allclose(rotation @ up, pole, atol=1e-12)
        np.testing.assert_allclose(rotation @ frame.T, np.eye(3)[:, :2], atol=1e-12)


def test_frame_is_continuous_at_the_north_pole():
    around = Nodes(np.full(8, 90 - 1e-9), np.arange(0, 360, 45))
    np.testing.assert_allclose(around.frame, np.broadcast_to(np.eye(3)[:2], (8, 2, 3)), atol=1e-10)


def test_selection_keeps_the_chosen_nodes():
    nodes = random_nodes()
    np.testing.assert_array_equal(nodes[nodes.lat > 0].xyz, nodes.xyz[nodes.lat > 0])
    np.testing.assert_array_equal(nodes[[3, 1]].lon, nodes.lon[[3, 1]])


def test_coordinates_cannot_be_changed_behind_a_graph():
    lat = np.zeros(3)
    nodes = Nodes(lat, np.zeros(3))
    lat[0] = 45
    assert nodes.lat[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        nodes.lat[0] = 45


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
def test_area_is_between_its_parallels_and_from_west_eastwards_to_east(area, expected):
    nodes = Nodes([50, 50, 50, 70, -60, 50], [0, 10, 180, 0, -90, 350])
    np.testing.assert_array_equal(nodes.inside(area), np.array(expected, dtype=bool))


@pytest.mark.parametrize("area", [None, "europe", (60, 0, 40), (60, 0, np.nan, 10), [[60, 0], [40]]])
def test_area_that_is_not_four_numbers_raises(area):
    with pytest.raises(ValueError, match="area must be four numbers, north, west, south and east in degrees, got"):
        Nodes([50], [0]).inside(area)


@pytest.mark.parametrize("area", [(40, 0, 60, 10), (40, 0, 40, 10)])
def test_area_upside_down_raises(area):
    with pytest.raises(ValueError, match="north above south, got"):
        Nodes([50], [0]).inside(area)


@pytest.mark.parametrize(("xyz", "message"), [(np.ones(3), r"\[N, 3\].*\(3,\)"), (np.zeros((2, 3)), "direction")])
def test_vectors_that_are_no_directions_raise(xyz, message):
    with pytest.raises(ValueError, match=message):
        Nodes.from_xyz(xyz)


@pytest.mark.parametrize(
    ("lat", "lon", "message"),
    [
        ([0.0, 1.0], [0.0], r"one length, got \(2,\) and \(1,\)"),
        ([[0.0]], [[0.0]], "vectors"),
        ([np.nan], [0.0], "finite"),
        ([0.0], [np.inf], "finite"),
        ([90.5], [0.0], r"\[-90, 90\].*90.5"),
    ],
)
def test_bad_coordinates_raise_and_show_what_came(lat, lon, message):
    with pytest.raises(ValueError, match=message):
        Nodes(lat, lon)
