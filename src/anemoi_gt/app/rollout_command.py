"""The rollout application, `anemoi-gt rollout checkpoint=FILE`: one long forecast as a file.

The config of the run is read from the checkpoint and can be overridden on the command line. To
score rollouts, use `anemoi-gt evaluate`.
"""

import logging
from collections.abc import Callable

from anemoi_gt.app import hydra_app
from anemoi_gt.app.forecast_file import check_forecast_path, join_starts, write_forecast
from anemoi_gt.app.forecaster import forecast_members
from anemoi_gt.app.objects import build_trained
from anemoi_gt.app.training.config import cpu_threads
from anemoi_gt.extras import import_extra
from anemoi_gt.option_checks import check_integer

log = logging.getLogger(__name__)


def prepare(config: "hydra_app.DictConfig") -> Callable[[], None]:
    """Build the model and data of a checkpoint, and return a function that writes the forecast."""
    check_integer("steps", config.steps)
    if config.start is not None and config.sample is not None:
        raise ValueError(
            "a forecast starts either at a date, start, or from a test sample, got "
            f"start={config.start} and sample={config.sample}: leave one out"
        )
    path = hydra_app.output_folder() / str(config.out)
    check_forecast_path(path)
    import_extra("xarray", "xarray")
    run, _ = build_trained(config)
    test = run.splits.test
    if config.start is not None:
        # several dates are a list, and one date may be a number, such as 2020
        dates = [config.start] if isinstance(config.start, str | int) else config.start
        starts = [test.starting_at(str(date)) for date in dates]
        chosen = [(dataset, range(len(dataset))) for dataset in starts]
    else:
        test.require_samples()
        sample = -1 if config.sample is None else config.sample
        check_integer("sample", sample, least=None)
        if not -len(test) <= sample < len(test):
            raise ValueError(
                f"sample must be one of the {len(test)} test samples, -1 the last, got {sample}"
            )
        sample %= len(test)
        chosen = [(test, range(sample, sample + 1))]
    for dataset, samples in chosen:
        # raises if there are no rollouts, or the forcings of the last step are missing
        dataset.advance(samples[0], [dataset.present(samples[0])] * (config.steps - 1))

    def rollout() -> None:
        """Write the forecasts of all starts, one per member, to one file."""
        forecasts = []
        for dataset, samples in chosen:
            with cpu_threads(run.training.threads):
                forecasts.append(forecast_members(run.model, dataset, samples, config.steps))
            log.info("%s", forecasts[-1].attrs["title"])
        write_forecast(path, join_starts(forecasts))
        log.info("written: %s", path)

    return rollout


def main() -> None:
    """Run the application with the arguments of the command line."""
    hydra_app.run_command_on_checkpoint("rollout", prepare)
