"""Encoder-processor-decoder graphs: data nodes, hidden meshes and their edges, as `HeteroData`.

The layout is the same as in anemoi-graphs, so that a model accepts either:

    graph["data"].x, graph["hidden"].x       [N, 2] latitude, longitude, radians
    graph["data", "to", "hidden"]            encoder: edge_index [2, E], edge_length [E, 1],
                                             edge_dirs [E, 2]
    graph["hidden", "to", "hidden"]          processor
    graph["hidden", "to", "data"]            decoder

A builder takes the data nodes first and its options by keyword: a Hydra config names the builder
and sets `_partial_: true`, and the data set provides the nodes.

References
----------
anemoi-training, config/graph: multi_scale, limited_area and stretched_grid (edges).
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch_geometric.data import HeteroData

from anemoi_gt.data import edges, grids
from anemoi_gt.data.edge_attributes import edge_direction, edge_length, unit_std
from anemoi_gt.data.meshes import Mesh, icosphere, limited_area_icosphere, stretched_icosphere
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes, unit_vectors
from anemoi_gt.option_checks import check_integer

log = logging.getLogger(__name__)

DATA, HIDDEN = "data", "hidden"
MAX_UNREAD = 0.1  # share of data nodes without an encoder edge
MAX_ADDED = 0.5  # share of data nodes with an encoder edge only because all are connected
ICOSAHEDRON_EDGE = 1.107  # radians


def icosphere_graph(
    nodes: Nodes, *, refinement: int, cutoff: float = 0.6, nearest: int = 3, grid: str | None = None
) -> HeteroData:
    """Return the graph of a global grid and a multi-scale icosphere.

    Raises ValueError if `refinement`, `cutoff` or `nearest` is out of range, or the nodes are not
    the nodes of `grid`.

    Parameters
    ----------
    refinement : int
        Refinement of the icosphere; the processor has the edges of levels 1 to `refinement`.
    cutoff : float
        Encoder radius in units of the hidden mesh's spacing; a hidden node has at most 64 in-edges.
    nearest : int
        Decoder: number of nearest hidden nodes connected to each data node.
    grid : str, optional
        Name of the only grid that is accepted, for which the mesh was chosen, see `grids.grid`.
        None accepts any nodes.

    Examples
    --------
    >>> from anemoi_gt.data.grids import octahedral
    >>> graph = icosphere_graph(octahedral(96), refinement=5)
    >>> {f"{source} to {destination}": edges.edge_index.shape[1]
    ...  for (source, _, destination), edges in zip(graph.edge_types, graph.edge_stores)}
    {'data to hidden': 62980, 'hidden to hidden': 81840, 'hidden to data': 120960}
    """
    if grid is not None:
        expected = len(grids.grid(grid))
        if len(nodes) != expected:
            raise ValueError(
                f"the data must be on grid {grid}, which this graph is for, of {expected} nodes, "
                f"got {len(nodes)} nodes: take graph=icosphere with a graph.refinement for your "
                "grid"
            )
    return encoder_processor_decoder(nodes, icosphere(refinement), cutoff=cutoff, nearest=nearest)


def check_fit(graph: HeteroData) -> None:
    """Raise ValueError unless most hidden nodes have a data node nearby, and most data are read.

    Nearby means within 0.6 of the distance to their neighbour. Data nodes without an encoder edge
    influence nothing: up to 10% of them are logged.
    """
    data, hidden = (unit_vectors(graph[name].x.double().numpy()) for name in (DATA, HIDDEN))
    empty = edges.nearest_distance(hidden, data) > 0.6 * edges.nearest_distance(hidden)
    if empty.mean() <= 0.5:
        _check_read(graph, len(data))
        return
    # The mean of global nodes is near the centre of the globe, the mean of regional nodes is not.
    if np.linalg.norm(data.mean(axis=0)) > 0.1:
        remedy = (
            "the data cover a region, take graph=default, or graph=limited_area with a "
            "graph.refinement for it"
        )
    else:
        remedy = "the mesh is finer than the data, take graph=default, or a lower graph.refinement"
    raise ValueError(
        f"the graph must fit the data, {empty.sum()} of its {len(hidden)} hidden nodes have no "
        f"data near them: {remedy}"
    )


def _check_read(graph: HeteroData, size: int) -> None:
    """Raise ValueError if too many data nodes have no encoder edge; log the number of others."""
    read = graph[DATA, "to", HIDDEN].edge_index[0].unique()
    unread = size - len(read)
    if unread > MAX_UNREAD * size:
        raise ValueError(
            f"the graph must read the data, {unread} of {size} data nodes have no edge to a hidden "
            f"node, which takes at most {edges.MAX_NEIGHBOURS}: the mesh is too coarse for the "
            "data, take graph=default, or a higher graph.refinement"
        )
    if unread:
        log.warning(
            "%d of %d data nodes have no edge to a hidden node, and influence no forecast: "
            "graph=default connects them all",
            unread,
            size,
        )


def limited_area_graph(
    nodes: Nodes,
    *,
    refinement: int | None = None,
    margin: float | None = 100.0,
    cutoff: float = 0.6,
    nearest: int = 3,
    connect_all: bool = False,
) -> HeteroData:
    """Return the graph of a regional or global grid and the part of an icosphere that covers it.

    Raises ValueError if an option is out of range, or the mesh has fewer than `nearest` nodes over
    the region.

    Parameters
    ----------
    refinement : int, optional
        Refinement of the icosphere; neighbours are about 7000 km / 2^refinement apart. By default,
        the lowest, up to 9, whose spacing is at most four times the spacing of the data nodes.
    margin : float, optional
        Distance in kilometres by which the hidden mesh extends beyond the data nodes. If None, the
        distance between neighbours.
    cutoff, nearest
        As for `icosphere_graph`.
    connect_all : bool
        Connect each data node that is beyond the radius of all hidden nodes, or not among the
        nearest 64 of any, to its nearest hidden node. anemoi-graphs does not.

    Examples
    --------
    >>> from anemoi_gt.data.grids import octahedral
    >>> len(limited_area_graph(octahedral(96), margin=None)["hidden"].x)
    10242
    """
    check_integer("nearest", nearest)
    if refinement is None:
        distance = edges.nearest_distance(nodes.xyz)
        spacing = np.median(distance[distance > 0]) if (distance > 0).any() else 1.0
        refinement = int(np.clip(np.ceil(np.log2(ICOSAHEDRON_EDGE / (4 * spacing))), 1, 9))
    check_integer("refinement", refinement)
    if margin is None:
        margin = EARTH_RADIUS / 1000 * ICOSAHEDRON_EDGE / 2**refinement
    mesh = limited_area_icosphere(refinement, nodes, margin)
    if len(mesh.nodes) < max(nearest, 2):
        raise ValueError(
            f"the icosphere must have at least {max(nearest, 2)} nodes over the region, refinement "
            f"{refinement} has {len(mesh.nodes)} with a margin of {margin:g} km: raise refinement "
            "or margin"
        )
    edge_indices = _edges_with_data(nodes, mesh, cutoff, nearest)
    if connect_all:
        encoder = edges.with_every_source(edge_indices[DATA, HIDDEN], nodes, mesh.nodes)
        added = encoder.shape[1] - edge_indices[DATA, HIDDEN].shape[1]
        if added > MAX_ADDED * len(nodes):
            raise ValueError(
                f"cutoff must connect most data nodes to the hidden mesh, {added} of {len(nodes)} "
                f"are beyond it, or not among the nearest {edges.MAX_NEIGHBOURS} of a hidden node: "
                "raise refinement"
            )
        if added:
            log.info(
                "%d of %d data nodes are beyond the radius of the encoder: they are connected to "
                "their nearest hidden node",
                added,
                len(nodes),
            )
        edge_indices[DATA, HIDDEN] = encoder
    return _connect({DATA: nodes, HIDDEN: mesh.nodes}, edge_indices)


def stretched_graph(
    nodes: Nodes,
    *,
    refinement: int,
    area_refinement: int,
    area: Sequence[float],
    margin: float = 100.0,
    encoder_nearest: int = 12,
    nearest: int = 3,
) -> HeteroData:
    """Return the graph of a grid and an icosphere that is finer inside an area.

    The encoder uses k nearest neighbours instead of a radius, because the mesh spacing varies.
    Raises ValueError if an option is out of range, or `area` is invalid or contains no data node.

    Parameters
    ----------
    nodes : Nodes
        The data nodes, with uniform spacing or finer spacing inside the area.
    refinement : int
        Refinement of the icosphere outside the area.
    area_refinement : int
        Refinement inside the area; the processor has the edges of levels 1 to `area_refinement`.
    area : sequence of float
        North, west, south, east in degrees.
    margin : float
        Distance in kilometres by which the fine mesh extends beyond the data nodes of the area.
    encoder_nearest : int
        Encoder: number of nearest data nodes connected to each hidden node.
    nearest : int
        Decoder: number of nearest hidden nodes connected to each data node.

    Examples
    --------
    >>> from anemoi_gt.data.grids import octahedral
    >>> grid, area = octahedral(96), (49, 4, 43, 17)
    >>> alps = stretched_graph(grid, refinement=4, area_refinement=6, area=area)
    >>> len(alps["hidden"].x) - len(icosphere_graph(octahedral(96), refinement=4)["hidden"].x)
    60
    """
    inside = nodes.inside(area)
    if not inside.any():
        raise ValueError(
            f"area must contain data nodes, which locate the fine mesh, {list(area)} contains none"
        )
    mesh = stretched_icosphere(refinement, area_refinement, nodes[inside], margin)
    return _connect(
        {DATA: nodes, HIDDEN: mesh.nodes},
        {
            (DATA, HIDDEN): edges.nearest(nodes, mesh.nodes, encoder_nearest),
            (HIDDEN, HIDDEN): mesh.edge_index,
            (HIDDEN, DATA): edges.nearest(mesh.nodes, nodes, nearest),
        },
    )


def encoder_processor_decoder(
    nodes: Nodes, mesh: Mesh, *, cutoff: float = 0.6, nearest: int = 3
) -> HeteroData:
    """Return the graph of data nodes and a hidden mesh, whose edges the processor uses.

    `cutoff` and `nearest` are as for `icosphere_graph`. Raises ValueError if an option is out of
    range.
    """
    return _connect(
        {DATA: nodes, HIDDEN: mesh.nodes}, _edges_with_data(nodes, mesh, cutoff, nearest)
    )


def _edges_with_data(
    nodes: Nodes, mesh: Mesh, cutoff: float, nearest: int
) -> dict[tuple[str, str], np.ndarray]:
    encoder = edges.cutoff(nodes, mesh.nodes, cutoff)
    if encoder.shape[1] == 0:
        raise ValueError(
            f"cutoff must connect data nodes to the hidden mesh, {cutoff} times its spacing "
            "reaches none: raise it"
        )
    return {
        (DATA, HIDDEN): encoder,
        (HIDDEN, HIDDEN): mesh.edge_index,
        (HIDDEN, DATA): edges.nearest(mesh.nodes, nodes, nearest),
    }


def _connect(sets: dict[str, Nodes], edge_indices: dict[tuple[str, str], np.ndarray]) -> HeteroData:
    """Return the graph of these node sets and edges, with edge attributes."""
    graph = HeteroData()
    for name, members in sets.items():
        graph[name].x = torch.from_numpy(members.stored)
    for (source, destination), edge_index in edge_indices.items():
        ends = sets[source], sets[destination], edge_index
        store = graph[source, "to", destination]
        store.edge_index = torch.from_numpy(np.ascontiguousarray(edge_index))
        store.edge_length = torch.from_numpy(unit_std(edge_length(*ends))).float()
        store.edge_dirs = torch.from_numpy(unit_std(edge_direction(*ends))).float()
    return graph
