"""The picture of a run."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from support.picture import colours

from anemoi_gt.data.grids import octahedral, regional
from anemoi_gt.training.plots.maps import MapImage
from anemoi_gt.training.plots.training_plot import draw_picture, median_sample
from anemoi_gt.training.scores import sample_rmse, score

RECORDS = [{"split": split, "step": step, "loss": 1 / step} for step in range(1, 20) for split in ("train", "valid")]


@pytest.fixture(scope="module")
def image(splits, tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "forecast.png"
    forecasts = {"model": splits.test.truth, **splits.test.baselines()}
    draw_picture(path, splits.test, splits.test.truth, score(forecasts, splits.test), RECORDS)
    return path


def test_the_picture_is_a_png_large_enough_to_read_and_small_enough_to_commit(image):
    height, width, _ = imread(image).shape
    assert 1600 <= width <= 2400 and 800 <= height <= 1400
    assert 50_000 < image.stat().st_size < 1_000_000


def test_the_picture_has_maps_and_is_not_empty(image):
    pixels = colours(image)
    height, width = pixels.shape
    panels = [
        pixels[row * height // 2 : (row + 1) * height // 2, column * width // 3 : (column + 1) * width // 3]
        for row in range(2)
        for column in range(3)
    ]
    for panel in panels:
        assert len(np.unique(panel)) > 50


def test_the_sample_drawn_is_the_one_of_median_error(splits):
    sample = median_sample(splits.test.present, splits.test)
    errors = sample_rmse(splits.test.present, splits.test)
    assert errors[sample] == errors.median()


@pytest.mark.parametrize(
    ("nodes", "projection"),
    [(octahedral(8), "mollweide"), (regional(np.arange(60.0, 50, -1), np.arange(-10.0, 2)), "rectilinear")],
    ids=["globe", "region"],
)
def test_a_map_shows_each_node_where_it_is(nodes, projection):
    image = MapImage(nodes)
    axes = Figure().add_subplot(projection=image.projection)
    assert image.projection == projection
    drawn = image.draw(axes, nodes.lat).get_array()
    rows = np.linspace(image._lat[0], image._lat[-1], len(drawn))
    spacing = 180 / 16 if projection == "mollweide" else 1.0
    assert np.abs(drawn - rows[:, None]).max() < spacing
