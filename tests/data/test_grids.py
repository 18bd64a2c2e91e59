"""Grids: Gaussian latitudes, octahedral and classic reduced Gaussian grids, regional grids."""

import eccodes
import numpy as np
import pytest
from support.refusals import raises, refused

from anemoi_gt.data.grids import (
    classic,
    classic_row_lengths,
    gaussian_latitudes,
    grid,
    octahedral,
    reduced_gaussian,
    regional,
)

CLASSIC = (32, 48, 64, 80, 96, 128, 160, 200, 256, 320, 400, 512, 640, 1024, 1280, 2000)


@pytest.mark.parametrize("n", [1, 2, 3, 32, 192, 640])
def test_gaussian_latitudes_are_the_legendre_roots_and_exactly_antisymmetric(n):
    roots, _ = np.polynomial.legendre.leggauss(n)
    lat = gaussian_latitudes(n)
    np.testing.assert_allclose(np.sin(np.deg2rad(lat)), roots[::-1], rtol=0, atol=4e-16)
    assert (np.diff(lat) < 0).all()
    np.testing.assert_array_equal(lat, -lat[::-1])


@pytest.mark.parametrize(
    ("n", "points"), [(16, 1600), (32, 5248), (96, 40_320), (320, 421_120), (1280, 6_599_680)]
)
def test_octahedral_grid_has_its_published_size(n, points):
    assert len(grid(f"O{n}")) == points


def test_octahedral_rows_grow_by_four_from_twenty():
    lat, lengths = np.unique(-octahedral(8).lat, return_counts=True)
    np.testing.assert_array_equal(-lat, gaussian_latitudes(16))
    np.testing.assert_array_equal(lengths, [*range(20, 52, 4), *range(48, 16, -4)])


def sample(n, name):
    """An array of ecCodes' sample of a classic grid."""
    handle = eccodes.codes_new_from_samples(f"reduced_gg_pl_{n}_grib2", eccodes.CODES_PRODUCT_GRIB)
    try:
        return eccodes.codes_get_array(handle, name)
    finally:
        eccodes.codes_release(handle)


@pytest.mark.parametrize("n", CLASSIC)
def test_classic_grid_has_the_row_lengths_of_eccodes(n):
    np.testing.assert_array_equal(classic_row_lengths(n), sample(n, "pl"))


@pytest.mark.parametrize("n", [32, 80])
def test_classic_grid_has_the_points_of_eccodes(n):
    nodes = grid(f"N{n}")
    for name, actual in (("latitudes", nodes.lat), ("longitudes", nodes.lon)):
        np.testing.assert_allclose(actual, sample(n, name), rtol=0, atol=1e-9)


def test_regional_grid_is_ordered_as_a_flattened_field():
    nodes = regional(np.array([58.0, 57.75]), np.array([-10.0, -9.75, -9.5]))
    assert nodes.lat.tolist() == [58.0] * 3 + [57.75] * 3
    assert nodes.lon.tolist() == [-10.0, -9.75, -9.5] * 2


@refused(
    *(
        (grid, name, 'such as "O96" or "N320"')
        for name in ("96", "F320", "N", "O0", "o96", "O96 ", "O-8", "")
    ),
    *(
        (classic, n, f"N{n} must be one of {', '.join(f'N{size}' for size in CLASSIC)}; for")
        for n in (0, 33, 321)
    ),
    *((make, 0, "n must be at least 1.*got 0") for make in (gaussian_latitudes, octahedral)),
    *(
        (reduced_gaussian, rows, "a vector of positive integers")
        for rows in ([], [4, 0], [[4, 4]], [4.5, 4.5])
    ),
    (lambda axis: regional(axis, np.zeros(3)), np.zeros((2, 2)), r"must be vectors.*\(2, 2\)"),
)
def test_grid_that_does_not_exist_raises(wrong, message):
    make, size = wrong
    raises(lambda: make(size), message)
