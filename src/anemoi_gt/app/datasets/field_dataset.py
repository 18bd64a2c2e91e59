"""Forecasts of fields from files: the data sets `xarray` and `anemoi`.

With lead time L and K input steps, a sample that starts at time t has

    inputs     variables and forcings at t - (K - 1) L, ..., t - L, t, normalised; position,
               local solar time, day of the year
    truth      variables and diagnostics at t + L
    reference  variables at t; 0 for diagnostics, which are not inputs

Samples are left out if any of their times is missing in the data. Present and truth of a sample are
within its split; inputs may reach back into the previous split, as in an operational forecast.
Means and standard deviations come from the training samples, or from the checkpoint of a trained
model. Each member of an ensemble has its own samples.

A variable may have no values at the same points at all times, such as a sea temperature over land.
Physical fields are NaN there, and inputs are filled with the mean; these points have no weight in
statistics, loss and scores.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.app.datasets.fields import (
    Fields,
    Key,
    Series,
    arrange,
    group,
    is_static,
    minutes,
    on_largest_grid,
    position,
)
from anemoi_gt.app.datasets.forecast_dataset import (
    ForecastDataset,
    Sample,
    Splits,
    Step,
    find_start,
)
from anemoi_gt.app.datasets.physical import PhysicalInputs, day_angle, year_angle
from anemoi_gt.app.datasets.readers import READERS
from anemoi_gt.app.datasets.schema import DataSchema, Period
from anemoi_gt.data.nodes import Nodes, area_weights, row_weights
from anemoi_gt.option_checks import check_integer, check_positive

log = logging.getLogger(__name__)

CACHE_BYTES = 4 * 2**30  # size of the cache of fields from files
STATISTICS_SAMPLES = 256  # number of training samples from which statistics are estimated
FAR = 10.0  # standard deviations beyond the range of the training samples, of a warning
UNKNOWN_EXTREMES = 10.0  # standard deviations from the mean, where a checkpoint has no extremes
STATISTICS = ("mean", "deviation", "smallest", "largest", "missing")  # columns of the table
# Values that are written for missing ones: of WMO and GIS, and netCDF's default
FILL_VALUES = {-9999.0, -32767.0, -32768.0, *np.array([1e20, -1e20, 9.969209968386869e36], "f4")}
QUARTILE_NODES = 20_000  # number of nodes from which quartiles are estimated, about
FAR_OUT = 1000.0  # interquartile ranges from the quartiles of an extreme that may be a fill value
SHARES = (0.8, 0.9)  # fractions of the times at which validation and test begin by default


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
    *,
    schema: DataSchema | None = None,
) -> Splits:
    """Load training, validation and test samples from files.

    Raises FileNotFoundError, ImportError or ValueError if a file cannot be read; ValueError if a
    variable does not exist or is constant, a split has no sample, or the data do not match
    `schema`; FloatingPointError if a value is not finite.

    Parameters
    ----------
    path : str or list of str
        A file, the folder of a zarr, a pattern such as `data/*.nc`, or a list of these.
    format : {"xarray", "anemoi"}
        NetCDF, zarr and GRIB with coordinates, or a zarr of anemoi-datasets.
    variables : list of str, optional
        Inputs that are forecast. By default, all that change with time and are neither forcings nor
        diagnostics.
    forcings : list of str, optional
        Inputs that are not forecast, with or without time. By default, all that do not change with
        time.
    diagnostics : list of str, optional
        Variables that are forecast but are not inputs, such as precipitation.
    lead_time : float
        Hours from the present to the truth, and between input steps.
    input_steps : int
        Number of input times, including the present.
    train, valid, test : list of str, optional
        First and last date of a split, such as [2019-03-01, 2019-03-24], both inclusive; all three
        or none. By default, the first 80% of the times, the next 10%, and the rest.
    schema : DataSchema, optional
        Schema of a trained model, which determines names, order and normalisation. Splits may then
        be empty.
    """
    if format not in READERS:
        raise ValueError(f"format must be one of {', '.join(READERS)}, got {format!r}")
    check_integer("input_steps", input_steps)
    check_positive("lead_time", lead_time, ", in hours")
    chosen = ChosenRoles(variables, diagnostics, forcings)
    grouped = group(READERS[format](path))
    if schema is None:
        fields = arrange(select(grouped, chosen))
    else:
        fields = arrange(find_variables(grouped, chosen, schema))
    require_times(fields)
    check_spacing(fields)
    train_period, valid_period, test_period = split_times(fields.times, train, valid, test)
    if schema is not None:
        fields, roles = roles_of_schema(fields, chosen, schema)
        data = FieldDataset(fields, roles, lead_time, input_steps)
        schema.check_same(data.schema())
        data = data.like(schema).within(train_period).as_training_samples()
        return Splits(data, data.within(valid_period), data.within(test_period))
    fields, roles = choose_roles(fields, chosen, train_period)
    data = FieldDataset(fields, roles, lead_time, input_steps).within(train_period)
    data.require_samples()
    data = data.with_own_normalisation().as_training_samples()
    log_short_intervals(data)
    splits = Splits(data, data.within(valid_period), data.within(test_period))
    for split in splits:
        split.require_samples()
    return splits


class ChosenRoles(NamedTuple):
    """The roles that the user chose, as in `Roles`, or None."""

    variables: Sequence[str] | None
    diagnostics: Sequence[str] | None
    forcings: Sequence[str] | None


class Roles(NamedTuple):
    """Names of prognostic variables, diagnostics (outputs only) and forcings (inputs only).

    Channels are in the order of the names.
    """

    variables: tuple[str, ...]
    diagnostics: tuple[str, ...]
    forcings: tuple[str, ...]


def choose_roles(fields: Fields, chosen: ChosenRoles, period: np.ndarray) -> tuple[Fields, Roles]:
    """Return the roles of the variables in files, and the fields with constants marked as static.

    A variable with a time dimension that never changes in a period [T] bool, such as `lsm` and `z`
    in files of the Climate Data Store, is a constant, like one without time. Raises ValueError if a
    name does not exist or has two roles.
    """
    variables = chosen.variables
    diagnostics = list(chosen.diagnostics or [])
    forcings = chosen.forcings
    forecast = [*(variables or []), *diagnostics]
    check_roles(fields, forecast, list(forcings or []))
    candidates = list(fields.readers) if variables is None else list(forcings or [])
    candidates = [name for name in candidates if name not in forecast]
    constants = find_constants(fields, candidates, period)
    if constants:
        names = ", ".join(constants)
        log.info("inputs that never change, taken as forcings without time: %s", names)
        fields = fields.with_static(constants)
    if forcings is None:
        forcings = sorted(fields.static - set(forecast))
    if variables is None:
        others = {*fields.static, *forcings, *diagnostics}
        variables = [name for name in fields.readers if name not in others]
    check_roles(fields, [*variables, *diagnostics], list(forcings))
    if not variables and not diagnostics:
        raise ValueError(
            f"variables must be among {', '.join(fields.readers)}, in one role each, got none that "
            "changes with time"
        )
    return fields, Roles(tuple(variables), tuple(diagnostics), tuple(forcings))


def select(grouped: Mapping[str, list[Series]], chosen: ChosenRoles) -> Mapping[str, list[Series]]:
    """Return the variables that the chosen roles can take; the others need not fit them.

    Raises ValueError if a name does not exist.
    """
    if chosen.variables is None:
        return on_largest_grid(grouped)
    forecast = [*chosen.variables, *(chosen.diagnostics or [])]
    if not forecast:
        raise ValueError(
            f"variables must be among {', '.join(grouped)}, got none, and no diagnostics: leave "
            "data.variables out for all that change with time"
        )
    names = [*forecast, *(chosen.forcings or [])]
    check_names(names, forecast, grouped)
    wanted = {name: grouped[name] for name in grouped if name in names}
    if chosen.forcings is None:  # those without time, on the same grid
        grid = next(iter(wanted.values()))[0].grid
        for name, series in grouped.items():
            if is_static(series) and grid.same(series[0].grid):
                wanted[name] = series
    return wanted


def check_names(
    names: Sequence[str], forecast: Sequence[str], grouped: Mapping[str, list[Series]]
) -> None:
    """Raise ValueError unless names are in the files, once each, and forecast ones have a time."""
    wrong = [f"{name} missing" for name in names if name not in grouped]
    wrong += sorted({f"{name} twice" for name in names if names.count(name) > 1})
    static = [name for name in forecast if name in grouped and is_static(grouped[name])]
    wrong += [f"{name} without time" for name in static]
    if wrong:
        raise ValueError(
            f"variables must be among {', '.join(grouped)}, in one role each, got "
            f"{', '.join(wrong)}"
        )


def find_variables(
    grouped: Mapping[str, list[Series]], chosen: ChosenRoles, schema: DataSchema
) -> dict[str, list[Series]]:
    """Return the variables of a trained model, by its names.

    They are searched by their keys, or by their names if the checkpoint has no keys. Raises
    ValueError if the data lack one.
    """
    names = [*schema.variables, *schema.forcings]
    found: dict[str, list[Series]] = {}
    for name in names:
        key = schema.keys.get(name)
        matching = [n for n, same in grouped.items() if key and key.matches(same[0].key)]
        if len(matching) == 1:
            found[name] = grouped[matching[0]]
        elif name in grouped:
            found[name] = grouped[name]
    lacking = [_with_key(name, schema.keys.get(name)) for name in names if name not in found]
    if lacking:
        have = ", ".join(_with_key(name, same[0].key) for name, same in grouped.items())
        sources = dict.fromkeys(one.source for same in grouped.values() for one in same)
        raise ValueError(
            f"the data must hold the variables of the checkpoint, {', '.join(names)}; "
            f"{', '.join(sources)} lacks {', '.join(lacking)}, and has {have}"
        )
    # Variables that the checkpoint lacks are refused by `DataSchema.check_same`.
    others = [*(chosen.variables or []), *(chosen.diagnostics or []), *(chosen.forcings or [])]
    others = [name for name in dict.fromkeys(others) if name not in found]
    check_names(others, [], grouped)
    return found | {name: grouped[name] for name in others}


def _with_key(name: str, key: Key | None) -> str:
    """Return the name of a variable, with level and interval if they are known."""
    text = "" if key is None else key.text()
    return f"{name} ({text})" if text else name


def require_times(fields: Fields) -> None:
    """Raise ValueError unless a variable has times."""
    if len(fields.times) == 0:
        raise ValueError(
            "files must have a time coordinate of dates in the standard calendar, found none for "
            f"{', '.join(fields.readers)} in {fields.source}"
        )


def check_spacing(fields: Fields) -> None:
    """Raise ValueError if the times are calendar months or years, whose lengths vary."""
    days = np.diff(fields.times) / np.timedelta64(1, "D")
    if len(days) == 0 or days.min() == days.max():
        return
    for name, shortest, longest in (("months", 28, 31), ("years", 365, 366)):
        if days.min() >= shortest and days.max() <= longest:
            raise ValueError(
                f"times must be a constant step apart, those of {fields.source} are {name}, "
                f"{days.min():g} to {days.max():g} days apart: forecasts of {name} are not "
                "supported; take means of a constant number of days, as by resample(time='30D')"
            )


def log_short_intervals(data: "FieldDataset") -> None:
    """Name the outputs that are sums or means of less than the lead time, in the log."""
    for name in data.variables:
        interval = data.keys[name].interval if name in data.keys else ""
        length = re.match(r"([\d.]+)(h|m)\b", interval)
        if length and float(length[1]) / (60 if length[2] == "m" else 1) < data.lead_time:
            log.info(
                "%s is of %s, and the lead time is %g h: forecasts are of the last %s of it",
                *(name, interval, data.lead_time, interval.split(" ")[0]),
            )


def roles_of_schema(
    fields: Fields, chosen: ChosenRoles, schema: DataSchema
) -> tuple[Fields, Roles]:
    """Return the roles of variables, by default a trained model's, and fields with constants.

    The constants of the model are marked as static.
    """
    diagnostics = schema.diagnostics if chosen.diagnostics is None else chosen.diagnostics
    forcings = schema.forcings if chosen.forcings is None else chosen.forcings
    variables = chosen.variables
    if variables is None:
        variables = [name for name in schema.variables if name not in schema.diagnostics]
    constants = [name for name in schema.constants if name not in fields.static]
    roles = Roles(tuple(variables), tuple(diagnostics), tuple(forcings))
    return fields.with_static(constants), roles


def check_roles(fields: Fields, forecast: list[str], forcings: list[str]) -> None:
    """Raise ValueError unless names exist, have one role each, and forecast ones have a time."""
    names = [*forecast, *forcings]
    wrong = [f"{name} missing" for name in names if name not in fields.readers]
    wrong += sorted({f"{name} twice" for name in names if names.count(name) > 1})
    wrong += [f"{name} without time" for name in sorted(fields.static & set(forecast))]
    if wrong:
        known = ", ".join(fields.readers)
        raise ValueError(
            f"variables must be among {known}, in one role each, got {', '.join(wrong)}"
        )


def find_constants(fields: Fields, names: Iterable[str], period: np.ndarray) -> list[str]:
    """Return the variables with time that are constant at up to 256 times of a period [T]."""
    times = np.flatnonzero(period)
    if len(times) < 2:
        return []
    times = times[evenly_spaced(len(times), STATISTICS_SAMPLES)]
    constants = []
    for name in names:
        if name in fields.static:
            continue
        read = fields.readers[name]
        first = read(int(times[0]))
        if all(np.array_equal(read(int(t)), first, equal_nan=True) for t in times[1:]):
            constants.append(name)
    return constants


def evenly_spaced(size: int, count: int) -> np.ndarray:
    """Return up to `count` evenly spaced indices below `size`, including the first and last."""
    return np.unique(np.linspace(0, size - 1, count).round().astype(int))


def split_times(times: np.ndarray, *periods: Sequence[str] | None) -> list[np.ndarray]:
    """Return masks of the times [T] in three periods, each a first and a last date, or all None.

    Raises ValueError if a period is not two dates, only some are set, or two overlap.
    """
    names = ("train", "valid", "test")
    if all(period is None for period in periods):
        bounds = [0, *(round(share * len(times)) for share in SHARES), len(times)]
        index = np.arange(len(times))
        return [(index >= first) & (index < end) for first, end in pairwise(bounds)]
    masks = []
    for name, period in zip(names, periods, strict=True):
        try:
            first, last = (np.datetime64(str(date)) for date in period or ())
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} must be a first and a last date, such as [2019-03-01, 2019-03-24], in all "
                f"splits or in none, got {period}"
            ) from None
        # `last + 1` is the next unit, so a date includes all its hours, a month all its days
        masks.append((times >= first) & (times < last + 1))
    pairs = combinations(zip(names, masks, strict=True), 2)
    for (name, mask), (other_name, other_mask) in pairs:
        num_shared = (mask & other_mask).sum()
        if num_shared > 0:
            raise ValueError(
                f"{name} and {other_name} must not share times, got {num_shared} in both"
            )
    return masks


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of the training samples, by which inputs and the change are normalised.

    Parameters
    ----------
    mean, std, smallest, largest : Tensor
        [variables and forcings].
    change_mean, change_std : Tensor
        [V], of the change in a lead time.
    missing : Tensor, optional
        [N, variables and forcings] bool, where a variable has no values at any time; None if all
        variables have values everywhere.
    """

    mean: Tensor
    std: Tensor
    smallest: Tensor
    largest: Tensor
    change_mean: Tensor
    change_std: Tensor
    missing: Tensor | None = None


class FieldDataset(ForecastDataset):
    """Forecasts of fields; it has no samples until `within` or `starting_at` selects some.

    The lead time is in hours. Reading a sample with values that are not finite raises
    FloatingPointError.
    """

    time_encoding = "sine and cosine of local solar time and of the day of the year"
    reference_name = "the present, 0 for diagnostics"
    _training: "FieldDataset | None" = None
    _mean_state: Tensor | None = None
    _range: "_TrainingRange | None" = None  # of a trained model

    def __init__(self, fields: Fields, roles: Roles, lead_time: float, input_steps: int):
        self.fields = fields
        self.lead_time = lead_time
        self.input_steps = input_steps
        self.nodes = fields.nodes
        self.grid = fields.grid
        self.members = fields.members
        self.diagnostics = roles.diagnostics
        self.forcings = roles.forcings
        self.variables = (*roles.variables, *roles.diagnostics)
        self.units = tuple(fields.units[name] for name in self.variables)
        self.forcing_units = {name: fields.units[name] for name in roles.forcings}
        self.constants = tuple(name for name in roles.forcings if name in fields.static)
        self.attributes = fields.attributes
        self._names = (*self.variables, *roles.forcings)
        self._prognostic = len(roles.variables)
        self.keys = {name: fields.keys[name] for name in self._names if name in fields.keys}
        self._dynamic = any(name not in fields.static for name in roles.forcings)
        # columns of `_names` that are inputs, for each input time; static ones only at the present
        present = [*range(self._prognostic), *range(len(self.variables), len(self._names))]
        past = [column for column in present if self._names[column] not in fields.static]
        self._inputs = [*[past] * (input_steps - 1), present]
        input_names = []
        for step, columns in enumerate(self._inputs, start=1 - input_steps):
            suffix = f" {step * lead_time:g} h" if step < 0 else ""
            input_names += [f"{self._names[column]}{suffix}" for column in columns]
        for coordinate in ("latitude", "longitude", "local time", "day of the year"):
            input_names += [f"sin {coordinate}", f"cos {coordinate}"]
        self.input_names = tuple(input_names)
        # NumPy's durations are integers, and a lead time may be a fraction of an hour
        self._step = np.timedelta64(round(lead_time * 3_600_000), "ms")
        state_bytes = 4 * len(self.nodes) * len(self._names)
        # of the instance, so that copies for other periods share it
        self._read = lru_cache(max(1, CACHE_BYTES // state_bytes))(self._read_file)
        lat, lon = torch.from_numpy(self.nodes.radians).T
        position = torch.stack([lat.sin(), lat.cos(), lon.sin(), lon.cos()], dim=1)
        # clamped: along one parallel, the latitude has no spread
        position = (position - position.mean(dim=0)) / position.std(dim=0).clamp(min=1e-6)
        self._position = position.float()
        self.starts = np.empty(0, dtype=int)  # states, `member * T + time`
        self._node_weights = cell_weights(fields.nodes)
        zeros, ones = torch.zeros(len(self._names)), torch.ones(len(self._names))
        num_variables = len(self.variables)
        self._set(
            Statistics(zeros, ones, zeros, zeros, zeros[:num_variables], ones[:num_variables])
        )

    def _set(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.change_mean = statistics.change_mean
        self.change_std = statistics.change_std
        self.weights = self._node_weights
        if statistics.missing is not None:
            missing = statistics.missing[:, : len(self.variables)]
            if missing.any():
                weights = self._node_weights[:, None] * ~missing
                self.weights = weights / weights.mean(dim=0)

    def _copy(self, statistics: Statistics | None = None, **changes: Any) -> "FieldDataset":
        """Return the same fields with other samples or statistics."""
        other = copy.copy(self)
        vars(other).update(changes)
        if statistics is not None:
            other._set(statistics)
        return other

    def within(self, period: np.ndarray) -> "FieldDataset":
        """Return the samples of a period [T] bool that have inputs and truth.

        The normalisation stays the same.
        """
        times = self.fields.times
        after = self._find(1)
        has_all = self._has_inputs() & (after >= 0) & period & period[after]
        expected = np.zeros(0, dtype=bool)
        if period.any():  # those that a record without gaps would have
            first_start = times[0] + (self.input_steps - 1) * self._step
            last_start = times[period][-1] - self._step
            expected = period & (times >= first_start) & (times <= last_start)
        left_out = int(expected.sum() - has_all.sum()) * len(self.members)
        return self._starting(np.flatnonzero(has_all))._copy(left_out=left_out)

    def starting_at(self, start: str) -> "FieldDataset":
        """Return the samples, one per member, that start at a date or the "latest" time.

        Raises ValueError if the data do not have this time or all its inputs.
        """
        has_inputs = self._has_inputs()
        if not has_inputs.any():
            raise ValueError(self._no_samples_message())
        if start == "latest":
            return self._starting(np.flatnonzero(has_inputs)[-1:])
        index = find_start(self.fields.times, start)
        if not has_inputs[index]:
            raise ValueError(
                f"start must have {self.input_steps} input times in the data, {self.lead_time:g} h "
                f"apart, {start} does not have all of them"
            )
        return self._starting(np.array([index]))

    def require_samples(self) -> None:
        """Raise ValueError if there is no sample; the message has the spacing of the times."""
        if len(self) == 0:
            raise ValueError(self._no_samples_message())

    def with_own_normalisation(self) -> "FieldDataset":
        """Return the same samples, normalised by their own means and deviations.

        Raises ValueError if a variable does not change, has no values, or has values that look like
        an undeclared fill value; FloatingPointError if points without values change.
        """
        samples = self._statistics_samples()
        states = [int(self.starts[i]) for i in samples]
        seen = _Extremes(len(self.nodes), len(self._names))
        moments = _moments(seen.watch(self._read(t) for t in states), self._node_weights)
        _, mean, std = moments
        log.info("%s", self._table(moments, seen))
        missing = self._find_missing(seen)
        self._check_fill_values(states, seen)
        other = self._copy(replace(self.statistics, missing=missing))
        least_growth = torch.full((len(self.variables),), torch.inf)

        def changes() -> Iterator[Tensor]:
            nonlocal least_growth
            for i in samples:
                # these raise, with name and date, if points without values change
                present, truth = other.present(i), other.truth(i)
                growth = (truth - present).nan_to_num(nan=torch.inf).amin(dim=0)
                least_growth = torch.minimum(least_growth, growth)
                yield truth - other._without_diagnostics(present)

        _, change_mean, change_std = _moments(changes(), self._node_weights)
        constant = []
        for name, spread in zip(self.variables, change_std, strict=True):
            if not spread > 0:
                constant.append(name)
        if constant:
            names = ",".join(constant)
            raise ValueError(
                f"variables must change within {self.lead_time:g} h, {names} does not: leave it "
                f"out of data.variables, or take it as an input only, data.forcings=[{names}]"
            )
        for v, name in enumerate(self.variables):
            if least_growth[v] >= 0:
                log.warning(
                    "%s never decreases at any point, as a sum since the start of a run does: take "
                    "its differences in time, if it is one",
                    name,
                )
        std = torch.where(std > 0, std, 1.0)
        extremes = (seen.smallest, seen.largest)
        return self._copy(Statistics(mean, std, *extremes, change_mean, change_std, missing))

    def _check_fill_values(self, states: Sequence[int], seen: "_Extremes") -> None:
        """Raise ValueError if an extreme of a variable looks like an undeclared fill value.

        It is one of `FILL_VALUES`, or further from the quartiles than `FAR_OUT` times their
        difference, while all other values are within a hundredth of its distance.
        """
        every = len(self.nodes) // QUARTILE_NODES + 1
        some = torch.cat([self._read(t)[::every] for t in states[:: len(states) // 8 + 1]])
        values = torch.where(torch.isfinite(some), some, torch.nan).double().numpy()
        for v in range(len(self._names)):
            if np.isnan(values[:, v]).all():  # missing at these nodes
                continue
            quartiles = np.nanquantile(values[:, v], [0.25, 0.75])
            extremes = (seen.smallest[v].item(), seen.largest[v].item())
            for extreme, quartile in zip(extremes, quartiles, strict=True):
                distance = abs(extreme - quartile)
                is_far = 0 < FAR_OUT * (quartiles[1] - quartiles[0]) < distance
                if extreme in FILL_VALUES or (
                    is_far and self._is_alone(v, states, extreme, quartile)
                ):
                    t, n = self._first(v, states, extreme)
                    time = minutes(self.fields.times[t % len(self.fields.times)])
                    raise ValueError(
                        f"{self._names[v]} must have its fill value declared, got {extreme:g} at "
                        f"{position(self.nodes, n)}, {time}, where half of the values are from "
                        f"{quartiles[0]:g} to {quartiles[1]:g}: set its attribute _FillValue in "
                        f"the file, or leave {self._names[v]} out"
                    )

    def _is_alone(self, v: int, states: Sequence[int], extreme: float, quartile: float) -> bool:
        """Return whether all other values are within a hundredth of the distance of an extreme."""
        for t in states:
            values = self._read(t)[:, v].double()
            others = values[torch.isfinite(values) & (values != extreme)]
            if ((others - quartile).abs() > abs(extreme - quartile) / 100).any():
                return False
        return True

    def _first(self, v: int, states: Sequence[int], value: float) -> tuple[int, int]:
        """Return the first state and node that have a value."""
        for t in states:
            found = torch.nonzero(self._read(t)[:, v] == value)[:, 0].tolist()
            if found:
                return t, found[0]
        raise LookupError(f"{value} must be a value of {self._names[v]}")

    def _find_missing(self, seen: "_Extremes") -> Tensor | None:
        """Return the points without values at any time, [N, names], or None.

        Raises ValueError if a variable has no values at all.
        """
        if not seen.always_missing.any():
            return None
        for v, name in enumerate(self._names):
            count = int(seen.always_missing[:, v].sum())
            if count == len(self.nodes):
                raise ValueError(
                    f"{name} must have values, got none at any point: leave it out of "
                    "data.variables and data.forcings"
                )
            if count:
                log.info(
                    "%s has no values at %d of %d points, as over land: they are filled with its "
                    "mean, and have no weight in statistics, loss and scores",
                    *(name, count, len(self.nodes)),
                )
        return seen.always_missing

    def as_training_samples(self) -> "FieldDataset":
        """Return the same samples; their mean is a baseline, also for other periods."""
        return self._copy(_training=self)

    def normalisation(self) -> dict[str, Tensor]:
        """Return means and standard deviations of variables and forcings, and of the change."""
        names = ("mean", "std", "smallest", "largest", "change_mean", "change_std")
        return {name: getattr(self.statistics, name) for name in names}

    def normalised_by(self, normalisation: Mapping[str, Tensor]) -> "FieldDataset":
        """Return the same samples, normalised by the statistics of `normalisation`."""
        values = {name: tensor.float() for name, tensor in normalisation.items()}
        if "smallest" not in values:  # checkpoints of 0.3.0 have no extremes
            spread = UNKNOWN_EXTREMES * values["std"]
            values |= {"smallest": values["mean"] - spread, "largest": values["mean"] + spread}
        statistics = Statistics(**values, missing=self.statistics.missing)
        extremes = _TrainingRange(statistics.smallest, statistics.largest, statistics.std)
        return self._copy(statistics, _range=extremes)

    def like(self, schema: DataSchema) -> "FieldDataset":
        """Return the same samples with statistics, missing points and periods of a model."""
        missing = None
        if schema.missing:
            missing = torch.zeros(len(self.nodes), len(self._names), dtype=torch.bool)
            for name, points in schema.missing.items():
                missing[:, self._names.index(name)] = torch.from_numpy(points)
        other = self._copy(replace(self.statistics, missing=missing))
        return other.normalised_by(schema.normalisation)._copy(trained_periods=schema.periods)

    def missing_points(self) -> dict[str, np.ndarray]:
        """Return the variables without values at some points, and these points, [N] bool."""
        missing = self.statistics.missing
        if missing is None:
            return {}
        columns = {name: missing[:, v].numpy() for v, name in enumerate(self._names)}
        return {name: points for name, points in columns.items() if points.any()}

    def periods(self) -> tuple[Period, ...]:
        """Return first and last start of the samples of each member, after those of the model."""
        own = []
        for m, label in enumerate(self.members):
            starts = self.starts[self.starts // len(self.fields.times) == m]
            if len(starts):
                times = self.fields.times[starts % len(self.fields.times)]
                own.append((label, minutes(times[0]), minutes(times[-1])))
        return tuple(dict.fromkeys((*self.trained_periods, *own)))

    def physical_inputs(self) -> "FieldInputs":
        """Return the module that converts physical values to input channels."""
        columns = [column for step in self._inputs for column in step]
        first_present = len(columns) - len(self._inputs[-1])
        units = {**dict(zip(self.variables, self.units, strict=True)), **self.forcing_units}
        return FieldInputs(
            names=self.input_names[: len(columns)],
            units=tuple(units[self._names[column]] for column in columns),
            mean=self.statistics.mean[columns],
            std=self.statistics.std[columns],
            missing=self._missing()[:, columns],
            position=self._position,
            longitudes=torch.from_numpy(self.nodes.radians[:, 1].copy()),
            present=slice(first_present, first_present + self._prognostic),
            diagnostics=len(self.diagnostics),
        )

    def physical_sample(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the physical input channels of sample i, [N, P], and its start time.

        Points without values have the mean.
        """
        steps = enumerate(self._inputs, start=1 - self.input_steps)
        fields = torch.cat([self._filled(i, step)[:, columns] for step, columns in steps], dim=1)
        seconds = self.start_time(i).astype("datetime64[ms]").astype("int64") / 1000
        return fields, torch.tensor(seconds, dtype=torch.float64)

    def start_time(self, i: int) -> np.datetime64:
        """Return the start time of sample i."""
        return self.fields.times[self.starts[i] % len(self.fields.times)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Sample:
        """Return the normalised sample i; the target is 0 at points without values."""
        sample = super().__getitem__(i)
        if self.statistics.missing is None:
            return sample
        missing = self.statistics.missing[:, : len(self.variables)]
        return Sample(sample.inputs, sample.target.masked_fill(missing, 0.0))

    def inputs(self, i: int) -> Tensor:
        return self._channels(i, [])

    def present(self, i: int) -> Tensor:
        return self._at(i, 0)[:, : len(self.variables)]

    def reference(self, i: int) -> Tensor:
        """Return the variables at the start, with 0 for diagnostics, [N, V]."""
        return self._without_diagnostics(self.present(i))

    def truth(self, i: int) -> Tensor:
        return self._at(i, 1)[:, : len(self.variables)]

    def advance(self, i: int, forecasts: Sequence[Tensor]) -> Step:
        """Return the step after these forecasts. Raises ValueError if forcings are missing."""
        state = forecasts[-1] if forecasts else self.present(i)
        end = self._index(i, len(forecasts) + 1)
        truth = None if end is None else self._state(end)[:, : len(self.variables)]
        return Step(self._channels(i, forecasts), self._without_diagnostics(state), truth)

    def title(self, i: int) -> str:
        """Return the start of the forecast, its lead time, and its member."""
        title = f"{minutes(self.start_time(i))} UTC + {self.lead_time:g} h"
        # a single 0 is what files without an ensemble have
        return title if self.members in (("",), ("0",)) else f"{title}, member {self.member(i)}"

    def member(self, i: int) -> str:
        """Return the label of the ensemble member of sample i, "" if it has none."""
        return self.members[self.starts[i] // len(self.fields.times)]

    def baselines(self, step: int | None = None) -> dict[str, Callable[[int], Tensor]]:
        """Return persistence, and the mean of the training samples at each node."""
        training = self._training
        if training is None or len(training) == 0:  # as for a trained model on other data
            return super().baselines(step)
        return super().baselines(step) | {"training mean": lambda _: training.mean_state()}

    def mean_state(self) -> Tensor:
        """Return the mean of up to 256 samples at each node, [N, V]."""
        mean = self._mean_state
        if mean is None:
            states = (self.present(i) for i in self._statistics_samples())
            mean, _, _ = _moments(states, self._node_weights)
            self._mean_state = mean
        return mean

    def _starting(self, times: np.ndarray) -> "FieldDataset":
        """Return the samples of all members that start at these time indices."""
        members = np.arange(len(self.members))[:, None]
        return self._copy(starts=(members * len(self.fields.times) + times).ravel())

    def _statistics_samples(self) -> list[int]:
        """Return the samples from which statistics are estimated."""
        return evenly_spaced(len(self), STATISTICS_SAMPLES).tolist()

    def _find(self, steps: int) -> np.ndarray:
        """Return, for each time, the index of the time `steps` lead times later, -1 if missing."""
        return _find_times(self.fields.times, self.fields.times + steps * self._step)

    def _has_inputs(self) -> np.ndarray:
        return np.all([self._find(m) >= 0 for m in range(1 - self.input_steps, 1)], axis=0)

    def _no_samples_message(self) -> str:
        times = self.fields.times
        spacing = ""
        if len(times) > 1:
            hours = np.diff(times) / np.timedelta64(1, "h")
            spacing = f" {np.median(hours):g} h apart"
            if hours.min() != hours.max():
                spacing = f" {hours.min():.6g} to {hours.max():.6g} h apart"
        return (
            f"each split must have {self.input_steps} inputs and a truth {self.lead_time:g} h "
            f"apart, got none in the {len(times)} times{spacing} of {self.fields.source}: change "
            "data.lead_time, data.input_steps, or the dates of the splits"
        )

    def _index(self, i: int, step: int) -> int | None:
        """Return the index of the state `step` lead times after the start of sample i, or None."""
        member, time = divmod(int(self.starts[i]), len(self.fields.times))
        index = _find_times(self.fields.times, self.fields.times[time, None] + step * self._step)[0]
        return None if index < 0 else member * len(self.fields.times) + int(index)

    def _at(self, i: int, step: int) -> Tensor:
        """Return the state of a sample, [N, variables and forcings]; raise like `_state`."""
        t = self._index(i, step)
        assert t is not None  # samples have all inputs and a truth
        return self._state(t)

    def _state(self, t: int) -> Tensor:
        """Return a state, [N, variables and forcings], NaN at points without values.

        Raises FloatingPointError if other values are not finite, or these points have values.
        """
        state = self._read(t)
        is_wrong = torch.isfinite(state) == self._missing()
        if is_wrong.any():
            v = int(is_wrong.any(dim=0).int().argmax())
            n = int(is_wrong[:, v].int().argmax())
            name = self._names[v]
            date = np.datetime_as_string(self.fields.times[t % len(self.fields.times)], unit="m")
            problem = f"{name} must be finite, got NaN or infinity at {date}"
            if self._missing()[:, v].any():
                problem = (
                    f"{name} must have values at the same points at all times, got "
                    f"{state[n, v]:g} at {position(self.nodes, n)}, {date}"
                )
            raise FloatingPointError(
                f"{problem}: leave it out of data.variables, or fill it in the file"
            )
        return state

    def _filled(self, i: int, step: int) -> Tensor:
        """Return the state of a sample, with the mean at points without values."""
        return torch.where(self._missing(), self.statistics.mean, self._at(i, step))

    def _missing(self) -> Tensor:
        """Return the points without values, [N, variables and forcings], or [1, ..] if none."""
        missing = self.statistics.missing
        return torch.zeros(1, len(self._names), dtype=torch.bool) if missing is None else missing

    def _read_file(self, t: int) -> Tensor:
        """Read a state, [N, variables and forcings]."""
        values = [self.fields.readers[name](t) for name in self._names]
        return torch.from_numpy(np.stack(values, axis=1))

    def _table(self, moments: tuple[Tensor, Tensor, Tensor], seen: "_Extremes") -> str:
        """Return a table of the variables in the training samples, for the log."""
        _, mean, std = moments
        roles = ["variable"] * self._prognostic + ["diagnostic"] * len(self.diagnostics)
        roles += ["constant" if name in self.constants else "forcing" for name in self.forcings]
        units = {**dict(zip(self.variables, self.units, strict=True)), **self.forcing_units}
        rows = [["name", "in the file", "level", "units", "role", *STATISTICS]]
        for v, name in enumerate(self._names):
            key = self.keys.get(name, Key(name))
            missing = int(seen.missing[v])
            numbers = [seen.smallest[v], seen.largest[v]]
            changes = missing != seen.states * int(seen.always_missing[:, v].sum())
            figures = ["-", "-"] if changes else [f"{mean[v]:.5g}", f"{std[v]:.3g}"]
            figures += [f"{number:.5g}" for number in numbers]
            words = [name, key.parameter, key.text(), units[name], roles[v]]
            rows.append([*words, *figures, str(missing)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            words = [f"{cell:{width}}" for cell, width in zip(row[:5], widths[:5], strict=True)]
            figures = [f"{cell:>{width}}" for cell, width in zip(row[5:], widths[5:], strict=True)]
            lines.append("  ".join([*words, *figures]).rstrip())
        return "\n".join(lines)

    def _channels(self, i: int, forecasts: Sequence[Tensor]) -> Tensor:
        """Return the input channels of the step that follows `forecasts`."""
        now = len(forecasts)
        channels = []
        for step, columns in enumerate(self._inputs, start=now - self.input_steps + 1):
            # After the start, only forcings are read, unless all of them are constant.
            field_step = step if step <= 0 or self._dynamic else 0
            if self._index(i, field_step) is None:
                raise ValueError(
                    f"a rollout needs the forcings of every step, the data end before step {step}"
                )
            fields = self._filled(i, field_step)
            if self._range is not None:
                self._range.compare(self._names, fields)
            if step > 0:
                fields = torch.cat([forecasts[step - 1], fields[:, len(self.variables) :]], dim=1)
                # forecasts are NaN at points without values
                fields = torch.where(self._missing(), self.statistics.mean, fields)
            normalised = (fields - self.statistics.mean) / self.statistics.std
            channels.append(normalised[:, columns])
        return torch.cat([*channels, self._position, self._clock(i, now)], dim=1)

    def _clock(self, i: int, step: int) -> Tensor:
        """Return sine and cosine of the local solar time and of the day of the year, [N, 4]."""
        time = self.start_time(i) + step * self._step
        day = 2 * np.pi * ((time - time.astype("datetime64[D]")) / np.timedelta64(1, "D"))
        # over the mean year of the calendar, in seconds
        year = 2 * np.pi * ((time - time.astype("datetime64[Y]")) / np.timedelta64(31_556_952, "s"))
        local = day + self.nodes.radians[:, 1]
        year = np.full_like(local, year)
        clock = np.stack([np.sin(local), np.cos(local), np.sin(year), np.cos(year)], axis=1)
        return torch.from_numpy(clock).float()

    def _without_diagnostics(self, state: Tensor) -> Tensor:
        """Return a state [N, V] with 0 for diagnostics, except at points without values."""
        state = state.clone()
        diagnostics = state[:, self._prognostic :]
        state[:, self._prognostic :] = torch.where(diagnostics.isnan(), diagnostics, 0.0)
        return state


class FieldInputs(PhysicalInputs):
    """The input channels of `FieldDataset`: normalised fields, position, solar time, day of year.

    `present` selects the channels of the variables at the present. `diagnostics` is the number of
    diagnostics, whose reference is 0. At points where a channel has no values, `missing`, [N, P] or
    [1, P] bool, it may be anything, and its forecast has no meaning.
    """

    mean: Tensor  # buffers
    std: Tensor
    missing: Tensor
    position: Tensor
    longitudes: Tensor

    def __init__(
        self,
        names: Iterable[str],
        units: Iterable[str],
        mean: Tensor,
        std: Tensor,
        missing: Tensor,
        position: Tensor,
        longitudes: Tensor,
        present: slice,
        diagnostics: int,
    ):
        super().__init__()
        self.names = tuple(names)
        self.units = tuple(units)
        self.present = present
        self.diagnostics = diagnostics
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.register_buffer("missing", missing)
        self.register_buffer("position", position)
        self.register_buffer("longitudes", longitudes)

    # `time` is always passed, because needs_time is True.
    def forward(  # type: ignore[override]
        self, fields: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return normalised channels [B, N, in_channels] and the reference [B, N, V]."""
        fields = torch.where(self.missing, self.mean, fields)
        local = day_angle(time)[:, None] + self.longitudes  # [B, N]
        year = year_angle(time)[:, None].expand_as(local)
        clock = torch.stack([local.sin(), local.cos(), year.sin(), year.cos()], dim=2).float()
        position = self.position.expand(fields.shape[0], -1, -1)
        channels = torch.cat([(fields - self.mean) / self.std, position, clock], dim=2)
        present = fields[..., self.present]
        zeros = fields.new_zeros(*fields.shape[:2], self.diagnostics)
        return channels, torch.cat([present, zeros], dim=2)


class _Extremes:
    """Extremes of V variables in states of N nodes, and their values that are not finite."""

    def __init__(self, nodes: int, variables: int):
        self.smallest = torch.full((variables,), torch.inf)
        self.largest = torch.full((variables,), -torch.inf)
        self.missing = torch.zeros(variables, dtype=torch.int64)
        self.always_missing = torch.ones(nodes, variables, dtype=torch.bool)
        self.states = 0

    def watch(self, states: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield states [N, V], and note their extremes: states are read from files once."""
        for state in states:
            is_finite = torch.isfinite(state)
            lowest = torch.where(is_finite, state, torch.inf).amin(dim=0)
            highest = torch.where(is_finite, state, -torch.inf).amax(dim=0)
            self.smallest = torch.minimum(self.smallest, lowest)
            self.largest = torch.maximum(self.largest, highest)
            self.missing += (~is_finite).sum(dim=0)
            self.always_missing &= ~is_finite
            self.states += 1
            yield state


class _TrainingRange:
    """The range of each variable in training, with which the first inputs are compared, once."""

    def __init__(self, smallest: Tensor, largest: Tensor, std: Tensor):
        self.smallest, self.largest, self.std = smallest, largest, std
        self._compared = False

    def compare(self, names: Sequence[str], state: Tensor) -> None:
        """Warn if a state [N, V] is far from the training samples; later calls do nothing."""
        if self._compared:
            return
        self._compared = True
        lowest, highest = state.amin(dim=0), state.amax(dim=0)
        beyond = torch.maximum(self.smallest - lowest, highest - self.largest) / self.std
        for v in torch.nonzero(beyond > FAR)[:, 0].tolist():
            log.warning(
                "%s is from %.5g to %.5g in the first inputs, %.3g standard deviations beyond the "
                "%.5g to %.5g of the training samples: check units and missing values",
                *(names[v], lowest[v], highest[v], beyond[v], self.smallest[v], self.largest[v]),
            )


def _moments(states: Iterable[Tensor], weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of states per node [N, V], and weighted mean and deviation [V].

    Over the values that are finite; a node without any has a mean of NaN. Deviations within
    rounding error become 0.
    """
    weights = weights[:, None].double()
    count = total = share = squares = torch.zeros((), dtype=torch.float64)
    for state in states:
        is_finite = torch.isfinite(state)
        values = torch.where(is_finite, state, 0.0).double()
        count = count + is_finite
        total = total + values
        share = share + (is_finite * weights).mean(dim=0)
        squares = squares + (values.square() * weights).mean(dim=0)
    overall = (total * weights).mean(dim=0) / share
    square = squares / share
    variance = square - overall.square()
    std = torch.where(variance > 1e-12 * square, variance, 0.0).sqrt()
    return (total / count).float(), overall.float(), std.float()


def cell_weights(nodes: Nodes) -> Tensor:
    """Return area weights of mean 1, [N] float32.

    On a grid of latitude rows, regular or reduced, the nodes of a row share the area of its band.
    On other global grids, weights are areas of Voronoi cells; on other regional grids, they are 1.
    """
    num_latitudes = len(np.unique(nodes.lat.round(4)))
    if 2 <= num_latitudes <= len(nodes) / 2:
        weights = row_weights(nodes)
    elif np.ptp(nodes.lat) > 90:
        weights = area_weights(nodes)
    else:
        weights = np.ones(len(nodes))
    return torch.from_numpy(weights).float()


def _find_times(times: np.ndarray, dates: np.ndarray) -> np.ndarray:
    """Return the indices of `dates` in ascending `times`, -1 for missing ones."""
    index = np.searchsorted(times, dates).clip(max=len(times) - 1)
    return np.where(times[index] == dates, index, -1)
