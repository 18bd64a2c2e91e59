"""GraphTransformerBlock is its formula, from sources to destinations and within one set of nodes."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from anemoi_gt import AttentionConfig, GraphStructure, GraphTransformerBlock

CHANNELS, HEADS, DIM = 12, 3, 4


@pytest.fixture
def block():
    torch.manual_seed(0)
    block = GraphTransformerBlock(CHANNELS, HEADS, DIM, mlp_ratio=2).double()
    for parameter in block.parameters():  # norms begin as the identity, which would hide a norm in the wrong place
        torch.nn.init.normal_(parameter, std=0.5)
    return block


def make_graph(num_src, num_dst, edges=30):
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.stack([torch.randint(n, (edges,), generator=generator) for n in (num_src, num_dst)])
    edge_attr = torch.randn(edges, DIM, generator=generator, dtype=torch.float64)
    return edge_index, GraphStructure.from_edge_index(edge_index, (num_src, num_dst)), edge_attr


def formula(block, x_src, x_dst, edge_index, edge_attr):
    """The block in plain PyTorch, destination by destination, edge features embedded; x_src, x_dst [N, CHANNELS]."""
    p = dict(block.named_parameters())

    def linear(name, rows):
        return rows @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)

    def norm(name, rows):
        return layer_norm(rows, (CHANNELS,), p[f"{name}.weight"], p[f"{name}.bias"])

    def heads(rows):
        return rows.reshape(-1, HEADS, CHANNELS // HEADS)

    src, dst = norm("norm_attention", x_src), norm("norm_attention", x_dst)
    query, key, value = linear("conv.lin_query", dst), linear("conv.lin_key", src), linear("conv.lin_value", src)
    embedded = linear("conv.lin_edge", edge_attr)
    attended = torch.zeros_like(query)
    for i in range(len(x_dst)):
        into = (edge_index[1] == i).nonzero().flatten()
        k, v = (heads(rows[edge_index[0, into]] + embedded[into]) for rows in (key, value))
        score = torch.einsum("hc,ehc->eh", heads(query[i])[0], k) / (CHANNELS // HEADS) ** 0.5
        attended[i] = torch.einsum("eh,ehc->hc", score.softmax(0), v).flatten()
    x = x_dst + linear("projection", attended + linear("conv.lin_skip", dst))
    return x + linear("mlp.2", gelu(linear("mlp.0", norm("norm_mlp", x))))


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_block_from_sources_to_destinations_is_its_formula(block):
    edge_index, graph, edge_attr = make_graph(9, 6)
    x_src, x_dst = draw(2, 9, CHANNELS), draw(2, 6, CHANNELS)
    expected = [formula(block, x_src[b], x_dst[b], edge_index, edge_attr) for b in range(2)]
    assert_same(block((x_src, x_dst), graph, edge_attr), torch.stack(expected))
    assert_same(block((x_src[0], x_dst[0]), graph, edge_attr), expected[0])


def test_block_within_one_set_of_nodes_is_the_case_where_sources_are_destinations(block):
    edge_index, graph, edge_attr = make_graph(8, 8)
    x = draw(8, CHANNELS)
    assert_same(block(x, graph, edge_attr), formula(block, x, x, edge_index, edge_attr))
    assert_same(block((x, x.clone()), graph, edge_attr), block(x, graph, edge_attr))


def test_gradients_are_those_of_the_formula(block):
    edge_index, graph, edge_attr = make_graph(9, 6)
    leaves = [draw(9, CHANNELS), draw(6, CHANNELS), edge_attr]
    leaves = [leaf.requires_grad_() for leaf in leaves] + list(block.parameters())
    x_src, x_dst = leaves[:2]
    outputs = (block((x_src, x_dst), graph, edge_attr), formula(block, x_src, x_dst, edge_index, edge_attr))
    actual, expected = (torch.autograd.grad((out * draw(6, CHANNELS)).sum(), leaves) for out in outputs)
    assert_same(actual, expected)


def test_exchange_brings_the_sources_that_are_elsewhere(block):
    edge_index, graph, edge_attr = make_graph(8, 8)
    x, here = draw(8, CHANNELS), slice(0, 5)
    mine = edge_index[1] < 5
    part = GraphStructure.from_edge_index(edge_index[:, mine], (8, 5))
    elsewhere = block.norm_attention(x[5:])
    out = block(x[here], part, edge_attr[mine], exchange=lambda features: torch.cat([features, elsewhere]))
    assert_same(out, block(x, graph, edge_attr)[here])


def test_block_without_edge_attributes_works():
    _, graph, _ = make_graph(8, 8)
    block = GraphTransformerBlock(CHANNELS, HEADS)
    assert block(torch.randn(8, CHANNELS), graph).shape == (8, CHANNELS)


def test_dropout_acts_in_training_only():
    _, graph, edge_attr = make_graph(8, 8)
    block = GraphTransformerBlock(CHANNELS, HEADS, DIM, dropout=0.5)
    x, edge_attr = torch.randn(8, CHANNELS), edge_attr.float()
    assert not torch.equal(block(x, graph, edge_attr), block(x, graph, edge_attr))
    block.eval()
    assert torch.equal(block(x, graph, edge_attr), block(x, graph, edge_attr))


def test_config_reaches_the_attention():
    _, graph, edge_attr = make_graph(8, 8)
    block = GraphTransformerBlock(CHANNELS, HEADS, DIM, config=AttentionConfig(backend="torch", precision="bf16"))
    full = GraphTransformerBlock(CHANNELS, HEADS, DIM)
    full.load_state_dict(block.state_dict())
    x, edge_attr = torch.randn(8, CHANNELS), edge_attr.float()
    difference = (block(x, graph, edge_attr) - full(x, graph, edge_attr)).abs().max()
    assert 0 < difference < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 3), "channels must be a multiple of heads, got 10 channels and 3 heads"),
        ((12, 0), "got 12 channels and 0 heads"),
        ((0, 2), "got 0 channels and 2 heads"),
    ],
)
def test_channels_that_heads_do_not_divide_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GraphTransformerBlock(*arguments)


def test_feed_forward_network_without_width_is_refused():
    with pytest.raises(ValueError, match=r"mlp_ratio \* channels must be at least 1, got 0.01 \* 12"):
        GraphTransformerBlock(CHANNELS, HEADS, mlp_ratio=0.01)
