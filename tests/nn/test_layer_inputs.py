"""Wrong inputs are refused in the terms of the layer that got them, not of what it calls."""

import pytest
import torch
from support.refusals import raises, refused
from support.weather import IN, OUT, weather_graph

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
ATTR, X, NARROW = torch.ones(2, 3), torch.ones(2, 16), torch.ones(2, 15)
BLOCK = {"in_channels": 16, "hidden_dim": 32, "out_channels": 16, "num_heads": 2, "edge_dim": 3}
SIZES = {"num_channels": 16, "num_heads": 2, "edge_dim": 3}
LAYERS = {
    "conv": GraphTransformerConv(16, 8, heads=2, edge_dim=3),
    "block": GraphTransformerProcessorBlock(**BLOCK),
    "processor": GraphTransformerProcessor(num_layers=1, **SIZES),
}
PAIRED = {
    "mapper block": GraphTransformerMapperBlock(**BLOCK),
    "mapper": GraphTransformerForwardMapper(in_channels_src=16, in_channels_dst=16, **SIZES),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_wrong_number_of_channels_is_refused(layer):
    raises(lambda: layer(NARROW, GRAPH, ATTR), r"x\w* must have shape \[N, 16\] or \[B, N, 16\], got \(2, 15\)")


@pytest.mark.parametrize("layer", PAIRED.values(), ids=PAIRED)
@pytest.mark.parametrize(
    ("x", "message"),
    [
        ((X, NARROW), r"x_dst must have shape \[N, 16\] or \[B, N, 16\], got \(2, 15\)"),
        (X, r"x must be a pair of tensors \(x_src, x_dst\), got Tensor"),
        ((X,) * 3, r"x must be a pair of tensors \(x_src, x_dst\), got 3 elements"),
    ],
)
def test_a_wrong_pair_is_refused(layer, x, message):
    raises(lambda: layer(x, GRAPH, ATTR), message)


@refused(
    [
        (lambda: LAYERS["block"](X, EDGES, ATTR), r"graph must be a GraphStructure, got Tensor; .*from_edge_index"),
        (lambda: LAYERS["processor"](X, EDGES, ATTR), r"graph must be a GraphStructure, got Tensor; .*from_edge_index"),
        (lambda: LAYERS["block"](X, object(), ATTR), "graph must be a GraphStructure, got object"),
        (lambda: LAYERS["block"]([1.0], GRAPH, ATTR), "x must be a tensor .*, got list"),
        (lambda: LAYERS["processor"]([1.0], GRAPH, ATTR), "x must be a tensor .*, got list"),
        (
            lambda: GraphStructure.from_edge_index([[0], [1]], (2, 2)),
            r"edge_index must be a tensor \[2, E\], got list",
        ),
        (
            lambda: EncoderProcessorDecoder(weather_graph(), IN, OUT, channels=8, heads=2)([1.0]),
            r"x must be a tensor \[B, 30, 5\], got list",
        ),
    ]
)
def test_an_input_of_a_wrong_type_is_refused(call, message):
    raises(call, message)
