"""The plot of a run, and maps."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.picture import colours, fewest_colours

from anemoi_gt.app.map_image import MapImage
from anemoi_gt.app.plots import draw_training_plot
from anemoi_gt.app.scores import measure
from anemoi_gt.data.grids import octahedral, regional

RECORDS = [{"split": split, "step": step, "loss": 1 / step} for step in range(1, 20) for split in ("train", "valid")]


def test_plot_is_a_png_of_reasonable_size_with_content_in_every_panel(splits, tmp_path):
    path, forecasts = tmp_path / "forecast.png", {"model": splits.test.truth, **splits.test.baselines()}
    draw_training_plot(path, splits.test, 1, splits.test.truth(1), measure(forecasts, splits.test).scores(), RECORDS)
    pixels = colours(path)
    height, width = pixels.shape
    assert 1600 <= width <= 2400 and 800 <= height <= 1400
    assert 50_000 < path.stat().st_size < 1_000_000
    assert fewest_colours(pixels, 2, 3, across=3) > 50


@pytest.mark.parametrize(
    ("nodes", "projection"),
    [(octahedral(8), "mollweide"), (regional(np.arange(60.0, 50, -1), np.arange(-10.0, 2)), "rectilinear")],
    ids=["globe", "region"],
)
def test_map_draws_values_at_their_positions(nodes, projection):
    image = MapImage(nodes)
    axes = Figure().add_subplot(projection=image.projection)
    assert image.projection == projection
    mesh = image.draw(axes, nodes.lat)
    corners = mesh.get_coordinates()[..., 1]  # latitudes; radians on a globe
    rows = (corners[1:, 1:] + corners[:-1, :-1]) / 2
    rows, spacing = (np.rad2deg(rows), 180 / 16) if projection == "mollweide" else (rows, 1.0)
    assert np.abs(mesh.get_array() - rows).max() < spacing


@pytest.fixture
def cartopy(monkeypatch):
    """A coast around a square, and one across the date line, in place of Natural Earth."""
    square = SimpleNamespace(coords=[(-5, 52), (0, 52), (0, 57), (-5, 57), (-5, 52)])
    across = SimpleNamespace(geoms=[SimpleNamespace(coords=[(170, 0), (179, 1), (-179, 2), (-170, 3)])])
    reader = SimpleNamespace(
        natural_earth=lambda *_: "", Reader=lambda _: SimpleNamespace(geometries=lambda: [square, across])
    )
    for name, module in (("cartopy", None), ("cartopy.io", None), ("cartopy.io.shapereader", reader)):
        monkeypatch.setitem(sys.modules, name, module or SimpleNamespace(shapereader=reader, io=None))
    return reader


def lines_drawn(nodes):
    image = MapImage(nodes)
    axes = Figure().add_subplot(projection=image.projection)
    image.draw(axes, nodes.lat)
    return [np.asarray(line) for line in axes.collections[0].get_segments()]


REGION = regional(np.arange(60.0, 50, -1), np.arange(-10.0, 2))


def test_coastlines_are_drawn_and_end_at_the_date_line(cartopy):
    square, east, west = lines_drawn(octahedral(8))
    assert np.allclose(np.rad2deg(square[2]), [0, 57]) and len(east) == len(west) == 2
    assert any(np.array_equal(line[2], [0, 57]) for line in lines_drawn(REGION))


def test_maps_have_no_coastlines_without_cartopy_or_its_data(cartopy, monkeypatch):
    def refused(*_):
        raise ConnectionError("Name or service not known")

    cartopy.natural_earth = refused
    assert lines_drawn(REGION) == []
    monkeypatch.setitem(sys.modules, "cartopy.io", None)
    assert lines_drawn(REGION) == []


def test_a_region_across_greenwich_is_drawn_without_the_rest_of_the_globe():
    image = MapImage(regional([50.0, 51, 52], [*range(350, 360), *range(0, 5)]))
    assert image._lon.min() == -10 and image._lon.max() == pytest.approx(4, abs=0.02)
