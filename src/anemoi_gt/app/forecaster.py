"""Forecasts of a trained model in Python, as an xarray Dataset.

forecaster = Forecaster("runs/weather/best.pt")
forecast = forecaster.forecast("weather.nc", start="2020-02-01T06", steps=8)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from anemoi_gt.app import objects
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.forecast_file import describe_forecast
from anemoi_gt.app.scores import roll_out
from anemoi_gt.app.training.config import choose_device, cpu_threads
from anemoi_gt.app.training.run_files import load_checkpoint, load_weights
from anemoi_gt.app.training.run_folder import config_of, schema_of
from anemoi_gt.extras import import_extra
from anemoi_gt.option_checks import check_integer

if TYPE_CHECKING:
    import xarray


class Forecaster:
    """A trained model with the config and the data schema of its checkpoint.

    Raises FileNotFoundError if there is no such file, ValueError if it is not the checkpoint of a
    run or is damaged, and ImportError if Hydra is missing.

    Parameters
    ----------
    checkpoint : str or Path
        The `best.pt` or `last.pt` of a run; its averaged weights make the forecasts.
    device : {"auto", "cpu", "cuda"}
        `auto` uses a GPU if there is one.
    """

    def __init__(self, checkpoint: str | Path, *, device: str = "auto"):
        import_extra("hydra", "train")
        from omegaconf import OmegaConf

        path = Path(checkpoint)
        state = load_checkpoint(path)
        self._device = choose_device(device)
        self._config = OmegaConf.create(config_of(state, path))
        self._config.training.device = self._device.type
        self._schema = schema_of(state, path)
        self._state = state
        self._model: nn.Module | None = None  # built with the first data, which hold the grid

    def forecast(
        self,
        path: str | Path | Sequence[str] | None = None,
        *,
        start: str = "latest",
        steps: int = 1,
    ) -> "xarray.Dataset":
        """Return a forecast, in physical units, with the coordinates and names of the data.

        It has the contents of the file of `anemoi-gt rollout`, with dates as datetime64.

        Parameters
        ----------
        path : str, Path or list of str, optional
            The data, as `data.path` of the run; by default, those of the run. Only the input times
            of the model are needed, and at each step the forcings that change. Ensemble members are
            forecast one by one.
        start : str
            The date from which the forecast starts, such as "2020-01-31T18", or "latest", the
            newest time of the data that has all inputs.
        steps : int
            Number of autoregressive steps, each of the lead time of the model.

        Raises
        ------
        ValueError
            If the data do not have the variables, units and grid of the model, or the times that it
            needs.
        """
        check_integer("steps", steps)
        config = self._config.copy()
        if isinstance(path, str | Path):
            config.data.path = str(path)
        elif path is not None:
            config.data.path = list(path)
        splits, training = objects.build_data(config, self._schema)
        dataset = splits.test.starting_at(start)
        if self._model is None:
            model = objects.build_model(config, splits.train)
            load_weights(model, self._state)
            self._model = model.to(self._device).eval()
        with cpu_threads(training.threads):
            forecast = forecast_members(self._model, dataset, range(len(dataset)), steps)
        # as if it had been read from a file: dates in place of seconds, but no durations, which
        # older versions of xarray make of wave periods in seconds, and of lead times
        return import_extra("xarray", "xarray").decode_cf(forecast, decode_timedelta=False)


def forecast_members(
    model: nn.Module, dataset: ForecastDataset, samples: Sequence[int], steps: int
) -> "xarray.Dataset":
    """Return forecasts of `steps` steps from consecutive samples, which are ensemble members."""
    members = []
    for sample in samples:
        outcomes = roll_out(model, dataset, sample, steps)
        members.append(torch.stack([outcome.forecast for outcome in outcomes]))
    return describe_forecast(dataset, samples[0], torch.stack(members).numpy())
