"""`edge_attention` of a problem of the oracle, with all gradients by name."""

from dataclasses import replace

import torch

from anemoi_gt import GraphStructure, KernelConfig, edge_attention


def structure(graph, device="cpu", **options):
    """Return the GraphStructure of (edge_index, (num_src, num_dst)) on `device`."""
    edge_index, sizes = graph
    return GraphStructure.from_edge_index(edge_index.to(device), sizes, **options)


def with_hubs(graph, segment):
    """Return a GraphStructure whose nodes with more than 2 * segment edges are hubs; the same one for None."""
    if segment is None:
        return graph
    hubs = graph.row.new_empty(2 * segment + 1, 0)
    return replace(graph, dst_hubs=hubs, src_hubs=hubs)


def head_major(rows):
    """Return the same rows [N, H, ..] with the nodes inside the heads, as a sharding over heads leaves them."""
    return rows.transpose(0, 1).contiguous().transpose(0, 1) if rows.dim() > 1 else rows


def attend(problem, graph, backend, **options):
    """Compute out, lse and the gradients of every operand on the device of `graph`; return them on the CPU by name.

    `backend` may be a config. An upstream gradient of the problem that is None is not passed.
    """
    config = backend if isinstance(backend, KernelConfig) else KernelConfig(backend=backend)
    leaves = leaves_of(problem, graph)
    out, lse = edge_attention(graph=graph, config=config, scale=problem.scale, **leaves, **options)
    return result_of(problem, out, lse, leaves)


def leaves_of(problem, graph):
    """Return copies of the operands that require gradients, by name, on the device of `graph`."""
    leaves = {}
    for name, operand in problem.operands().items():
        leaves[name] = operand.detach().to(graph.device, copy=True).requires_grad_()
    return leaves


def result_of(problem, out, lse, leaves):
    """Return out, lse and the gradients of the leaves by name, on the CPU."""
    gradients = torch.autograd.grad(scalar(problem, out, lse), list(leaves.values()))
    result = {"out": out.detach().cpu(), "lse": lse.detach().cpu()}
    for name, gradient in zip(leaves, gradients, strict=True):
        result[f"d{name}"] = gradient.cpu()
    return result


def scalar(problem, out, lse):
    """Return a loss with the upstream gradients of the problem, ignoring lse of isolated destinations."""
    terms = []
    if problem.grad_out is not None:
        terms.append((out * problem.grad_out.to(out.device)).sum())
    if problem.grad_lse is not None:
        finite = torch.isfinite(lse)
        terms.append((lse[finite] * problem.grad_lse.to(lse)[finite]).sum())
    return sum(terms)
