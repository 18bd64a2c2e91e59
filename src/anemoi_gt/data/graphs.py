"""Encoder-processor-decoder graphs: data nodes, a hidden mesh and the edges between them, as `HeteroData`.

The layout is that of anemoi-graphs, so that either can be given to a model:

    graph["data"].x, graph["hidden"].x       [N, 2] latitude, longitude, radians
    graph["data", "to", "hidden"]            encoder: edge_index [2, E], edge_length [E, 1], edge_dirs [E, 2]
    graph["hidden", "to", "hidden"]          processor
    graph["hidden", "to", "data"]            decoder

A builder takes the data nodes first and its options by keyword, so that a Hydra config names the builder with
`_partial_: true` and the data set provides the nodes.
"""

import numpy as np
import torch
from torch_geometric.data import HeteroData

from anemoi_gt.data import edges
from anemoi_gt.data.attributes import edge_direction, edge_length, unit_std
from anemoi_gt.data.icosphere import Mesh, icosphere
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes

DATA, HIDDEN = "data", "hidden"


def icosphere_graph(nodes: Nodes, *, refinement: int, cutoff: float = 0.6, nearest: int = 3) -> HeteroData:
    """Return the graph between a global grid and a multi-scale icosphere.

    Parameters
    ----------
    nodes : Nodes
        The data nodes.
    refinement : int
        Refinement of the icosphere; the processor has the edges of levels 1 to `refinement`.
    cutoff : float
        Encoder: a hidden node reads the data nodes within this many spacings of the hidden mesh, at most 64.
    nearest : int
        Decoder: a data node reads so many nearest hidden nodes.

    Returns
    -------
    HeteroData
        The graph.

    Raises
    ------
    ValueError
        If refinement, cutoff or nearest is out of range.

    Examples
    --------
    >>> from anemoi_gt.data.grids import octahedral
    >>> graph = icosphere_graph(octahedral(96), refinement=5)
    >>> {f"{source} to {destination}": edges.edge_index.shape[1]
    ...  for (source, _, destination), edges in zip(graph.edge_types, graph.edge_stores)}
    {'data to hidden': 62980, 'hidden to hidden': 81840, 'hidden to data': 120960}
    """
    return encoder_processor_decoder(nodes, icosphere(refinement), cutoff=cutoff, nearest=nearest)


def limited_area_graph(
    nodes: Nodes, *, refinement: int, margin: float = 100.0, cutoff: float = 0.6, nearest: int = 3
) -> HeteroData:
    """Return the graph between a regional grid and the part of an icosphere that lies over it.

    Parameters
    ----------
    nodes : Nodes
        The data nodes.
    refinement : int
        Refinement of the icosphere; about 7000 km / 2^refinement between neighbours.
    margin : float
        The hidden mesh ends this many kilometres outside the data nodes.
    cutoff, nearest
        As for `icosphere_graph`.

    Returns
    -------
    HeteroData
        The graph.

    Raises
    ------
    ValueError
        If an option is out of range, or the mesh is too coarse to have `nearest` nodes over the region.
    """
    if margin < 0:
        raise ValueError(f"margin must not be negative, in kilometres, got {margin}")
    mesh = icosphere(refinement)
    mesh = mesh.restrict(edges.within(nodes, mesh.nodes, chord(1e3 * margin / EARTH_RADIUS)))
    if len(mesh.nodes) < max(nearest, 2):
        raise ValueError(
            f"the icosphere must have at least {max(nearest, 2)} nodes over the region, refinement {refinement} has "
            f"{len(mesh.nodes)} with a margin of {margin:g} km: raise refinement or margin"
        )
    return encoder_processor_decoder(nodes, mesh, cutoff=cutoff, nearest=nearest)


def chord(angle: float) -> float:
    """Return the straight distance between two points of the unit sphere that are `angle` radians apart."""
    return 2 * np.sin(min(angle, np.pi) / 2)


def encoder_processor_decoder(nodes: Nodes, mesh: Mesh, *, cutoff: float = 0.6, nearest: int = 3) -> HeteroData:
    """Return the graph between data nodes and a hidden mesh of any kind.

    Parameters
    ----------
    nodes : Nodes
        The data nodes.
    mesh : Mesh
        The hidden nodes and the processor's edges.
    cutoff, nearest
        As for `icosphere_graph`.

    Returns
    -------
    HeteroData
        The graph.

    Raises
    ------
    ValueError
        If cutoff or nearest is out of range.
    """
    graph = HeteroData()
    sets = {DATA: nodes, HIDDEN: mesh.nodes}
    for name, members in sets.items():
        graph[name].x = torch.from_numpy(members.radians).float()
    edge_indices = {
        (DATA, "to", HIDDEN): edges.cutoff(nodes, mesh.nodes, cutoff),
        (HIDDEN, "to", HIDDEN): mesh.edge_index,
        (HIDDEN, "to", DATA): edges.nearest(mesh.nodes, nodes, nearest),
    }
    for (source, to, destination), edge_index in edge_indices.items():
        ends = sets[source], sets[destination], edge_index
        store = graph[source, to, destination]
        store.edge_index = torch.from_numpy(edge_index)
        store.edge_length = torch.from_numpy(unit_std(edge_length(*ends))).float()
        store.edge_dirs = torch.from_numpy(unit_std(edge_direction(*ends))).float()
    return graph
