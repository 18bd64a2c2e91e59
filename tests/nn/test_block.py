"""Blocks beyond parity with anemoi-models: batch, dropout, config, memory, wrong options."""

import copy
from functools import partial

import pytest
import torch
from support.differentiate import draw, randomise
from support.refusals import raises, refused
from support.same_numbers import assert_same

from anemoi_gt import (
    GraphStructure,
    GraphTransformerMapperBlock,
    GraphTransformerProcessorBlock,
    KernelConfig,
)
from anemoi_gt.nn import ConditionalLayerNorm, LayerKernels

CHANNELS = 12
HEADS = 3
DIM = 4
SIZES = {
    "in_channels": CHANNELS,
    "hidden_dim": 20,
    "out_channels": CHANNELS,
    "num_heads": HEADS,
    "edge_dim": DIM,
}
KINDS = {"processor": GraphTransformerProcessorBlock, "mapper": GraphTransformerMapperBlock}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make_block(kind, **options):
    return randomise(KINDS[kind](**SIZES | options).double())


def make_edges(num_src, num_dst, edges=30):
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.stack(
        [torch.randint(n, (edges,), generator=generator) for n in (num_src, num_dst)]
    )
    return edge_index, torch.randn(edges, DIM, generator=generator, dtype=torch.float64)


def run(block, x, edge_index, edge_attr, **options):
    """Return the block's destinations, from nodes x to themselves, for either kind."""
    graph = GraphStructure.from_edge_index(edge_index, x.shape[-2])
    if isinstance(block, GraphTransformerProcessorBlock):
        return block(x, graph, edge_attr, **options)
    return block((x, x), graph, edge_attr, **options)[1]


@every_kind
@pytest.mark.parametrize(
    "shared", (True, False), ids=("one edge_attr", "edge_attr per batch element")
)
def test_a_batch_on_one_graph_matches_its_elements(kind, shared):
    block, (edge_index, _), x = make_block(kind), make_edges(8, 8), draw(2, 8, CHANNELS)
    edge_attr = draw(30, DIM) if shared else draw(2, 30, DIM)
    expected = [
        run(block, x[i], edge_index, edge_attr if shared else edge_attr[i]) for i in range(2)
    ]
    assert_same(run(block, x, edge_index, edge_attr), torch.stack(expected), 1e-12)


def test_layer_norm_attention_dest_stays_an_alias_in_a_copy():
    block = copy.deepcopy(make_block("mapper"))
    assert block.layer_norm_attention_dest is block.layer_norm_attention
    assert {name for name, _ in block.named_parameters()} < set(block.state_dict())


@every_kind
def test_dropout_acts_in_training_only(kind):
    block, edges, x = make_block(kind, dropout=0.5), make_edges(8, 8), draw(8, CHANNELS)
    assert not torch.equal(run(block, x, *edges), run(block, x, *edges))
    block.eval()
    assert torch.equal(run(block, x, *edges), run(block, x, *edges))


@every_kind
def test_config_reaches_the_attention(kind):
    edges, x = make_edges(8, 8), draw(8, CHANNELS)
    block = make_block(kind, config=KernelConfig(backend="torch", precision="bf16"))
    difference = (run(block, x, *edges) - run(make_block(kind), x, *edges)).abs().max()
    assert 0 < difference < 0.5


@refused(
    ({"num_heads": 5}, "num_heads must divide the attention channels, got 5 heads and 12 channels"),
    ({"attn_channels": 10}, "got 3 heads and 10 channels"),
    ({"out_channels": 8}, "must equal out_channels \\(residual connection\\), got 12 and 8"),
    ({"mlp_implementation": "moe"}, "mlp_implementation must be one of mlp, glu, .* got 'moe'"),
    ({"dropout": 1.5}, r"dropout must be a probability in 0 .. 1, got 1.5"),
)
@every_kind
def test_wrong_option_is_refused(kind, wrong, message):
    raises(lambda: KINDS[kind](**SIZES | wrong), message)


@every_kind
def test_conditional_norms_without_a_condition_are_refused(kind):
    block = make_block(
        kind, layer_kernels=LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=2))
    )
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cond'"):
        run(block, draw(8, CHANNELS), *make_edges(8, 8))


@every_kind
def test_a_condition_for_unconditional_norms_raises(kind):
    cond = draw(8, 2) if kind == "processor" else (draw(8, 2), draw(8, 2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'cond'"):
        run(make_block(kind), draw(8, CHANNELS), *make_edges(8, 8), cond=cond)
