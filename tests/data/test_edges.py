"""Edge builders against brute force over all pairs."""

import numpy as np
import pytest
from support.refusals import raises, refused

from anemoi_gt.data.edges import MAX_NEIGHBOURS, cutoff, grid_spacing, nearest, within
from anemoi_gt.data.grids import octahedral, regional
from anemoi_gt.data.meshes import icosphere
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes


def random_nodes(n, seed):
    return Nodes.from_xyz(np.random.default_rng(seed).standard_normal((n, 3)))


def distances(source, destination):
    """Chords between all pairs of positions as a graph stores them, [destinations, sources]."""
    (s_lat, s_lon), (d_lat, d_lon) = (
        nodes.stored.astype(np.float64).T for nodes in (source, destination)
    )
    lat, lon = d_lat[:, None] - s_lat, d_lon[:, None] - s_lon
    return 2 * np.sqrt(
        np.sin(lat / 2) ** 2 + np.cos(d_lat[:, None]) * np.cos(s_lat) * np.sin(lon / 2) ** 2
    )


def as_set(edge_index):
    pairs = set(map(tuple, edge_index.T))
    assert len(pairs) == edge_index.shape[1], "duplicate edges"
    return pairs


def brute_force(chosen):
    """Edges of a [destinations, sources] mask."""
    return {(source, destination) for destination, source in zip(*np.nonzero(chosen), strict=True)}


@pytest.mark.parametrize("k", [1, 3, 17, 60])
def test_nearest_connects_the_k_nearest_sources(k):
    source, destination = random_nodes(60, 0), random_nodes(40, 1)
    rank = distances(source, destination).argsort(axis=1).argsort(axis=1)
    assert as_set(nearest(source, destination, k)) == brute_force(rank < k)


@pytest.mark.parametrize("factor", [0.05, 0.3, 0.6, 1.5])
def test_cutoff_connects_every_source_within_the_radius(factor):
    source, destination = random_nodes(MAX_NEIGHBOURS, 2), random_nodes(30, 3)
    radius = factor * grid_spacing(destination)
    assert as_set(cutoff(source, destination, factor)) == brute_force(
        distances(source, destination) <= radius
    )


def test_grid_spacing_is_the_largest_nearest_neighbour_distance():
    nodes = random_nodes(80, 4)
    distance = distances(nodes, nodes)
    np.fill_diagonal(distance, np.inf)
    assert grid_spacing(nodes) == pytest.approx(distance.min(axis=1).max(), rel=1e-12)


def test_cutoff_keeps_the_nearest_sources_up_to_a_maximum():
    source, destination = random_nodes(900, 5), random_nodes(12, 6)
    distance = distances(source, destination)
    is_inside = distance <= 0.6 * grid_spacing(destination)
    is_nearest = distance.argsort(axis=1).argsort(axis=1) < MAX_NEIGHBOURS
    # some destinations have too many sources, some have fewer
    assert (is_inside & ~is_nearest).any()
    assert (is_nearest & ~is_inside).any()
    assert as_set(cutoff(source, destination, 0.6)) == brute_force(is_inside & is_nearest)


def test_cutoff_includes_a_source_at_the_radius():
    assert as_set(
        cutoff(Nodes([0.0, 0.0], [-10.0, 20.0]), Nodes([0.0, 0.0], [0.0, 10.0]), 1.0)
    ) == {(0, 0), (1, 1)}


def test_ties_go_to_the_lower_index():
    around = Nodes([10.0, -10.0, 10.0, -10.0], [10.0, -10.0, -10.0, 10.0])
    np.testing.assert_array_equal(nearest(around, Nodes([0.0], [0.0]), 2), [[0, 1], [0, 0]])


def test_distances_are_between_float32_positions():
    """Two longitudes that are equal in float32 are a tie; in float64 the second is nearer."""
    source, destination = Nodes([0.0, 0.0], [90.0 + 2e-6, 90.0 + 1e-6]), Nodes([0.0], [90.0])
    assert source.stored[0, 1] == source.stored[1, 1]
    np.testing.assert_array_equal(nearest(source, destination, 1), [[0], [0]])


@pytest.mark.parametrize("build", [lambda s, d: cutoff(s, d, 0.6), lambda s, d: nearest(s, d, 3)])
def test_edges_are_sorted_by_destination_then_source_and_deterministic(build):
    source, destination = octahedral(12), icosphere(2).nodes
    edge_index = build(source, destination)
    assert edge_index.dtype == np.int64
    assert (np.diff(edge_index[1] * len(source) + edge_index[0]) > 0).all()
    np.testing.assert_array_equal(edge_index, build(source, destination))


def test_cutoff_0_6_connects_every_point_of_o32_to_icosphere_4():
    data = octahedral(32)
    assert len(np.unique(cutoff(data, icosphere(4).nodes, 0.6)[0])) == len(data)


def test_within_is_the_distance_to_the_nearest_reference():
    reference, nodes = regional([50.0, 51.0], [0.0, 1.0]), random_nodes(500, 7)
    kilometres = 2 * np.arcsin(distances(reference, nodes).min(axis=1) / 2) * EARTH_RADIUS / 1e3
    np.testing.assert_array_equal(within(reference, nodes, 2500.0), kilometres <= 2500)
    assert 0 < (kilometres <= 2500).sum() < 500


@pytest.mark.parametrize(("margin", "count"), [(0.0, 1), (20_010.0, 2), (1e6, 3)])
def test_within_holds_from_zero_distance_to_the_antipode_and_for_an_empty_reference(margin, count):
    nodes = Nodes([0.0, 0.0, 0.0], [20.0, 21.0, -160.0])
    np.testing.assert_array_equal(within(nodes[[0]], nodes, margin), np.arange(3) < count)
    assert not within(nodes[[]], nodes, margin).any()


@refused(
    *(
        (within, {"margin": x}, f"margin must not be negative, in kilometres, got {x}")
        for x in (-1.0, np.nan)
    ),
    *(
        (nearest, {"k": k}, rf"k must be in \[1, 10\], the number of sources, got {k}")
        for k in (0, 11)
    ),
    *((cutoff, {"factor": factor}, "factor must be positive") for factor in (0.0, np.nan)),
)
def test_option_out_of_range_raises(wrong, message):
    build, options = wrong
    raises(lambda: build(random_nodes(10, 0), random_nodes(5, 1), **options), message)


def test_too_few_nodes_raise():
    with pytest.raises(ValueError, match="at least one node, got none"):
        cutoff(Nodes([], []), random_nodes(5, 1), 0.6)
    with pytest.raises(ValueError, match="at least two to have a spacing, got 1"):
        grid_spacing(Nodes([0.0], [0.0]))
