"""The rollout application, `anemoi-gt rollout checkpoint=FILE`: one long forecast as a file.

The config of the run is read from the checkpoint and can be overridden on the command line. To
score rollouts, use `anemoi-gt evaluate`.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from anemoi_gt.app import hydra_app
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.forecast_file import check_forecast_path, write_forecast
from anemoi_gt.app.forecaster import forecast_members
from anemoi_gt.app.training.config import cpu_threads
from anemoi_gt.extras import import_extra
from anemoi_gt.option_checks import check_integer

log = logging.getLogger(__name__)


def prepare(config: "hydra_app.DictConfig") -> Callable[[], None]:
    """Build the model and data of a checkpoint, and return a function that writes the forecast."""
    check_integer("steps", config.steps)
    check_integer("sample", config.sample, least=None)
    path = hydra_app.output_folder() / str(config.out)
    check_forecast_path(path)
    import_extra("xarray", "xarray")
    run, _ = hydra_app.build_trained(config)
    if config.start is not None:
        dataset = run.splits.test.starting_at(str(config.start))
        samples = range(len(dataset))
    else:
        dataset = run.splits.test
        dataset.require_samples()
        if not -len(dataset) <= config.sample < len(dataset):
            raise ValueError(
                f"sample must be one of the {len(dataset)} test samples, -1 the last, got "
                f"{config.sample}"
            )
        sample = config.sample % len(dataset)
        samples = range(sample, sample + 1)
    dataset.advance(samples[0], [])  # raise if there are no rollouts
    return partial(rollout, run, dataset, samples, config.steps, path)


def rollout(
    run: hydra_app.Run, dataset: ForecastDataset, samples: range, steps: int, path: Path
) -> None:
    """Write a forecast of `steps` steps from each sample; the samples are ensemble members."""
    with cpu_threads(run.training.threads):
        forecast = forecast_members(run.model, dataset, samples, steps)
    write_forecast(path, forecast)
    log.info("%s, %d steps\nwritten: %s", dataset.title(samples[0]), steps, path)


def main() -> None:
    """Run the application with the arguments of the command line."""
    hydra_app.launch_on_checkpoint("rollout", prepare)
