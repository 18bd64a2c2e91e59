"""Edge length and direction: geometry against independent formulas."""

import numpy as np
import pytest

from anemoi_gt.data.edge_attributes import edge_direction, edge_length, unit_std
from anemoi_gt.data.edges import nearest
from anemoi_gt.data.meshes import icosphere
from anemoi_gt.data.nodes import Nodes


def random_nodes(n, seed):
    return Nodes.from_xyz(np.random.default_rng(seed).standard_normal((n, 3)))


@pytest.fixture(scope="module")
def edges():
    source, destination = random_nodes(80, 0), random_nodes(50, 1)
    return source, destination, nearest(source, destination, 7)


def test_length_is_the_haversine_angle(edges):
    source, destination, edge_index = edges
    (lat1, lon1), (lat2, lon2) = source.radians[edge_index[0]].T, destination.radians[edge_index[1]].T
    hav = np.sin((lat2 - lat1) / 2) ** 2 + np.cos(lat1) * np.cos(lat2) * np.sin((lon2 - lon1) / 2) ** 2
    np.testing.assert_allclose(edge_length(*edges)[:, 0], 2 * np.arcsin(np.sqrt(hav)), rtol=1e-12)


@pytest.mark.parametrize("angle", [1e-9, 1e-4, 90.0, 179.9999, 180.0])
def test_length_is_exact_from_a_millimetre_to_the_antipode(angle):
    ends = Nodes([0.0], [0.0]), Nodes([0.0], [angle]), np.zeros((2, 1), dtype=int)
    assert edge_length(*ends).item() == pytest.approx(np.deg2rad(angle), rel=1e-7)


def test_direction_is_where_the_rotated_source_lies(edges):
    """Turn the destination to the north pole by Rodrigues' formula, as anemoi-graphs does, and look from above."""
    source, destination, edge_index = edges
    pole = np.array([0.0, 0.0, 1.0])
    for (s, d), direction in zip(edge_index.T, edge_direction(*edges), strict=True):
        up, x = destination.xyz[d], source.xyz[s]
        axis = np.cross(up, pole) / np.linalg.norm(np.cross(up, pole))
        angle = np.arccos(up @ pole)
        turned = x * np.cos(angle) + np.cross(axis, x) * np.sin(angle) + axis * (axis @ x) * (1 - np.cos(angle))
        np.testing.assert_allclose(direction, turned[:2] / np.hypot(*turned[:2]), atol=1e-9)


def test_direction_has_length_one(edges):
    np.testing.assert_allclose(np.linalg.norm(edge_direction(*edges), axis=1), 1, rtol=1e-14)


def test_attributes_survive_a_shift_of_longitude_up_to_its_rotation(edges):
    """Turned about the earth's axis, lengths stay and directions turn along."""
    source, destination, edge_index = edges
    shift = 33.0
    moved = Nodes(source.lat, source.lon + shift), Nodes(destination.lat, destination.lon + shift), edge_index
    cos, sin = np.cos(np.deg2rad(shift)), np.sin(np.deg2rad(shift))
    np.testing.assert_allclose(edge_length(*moved), edge_length(*edges), rtol=1e-12)
    turned = edge_direction(*edges) @ np.array([[cos, sin], [-sin, cos]])
    np.testing.assert_allclose(edge_direction(*moved), turned, atol=1e-12)


def test_edge_to_itself_or_to_its_antipode_has_no_direction():
    nodes = Nodes([12.0, -12.0], [34.0, 214.0])
    np.testing.assert_array_equal(edge_direction(nodes, nodes, np.array([[0, 1], [0, 0]])), np.zeros((2, 2)))


def test_neighbours_of_a_mesh_node_surround_it():
    mesh = icosphere(3, levels=(3,))
    total = np.zeros((len(mesh.nodes), 2))
    np.add.at(total, mesh.edge_index[1], edge_direction(mesh.nodes, mesh.nodes, mesh.edge_index))
    assert np.linalg.norm(total, axis=1).max() < 0.6  # six unit vectors that nearly cancel; the poles are among them


@pytest.mark.parametrize("values", [np.random.default_rng(0).normal(3, 7, (50, 2)), np.arange(4.0)[:, None]])
def test_scaled_values_have_standard_deviation_one_and_keep_their_ratios(values):
    scaled = unit_std(values)
    assert scaled.std(ddof=1) == pytest.approx(1)
    np.testing.assert_allclose(scaled * values[1, 0], values * scaled[1, 0])


@pytest.mark.parametrize("values", [np.ones((5, 1)), np.ones((1, 1)), np.ones((0, 2))])
def test_values_without_spread_are_left_alone(values):
    np.testing.assert_array_equal(unit_std(values), values)


@pytest.mark.parametrize("attribute", [edge_length, edge_direction])
@pytest.mark.parametrize(
    ("edge_index", "message"),
    [
        (np.zeros((3, 2), dtype=int), r"\[2, E\].*\(3, 2\)"),
        (np.array([[0, 80], [0, 0]]), r"must name source nodes in \[0, 80\), got 0 to 80"),
        (np.array([[0, 1], [-1, 3]]), r"must name destination nodes in \[0, 50\), got -1 to 3"),
    ],
)
def test_edges_between_nodes_that_are_not_there_raise(attribute, edge_index, message):
    with pytest.raises(ValueError, match=message):
        attribute(random_nodes(80, 0), random_nodes(50, 1), edge_index)
