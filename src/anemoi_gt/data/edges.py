"""Edges between sets of nodes, from their distance alone: k nearest and cutoff radius.

An edge goes from a source to a destination, which reads it. Every builder returns [2, E] int64 (row 0 source, row 1
destination), sorted by destination, then source, so that the same nodes always give the same edges in the same order.

Distances are chords between points of the unit sphere, as in anemoi-graphs, and the points are those that a graph
stores: latitude and longitude in radians, rounded to float32. anemoi-graphs rounds before it measures; that moves a
point by up to 1e-7, and decides over sources so close to the radius. The benchmark graph (N320, icosphere 6, cutoff
0.6) has 852,840 encoder edges therefore, and 852,824 without the rounding. From there on everything here is float64,
the same on every machine, while anemoi-graphs goes on in float32: cosines, sines and vectors, whose last bit depends on
the machine. What is left between the two are sources equally far to that bit, in `nearest`.

References
----------
anemoi-graphs 0.9.8, nodes/builders/base.py (rounding), edges/builders/knn.py, edges/builders/cutoff.py, generate/masks.py
and utils.py (definitions).
"""

import numpy as np

from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes, check_nodes, unit_vectors
from anemoi_gt.extras import import_extra
from anemoi_gt.option_checks import check_integer, check_number

MAX_NEIGHBOURS = 64
TIE = 1e-9  # distances that differ by less are equal: rounding is 1e-16, what a float32 position leaves open is 1e-7
MOST_TIES = 8  # a vertex of a triangular mesh has six neighbours, all equally far at best


def sort_by_destination(edge_index: np.ndarray) -> np.ndarray:
    """Return the edges, [2, E] integers, by destination, and by source within a destination; row by row in memory."""
    source, destination = edge_index
    return np.take(edge_index, np.lexsort((source, destination)), axis=1)  # indexing would lay out columns


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
    check_nodes(source=source, destination=destination)
    check_integer("k", k, least=None)
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
        If factor or max_neighbours is not positive, there is no source, or fewer than two destinations.
    """
    check_nodes(source=source, destination=destination)
    check_number("factor", factor)
    check_integer("max_neighbours", max_neighbours)
    if not factor > 0:
        raise ValueError(f"factor must be positive, in spacings of the destinations, got {factor}")
    if len(source) == 0:
        raise ValueError("edges need at least one source, got none")
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
    check_nodes(nodes=nodes)
    if len(nodes) < 2:
        raise ValueError(f"a spacing needs at least two nodes, got {len(nodes)}")
    distance, _ = _tree(nodes).query(_points(nodes), k=[2], workers=-1)
    return float(distance.max())


def within(reference: Nodes, nodes: Nodes, margin: float) -> np.ndarray:
    """Return which nodes lie near others.

    Parameters
    ----------
    reference : Nodes
        What to be near to.
    nodes : Nodes
        N of them.
    margin : float
        Kilometres along the surface.

    Returns
    -------
    numpy.ndarray
        [N] bool: whether a reference node is at most so far away.

    Raises
    ------
    ValueError
        If margin is negative or not a number.
    """
    check_nodes(nodes=nodes, reference=reference)
    check_number("margin", margin)
    if not margin >= 0:
        raise ValueError(f"margin must not be negative, in kilometres, got {margin}")
    angle = min(1e3 * margin / EARTH_RADIUS, np.pi)
    radius = 2 * np.sin(angle / 2) * (1 + TIE) + TIE  # a node is within 0 km of itself
    distance, _ = _tree(reference).query(_points(nodes), distance_upper_bound=radius, workers=-1)
    return np.isfinite(distance)


def _neighbours(source: Nodes, destination: Nodes, k: int, radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Return distance and number of the k nearest sources within `radius`, both [destinations, k].

    Where fewer are within reach the distance is infinite. On regular grids many sources are equally far; of those the
    lower number comes first, whatever the rounding of the machine makes of their distances.
    """
    candidates = np.arange(1, min(k + MOST_TIES, len(source)) + 1)
    distance, neighbours = _tree(source).query(
        _points(destination), k=candidates, distance_upper_bound=radius * (1 + TIE), workers=-1
    )
    order = np.lexsort((neighbours, np.round(distance / TIE)), axis=-1)[:, :k]
    return np.take_along_axis(distance, order, axis=1), np.take_along_axis(neighbours, order, axis=1)


def _points(nodes: Nodes) -> np.ndarray:
    """Return the nodes where a graph stores them: unit vectors [N, 3] float64 of float32 latitudes and longitudes."""
    return unit_vectors(nodes.stored.astype(np.float64))


def _tree(nodes: Nodes):
    return import_extra("scipy.spatial", "graphs").KDTree(_points(nodes))
