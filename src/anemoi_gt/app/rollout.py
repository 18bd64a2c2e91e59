"""The rollout application, `anemoi-gt rollout checkpoint=FILE steps=8`: one long forecast as a NetCDF file.

The config of the run is read from the checkpoint and can be overridden on the command line. `anemoi_gt.evaluate` scores
rollouts.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from anemoi_gt.app import hydra_app
from anemoi_gt.app.scores import roll_out
from anemoi_gt.app.training.config import cpu_threads
from anemoi_gt.app.training.run_files import annotate_oserror
from anemoi_gt.extras import import_extra
from anemoi_gt.option_checks import check_integer

log = logging.getLogger(__name__)


def prepare(config: "hydra_app.DictConfig") -> Callable[[], None]:
    """Build the checkpoint's model and data, and return the forecast as a function."""
    check_integer("steps", config.steps)
    check_integer("sample", config.sample, least=None)
    import_extra("xarray", "xarray")
    run, _ = hydra_app.build_trained(config)
    samples = len(run.splits.test)
    if not -samples <= config.sample < samples:
        raise ValueError(f"sample must be one of the {samples} test samples, -1 the last, got {config.sample}")
    run.splits.test.advance(0, [])  # raise if there are no rollouts
    return partial(rollout, run, hydra_app.output_folder() / "rollout.nc", config.sample % samples, config.steps)


def rollout(run: hydra_app.Run, path: Path, sample: int, steps: int) -> None:
    """Write the forecasts of `steps` steps from a test sample to a NetCDF file, variables by lead time and node."""
    test = run.splits.test
    with cpu_threads(run.training.threads):
        states = torch.stack([outcome.forecast for outcome in roll_out(run.model, test, sample, steps)]).numpy()
    fields = zip(test.variables, test.units, states.transpose(2, 0, 1), strict=True)
    hours = np.arange(1, steps + 1) * test.lead_time
    coords = {"lead_time": ("lead_time", hours, {"long_name": "hours"})}
    coords |= {"latitude": ("node", test.nodes.lat), "longitude": ("node", test.nodes.lon)}
    forecast = import_extra("xarray", "xarray").Dataset(
        {name: (("lead_time", "node"), values, {"units": units}) for name, units, values in fields},
        coords,
        {"title": f"{test.title(sample)}, {steps} steps"},
    )
    with annotate_oserror(path):
        forecast.to_netcdf(path)
    log.info("%s, %d steps\nwritten: %s", test.title(sample), steps, path)


def main() -> None:
    """Run the application with the arguments of the command line."""
    hydra_app.launch_on_checkpoint("rollout", prepare)
