"""Plot of a rollout: truth, forecast and error at several lead times, and RMSE by lead time."""

from itertools import cycle
from pathlib import Path

import numpy as np

from anemoi_gt.data.datasets import ForecastDataset
from anemoi_gt.extras import import_extra
from anemoi_gt.training.atomic_write import atomic_write
from anemoi_gt.training.plots.maps import MapImage
from anemoi_gt.training.plots.training_plot import COLOURS, ERROR_MAP, FIELD_MAP, colour_bar, first_variable
from anemoi_gt.training.rollout import Outcome
from anemoi_gt.training.scores import Score

COLUMNS = 4  # lead times with maps
COLUMN_SIZE = {"mollweide": (3.5, 2.1), "rectilinear": (3.4, 3.3)}  # inches
LINES = ("-", "--", ":", "-.")


def draw_rollout_plot(
    path: Path, dataset: ForecastDataset, sample: int, outcomes: list[Outcome], scores: list[Score]
) -> None:
    """Plot the first variable of a rollout from a test sample, and the scores of all rollouts, as a PNG file.

    `outcomes` are the steps of the rollout, all with a truth. Raises ImportError if matplotlib or scipy is missing.
    """
    image = MapImage(dataset.nodes)
    steps = drawn_steps(len(outcomes))
    width, height = COLUMN_SIZE[image.projection]
    figure_class = import_extra("matplotlib.figure", "train").Figure
    figure = figure_class(figsize=(width * (len(steps) + 1.4), 3 * height + 0.4), dpi=150, layout="constrained")
    grid = figure.add_gridspec(3, len(steps) + 1, width_ratios=[*([1] * len(steps)), 1.2])
    rows = [
        [figure.add_subplot(grid[row, column], projection=image.projection) for column in range(len(steps))]
        for row in range(3)
    ]
    _draw_maps(rows, image, dataset, {n: outcomes[n - 1] for n in steps})
    _draw_growth(figure.add_subplot(grid[:, -1]), dataset, scores)
    start = f"{dataset.variables[0]}, {dataset.title(sample)}"
    figure.suptitle(f"Rollout: {start}, continued (test sample of median error at the last lead time)", fontsize=13)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def drawn_steps(steps: int) -> list[int]:
    """Return the steps with maps, counted from 1: the first, the last, and evenly spaced ones between."""
    return sorted({round(n) for n in np.linspace(1, steps, COLUMNS)})


def _draw_maps(rows, image, dataset, outcomes):
    fields = {n: [first_variable(outcome.truth), first_variable(outcome.forecast)] for n, outcome in outcomes.items()}
    values, errors = np.array(list(fields.values())), [forecast - truth for truth, forecast in fields.values()]
    limits, error_limit = {"vmin": values.min(), "vmax": values.max()}, np.abs(errors).max()
    for column, (n, (truth, forecast)) in enumerate(fields.items()):
        axes = [row[column] for row in rows]
        truth_mesh = image.draw(axes[0], truth, cmap=FIELD_MAP, **limits)
        image.draw(axes[1], forecast, cmap=FIELD_MAP, **limits)
        error_mesh = image.draw(axes[2], errors[column], cmap=ERROR_MAP, vmin=-error_limit, vmax=error_limit)
        lead_time = f"{n * dataset.lead_time:g} h"
        for ax, title in zip(axes, ("truth", "forecast", "error"), strict=True):
            ax.set_title(f"{title}, {lead_time}")
            ax.label_outer()
    colour_bar(truth_mesh, [*rows[0], *rows[1]], dataset)
    colour_bar(error_mesh, rows[2], dataset)


def _draw_growth(axes, dataset, scores):
    names = dict.fromkeys(score.forecast for score in scores)
    for name, line in zip(names, cycle(LINES)):
        selected = [score for score in scores if (score.forecast, score.variable) == (name, dataset.variables[0])]
        lead_times, errors = [score.lead_time for score in selected], [score.rmse for score in selected]
        color = COLOURS["model" if name == "model" else "persistence"]
        axes.plot(lead_times, errors, color=color, linestyle=line, marker="o", markersize=4, label=name)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="lead time [h]", ylabel=f"RMSE [{dataset.units[0]}]")
    axes.set_title("all test samples")
    axes.legend(frameon=False)
