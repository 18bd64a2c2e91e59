"""Edges between sets of nodes, from their distance alone: k nearest and cutoff radius.

An edge goes from a source to a destination, which reads it. Distances are chords between points of the unit sphere, as
in anemoi-graphs. Every builder returns [2, E] int64 (row 0 source, row 1 destination), sorted by destination, then
source, so that the same nodes always give the same edges in the same order.

References
----------
anemoi-graphs 0.9.8, edges/builders/knn.py, edges/builders/cutoff.py, utils.py (definitions).
"""

import numpy as np

from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

MAX_NEIGHBOURS = 64
TIE = 1e-9  # distances that differ by less are equal: rounding is 1e-16, the spacing of a 1 km grid 1e-4
MOST_TIES = 8  # a vertex of a triangular mesh has six neighbours, all equally far at best


def sort_by_destination(edge_index: np.ndarray) -> np.ndarray:
    """Return the edges [2, E] by destination, and by source within a destination."""
    source, destination = edge_index
    return edge_index[:, np.lexsort((source, destination))]


def nearest(source: Nodes, destination: Nodes, k: int) -> np.ndarray:
    """Return the edges over which each destination reads its k nearest sources.

    Parameters
    ----------
    source, destination : Nodes
        The two sets.
    k : int
        Edges into each destination.

    Returns
    -------
    numpy.ndarray
        [2, len(destination) * k] int64.

    Raises
    ------
    ValueError
        If k is not between 1 and the number of sources.
    """
    if not 1 <= k <= len(source):
        raise ValueError(f"k must be in [1, {len(source)}], the number of sources, got {k}")
    _, neighbours = _neighbours(source, destination, k, radius=np.inf)
    return sort_by_destination(np.stack([neighbours.ravel(), np.repeat(np.arange(len(destination)), k)]))


def cutoff(source: Nodes, destination: Nodes, factor: float, max_neighbours: int = MAX_NEIGHBOURS) -> np.ndarray:
    """Return the edges over which each destination reads the sources within a radius.

    radius = factor * grid_spacing(destination)

    Parameters
    ----------
    source, destination : Nodes
        The two sets.
    factor : float
        Radius in units of the destinations' spacing. The centre of an equilateral triangle is 0.577 sides from its
        corners, so with 0.6 a triangular mesh leaves hardly a source out.
    max_neighbours : int
        A destination with more sources within reach reads the nearest of them.

    Returns
    -------
    numpy.ndarray
        [2, E] int64.

    Raises
    ------
    ValueError
        If factor or max_neighbours is not positive.
    """
    if not factor > 0 or max_neighbours < 1:
        raise ValueError(f"factor and max_neighbours must be positive, got {factor} and {max_neighbours}")
    radius = factor * grid_spacing(destination)
    k = min(max_neighbours, len(source))
    distance, neighbours = _neighbours(source, destination, k, radius)
    reached = np.isfinite(distance)  # [destinations, k]; padded with infinity
    return sort_by_destination(np.stack([neighbours[reached], np.nonzero(reached)[0]]))


def grid_spacing(nodes: Nodes) -> float:
    """Return the largest distance of a node to its nearest neighbour: the chord length, on the unit sphere.

    Raises
    ------
    ValueError
        If there are fewer than two nodes.
    """
    if len(nodes) < 2:
        raise ValueError(f"a spacing needs at least two nodes, got {len(nodes)}")
    distance, _ = _tree(nodes).query(nodes.xyz, k=[2], workers=-1)
    return float(distance.max())


def within(reference: Nodes, nodes: Nodes, radius: float) -> np.ndarray:
    """Return which of `nodes` lie within `radius` (chord on the unit sphere) of a reference node: [N] bool."""
    distance, _ = _tree(reference).query(nodes.xyz, distance_upper_bound=radius * (1 + TIE), workers=-1)
    return np.isfinite(distance)


def _neighbours(source: Nodes, destination: Nodes, k: int, radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Return distance and number of the k nearest sources within `radius`, both [destinations, k].

    Where fewer are within reach the distance is infinite. On regular grids many sources are equally far; of those the
    lower number comes first, whatever the rounding of the machine makes of their distances.
    """
    candidates = np.arange(1, min(k + MOST_TIES, len(source)) + 1)
    distance, neighbours = _tree(source).query(
        destination.xyz, k=candidates, distance_upper_bound=radius * (1 + TIE), workers=-1
    )
    order = np.lexsort((neighbours, np.round(distance / TIE)), axis=-1)[:, :k]
    return np.take_along_axis(distance, order, axis=1), np.take_along_axis(neighbours, order, axis=1)


def _tree(nodes: Nodes):
    return import_extra("scipy.spatial", "graphs").KDTree(nodes.xyz)
