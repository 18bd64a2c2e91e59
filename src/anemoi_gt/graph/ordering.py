"""Node orders that keep spatial neighbours close together: Morton curves."""

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
        The nodes in the order along the curve; ties keep their order.

    Examples
    --------
    >>> morton_order(torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.1, 0.0], [1.0, 0.9]])).tolist()
    [0, 2, 3, 1]

    References
    ----------
    G. M. Morton (1966), A computer oriented geodetic data base and a new technique in file
    sequencing, IBM.
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
