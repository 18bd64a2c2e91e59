"""Area weights: the share of the sphere that each node stands for."""

import numpy as np

from anemoi_gt.data.nodes import Nodes, check_nodes
from anemoi_gt.extras import import_extra


def area_weights(nodes: Nodes) -> np.ndarray:
    """Return the areas of the nodes' Voronoi cells on the sphere, scaled to mean 1.

    Parameters
    ----------
    nodes : Nodes
        At least four, spread over the globe, no two in one place.

    Returns
    -------
    numpy.ndarray
        [N] float64, positive, of mean 1.

    Raises
    ------
    ValueError
        If two nodes coincide, or they are too few, or all on one circle.
    """
    check_nodes(nodes=nodes)
    voronoi = import_extra("scipy.spatial", "graphs").SphericalVoronoi
    try:
        areas = voronoi(nodes.xyz).calculate_areas()
    except ValueError as error:
        raise ValueError(
            f"nodes must be at least four, all over the globe, no two in one place, got {len(nodes)}: {error}"
        ) from error
    return areas / areas.mean()
