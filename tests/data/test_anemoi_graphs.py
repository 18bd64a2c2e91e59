"""Our graphs and those of anemoi-graphs 0.9.8 on the same data nodes: the same nodes, edges and attributes.

anemoi-graphs measures in float32 from cosine to chord. Nearest sources that are equally far to that rounding come out
as its last bits fall, so `nearest` is compared exactly on nodes without symmetry, and up to such ties on grids.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from anemoi.graphs.edges import CutOffEdges, KNNEdges, MultiScaleEdges
from anemoi.graphs.edges.attributes import EdgeDirection, EdgeLength
from anemoi.graphs.nodes import LatLonNodes, LimitedAreaTriNodes, StretchedTriNodes, TriNodes
from torch_geometric.data import HeteroData

from anemoi_gt.data.graphs import hierarchical_graph, icosphere_graph, limited_area_graph, stretched_graph
from anemoi_gt.data.grids import grid, regional
from anemoi_gt.data.nodes import Nodes

ENCODER, PROCESSOR, DECODER = ("data", "to", "hidden"), ("hidden", "to", "hidden"), ("hidden", "to", "data")
EPS = np.finfo(np.float32).eps  # radians; what float32 leaves open of a longitude or a unit vector
EUROPE = (72, -25, 34, 45)


def scattered(n):
    """Nodes without any symmetry."""
    return Nodes.from_xyz(np.random.default_rng(0).standard_normal((n, 3)))


DATA = {"O16": grid("O16"), "N32": grid("N32"), "scattered": scattered(4000)}
UK = regional(np.linspace(58, 50, 33), np.linspace(-10, 2, 49))


def theirs(data, hidden, edges, **data_masks):
    """Build a graph with the node and edge builders of anemoi-graphs."""
    graph = LatLonNodes(data.lat, data.lon, name="data").update_graph(HeteroData())
    for name, mask in data_masks.items():
        graph["data"][name] = torch.from_numpy(mask)[:, None]
    for builder in (*hidden, *edges):
        graph = builder.update_graph(graph)
    for source, to, destination in graph.edge_types:
        store = graph[source, to, destination]
        for name, attribute in (("edge_length", EdgeLength), ("edge_dirs", EdgeDirection)):
            store[name] = attribute(norm="unit-std")((graph[source], graph[destination]), store.edge_index)
            store[f"raw_{name}"] = attribute()((graph[source], graph[destination]), store.edge_index)
    return graph


def numbers(ours, other):
    """Our number of each of their nodes, by position; fails when a node is in one graph only."""
    order, their_order = (np.lexsort(x.numpy().T) for x in (ours.x, other.x))
    np.testing.assert_array_equal(ours.x[order], other.x[their_order], err_msg="different nodes")
    ours_of_theirs = np.empty_like(order)
    ours_of_theirs[their_order] = order
    return ours_of_theirs


def edges_of(kind, ours, other):
    """Edges of both graphs as one number each, sorted, in our numbers of the nodes; and the order that sorts theirs."""
    source, destination = (numbers(ours[name], other[name]) for name in kind[::2])
    size = len(source)
    mine = ours[kind].edge_index.numpy()
    their = other[kind].edge_index.numpy()
    keys = destination[their[1]] * size + source[their[0]]
    order = np.argsort(keys)
    return mine[1] * size + mine[0], keys[order], order


def assert_same_edges(kind, ours, other):
    mine, their, _ = edges_of(kind, ours, other)
    assert len(set(their)) == len(their) and len(set(mine)) == len(mine), "an edge is there twice"
    only = len(np.setdiff1d(mine, their)), len(np.setdiff1d(their, mine))
    assert only == (0, 0), f"{kind}: {only[0]} of {len(mine)} edges are ours alone, {only[1]} theirs"


def assert_same_edges_up_to_ties(kind, ours, other):
    """Each destination's sources are equally far in both graphs, one by one, nearest first."""
    mine, their, _ = edges_of(kind, ours, other)
    assert len(set(mine)) == len(mine) == len(their)
    ends = [points(ours[name].x) for name in kind[::2]]
    near, near_too = (ordered_distances(keys, *ends) for keys in (mine, their))
    np.testing.assert_allclose(near, near_too, rtol=0, atol=4 * EPS)  # two positions, in two coordinates each
    assert len(np.setdiff1d(mine, their)) < 0.03 * len(mine), "too many for ties"


def ordered_distances(keys, source, destination):
    """Distances of edges, given as one number each, by destination and from short to long."""
    d, s = np.divmod(keys, len(source))
    distance = np.linalg.norm(source[s] - destination[d], axis=1)
    return distance[np.lexsort((distance, d))]


def points(x):
    lat, lon = x.double().numpy().T
    return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=-1)


def global_edges(r, factor=0.6, k=3):
    return (
        CutOffEdges("data", "hidden", cutoff_factor=factor),
        MultiScaleEdges("hidden", "hidden", x_hops=1, scale_resolutions=r),
        KNNEdges("hidden", "data", num_nearest_neighbours=k),
    )


@pytest.fixture(scope="module", params=[("O16", 3), ("N32", 4), ("scattered", 3)], ids=lambda case: case[0])
def on_the_globe(request):
    """The same graph twice: ours and theirs."""
    name, r = request.param
    data = DATA[name]
    return icosphere_graph(data, refinement=r), theirs(data, [TriNodes(r, name="hidden")], global_edges(r)), name


def test_encoder_has_the_same_edges(on_the_globe):
    assert_same_edges(ENCODER, *on_the_globe[:2])


def test_processor_has_the_same_edges(on_the_globe):
    assert_same_edges(PROCESSOR, *on_the_globe[:2])


def test_decoder_has_the_same_edges(on_the_globe):
    ours, other, name = on_the_globe
    compare = assert_same_edges if name == "scattered" else assert_same_edges_up_to_ties
    compare(DECODER, ours, other)


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.5])
def test_every_cutoff_gives_the_same_edges(factor):
    data = DATA["scattered"]
    ours = icosphere_graph(data, refinement=3, cutoff=factor)
    assert_same_edges(ENCODER, ours, theirs(data, [TriNodes(3, name="hidden")], global_edges(3, factor)))


@pytest.mark.parametrize("kind", [ENCODER, PROCESSOR, DECODER], ids="-".join)
def test_edges_have_the_same_attributes(on_the_globe, kind):
    assert_same_attributes(kind, *on_the_globe[:2])


def assert_same_attributes(kind, ours, other):
    """To the rounding of a position; a direction is the less certain the shorter the edge."""
    here, there, length = shared_edges(kind, ours, other)
    for name, uncertainty in (("edge_length", 4 * EPS), ("edge_dirs", 4 * EPS / length)):
        unit = other[kind][f"raw_{name}"].std()  # what both divide by
        error = (ours[kind][name][here] - other[kind][name][there]).abs() * unit
        excess = (error / (uncertainty + 4 * EPS)).max()  # the sums behind `unit` round too
        assert excess < 1, f"{kind}: {name} is {excess:.1f} times further off than rounding"


def shared_edges(kind, ours, other):
    """Where the edges of both graphs are in ours and in theirs, and how long they are, [E, 1] in radians."""
    mine, their, order = edges_of(kind, ours, other)
    here, there = np.isin(mine, their), order[np.isin(their, mine)]
    return here, there, other[kind].raw_edge_length[there]


def test_a_limited_area_is_the_same():
    ours = limited_area_graph(UK, refinement=6, margin=100.0)
    hidden = LimitedAreaTriNodes(6, reference_node_name="data", name="hidden", margin_radius_km=100.0)
    other = theirs(UK, [hidden], global_edges(6))
    for kind in (ENCODER, PROCESSOR, DECODER):
        assert_same_edges(kind, ours, other)
        assert_same_attributes(kind, ours, other)


@pytest.fixture(scope="module", params=["N32", "scattered"])
def stretched(request):
    data = DATA[request.param]
    ours = stretched_graph(data, refinement=3, area_refinement=5, area=EUROPE, margin=150.0)
    hidden = StretchedTriNodes(3, 5, "hidden", "data", mask_attr_name="inside", margin_radius_km=150.0)
    edges = (KNNEdges("data", "hidden", num_nearest_neighbours=12), *global_edges(5)[1:])
    return ours, theirs(data, [hidden], edges, inside=data.inside(EUROPE)), request.param


@pytest.mark.parametrize("kind", [ENCODER, PROCESSOR, DECODER], ids="-".join)
def test_a_stretched_mesh_is_the_same(stretched, kind):
    ours, other, name = stretched
    compare = assert_same_edges if name == "scattered" or kind == PROCESSOR else assert_same_edges_up_to_ties
    compare(kind, ours, other)
    assert_same_attributes(kind, ours, other)


def hierarchical_edges(names):
    yield CutOffEdges("data", "hidden", cutoff_factor=0.6)
    yield KNNEdges("hidden", "data", num_nearest_neighbours=3)
    for name in names:
        yield MultiScaleEdges(name, name, x_hops=1)
    for fine, coarse in pairwise(names):
        yield CutOffEdges(fine, coarse, cutoff_factor=1.5)
        yield KNNEdges(coarse, fine, num_nearest_neighbours=5)


@pytest.fixture(scope="module")
def hierarchical():
    data, levels = DATA["scattered"], {"hidden": 4, "hidden_2": 3, "hidden_3": 2}
    meshes = [TriNodes(r, name=name) for name, r in levels.items()]
    other = theirs(data, meshes, hierarchical_edges(list(levels)))
    return hierarchical_graph(data, refinements=tuple(levels.values())), other


def test_a_hierarchy_joins_the_same_nodes(hierarchical):
    ours, other = hierarchical
    assert set(ours.edge_types) == set(other.edge_types)
    for source, to, destination in ours.edge_types:
        up = source > destination and destination != "data"
        compare = assert_same_edges_up_to_ties if up else assert_same_edges
        compare((source, to, destination), ours, other)


BETWEEN_LEVELS = pytest.mark.parametrize(
    "kind", [("hidden", "to", "hidden_2"), ("hidden_2", "to", "hidden")], ids="-".join
)


@BETWEEN_LEVELS
def test_edges_between_levels_have_the_same_length_and_direction(hierarchical, kind):
    here, there, length = shared_edges(kind, *hierarchical)
    ours, other = (graph[kind] for graph in hierarchical)
    apart = length[:, 0] > 10 * EPS
    lengths = ours.edge_length[here] * other.raw_edge_length.std(), length
    directions = torch.nn.functional.normalize(ours.edge_dirs[here]), other.raw_edge_dirs[there]
    assert (lengths[0] - lengths[1]).abs().max() < 8 * EPS
    assert ((directions[0] - directions[1]).abs() * length)[apart].max() < 8 * EPS


@BETWEEN_LEVELS
def test_a_vertex_that_reads_itself_on_another_level_has_no_direction(hierarchical, kind):
    """There it has that of a rounding error, hence directions between levels are divided by another spread."""
    ours, other = (graph[kind] for graph in hierarchical)
    to_itself, there = (edges.edge_length[:, 0] < 10 * EPS for edges in (ours, other))
    assert to_itself.sum() == there.sum() == hierarchical[0]["hidden_2"].num_nodes
    assert not ours.edge_dirs[to_itself].any()
    assert (other.raw_edge_dirs[there].norm(dim=1) > 0.5).any()
