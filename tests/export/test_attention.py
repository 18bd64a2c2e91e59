"""Attention in exported programs on the backend torch: only PyTorch's operators, and the results of the custom one."""

import pytest
import torch
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import structure

from anemoi_gt.ops.torch_backend.export_decomposition import decompose
from anemoi_gt.ops.torch_backend.op import edge_attention_torch

SHAPE = (3, 4, 2)  # heads, channels, attributes


def arguments(name, form, dtype, batch, shared):
    """Arguments of the operator and of its decomposition."""
    problems = [make_problem(GRAPHS[name], *SHAPE, form, dtype, seed) for seed in range(batch)]

    def stack(field):
        found = [getattr(problem, field) for problem in problems]
        return None if found[0] is None else torch.stack(found).detach()

    attr, first = stack("edge_attr"), problems[0]
    attr = attr[:1] if shared and attr is not None else attr
    weight, bias = (None if tensor is None else tensor.detach() for tensor in (first.edge_weight, first.edge_bias))
    graph = structure(GRAPHS[name], torch.device("cpu"))
    sides = (graph.colptr, graph.row, graph.perm, graph.global_edge_id, None, None, None)
    return (*map(stack, ("query", "key", "value")), attr, weight, bias, *sides, None, 0.3, 0.0, False)


@pytest.mark.parametrize("shared", [True, False], ids=["shared attributes", "batched attributes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["raw", "raw_without_bias", "embedded", "none"])
@pytest.mark.parametrize("name", GRAPHS)
def test_decomposition_agrees_with_the_operator(name, form, dtype, shared):
    operands = arguments(name, form, dtype, 2, shared)
    for expected, actual in zip(edge_attention_torch(*operands), decompose(*operands), strict=True):
        assert (actual.dtype, actual.is_contiguous()) == (expected.dtype, True)
        torch.testing.assert_close(actual, expected)


def test_dropout_raises():
    operands = arguments("shuffled", "raw", torch.float32, 1, True)
    with pytest.raises(ValueError, match="exported for inference, got dropout_p=0.1; call model.eval"):
        decompose(*operands[:-4], torch.tensor([1]), 0.3, 0.1, False)
