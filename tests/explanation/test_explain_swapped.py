"""explain on models that others wrote, whose layers were swapped for ours."""

import pytest
import torch
from support.anemoi_model import build, draw, graph_of, make_options
from torch import nn
from torch_geometric.nn import TransformerConv

from anemoi_gt import explain
from anemoi_gt.integrations import anemoi, pyg

EDGES = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 2]])


def test_swapped_layers_of_pyg_are_told():
    model = pyg.swap_layers(nn.ModuleDict({"conv": TransformerConv(4, 8, edge_dim=3)}))
    model.forward = lambda *inputs: model["conv"](*inputs)
    (layer,) = explain(model, torch.randn(3, 4), EDGES, torch.randn(4, 3)).layers
    assert (layer.name, layer.module, layer.backend) == ("conv", "GraphTransformerConv", "torch")


@pytest.mark.parametrize("fuse_edges", [True, False])
def test_swapped_blocks_of_anemoi_are_told_and_their_edges_stay_raw(anemoi_as_it_is, fuse_edges):
    graph = graph_of("O4", 1)
    model = build(graph, make_options())
    with anemoi.install(fuse_edges=fuse_edges):
        found = explain(model, draw(graph))
    assert len(found.layers) >= 3 and all("proc" in layer.name for layer in found.layers)
    assert {layer.features for layer in found.layers} == {"raw" if fuse_edges else "embedded"}
    assert all(layer.module.startswith("GraphTransformer") for layer in found.layers)
