"""Attention weights for inspection."""

import pytest
import torch
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import structure

from anemoi_gt import KernelConfig, attention_weights, edge_attention

GRAPH = structure(GRAPHS["shuffled"])
F64 = {"rtol": 1e-12, "atol": 1e-12}


def weights(problem):
    edges = {
        name: operand for name, operand in problem.operands().items() if name.startswith("edge")
    }
    return attention_weights(problem.query, problem.key, GRAPH, **edges)


@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
def test_they_reproduce_the_output_in_the_callers_edge_order(form):
    problem = make_problem(GRAPHS["shuffled"], 3, 4, 5, form, torch.float64)
    src, dst = problem.edge_index
    value = problem.value[src]
    if form == "raw":
        value = value + (problem.edge_attr @ problem.edge_weight.T + problem.edge_bias).view_as(
            value
        )
    elif form == "embedded":
        value = value + problem.edge_attr
    out = torch.zeros_like(problem.query).index_add(0, dst, weights(problem)[..., None] * value)
    expected, _ = edge_attention(**problem.operands(), graph=GRAPH, config=KernelConfig("torch"))
    torch.testing.assert_close(out, expected, **F64)


@pytest.mark.parametrize("form", ["raw", "embedded"])
def test_autocast_rounds_only_the_operands(form):
    problem = make_problem(GRAPHS["shuffled"], 3, 4, 5, form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = weights(problem)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p, weights(problem.to(torch.bfloat16)), rtol=0, atol=0)
