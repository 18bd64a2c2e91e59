"""Icosphere: counts, order and edges of refined icosahedra."""

import numpy as np
import pytest

from anemoi_gt.data.icosphere import icosphere


@pytest.mark.parametrize("refinement", [1, 2, 3, 5, 6])
def test_refined_icosahedron_has_its_counts(refinement):
    mesh = icosphere(refinement)
    assert len(mesh.nodes) == 10 * 4**refinement + 2
    assert mesh.edge_index.shape == (2, sum(60 * 4**level for level in range(1, refinement + 1)))


@pytest.mark.parametrize("level", [0, 1, 4])
def test_one_level_is_a_triangulation_of_the_sphere(level):
    mesh = icosphere(4, levels=(level,))
    degree = np.bincount(mesh.edge_index[1], minlength=len(mesh.nodes))
    vertices = 10 * 4**level + 2
    assert (degree == 5).sum() == 12  # the corners of the icosahedron stay what they are
    assert (degree == 6).sum() == vertices - 12
    assert (degree == 0).sum() == len(mesh.nodes) - vertices
    assert vertices - mesh.edge_index.shape[1] // 2 + 20 * 4**level == 2  # Euler's formula


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_edges_of_one_level_are_nearly_equally_long(level):
    mesh = icosphere(3, levels=(level,))
    source, destination = mesh.nodes.xyz[mesh.edge_index]
    angle = np.arccos((source * destination).sum(-1))
    expected = np.arctan(2) / 2**level  # of the icosahedron, halved each time
    assert angle.max() < 1.2 * expected and angle.min() > 0.85 * expected


def test_new_vertices_lie_halfway_between_neighbours_of_the_level_before():
    coarse, fine = icosphere(2, levels=(2,)), icosphere(3)
    middle = coarse.nodes.xyz[coarse.edge_index].sum(axis=0)
    middle /= np.linalg.norm(middle, axis=1, keepdims=True)
    expected = np.concatenate([coarse.nodes.xyz, middle])
    to_expected = np.linalg.norm(fine.nodes.xyz[:, None] - expected, axis=-1).min(axis=1)
    assert to_expected.max() < 1e-14


def test_corner_edges_are_exactly_those_of_the_icosahedron():
    mesh = icosphere(2, levels=(0,))
    source, destination = mesh.nodes.xyz[mesh.edge_index]
    np.testing.assert_allclose((source * destination).sum(-1), 1 / np.sqrt(5), rtol=1e-14)


def test_nodes_go_south_and_west_along_a_parallel():
    lat, lon = icosphere(4).nodes.radians.astype(np.float32).T
    assert (np.diff(lat) <= 0).all()
    assert (np.diff(lon)[np.diff(lat) == 0] < 0).all()


def test_mesh_stands_as_that_of_anemoi_graphs():
    """The golden rectangles lie in the coordinate planes: a vertex of the icosahedron at (0, 1, golden ratio)."""
    mesh = icosphere(1, levels=(0,))
    corners = mesh.nodes.xyz[np.unique(mesh.edge_index)]
    golden = (1 + 5**0.5) / 2
    expected = np.array([0, 1, golden]) / np.hypot(1, golden)
    for shift in range(3):
        assert np.linalg.norm(corners - np.roll(expected, shift), axis=1).min() < 1e-15
    np.testing.assert_allclose(mesh.nodes.xyz[0], [0, 0, 1], atol=1e-15)  # the middle of a side of level 0


def test_every_edge_is_there_once_and_goes_both_ways():
    mesh = icosphere(4)
    edges = set(map(tuple, mesh.edge_index.T))
    assert len(edges) == mesh.edge_index.shape[1]
    assert edges == {(destination, source) for source, destination in edges}
    assert all(source != destination for source, destination in edges)


def test_edges_are_sorted_by_destination_then_source():
    source, destination = icosphere(4).edge_index
    assert (np.diff(destination * 10_000 + source) > 0).all()


def test_levels_add_up_to_the_multi_scale_mesh():
    single = np.concatenate([icosphere(3, levels=(level,)).edge_index for level in (1, 2, 3)], axis=1)
    assert set(map(tuple, single.T)) == set(map(tuple, icosphere(3).edge_index.T))


def test_restriction_keeps_the_edges_among_the_kept_nodes():
    mesh = icosphere(3)
    keep = mesh.nodes.lat > 20
    part = mesh.restrict(keep)
    np.testing.assert_array_equal(part.nodes.xyz, mesh.nodes.xyz[keep])
    numbers = np.flatnonzero(keep)
    expected = {(s, d) for s, d in mesh.edge_index.T if keep[s] and keep[d]}
    assert {(numbers[s], numbers[d]) for s, d in part.edge_index.T} == expected


def test_refinement_below_one_raises():
    with pytest.raises(ValueError, match="refinement must be at least 1, got 0"):
        icosphere(0)


@pytest.mark.parametrize("levels", [(), (4,), (-1, 2)])
def test_levels_that_the_mesh_does_not_have_raise(levels):
    with pytest.raises(ValueError, match="levels must be one or more of 0 to 3"):
        icosphere(3, levels=levels)
