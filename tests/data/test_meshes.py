"""Meshes: counts, order and edges of refined icosahedra, whole, limited and stretched."""

from collections import Counter

import numpy as np
import pytest
from support.refusals import raises, refused

from anemoi_gt.data.meshes import icosphere, limited_area_icosphere, stretched_icosphere
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes

BERN = Nodes([47.0], [7.4])
SEATTLE = Nodes([47.6], [-122.3])
NOWHERE = Nodes([], [])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7])
def test_refined_icosahedron_has_its_counts(n):
    sizes = len(icosphere(n).nodes), icosphere(n).edge_index.shape
    assert sizes == (10 * 4**n + 2, (2, sum(60 * 4**level for level in range(1, n + 1))))


def edges_by_position(mesh):
    """Return the edges of a mesh, each as the positions of source and destination."""
    ends = mesh.nodes.stored[mesh.edge_index]
    return {(tuple(source), tuple(destination)) for source, destination in zip(*ends, strict=True)}


@pytest.mark.parametrize("level", [1, 2, 4])
def test_each_level_adds_a_triangulation_of_the_sphere(level):
    edges = edges_by_position(icosphere(level))
    if level > 1:
        coarser = edges_by_position(icosphere(level - 1))
        assert coarser < edges
        edges -= coarser
    degree = np.array(list(Counter(destination for _, destination in edges).values()))
    vertices = 10 * 4**level + 2
    assert (degree == 5).sum() == 12  # the corners of the icosahedron
    assert (degree == 6).sum() == len(degree) - 12 == vertices - 12
    assert vertices - len(edges) // 2 + 20 * 4**level == 2  # Euler's formula


def test_nodes_are_sorted_north_to_south_and_east_to_west():
    lat, lon = icosphere(4).nodes.stored.T
    assert (np.diff(lat) <= 0).all()
    assert (np.diff(lon)[np.diff(lat) == 0] < 0).all()


def test_edges_are_unique_bidirectional_and_sorted_by_destination_then_source():
    source, destination = icosphere(4).edge_index
    assert (np.diff(destination * 10_000 + source) > 0).all()
    assert (source != destination).all()
    np.testing.assert_array_equal(
        np.sort(source * 10_000 + destination), destination * 10_000 + source
    )


def test_restriction_keeps_the_edges_between_the_kept_nodes():
    mesh = icosphere(3)
    keep = mesh.nodes.lat > 20
    part, index = mesh.restrict(keep), np.flatnonzero(keep)
    np.testing.assert_array_equal(part.nodes.xyz, mesh.nodes.xyz[keep])
    expected = {(s, d) for s, d in mesh.edge_index.T if keep[s] and keep[d]}
    assert {(index[s], index[d]) for s, d in part.edge_index.T} == expected


def test_limited_area_mesh_is_the_icosphere_near_the_area():
    mesh, part = icosphere(5), limited_area_icosphere(5, BERN, 900)
    expected = mesh.restrict(np.arccos(mesh.nodes.xyz @ BERN.xyz[0]) * EARTH_RADIUS / 1e3 <= 900)
    np.testing.assert_array_equal(part.nodes.xyz, expected.nodes.xyz)
    np.testing.assert_array_equal(part.edge_index, expected.edge_index)
    assert 0 < len(part.nodes) < 100


def test_stretched_mesh_has_the_edges_of_all_levels_between_its_nodes():
    mesh, whole = stretched_icosphere(2, 4, SEATTLE, 2000), icosphere(4)
    index = {tuple(xyz): i for i, xyz in enumerate(whole.nodes.stored)}
    kept = np.array([index[tuple(xyz)] for xyz in mesh.nodes.stored])
    keep = np.isin(np.arange(len(whole.nodes)), kept)
    np.testing.assert_array_equal(kept, np.flatnonzero(keep))  # in the same order
    np.testing.assert_array_equal(mesh.edge_index, whole.restrict(keep).edge_index)


REFINEMENT = "refinement must be at least 1, got 0"
AREAS = {
    (NOWHERE,): "at least one node",
    (BERN, -5): "margin must not be negative, in kilometres, got -5",
}
KEEP = np.ones(41, dtype=bool), np.arange(42), np.ones((42, 1), dtype=bool)


@refused(
    (icosphere, (0,), REFINEMENT),
    (stretched_icosphere, (0, 3, BERN), REFINEMENT),
    (stretched_icosphere, (3, 3, BERN), "area_refinement must be above refinement, got 3 and 3"),
    (limited_area_icosphere, (0, BERN), REFINEMENT),
    *((limited_area_icosphere, (2, *area), message) for area, message in AREAS.items()),
    *((stretched_icosphere, (2, 3, *area), message) for area, message in AREAS.items()),
    *(
        (icosphere(1).restrict, (keep,), r"keep must be bool \[42\], one per vertex")
        for keep in KEEP
    ),
)
def test_option_out_of_range_raises(wrong, message):
    make, options = wrong
    raises(lambda: make(*options), message)
