"""Grouping edges by node without sorting: histogram, scan, scatter.

    histogram   count[n]  = number of edges of node n
    scan        begin     = exclusive sum of count                 (a library call between the two kernels)
    scatter     place_e   = begin[node_e] + (edges of that node that came before),  order[place_e] = e,  ...

Both kernels use integer atomics: counts are exact, but which edge of a node comes first changes from run to run, so results
that sum over a node's edges may differ in the last bit. The stable sort is there where that matters.
"""

import triton
import triton.language as tl


@triton.jit
def histogram(
    node,  # [E]
    count,  # [N], zeros
    num_edges,
    EDGES: tl.constexpr,
):
    """Grid (ceil(E / EDGES),): a program counts EDGES edges."""
    e = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    inside = e < num_edges
    tl.atomic_add(count + tl.load(node + e, mask=inside, other=0), 1, mask=inside, sem="relaxed")


@triton.jit
def scatter(
    node,  # [E]
    neighbour,  # [E], the edge's other end
    cursor,  # [N], where each node's edges begin; moves on
    order,  # [E] the edge at each place
    neighbours,  # [E] the other end of the edge at each place
    num_edges,
    EDGES: tl.constexpr,
):
    """Grid (ceil(E / EDGES),): a program places EDGES edges."""
    e = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    inside = e < num_edges
    n = tl.load(node + e, mask=inside, other=0)
    place = tl.atomic_add(cursor + n, 1, mask=inside, sem="relaxed")
    tl.store(order + place, e.to(order.dtype.element_ty), mask=inside)
    tl.store(neighbours + place, tl.load(neighbour + e, mask=inside, other=0), mask=inside)
