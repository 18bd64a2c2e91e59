"""Edges between node sets by distance: k nearest neighbours and cutoff radius.

An edge goes from a source to a destination. Every builder returns [2, E] int64 (row 0 source, row 1
destination), sorted by destination, then source, so that the same nodes always give the same edges
in the same order.

Distances are chord lengths on the unit sphere between the positions that a graph stores (latitude
and longitude in radians, rounded to float32), as in anemoi-graphs. The rounding moves a point by up
to 1e-7 and decides about sources that close to the radius: the benchmark graph (N320, icosphere 6,
cutoff 0.6) has 852,840 encoder edges, and 852,824 without it. All further arithmetic is float64 and
the same on every machine. anemoi-graphs continues in float32, where the last bit depends on the
machine; the two differ only in `nearest`, where sources are equally far to that bit.

References
----------
anemoi-graphs 0.9.8, nodes/builders/base.py (rounding), edges/builders/knn.py,
edges/builders/cutoff.py, generate/masks.py and utils.py (definitions).
"""

from typing import TYPE_CHECKING

import numpy as np

from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes, unit_vectors
from anemoi_gt.extras import import_extra
from anemoi_gt.option_checks import check_integer, check_number, check_positive

if TYPE_CHECKING:
    from scipy.spatial import KDTree

MAX_NEIGHBOURS = 64
# Distances that differ by less are equal. It lies between rounding in float64 (1e-16) and rounding
# of positions (1e-7).
TIE = 1e-9
MAX_TIES = 8  # a vertex of a triangular mesh has at most six equidistant neighbours


def sort_by_destination(edge_index: np.ndarray) -> np.ndarray:
    """Return the edges [2, E] sorted by destination, then source, contiguous in memory."""
    source, destination = edge_index
    # unlike indexing, which would return column-major memory
    return np.take(edge_index, np.lexsort((source, destination)), axis=1)


def nearest(source: Nodes, destination: Nodes, k: int) -> np.ndarray:
    """Return the edges from the k nearest sources of each destination, int64 [2, N_dst * k].

    Raises ValueError if k is not between 1 and the number of sources.
    """
    check_integer("k", k, least=None)
    if not 1 <= k <= len(source):
        raise ValueError(f"k must be in [1, {len(source)}], the number of sources, got {k}")
    _, neighbours = _neighbours(source, destination, k, radius=np.inf)
    return sort_by_destination(
        np.stack([neighbours.ravel(), np.repeat(np.arange(len(destination)), k)])
    )


def cutoff(source: Nodes, destination: Nodes, factor: float) -> np.ndarray:
    """Return edges from the nearest 64 sources within a radius of each destination, int64 [2, E].

        radius = factor * grid_spacing(destination)

    The centre of an equilateral triangle is 0.577 sides from its corners, so a factor of 0.6
    connects almost all sources to a triangular mesh. Raises ValueError if factor is not positive,
    there is no source, or there are fewer than two destinations.
    """
    check_positive("factor", factor, ", in units of the destinations' spacing")
    if len(source) == 0:
        raise ValueError("source must have at least one node, got none")
    radius = factor * grid_spacing(destination)
    k = min(MAX_NEIGHBOURS, len(source))
    distance, neighbours = _neighbours(source, destination, k, radius)
    is_neighbour = np.isfinite(distance)  # [destinations, k]; padded with infinity
    destinations = np.nonzero(is_neighbour)[0]
    return sort_by_destination(np.stack([neighbours[is_neighbour], destinations]))


def with_every_source(edge_index: np.ndarray, source: Nodes, destination: Nodes) -> np.ndarray:
    """Return edges [2, E], and one from each source without an edge to its nearest destination."""
    has_edge = np.zeros(len(source), dtype=bool)
    has_edge[edge_index[0]] = True
    missing = np.flatnonzero(~has_edge)
    if len(missing) == 0:
        return edge_index
    _, nearest_destination = _neighbours(destination, source[missing], 1, radius=np.inf)
    added = np.stack([missing, nearest_destination[:, 0]])
    return sort_by_destination(np.concatenate([edge_index, added], axis=1))


def grid_spacing(nodes: Nodes) -> float:
    """Return the largest nearest-neighbour distance, as chord length on the unit sphere.

    Raises ValueError if there are fewer than two nodes.
    """
    if len(nodes) < 2:
        raise ValueError(f"nodes must be at least two to have a spacing, got {len(nodes)}")
    return float(nearest_distance(_points(nodes)).max())


def nearest_distance(points: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """Return the distance [N] of each point to its nearest neighbour.

    Points are [N, 3]; neighbours are `others` [M, 3], or the other points.
    """
    tree = import_extra("scipy.spatial", "graphs").KDTree(points if others is None else others)
    return tree.query(points, k=[2 if others is None else 1], workers=-1)[0][:, 0]


def within(reference: Nodes, nodes: Nodes, margin: float) -> np.ndarray:
    """Return a mask [N] of the nodes within `margin` kilometres (great circle) of a reference node.

    Raises ValueError if margin is negative or not a number.
    """
    check_number("margin", margin)
    if not margin >= 0:
        raise ValueError(f"margin must not be negative, in kilometres, got {margin}")
    angle = min(1e3 * margin / EARTH_RADIUS, np.pi)
    radius = 2 * np.sin(angle / 2) * (1 + TIE) + TIE  # a node must be within 0 km of itself
    distance, _ = _tree(reference).query(_points(nodes), distance_upper_bound=radius, workers=-1)
    return np.isfinite(distance)


def _neighbours(
    source: Nodes, destination: Nodes, k: int, radius: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return distance and index [N_dst, k] of the k nearest sources within `radius`.

    Missing neighbours have infinite distance. On regular grids, many sources are equidistant; ties
    go to the lower index, independent of rounding.
    """
    candidates = np.arange(1, min(k + MAX_TIES, len(source)) + 1)
    distance, neighbours = _tree(source).query(
        _points(destination), k=candidates, distance_upper_bound=radius * (1 + TIE), workers=-1
    )
    order = np.lexsort((neighbours, np.round(distance / TIE)), axis=-1)[:, :k]
    distance = np.take_along_axis(distance, order, axis=1)
    neighbours = np.take_along_axis(neighbours, order, axis=1)
    return distance, neighbours


def _points(nodes: Nodes) -> np.ndarray:
    """Return unit vectors [N, 3] float64 of the float32 positions that a graph stores."""
    return unit_vectors(nodes.stored.astype(np.float64))


def _tree(nodes: Nodes) -> "KDTree":
    return import_extra("scipy.spatial", "graphs").KDTree(_points(nodes))
