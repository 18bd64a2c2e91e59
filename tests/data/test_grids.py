"""Grids: Gaussian latitudes, octahedral and classic reduced Gaussian grids, regional grids."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import eccodes
import numpy as np
import pytest

from anemoi_gt.data.grids import classic, gaussian_latitudes, grid, octahedral, reduced_gaussian, regional

CLASSIC = (32, 48, 64, 80, 96, 128, 160, 200, 256, 320, 400, 512, 640, 1024, 1280, 2000)


@pytest.mark.parametrize("n", [1, 2, 3, 32, 192, 640])
def test_gaussian_latitudes_are_the_legendre_roots(n):
    roots, _ = np.polynomial.legendre.leggauss(n)
    np.testing.assert_allclose(np.sin(np.deg2rad(gaussian_latitudes(n))), roots[::-1], rtol=0, atol=4e-16)


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1280])
def test_gaussian_latitudes_fall_and_mirror_at_the_equator(n):
    lat = gaussian_latitudes(n)
    assert (np.diff(lat) < 0).all()
    np.testing.assert_array_equal(lat, -lat[::-1])


@pytest.mark.parametrize(("n", "points"), [(16, 1600), (32, 5248), (96, 40_320), (320, 421_120), (1280, 6_599_680)])
def test_octahedral_grid_has_its_published_size(n, points):
    assert len(grid(f"O{n}")) == points


def test_octahedral_rows_grow_by_four_from_twenty():
    nodes = octahedral(8)
    lat, lengths = np.unique(-nodes.lat, return_counts=True)
    np.testing.assert_array_equal(-lat, gaussian_latitudes(16))
    np.testing.assert_array_equal(lengths, [*range(20, 52, 4), *range(48, 16, -4)])


@pytest.fixture
def sample():
    """Open ecCodes' sample of a classic grid; closed in the end."""
    handles = []

    def open_sample(n):
        handles.append(eccodes.codes_new_from_samples(f"reduced_gg_pl_{n}_grib2", eccodes.CODES_PRODUCT_GRIB))
        return handles[-1]

    yield open_sample
    for handle in handles:
        eccodes.codes_release(handle)


@pytest.mark.parametrize("n", CLASSIC)
def test_classic_grid_has_the_rows_of_eccodes(n, sample, monkeypatch):
    monkeypatch.setattr("anemoi_gt.data.grids.reduced_gaussian", np.asarray)  # the rows, without 20 million points
    np.testing.assert_array_equal(classic(n), eccodes.codes_get_array(sample(n), "pl"))


@pytest.mark.parametrize("n", [32, 80])
def test_classic_grid_has_the_points_of_eccodes(n, sample):
    nodes = grid(f"N{n}")
    for name, ours in (("latitudes", nodes.lat), ("longitudes", nodes.lon)):
        np.testing.assert_allclose(ours, eccodes.codes_get_array(sample(n), name), rtol=0, atol=1e-9)


@pytest.mark.parametrize("n", [0, 33, 321])
def test_classic_grid_without_known_rows_raises_and_lists_the_known(n):
    known = ", ".join(f"N{size}" for size in CLASSIC)
    with pytest.raises(ValueError, match=f"row lengths of N{n} are not known; known are {known}: choose one, or give"):
        classic(n)


def test_the_table_of_classic_grids_is_shipped():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["anemoi_gt.data"]
    assert any(fnmatch("classic_grids.txt", pattern) for pattern in patterns)


def test_row_starts_at_greenwich_and_goes_east():
    nodes = reduced_gaussian([4, 8])
    np.testing.assert_array_equal(nodes.lon, [0, 90, 180, 270, *range(0, 360, 45)])
    assert (nodes.lat[:4] > 0).all() and (nodes.lat[4:] < 0).all()


def test_regional_grid_flattens_as_its_fields():
    lat, lon = np.array([58.0, 57.75]), np.array([-10.0, -9.75, -9.5])
    nodes = regional(lat, lon)
    np.testing.assert_array_equal(nodes.lat.reshape(2, 3), np.broadcast_to(lat[:, None], (2, 3)))
    np.testing.assert_array_equal(nodes.lon.reshape(2, 3), np.broadcast_to(lon, (2, 3)))


@pytest.mark.parametrize("name", ["96", "F320", "O", "N", "O0", "o96", "O96 ", "O-8", ""])
def test_unknown_grid_name_raises_and_shows_a_known_one(name):
    with pytest.raises(ValueError, match='such as "O96" or "N320"'):
        grid(name)


@pytest.mark.parametrize("make", [gaussian_latitudes, octahedral])
def test_size_below_one_raises(make):
    with pytest.raises(ValueError, match=r"n must be at least 1.*got 0"):
        make(0)


@pytest.mark.parametrize("lengths", [[], [4, 0], [[4, 4]], [4.5, 4.5]])
def test_rows_without_points_raise(lengths):
    with pytest.raises(ValueError, match="whole number of points, at least one, for each row"):
        reduced_gaussian(lengths)


def test_axes_of_a_regional_grid_must_be_vectors():
    with pytest.raises(ValueError, match=r"must be vectors.*\(2, 2\)"):
        regional(np.zeros((2, 2)), np.zeros(3))
