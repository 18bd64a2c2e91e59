"""Grouping edges by node without sorting: count, scan, place.

    count    degrees[n]   = edges of node n,          rank_e = edges of its node counted before e
    scan     begin[n]     = sum of degrees[m], m < n  (a library call between the two kernels)
    place    position_e   = begin[node_e] + rank_e,   order[position_e] = e,  ...

Both ends of the edges are grouped in one sweep. The source counts follow the destination counts, so
one scan covers both; the scanned source counts include the E edges of the destinations, which
`place` subtracts.

Counting takes one integer atomic per end, which returns the rank. Degrees are exact, but the order
of a node's edges changes from run to run, so sums over a node's edges may differ in the last bit.
Use the stable sort for bitwise reproducibility.
"""

import triton
import triton.language as tl


def _name(base: str):
    """Make the `repr` of a kernel: `base`, the dtype of the edges, and the ends it groups by."""

    def name(specialization) -> str:
        signature = specialization.signature
        ends = "dst" if signature.get("rank_src") == "constexpr" else "dst_src"
        return f"{base}_{signature['edge_index'].lstrip('*')}_by_{ends}"

    return name


@triton.jit(repr=_name("group_edges_count"), do_not_specialize=["num_edges", "num_dst"])
def group_edges_count(
    edge_index,  # [2, E], sources, then destinations
    degrees,  # [1 + N_dst + N_src], zeros; [1 + N_dst] if rank_src is None
    rank_dst,  # [E]
    rank_src,  # [E] or None
    num_edges,
    num_dst,
    EDGES: tl.constexpr,
):
    """Grid (ceil(E / EDGES),): a program counts EDGES edges."""
    e = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    inside = e < num_edges
    src = tl.load(edge_index + e, mask=inside, other=0).to(tl.int64)
    dst = tl.load(edge_index + num_edges + e, mask=inside, other=0).to(tl.int64)
    among_dst = tl.atomic_add(degrees + 1 + dst, 1, mask=inside, sem="relaxed")
    if rank_src is not None:  # both atomics are issued before either result is used
        among_src = tl.atomic_add(degrees + 1 + num_dst + src, 1, mask=inside, sem="relaxed")
        tl.store(rank_src + e, among_src, mask=inside)
    tl.store(rank_dst + e, among_dst, mask=inside)


@triton.jit(repr=_name("group_edges_place"), do_not_specialize=["num_edges", "num_dst", "num_src"])
def group_edges_place(
    edge_index,  # [2, E]
    begin,  # [1 + N_dst + N_src], running sum of `degrees`
    rank_dst,  # [E]
    rank_src,  # [E] or None; if None, so are all outputs for both ends
    perm,  # [E]
    row,  # [E]
    colptr,  # [N_dst + 1] or None
    rowptr,  # [N_src + 1] or None
    col,  # [E] or None
    csr_to_csc,  # [E] or None
    num_edges,
    num_dst,
    num_src,
    EDGES: tl.constexpr,
):
    """Grid (ceil(max(E, N_dst + 1, N_src + 1) / EDGES),): place EDGES edges per program."""
    e = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    inside = e < num_edges
    src = tl.load(edge_index + e, mask=inside, other=0).to(tl.int64)
    dst = tl.load(edge_index + num_edges + e, mask=inside, other=0).to(tl.int64)
    in_csc = tl.load(begin + dst, mask=inside, other=0) + tl.load(
        rank_dst + e, mask=inside, other=0
    )
    if rank_src is not None:
        in_csr = tl.load(begin + num_dst + src, mask=inside, other=0) + tl.load(
            rank_src + e, mask=inside, other=0
        )
        in_csr -= num_edges
        node = e
        to_csc = tl.load(begin + node, mask=node <= num_dst, other=0)
        to_csr = tl.load(begin + num_dst + node, mask=node <= num_src, other=0) - num_edges
        tl.store(col + in_csr, dst, mask=inside)
        tl.store(csr_to_csc + in_csr, in_csc, mask=inside)
        tl.store(colptr + node, to_csc, mask=node <= num_dst)
        tl.store(rowptr + node, to_csr, mask=node <= num_src)
    tl.store(perm + in_csc, e, mask=inside)
    tl.store(row + in_csc, src, mask=inside)
