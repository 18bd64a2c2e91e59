"""Sphinx extension: a figure of encoder, processor and decoder edges, made at build time.

    ```{edges-figure}
    ```

Three maps, each of one destination with all its in-edges, seen from above, as inline SVG with the
colours of the theme.
"""

from dataclasses import dataclass

import numpy as np
from docutils import nodes
from maps import SIDE, map_of, project, seen
from sphinx.util.docutils import SphinxDirective

from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import octahedral
from anemoi_gt.data.meshes import icosphere
from anemoi_gt.data.nodes import Nodes

NEAR, FAR = 0.30, 0.75  # half width of a map: sine of the angle from its centre


@dataclass(frozen=True)
class Panel:
    """A map of the edges from `source` to one node of `destination`."""

    title: str
    source: str
    destination: str
    half_width: float


PANELS = (
    Panel("encoder", "data", "hidden", NEAR),
    Panel("processor", "hidden", "hidden", FAR),
    Panel("decoder", "hidden", "data", NEAR),
)


def figure() -> str:
    """Return the figure as HTML."""
    members = {"data": octahedral(24), "hidden": icosphere(3).nodes}
    graph = icosphere_graph(members["data"], refinement=3)
    centre = middle_of_europe(graph, members)
    maps = "\n".join(draw(panel, graph, members, centre[panel.destination]) for panel in PANELS)
    return f'<div class="figure-svg maps-figure">\n{maps}\n</div>'


def middle_of_europe(graph, members: dict[str, Nodes]) -> dict[str, int]:
    """Return a node of each set near 50 N, 10 E; on the mesh one with edges of all levels."""
    place = Nodes([50.0], [10.0]).xyz[0]
    degree = graph["hidden", "to", "hidden"].edge_index[1].bincount().numpy()
    coarse = np.where(degree == degree.max(), 0.0, -2.0)
    return {
        "data": int((members["data"].xyz @ place).argmax()),
        "hidden": int((members["hidden"].xyz @ place + coarse).argmax()),
    }


def draw(panel: Panel, graph, members: dict[str, Nodes], centre: int) -> str:
    """Return one map as SVG."""
    middle = members[panel.destination][[centre]]
    source, destination = graph[panel.source, "to", panel.destination].edge_index.numpy()
    ends = project(
        members[panel.source].xyz[source[destination == centre]], middle, panel.half_width
    )
    arrows = "".join(
        f'<path class="edges" d="M{x:.1f},{y:.1f} L{SIDE / 2},{SIDE / 2}" stroke-width="1.6"/>'
        f'<circle class="edges" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        for x, y in ends[np.linalg.norm(ends - SIDE / 2, axis=1) > 1]
    )
    dots = "".join(
        f'<circle class="{name}-node" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
        for name, radius in (("data", 2.2), ("hidden", 4.2))
        if name in (panel.source, panel.destination)
        for x, y in seen(members[name].xyz, middle, panel.half_width)
    )
    goal = f'<circle class="goal" cx="{SIDE / 2}" cy="{SIDE / 2}" r="8"/>'
    edges = f"the {panel.source} nodes of its {len(ends)} edges"
    text = f"{panel.title}: one {panel.destination} node and {edges}"
    return map_of(f"{dots}{arrows}{goal}", text)


class EdgesFigure(SphinxDirective):
    """`edges-figure`: the figure."""

    def run(self):
        """Replace the directive by the figure."""
        return [nodes.raw("", figure(), format="html")]


def setup(app):
    """Register the directive."""
    app.add_directive("edges-figure", EdgesFigure)
    return {"parallel_read_safe": True}
