"""Area weights: the share of the sphere that each node stands for."""

import numpy as np

from anemoi_gt.data.nodes import Nodes
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
        If two nodes coincide.
    """
    areas = import_extra("scipy.spatial", "graphs").SphericalVoronoi(nodes.xyz).calculate_areas()
    return areas / areas.mean()
