"""What layers are given wrongly is refused in words of the layer, not of what it calls."""

import pytest
import torch

from anemoi_gt import GraphStructure
from anemoi_gt.nn import (
    EncoderProcessorDecoder,
    GraphTransformerConv,
    GraphTransformerForwardMapper,
    GraphTransformerMapperBlock,
    GraphTransformerProcessor,
    GraphTransformerProcessorBlock,
)

EDGES = torch.tensor([[0, 1], [1, 0]])
GRAPH = GraphStructure.from_edge_index(EDGES, (2, 2))
ATTR = torch.ones(2, 3)
SIZES = {"in_channels": 16, "hidden_dim": 32, "out_channels": 16, "num_heads": 2, "edge_dim": 3}


def features(channels=16):
    return torch.ones(2, channels)


@pytest.fixture(scope="module")
def layers():
    return {
        "conv": GraphTransformerConv(16, 8, heads=2, edge_dim=3),
        "block": GraphTransformerProcessorBlock(**SIZES),
        "pair": GraphTransformerMapperBlock(**SIZES),
        "processor": GraphTransformerProcessor(num_layers=1, num_channels=16, num_heads=2, edge_dim=3),
        "mapper": GraphTransformerForwardMapper(
            in_channels_src=16, in_channels_dst=4, num_channels=16, num_heads=2, edge_dim=3
        ),
    }


@pytest.mark.parametrize("name", ["conv", "block", "processor"])
def test_a_wrong_number_of_channels_is_named(layers, name):
    with pytest.raises(ValueError, match=r"x\w* must have shape \[N, 16\] or \[B, N, 16\], got \(2, 15\)"):
        layers[name](features(15), GRAPH, ATTR)


@pytest.mark.parametrize("name", ["pair", "mapper"])
def test_a_wrong_number_of_channels_of_one_side_is_named(layers, name):
    with pytest.raises(ValueError, match=r"x_dst must have shape \[N, \d+\] or \[B, N, \d+\], got \(2, 15\)"):
        layers[name]((features(), features(15)), GRAPH, ATTR)


@pytest.mark.parametrize("name", ["pair", "mapper"])
@pytest.mark.parametrize(("x", "got"), [(features(), "Tensor"), ((features(),) * 3, "3 elements")])
def test_what_is_no_pair_is_refused(layers, name, x, got):
    with pytest.raises(ValueError, match=rf"x must be a pair of tensors \(x_src, x_dst\), got {got}"):
        layers[name](x, GRAPH, ATTR)


@pytest.mark.parametrize("name", ["block", "processor"])
def test_an_edge_index_in_place_of_a_structure_is_refused_with_the_remedy(layers, name):
    with pytest.raises(ValueError, match=r"graph must be a GraphStructure, got Tensor; .*from_edge_index"):
        layers[name](features(), EDGES, ATTR)


def test_what_attends_in_place_of_a_structure_must_start_too(layers):
    class Stand:
        def attend(self, *arguments, **options):
            raise AssertionError("must not be asked")

    with pytest.raises(ValueError, match="graph must be a GraphStructure, got Stand"):
        layers["block"](features(), Stand(), ATTR)


@pytest.mark.parametrize("name", ["block", "processor"])
def test_lists_are_no_features(layers, name):
    with pytest.raises(ValueError, match="x must be a tensor .*, got list"):
        layers[name]([1.0], GRAPH, ATTR)


def test_a_list_is_no_edge_index():
    with pytest.raises(ValueError, match=r"edge_index must be a tensor \[2, E\], got list"):
        GraphStructure.from_edge_index([[0], [1]], (2, 2))


def test_a_list_is_no_input_of_a_model(small_model):
    with pytest.raises(ValueError, match=r"x must be a tensor \[B, \d+, \d+\], got list"):
        small_model([1.0])


@pytest.fixture
def small_model():
    from anemoi_gt.data.graphs import icosphere_graph
    from anemoi_gt.data.grids import grid

    graph = icosphere_graph(grid("O2"), refinement=1)
    return EncoderProcessorDecoder(graph, 2, 2, channels=8, num_layers=1, heads=2)
