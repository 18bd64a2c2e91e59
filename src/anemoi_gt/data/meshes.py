"""Hidden meshes: refined icosahedra of the globe, limited areas and stretched grids.

Refinement r splits every triangle of the icosahedron into four, r times, and projects new vertices
onto the sphere. This gives 10 * 4^r + 2 vertices, including the vertices of all levels l < r, and
60 * 4^l directed edges at level l. A multi-scale mesh has the edges of several levels, so that a
message crosses the globe in a few steps (Lam et al. 2023).

Vertices are sorted by latitude, north first, then by longitude, east first, both as float32
radians. anemoi-graphs sorts its TriNodes by latitude too, but with an unstable sort, so its order
along a parallel depends on the machine.

References
----------
Lam, R. et al. (2023), Learning skillful medium-range global weather forecasting, Science 382,
1416-1421. anemoi-graphs 0.9.8, generate/tri_icosahedron.py and generate/utils.py (definition of
levels, areas and order).
"""

from dataclasses import dataclass

import numpy as np

from anemoi_gt.data.edges import sort_by_destination, within
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra
from anemoi_gt.option_checks import check_integer

MAX_REFINEMENT = 11  # 42 million nodes, 3 km apart; building it takes about 15 GB


@dataclass(frozen=True, eq=False)
class Mesh:
    """N vertices and edges [2, E] int64, sorted by destination, then by source."""

    nodes: Nodes
    edge_index: np.ndarray

    def restrict(self, keep: np.ndarray) -> "Mesh":
        """Return the sub-mesh of the vertices where `keep` [N] is True, in the same order.

        Raises ValueError if `keep` is not bool [N].
        """
        keep = np.asarray(keep)
        if keep.shape != (len(self.nodes),) or keep.dtype != bool:
            raise ValueError(
                f"keep must be bool [{len(self.nodes)}], one per vertex, got {keep.dtype} "
                f"{keep.shape}"
            )
        new_index = np.cumsum(keep) - 1
        inside = keep[self.edge_index].all(axis=0)
        return Mesh(self.nodes[keep], new_index[self.edge_index[:, inside]])


def icosphere(refinement: int) -> Mesh:
    """Return a refined icosahedron: 10 * 4^refinement + 2 nodes, 60 * 4^l edges per level l.

    Each triangle is split into four, `refinement` times. The mesh has the edges of levels 1 to
    `refinement`. Raises ValueError if `refinement` is not 1 to 11.

    Examples
    --------
    >>> mesh = icosphere(5)
    >>> len(mesh.nodes), mesh.edge_index.shape
    (10242, (2, 81840))
    """
    check_refinement("refinement", refinement)
    mesh, _ = _refine(refinement)
    return mesh


def limited_area_icosphere(refinement: int, area: Nodes, margin: float = 100.0) -> Mesh:
    """Return a regional part of a multi-scale icosphere, with edges of levels 1 to `refinement`.

    The region is everything within `margin` kilometres of the points `area`, such as the data nodes
    of a region. Raises ValueError if `refinement` is below 1, `margin` is negative, or `area` is
    empty.

    Examples
    --------
    >>> mesh = limited_area_icosphere(5, Nodes(lat=[47.0], lon=[8.0]), margin=500)
    >>> len(mesh.nodes), mesh.edge_index.shape
    (17, (2, 82))
    """
    mesh = icosphere(refinement)
    return mesh.restrict(_over(area, mesh.nodes, margin))


def stretched_icosphere(
    refinement: int, area_refinement: int, area: Nodes, margin: float = 100.0
) -> Mesh:
    """Return a multi-scale icosphere that is finer over a region.

    It has the vertices of the icosphere with `refinement` and, over the region, with
    `area_refinement`, and the edges of levels 1 to `area_refinement` between them. `area` and
    `margin` (km) define the region, as for `limited_area_icosphere`. Raises ValueError if
    `refinement` is below 1, `area_refinement` is not above it, `margin` is negative, or `area` is
    empty.

    Examples
    --------
    >>> mesh = stretched_icosphere(3, 5, Nodes(lat=[47.0], lon=[8.0]), margin=500)
    >>> regional = limited_area_icosphere(5, Nodes([47.0], [8.0]), 500)
    >>> len(icosphere(3).nodes), len(mesh.nodes), len(regional.nodes)
    (642, 658, 17)
    """
    check_refinement("refinement", refinement)
    check_refinement("area_refinement", area_refinement)
    if area_refinement <= refinement:
        raise ValueError(
            f"area_refinement must be above refinement, got {area_refinement} and {refinement}"
        )
    mesh, index = _refine(area_refinement)
    coarse = index < 10 * 4**refinement + 2
    return mesh.restrict(coarse | _over(area, mesh.nodes, margin))


def check_refinement(name: str, refinement: int) -> None:
    """Raise ValueError unless a refinement is from 1 to `MAX_REFINEMENT`, before memory fills."""
    check_integer(name, refinement)
    if refinement > MAX_REFINEMENT:
        raise ValueError(
            f"{name} must be at most {MAX_REFINEMENT} ({10 * 4**MAX_REFINEMENT:,} nodes on the "
            f"globe, from which a region is cut), got {refinement}"
        )


def _over(area: Nodes, nodes: Nodes, margin: float) -> np.ndarray:
    """Return a mask of the nodes at most `margin` kilometres outside an area."""
    if len(area) == 0:
        raise ValueError("area must have at least one node, got none")
    return within(area, nodes, margin)


def _refine(refinement: int) -> tuple[Mesh, np.ndarray]:
    """Return the icosphere and each vertex's index in splitting order.

    Level l has the first 10 * 4^l + 2 vertices of that order.
    """
    xyz, faces = _icosahedron()
    sides = []
    for _ in range(refinement):
        xyz, faces = _split(xyz, faces)
        sides.append(_sides(faces)[0])

    nodes = Nodes.from_xyz(xyz)
    lat, lon = nodes.stored.T  # vertices of one parallel differ in the last bits of a float64
    order = np.lexsort((lon, lat))[::-1]  # north to south, then east to west
    rank = np.argsort(order)
    one_way = rank[np.concatenate(sides)].T
    edge_index = sort_by_destination(np.concatenate([one_way, one_way[::-1]], axis=1))
    return Mesh(nodes[order], edge_index), order


def _icosahedron() -> tuple[np.ndarray, np.ndarray]:
    """Return the 12 vertices on the unit sphere and the 20 faces.

    Vertices are (0, +-1, +-golden ratio) and cyclic shifts.
    """
    golden = (1 + 5**0.5) / 2
    rectangle = np.array([[0.0, one, phi] for one in (-1, 1) for phi in (-golden, golden)])
    corners = np.concatenate([np.roll(rectangle, shift, axis=1) for shift in range(3)])
    faces = import_extra("scipy.spatial", "graphs").ConvexHull(corners).simplices
    return corners / np.hypot(1, golden), faces.astype(np.int64)


def _sides(faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the unique sides [U, 2] of triangles [F, 3], and the sides of each triangle [F, 3]."""
    ends = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]], axis=-1).reshape(-1, 2)
    _, first, side = np.unique(
        ends[:, 0] << 32 | ends[:, 1], return_index=True, return_inverse=True
    )
    return ends[first], side.reshape(-1, 3)


def _split(xyz: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split each triangle in four at the midpoints of its sides; old vertices come first.

    Midpoints are projected onto the sphere.
    """
    sides, side_of_face = _sides(faces)
    middle = xyz[sides].sum(axis=1)
    middle /= np.linalg.norm(middle, axis=1, keepdims=True)
    ab, bc, ca = (len(xyz) + side_of_face).T
    a, b, c = faces.T
    quarters = [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
    return np.concatenate([xyz, middle]), np.concatenate(
        [np.stack(quarter, axis=1) for quarter in quarters]
    )
