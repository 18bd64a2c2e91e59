"""Edge length and direction, defined as in anemoi-graphs' EdgeLength and EdgeDirection.

    length_e    = angle between source s and destination d, radians
    direction_e = (<s, f_x>, <s, f_y>), scaled to length 1

with f_x, f_y the tangent vectors at d (`Nodes.frame`) that the shortest rotation of d to the north
pole takes to the x and y axis. Both attributes are then divided by the standard deviation of all
their values ("unit-std"), so that they are of order one at every resolution.

References
----------
anemoi-graphs 0.9.8, edges/attributes.py, edges/directional.py, normalise.py (definitions).
"""

import numpy as np

from anemoi_gt.data.nodes import Nodes

COINCIDENT = 1e-12  # a shorter horizontal component has no direction


def edge_length(source: Nodes, destination: Nodes, edge_index: np.ndarray) -> np.ndarray:
    """Return the great-circle length of each edge, [E, 1] float64, radians.

    `edge_index` is [2, E] integers, row 0 source, row 1 destination. Raises ValueError if it is
    not, or out of range.
    """
    _check_edges(source, destination, edge_index)
    s, d = source.xyz[edge_index[0]], destination.xyz[edge_index[1]]
    # arctan2 is accurate for short edges and for antipodes, arccos for neither
    return np.arctan2(np.linalg.norm(np.cross(s, d), axis=1), (s * d).sum(axis=1))[:, None]


def edge_direction(source: Nodes, destination: Nodes, edge_index: np.ndarray) -> np.ndarray:
    """Return the direction from each edge's destination to its source, [E, 2] float64 of length 1.

    It is 0 if source and destination coincide or are antipodes. (In anemoi-graphs, the direction
    between coinciding nodes, such as nodes of two levels of a hierarchy, is a rounding error.)
    Parameters and errors are as for `edge_length`.
    """
    _check_edges(source, destination, edge_index)
    xy = np.einsum("eid,ed->ei", destination.frame[edge_index[1]], source.xyz[edge_index[0]])
    norm = np.linalg.norm(xy, axis=1, keepdims=True)
    return np.where(norm > COINCIDENT, xy / np.maximum(norm, COINCIDENT), 0.0)


def unit_std(values: np.ndarray) -> np.ndarray:
    """Return `values` divided by their standard deviation; unchanged if it is zero or undefined."""
    std = values.std(ddof=1) if values.size > 1 else 0.0
    return values / std if std > 0 else values


def _check_edges(source: Nodes, destination: Nodes, edge_index: np.ndarray) -> None:
    if not isinstance(edge_index, np.ndarray):
        raise ValueError(
            f"edge_index must be a NumPy array [2, E], got {type(edge_index).__name__}"
        )
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype.kind not in "iu":
        raise ValueError(
            f"edge_index must be integers [2, E], sources and destinations, got {edge_index.dtype} "
            f"{edge_index.shape}"
        )
    for name, nodes, index in zip(
        ("source", "destination"), (source, destination), edge_index, strict=True
    ):
        if index.size and not 0 <= index.min() <= index.max() < len(nodes):
            raise ValueError(
                f"edge_index must hold {name} nodes in [0, {len(nodes)}), got {index.min()} to "
                f"{index.max()}"
            )
