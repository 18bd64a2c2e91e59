"""Plots of a training run and of a rollout, as PNG files, with maps of node values."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset, with_units
from anemoi_gt.app.scores import Outcome, Score
from anemoi_gt.app.training.run_files import atomic_write, curve
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import FigureBase

# Okabe and Ito, colour-blind safe
COLOURS = {"training": "#0072B2", "model": "#D55E00", "persistence": "#888888"}
LINES = ("-", "--", ":", "-.")
FIGURE_SIZE = {"mollweide": (14, 7.2), "rectilinear": (13, 8.4)}  # inches, of the plot of a run
MAP_SIZE = {"mollweide": (3.5, 2.1), "rectilinear": (3.4, 3.3)}  # inches, in the plot of a rollout
COLUMNS = 4  # number of lead times with maps
MAX_VARIABLES = 3  # plotted by default
MAX_LABEL = 20  # characters of a label on one line
TITLE_SIZE = 13  # points
TITLE_DENSITY = 9.0  # characters an inch, at this size
COAST_STYLE = {"colors": "black", "linewidths": 0.6, "alpha": 0.7}
IMAGE_ROWS = 240
NEIGHBOURS = 3  # nodes interpolated to a pixel, weighted by inverse squared distance


def chosen_variables(dataset: ForecastDataset, names: Sequence[str] | None) -> list[int]:
    """Return the indices of the variables to plot; by default, the first three.

    Raises ValueError if a name is not a variable, or there is no name.
    """
    if names is None:
        return list(range(min(MAX_VARIABLES, len(dataset.variables))))
    names = [names] if isinstance(names, str) else list(names)
    unknown = [str(name) for name in names if name not in dataset.variables]
    if unknown or not names:
        raise ValueError(
            f"plots.variables must be among {', '.join(dataset.variables)}, got "
            f"{', '.join(unknown) or 'none'}"
        )
    return [dataset.variables.index(name) for name in names]


def draw_training_plot(
    path: Path,
    dataset: ForecastDataset,
    sample: int,
    forecast: Tensor,
    scores: list[Score],
    records: list[dict],
    variables: Sequence[str] | None,
) -> None:
    """Plot a test sample with forecast, errors and scores, one panel per variable, and the losses.

    `forecast` is the model's forecast for `sample`, the sample with the median error. `scores` are
    the scores of the model, then of the baselines; `records` are the metrics of the run;
    `variables` are as for `chosen_variables`. Raises ImportError if matplotlib or scipy is missing,
    and ValueError if a variable is unknown.
    """
    image = MapImage(dataset.nodes)
    chosen = chosen_variables(dataset, variables)
    width, height = FIGURE_SIZE[image.projection]
    with _png(path, (width, height * len(chosen))) as figure:
        panels = np.atleast_1d(figure.subfigures(len(chosen), 1))
        for panel, v in zip(panels, chosen, strict=True):
            # the loss is that of all variables
            losses = records if v == chosen[0] else None
            _draw_forecast_panel(panel, image, dataset, sample, forecast, scores, losses, v)


def _draw_forecast_panel(
    figure: "FigureBase",
    image: "MapImage",
    dataset: ForecastDataset,
    sample: int,
    forecast: Tensor,
    scores: list[Score],
    losses: list[dict] | None,
    v: int,
) -> None:
    """Draw one variable: start, truth and forecast, and below them losses, if any, and errors."""
    hours = f"{dataset.lead_time:g} h"
    units = dataset.units[v]
    grid = figure.add_gridspec(2, 3)
    cells = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2))
    axes = [figure.add_subplot(grid[cell], projection=image.projection) for cell in cells]
    start = dataset.present(sample)[:, v].numpy()
    truth = dataset.truth(sample)[:, v].numpy()
    predicted = forecast[:, v].numpy()
    label = _label(dataset, v)
    fields = {"start": start, f"truth, {hours} later": truth, f"forecast, {hours}": predicted}
    _draw_maps(axes[:3], image, label, fields, **_field_style(start, truth))
    errors = {}
    for name, error in (("persistence", start - truth), ("the forecast", predicted - truth)):
        weights = dataset.weights.numpy()
        if weights.ndim == 2:  # 0 where the error is NaN
            weights = weights[:, v]
        rmse = np.sqrt((weights * np.nan_to_num(error) ** 2).mean())
        errors[f"error of {name}\nRMSE {rmse:.3g} {units}"] = error
    _draw_maps(axes[3:], image, label, errors, **_error_style(*errors.values()))
    scores_of_variable = [score for score in scores if score.variable == dataset.variables[v]]
    if losses is None:
        _draw_scores(figure.add_subplot(grid[1, 0]), scores_of_variable)
    else:
        corner = grid[1, 0].subgridspec(2, 1, height_ratios=(3, 2))
        _draw_loss(figure.add_subplot(corner[0]), losses)
        _draw_scores(figure.add_subplot(corner[1]), scores_of_variable)
    chosen = f"test sample of median error in {dataset.variables[0]}"
    _draw_title(figure, f"{_caption(dataset, v)}, {dataset.title(sample)} ({chosen})")


def draw_rollout_plot(
    path: Path,
    dataset: ForecastDataset,
    sample: int,
    outcomes: list[Outcome],
    scores: list[Score],
    variables: Sequence[str] | None,
) -> None:
    """Plot a rollout from a test sample and the scores of all rollouts, one panel per variable.

    Truth, forecast and error are shown at several lead times. `outcomes` are the steps of the
    rollout, all with a truth; `variables` are as for `chosen_variables`. Raises ImportError if
    matplotlib or scipy is missing, and ValueError if a variable is unknown.
    """
    image = MapImage(dataset.nodes)
    chosen = chosen_variables(dataset, variables)
    width, height = MAP_SIZE[image.projection]
    columns = len(drawn_steps(len(outcomes))) + 1.4
    with _png(path, (width * columns, (3 * height + 0.4) * len(chosen))) as figure:
        panels = np.atleast_1d(figure.subfigures(len(chosen), 1))
        for panel, v in zip(panels, chosen, strict=True):
            _draw_rollout_panel(panel, image, dataset, sample, outcomes, scores, v)


def _draw_rollout_panel(
    figure: "FigureBase",
    image: "MapImage",
    dataset: ForecastDataset,
    sample: int,
    outcomes: list[Outcome],
    scores: list[Score],
    v: int,
) -> None:
    """Draw one variable: truth, forecast and error by lead time, and the growth of the error."""
    steps = drawn_steps(len(outcomes))
    grid = figure.add_gridspec(3, len(steps) + 1, width_ratios=[*([1] * len(steps)), 1.2])
    axes = []
    for cell in np.ndindex(3, len(steps)):
        axes.append(figure.add_subplot(grid[cell], projection=image.projection))
    truths, forecasts, errors = {}, {}, {}
    for n in steps:
        hours = f"{n * dataset.lead_time:g} h"
        outcome = outcomes[n - 1]
        assert outcome.truth is not None
        truth = outcome.truth[:, v].numpy()
        forecast = outcome.forecast[:, v].numpy()
        truths[f"truth, {hours}"] = truth
        forecasts[f"forecast, {hours}"] = forecast
        errors[f"error, {hours}"] = forecast - truth
    fields = truths | forecasts
    label = _label(dataset, v)
    _draw_maps(axes[: len(fields)], image, label, fields, **_field_style(*fields.values()))
    _draw_maps(axes[len(fields) :], image, label, errors, **_error_style(*errors.values()))
    for ax in axes:
        ax.label_outer()
    _draw_growth(figure.add_subplot(grid[:, -1]), dataset, scores, v)
    start = f"{_caption(dataset, v)}, {dataset.title(sample)}"
    chosen = f"test sample of median error in {dataset.variables[0]} at the last lead time"
    _draw_title(figure, f"Rollout: {start}, continued ({chosen})")


def _caption(dataset: ForecastDataset, v: int) -> str:
    """Return the name of a variable, with its long name if there is one."""
    name = dataset.variables[v]
    long_name = dataset.attributes.get(name, {}).get("long_name")
    if long_name is None or long_name == name:
        return name
    return f"{name}, {long_name}"


def _label(dataset: ForecastDataset, v: int) -> str:
    """Return name and units of a variable for a colour bar, on two lines if they are long."""
    label = with_units(dataset.variables[v], dataset.units[v])
    return label.replace(" [", "\n[") if len(label) > MAX_LABEL else label


def _draw_title(figure: "FigureBase", title: str) -> None:
    """Draw the title of a panel, on as many lines as it needs."""
    panel: Any = figure  # of a class that has no stubs
    width = panel.bbox.width / panel.figure.dpi  # inches
    title = title.replace(" + ", " +\u00a0").replace(" h", "\u00a0h")  # stay on one line
    figure.suptitle(textwrap.fill(title, int(width * TITLE_DENSITY)), fontsize=TITLE_SIZE)


def drawn_steps(steps: int) -> list[int]:
    """Return the steps with maps, counted from 1: first, last, and evenly spaced between."""
    return sorted({round(n) for n in np.linspace(1, steps, COLUMNS)})


@contextmanager
def _png(path: Path, size: tuple[float, float]) -> Iterator:
    """Yield a figure of this size in inches, then write it to a PNG file."""
    # pyplot would choose a backend, and keep every figure until it is closed
    figure = import_extra("matplotlib.figure", "train").Figure(
        figsize=size, dpi=150, layout="constrained"
    )
    yield figure
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def _field_style(*fields: np.ndarray) -> dict[str, Any]:
    return {"cmap": "viridis", "vmin": np.nanmin(fields), "vmax": np.nanmax(fields)}


def _error_style(*errors: np.ndarray) -> dict[str, Any]:
    limit = np.nanmax(np.abs(errors))
    return {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}


def _draw_maps(
    axes: "Sequence[Axes]",
    image: "MapImage",
    label: str,
    fields: Mapping[str, np.ndarray],
    **style: Any,
) -> None:
    """Draw fields [N], by title, with one colour bar."""
    for ax, (title, field) in zip(axes, fields.items(), strict=True):
        mesh = image.draw(ax, field, **style)
        ax.set_title(title)
    # arrows: a forecast may be beyond the values of start and truth
    axes[0].figure.colorbar(mesh, ax=axes, label=label, aspect=15, pad=0.02, extend="both")


def _draw_loss(axes: "Axes", records: list[dict]) -> None:
    thin: dict[str, Any] = {"color": COLOURS["training"], "alpha": 0.6, "linewidth": 0.8}
    dots: dict[str, Any] = {"color": COLOURS["model"], "marker": "o", "markersize": 3}
    axes.plot(*curve(records, "train"), label="training", **thin)
    axes.plot(*curve(records, "valid"), label="validation", **dots)
    axes.set(yscale="log", xlabel="step", ylabel="normalised", title="loss: mean squared error")
    axes.legend(frameon=False)


def _draw_scores(axes: "Axes", scores: list[Score]) -> None:
    names = [score.forecast for score in scores]
    errors = [score.rmse for score in scores]
    colours = [COLOURS["model"]] + [COLOURS["persistence"]] * (len(scores) - 1)
    bars = axes.barh(names, errors, color=colours)
    axes.bar_label(bars, fmt=" %.3g")
    axes.invert_yaxis()  # the model on top
    axes.margins(x=0.35)
    axes.set(title="RMSE of all test samples", xlabel=scores[0].units)


def _draw_growth(axes: "Axes", dataset: ForecastDataset, scores: list[Score], v: int) -> None:
    names = dict.fromkeys(score.forecast for score in scores)
    scores_of_variable = [score for score in scores if score.variable == dataset.variables[v]]
    for name, line in zip(names, cycle(LINES)):
        selected = [score for score in scores_of_variable if score.forecast == name]
        lead_times = [score.lead_time for score in selected]
        errors = [score.rmse for score in selected]
        color = COLOURS["model"] if name == "model" else COLOURS["persistence"]
        axes.plot(
            lead_times, errors, color=color, linestyle=line, marker="o", markersize=4, label=name
        )
    axes.set_ylim(bottom=0)
    axes.set(
        xlabel="lead time [h]",
        ylabel=with_units("RMSE", dataset.units[v]),
        title="test samples with a truth",
    )
    axes.legend(frameon=False)


class MapImage:
    """Image of node values: Mollweide projection for the globe, longitude-latitude for regions.

    Nodes that span more than 90 degrees of latitude are drawn as a globe. `projection` is
    Matplotlib's name for the projection of the axes. Raises ImportError if scipy is missing.
    """

    def __init__(self, nodes: Nodes):
        self._is_global = np.ptp(nodes.lat) > 90
        self.projection = "mollweide" if self._is_global else "rectilinear"
        rows, columns = _pixels(nodes, is_global=self._is_global)
        lat, lon = np.meshgrid(rows, columns, indexing="ij")
        tree = import_extra("scipy.spatial", "train").cKDTree(nodes.xyz)
        nearest = np.arange(1, min(NEIGHBOURS, len(nodes)) + 1)
        distance, self._node = tree.query(Nodes(lat.ravel(), lon.ravel()).xyz, k=nearest)
        weight = 1 / (distance**2 + 1e-12)  # a pixel at a node gets the value of that node
        self._weight = weight / weight.sum(axis=1, keepdims=True)
        # Beyond the nodes, as around a rotated domain, the image is transparent.
        size = min(NEIGHBOURS + 1, len(nodes))
        spacing = tree.query(nodes.xyz, k=[size])[0].max()
        # Near a pole, the neighbours of a row are closer than its next row.
        row_gap = np.diff(np.unique(nodes.lat.round(4)), append=nodes.lat.max()).max()
        reach = max(spacing, np.deg2rad(row_gap)) or np.inf  # of a single point
        self._is_beyond = distance[:, 0] > reach
        to_axes = np.deg2rad if self._is_global else np.asarray  # units of the axes
        self._lat, self._lon = to_axes(rows), to_axes(columns)
        self._coastlines = []
        shifts = (0,) if self._is_global else (-360, 0, 360)  # a region may cross the date line
        low, high = np.array([columns[0], rows[0]]), np.array([columns[-1], rows[-1]])
        for line in coastlines("110m" if self._is_global else "50m"):
            for shift in shifts:
                shifted = line + np.array([shift, 0])
                if (shifted.max(axis=0) >= low).all() and (shifted.min(axis=0) <= high).all():
                    self._coastlines.append(to_axes(shifted))

    def draw(self, axes: "Axes", values: np.ndarray, **style: Any) -> "QuadMesh":
        """Draw values [N] on axes of this projection by `pcolormesh(**style)`; return the mesh.

        Pixels are transparent where the nearest value is NaN.
        """
        is_finite = np.isfinite(values)[self._node]
        weight = np.where(is_finite, self._weight, 0.0)
        nearest = np.where(is_finite[:, 0], weight.sum(axis=1), np.nan)
        pixels = (np.nan_to_num(values)[self._node] * weight).sum(axis=1) / nearest
        pixels[self._is_beyond] = np.nan
        image = pixels.reshape(len(self._lat), len(self._lon))
        if self._is_global:
            axes.grid(color="white", alpha=0.35, linewidth=0.5)
            axes.set_xticklabels([])
            axes.set_yticklabels([])
        else:
            axes.set_aspect(1 / np.cos(np.deg2rad(self._lat.mean())))
            axes.set_xlabel("longitude [degrees east]")
            axes.set_ylabel("latitude [degrees north]")
            axes.set(xlim=self._lon[[0, -1]], ylim=self._lat[[0, -1]])
        line_collection = import_extra("matplotlib.collections", "train").LineCollection
        coastlines, transform = self._coastlines, axes.transData
        if self._is_global:
            # projected here: Matplotlib would interpolate 75 points in each of 5,000 segments
            geo: Any = axes
            coastlines = [geo.transProjection.transform_non_affine(line) for line in coastlines]
            transform = geo.transAffine + geo.transAxes
        lines = line_collection(coastlines, transform=transform, **COAST_STYLE)
        axes.add_collection(lines, autolim=False)
        return axes.pcolormesh(
            self._lon, self._lat, image, shading="nearest", rasterized=True, **style
        )


def coastlines(resolution: str) -> list[np.ndarray]:
    """Return the coastlines of Natural Earth as lines [P, 2] of longitude and latitude.

    `resolution` is "110m" or "50m", of 1:110 and 1:50 million. Lines end at the date line.
    """
    path = files("anemoi_gt.app").joinpath("coastlines.npz")
    with path.open("rb") as file, np.load(file) as stored:
        steps, lengths = stored[f"steps_{resolution}"], stored[f"lengths_{resolution}"]
    points = steps.cumsum(axis=1).T / 100  # stored as steps of 0.01 degrees
    return np.split(points, np.cumsum(lengths)[:-1])


def _pixels(nodes: Nodes, *, is_global: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the latitudes of the image rows and the longitudes of its columns, in degrees."""
    if is_global:
        step = 180 / IMAGE_ROWS
        return np.arange(-90 + step / 2, 90, step), np.arange(-180 + step / 2, 180, step)
    lon = np.unique(nodes.lon % 360)
    west = lon[np.argmax(np.diff(lon, prepend=lon[-1] - 360))]  # east of the widest gap
    lon = (nodes.lon - west) % 360 + (west if west <= 180 else west - 360)
    # nodes on one parallel or meridian get a width, and a single point 1 degree
    parallel = np.cos(np.deg2rad(nodes.lat.mean()))
    least = max(np.ptp(nodes.lat), np.ptp(lon) * parallel) / 8 or 1.0

    def centres(axis: np.ndarray, number: int) -> np.ndarray:
        middle, half = (axis.min() + axis.max()) / 2, max(np.ptp(axis), least) / 2
        return np.linspace(middle - half, middle + half, number)

    rows = centres(nodes.lat, IMAGE_ROWS)
    return rows[np.abs(rows) <= 90], centres(lon, 2 * IMAGE_ROWS)
