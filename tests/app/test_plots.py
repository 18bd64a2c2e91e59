"""The plot of a run, and maps."""

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from support.fields import fields_of
from support.own_data import weather_file
from support.picture import colours, fewest_colours

from anemoi_gt.app.datasets.field_dataset import FieldDataset
from anemoi_gt.app.datasets.field_states import FieldStates
from anemoi_gt.app.datasets.roles import Roles
from anemoi_gt.app.plots import (
    MapImage,
    _caption,
    _draw_forecast_panel,
    _draw_loss,
    chosen_variables,
    coastlines,
    draw_training_plot,
)
from anemoi_gt.app.scores import Score, measure
from anemoi_gt.data.grids import octahedral, regional
from anemoi_gt.data.nodes import Nodes

pytestmark = pytest.mark.application

RECORDS = [
    {"split": split, "step": step, "loss": 1 / step}
    for step in range(1, 20)
    for split in ("train", "valid")
]


@pytest.mark.parametrize(("losses", "times"), [(RECORDS, 1), (None, 0)])
def test_only_the_panel_that_gets_the_losses_draws_them(splits, losses, times):
    dataset = splits.test
    forecasts = {"model": dataset.truth, **dataset.baselines()}
    scores = measure(forecasts, dataset).scores()
    figure = Figure()
    image = MapImage(dataset.nodes)
    _draw_forecast_panel(figure, image, dataset, 1, dataset.truth(1), scores, losses, 0)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles.count("loss: mean squared error") == times
    assert "RMSE of all test samples" in titles


def test_the_map_of_a_rotated_domain_ends_at_the_domain():
    rlat, rlon = np.linspace(-5, 5, 21)[:, None], np.linspace(-5, 5, 21)
    lat, lon = 50 + 0.7 * rlat + 0.7 * rlon, 10 - 0.7 * rlat + 0.7 * rlon
    axes = Figure().add_subplot()
    image = MapImage(Nodes(lat.ravel(), lon.ravel())).draw(axes, np.ones(441)).get_array()
    rows, columns = image.shape
    assert np.ma.is_masked(image[:5, :5])
    assert np.ma.is_masked(image[-5:, -5:])
    middle = image[rows // 4 : -rows // 4, columns // 4 : -columns // 4]
    assert not np.ma.is_masked(middle[rows // 4 - 10 : rows // 4 + 10])
    share = 1 - np.ma.getmaskarray(image).mean()
    assert 0.5 < share < 0.7  # a square on its corner, and a cell more


def test_the_map_of_rows_near_the_pole_has_no_gaps():
    image = MapImage(regional(np.arange(89.0, 84, -1), np.arange(0.0, 20)))
    drawn = image.draw(Figure().add_subplot(), np.ones(100)).get_array()
    assert not np.ma.is_masked(drawn)


@pytest.mark.parametrize(
    ("nodes", "projection"),
    [
        (octahedral(8), "mollweide"),
        (regional(np.arange(60.0, 50, -1), np.arange(-10.0, 2)), "rectilinear"),
    ],
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("lat", "lon"),
    [
        (np.full(8, 50.0), np.arange(8.0)),
        (np.full(36, -89.9), np.arange(0.0, 360, 10)),
        (np.arange(40.0, 50), np.full(10, 3.0)),
        ([50.0], [3.0]),
        ([90.0], [0.0]),
        ([50.0, 51.0], [3.0, 5.0]),
        ([80.0, -80.0], [3.0, 100.0]),
        ([50.0, 50.0, 50.0], [3.0, 3.0, 3.0]),
        (np.repeat([88.0, 89.0, 90.0], 36), np.tile(np.arange(0.0, 360, 10), 3)),
        (np.repeat([50.0, 50.001], 100), np.tile(np.linspace(0, 80, 100), 2)),
    ],
    ids=[
        *("parallel", "round the pole", "meridian", "point", "pole", "two", "two on a globe"),
        *("one place", "cap", "strip"),
    ],
)
def test_nodes_on_a_line_at_a_pole_or_very_few_are_drawn(lat, lon):
    nodes = Nodes(lat, lon)
    values = nodes.lat + nodes.lon
    image = MapImage(nodes)
    figure = Figure()
    axes = figure.add_subplot(projection=image.projection)
    mesh = image.draw(axes, values)
    figure.draw_without_rendering()
    drawn = mesh.get_array().compressed()
    assert 10_000 < len(drawn) < 200_000
    assert values.min() - 1e-9 < drawn.min() <= values.min() + 0.1 * np.ptp(values)
    assert values.max() + 1e-9 > drawn.max() >= values.max() - 0.1 * np.ptp(values)


def field_data_with_land():
    """Return test samples of a variable with a long name and units with exponents, without values over land."""
    weather = weather_file()[["t2m"]].rename(t2m="sea_surface_temperature")
    attrs = {"units": "kg m**-2", "long_name": "Temperature of the foundation of the sea, " * 3}
    weather["sea_surface_temperature"] = weather.sea_surface_temperature.assign_attrs(attrs)
    weather.sea_surface_temperature[:, :3, :3] = np.nan
    data = FieldDataset(
        FieldStates(fields_of(weather), Roles(("sea_surface_temperature",), (), ()), 6.0, 1)
    )
    return data.within(np.ones(40, bool)).normalised()


def lines_drawn(nodes):
    image = MapImage(nodes)
    axes = Figure().add_subplot(projection=image.projection)
    image.draw(axes, nodes.lat)
    return [np.asarray(line) for line in axes.collections[0].get_segments()]


REGION = regional(np.arange(60.0, 50, -1), np.arange(-10.0, 2))


def test_coastlines_are_in_the_package_and_have_no_edges_of_the_map():
    for resolution, count in (("110m", 5_000), ("50m", 60_000)):
        lines = coastlines(resolution)
        points = np.concatenate(lines)
        assert len(points) >= count
        assert (np.abs(points) <= [180, 90]).all()
        assert max(np.abs(np.diff(line, axis=0)).max() for line in lines) < 20  # no jump
        assert not any((np.abs(line[:2, 0]) == 180).all() for line in lines)
    crossing = [(line[1:] + line[:-1]) / 2 for line in coastlines("50m")]
    near_dover = np.abs(np.concatenate(crossing) - [1.35, 51.13]).max(axis=1)
    assert near_dover.min() < 0.1


def test_coastlines_are_drawn_where_the_region_is():
    assert len(lines_drawn(octahedral(8))) > 100
    lines = lines_drawn(REGION)
    assert 0 < len(lines) < 60
    for line in lines:
        assert (line.min(axis=0) <= [1, 60]).all()
        assert (line.max(axis=0) >= [-10, 51]).all()
    across = regional(np.arange(-10.0, -25, -1), np.arange(170.0, 190))  # Fiji
    assert any(line[:, 0].min() > 179 for line in lines_drawn(across))


def test_a_region_across_greenwich_is_drawn_without_the_rest_of_the_globe():
    image = MapImage(regional([50.0, 51, 52], [*range(350, 360), *range(0, 5)]))
    assert image._lon.min() == -10
    assert image._lon.max() == pytest.approx(4, abs=0.02)


class TwoVariables:
    """The data set `dataset` with its variable twice, the second in other units."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.nodes = dataset.nodes
        self.weights = dataset.weights
        self.lead_time = 12.0
        self.variables = ("q", "w")
        self.units = ("kg/kg", "g/kg")
        self.attributes = {"w": {"long_name": "water"}}

    def present(self, i):
        return torch.cat([self.dataset.present(i), 1000 * self.dataset.present(i)], dim=1)

    def truth(self, i):
        return torch.cat([self.dataset.truth(i), 1000 * self.dataset.truth(i)], dim=1)

    def title(self, i):
        return "a title"


def test_a_plot_is_a_png_of_reasonable_size_with_a_panel_for_each_chosen_variable(splits, tmp_path):
    data = TwoVariables(splits.test)
    path = tmp_path / "forecast.png"
    scores = [
        Score("model", name, units, 12.0, 3, 0.1, 0.0)
        for name, units in zip(data.variables, data.units, strict=True)
    ]
    for number, names in ((2, None), (1, ["w"])):
        draw_training_plot(path, data, 0, data.truth(0), scores, RECORDS, names)
        pixels = colours(path)
        height, width = pixels.shape
        assert 1600 <= width <= 2400
        assert 800 <= height / number <= 1400
        assert 50_000 < path.stat().st_size / number < 1_000_000
        assert fewest_colours(pixels, 2 * number, 3, across=3) > 50
    assert _caption(data, 1) == "w, water"
    assert _caption(data, 0) == "q"


@pytest.mark.parametrize("losses", [RECORDS, None])
def test_long_names_run_into_nothing_and_no_cell_is_empty(losses):
    data = field_data_with_land()
    figure = Figure(figsize=(13, 8.4), layout="constrained")
    panel = figure.subfigures(1, 1)
    scores = [
        Score(name, data.variables[0], data.units[0], 6.0, 3, 0.00358, 0.0)
        for name in ("model", "training mean")
    ]
    forecast = 2 * data.truth(0) - data.truth(0).nanmean()  # exceeds the colour bar on both sides
    _draw_forecast_panel(panel, MapImage(data.nodes), data, 0, forecast, scores, losses, 0)
    figure.draw_without_rendering()
    assert len(panel.axes) == (7 if losses is None else 8) + 1
    title = panel._suptitle.get_window_extent()
    assert title.x0 >= 0
    assert title.x1 <= figure.bbox.width
    boxes = [title]
    for axes in panel.axes:
        boxes += [
            axes.title.get_window_extent(),
            axes.xaxis.label.get_window_extent(),
            axes.yaxis.label.get_window_extent(),
        ]
    boxes = [box for box in boxes if box.width > 1 and box.height > 1]
    overlapping = [(a, b) for a, b in combinations(boxes, 2) if a.overlaps(b)]
    assert overlapping == []
    labels = [axes.get_ylabel() for axes in panel.axes]
    assert labels.count("sea_surface_temperature\n[kg m**-2]") == 2


def test_a_title_names_the_variable_whose_error_chose_the_sample(splits):
    data = TwoVariables(splits.test)
    panel = Figure(figsize=(13, 8.4)).subfigures(1, 1)
    scores = [Score("model", "w", "g/kg", 12.0, 3, 0.1, 0.0)]
    _draw_forecast_panel(panel, MapImage(data.nodes), data, 0, data.truth(0), scores, None, 1)
    title = " ".join(panel._suptitle.get_text().split())
    assert title == "w, water, a title (test sample of median error in q)"


def test_variables_that_are_plotted_are_the_first_three_unless_chosen():
    data = SimpleNamespace(variables=("a", "b", "c", "d"))
    assert chosen_variables(data, None) == [0, 1, 2]
    assert chosen_variables(data, ["d", "a"]) == [3, 0]
    with pytest.raises(ValueError, match="plots.variables must be among a, b, c, d, got e"):
        chosen_variables(data, ["a", "e"])


@pytest.mark.parametrize("losses", [(1.1, 1.19), (0.21, 0.28), (0.01, 3.0), (0.95, 1.05)])
def test_the_axis_of_the_loss_has_labels_whatever_its_range(losses):
    figure = Figure()
    axes = figure.add_subplot()
    records = [
        {"split": s, "step": n, "loss": loss}
        for n, loss in enumerate(losses)
        for s in ("train", "valid")
    ]
    _draw_loss(axes, records)
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    minor = zip(axes.get_yticks(minor=True), axes.get_yticklabels(minor=True), strict=True)
    assert (
        len([label for y, label in (*ticks, *minor) if low <= y <= high and label.get_text()]) >= 2
    )
