"""Attention weights are float32 whatever autocast is on."""

import pytest
import torch
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import structure

from anemoi_gt import attention_weights


@pytest.mark.parametrize("form", ["raw", "embedded"])
def test_autocast_rounds_the_operands_and_nothing_after_them(form):
    problem, graph = make_problem(GRAPHS["shuffled"], 3, 4, 5, form), structure(GRAPHS["shuffled"])

    def weights(problem):
        edges = {name: operand for name, operand in problem.operands().items() if name.startswith("edge")}
        return attention_weights(problem.query, problem.key, graph, **edges)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = weights(problem)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p, weights(problem.to(torch.bfloat16)), rtol=0, atol=0)
