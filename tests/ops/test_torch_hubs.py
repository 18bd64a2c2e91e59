"""Nodes with a large share of the edges, on backend `torch`: the definition, and the same bits with any threads."""

import pytest
import torch
from support.oracle import make_problem, oracle
from support.run import attend
from support.same_numbers import assert_same

from anemoi_gt import GraphStructure
from anemoi_gt.ops.torch_backend import edge_attention_torch

NODES = 40
EDGES = 1000


def hubs(seed=0):
    """A graph in which node 3 is the destination, and node 5 the source, of a third of the edges each."""
    edge_index = torch.randint(NODES - 1, (2, EDGES), generator=torch.Generator().manual_seed(seed))
    edge_index[1, ::3], edge_index[0, 1::3] = 3, 5
    return edge_index, (NODES, NODES)


@pytest.mark.parametrize("heads_at_a_time", (1, 3))
@pytest.mark.parametrize("form", ("raw", "embedded", "none"))
def test_a_graph_with_hubs_matches_the_definition(monkeypatch, form, heads_at_a_time):
    monkeypatch.setattr(edge_attention_torch, "MAX_EDGE_HEADS", heads_at_a_time * EDGES)
    problem = make_problem(hubs(), 3, 4, 5, form, torch.float64)
    assert_same(
        attend(problem, GraphStructure.from_edge_index(*hubs()), "torch"), oracle(problem), 1e-12
    )


def test_hubs_are_bitwise_reproducible_for_any_number_of_threads():
    threads, graph = torch.get_num_threads(), GraphStructure.from_edge_index(*hubs())
    problem = make_problem(hubs(), 4, 16, 5, "raw", torch.float32)
    try:
        results = [
            torch.set_num_threads(number) or attend(problem, graph, "torch") for number in (1, 1, 2)
        ]
    finally:
        torch.set_num_threads(threads)
    assert_same(results[1], results[0], 0)
    assert_same(results[2], results[0], 0)
