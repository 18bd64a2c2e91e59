"""Encoder-processor-decoder graphs: layout, counts, and that a Hydra config can name their builders."""

import numpy as np
import pytest
import torch

from anemoi_gt.data import edges
from anemoi_gt.data.attributes import edge_direction, edge_length
from anemoi_gt.data.graphs import chord, encoder_processor_decoder, icosphere_graph, limited_area_graph
from anemoi_gt.data.grids import octahedral, regional
from anemoi_gt.data.icosphere import icosphere
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes

ENCODER, PROCESSOR, DECODER = ("data", "to", "hidden"), ("hidden", "to", "hidden"), ("hidden", "to", "data")
UK = regional(np.linspace(58, 50, 33), np.linspace(-10, 2, 49))


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


def test_positions_are_latitude_and_longitude_in_radians(graph):
    np.testing.assert_allclose(graph["data"].x, octahedral(16).radians, atol=3e-7)
    assert graph["hidden"].x[0, 0] == pytest.approx(np.pi / 2)


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
    graph = limited_area_graph(UK, refinement=6, margin=150.0)
    hidden, mesh = nodes_of(graph, "hidden"), icosphere(6)
    angle = np.arccos(np.clip(mesh.nodes.xyz @ UK.xyz.T, -1, 1)).min(axis=1)
    near = angle * EARTH_RADIUS / 1e3 <= 150
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


def test_a_config_names_the_builder_and_the_data_set_gives_the_nodes():
    hydra = pytest.importorskip("hydra.utils")
    config = {"_target_": "anemoi_gt.data.graphs.icosphere_graph", "_partial_": True, "refinement": 2}
    graph = hydra.instantiate(config)(octahedral(8))
    assert graph["hidden"].num_nodes == 162


def test_chord_of_an_angle():
    np.testing.assert_allclose([chord(0.0), chord(np.pi / 3), chord(np.pi), chord(9.0)], [0, 1, 2, 2])


def test_mesh_too_coarse_for_the_region_raises_and_says_what_to_raise():
    with pytest.raises(ValueError, match=r"at least 3 nodes over the region.*raise refinement or margin"):
        limited_area_graph(UK, refinement=2)


def test_negative_margin_raises():
    with pytest.raises(ValueError, match="margin must not be negative.*-1"):
        limited_area_graph(UK, refinement=6, margin=-1)
