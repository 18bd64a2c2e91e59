"""Hidden meshes from the icosahedron: the only place that refines triangles.

Refinement r splits every triangle of the icosahedron r times in four and keeps the corners on the sphere: 10 * 4^r + 2
vertices, of which those of level l < r are a subset; 60 * 4^l directed edges at level l. A multi-scale mesh keeps the
edges of many levels, so that a message crosses the globe in a few steps (Lam et al. 2023).

Vertices are ordered as anemoi-graphs orders its TriNodes: by latitude, north first, and along a parallel by
longitude, east first, both compared as float32 radians.

References
----------
Lam, R. et al. (2023), Learning skillful medium-range global weather forecasting, Science 382, 1416-1421.
anemoi-graphs 0.9.8, generate/tri_icosahedron.py and generate/utils.py (definition of levels and order).
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from anemoi_gt.data.edges import sort_by_destination
from anemoi_gt.data.nodes import Nodes


@dataclass(frozen=True, eq=False)
class Mesh:
    """Nodes with edges among them.

    Parameters
    ----------
    nodes : Nodes
        N vertices.
    edge_index : numpy.ndarray
        [2, E] int64, row 0 source, row 1 destination, sorted by destination, then source.
    """

    nodes: Nodes
    edge_index: np.ndarray

    def restrict(self, keep: np.ndarray) -> "Mesh":
        """Return the mesh of the vertices where `keep` [N] is True, in the same order, and the edges among them."""
        new_number = np.cumsum(keep) - 1
        inside = keep[self.edge_index].all(axis=0)
        return Mesh(self.nodes[keep], new_number[self.edge_index[:, inside]])


def icosphere(refinement: int, levels: tuple[int, ...] | None = None) -> Mesh:
    """Return a refined icosahedron with the edges of several levels.

    Parameters
    ----------
    refinement : int
        How often each triangle is split in four, at least 1.
    levels : tuple of int or None
        Levels whose edges the mesh has; None means 1 to `refinement`.

    Returns
    -------
    Mesh
        10 * 4^refinement + 2 nodes; 60 * 4^l edges for each level l, both directions counted.

    Raises
    ------
    ValueError
        If refinement is below 1, or a level is not in [0, refinement].

    Examples
    --------
    >>> mesh = icosphere(5)
    >>> len(mesh.nodes), mesh.edge_index.shape
    (10242, (2, 81840))
    """
    if refinement < 1:
        raise ValueError(f"refinement must be at least 1, got {refinement}")
    levels = range(1, refinement + 1) if levels is None else levels
    if len(levels) == 0 or not set(levels) <= set(range(refinement + 1)):
        raise ValueError(f"levels must be one or more of 0 to {refinement}, the refinement, got {tuple(levels)}")

    xyz, faces = _icosahedron()
    sides = [_sides(faces)[0]]
    for _ in range(refinement):
        xyz, faces = _split(xyz, faces)
        sides.append(_sides(faces)[0])

    nodes = Nodes.from_xyz(xyz)
    order = _north_to_south(nodes)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    one_way = rank[np.concatenate([sides[level] for level in set(levels)])].T
    return Mesh(nodes[order], sort_by_destination(np.concatenate([one_way, one_way[::-1]], axis=1)))


def _icosahedron() -> tuple[np.ndarray, np.ndarray]:
    """Return the 12 vertices (0, +-1, +-golden ratio) and their cyclic shifts, on the unit sphere, and the 20 faces."""
    golden = (1 + 5**0.5) / 2
    rectangle = np.array([[0.0, one, phi] for one in (-1, 1) for phi in (-golden, golden)])
    corners = np.concatenate([np.roll(rectangle, shift, axis=1) for shift in range(3)])
    edge_length = 2.0
    near = np.isclose(np.linalg.norm(corners[:, None] - corners, axis=-1), edge_length)
    faces = [(a, b, c) for a, b, c in combinations(range(12), 3) if near[a, b] and near[b, c] and near[c, a]]
    return corners / np.hypot(1, golden), np.array(faces)


def _sides(faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sides of the triangles [F, 3], each once, [U, 2], and which of them each triangle has, [F, 3]."""
    ends = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]], axis=-1).reshape(-1, 2)
    _, first, side = np.unique(ends[:, 0] << 32 | ends[:, 1], return_index=True, return_inverse=True)
    return ends[first], side.reshape(-1, 3)


def _split(xyz: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split each triangle in four at the midpoints of its sides, pushed out to the sphere; old vertices come first."""
    sides, side_of_face = _sides(faces)
    middle = xyz[sides].sum(axis=1)
    middle /= np.linalg.norm(middle, axis=1, keepdims=True)
    ab, bc, ca = (len(xyz) + side_of_face).T
    a, b, c = faces.T
    quarters = [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
    return np.concatenate([xyz, middle]), np.concatenate([np.stack(quarter, axis=1) for quarter in quarters])


def _north_to_south(nodes: Nodes) -> np.ndarray:
    """Return the order by falling latitude, then falling longitude."""
    lat, lon = nodes.radians.astype(np.float32).T  # vertices of one parallel differ in the last bits of a float64
    return np.lexsort((lon, lat))[::-1]
