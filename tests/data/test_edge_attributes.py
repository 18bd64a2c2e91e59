"""Edge length and direction: geometry against independent formulas."""

import numpy as np
import pytest
from support.refusals import raises, refused

from anemoi_gt.data.edge_attributes import edge_direction, edge_length, unit_std
from anemoi_gt.data.edges import nearest
from anemoi_gt.data.nodes import Nodes


def random_nodes(n, seed):
    return Nodes.from_xyz(np.random.default_rng(seed).standard_normal((n, 3)))


@pytest.fixture(scope="module")
def edges():
    source, destination = random_nodes(80, 0), random_nodes(50, 1)
    return source, destination, nearest(source, destination, 7)


def test_length_is_the_haversine_angle(edges):
    source, destination, edge_index = edges
    lat1, lon1 = source.radians[edge_index[0]].T
    lat2, lon2 = destination.radians[edge_index[1]].T
    hav = (
        np.sin((lat2 - lat1) / 2) ** 2
        + np.cos(lat1) * np.cos(lat2) * np.sin((lon2 - lon1) / 2) ** 2
    )
    np.testing.assert_allclose(edge_length(*edges)[:, 0], 2 * np.arcsin(np.sqrt(hav)), rtol=1e-12)


@pytest.mark.parametrize("angle", [1e-9, 1e-4, 90.0, 179.9999, 180.0])
def test_length_is_accurate_from_millimetres_to_the_antipode(angle):
    ends = Nodes([0.0], [0.0]), Nodes([0.0], [angle]), np.zeros((2, 1), dtype=int)
    assert edge_length(*ends).item() == pytest.approx(np.deg2rad(angle), rel=1e-7)


def test_direction_is_the_horizontal_part_of_the_source_rotated_with_its_destination_to_the_pole(
    edges,
):
    """By Rodrigues' formula, as in anemoi-graphs; this implies length 1."""
    source, destination, edge_index = edges
    pole = np.array([0.0, 0.0, 1.0])
    for (s, d), direction in zip(edge_index.T, edge_direction(*edges), strict=True):
        up, x = destination.xyz[d], source.xyz[s]
        axis = np.cross(up, pole) / np.linalg.norm(np.cross(up, pole))
        angle = np.arccos(up @ pole)
        rotated = (
            x * np.cos(angle)
            + np.cross(axis, x) * np.sin(angle)
            + axis * (axis @ x) * (1 - np.cos(angle))
        )
        np.testing.assert_allclose(direction, rotated[:2] / np.hypot(*rotated[:2]), atol=1e-9)


def test_edge_to_the_same_point_or_the_antipode_has_direction_zero():
    nodes = Nodes([12.0, -12.0], [34.0, 214.0])
    np.testing.assert_array_equal(
        edge_direction(nodes, nodes, np.array([[0, 1], [0, 0]])), np.zeros((2, 2))
    )


def test_unit_std_scales_to_standard_deviation_one_and_keeps_constant_values():
    for values in (np.random.default_rng(0).normal(3, 7, (50, 2)), np.arange(4.0)[:, None]):
        np.testing.assert_allclose(unit_std(values), values / values.std(ddof=1))
    for shape in ((5, 1), (1, 1), (0, 2)):
        np.testing.assert_array_equal(unit_std(np.ones(shape)), np.ones(shape))


@pytest.mark.parametrize("attribute", [edge_length, edge_direction])
@refused(
    (np.zeros((3, 2), dtype=int), r"\[2, E\].*\(3, 2\)"),
    (np.array([[0, 80], [0, 0]]), r"must hold source nodes in \[0, 80\), got 0 to 80"),
    (np.array([[0, 1], [-1, 3]]), r"must hold destination nodes in \[0, 50\), got -1 to 3"),
)
def test_edge_index_out_of_range_raises(attribute, wrong, message):
    raises(lambda: attribute(random_nodes(80, 0), random_nodes(50, 1), wrong), message)
