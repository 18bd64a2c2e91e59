"""Graphs of anemoi_gt and of anemoi-graphs 0.9.8 on the same data nodes: the same nodes, edges and attributes.

anemoi-graphs computes distances in float32. Sources that are equally far to its rounding are
ordered by the last bit, so `nearest` is compared exactly on nodes without symmetry, and up to such
ties on grids.
"""

import numpy as np
import pytest
import torch
from anemoi.graphs.edges import CutOffEdges, KNNEdges, MultiScaleEdges
from anemoi.graphs.edges.attributes import EdgeDirection, EdgeLength
from anemoi.graphs.nodes import LatLonNodes, LimitedAreaTriNodes, StretchedTriNodes, TriNodes
from torch_geometric.data import HeteroData

from anemoi_gt.data.graphs import (
    icosphere_graph,
    limited_area_graph,
    stretched_graph,
)
from anemoi_gt.data.grids import grid, regional
from anemoi_gt.data.nodes import Nodes, unit_vectors

ENCODER = ("data", "to", "hidden")
PROCESSOR = ("hidden", "to", "hidden")
DECODER = ("hidden", "to", "data")
EPS = np.finfo(np.float32).eps  # radians; rounding of a longitude or of a unit vector in float32
EUROPE = (72, -25, 34, 45)
# without any symmetry
SCATTERED = Nodes.from_xyz(np.random.default_rng(0).standard_normal((4000, 3)))
DATA = {"O16": grid("O16"), "N32": grid("N32"), "scattered": SCATTERED}
UK = regional(np.linspace(58, 50, 33), np.linspace(-10, 2, 49))


def anemoi_graph(data, hidden, edges, **data_masks):
    """Build a graph with the node and edge builders of anemoi-graphs."""
    graph = LatLonNodes(data.lat, data.lon, name="data").update_graph(HeteroData())
    for name, mask in data_masks.items():
        graph["data"][name] = torch.from_numpy(mask)[:, None]
    for builder in (*hidden, *edges):
        graph = builder.update_graph(graph)
    for source, to, destination in graph.edge_types:
        store = graph[source, to, destination]
        for name, attribute in (("edge_length", EdgeLength), ("edge_dirs", EdgeDirection)):
            store[name] = attribute(norm="unit-std")(
                (graph[source], graph[destination]), store.edge_index
            )
            store[f"raw_{name}"] = attribute()(
                (graph[source], graph[destination]), store.edge_index
            )
    return graph


def node_map(ours, upstream):
    """Our index of each upstream node, by position; fails if a node is in one graph only."""
    order, upstream_order = (np.lexsort(x.numpy().T) for x in (ours.x, upstream.x))
    np.testing.assert_array_equal(
        ours.x[order], upstream.x[upstream_order], err_msg="different nodes"
    )
    return order[np.argsort(upstream_order)]


def edge_keys(kind, ours, upstream):
    """Edges of both graphs as one integer each, in our node indices; upstream sorted, with the order that sorts it."""
    source, destination = (node_map(ours[name], upstream[name]) for name in kind[::2])
    mine, other = (graph[kind].edge_index.numpy() for graph in (ours, upstream))
    keys = destination[other[1]] * len(source) + source[other[0]]
    order = np.argsort(keys)
    mine = mine[1] * len(source) + mine[0]
    assert len(set(keys)) == len(keys) == len(mine) == len(set(mine)), (
        f"{kind}: duplicate edges, or another number"
    )
    return mine, keys[order], order


def assert_same_edges(kind, ours, upstream):
    mine, other, _ = edge_keys(kind, ours, upstream)
    missing = len(np.setdiff1d(other, mine))
    assert missing == 0, f"{kind}: {missing} of {len(other)} edges differ"


def assert_same_edges_up_to_ties(kind, ours, upstream):
    """Compare the distances of each destination's sources, nearest first."""
    mine, other, _ = edge_keys(kind, ours, upstream)
    ends = [unit_vectors(ours[name].x.double().numpy()) for name in kind[::2]]
    distances, expected = (sorted_distances(keys, *ends) for keys in (mine, other))
    # two positions, two coordinates each
    np.testing.assert_allclose(distances, expected, rtol=0, atol=4 * EPS)
    assert len(np.setdiff1d(mine, other)) < 0.03 * len(mine), "too many for ties"


def sorted_distances(keys, source, destination):
    d, s = np.divmod(keys, len(source))
    distance = np.linalg.norm(source[s] - destination[d], axis=1)
    return distance[np.lexsort((distance, d))]


def assert_same_attributes(kind, ours, upstream):
    """Compare to the rounding of a position; the shorter an edge, the less certain its direction."""
    our_edges, upstream_edges, length = shared_edges(kind, ours, upstream)
    for name, uncertainty in (("edge_length", 4 * EPS), ("edge_dirs", 4 * EPS / length)):
        unit = upstream[kind][f"raw_{name}"].std()  # both are divided by it
        difference = ours[kind][name][our_edges] - upstream[kind][name][upstream_edges]
        error = difference.abs() * unit
        excess = (error / (uncertainty + 4 * EPS)).max()  # the sums in `unit` round too
        assert excess < 1, f"{kind}: {name} has {excess:.1f} times the error of rounding"


def shared_edges(kind, ours, upstream):
    """Return the indices of the common edges in ours and in upstream, and their lengths [E, 1] in radians."""
    mine, other, order = edge_keys(kind, ours, upstream)
    our_edges = np.isin(mine, other)
    upstream_edges = order[np.isin(other, mine)]
    return our_edges, upstream_edges, upstream[kind].raw_edge_length[upstream_edges]


def global_edges(r, factor=0.6, k=3):
    return (
        CutOffEdges("data", "hidden", cutoff_factor=factor),
        MultiScaleEdges("hidden", "hidden", x_hops=1, scale_resolutions=r),
        KNNEdges("hidden", "data", num_nearest_neighbours=k),
    )


def icospheres(name, r):
    upstream = anemoi_graph(DATA[name], [TriNodes(r, name="hidden")], global_edges(r))
    return icosphere_graph(DATA[name], refinement=r), upstream, {DECODER}


def limited_area(_):
    hidden = LimitedAreaTriNodes(
        6, reference_node_name="data", name="hidden", margin_radius_km=100.0
    )
    return (
        limited_area_graph(UK, refinement=6, margin=100.0),
        anemoi_graph(UK, [hidden], global_edges(6)),
        {},
    )


def stretched(name):
    data = DATA[name]
    ours = stretched_graph(data, refinement=3, area_refinement=5, area=EUROPE, margin=150.0)
    hidden = StretchedTriNodes(
        3, 5, "hidden", "data", mask_attr_name="inside", margin_radius_km=150.0
    )
    edges = (KNNEdges("data", "hidden", num_nearest_neighbours=12), *global_edges(5)[1:])
    return ours, anemoi_graph(data, [hidden], edges, inside=data.inside(EUROPE)), {ENCODER, DECODER}


CASES = [
    (icospheres, "O16", 3),
    (icospheres, "N32", 4),
    (icospheres, "scattered", 3),
    (limited_area, "UK"),
    (stretched, "N32"),
    (stretched, "scattered"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def graphs(request):
    """Our graph, the graph of anemoi-graphs, and the kinds of edges with ties."""
    make, name, *refinement = request.param
    ours, upstream, tied = make(name, *refinement)
    return ours, upstream, {} if name == "scattered" else tied


@pytest.mark.parametrize("kind", [ENCODER, PROCESSOR, DECODER], ids="-".join)
def test_graphs_are_the_same(graphs, kind):
    ours, upstream, tied = graphs
    (assert_same_edges_up_to_ties if kind in tied else assert_same_edges)(kind, ours, upstream)
    assert_same_attributes(kind, ours, upstream)


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.5])
def test_every_cutoff_gives_the_same_edges(factor):
    ours = icosphere_graph(SCATTERED, refinement=3, cutoff=factor)
    assert_same_edges(
        ENCODER,
        ours,
        anemoi_graph(SCATTERED, [TriNodes(3, name="hidden")], global_edges(3, factor)),
    )
