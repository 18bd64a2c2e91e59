"""`edge_attention` of a problem of the oracle, with all gradients by name."""

import torch

from anemoi_gt import AttentionConfig, GraphStructure, edge_attention


def structure(graph, device="cpu"):
    """Return the GraphStructure of (edge_index, (num_src, num_dst)) on `device`."""
    edge_index, sizes = graph
    return GraphStructure.from_edge_index(edge_index.to(device), sizes)


def attend(problem, graph, backend, **options):
    """Return out, lse and the gradients of every operand by name, on the CPU; computed on the device of `graph`.

    An upstream gradient of the problem that is None is not passed.
    """
    leaves = {
        name: operand.detach().to(graph.device, copy=True).requires_grad_()
        for name, operand in problem.operands().items()
    }
    config = AttentionConfig(backend=backend)
    out, lse = edge_attention(graph=graph, config=config, scale=problem.scale, **leaves, **options)
    gradients = torch.autograd.grad(scalar(problem, out, lse), list(leaves.values()))
    result = {"out": out.detach(), "lse": lse.detach()}
    result |= {"d" + name: gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: tensor.cpu() for name, tensor in result.items()}


def scalar(problem, out, lse):
    """Return the loss with the problem's upstream gradients of out and lse, ignoring lse of isolated destinations."""
    terms = []
    if problem.grad_out is not None:
        terms.append((out * problem.grad_out.to(out.device)).sum())
    if problem.grad_lse is not None:
        finite = torch.isfinite(lse)
        terms.append((lse[finite] * problem.grad_lse.to(lse)[finite]).sum())
    return sum(terms)
