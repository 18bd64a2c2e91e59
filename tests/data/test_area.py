"""Area weights: quadrature on the sphere."""

import numpy as np
import pytest

from anemoi_gt.data.area import area_weights
from anemoi_gt.data.grids import octahedral
from anemoi_gt.data.meshes import icosphere
from anemoi_gt.data.nodes import Nodes


def test_weights_have_mean_one_and_are_positive():
    weights = area_weights(octahedral(16))
    assert weights.mean() == pytest.approx(1, rel=1e-14)
    assert weights.min() > 0


def test_row_of_a_gaussian_grid_weighs_what_gaussian_quadrature_gives_it():
    nodes = octahedral(24)
    _, row = np.unique(-nodes.lat, return_inverse=True)
    _, quadrature = np.polynomial.legendre.leggauss(48)
    share = np.bincount(row, area_weights(nodes)) / len(nodes)
    np.testing.assert_allclose(share[1:-1], quadrature[1:-1] / 2, rtol=3e-2)  # the polar caps are cut otherwise
    np.testing.assert_allclose(share.sum(), 1)


@pytest.mark.parametrize("nodes", [octahedral(32), icosphere(4).nodes], ids=["octahedral", "icosphere"])
def test_weighted_mean_is_the_integral_over_the_globe(nodes):
    weights, (x, y, z) = area_weights(nodes), nodes.xyz.T
    assert np.average(z, weights=weights) == pytest.approx(0, abs=1e-10)
    assert np.average(z**2, weights=weights) == pytest.approx(1 / 3, rel=2e-3)
    assert np.average(x**2 * y**2, weights=weights) == pytest.approx(1 / 15, rel=4e-3)


def test_coinciding_nodes_raise():
    with pytest.raises(ValueError, match="[Dd]uplicate"):
        area_weights(Nodes([0.0, 0, 90, -90, 0], [0.0, 90, 0, 0, 0]))
