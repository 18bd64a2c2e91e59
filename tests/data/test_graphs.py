"""Encoder-processor-decoder graphs: layout, counts and options; test_anemoi_graphs.py compares attributes."""

import numpy as np
import pytest
import torch
from support.refusals import raises, refused

from anemoi_gt.data import edges, graphs
from anemoi_gt.data.graphs import (
    icosphere_graph,
    limited_area_graph,
    stretched_graph,
)
from anemoi_gt.data.grids import classic, octahedral, regional
from anemoi_gt.data.meshes import icosphere, stretched_icosphere
from anemoi_gt.data.nodes import Nodes

ENCODER = ("data", "to", "hidden")
PROCESSOR = ("hidden", "to", "hidden")
DECODER = ("hidden", "to", "data")
O8 = octahedral(8)
O16 = octahedral(16)
UK = regional(np.linspace(58, 50, 33), np.linspace(-10, 2, 49))
ALPS = (49.0, 4.0, 43.0, 17.0)


def assert_edges(graph, expected):
    for kind, edge_index in expected.items():
        np.testing.assert_array_equal(graph[kind].edge_index, edge_index, err_msg=str(kind))


@pytest.fixture(scope="module")
def graph():
    return icosphere_graph(O16, refinement=3)


def test_layout_equals_anemoi_graphs_with_positions_in_radians(graph):
    assert graph.metadata() == (["data", "hidden"], [ENCODER, PROCESSOR, DECODER])
    assert graph.validate()
    np.testing.assert_allclose(graph["data"].x, O16.radians, atol=3e-7)
    assert graph["hidden"].x[0, 0] == pytest.approx(np.pi / 2)
    for name, size in (("data", 1600), ("hidden", 642)):
        assert graph[name].x.shape == (size, 2)
        assert graph[name].x.dtype == torch.float32
    for store in graph.edge_stores:
        assert store.edge_index.dtype == torch.int64
        # from others PyTorch's conversion to CSR reads wrong indices
        assert store.edge_index.is_contiguous()
        assert store.edge_length.shape == (store.num_edges, 1)
        assert store.edge_length.dtype == torch.float32
        assert store.edge_dirs.shape == (store.num_edges, 2)
        assert store.edge_dirs.dtype == torch.float32


@pytest.mark.nightly
@pytest.mark.application
def test_the_benchmark_graph_has_its_published_counts():
    graph = icosphere_graph(classic(320), refinement=6)
    assert {name: graph[name].num_nodes for name in graph.node_types} == {
        "data": 542_080,
        "hidden": 40_962,
    }
    counts = {kind: graph[kind].num_edges for kind in graph.edge_types}
    assert counts == {ENCODER: 852_840, PROCESSOR: 327_600, DECODER: 1_626_240}


@pytest.mark.parametrize("refinement", [6, 7])
def test_limited_area_graph_connects_every_data_node(refinement):
    graph = limited_area_graph(UK, refinement=refinement)
    assert len(graph[ENCODER].edge_index[0].unique()) == len(UK)
    assert len(graph[DECODER].edge_index[0].unique()) > 0.7 * graph["hidden"].num_nodes


def test_encoder_processor_decoder_accepts_any_mesh():
    mesh = icosphere(4).restrict(icosphere(4).nodes.lat > 0)
    graph = graphs.encoder_processor_decoder(O8, mesh, nearest=2)
    assert graph["hidden"].num_nodes == len(mesh.nodes)
    assert graph[DECODER].num_edges == 2 * 544


@pytest.mark.parametrize(("encoder_nearest", "nearest"), [(12, 3), (2, 1)])
def test_stretched_graph_connects_the_grid_to_the_mesh_that_is_finer_over_the_area(
    encoder_nearest, nearest
):
    data = octahedral(32)
    options = {"margin": 50, "encoder_nearest": encoder_nearest, "nearest": nearest}
    graph = stretched_graph(data, refinement=3, area_refinement=5, area=ALPS, **options)
    mesh = stretched_icosphere(3, 5, data[data.inside(ALPS)], 50)
    encoder = edges.nearest(data, mesh.nodes, encoder_nearest)
    decoder = edges.nearest(mesh.nodes, data, nearest)
    assert_edges(graph, {ENCODER: encoder, PROCESSOR: mesh.edge_index, DECODER: decoder})


STRETCHED = {"refinement": 2, "area_refinement": 3, "area": ALPS}


@refused(
    (
        limited_area_graph,
        UK,
        {"refinement": 2},
        "at least 3 nodes over the region.*raise refinement or margin",
    ),
    (limited_area_graph, UK, {"refinement": 6, "margin": -1}, "margin must not be negative.*-1"),
    (stretched_graph, O16, STRETCHED | {"area": None}, "area must be four numbers.*got None"),
    (stretched_graph, O16, STRETCHED | {"area": (43, 4, 49, 17)}, "north above south"),
    (
        stretched_graph,
        O16,
        STRETCHED | {"area": (49, 4, 48.9, 4.1)},
        r"contain data nodes.*\[49, 4, 48.9, 4.1",
    ),
    (
        stretched_graph,
        O16,
        STRETCHED | {"area_refinement": 2},
        "must be above refinement.*got 2 and 2",
    ),
    (stretched_graph, O16, STRETCHED | {"margin": -1}, "margin must not be negative.*-1"),
    (stretched_graph, O16, STRETCHED | {"encoder_nearest": 0}, r"k must be in \[1, 1600\]"),
)
def test_option_out_of_range_raises(wrong, message):
    build, nodes, options = wrong
    raises(lambda: build(nodes, **options), message)


WEATHERBENCH = regional(np.linspace(87.1875, -87.1875, 32), np.arange(64) * 5.625)


@pytest.mark.parametrize("nodes", [WEATHERBENCH, UK, O16])
def test_the_default_graph_reads_every_data_node(nodes, caplog):
    options = {"margin": None, "refinement": None}
    before = limited_area_graph(nodes, **options)[ENCODER].edge_index
    unread = np.setdiff1d(np.arange(len(nodes)), before[0])
    with caplog.at_level("INFO", "anemoi_gt"):
        graph = limited_area_graph(nodes, **options, connect_all=True)
    encoder = graph[ENCODER].edge_index
    assert len(encoder[0].unique()) == len(nodes)
    assert encoder.shape[1] == before.shape[1] + len(unread)
    assert (f"{len(unread)} of {len(nodes)} data nodes are beyond" in caplog.text) == bool(
        len(unread)
    )
    assert torch.equal(encoder, torch.from_numpy(edges.sort_by_destination(encoder.numpy())))


def test_an_added_edge_goes_to_the_nearest_hidden_node():
    graph = limited_area_graph(WEATHERBENCH, margin=None, connect_all=True)
    before = limited_area_graph(WEATHERBENCH, margin=None)[ENCODER].edge_index
    unread = torch.tensor(np.setdiff1d(np.arange(len(WEATHERBENCH)), before[0]))
    source, destination = graph[ENCODER].edge_index
    hidden = nodes_of(graph, "hidden")
    nearest = edges.nearest(hidden, WEATHERBENCH[unread.numpy()], 1)[0]
    added = torch.isin(source, unread)
    order = source[added].argsort()
    assert torch.equal(destination[added][order], torch.from_numpy(nearest))
    assert len(unread) == 60


def nodes_of(graph, name):
    lat, lon = np.rad2deg(graph[name].x.double().numpy()).T
    return Nodes(lat.clip(-90, 90), lon)


def test_data_that_no_encoder_edge_reads_are_logged_and_refused_beyond_a_tenth(caplog):
    graphs.check_fit(icosphere_graph(O16, refinement=2))
    assert "16 of 1600 data nodes have no edge to a hidden node" in caplog.text
    fine = regional(np.arange(50, 55, 0.1), np.arange(0, 5, 0.1))
    graph = limited_area_graph(fine, refinement=5)
    message = r"must read the data, \d+ of 2500 data nodes have no edge .* take graph=default"
    with pytest.raises(ValueError, match=message):
        graphs.check_fit(graph)
    with pytest.raises(
        ValueError, match=r"cutoff must connect most data nodes .* raise refinement"
    ):
        limited_area_graph(fine, refinement=5, connect_all=True)


@refused(
    (lambda: icosphere(20), "refinement must be at most 11 .*, got 20"),
    (lambda: limited_area_graph(UK, refinement=20), "refinement must be at most 11 .*, got 20"),
    (lambda: stretched_icosphere(3, 12, UK), "area_refinement must be at most 11 .*, got 12"),
)
def test_a_refinement_that_would_fill_the_memory_is_refused(wrong, message):
    raises(wrong, message)
