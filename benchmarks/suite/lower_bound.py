"""Compulsory memory traffic of a pass, and its floating-point operations.

With s bytes an element, R = s H C a row, and everything read or written once:

    forward             R (2 N_dst + 2 N_src) + 4 H N_dst + E (s D + 4)   q, out, k, v; lse; edges
    backward            R (3 N_dst + 4 N_src) + 8 H N_dst + E (s D + 8)   seven rows; edges
    structure           16 E + 4 (4 E + N_dst + N_src + 2)                edge_index; index arrays

Node features are counted once per batch entry. Over the speed of a copy, these are a lower
bound of the time.

    flops forward       E H (4 C + 4 D) + 4 N_dst H C D                   four products; u, W A
    flops backward      E H (8 C + 8 D) + 8 N_dst H C D                   four products each
"""

from suite.problems import STRUCTURE, Problem


def compulsory_bytes(problem: Problem, sizes: tuple[int, int, int], kind: str) -> int:
    """Return the bytes that a pass must move; sizes are (N_src, N_dst, E)."""
    num_src, num_dst, num_edges = sizes
    if kind in STRUCTURE:
        return 16 * num_edges + 4 * (4 * num_edges + num_dst + num_src + 2)
    size, heads, samples = problem.torch_dtype.itemsize, problem.heads, problem.batch
    row = size * heads * problem.channels
    forward = samples * (row * (2 * num_dst + 2 * num_src) + 4 * heads * num_dst)
    forward += num_edges * (size * problem.edge_dim + 4)
    backward = samples * (row * (3 * num_dst + 4 * num_src) + 8 * heads * num_dst)
    backward += num_edges * (size * problem.edge_dim + 8)
    return forward if kind == "forward" else forward + backward


def flops(problem: Problem, sizes: tuple[int, int, int], kind: str) -> int:
    """Return the floating-point operations of a pass; none where only indices move."""
    _, num_dst, num_edges = sizes
    if kind in STRUCTURE:
        return 0
    heads, channels, edge_dim = problem.heads, problem.channels, problem.edge_dim
    forward = (
        num_edges * heads * 4 * (channels + edge_dim) + 4 * num_dst * heads * channels * edge_dim
    )
    return problem.batch * (forward if kind == "forward" else 3 * forward)
