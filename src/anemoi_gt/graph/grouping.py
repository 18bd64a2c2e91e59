"""Grouping of edges by node: a stable sort, or faster, unordered GPU kernels."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt import kernels
from anemoi_gt.custom_ops import define_operator, on_device
from anemoi_gt.kernels.launch import Launch

# one edge per thread maximises atomics in flight, and accesses fill whole memory sectors
EDGES_PER_PROGRAM = 256
WARPS = 8
CACHED_LAUNCHES = 128  # graph sizes whose launches are cached


class GroupedEdges(NamedTuple):
    """The edges of a graph by destination (CSC) and optionally by source (CSR).

    Fields are named as in GraphStructure.
    """

    colptr: Tensor  # [N_dst + 1]
    perm: Tensor | None  # [E], None if the caller's order is the CSC order
    row: Tensor  # [E]
    rowptr: Tensor | None = None  # [N_src + 1]
    csr_to_csc: Tensor | None = None  # [E]
    col: Tensor | None = None  # [E]


def group_coo(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    dtype: torch.dtype,
    *,
    stable: bool,
    reverse: bool,
) -> GroupedEdges:
    """Group edges [2, E] by destination, and by source if `reverse` and it costs no extra sweep.

    `dtype`, int32 or int64, is the dtype of the result. With `stable`, edges are sorted, and the
    edges of a destination keep their order. Without it, their order is unspecified: two GPU kernels
    and a scan replace the sort, and can group by source in the same sweep. On a CPU and under
    deterministic algorithms, edges are sorted in any case.
    """
    if stable or not _supports_unordered(edge_index):
        src, dst = edge_index.to(dtype).unbind(0)
        return GroupedEdges(*_sort_edges(dst, src, num_dst))
    if reverse:
        return GroupedEdges(*group_both_ends_unordered(edge_index, num_src, num_dst, dtype))
    return GroupedEdges(*group_edges_unordered(edge_index, num_dst, dtype))


def group_edges(
    node: Tensor, neighbour: Tensor, num_nodes: int, *, stable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Group edges by `node` [E]; `neighbour` [E] is the other end of each. See `group_coo`.

    Return pointers [num_nodes + 1], and for each position its edge [E] and the edge's neighbour
    [E]. The edges of node n are at positions pointers[n] : pointers[n + 1].
    """
    if stable or not _supports_unordered(node):
        return _sort_edges(node, neighbour, num_nodes)
    return group_edges_unordered(torch.stack([neighbour, node]), num_nodes, node.dtype)


def pointers(node: Tensor, num_nodes: int) -> Tensor:
    """Return the first position of each node's edges, then the number of edges: [num_nodes + 1]."""
    counts = torch.zeros(num_nodes + 1, dtype=node.dtype, device=node.device)
    counts.scatter_add_(0, node.long() + 1, torch.ones_like(node))
    return counts.cumsum(0, dtype=node.dtype)


def _supports_unordered(index: Tensor) -> bool:
    """Return whether the unordered kernels may run, whose order varies from run to run."""
    return index.is_cuda and not torch.are_deterministic_algorithms_enabled()


def _sort_edges(node: Tensor, neighbour: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group edges by a stable sort, see `group_edges`."""
    node, order = torch.sort(node, stable=True)
    return pointers(node, num_nodes), order.to(node.dtype), neighbour.index_select(0, order)


@define_operator
def group_edges_unordered(
    edge_index: Tensor, num_dst: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return colptr, perm and row, unordered within a destination, without synchronising."""
    edge_index = edge_index.contiguous()
    num_edges = edge_index.shape[1]
    count, place = _launches(num_edges, num_dst, None)
    perm, row, rank = (edge_index.new_empty(num_edges, dtype=dtype) for _ in range(3))
    ranks = {"rank_dst": rank, "rank_src": None}
    with on_device(edge_index.device):
        degrees = edge_index.new_zeros(1 + num_dst, dtype=dtype)
        count(edge_index=edge_index, degrees=degrees, **ranks)
        colptr = degrees.cumsum(0, dtype=dtype)
        unused = dict.fromkeys(("colptr", "rowptr", "col", "csr_to_csc"))
        place(edge_index=edge_index, begin=colptr, **ranks, perm=perm, row=row, **unused)
    return colptr, perm, row


@torch.library.register_fake("anemoi_gt::group_edges_unordered")
def _(edge_index: Tensor, num_dst: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    perm, row = (edge_index.new_empty(edge_index.shape[1], dtype=dtype) for _ in range(2))
    return edge_index.new_empty(num_dst + 1, dtype=dtype), perm, row


@define_operator
def group_both_ends_unordered(
    edge_index: Tensor, num_src: int, num_dst: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `GroupedEdges`, unordered within a node, without synchronising."""
    edge_index = edge_index.contiguous()
    num_edges = edge_index.shape[1]
    count, place = _launches(num_edges, num_dst, num_src)
    grouped = _empty_groups(edge_index, num_src, num_dst, dtype)
    fields = dict(zip(GroupedEdges._fields, grouped, strict=True))
    count_dtype = _count_dtype(num_edges)
    rank_dst, rank_src = (edge_index.new_empty(num_edges, dtype=count_dtype) for _ in range(2))
    ranks = {"rank_dst": rank_dst, "rank_src": rank_src}
    with on_device(edge_index.device):
        degrees = edge_index.new_zeros(1 + num_dst + num_src, dtype=count_dtype)
        count(edge_index=edge_index, degrees=degrees, **ranks)
        begin = degrees.cumsum(0, dtype=count_dtype)
        place(edge_index=edge_index, begin=begin, **ranks, **fields)
    return grouped


@torch.library.register_fake("anemoi_gt::group_both_ends_unordered")
def _(
    edge_index: Tensor, num_src: int, num_dst: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_groups(edge_index, num_src, num_dst, dtype)


@lru_cache(CACHED_LAUNCHES)
def _launches(
    num_edges: int, num_dst: int, num_src: int | None
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the launches of count and place; `num_src` None groups by destination only."""
    sizes = {"num_edges": num_edges, "num_dst": num_dst}
    constants = {"EDGES": EDGES_PER_PROGRAM, "num_warps": WARPS}
    grid = (-(-num_edges // EDGES_PER_PROGRAM),)
    count = Launch(kernels.group_edges.group_edges_count, grid, sizes, constants)

    num_positions = num_edges
    if num_src is not None:  # colptr and rowptr are written too
        num_positions = max(num_edges, num_dst + 1, num_src + 1)
    sizes = sizes | {"num_src": num_src or 0}
    grid = (-(-num_positions // EDGES_PER_PROGRAM),)
    place = Launch(kernels.group_edges.group_edges_place, grid, sizes, constants)
    return count, place


def _count_dtype(num_edges: int) -> torch.dtype:
    """Return the dtype of the running sum of degrees of both ends, which reaches 2 E."""
    return torch.int32 if 2 * num_edges < 2**31 else torch.int64


def _empty_groups(
    edge_index: Tensor, num_src: int, num_dst: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the fields of `GroupedEdges`."""
    num_edges = edge_index.shape[1]

    def empty(length: int) -> Tensor:
        return edge_index.new_empty(length, dtype=dtype)

    by_dst = empty(num_dst + 1), empty(num_edges), empty(num_edges)
    return *by_dst, empty(num_src + 1), empty(num_edges), empty(num_edges)
