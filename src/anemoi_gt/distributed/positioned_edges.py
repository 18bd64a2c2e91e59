"""Edges between places on two lines of nodes, and the structures made of them. The only place of this room that makes structures.

A rank's edges are its interior, whose sources it owns, and its boundary, whose sources are halo:

    interior    owned sources to owned destinations
    boundary    halo to those owned destinations that read it
    joined      owned sources, then the halo, to owned destinations
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.distributed.partition import Partition
from anemoi_gt.graph import GraphStructure


class PlacedEdges(NamedTuple):
    """Edges between places on the lines of two partitions, in an order that inside a destination is the caller's."""

    src: Tensor  # [E] int64
    dst: Tensor  # [E] int64
    position: Tensor  # [E] int64, in the caller's attributes
    number: Tensor  # [E] int64, in the whole graph
    dst_schedule: Tensor | None  # [N_dst] int64, places of destinations

    @classmethod
    def of_graph(cls, graph: GraphStructure, sources: Partition, destinations: Partition) -> "PlacedEdges":
        """All edges of a graph."""
        return cls(
            src=sources.places(graph.row),
            dst=destinations.places(graph.dst),
            position=graph.edge_order().long(),
            number=graph.global_edge_ids(),
            dst_schedule=None if graph.dst_schedule is None else destinations.places(graph.dst_schedule),
        )

    def at(self, index: Tensor) -> "PlacedEdges":
        """These edges, by mask or by number."""
        return self._replace(**{name: getattr(self, name)[index] for name in ("src", "dst", "position", "number")})


def structure(edges: PlacedEdges, src: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, GraphStructure]:
    """Sort edges from `src` to their destinations; return their places in the caller's attributes, and a structure that reads
    attributes in that order."""
    graph = GraphStructure.from_edge_index(torch.stack([src, edges.dst]), sizes, global_edge_id=edges.number)
    position = edges.position[graph.edge_order().long()]
    order = None if edges.dst_schedule is None else edges.dst_schedule.to(graph.colptr.dtype)
    return position, replace(graph, perm=None, dst_schedule=order).with_reverse()


def joined(interior: GraphStructure, boundary: GraphStructure, boundary_dst: Tensor) -> tuple[Tensor, GraphStructure]:
    """Sort interior and boundary edges together, sources owned, then halo; return their places among the interior's edges and the
    boundary's behind them, and a structure that reads attributes in that order."""
    inner, outer = interior.edge_index(), boundary.edge_index()
    outer = torch.stack([outer[0] + interior.num_src, boundary_dst[outer[1]]])
    graph = GraphStructure.from_edge_index(
        torch.cat([inner, outer], dim=1),
        (interior.num_src + boundary.num_src, interior.num_dst),
        global_edge_id=torch.cat([interior.global_edge_id, boundary.global_edge_id]),
    )
    order = None if interior.dst_schedule is None else interior.dst_schedule.to(graph.colptr.dtype)
    return graph.edge_order().long(), replace(graph, perm=None, dst_schedule=order).with_reverse()


def within(places: Tensor | None, own: slice) -> Tensor | None:
    """Those of `places` that lie in `own`, counted from its beginning, in their order."""
    return None if places is None else places[(places >= own.start) & (places < own.stop)] - own.start


def renumbered(order: Tensor | None, nodes: Tensor) -> Tensor | None:
    """Those of `order` that are among the rising `nodes`, as places there, in their order."""
    if order is None:
        return None
    kept = order[torch.isin(order, nodes)]
    return torch.searchsorted(nodes, kept)
