"""Compulsory memory traffic of a pass.

With s bytes an element, R = s H C a row, and everything read or written once:

    forward             R (2 N_dst + 2 N_src) + 4 H N_dst + E (s D + 4)   q, out, k, v; lse; edges
    backward            R (3 N_dst + 4 N_src) + 8 H N_dst + E (s D + 8)   seven rows; edges

Node features are counted once per batch entry. Over the speed of a copy, these are a lower
bound of the time.
"""

from suite.problems import Problem


def compulsory_bytes(problem: Problem, sizes: tuple[int, int, int], kind: str) -> int:
    """Return the bytes that a pass must move; sizes are (N_src, N_dst, E)."""
    num_src, num_dst, num_edges = sizes
    size, heads, samples = problem.torch_dtype.itemsize, problem.heads, problem.batch
    row = size * heads * problem.channels
    forward = samples * (row * (2 * num_dst + 2 * num_src) + 4 * heads * num_dst)
    forward += num_edges * (size * problem.edge_dim + 4)
    backward = samples * (row * (3 * num_dst + 4 * num_src) + 8 * heads * num_dst)
    backward += num_edges * (size * problem.edge_dim + 8)
    return forward if kind == "forward" else forward + backward
