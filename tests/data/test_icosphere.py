"""Icosphere: counts, order and edges of refined icosahedra."""

import numpy as np
import pytest

from anemoi_gt.data.meshes import icosphere, limited_area_icosphere, stretched_icosphere
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes

BERN, SEATTLE = Nodes([47.0], [7.4]), Nodes([47.6], [-122.3])


@pytest.mark.parametrize("refinement", [1, 2, 3, 5, 6, 7])
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


@pytest.mark.parametrize("keep", [np.ones(41, dtype=bool), np.arange(42), np.ones((42, 1), dtype=bool)])
def test_restriction_needs_a_truth_value_for_each_vertex(keep):
    with pytest.raises(ValueError, match=r"keep must be bool \[42\], one per vertex"):
        icosphere(1).restrict(keep)


def near(mesh, place, kilometres):
    """Which vertices lie so near to the one node of `place`."""
    return np.arccos(mesh.nodes.xyz @ place.xyz[0]) * EARTH_RADIUS / 1e3 <= kilometres


def test_limited_area_mesh_is_what_lies_near_the_area():
    mesh, part = icosphere(5), limited_area_icosphere(5, BERN, 900)
    expected = mesh.restrict(near(mesh, BERN, 900))
    np.testing.assert_array_equal(part.nodes.xyz, expected.nodes.xyz)
    np.testing.assert_array_equal(part.edge_index, expected.edge_index)
    assert 0 < len(part.nodes) < 100


def test_stretched_mesh_is_the_coarse_one_with_the_fine_one_near_the_area():
    mesh = stretched_icosphere(3, 5, BERN, 1500)
    coarse, fine = icosphere(3), limited_area_icosphere(5, BERN, 1500)
    places = {tuple(xyz) for xyz in mesh.nodes.stored}
    assert places == {tuple(xyz) for part in (coarse, fine) for xyz in part.nodes.stored}
    assert len(mesh.nodes) == len(places) > len(coarse.nodes)


def test_stretched_mesh_has_the_edges_of_all_levels_between_its_nodes():
    mesh, whole = stretched_icosphere(2, 4, SEATTLE, 2000), icosphere(4)
    number = {tuple(xyz): i for i, xyz in enumerate(whole.nodes.stored)}
    chosen = np.array([number[tuple(xyz)] for xyz in mesh.nodes.stored])
    keep = np.isin(np.arange(len(whole.nodes)), chosen)
    np.testing.assert_array_equal(chosen, np.flatnonzero(keep))  # in the same order
    np.testing.assert_array_equal(mesh.edge_index, whole.restrict(keep).edge_index)


def test_a_message_crosses_a_stretched_mesh():
    mesh = stretched_icosphere(2, 5, SEATTLE, 1500)
    reached = np.zeros(len(mesh.nodes), dtype=bool)
    reached[mesh.nodes.xyz.dot(SEATTLE.xyz[0]).argmax()] = True
    for _ in range(12):
        reached[mesh.edge_index[1, reached[mesh.edge_index[0]]]] = True
    assert reached.all()


@pytest.mark.parametrize(
    "make", [icosphere, lambda r: limited_area_icosphere(r, BERN), lambda r: stretched_icosphere(r, 3, BERN)]
)
def test_refinement_below_one_raises(make):
    with pytest.raises(ValueError, match="refinement must be at least 1, got 0"):
        make(0)


@pytest.mark.parametrize("area_refinement", [2, 3])
def test_an_area_that_is_not_finer_raises(area_refinement):
    with pytest.raises(ValueError, match=f"area_refinement must be above refinement.*got {area_refinement} and 3"):
        stretched_icosphere(3, area_refinement, BERN)


@pytest.mark.parametrize("make", [lambda a: limited_area_icosphere(2, a), lambda a: stretched_icosphere(2, 3, a)])
def test_an_area_without_nodes_raises(make):
    with pytest.raises(ValueError, match="area must have at least one node"):
        make(Nodes([], []))


@pytest.mark.parametrize(
    "make", [lambda m: limited_area_icosphere(2, BERN, m), lambda m: stretched_icosphere(2, 3, BERN, m)]
)
def test_negative_margin_raises(make):
    with pytest.raises(ValueError, match="margin must not be negative, in kilometres, got -5"):
        make(-5)


@pytest.mark.parametrize("levels", [(), (4,), (-1, 2)])
def test_levels_that_the_mesh_does_not_have_raise(levels):
    with pytest.raises(ValueError, match="levels must be one or more of 0 to 3"):
        icosphere(3, levels=levels)
