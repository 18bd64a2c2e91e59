"""Plot of a training run: a test forecast and the truth, its error and persistence's, losses and scores."""

from pathlib import Path

import numpy as np
from torch import Tensor

from anemoi_gt.data.datasets import ForecastDataset
from anemoi_gt.extras import import_extra
from anemoi_gt.training.atomic_write import atomic_write
from anemoi_gt.training.metrics_log import curve
from anemoi_gt.training.plots.maps import MapImage
from anemoi_gt.training.scores import Forecast, Score, median_index, sample_rmse

COLOURS = {"training": "#0072B2", "model": "#D55E00", "persistence": "#888888"}  # Okabe and Ito, colour-blind safe
FIELD_MAP, ERROR_MAP = "viridis", "RdBu_r"
FIGURE_SIZE = {"mollweide": (14, 7.2), "rectilinear": (13, 8.4)}  # inches


def draw_training_plot(
    path: Path, dataset: ForecastDataset, forecast: Forecast, scores: list[Score], records: list[dict]
) -> None:
    """Plot the first variable of the test sample of median error, scores and losses as a PNG file.

    `forecast` is the model's, by sample index; `scores` are of the model and the baselines, the model's first;
    `records` are the run's metrics. Raises ImportError if matplotlib or scipy is missing.
    """
    image, sample = MapImage(dataset.nodes), median_sample(forecast, dataset)
    figure_class = import_extra("matplotlib.figure", "train").Figure
    figure = figure_class(figsize=FIGURE_SIZE[image.projection], dpi=150, layout="constrained")
    grid = figure.add_gridspec(2, 3)

    def maps(row: int, *columns: int) -> list:
        return [figure.add_subplot(grid[row, column], projection=image.projection) for column in columns]

    _draw_fields(maps(0, 0, 1, 2), image, dataset, sample, forecast)
    _draw_errors(maps(1, 1, 2), image, dataset, sample, forecast)
    corner = grid[1, 0].subgridspec(2, 1, height_ratios=(3, 2))
    _draw_loss(figure.add_subplot(corner[0]), records)
    _draw_scores(figure.add_subplot(corner[1]), [score for score in scores if score.variable == dataset.variables[0]])
    name = dataset.variables[0]
    figure.suptitle(f"{name[0].upper()}{name[1:]}, {dataset.title(sample)} (test sample of median error)", fontsize=13)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def median_sample(forecast: Forecast, dataset: ForecastDataset) -> int:
    """Return the index of the sample of median error."""
    return median_index(sample_rmse(forecast, dataset))


def first_variable(field: Tensor) -> np.ndarray:
    """Return the plotted variable, [N]."""
    return field[:, 0].numpy()


def colour_bar(mesh, axes, dataset: ForecastDataset) -> None:
    """Draw the colour bar of maps, with units."""
    axes[0].figure.colorbar(mesh, ax=axes, label=f"{dataset.variables[0]} [{dataset.units[0]}]", aspect=15, pad=0.02)


def _draw_fields(axes, image, dataset, sample, forecast):
    present, truth = first_variable(dataset.present(sample)), first_variable(dataset.truth(sample))
    limits = {"vmin": min(present.min(), truth.min()), "vmax": max(present.max(), truth.max())}
    titles = ("start", f"truth, {dataset.lead_time:g} h later", f"forecast, {dataset.lead_time:g} h")
    for ax, title, field in zip(axes, titles, (present, truth, first_variable(forecast(sample))), strict=True):
        mesh = image.draw(ax, field, cmap=FIELD_MAP, **limits)
        ax.set_title(title)
    colour_bar(mesh, axes, dataset)


def _draw_errors(axes, image, dataset, sample, forecast):
    truth = dataset.truth(sample)
    errors = {
        "error of persistence": first_variable(dataset.present(sample) - truth),
        "error of the forecast": first_variable(forecast(sample) - truth),
    }
    limit = max(np.abs(error).max() for error in errors.values())
    weights = dataset.weights.numpy()
    for ax, (title, error) in zip(axes, errors.items(), strict=True):
        rmse = np.sqrt((weights * error**2).mean())
        mesh = image.draw(ax, error, cmap=ERROR_MAP, vmin=-limit, vmax=limit)
        ax.set_title(f"{title}\nRMSE {rmse:.3g} {dataset.units[0]}")
    colour_bar(mesh, axes, dataset)


def _draw_loss(axes, records):
    axes.plot(*curve(records, "train"), color=COLOURS["training"], alpha=0.6, linewidth=0.8, label="training")
    axes.plot(*curve(records, "valid"), color=COLOURS["model"], marker="o", markersize=3, label="validation")
    axes.set(yscale="log", xlabel="step", ylabel="normalised")
    axes.set_title("loss: mean squared error")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda loss, _: f"{loss:g}" if f"{loss:e}"[0] in "25" else "")
    axes.legend(frameon=False)


def _draw_scores(axes, scores):
    names, values = [score.forecast for score in scores], [score.rmse for score in scores]
    bars = axes.barh(names, values, color=[COLOURS["model"]] + [COLOURS["persistence"]] * (len(scores) - 1))
    axes.bar_label(bars, fmt=" %.3g")
    axes.invert_yaxis()  # the model on top
    axes.margins(x=0.2)
    axes.set_title(f"RMSE of all test samples [{scores[0].units}]")
