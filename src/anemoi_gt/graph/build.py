"""Grouping the edges of each node: the stable sort, and a faster way without order for graphs that change every step."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import define_operator

EDGES_PER_PROGRAM, WARPS = 256, 8  # an edge a thread: most atomics in flight, and whole sectors of memory at a time
KEPT = 128  # sizes of graphs whose launches are kept


class Sides(NamedTuple):
    """The edges of a graph by destination and, where it was made, by source; the names are GraphStructure's."""

    colptr: Tensor  # [N_dst + 1]
    perm: Tensor  # [E]
    row: Tensor  # [E]
    rowptr: Tensor | None = None  # [N_src + 1]
    csr_to_csc: Tensor | None = None  # [E]
    col: Tensor | None = None  # [E]


def group_coo(edge_index: Tensor, num_src: int, num_dst: int, dtype: torch.dtype, *, stable: bool) -> Sides:
    """Bring the edges of each destination together, and of each source where that comes with it.

    Parameters
    ----------
    edge_index : Tensor [2, E], int32 or int64
    num_src, num_dst : int
    dtype : torch.dtype
        Of the result, int32 or int64.
    stable : bool
        True keeps the edges of a destination in their order: one sort. False leaves their order open: on a GPU two
        kernels and a scan take the place of the sort, and group by source too while gradients are recorded, which
        need it. It steps aside for the sort on a CPU, and wherever PyTorch is asked for deterministic algorithms.
    """
    if stable or not _order_may_be_open(edge_index):
        src, dst = edge_index.to(dtype).unbind(0)
        return Sides(*_sort_edges(dst, src, num_dst))
    if torch.is_grad_enabled():
        return Sides(*group_both_ends_unordered(edge_index, num_src, num_dst, dtype))
    return Sides(*group_edges_unordered(edge_index, num_dst, dtype))


def group_edges(node: Tensor, neighbour: Tensor, num_nodes: int, *, stable: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Bring the edges of each node together.

    Parameters
    ----------
    node, neighbour : Tensor [E], one integer dtype
        The end to group by, and the other end.
    num_nodes : int
        Number of nodes on the side of `node`.
    stable : bool
        As in `group_coo`.

    Returns
    -------
    pointers : Tensor [num_nodes + 1]
        Edges of node n are at pointers[n] : pointers[n + 1].
    order : Tensor [E]
        The edge at each place.
    neighbours : Tensor [E]
        Its other end.
    """
    if stable or not _order_may_be_open(node):
        return _sort_edges(node, neighbour, num_nodes)
    return group_edges_unordered(torch.stack([neighbour, node]), num_nodes, node.dtype)


def pointers(node: Tensor, num_nodes: int) -> Tensor:
    """Where each node's edges begin once they are together, and the end: [num_nodes + 1]."""
    counts = torch.zeros(num_nodes + 1, dtype=node.dtype, device=node.device)
    counts.scatter_add_(0, node.long() + 1, torch.ones_like(node))
    return counts.cumsum(0, dtype=node.dtype)


def _order_may_be_open(index: Tensor) -> bool:
    return index.is_cuda and not torch.are_deterministic_algorithms_enabled()


def _sort_edges(node: Tensor, neighbour: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    node, order = torch.sort(node, stable=True)
    return pointers(node, num_nodes), order.to(node.dtype), neighbour[order]


@define_operator
def group_edges_unordered(edge_index: Tensor, num_dst: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """colptr, perm and row without order inside a destination; nothing waits for the device."""
    edge_index, num_edges = edge_index.contiguous(), edge_index.shape[1]
    count, place = _launches(num_edges, num_dst, None)
    perm, row, rank = (edge_index.new_empty(num_edges, dtype=dtype) for _ in range(3))
    ranks = {"rank_dst": rank, "rank_src": None}
    with _on_device(edge_index):
        number = edge_index.new_zeros(1 + num_dst, dtype=dtype)
        count(edge_index=edge_index, number=number, **ranks)
        colptr = number.cumsum(0, dtype=dtype)
        place(
            edge_index=edge_index, begin=colptr, **ranks, perm=perm, row=row,
            colptr=None, rowptr=None, col=None, csr_to_csc=None,
        )  # fmt: skip
    return colptr, perm, row


@torch.library.register_fake("anemoi_gt::group_edges_unordered")
def _(edge_index, num_dst, dtype):
    perm, row = (edge_index.new_empty(edge_index.shape[1], dtype=dtype) for _ in range(2))
    return edge_index.new_empty(num_dst + 1, dtype=dtype), perm, row


@define_operator
def group_both_ends_unordered(
    edge_index: Tensor, num_src: int, num_dst: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Sides` without order inside a destination or a source; nothing waits for the device."""
    edge_index, num_edges = edge_index.contiguous(), edge_index.shape[1]
    (count, place), counting = _launches(num_edges, num_dst, num_src), _counting_dtype(num_edges)
    sides = _empty_sides(edge_index, num_src, num_dst, dtype)
    rank_dst, rank_src = (edge_index.new_empty(num_edges, dtype=counting) for _ in range(2))
    ranks = {"rank_dst": rank_dst, "rank_src": rank_src}
    with _on_device(edge_index):
        number = edge_index.new_zeros(1 + num_dst + num_src, dtype=counting)
        count(edge_index=edge_index, number=number, **ranks)
        begin = number.cumsum(0, dtype=counting)
        place(edge_index=edge_index, begin=begin, **ranks, **sides._asdict())
    return tuple(sides)


@torch.library.register_fake("anemoi_gt::group_both_ends_unordered")
def _(edge_index, num_src, num_dst, dtype):
    return tuple(_empty_sides(edge_index, num_src, num_dst, dtype))


@lru_cache(KEPT)
def _launches(num_edges: int, num_dst: int, num_src: int | None) -> tuple[Callable[..., None], Callable[..., None]]:
    """Launches of count and place; `num_src` None groups by destination alone."""
    from anemoi_gt.kernels import build_graph
    from anemoi_gt.kernels.jit_launch import Launch

    sizes, constants = {"num_edges": num_edges, "num_dst": num_dst}, {"EDGES": EDGES_PER_PROGRAM, "num_warps": WARPS}
    places = num_edges if num_src is None else max(num_edges, num_dst + 1, num_src + 1)
    count = Launch(build_graph.group_edges_count, (-(-num_edges // EDGES_PER_PROGRAM),), sizes, constants)
    sizes = sizes | {"num_src": num_src or 0}
    return count, Launch(build_graph.group_edges_place, (-(-places // EDGES_PER_PROGRAM),), sizes, constants)


def _counting_dtype(num_edges: int) -> torch.dtype:
    """What holds the running sum over both ends, which reaches 2 E."""
    return torch.int32 if 2 * num_edges < 2**31 else torch.int64


def _empty_sides(edge_index: Tensor, num_src: int, num_dst: int, dtype: torch.dtype) -> Sides:
    num_edges = edge_index.shape[1]
    lengths = (num_dst + 1, num_edges, num_edges, num_src + 1, num_edges, num_edges)
    return Sides(*(edge_index.new_empty(length, dtype=dtype) for length in lengths))


def _on_device(tensor: Tensor):
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
