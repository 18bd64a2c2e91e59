"""Maps of node sets in inline SVG: the globe seen from above a node, north up."""

import numpy as np

from anemoi_gt.data.nodes import Nodes

SIDE = 240  # width and height of a map, in SVG units


def map_of(shapes: str, text: str) -> str:
    """Return a framed map of SVG shapes with a caption, which is also its ARIA label."""
    return (
        f'<figure><svg viewBox="0 0 {SIDE} {SIDE}" role="img" aria-label="{text}">'
        f'<rect class="box" x="0.5" y="0.5" width="{SIDE - 1}" height="{SIDE - 1}" '
        f'rx="4"/>{shapes}</svg>'
        f"<figcaption>{text}</figcaption></figure>"
    )


def seen(xyz: np.ndarray, middle: Nodes, half_width: float) -> np.ndarray:
    """Return the positions [M, 2] of visible points [N, 3] on a map around `middle`, SVG units."""
    places = project(xyz[xyz @ middle.xyz[0] > 0], middle, half_width)
    return places[np.abs(places - SIDE / 2).max(axis=1) < SIDE / 2]


def project(xyz: np.ndarray, middle: Nodes, half_width: float) -> np.ndarray:
    """Return the positions of points [M, 3] on a map around `middle`, [M, 2] in SVG units."""
    x, y = xyz @ middle.east[0], xyz @ middle.north[0]
    return SIDE / 2 * (1 + np.stack([x, -y], axis=1) / half_width)
