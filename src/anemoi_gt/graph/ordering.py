"""Node orders that keep spatial neighbours close together: Morton curves, and coordinates made from edges alone."""

import torch
from torch import Tensor

MORTON_BITS = 20  # 2^20 cells per axis; three axes fit an int64


def morton_order(positions: Tensor) -> Tensor:
    """Order nodes along the Z-shaped curve of Morton (1966) through their coordinates.

    Parameters
    ----------
    positions : Tensor [N, 1 to 3], any real dtype
        Coordinates in any unit; all axes are scaled by the largest extent.

    Returns
    -------
    Tensor [N], int64
        The nodes in the order of the curve; ties keep their order.

    Examples
    --------
    >>> morton_order(torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.1, 0.0], [1.0, 0.9]])).tolist()
    [0, 2, 3, 1]

    References
    ----------
    G. M. Morton (1966), A computer oriented geodetic data base and a new technique in file sequencing, IBM.
    """
    if positions.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=positions.device)
    positions = positions.double()
    low, high = positions.amin(0), positions.amax(0)
    extent = (high - low).amax().clamp_min(torch.finfo(torch.float64).tiny)
    cells = ((positions - low) / extent * (2**MORTON_BITS - 1)).long()  # [N, axes]
    axes = cells.shape[1]
    code = torch.zeros_like(cells[:, 0])
    for bit in range(MORTON_BITS):
        for axis in range(axes):
            code |= ((cells[:, axis] >> bit) & 1) << (bit * axes + axis)
    return torch.sort(code, stable=True).indices


def landmark_distances(src: Tensor, dst: Tensor, num_src: int, num_dst: int, landmarks: int = 3) -> Tensor:
    """Return coordinates of destinations made from the edges alone: hops to landmarks that lie far apart.

    Parameters
    ----------
    src, dst : Tensor [E], int64
        The edges; their direction does not matter for distances.
    num_src, num_dst : int
        Sizes. Sources and destinations are treated as different nodes, connected by the edges.
    landmarks : int
        Number of coordinates. The first landmark is the destination farthest from destination 0, each next one the
        destination farthest from all previous ones.

    Returns
    -------
    Tensor [N_dst, landmarks], int64
        Unreachable destinations get the largest distance plus one.
    """
    if num_dst == 0:
        return torch.empty(0, landmarks, dtype=torch.int64, device=dst.device)
    nearest = _hops(0, src, dst, num_src, num_dst)
    landmark, columns = int(nearest.argmax()), []
    for _ in range(landmarks):
        columns.append(_hops(landmark, src, dst, num_src, num_dst))
        nearest = columns[-1] if len(columns) == 1 else torch.minimum(nearest, columns[-1])
        landmark = int(nearest.argmax())
    return torch.stack(columns, dim=1)


def _hops(start: int, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Tensor:
    """Return breadth-first distances of all destinations from `start`, in pairs of edges (dst - src - dst)."""
    hops = torch.full((num_dst,), -1, dtype=torch.int64, device=dst.device)
    seen = torch.zeros(num_src, dtype=torch.bool, device=dst.device)
    hops[start] = 0
    depth, front = 0, hops == 0
    while bool(front.any()):
        depth += 1
        touched = torch.zeros_like(seen).index_fill_(0, src[front[dst]], True) & ~seen
        seen |= touched
        front = torch.zeros_like(front).index_fill_(0, dst[touched[src]], True) & (hops < 0)
        hops[front] = depth
    return torch.where(hops < 0, depth, hops)
