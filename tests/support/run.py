"""Running `edge_attention` on a problem of the oracle, with all gradients, by name."""

import torch

from anemoi_gt import AttentionConfig, GraphStructure, edge_attention


def structure(graph):
    """GraphStructure of (edge_index, (num_src, num_dst))."""
    edge_index, sizes = graph
    return GraphStructure.from_edge_index(edge_index, sizes)


def attend(problem, graph, backend, **options):
    """out, lse and the gradients of every operand, by name."""
    leaves = {name: operand.detach().clone().requires_grad_() for name, operand in problem.operands().items()}
    config = AttentionConfig(backend=backend)
    out, lse = edge_attention(graph=graph, config=config, scale=problem.scale, **leaves, **options)
    finite = torch.isfinite(lse)
    loss = (out * problem.grad_out).sum() + (lse[finite] * problem.grad_lse.to(lse.dtype)[finite]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    result = {"out": out.detach(), "lse": lse.detach()}
    return result | {"d" + name: gradient for name, gradient in zip(leaves, gradients, strict=True)}
