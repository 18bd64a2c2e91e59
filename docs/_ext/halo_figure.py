"""Sphinx extension: a figure of owned and halo nodes, made at build time.

    ```{halo-figure}
    ```

Two maps of the globe seen from above a rank: the nodes of an icosphere on a Morton curve,
partitioned among eight ranks; and the rank's own nodes with its halo. Inline SVG with the colours
of the theme; ranks differ in shape too.
"""

import numpy as np
import torch
from docutils import nodes
from maps import map_of, project, seen
from sphinx.util.docutils import SphinxDirective

from anemoi_gt.data.meshes import icosphere
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.distributed import Partition, destination_cost
from anemoi_gt.graph.ordering import morton_order

REFINEMENT, RANKS, RANK = 3, 8, 0
HALF_WIDTH = 1.04  # half width of a map: the globe and a margin
SHAPES = (  # marks centred at 0, cycled over the ranks
    "M-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0z",
    "M-2.7,-2.7H2.7V2.7H-2.7z",
    "M0,-3.6L3.4,2.7H-3.4z",
    "M0,-3.7L3.7,0L0,3.7L-3.7,0z",
)


def figure() -> str:
    """Return the figure as HTML."""
    mesh = icosphere(REFINEMENT)
    xyz, edge_index = mesh.nodes.xyz, torch.as_tensor(mesh.edge_index)
    owner, halo = shares(xyz, edge_index)
    middle = above(xyz[owner == RANK])
    maps = (
        ownership(xyz, owner, middle),
        neighbourhood(xyz, edge_index.numpy(), owner, halo, middle),
    )
    return '<div class="figure-svg maps-figure large">\n' + "\n".join(maps) + "\n</div>"


def shares(xyz: np.ndarray, edge_index: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the owner of each node [N], and the halo nodes [M] of RANK."""
    cost = destination_cost(torch.bincount(edge_index[1], minlength=len(xyz)))
    partition = Partition.balanced(cost, RANKS, morton_order(torch.as_tensor(xyz)))
    owner = partition.ranges.owner(partition.positions(torch.arange(len(xyz))))
    src, dst = edge_index
    halo = torch.unique(src[(owner[dst] == RANK) & (owner[src] != RANK)])
    return owner.numpy(), halo.numpy()


def above(xyz: np.ndarray) -> Nodes:
    """Return the mean direction of points [M, 3]."""
    x, y, z = xyz.mean(axis=0)
    return Nodes([np.degrees(np.arctan2(z, np.hypot(x, y)))], [np.degrees(np.arctan2(y, x))])


def ownership(xyz: np.ndarray, owner: np.ndarray, middle: Nodes) -> str:
    """Return the map of the owners."""
    dots = "".join(
        marks(xyz[owner == rank], middle, f"rank{rank}", rank % len(SHAPES))
        for rank in range(RANKS)
    )
    counts = np.bincount(owner, minlength=RANKS)
    return map_of(
        dots,
        f"{len(xyz)} nodes of an icosphere, {counts.min()} to {counts.max()} for each of {RANKS} "
        "ranks",
    )


def neighbourhood(
    xyz: np.ndarray, edge_index: np.ndarray, owner: np.ndarray, halo: np.ndarray, middle: Nodes
) -> str:
    """Return the map of one rank: its own nodes, its halo, and the boundary edges between them."""
    src, dst = edge_index
    own = owner == RANK
    boundary = own[dst] & ~own[src]
    ends = project(xyz, middle, HALF_WIDTH)
    lines = "".join(
        f"M{ends[j, 0]:.1f},{ends[j, 1]:.1f}L{ends[i, 0]:.1f},{ends[i, 1]:.1f}"
        for j, i in zip(src[boundary], dst[boundary], strict=True)
        if min(xyz[[j, i]] @ middle.xyz[0]) > 0
    )
    rest = ~own
    rest[halo] = False
    shapes = (
        marks(xyz[rest], middle, "other", 0, scale=0.45)
        + f'<path class="boundary" d="{lines}"/>'
        + marks(xyz[own], middle, f"rank{RANK}", 0)
        + marks(xyz[halo], middle, "halo", 3)
    )
    interior = int((own[dst] & own[src]).sum())
    text = (
        f"rank {RANK}: {own.sum()} own nodes, a halo of {len(halo)} nodes of others, "
        f"{interior} interior edges (not drawn) and {boundary.sum()} boundary edges"
    )
    return map_of(shapes, text)


def marks(xyz: np.ndarray, middle: Nodes, name: str, shape: int, scale: float = 1.0) -> str:
    """Return a mark for each of the points [M, 3]."""
    return "".join(
        f'<path class="{name}" d="{SHAPES[shape]}" transform="translate({x:.1f},{y:.1f}) '
        f'scale({scale})"/>'
        for x, y in seen(xyz, middle, HALF_WIDTH)
    )


class HaloFigure(SphinxDirective):
    """`halo-figure`: the figure."""

    def run(self):
        """Replace the directive by the figure."""
        return [nodes.raw("", figure(), format="html")]


def setup(app):
    """Register the directive."""
    app.add_directive("halo-figure", HaloFigure)
    return {"parallel_read_safe": True}
