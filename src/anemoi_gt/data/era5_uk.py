"""The `era5_uk` data set: hourly 2 m temperature of ERA5 over the United Kingdom, March 2019.

33 x 49 points (58 to 50 degrees north, 10 west to 2 east, every quarter of a degree), 744 hours, one GRIB file of
2.5 MB, which is xarray's tutorial data set "era5-2mt-2019-03-uk.grib". It contains modified Copernicus Climate Change
Service information (Hersbach et al. 2020) and is never a part of this package.

A forecast that starts at hour s (0 is 1 March, 00 UTC) sees the fields up to s and is compared with the field at s + lead:

    split   days        a start s belongs to it when
    train   1 to 24     the earliest field it sees exists, and s + lead is within days 1 to 24
    valid   25, 26      s and s + lead are within days 25 and 26
    test    27 to 31    s and s + lead are within days 27 to 31

So no truth is shared, and no truth of a later split is seen, as input or truth, by an earlier one. Inputs do reach back
over the border, as those of a real forecast do.

References
----------
Hersbach, H. et al. (2020), The ERA5 global reanalysis, Q. J. R. Meteorol. Soc. 146, 1999-2049.
"""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.data.datasets import ForecastDataset, Splits, Step
from anemoi_gt.data.hourly import HourlyField, read_era5_uk
from anemoi_gt.data.ridge import Ridge

HOURS_PER_DAY = 24
FIRST_VALID_HOUR, FIRST_TEST_HOUR = 24 * HOURS_PER_DAY, 26 * HOURS_PER_DAY
LAGS = (1, 2, 3, 6, 9, 12, 15, 18, 24)
RIDGE_LAGS = (0, 1, 3, 6, 12, 18)


class Era5UkDataset(ForecastDataset):
    """Forecasts of 2 m temperature from consecutive start hours.

    The change is counted from the same hour of the day before the truth, so that the network need not learn the daily
    cycle but only how today differs. Inputs are the present anomaly, the present less the temperature at `LAGS` hours
    before it and at the hour of the reference, two harmonics of the hour of the day, and the position.

    Parameters
    ----------
    field : HourlyField
        All hours.
    starts : range
        Start hours of the samples.
    lead_time : int
        Hours, 1 to 24.
    """

    variables = ("2 m temperature",)
    units = ("K",)

    def __init__(self, field, starts, lead_time):
        self.field, self.starts, self.lead_time = field, starts, lead_time
        self.nodes = field.nodes
        self.weights = torch.ones(len(self.nodes))
        self.lags = sorted({*LAGS, HOURS_PER_DAY - lead_time} - {0})
        self.input_names = (
            "present anomaly",
            *(f"change in the last {lag} h" for lag in self.lags),
            *(f"{f} {k} x hour of day" for k in (1, 2) for f in ("sin", "cos")),
            *("latitude", "longitude"),
        )
        seen = field.values[:FIRST_VALID_HOUR]
        daily_change = seen[HOURS_PER_DAY:] - seen[:-HOURS_PER_DAY]
        self.change_mean, self.change_std = daily_change.mean()[None], daily_change.std()[None]
        self._mean = seen.mean(dim=0)
        self._anomaly_std = (seen - self._mean).std()
        self._lag_std = torch.stack([(seen[lag:] - seen[:-lag]).std() for lag in self.lags])
        position = torch.from_numpy(self.nodes.radians)
        self._position = ((position - position.mean(dim=0)) / position.std(dim=0)).float()

    def __len__(self):
        return len(self.starts)

    def inputs(self, i: int) -> Tensor:
        """Return the normalised input channels of sample i, [N, in_channels] float32."""
        return self._channels(self.field.values[: self.starts[i] + 1], self.starts[i])

    def reference(self, i: int) -> Tensor:
        """Return the temperature a day before the truth, [N, 1] in K."""
        return self._at(self.starts[i] + self.lead_time - HOURS_PER_DAY)

    def present(self, i: int) -> Tensor:
        """Return the temperature at the start, [N, 1] in K."""
        return self._at(self.starts[i])

    def truth(self, i: int) -> Tensor:
        """Return the temperature after the lead time, [N, 1] in K."""
        return self._at(self.starts[i] + self.lead_time)

    def advance(self, i: int, forecasts: Sequence[Tensor]) -> Step:
        """Return the step that follows some forecasts, which stand for the hours after the start.

        Raises
        ------
        ValueError
            Unless the lead time is 1 h: the inputs reach back to the hour before the present, which a longer step skips.
        """
        if self.lead_time != 1:
            raise ValueError(
                f"a rollout of era5_uk needs data.lead_time=1: the inputs name every hour, got {self.lead_time}"
            )
        start = self.starts[i]
        seen = self.field.values[start - HOURS_PER_DAY : start + 1]  # and nothing of the hours to come
        values = torch.cat([seen, *(forecast.T for forecast in forecasts)])
        present = start + len(forecasts)
        truth = self._at(present + 1) if present + 1 < len(self.field.times) else None
        return Step(self._channels(values, present), values[-HOURS_PER_DAY][:, None], truth)

    def part(self, rows: Tensor) -> "Era5UkDataset":
        """Return the same samples, of a field that holds some of the points alone."""
        part = copy.copy(self)
        part.field, part.weights = self.field.part(rows), self.weights[rows]
        part.nodes, part._mean, part._position = part.field.nodes, self._mean[rows], self._position[rows]
        return part

    def title(self, i: int) -> str:
        """Return the start of the forecast and its lead time."""
        start = np.datetime_as_string(self.field.times[self.starts[i]], unit="m").replace("T", " ")
        return f"{start} UTC + {self.lead_time} h"

    def baselines(self):
        """Return persistence, the same hour yesterday, and ridge regressions fitted on 24 and on 26 days.

        The second regression has seen the validation days too, which a network has not.
        """
        ridges = {
            f"ridge per point, {hours // HOURS_PER_DAY} days": partial(
                self._ridge_forecast, fit_ridge(self.field, hours, self.lead_time)
            )
            for hours in (FIRST_VALID_HOUR, FIRST_TEST_HOUR)
        }
        return {**super().baselines(), "same hour yesterday": self.reference, **ridges}

    def _ridge_forecast(self, ridge, i):
        return ridge(ridge_predictors(self.field, self.starts[i]))[:, None]

    def _channels(self, values, hour):
        """The input channels at an hour, when `values` [T, N] are those of the hours up to it."""
        anomaly = (values[-1] - self._mean) / self._anomaly_std
        changes = (values[-1] - values[[-1 - lag for lag in self.lags]]).T / self._lag_std  # [N, lags]
        time_of_day = harmonics_of_day(hour, 2).expand(len(self.nodes), 4)
        return torch.cat([anomaly[:, None], changes, time_of_day, self._position], dim=1)

    def _at(self, hour):
        return self.field.values[hour][:, None]


def harmonics_of_day(hour: int, count: int) -> Tensor:
    """Return sine and cosine of 1 to `count` times the hour of the day as an angle, [2 * count] float32."""
    angle = 2 * torch.pi * (hour % HOURS_PER_DAY) / HOURS_PER_DAY * torch.arange(1, count + 1)
    return torch.stack([angle.sin(), angle.cos()], dim=1).flatten()


def ridge_predictors(field: HourlyField, start: int) -> Tensor:
    """Return what the ridge regression sees at each point: temperature at `RIDGE_LAGS` (K) and the hour, [N, 8]."""
    past = field.values[[start - lag for lag in RIDGE_LAGS]].T
    return torch.cat([past, harmonics_of_day(start, 1).expand(len(past), 2)], dim=1)


def fit_ridge(field: HourlyField, hours: int, lead_time: int) -> Ridge:
    """Fit the ridge regression on the first `hours` of the field, truths included."""
    starts = range(max(RIDGE_LAGS), hours - lead_time)
    predictors = torch.stack([ridge_predictors(field, start) for start in starts])
    return Ridge.fit(predictors, field.values[starts.start + lead_time : hours])


def era5_uk(path: str | Path | None = None, lead_time: int = 6) -> Splits:
    """Make the `era5_uk` data set.

    Parameters
    ----------
    path : str, Path or None
        The GRIB file; None fetches it once with `xarray.tutorial`, which keeps it in the user's cache.
    lead_time : int
        Hours from the present to the truth, 1 to 24.

    Returns
    -------
    Splits
        Start hours of days 1 to 24, 25 and 26, and 27 to 31.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ImportError
        If xarray or cfgrib is missing.
    ValueError
        If the lead time is out of range, or the file is not the month it should be.
    """
    return split(read_era5_uk(path), lead_time)


def split(field: HourlyField, lead_time: int) -> Splits:
    """Split the forecasts by day, as the module's table says.

    Parameters
    ----------
    field : HourlyField
        More than 26 days.
    lead_time : int
        Hours, 1 to 24.

    Returns
    -------
    Splits
        Start hours of days 1 to 24, of 25 and 26, and of the rest.

    Raises
    ------
    ValueError
        If the lead time is out of range, or the field ends before the first test forecast.
    """
    if not 1 <= lead_time <= HOURS_PER_DAY:
        raise ValueError(f"lead_time must be 1 to {HOURS_PER_DAY} hours, got {lead_time}")
    borders = [max(LAGS), FIRST_VALID_HOUR, FIRST_TEST_HOUR, len(field.times)]
    if borders[-1] <= FIRST_TEST_HOUR + lead_time:
        raise ValueError(f"the file must hold more than {FIRST_TEST_HOUR + lead_time} hours, got {len(field.times)}")
    starts = (range(first, end - lead_time) for first, end in pairwise(borders))
    return Splits(*(Era5UkDataset(field, part, lead_time) for part in starts))
