"""Geometric edge attributes: length and direction, defined as anemoi-graphs' EdgeLength and EdgeDirection.

    length_e    = angle between source and destination, radians
    direction_e = horizontal part of R s, scaled to length 1, where R is the shortest rotation that takes the
                  destination d to the north pole, and s is the source

With f_x, f_y the tangent vectors at d that R takes to the x and y axis (`Nodes.frame`), that is (<s, f_x>, <s, f_y>).

Both attributes are then divided by the standard deviation of all their values ("unit-std"), so that they reach the
network at order one whatever the resolution.

References
----------
anemoi-graphs 0.9.8, edges/attributes.py, edges/directional.py, normalise.py (definitions).
"""

import numpy as np

from anemoi_gt.data.nodes import Nodes, check_nodes

COINCIDENT = 1e-12  # a shorter horizontal part has no direction


def edge_length(source: Nodes, destination: Nodes, edge_index: np.ndarray) -> np.ndarray:
    """Return the great-circle length of each edge.

    Parameters
    ----------
    source, destination : Nodes
        The two sets.
    edge_index : numpy.ndarray
        [2, E], row 0 source, row 1 destination.

    Returns
    -------
    numpy.ndarray
        [E, 1] float64, radians.

    Raises
    ------
    ValueError
        If edge_index is not [2, E], or names a node that is not there.
    """
    _check_edges(source, destination, edge_index)
    s, d = source.xyz[edge_index[0]], destination.xyz[edge_index[1]]
    # the angle by its tangent is exact for short edges and for antipodes, by its cosine for neither
    return np.arctan2(np.linalg.norm(np.cross(s, d), axis=1), (s * d).sum(axis=1))[:, None]


def edge_direction(source: Nodes, destination: Nodes, edge_index: np.ndarray) -> np.ndarray:
    """Return the direction in which each destination sees the source of the edge.

    Parameters
    ----------
    source, destination : Nodes
        The two sets.
    edge_index : numpy.ndarray
        [2, E], row 0 source, row 1 destination.

    Returns
    -------
    numpy.ndarray
        [E, 2] float64 of length 1, or 0 where source and destination coincide or are antipodes. (anemoi-graphs gives
        coinciding nodes, as of two levels of a hierarchy, the direction of a rounding error.)

    Raises
    ------
    ValueError
        If edge_index is not [2, E], or names a node that is not there.
    """
    _check_edges(source, destination, edge_index)
    xy = np.einsum("eid,ed->ei", destination.frame[edge_index[1]], source.xyz[edge_index[0]])
    norm = np.linalg.norm(xy, axis=1, keepdims=True)
    return np.where(norm > COINCIDENT, xy / np.maximum(norm, COINCIDENT), 0.0)


def unit_std(values: np.ndarray) -> np.ndarray:
    """Return `values` divided by the standard deviation of them all, or unchanged where that is zero or undefined."""
    std = values.std(ddof=1) if values.size > 1 else 0.0
    return values / std if std > 0 else values


def _check_edges(source: Nodes, destination: Nodes, edge_index: np.ndarray) -> None:
    check_nodes(source=source, destination=destination)
    if not isinstance(edge_index, np.ndarray):
        raise ValueError(f"edge_index must be a NumPy array [2, E], got {type(edge_index).__name__}")
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype.kind not in "iu":
        raise ValueError(
            f"edge_index must be whole numbers [2, E], sources and destinations, got {edge_index.dtype} {edge_index.shape}"
        )
    for name, nodes, numbers in zip(("source", "destination"), (source, destination), edge_index, strict=True):
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(nodes):
            raise ValueError(
                f"edge_index must name {name} nodes in [0, {len(nodes)}), got {numbers.min()} to {numbers.max()}"
            )
