"""The `torch` backend computes some heads at a time: how many changes the memory, not the result."""

import pytest
import torch
from support.differentiate import differentiate

from anemoi_gt import AttentionConfig, GraphStructure, edge_attention
from anemoi_gt.ops.torch_backend import op
from anemoi_gt.ops.torch_backend import reference as definition

NODES, EDGES, HEADS, CHANNELS = 9, 40, 6, 4
TORCH = AttentionConfig(backend="torch")


class Attention(torch.nn.Module):
    """Attention of named operands, out and lse side by side."""

    def __init__(self, dropout_p=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.graph = GraphStructure.from_edge_index(torch.randint(NODES - 1, (2, EDGES), generator=generator), NODES)
        self.dropout_p = dropout_p

    def forward(self, tensors):
        torch.manual_seed(1)
        out, lse = edge_attention(**tensors, graph=self.graph, dropout_p=self.dropout_p, config=TORCH)
        return torch.cat([out, lse.where(lse.isfinite(), 0.0).unsqueeze(-1)], dim=-1)


def operands(edge_dim, samples=2):
    generator = torch.Generator().manual_seed(edge_dim)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    nodes = {name: draw(samples, NODES, HEADS, CHANNELS) for name in ("query", "key", "value")}
    if edge_dim == 0:
        return nodes | {"edge_attr": draw(samples, EDGES, HEADS, CHANNELS)}
    return nodes | {
        "edge_attr": draw(EDGES, edge_dim),
        "edge_weight": draw(HEADS * CHANNELS, edge_dim),
        "edge_bias": draw(HEADS * CHANNELS),
    }


@pytest.mark.parametrize("dropout_p", (0.0, 0.4))
@pytest.mark.parametrize("edge_dim", (0, 2, 5), ids=("embedded", "fewer than channels", "more than channels"))
@pytest.mark.parametrize("together", (1, 2, 3))
def test_result_and_gradients_do_not_depend_on_how_many_heads_are_together(monkeypatch, together, edge_dim, dropout_p):
    attention, inputs = Attention(dropout_p), operands(edge_dim)
    expected = differentiate(attention, inputs, attention)
    monkeypatch.setattr(op, "PAIRS", together * EDGES)
    for name, value in differentiate(attention, inputs, attention).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("edge_dim", (0, 2, 5))
def test_result_and_gradients_do_not_depend_on_the_pieces(monkeypatch, edge_dim):
    attention, inputs = Attention(), operands(edge_dim)
    expected = differentiate(attention, inputs, attention)
    monkeypatch.setattr(definition, "PIECE", 7 * HEADS * CHANNELS)
    monkeypatch.setattr(definition, "NODES", 4)
    for name, value in differentiate(attention, inputs, attention).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("edges", "together"), [(op.PAIRS // 6, 6), (op.PAIRS // 6 + 1, 3), (op.PAIRS // 2, 2), (op.PAIRS, 1), (10**9, 1)]
)
def test_heads_together_divide_all_heads_and_stay_below_the_limit(edges, together):
    rows = torch.empty(1, 1, HEADS, 1)
    operands = op.Operands(rows, rows, rows, None, None, None, None, 1.0, 0.0)
    assert op._heads_together(operands, edges) == together


def test_embedded_attributes_are_made_for_a_piece_of_the_edges_at_a_time(monkeypatch):
    attention, inputs, made = Attention(), operands(5), []
    embed = definition.Heads.embed_shared

    def spy(heads, rows):
        made.append(embed(heads, rows))
        return made[-1]

    monkeypatch.setattr(definition, "PIECE", 7 * HEADS * CHANNELS)
    monkeypatch.setattr(definition.Heads, "embed_shared", spy)
    attention(inputs)
    assert max(rows.shape[0] for rows in made) == 7
