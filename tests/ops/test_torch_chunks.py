"""The torch backend computes groups of heads and chunks of edges: their size changes the memory, not the result."""

import pytest
import torch
from support.differentiate import differentiate
from support.oracle import make_problem
from support.run import attend
from support.same_numbers import assert_same

from anemoi_gt import GraphStructure, KernelConfig, edge_attention
from anemoi_gt.ops.torch_backend import edge_attention_torch, reference

BATCH = 2
NODES = 9
EDGES = 40
HEADS = 6
CHANNELS = 4
TORCH = KernelConfig(backend="torch")


class Attention(torch.nn.Module):
    """Attention of named operands; out and lse concatenated."""

    def __init__(self, dropout_p=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.graph = GraphStructure.from_edge_index(
            torch.randint(NODES - 1, (2, EDGES), generator=generator), NODES
        )
        self.dropout_p = dropout_p

    def forward(self, tensors):
        torch.manual_seed(1)
        out, lse = edge_attention(
            **tensors, graph=self.graph, dropout_p=self.dropout_p, config=TORCH
        )
        return torch.cat([out, lse.where(lse.isfinite(), 0.0).unsqueeze(-1)], dim=-1)


def operands(edge_dim):
    generator = torch.Generator().manual_seed(edge_dim)
    shapes = dict.fromkeys(("query", "key", "value"), (BATCH, NODES, HEADS, CHANNELS))
    if edge_dim == 0:
        shapes["edge_attr"] = (BATCH, EDGES, HEADS, CHANNELS)
    else:
        width = HEADS * CHANNELS
        shapes |= {
            "edge_attr": (EDGES, edge_dim),
            "edge_weight": (width, edge_dim),
            "edge_bias": (width,),
        }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


HEAD_GROUPS = [{"MAX_EDGE_HEADS": heads * EDGES} for heads in (1, 2, 3)]
CHUNKS = {"CHUNK": 7 * HEADS * CHANNELS, "NODE_CHUNK": 4}


@pytest.mark.parametrize("dropout_p", (0.0, 0.4))
@pytest.mark.parametrize(
    "edge_dim", (0, 2, 5), ids=("embedded", "fewer than channels", "more than channels")
)
@pytest.mark.parametrize("sizes", [*HEAD_GROUPS, CHUNKS], ids=str)
def test_result_and_gradients_do_not_depend_on_the_sizes(monkeypatch, sizes, edge_dim, dropout_p):
    attention, inputs = Attention(dropout_p), operands(edge_dim)
    expected = differentiate(attention, inputs, attention)
    for name, size in sizes.items():
        monkeypatch.setattr(
            edge_attention_torch if hasattr(edge_attention_torch, name) else reference, name, size
        )
    assert_same(differentiate(attention, inputs, attention), expected, 1e-12)


def test_results_are_bitwise_reproducible_for_any_number_of_threads():
    """A node with a third of the edges would be summed in another order."""
    edge_index = torch.randint(39, (2, 1000), generator=torch.Generator().manual_seed(0))
    edge_index[1, ::3], edge_index[0, 1::3] = 3, 5
    edges = (edge_index, (40, 40))
    threads, graph = torch.get_num_threads(), GraphStructure.from_edge_index(*edges)
    problem = make_problem(edges, 4, 16, 5)
    try:
        results = [
            torch.set_num_threads(number) or attend(problem, graph, "torch") for number in (1, 1, 2)
        ]
    finally:
        torch.set_num_threads(threads)
    assert_same(results[1], results[0], 0)
    assert_same(results[2], results[0], 0)


def test_logits_that_overflow_leave_no_nan():
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 3))
    query, key = torch.full((3, 1, 4), 1e30, requires_grad=True), torch.full((2, 1, 4), -1e30)
    out, lse = edge_attention(query, key, torch.ones(2, 1, 4), graph, config=TORCH)
    assert bool(lse.isneginf().all())
    assert not bool(out.isnan().any())
    (gradient,) = torch.autograd.grad(
        [out, lse], query, [torch.ones_like(out), torch.full_like(lse, torch.nan)]
    )
    assert not bool(gradient.isnan().any())


MOST = edge_attention_torch.MAX_EDGE_HEADS


@pytest.mark.parametrize(
    ("edges", "size"), [(MOST // 6, 6), (MOST // 6 + 1, 3), (MOST // 2, 2), (MOST, 1), (10**9, 1)]
)
def test_head_groups_divide_all_heads_within_the_limit(edges, size):
    assert edge_attention_torch.head_group_size(HEADS, edges) == size
