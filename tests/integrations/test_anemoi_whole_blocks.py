"""Whole blocks by one operator under `install(blocks=True)`: numbers, compiled code, and what is refused."""

from functools import partial

import pytest
import torch
from anemoi.models.layers.block import GraphTransformerMapperBlock, GraphTransformerProcessorBlock
from anemoi.models.layers.normalization import AutocastLayerNorm
from anemoi.models.triton.gt import graph_transformer_attention_conv
from support import anemoi_model as small
from support.anemoi_model import block_inputs, differentiate_block, make_block
from support.same_numbers import assert_same_numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

from anemoi_gt.integrations import anemoi as integration

KINDS = {"processor": GraphTransformerProcessorBlock, "mapper": GraphTransformerMapperBlock}
BACKENDS = ("pyg", "triton")
SERVED = ({}, {"edge_pre_mlp": True}, {"attn_channels": 8}, {"shard_strategy": "heads"}, {"bias": False})
OPERATOR = "anemoi_gt.transformer_block.default"


def block_of(kind, backend="pyg", **options):
    """A block, as a GPU machine would have it with the backend `triton`."""
    block = make_block(KINDS[kind], **options)
    if backend == "triton":
        del block.conv
        block.conv, block.graph_attention_backend = graph_transformer_attention_conv, "triton"
    return block


@pytest.fixture
def traced():
    """A backend of torch.compile, and the names of what its graphs call."""
    torch.compiler.reset()
    graphs = []

    def backend(module, inputs):
        modules = [each for each in module.modules() if isinstance(each, torch.fx.GraphModule)]
        graphs.append([str(node.target) for each in modules for node in each.graph.nodes])
        return module.forward

    return backend, graphs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", SERVED, ids=str)
def test_a_compiled_block_is_one_operator_with_the_same_numbers(kind, backend, options, traced):
    compiler, graphs = traced
    inputs = block_inputs(KINDS[kind])
    expected = differentiate_block(make_block(KINDS[kind], **options), inputs)
    block = block_of(kind, backend, **options)
    names = list(block.state_dict())
    with integration.install(blocks=True):
        assert_same_numbers(differentiate_block(block, inputs), expected)
        compiled = torch.compile(block, fullgraph=True, backend=compiler)
        assert_same_numbers(differentiate_block(block, inputs, compiled), expected)
    (graph,) = graphs
    assert graph.count(OPERATOR) == 1
    assert not [name for name in graph if "edge_attention" in name or "linear" in name and not options]
    assert list(block.state_dict()) == names
