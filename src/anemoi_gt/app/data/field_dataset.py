"""Forecasts of fields from files: the data sets `xarray` and `anemoi`.

With L the lead time and K input steps, a sample of present time t is

    inputs     variables and forcings at t - (K - 1) L, ..., t - L, t, normalised; position, local hour, day of the year
    truth      variables and diagnostics at t + L
    reference  variables at t; 0 for diagnostics, which are no inputs

Samples whose times are not all in the data are left out. Present and truth of a sample are within its split; inputs may
reach back into the previous one, as in an operational forecast. Means and standard deviations are those of training
samples.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.app.data.forecast_dataset import ForecastDataset, Splits, Step
from anemoi_gt.app.data.readers import READERS
from anemoi_gt.data.nodes import Nodes, area_weights, row_weights
from anemoi_gt.option_checks import check_integer, check_positive

CACHE_BYTES = 4 * 2**30  # of fields read from files
STATISTICS_SAMPLES = 256  # training samples that the normalisation is estimated from
SHARES = (0.8, 0.9)  # where validation and test begin, if no times are given


def field_data(
    path: str | list[str],
    format: str = "xarray",
    variables: list[str] | None = None,
    forcings: list[str] | None = None,
    diagnostics: list[str] | None = None,
    lead_time: float = 6.0,
    input_steps: int = 2,
    train: list[str] | None = None,
    valid: list[str] | None = None,
    test: list[str] | None = None,
) -> Splits:
    """Return forecasts of the fields in files: training, validation and test samples.

    Raises FileNotFoundError, ImportError or ValueError if a file cannot be read; ValueError if a variable does not
    exist or is constant, or a split has no sample; FloatingPointError if a value is not finite.

    Parameters
    ----------
    path : str or list of str
        A file, the folder of a zarr, a pattern such as `data/*.nc`, or a list of these.
    format : {"xarray", "anemoi"}
        NetCDF, zarr and GRIB with coordinates, or a zarr of anemoi-datasets.
    variables : list of str, optional
        Inputs that are forecast. None: all that depend on time and are neither forcings nor diagnostics.
    forcings : list of str, optional
        Inputs that are not forecast, with or without time. None: all without time.
    diagnostics : list of str, optional
        Forecast, and no inputs, such as precipitation.
    lead_time : float
        Hours from the present to the truth, and between input steps.
    input_steps : int
        Number of input times, the present included.
    train, valid, test : list of str, optional
        First and last date of a split, such as [2019-03-01, 2019-03-24], both included; all three or none. None: the
        first 80% of the times, the next 10%, and the rest.
    """
    if format not in READERS:
        raise ValueError(f"format must be one of {', '.join(READERS)}, got {format!r}")
    check_integer("input_steps", input_steps)
    check_positive("lead_time", lead_time, ", in hours")
    fields = READERS[format](path)
    diagnostics = list(diagnostics or [])
    forcings = sorted(fields.static - {*(variables or []), *diagnostics}) if forcings is None else list(forcings)
    if variables is None:
        variables = [name for name in fields.readers if name not in {*fields.static, *forcings, *diagnostics}]
    names = [*variables, *diagnostics, *forcings]
    wrong = [f"{name} missing" for name in names if name not in fields.readers]
    wrong += sorted({f"{name} twice" for name in names if names.count(name) > 1})
    wrong += [f"{name} without time" for name in sorted(fields.static & {*variables, *diagnostics})]
    if wrong or not (variables or diagnostics):
        known, got = ", ".join(fields.readers), ", ".join(wrong) or "none"
        raise ValueError(f"variables must be among {known}, in one role each, got {got}")
    periods = split_times(fields.times, train, valid, test)
    parts = FieldDataset(fields, (list(variables), diagnostics, forcings), lead_time, input_steps, periods[0])
    return Splits(parts, *(parts.within(period) for period in periods[1:]))


def split_times(times: np.ndarray, *periods: Sequence[str] | None) -> list[np.ndarray]:
    """Return masks of the times [T] in each of three periods, each a first and last date, or all None.

    Raises ValueError if a period is not two dates, only some are given, or two overlap.
    """
    names = ("train", "valid", "test")
    if all(period is None for period in periods):
        bounds = [0, *(round(share * len(times)) for share in SHARES), len(times)]
        place = np.arange(len(times))
        return [(place >= first) & (place < end) for first, end in pairwise(bounds)]
    masks = []
    for name, period in zip(names, periods, strict=True):
        try:
            first, last = (np.datetime64(str(date)) for date in period)
        except (TypeError, ValueError):
            must = "must be a first and a last date, such as [2019-03-01, 2019-03-24], in all splits or in none"
            raise ValueError(f"{name} {must}, got {period}") from None
        masks.append((times >= first) & (times < last + 1))  # a date holds all its hours, a month all its days
    for (one, here), (other, there) in combinations(zip(names, masks, strict=True), 2):
        if (here & there).any():
            raise ValueError(f"{one} and {other} must not share times, got {(here & there).sum()} in both")
    return masks


class FieldDataset(ForecastDataset):
    """Forecasts of fields from the times of one period.

    `roles` are the lists of variables, diagnostics and forcings; the lead time is in hours; `period` [T] bool selects
    the times of present and truth. Raises ValueError if the period has no sample, or a forecast variable is constant;
    FloatingPointError, also when a sample is read, if a value is not finite.
    """

    def __init__(self, fields, roles, lead_time, input_steps, period):
        self.fields, self.lead_time, self.input_steps = fields, lead_time, input_steps
        self.nodes, self.weights = fields.nodes, cell_weights(fields.nodes)
        variables, diagnostics, forcings = roles
        self.variables = (*variables, *diagnostics)
        self.units = tuple(fields.units[name] for name in self.variables)
        self._names, self._prognostic = (*self.variables, *forcings), len(variables)
        now = [*range(len(variables)), *range(len(self.variables), len(self._names))]
        past = [column for column in now if self._names[column] not in fields.static]
        self._inputs = [*[past] * (input_steps - 1), now]
        self._dynamic = any(name not in fields.static for name in forcings)
        steps = [f" {-k * lead_time:g} h" if k else "" for k in range(input_steps - 1, -1, -1)]
        self.input_names = (
            *(f"{self._names[c]}{step}" for step, used in zip(steps, self._inputs, strict=True) for c in used),
            *(f"{f} {x}" for x in ("latitude", "longitude", "local time", "day of the year") for f in ("sin", "cos")),
        )
        self._step = np.timedelta64(round(lead_time * 3_600_000), "ms")
        self._read = lru_cache(max(1, CACHE_BYTES // (4 * len(self.nodes) * len(self._names))))(self._read_file)
        self.starts = self._samples(period)
        lat, lon = torch.from_numpy(self.nodes.radians).T
        position = torch.stack([lat.sin(), lat.cos(), lon.sin(), lon.cos()], dim=1)
        self._position = ((position - position.mean(dim=0)) / position.std(dim=0).clamp(min=1e-6)).float()
        self._estimate()

    def within(self, period: np.ndarray) -> "FieldDataset":
        """Return the samples of another period [T] bool, with the normalisation of this one."""
        other = copy.copy(self)
        other.starts = self._samples(period)
        return other

    def __len__(self):
        return len(self.starts)

    def inputs(self, i: int) -> Tensor:
        return self._channels(i, [])

    def present(self, i: int) -> Tensor:
        return self._at(i, 0)[:, : len(self.variables)]

    def reference(self, i: int) -> Tensor:
        """Return the variables at the start, 0 for diagnostics, [N, V]."""
        return self._without_diagnostics(self.present(i))

    def truth(self, i: int) -> Tensor:
        return self._at(i, 1)[:, : len(self.variables)]

    def advance(self, i: int, forecasts: Sequence[Tensor]) -> Step:
        """Return the step after these forecasts. Raises ValueError if the data lack forcings for it."""
        reference = self._without_diagnostics(forecasts[-1] if forecasts else self.present(i))
        end = self._index(i, len(forecasts) + 1)
        truth = None if end is None else self._read(end)[:, : len(self.variables)]
        return Step(self._channels(i, forecasts), reference, truth)

    def title(self, i: int) -> str:
        """Return the start of the forecast and its lead time."""
        start = np.datetime_as_string(self.fields.times[self.starts[i]], unit="m").replace("T", " ")
        return f"{start} UTC + {self.lead_time:g} h"

    def baselines(self, step: int | None = None):
        """Return persistence, and the mean of the training samples at each node."""
        return super().baselines(step) | {"training mean": lambda i: self._climate}

    def _samples(self, period):
        """Return the indices of the present times in a period whose inputs and truth exist; raise if there is none."""
        offsets = range(1 - self.input_steps, 2)
        at = {m: _find_times(self.fields.times, self.fields.times + m * self._step) for m in offsets}
        complete = np.all([at[m] >= 0 for m in offsets], axis=0) & period & period[at[1]]
        if not complete.any():
            raise ValueError(
                f"each split must have {self.input_steps} inputs and a truth {self.lead_time:g} h apart, got none in "
                f"{period.sum()} times: change lead_time, input_steps, or the dates of the splits"
            )
        return np.flatnonzero(complete)

    def _index(self, i, step):
        """Return the index of the time `step` lead times after the start of sample i, None if it is not in the data."""
        found = _find_times(self.fields.times, self.fields.times[self.starts[i], None] + step * self._step)[0]
        return None if found < 0 else int(found)

    def _at(self, i, step):
        return self._read(self._index(i, step))

    def _read_file(self, t):
        """Return all fields at a time, [N, variables and forcings]; raise FloatingPointError if one is not finite."""
        values = np.stack([self.fields.readers[name](t) for name in self._names], axis=1)
        finite = np.isfinite(values).all(axis=0)
        if not finite.all():
            name = self._names[int(np.argmin(finite))]
            at = np.datetime_as_string(self.fields.times[t], unit="m")
            raise FloatingPointError(f"{name} must be finite, got NaN or infinity at {at}: fill it, or leave it out")
        return torch.from_numpy(values)

    def _channels(self, i, forecasts):
        """Return the input channels after some forecasts."""
        now, times = len(forecasts), []
        for step, columns in enumerate(self._inputs, start=now - self.input_steps + 1):
            at = step if step <= 0 or self._dynamic else 0  # forcings without time are those of the start
            if self._index(i, at) is None:
                raise ValueError(f"a rollout needs the forcings of every step, the data end before step {step}")
            fields = self._at(i, at)
            if step > 0:
                fields = torch.cat([forecasts[step - 1], fields[:, len(self.variables) :]], dim=1)
            times.append(((fields - self._mean) / self._std)[:, columns])
        return torch.cat([*times, self._position, self._clock(i, now)], dim=1)

    def _clock(self, i, step):
        """Return sine and cosine of the local solar time and of the day of the year, [N, 4]."""
        time = self.fields.times[self.starts[i]] + step * self._step
        day = 2 * np.pi * ((time - time.astype("datetime64[D]")) / np.timedelta64(1, "D"))
        year = 2 * np.pi * ((time - time.astype("datetime64[Y]")) / np.timedelta64(31_556_952, "s"))
        local = day + self.nodes.radians[:, 1]
        angles = np.stack([f(angle) for angle in (local, np.full_like(local, year)) for f in (np.sin, np.cos)], axis=1)
        return torch.from_numpy(angles).float()

    def _without_diagnostics(self, state):
        return torch.cat([state[:, : self._prognostic], torch.zeros_like(state[:, self._prognostic :])], dim=1)

    def _estimate(self):
        """Estimate the normalisation, and the mean at each node, from samples of this data set."""
        chosen = np.unique(np.linspace(0, len(self) - 1, STATISTICS_SAMPLES).round().astype(int)).tolist()
        mean, self._mean, std = _moments((self._at(i, 0) for i in chosen), self.weights)
        self._std = torch.where(std > 0, std, 1.0)
        changes = (self.truth(i) - self.reference(i) for i in chosen)
        _, self.change_mean, self.change_std = _moments(changes, self.weights)
        self._climate = mean[:, : len(self.variables)]
        if constant := [name for name, std in zip(self.variables, self.change_std, strict=True) if not std > 0]:
            raise ValueError(f"variables must change within {self.lead_time:g} h, {', '.join(constant)} does not")


def _moments(states: Iterable[Tensor], weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of states [N, V] at each node, and weighted mean and deviation [V]; rounding is no deviation."""
    count, total, squares, weights = 0, 0.0, 0.0, weights[:, None].double()
    for state in states:
        count, total, squares = count + 1, total + state.double(), squares + (state.double().square() * weights).mean(0)
    mean, square = total / count, squares / count
    overall = (mean * weights).mean(dim=0)
    variance = square - overall.square()
    return mean.float(), overall.float(), torch.where(variance > 1e-12 * square, variance, 0.0).sqrt().float()


def cell_weights(nodes: Nodes) -> Tensor:
    """Return area weights of mean 1, [N] float32.

    On a grid of latitude rows, regular or reduced, that is the area of a row's band, shared by its nodes; on other
    global grids the area of Voronoi cells; on other regional grids 1.
    """
    if 2 <= len(np.unique(nodes.lat.round(4))) <= len(nodes) / 2:
        weights = row_weights(nodes)
    else:
        weights = area_weights(nodes) if np.ptp(nodes.lat) > 90 else np.ones(len(nodes))
    return torch.from_numpy(weights).float()


def _find_times(times: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the indices of the wanted times, -1 for those that are not there."""
    place = np.searchsorted(times, wanted).clip(max=len(times) - 1)
    return np.where(times[place] == wanted, place, -1)
