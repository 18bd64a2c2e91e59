"""The `era5_uk` data set: hourly 2 m temperature of ERA5 over the United Kingdom, March 2019.

33 x 49 points (58 to 50 degrees north, 10 west to 2 east, every quarter of a degree), 744 hours,
one GRIB file of 2.5 MB: xarray's tutorial data set "era5-2mt-2019-03-uk.grib". It contains modified
Copernicus Climate Change Service information (Hersbach et al. 2020) and is not part of this
package.

A forecast from start hour s (s = 0 is 1 March, 00 UTC) uses fields up to s and is compared with the
field at s + lead:

    split   days        start hours s
    train   1 to 24     the earliest input exists, and s + lead is within days 1 to 24
    valid   25, 26      s and s + lead are within days 25 and 26
    test    27 to 31    s and s + lead are within days 27 to 31

Splits share no truth, and no truth of a later split is an input or truth of an earlier split.
Inputs may reach back into the previous split, as in an operational forecast.

References
----------
Hersbach, H. et al. (2020), The ERA5 global reanalysis, Q. J. R. Meteorol. Soc. 146, 1999-2049.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from anemoi_gt.app.datasets.fields import arrange, group, minutes
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset, Splits, Step, find_start
from anemoi_gt.app.datasets.physical import PhysicalInputs, day_angle
from anemoi_gt.app.datasets.readers import read_files
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra
from anemoi_gt.option_checks import check_integer

TUTORIAL_NAME = "era5-2mt-2019-03-uk.grib"
TUTORIAL_URL = f"https://github.com/pydata/xarray-data/raw/master/{TUTORIAL_NAME}"
TUTORIAL_HASH = "sha256:e5e82609f0e28e84822852e15d20c88dbb4b142a30264a7e6f87b9b5c7501df9"
HOURS_PER_DAY = 24
FIRST_VALID_HOUR, FIRST_TEST_HOUR = 24 * HOURS_PER_DAY, 26 * HOURS_PER_DAY
LAGS = (1, 2, 3, 6, 9, 12, 15, 18, 24)
RIDGE_LAGS = (0, 1, 3, 6, 12, 18)


@dataclass(frozen=True, eq=False)
class HourlyField:
    """Hourly values [T, N] float32 in K on N nodes, at times [T] datetime64.

    Raises ValueError if hours are missing, or values are not finite.
    """

    nodes: Nodes
    times: np.ndarray
    values: Tensor

    def __post_init__(self) -> None:
        steps = np.diff(self.times)
        if not (steps == np.timedelta64(1, "h")).all():
            raise ValueError(f"times must be an hour apart, got steps of {np.unique(steps)}")
        if not torch.isfinite(self.values).all():
            raise ValueError("2 m temperature must be finite everywhere, got NaN or infinity")


class Era5UkDataset(ForecastDataset):
    """Forecasts of 2 m temperature from consecutive start hours.

    The change is relative to the temperature 24 hours before the truth, so the network does not
    have to learn the daily cycle. Inputs are the present anomaly, the change since each of the
    `LAGS` hours and since the reference, two harmonics of the hour of the day, and the position.

    `field` has all hours, `starts` is the range of the samples' start hours, and `lead_time` is 1
    to 24 hours. `normalisation` is of a trained model; by default, it is computed from
    the training days.
    """

    variables = ("t2m",)
    units = ("K",)
    attributes = MappingProxyType(
        {"t2m": {"standard_name": "air_temperature", "long_name": "2 m temperature"}}
    )
    time_encoding = "two harmonics of the hour of the day, UTC"
    reference_name = "the variables 24 hours before the truth"
    lead_time: int

    def __init__(
        self,
        field: HourlyField,
        starts: range,
        lead_time: int,
        normalisation: Mapping[str, Tensor] | None = None,
    ):
        self.field = field
        self.starts = starts
        self.lead_time = lead_time
        self.nodes = field.nodes
        self.weights = torch.ones(len(self.nodes))
        self.lags = sorted({*LAGS, HOURS_PER_DAY - lead_time} - {0})
        self.input_names = (
            "present anomaly",
            *(f"change in the last {lag} h" for lag in self.lags),
            *(f"{f} {k} x hour of day" for k in (1, 2) for f in ("sin", "cos")),
            *("latitude", "longitude"),
        )
        normalisation = normalisation or self._measure()
        self._normalisation = {name: tensor.float() for name, tensor in normalisation.items()}
        self.change_mean = self._normalisation["change_mean"]
        self.change_std = self._normalisation["change_std"]
        position = torch.from_numpy(self.nodes.radians)
        position = ((position - position.mean(dim=0)) / position.std(dim=0)).float()
        self.encoding = Era5UkInputs(self.lags, lead_time, position, self._normalisation)

    def _measure(self) -> dict[str, Tensor]:
        """Return the `normalisation` of the training days."""
        training = self.field.values[:FIRST_VALID_HOUR]
        daily_change = training[HOURS_PER_DAY:] - training[:-HOURS_PER_DAY]
        mean = training.mean(dim=0)
        changes = [training[lag:] - training[:-lag] for lag in self.lags]
        return {
            "change_mean": daily_change.mean()[None],
            "change_std": daily_change.std()[None],
            "mean": mean,
            "anomaly_std": (training - mean).std(),
            "lag_std": torch.stack([change.std() for change in changes]),
        }

    def normalisation(self) -> dict[str, Tensor]:
        """Return the statistics of the change, the mean per node, and standard deviations."""
        return dict(self._normalisation)

    def normalised_by(self, normalisation: Mapping[str, Tensor]) -> "Era5UkDataset":
        """Return the same samples, normalised by the statistics of `normalisation`."""
        return Era5UkDataset(self.field, self.starts, self.lead_time, normalisation)

    def physical_inputs(self) -> "Era5UkInputs":
        """Return the module that converts temperatures of the last hours to input channels."""
        return copy.deepcopy(self.encoding)

    def physical_sample(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the temperatures of sample i at its start and lags, [N, P], and the time."""
        return self._physical(self.field.values[: self.starts[i] + 1], self.starts[i])

    def start_time(self, i: int) -> np.datetime64:
        """Return the start time of sample i."""
        return self.field.times[self.starts[i]]

    def starting_at(self, start: str) -> "Era5UkDataset":
        """Return the data set reduced to the sample that starts at a date or the "latest" time.

        Raises ValueError if the data do not have this time, or too few hours before it.
        """
        index = find_start(self.field.times, start)
        if index < max(LAGS):
            raise ValueError(
                f"start must have {max(LAGS)} hours before it in the data, got {start}"
            )
        starts = range(index, index + 1)
        return Era5UkDataset(self.field, starts, self.lead_time, self._normalisation)

    def __len__(self) -> int:
        return len(self.starts)

    def inputs(self, i: int) -> Tensor:
        return self.encoding.channels(*self.physical_sample(i))

    def reference(self, i: int) -> Tensor:
        """Return the temperature a day before the truth, [N, 1] in K."""
        return self._at(self.starts[i] + self.lead_time - HOURS_PER_DAY)

    def present(self, i: int) -> Tensor:
        return self._at(self.starts[i])

    def truth(self, i: int) -> Tensor:
        return self._at(self.starts[i] + self.lead_time)

    def advance(self, i: int, forecasts: Sequence[Tensor]) -> Step:
        """Return the step after these hourly forecasts.

        Raises ValueError unless the lead time is 1 h, because inputs include every past hour, and
        longer steps skip some.
        """
        if self.lead_time != 1:
            raise ValueError(
                "a rollout of era5_uk needs data.lead_time=1, because inputs include every hour, "
                f"got {self.lead_time}"
            )
        start = self.starts[i]
        past = self.field.values[start - HOURS_PER_DAY : start + 1]
        values = torch.cat([past, *(forecast.T for forecast in forecasts)])
        present = start + len(forecasts)
        truth = self._at(present + 1) if present + 1 < len(self.field.times) else None
        inputs = self.encoding.channels(*self._physical(values, present))
        return Step(inputs, values[-HOURS_PER_DAY][:, None], truth)

    def title(self, i: int) -> str:
        """Return the start of the forecast and its lead time."""
        start = minutes(self.field.times[self.starts[i]])
        return f"{start} UTC + {self.lead_time} h"

    def baselines(self, step: int | None = None) -> dict[str, Callable[[int], Tensor]]:
        """Return persistence, the same hour of the previous day, and two ridge regressions.

        The regressions are fitted to 24 and 26 days; the second one, unlike a network, also to the
        validation days. They do not exist for rollout steps.
        """
        num_steps = 1 if step is None else step
        # hours from the start to the last observed time with the hour of day of the truth
        offset = (num_steps * self.lead_time - 1) % HOURS_PER_DAY + 1 - HOURS_PER_DAY
        forecasts = super().baselines(step)
        forecasts["same hour yesterday"] = lambda i: self._at(self.starts[i] + offset)
        if step is None:
            for hours in (FIRST_VALID_HOUR, FIRST_TEST_HOUR):
                forecasts[f"ridge per point, {hours // HOURS_PER_DAY} days"] = self._ridge(hours)
        return forecasts

    def _ridge(self, hours: int) -> Callable[[int], Tensor]:
        """Return the forecast of a ridge regression fitted to the first `hours` of truth."""

        def predictors(start: int) -> Tensor:
            """Return temperature (K) at `RIDGE_LAGS`, and the hour of day, [N, 8]."""
            past = self.field.values[[start - lag for lag in RIDGE_LAGS]].T
            hour = torch.tensor([start % HOURS_PER_DAY], dtype=torch.float64)
            time_of_day = harmonics(2 * torch.pi * hour / HOURS_PER_DAY, 1)
            return torch.cat([past, time_of_day.expand(len(past), 2)], dim=1)

        starts = range(max(RIDGE_LAGS), hours - self.lead_time)
        target = self.field.values[starts.start + self.lead_time : hours]
        predict = fit_ridge(torch.stack([predictors(start) for start in starts]), target)
        return lambda i: predict(predictors(self.starts[i]))[:, None]

    def _physical(self, values: Tensor, hour: int) -> tuple[Tensor, Tensor]:
        """Return the inputs of `encoding` at an hour; `values` [T, N] are those up to it."""
        time = self.field.times[0] + np.timedelta64(hour, "h")
        seconds = float(time.astype("datetime64[s]").astype("int64"))
        fields = values[[-1 - lag for lag in (0, *self.lags)]].T
        return fields, torch.tensor(seconds, dtype=torch.float64)

    def _at(self, hour: int) -> Tensor:
        return self.field.values[hour][:, None]


class Era5UkInputs(PhysicalInputs):
    """The input channels of `Era5UkDataset`: anomaly, changes, harmonics of the hour, position."""

    mean: Tensor  # buffers
    anomaly_std: Tensor
    lag_std: Tensor
    position: Tensor

    def __init__(
        self,
        lags: Sequence[int],
        lead_time: int,
        position: Tensor,
        statistics: Mapping[str, Tensor],
    ):
        super().__init__()
        self.names = ("t2m", *(f"t2m -{lag} h" for lag in lags))
        self.units = ("K",) * len(self.names)
        self.reference = (0, *lags).index(HOURS_PER_DAY - lead_time)
        for name in ("mean", "anomaly_std", "lag_std"):
            self.register_buffer(name, statistics[name])
        self.register_buffer("position", position)

    # `time` is always passed, because needs_time is True.
    def forward(  # type: ignore[override]
        self, fields: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return normalised channels [B, N, in_channels] and the reference [B, N, 1].

        The reference is the temperature a day before the truth.
        """
        anomaly = (fields[..., :1] - self.mean[:, None]) / self.anomaly_std
        changes = (fields[..., :1] - fields[..., 1:]) / self.lag_std
        time_of_day = harmonics(day_angle(time), 2)[:, None].expand(-1, fields.shape[1], -1)
        position = self.position.expand(fields.shape[0], -1, -1)
        channels = torch.cat([anomaly, changes, time_of_day, position], dim=2)
        return channels, fields[..., self.reference : self.reference + 1]


def fit_ridge(
    predictors: Tensor, target: Tensor, penalty: float = 1.0
) -> Callable[[Tensor], Tensor]:
    """Fit a ridge regression per point; return a function from predictors [N, F] to values [N].

        prediction[n] = target_mean[n] + <predictors[n] - predictor_mean[n], slope[n]>
        slope[n]      = (X_n^T X_n + penalty I)^-1 X_n^T y_n      X_n, y_n centred, [S, F], [S]

    The predictors to fit are [S, N, F], the target [S, N]; the penalty has the squared units of the
    predictors. Computed in float64, returned in float32.
    """
    x = predictors.double()
    y = target.double()
    x_mean = x.mean(dim=0)
    y_mean = y.mean(dim=0)
    x = rearrange(x - x_mean, "samples nodes predictors -> nodes samples predictors")
    y = rearrange(y - y_mean, "samples nodes -> nodes samples 1")
    gram = x.mT @ x + penalty * torch.eye(x.shape[-1], dtype=x.dtype)
    slope = torch.linalg.solve(gram, x.mT @ y)[..., 0]

    def predict(predictors: Tensor) -> Tensor:
        change = ((predictors.double() - x_mean) * slope).sum(dim=-1)
        return (y_mean + change).float()

    return predict


def harmonics(angle: Tensor, count: int) -> Tensor:
    """Return sine and cosine of 1, ..., `count` times angles [B], [B, 2 * count] float32."""
    multiples = angle[:, None] * torch.arange(1, count + 1, device=angle.device)
    return torch.stack([multiples.sin(), multiples.cos()], dim=2).flatten(1).float()


def era5_uk(path: str | Path | None = None, lead_time: int = 6) -> Splits:
    """Load the `era5_uk` data set, split by start day: 1 to 24, 25 and 26, and 27 to 31.

    Raises FileNotFoundError if there is no such file; ImportError if eccodes is missing;
    ValueError if the lead time is out of range, or the file does not contain the expected month.

    Parameters
    ----------
    path : str, Path or None
        The GRIB file; None downloads it once into the cache of `xarray.tutorial`.
    lead_time : int
        Hours from the present to the truth, 1 to 24.
    """
    return split(read_era5_uk(path), lead_time)


def split(field: HourlyField, lead_time: int) -> Splits:
    """Split the forecasts by start day as in the table of this module.

    Raises ValueError if the lead time is not 1 to 24 hours, or the field ends before the first test
    forecast does.
    """
    check_integer("lead_time", lead_time, least=None)
    if not 1 <= lead_time <= HOURS_PER_DAY:
        raise ValueError(f"lead_time must be 1 to {HOURS_PER_DAY} hours, got {lead_time}")
    bounds = [max(LAGS), FIRST_VALID_HOUR, FIRST_TEST_HOUR, len(field.times)]
    if bounds[-1] <= FIRST_TEST_HOUR + lead_time:
        raise ValueError(
            f"the file must contain more than {FIRST_TEST_HOUR + lead_time} hours, got "
            f"{len(field.times)}"
        )
    starts = (range(first, end - lead_time) for first, end in pairwise(bounds))
    return Splits(*(Era5UkDataset(field, hours, lead_time) for hours in starts))


def read_era5_uk(path: str | Path | None) -> HourlyField:
    """Read 2 m temperature from the GRIB file at `path`. Raises like `era5_uk`."""
    variables = group(read_files(_download() if path is None else path))
    if "t2m" not in variables:
        raise ValueError(f"the file must contain 2 m temperature (t2m), got {sorted(variables)}")
    fields = arrange({"t2m": variables["t2m"]})
    values = np.stack([fields.readers["t2m"](t) for t in range(len(fields.times))])
    return HourlyField(fields.nodes, fields.times, torch.from_numpy(values))


def _download() -> str:
    """Return the file of xarray's tutorial, downloaded once into the user's cache.

    Raises OSError if it cannot be downloaded.
    """
    pooch = import_extra("pooch", "era5")
    try:
        return pooch.retrieve(
            TUTORIAL_URL,
            known_hash=TUTORIAL_HASH,
            fname=TUTORIAL_NAME,
            path=pooch.os_cache("xarray_tutorial_data"),
        )
    except (OSError, ValueError) as error:  # no network, or a web page instead of the file
        raise OSError(
            f"could not download {TUTORIAL_NAME} ({type(error).__name__}): give the file as "
            "data.path=FILE"
        ) from error
