"""Small graphs by name, each with a property that breaks wrong code."""

import torch

SEED = 20190301


def _random(num_src, num_dst, num_edges):
    generator = torch.Generator().manual_seed(SEED)
    src = torch.randint(num_src, (num_edges,), generator=generator)
    dst = torch.randint(num_dst, (num_edges,), generator=generator)
    return torch.stack([src, dst]), (num_src, num_dst)


def _edges(pairs, num_src, num_dst):
    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return edge_index, (num_src, num_dst)


def sort_edges(edge_index, sizes):
    """Return the same graph with its edges sorted by destination."""
    order = torch.sort(edge_index[1], stable=True).indices
    return edge_index[:, order], sizes


def _nearest(num_src, num_dst, degree):
    """Return a graph with `degree` in-edges of every destination, unsorted."""
    generator = torch.Generator().manual_seed(SEED)
    dst = torch.arange(num_dst).repeat_interleave(degree)
    edges = torch.stack([torch.randint(num_src, dst.shape, generator=generator), dst])
    return edges[:, torch.randperm(dst.shape[0], generator=generator)], (num_src, num_dst)


# name: (edge_index [2, E], (num_src, num_dst))
GRAPHS = {
    "no_edges": _edges([], 3, 4),
    "no_destinations": _edges([], 3, 0),
    "no_sources": _edges([], 0, 2),
    "one_edge": _edges([(2, 1)], 3, 2),
    "isolated": _edges([(0, 1), (2, 1), (1, 4)], 4, 6),
    "hub": _edges([(j % 5, 2) for j in range(40)], 5, 4),
    "source_hub": _edges([(1, i % 7) for i in range(30)], 3, 7),
    "duplicates": _edges([(0, 0), (0, 0), (1, 0), (0, 0), (1, 1), (1, 1)], 2, 2),
    "self_loops": _edges([(i, i) for i in range(5)] + [(0, 1), (3, 2)], 5, 5),
    "many_to_few": _random(23, 4, 60),
    "few_to_many": _random(3, 21, 50),
    "shuffled": _random(11, 13, 64),
    "nearest": _nearest(7, 13, 3),
    "one_each": _nearest(4, 6, 1),
    "sorted": sort_edges(*_random(11, 13, 64)),
}


def crowd(num_src, num_dst, to=None, of=None, edges=16):
    """Draw random edges, most of them `to` one destination and `of` one source."""
    generator = torch.Generator().manual_seed(edges)
    ends = [torch.randint(nodes, (edges,), generator=generator) for nodes in (num_src, num_dst)]
    for end, hub, others in zip(ends, (of, to), (edges // 4, edges // 3), strict=True):
        if hub is not None:
            end[others:] = hub
    return torch.stack(ends)[:, torch.randperm(edges, generator=generator)], (num_src, num_dst)


# of nodes with more than four edges
HUBS = {
    "destination": crowd(7, 9, to=3),
    "source": crowd(7, 9, of=2),
    "both": crowd(5, 4, to=3, of=0),
    "several": crowd(3, 4, edges=22),
    "first, others isolated": (torch.stack([torch.arange(13) % 5, torch.zeros(13).long()]), (5, 6)),
    "ends with a block": (
        torch.stack([torch.arange(18) % 3, (torch.arange(18) - 1).clamp_min(0) // 6]),
        (3, 4),
    ),
}
