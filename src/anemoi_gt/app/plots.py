"""Plots as PNG files: of a training run, and of a rollout."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import numpy as np
from torch import Tensor

from anemoi_gt.app.data.forecast_dataset import ForecastDataset
from anemoi_gt.app.map_image import MapImage
from anemoi_gt.app.scores import Outcome, Score
from anemoi_gt.app.training.run_files import atomic_write, curve
from anemoi_gt.extras import import_extra

COLOURS = {"training": "#0072B2", "model": "#D55E00", "persistence": "#888888"}  # Okabe and Ito, colour-blind safe
LINES = ("-", "--", ":", "-.")
FIGURE_SIZE = {"mollweide": (14, 7.2), "rectilinear": (13, 8.4)}  # inches, of the plot of a run
MAP_SIZE = {"mollweide": (3.5, 2.1), "rectilinear": (3.4, 3.3)}  # inches, in the plot of a rollout
COLUMNS = 4  # lead times with maps


def draw_training_plot(
    path: Path, dataset: ForecastDataset, sample: int, forecast: Tensor, scores: list[Score], records: list[dict]
) -> None:
    """Plot the first variable of a test sample, its forecast, the errors of both, scores and losses as a PNG file.

    `forecast` is the model's for the sample, that of median error; `scores` are of the model and the baselines, the
    model's first; `records` are the run's metrics. Raises ImportError if matplotlib or scipy is missing.
    """
    image, hours = MapImage(dataset.nodes), f"{dataset.lead_time:g} h"
    with _png(path, FIGURE_SIZE[image.projection]) as figure:
        grid = figure.add_gridspec(2, 3)
        places = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2))
        axes = [figure.add_subplot(grid[place], projection=image.projection) for place in places]
        start, truth, forecast = map(_first_variable, (dataset.present(sample), dataset.truth(sample), forecast))
        fields = {"start": start, f"truth, {hours} later": truth, f"forecast, {hours}": forecast}
        _draw_maps(axes[:3], image, dataset, fields, **_field_style(start, truth))
        errors = {}
        for name, error in (("persistence", start - truth), ("the forecast", forecast - truth)):
            rmse = np.sqrt((dataset.weights.numpy() * error**2).mean())
            errors[f"error of {name}\nRMSE {rmse:.3g} {dataset.units[0]}"] = error
        _draw_maps(axes[3:], image, dataset, errors, **_error_style(*errors.values()))
        corner = grid[1, 0].subgridspec(2, 1, height_ratios=(3, 2))
        _draw_loss(figure.add_subplot(corner[0]), records)
        variable = dataset.variables[0]
        _draw_scores(figure.add_subplot(corner[1]), [score for score in scores if score.variable == variable])
        title = f"{variable[0].upper()}{variable[1:]}, {dataset.title(sample)} (test sample of median error)"
        figure.suptitle(title, fontsize=13)


def draw_rollout_plot(
    path: Path, dataset: ForecastDataset, sample: int, outcomes: list[Outcome], scores: list[Score]
) -> None:
    """Plot the first variable of a rollout from a test sample, and the scores of all rollouts, as a PNG file.

    Truth, forecast and error are at several lead times; `outcomes` are the steps of the rollout, all with a truth.
    Raises ImportError if matplotlib or scipy is missing.
    """
    image, steps = MapImage(dataset.nodes), drawn_steps(len(outcomes))
    width, height = MAP_SIZE[image.projection]
    with _png(path, (width * (len(steps) + 1.4), 3 * height + 0.4)) as figure:
        grid = figure.add_gridspec(3, len(steps) + 1, width_ratios=[*([1] * len(steps)), 1.2])
        axes = [figure.add_subplot(grid[p], projection=image.projection) for p in np.ndindex(3, len(steps))]
        shown = {f"{n * dataset.lead_time:g} h": outcomes[n - 1] for n in steps}
        fields = {f"truth, {hours}": _first_variable(outcome.truth) for hours, outcome in shown.items()}
        fields |= {f"forecast, {hours}": _first_variable(outcome.forecast) for hours, outcome in shown.items()}
        errors = {f"error, {hours}": _first_variable(o.forecast - o.truth) for hours, o in shown.items()}
        _draw_maps(axes[: len(fields)], image, dataset, fields, **_field_style(*fields.values()))
        _draw_maps(axes[len(fields) :], image, dataset, errors, **_error_style(*errors.values()))
        for ax in axes:
            ax.label_outer()
        _draw_growth(figure.add_subplot(grid[:, -1]), dataset, scores)
        start = f"{dataset.variables[0]}, {dataset.title(sample)}"
        title = f"Rollout: {start}, continued (test sample of median error at the last lead time)"
        figure.suptitle(title, fontsize=13)


def drawn_steps(steps: int) -> list[int]:
    """Return the steps with maps, counted from 1: the first, the last, and evenly spaced ones between."""
    return sorted({round(n) for n in np.linspace(1, steps, COLUMNS)})


@contextmanager
def _png(path: Path, size: tuple[float, float]) -> Iterator:
    """Yield a figure of a size in inches, and write it to a PNG file."""
    figure = import_extra("matplotlib.figure", "train").Figure(figsize=size, dpi=150, layout="constrained")
    yield figure
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def _first_variable(field: Tensor) -> np.ndarray:
    return field[:, 0].numpy()


def _field_style(*fields):
    return {"cmap": "viridis", "vmin": np.min(fields), "vmax": np.max(fields)}


def _error_style(*errors):
    limit = np.abs(errors).max()
    return {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}


def _draw_maps(axes, image, dataset, fields, **style):
    """Draw fields [N] by title, with one colour bar."""
    for ax, (title, field) in zip(axes, fields.items(), strict=True):
        mesh = image.draw(ax, field, **style)
        ax.set_title(title)
    axes[0].figure.colorbar(mesh, ax=axes, label=f"{dataset.variables[0]} [{dataset.units[0]}]", aspect=15, pad=0.02)


def _draw_loss(axes, records):
    axes.plot(*curve(records, "train"), color=COLOURS["training"], alpha=0.6, linewidth=0.8, label="training")
    axes.plot(*curve(records, "valid"), color=COLOURS["model"], marker="o", markersize=3, label="validation")
    axes.set(yscale="log", xlabel="step", ylabel="normalised", title="loss: mean squared error")
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


def _draw_growth(axes, dataset, scores):
    names = dict.fromkeys(score.forecast for score in scores)
    for name, line in zip(names, cycle(LINES)):
        selected = [score for score in scores if (score.forecast, score.variable) == (name, dataset.variables[0])]
        lead_times, errors = [score.lead_time for score in selected], [score.rmse for score in selected]
        color = COLOURS["model" if name == "model" else "persistence"]
        axes.plot(lead_times, errors, color=color, linestyle=line, marker="o", markersize=4, label=name)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="lead time [h]", ylabel=f"RMSE [{dataset.units[0]}]", title="all test samples")
    axes.legend(frameon=False)
