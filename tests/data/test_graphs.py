"""Encoder-processor-decoder graphs: layout, counts, what reads what."""

import numpy as np
import pytest
import torch

from anemoi_gt import EncoderProcessorDecoder
from anemoi_gt.data import edges
from anemoi_gt.data.edge_attributes import edge_direction, edge_length
from anemoi_gt.data.graphs import (
    encoder_processor_decoder,
    hierarchical_graph,
    icosphere_graph,
    limited_area_graph,
    stretched_graph,
)
from anemoi_gt.data.grids import classic, octahedral, regional
from anemoi_gt.data.meshes import icosphere, stretched_icosphere
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes

ENCODER, PROCESSOR, DECODER = ("data", "to", "hidden"), ("hidden", "to", "hidden"), ("hidden", "to", "data")
UK = regional(np.linspace(58, 50, 33), np.linspace(-10, 2, 49))
ALPS = (49.0, 4.0, 43.0, 17.0)


def nodes_of(graph, name):
    lat, lon = np.rad2deg(graph[name].x.double().numpy().T)
    return Nodes(lat.clip(-90, 90), lon)  # float32 puts the poles beyond themselves


@pytest.fixture(scope="module")
def graph():
    return icosphere_graph(octahedral(16), refinement=3)


def test_layout_is_that_of_anemoi_graphs(graph):
    assert graph.node_types == ["data", "hidden"]
    assert graph.edge_types == [ENCODER, PROCESSOR, DECODER]
    assert graph.validate()
    for name, size in (("data", 1600), ("hidden", 642)):
        assert graph[name].x.shape == (size, 2) and graph[name].x.dtype == torch.float32
    for store in graph.edge_stores:
        assert store.edge_index.dtype == torch.int64
        assert store.edge_length.shape == (store.num_edges, 1) and store.edge_length.dtype == torch.float32
        assert store.edge_dirs.shape == (store.num_edges, 2) and store.edge_dirs.dtype == torch.float32


def test_edge_lists_lie_in_memory_row_by_row(graph):
    """PyTorch's conversion to CSR, which PyTorch Geometric and Anemoi call, reads the wrong numbers from any other."""
    for kind in graph.edge_types:
        assert graph[kind].edge_index.is_contiguous(), kind


def test_positions_are_latitude_and_longitude_in_radians(graph):
    np.testing.assert_allclose(graph["data"].x, octahedral(16).radians, atol=3e-7)
    assert graph["hidden"].x[0, 0] == pytest.approx(np.pi / 2)


def test_the_benchmark_graph_has_its_published_counts():
    graph = icosphere_graph(classic(320), refinement=6)
    assert {name: graph[name].num_nodes for name in graph.node_types} == {"data": 542_080, "hidden": 40_962}
    counts = {kind: graph[kind].num_edges for kind in graph.edge_types}
    assert counts == {ENCODER: 852_840, PROCESSOR: 327_600, DECODER: 1_626_240}


def test_each_kind_of_edge_is_built_as_its_builder_says(graph):
    data, mesh = octahedral(16), icosphere(3)
    for kind, expected in (
        (ENCODER, edges.cutoff(data, mesh.nodes, 0.6)),
        (PROCESSOR, mesh.edge_index),
        (DECODER, edges.nearest(mesh.nodes, data, 3)),
    ):
        np.testing.assert_array_equal(graph[kind].edge_index, expected)


@pytest.mark.parametrize("kind", [ENCODER, PROCESSOR, DECODER])
def test_attributes_are_length_and_direction_over_their_spread(graph, kind):
    ends = nodes_of(graph, kind[0]), nodes_of(graph, kind[2]), graph[kind].edge_index.numpy()
    length, direction = edge_length(*ends), edge_direction(*ends)
    np.testing.assert_allclose(graph[kind].edge_length, length / length.std(ddof=1), rtol=1e-4)
    np.testing.assert_allclose(graph[kind].edge_dirs, direction / direction.std(ddof=1), atol=1e-3)


def test_options_reach_their_edges():
    nodes = octahedral(16)
    few, many = (icosphere_graph(nodes, refinement=2, cutoff=c, nearest=k) for c, k in ((0.6, 1), (1.0, 5)))
    assert few[ENCODER].num_edges < many[ENCODER].num_edges
    assert (few[DECODER].num_edges, many[DECODER].num_edges) == (1600, 8000)
    assert few[PROCESSOR].num_edges == many[PROCESSOR].num_edges == 60 * (4 + 16)


def test_limited_area_mesh_is_the_icosphere_near_the_region():
    graph = limited_area_graph(UK, refinement=5, margin=350.0)
    hidden, mesh = nodes_of(graph, "hidden"), icosphere(5)
    angle = np.arccos(np.clip(mesh.nodes.xyz @ UK.xyz.T, -1, 1)).min(axis=1)
    near = angle * EARTH_RADIUS / 1e3 <= 350
    np.testing.assert_allclose(hidden.xyz, mesh.nodes.xyz[near], atol=1e-6)
    assert graph[PROCESSOR].num_edges == near[mesh.edge_index].all(axis=0).sum()


@pytest.mark.parametrize("refinement", [6, 7])
def test_limited_area_mesh_reads_every_data_node(refinement):
    graph = limited_area_graph(UK, refinement=refinement)
    assert len(graph[ENCODER].edge_index[0].unique()) == len(UK)
    assert len(graph[DECODER].edge_index[0].unique()) > 0.7 * graph["hidden"].num_nodes


def test_any_mesh_will_do():
    mesh = icosphere(4).restrict(icosphere(4).nodes.lat > 0)
    graph = encoder_processor_decoder(octahedral(8), mesh, nearest=2)
    assert graph["hidden"].num_nodes == len(mesh.nodes)
    assert graph[DECODER].num_edges == 2 * 544


def test_mesh_too_coarse_for_the_region_raises_and_says_what_to_raise():
    with pytest.raises(ValueError, match=r"at least 3 nodes over the region.*raise refinement or margin"):
        limited_area_graph(UK, refinement=2)


def test_negative_margin_raises():
    with pytest.raises(ValueError, match="margin must not be negative.*-1"):
        limited_area_graph(UK, refinement=6, margin=-1)


def test_stretched_graph_joins_the_grid_to_the_mesh_that_is_finer_over_the_area():
    data = octahedral(32)
    graph = stretched_graph(data, refinement=3, area_refinement=5, area=ALPS, margin=50)
    mesh = stretched_icosphere(3, 5, data[data.inside(ALPS)], 50)
    for kind, expected in (
        (ENCODER, edges.nearest(data, mesh.nodes, 12)),
        (PROCESSOR, mesh.edge_index),
        (DECODER, edges.nearest(mesh.nodes, data, 3)),
    ):
        np.testing.assert_array_equal(graph[kind].edge_index, expected)


def test_options_reach_the_edges_of_a_stretched_graph():
    graph = stretched_graph(
        octahedral(16), refinement=2, area_refinement=3, area=ALPS, margin=200, encoder_nearest=2, nearest=1
    )
    assert graph[ENCODER].num_edges == 2 * graph["hidden"].num_nodes
    assert graph[DECODER].num_edges == 1600


@pytest.fixture(scope="module")
def hierarchy():
    return hierarchical_graph(
        octahedral(16), refinements=(3, 2, 1), down_cutoff=1.2, up_nearest=4, cutoff=0.7, nearest=2
    )


def test_hierarchy_has_nodes_for_each_level_and_edges_within_and_between(hierarchy):
    assert {name: hierarchy[name].num_nodes for name in hierarchy.node_types} == {
        "data": 1600,
        "hidden": 642,
        "hidden_2": 162,
        "hidden_3": 42,
    }
    levels = ["hidden", "hidden_2", "hidden_3"]
    between = {("hidden", "hidden_2"), ("hidden_2", "hidden_3")}
    expected = {(a, "to", a) for a in levels} | {(a, "to", b) for a, b in between} | {(b, "to", a) for a, b in between}
    assert set(hierarchy.edge_types) == expected | {ENCODER, DECODER}
    assert hierarchy.validate()


def test_edges_of_a_hierarchy_go_down_by_cutoff_and_up_from_the_nearest(hierarchy):
    data, fine, coarse = octahedral(16), icosphere(3).nodes, icosphere(2).nodes
    for kind, expected in (
        (ENCODER, edges.cutoff(data, fine, 0.7)),
        (DECODER, edges.nearest(fine, data, 2)),
        (("hidden", "to", "hidden_2"), edges.cutoff(fine, coarse, 1.2)),
        (("hidden_2", "to", "hidden"), edges.nearest(coarse, fine, 4)),
    ):
        np.testing.assert_array_equal(hierarchy[kind].edge_index, expected)


def test_every_level_of_a_hierarchy_has_the_edges_of_all_coarser_ones(hierarchy):
    for name, refinement in (("hidden", 3), ("hidden_2", 2), ("hidden_3", 1)):
        expected = icosphere(refinement, tuple(range(refinement + 1))).edge_index
        np.testing.assert_array_equal(hierarchy[name, "to", name].edge_index, expected)


def test_a_model_reads_data_and_finest_level_of_a_hierarchy(hierarchy):
    model = EncoderProcessorDecoder(hierarchy, 2, 1, channels=8, heads=2, num_layers=1)
    assert model(torch.zeros(1, 1600, 2)).shape == (1, 1600, 1)


@pytest.mark.parametrize("refinements", [(), (3,), (2, 3), (3, 3), (4, 2, 3)])
def test_refinements_that_do_not_fall_raise(refinements):
    with pytest.raises(ValueError, match="two or more, falling from fine to coarse, got"):
        hierarchical_graph(octahedral(8), refinements=refinements)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"cutoff": -0.6}, "factor must be positive, .* got -0.6"),
        ({"nearest": 0}, r"k must be in \[1, 642\]"),
        ({"down_cutoff": 0}, "factor must be positive, .* got 0"),
        ({"up_nearest": 163}, r"k must be in \[1, 162\].*got 163"),
        ({"refinements": (3, 0)}, "refinement must be at least 1, got 0"),
    ],
)
def test_impossible_options_of_a_hierarchy_raise(option, message):
    with pytest.raises(ValueError, match=message):
        hierarchical_graph(octahedral(8), **({"refinements": (3, 2)} | option))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"area": None}, "area must be four numbers.*got None"),
        ({"area": (49, 4, 43)}, "area must be four numbers"),
        ({"area": (43, 4, 49, 17)}, "north above south"),
        ({"area": (49, 4, 48.9, 4.1)}, r"area must hold data nodes.*\[49, 4, 48.9, 4.1\] holds none"),
        ({"area_refinement": 2}, "area_refinement must be above refinement.*got 2 and 2"),
        ({"margin": -1}, "margin must not be negative.*-1"),
        ({"encoder_nearest": 0}, r"k must be in \[1, 1600\]"),
    ],
)
def test_impossible_options_of_a_stretched_graph_raise(option, message):
    with pytest.raises(ValueError, match=message):
        stretched_graph(octahedral(16), **({"refinement": 2, "area_refinement": 3, "area": ALPS} | option))
