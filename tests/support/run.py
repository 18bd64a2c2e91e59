"""`edge_attention` of a problem of the oracle, with all gradients by name."""

from dataclasses import replace

import torch

from anemoi_gt import AttentionConfig, GraphStructure, edge_attention


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


def scheduled(graph):
    """Return a GraphStructure with a destination schedule, by positions drawn at random."""
    positions = torch.rand(graph.num_dst, 2, generator=torch.Generator().manual_seed(graph.num_dst))
    return graph.with_dst_schedule(positions.to(graph.device))


def head_major(rows):
    """Return the same rows [N, H, ..] with the nodes inside the heads, as a sharding over heads leaves them."""
    return rows.transpose(0, 1).contiguous().transpose(0, 1) if rows.dim() > 1 else rows


def attend(problem, graph, backend, **options):
    """Return out, lse and the gradients of every operand by name, on the CPU; computed on the device of `graph`.

    `backend` may be a config. An upstream gradient of the problem that is None is not passed.
    """
    config = backend if isinstance(backend, AttentionConfig) else AttentionConfig(backend=backend)
    leaves = leaves_of(problem, graph)
    out, lse = edge_attention(graph=graph, config=config, scale=problem.scale, **leaves, **options)
    return result_of(problem, out, lse, leaves)


def leaves_of(problem, graph):
    """Return copies of the operands that require gradients, by name, on the device of `graph`."""
    operands = {
        name: operand.detach().to(graph.device, copy=True)
        for name, operand in problem.operands().items()
    }
    return {name: operand.requires_grad_() for name, operand in operands.items()}


def result_of(problem, out, lse, leaves):
    """Return out, lse and the gradients of the leaves by name, on the CPU."""
    gradients = torch.autograd.grad(scalar(problem, out, lse), list(leaves.values()))
    names = ("out", "lse", *(f"d{name}" for name in leaves))
    return {
        name: tensor.detach().cpu()
        for name, tensor in zip(names, (out, lse, *gradients), strict=True)
    }


def scalar(problem, out, lse):
    """Return the loss with the problem's upstream gradients of out and lse, ignoring lse of isolated destinations."""
    terms = []
    if problem.grad_out is not None:
        terms.append((out * problem.grad_out.to(out.device)).sum())
    if problem.grad_lse is not None:
        finite = torch.isfinite(lse)
        terms.append((lse[finite] * problem.grad_lse.to(lse)[finite]).sum())
    return sum(terms)
