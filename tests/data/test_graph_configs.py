"""The configs of graphs: each names a builder that takes the data set's nodes, with the options it says."""

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from anemoi_gt.data.graphs import hierarchical_graph, icosphere_graph, stretched_graph
from anemoi_gt.data.grids import octahedral

NODES = octahedral(16)


def graph_config(*overrides):
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        return compose("train", list(overrides)).graph


def assert_same_graph(built, expected):
    assert built.metadata() == expected.metadata()
    for one, other in zip(built.stores, expected.stores, strict=True):
        tensors, expected_tensors = one.to_dict(), other.to_dict()
        assert tensors.keys() == expected_tensors.keys()
        assert all(torch.equal(tensor, expected_tensors[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["graph=icosphere", "graph.refinement=2"], lambda: icosphere_graph(NODES, refinement=2)),
        (
            ["graph=n320", "graph.refinement=2", "graph.cutoff=0.8"],
            lambda: icosphere_graph(NODES, refinement=2, cutoff=0.8),
        ),
        (
            ["graph=stretched", "graph.refinement=2", "graph.area_refinement=4", "graph.area=[49,4,30,17]"],
            lambda: stretched_graph(NODES, refinement=2, area_refinement=4, area=(49, 4, 30, 17)),
        ),
        (
            ["graph=hierarchical", "graph.refinements=[3,2]", "graph.up_nearest=4"],
            lambda: hierarchical_graph(NODES, refinements=(3, 2), up_nearest=4),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_config_builds_the_graph_that_it_names(overrides, expected):
    assert_same_graph(instantiate(graph_config(*overrides))(NODES), expected())


def test_the_benchmark_config_is_icosphere_6_with_anemois_cutoff_and_neighbours():
    config = graph_config("graph=n320")
    assert (config.refinement, config.cutoff, config.nearest) == (6, 0.6, 3)


def test_the_hierarchy_goes_down_by_1_5_spacings_and_up_from_5_nodes():
    config = graph_config("graph=hierarchical")
    assert (list(config.refinements), config.down_cutoff, config.up_nearest) == ([5, 4, 3], 1.5, 5)
