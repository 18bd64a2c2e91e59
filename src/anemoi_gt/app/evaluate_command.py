"""The evaluation application, `anemoi-gt evaluate checkpoint=FILE`: scores, plots and rollouts.

The config of the run is read from the checkpoint and can be overridden on the command line. At its
end, training writes the same report.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from anemoi_gt.app import hydra_app
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset, load, starts_in_training
from anemoi_gt.app.objects import build_trained
from anemoi_gt.app.plots import chosen_variables, draw_rollout_plot, draw_training_plot
from anemoi_gt.app.scores import (
    Score,
    as_table,
    measure,
    model_forecast,
    roll_out,
    rollout_table,
    score_rollouts,
)
from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.config import cpu_threads
from anemoi_gt.app.training.run_files import atomic_write, read_metrics
from anemoi_gt.explanation import explain
from anemoi_gt.option_checks import check_integer

log = logging.getLogger(__name__)


def prepare(config: "hydra_app.DictConfig") -> Callable[[], None]:
    """Build the model and data of a checkpoint, and return a function that evaluates the model."""
    check_integer("rollout", config.rollout)
    run, step = build_trained(config)
    run.splits.test.require_samples()
    chosen_variables(run.splits.test, config.plots.variables)  # raises for unknown variables
    if config.rollout > 1:
        run.splits.test.advance(0, [])  # raises if the data set does not support rollouts
    log.info("%s, after step %s", config.checkpoint, step)
    warn_of_training_samples("test", run.splits.test)
    if config.explain is not None:
        with torch.no_grad():
            log_explanation(run.model, run.splits.test, run.training, config.explain)
    folder = hydra_app.output_folder()

    def evaluate() -> None:
        test, variables = run.splits.test, config.plots.variables
        with cpu_threads(run.training.threads):
            records = read_metrics(Path(config.checkpoint).parent / "metrics.jsonl")
            write_report(folder, run.model, test, records, variables)
            if config.rollout > 1:
                write_rollout_report(folder, run.model, test, config.rollout, variables)

    return evaluate


def warn_of_training_samples(name: str, samples: ForecastDataset) -> None:
    """Log how many samples of a split start in the training period of the model, if any do."""
    count, period = starts_in_training(samples)
    if count:
        log.warning(
            "%d of %d %s samples start in the training period, %s: their scores do not "
            "measure skill on new data",
            *(count, len(samples), name, period),
        )


def write_report(
    folder: Path,
    model: nn.Module,
    test: ForecastDataset,
    records: list[dict],
    variables: Sequence[str] | None,
) -> None:
    """Score a model and the baselines on the test samples; plot the forecast with median error.

    Writes `scores.json`, with the model's scores first, and `forecast.png` to an existing folder.
    The model must be in evaluation mode. `records` are the metrics of the run. `variables` are
    plotted; None: the first three.
    """
    forecast = model_forecast(model, test)
    errors = measure({"model": forecast, **test.baselines()}, test)
    scores = errors.scores()
    sample = errors.median_sample("model")
    write_scores(folder / "scores.json", scores)
    log.info("scores of %d test forecasts, %g h:\n%s", len(test), test.lead_time, as_table(scores))
    draw_training_plot(
        folder / "forecast.png", test, sample, forecast(sample), scores, records, variables
    )
    log.info("written: %s\nwritten: %s", folder / "forecast.png", folder / "scores.json")


def write_rollout_report(
    folder: Path,
    model: nn.Module,
    test: ForecastDataset,
    steps: int,
    variables: Sequence[str] | None = None,
) -> None:
    """Score rollouts of `steps` steps from the test samples; plot the one with median error.

    Writes `rollout.json`, by lead time, and `rollout.png` to an existing folder. The model must be
    in evaluation mode. Raises ValueError if the data set does not support rollouts.
    """
    scores, sample = score_rollouts(model, test, steps)
    write_scores(folder / "rollout.json", scores)
    log.info(
        "rollouts of %d steps from %d test samples:\n%s", steps, len(test), rollout_table(scores)
    )
    num_lead_times = len({score.lead_time for score in scores})
    outcomes = roll_out(model, test, sample, num_lead_times)
    draw_rollout_plot(folder / "rollout.png", test, sample, outcomes, scores, variables)
    log.info("written: %s\nwritten: %s", folder / "rollout.png", folder / "rollout.json")


def write_scores(path: Path, scores: list[Score]) -> None:
    """Write scores as a JSON list of records."""
    text = json.dumps([asdict(score) for score in scores], indent=2) + "\n"
    with atomic_write(path) as file:
        file.write(text.encode())


def log_explanation(
    model: nn.Module, dataset: ForecastDataset, training: TrainingConfig, target: str
) -> None:
    """Log which kernels a model runs on the first batch, or write them to a file.

    The target is "print", or a file in the folder of the run unless it is absolute: JSON if it ends
    in .json, otherwise text. Raises ValueError if it is no text, such as explain=true.
    """
    if not isinstance(target, str):
        raise ValueError(f"explain must be print or the name of a file, got {target!r}")
    batch = next(load(dataset, training.batch_size, next(model.parameters()).device))
    with cpu_threads(training.threads):
        explanation = explain(model, batch.inputs)
    if target == "print":
        log.info("%s", explanation)
        return
    path = hydra_app.output_folder() / target
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"{explanation}\n"
    if path.suffix == ".json":
        text = json.dumps(explanation.to_dict(), indent=1)
    path.write_text(text)
    log.info("kernels of each layer: %s", path)


def main() -> None:
    """Run the application with the arguments of the command line."""
    hydra_app.run_command_on_checkpoint("evaluate", prepare)
