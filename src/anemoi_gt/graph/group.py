"""Grouping the edges of each node: the stable sort, and a faster way without order for graphs that change every step."""

from contextlib import nullcontext

import torch
from torch import Tensor

from anemoi_gt.operators import define_operator

EDGES_PER_PROGRAM = 512


def group_edges(node: Tensor, neighbour: Tensor, num_nodes: int, *, stable: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Bring the edges of each node together.

    Parameters
    ----------
    node, neighbour : Tensor [E], one integer dtype
        The end to group by, and the other end.
    num_nodes : int
        Number of nodes on the side of `node`.
    stable : bool
        True keeps the edges of a node in their order: one sort. False leaves their order open: on a GPU a histogram, a
        scan and a scatter take the place of the sort. It steps aside for the sort on a CPU, and wherever PyTorch is
        asked for deterministic algorithms.

    Returns
    -------
    pointers : Tensor [num_nodes + 1]
        Edges of node n are at pointers[n] : pointers[n + 1].
    order : Tensor [E]
        The edge at each place.
    neighbours : Tensor [E]
        Its other end.
    """
    if stable or not node.is_cuda or torch.are_deterministic_algorithms_enabled():
        node, order = torch.sort(node, stable=True)
        return pointers(node, num_nodes), order.to(node.dtype), neighbour[order]
    return group_edges_unordered(node, neighbour, num_nodes)


def pointers(node: Tensor, num_nodes: int) -> Tensor:
    """Where each node's edges begin once they are together, and the end: [num_nodes + 1]."""
    counts = torch.zeros(num_nodes + 1, dtype=node.dtype, device=node.device)
    counts.scatter_add_(0, node.long() + 1, torch.ones_like(node))
    return counts.cumsum(0, dtype=node.dtype)


@define_operator
def group_edges_unordered(node: Tensor, neighbour: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """`group_edges` without order, by the kernels of `anemoi_gt.kernels.group`; nothing waits for the device."""
    from anemoi_gt.kernels import group

    node, neighbour, num_edges = node.contiguous(), neighbour.contiguous(), node.shape[0]
    begins = torch.zeros(num_nodes + 1, dtype=node.dtype, device=node.device)
    order, neighbours = torch.empty_like(node), torch.empty_like(neighbour)
    if num_edges == 0:
        return begins, order, neighbours
    grid = (-(-num_edges // EDGES_PER_PROGRAM),)
    with torch.cuda.device(node.device) if node.is_cuda else nullcontext():
        group.histogram[grid](node=node, count=begins[1:], num_edges=num_edges, EDGES=EDGES_PER_PROGRAM)
        begins = begins.cumsum(0, dtype=node.dtype)
        group.scatter[grid](
            node=node, neighbour=neighbour, cursor=begins.clone(), order=order, neighbours=neighbours,
            num_edges=num_edges, EDGES=EDGES_PER_PROGRAM,
        )  # fmt: skip
    return begins, order, neighbours


@torch.library.register_fake("anemoi_gt::group_edges_unordered")
def _(node, neighbour, num_nodes):
    return node.new_empty(num_nodes + 1), torch.empty_like(node), torch.empty_like(neighbour)
