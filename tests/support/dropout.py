"""Dropout factors in the caller's edge order, from the definition of the mask."""

import torch

from anemoi_gt.ops.dropout import dropout_factor


def keep_of(graph, heads, rate, manual_seed, sample=0):
    """Return the factors [E, H] of a call after `torch.manual_seed(manual_seed)`, float64 on the CPU."""
    torch.manual_seed(manual_seed)
    seed = torch.randint(2**62, (1,), device=graph.device)  # as edge_attention draws it
    ids = graph.global_edge_ids()
    mask = dropout_factor(seed, sample, ids, range(heads), rate, torch.float64)
    return torch.empty_like(mask).index_copy_(0, graph.edge_order().long(), mask).cpu()
