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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.app.datasets.field_states import FieldStates
from anemoi_gt.app.datasets.field_statistics import (
    Statistics,
    check_values,
    measure,
    moments_of,
    nowhere,
)
from anemoi_gt.app.datasets.fields import Fields, arrange, evenly_spaced, group, minutes
from anemoi_gt.app.datasets.forecast_dataset import (
    ForecastDataset,
    Sample,
    Splits,
    Step,
    find_start,
)
from anemoi_gt.app.datasets.physical import PhysicalInputs, day_angle, year_angle
from anemoi_gt.app.datasets.readers import READERS, read_files
from anemoi_gt.app.datasets.roles import (
    ChosenRoles,
    choose_roles,
    find_variables,
    roles_of_schema,
    select,
)
from anemoi_gt.app.datasets.schema import DataSchema, Period
from anemoi_gt.option_checks import check_integer, check_positive

log = logging.getLogger(__name__)

STATISTICS_SAMPLES = 256  # number of training samples from which statistics are estimated
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
    grouped = group(read_files(path, format))
    if schema is None:
        fields = arrange(select(grouped, chosen))
    else:
        fields = arrange(find_variables(grouped, chosen, schema))
    check_spacing(fields)
    train_period, valid_period, test_period = split_times(fields.times, train, valid, test)
    if schema is not None:
        fields, roles = roles_of_schema(fields, chosen, schema)
        data = FieldDataset(FieldStates(fields, roles, lead_time, input_steps))
        schema.check_same(data.schema())
        data = data.like(schema).within(train_period).as_training_samples()
        return Splits(data, data.within(valid_period), data.within(test_period))
    fields, roles = choose_roles(fields, chosen, train_period)
    data = FieldDataset(FieldStates(fields, roles, lead_time, input_steps)).within(train_period)
    data.require_samples()
    data = data.normalised()
    log_short_intervals(data)
    splits = data, data.within(valid_period), data.within(test_period)
    for split in splits:
        split.require_samples()
    if data.states.fit_in_cache:  # training reads none of them again
        starts = [split.samples.starts for split in splits]
        check_values(data.states, np.concatenate(starts), data.statistics.missing)
    return Splits(*splits)


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
class Samples:
    """Samples of fields: the states at which they start, and facts about the choice.

    `left_out` and `trained_periods` as in `ForecastDataset`.
    """

    starts: np.ndarray
    left_out: int = 0
    trained_periods: tuple[Period, ...] = ()


NO_SAMPLES = Samples(np.empty(0, dtype=int))


class FieldDataset(ForecastDataset):
    """Forecasts of fields: samples of states, normalised by statistics.

    It has no samples until `within` or `starting_at` selects some. Reading a sample with values
    that are not finite raises FloatingPointError.
    """

    time_encoding = "sine and cosine of local solar time and of the day of the year"
    reference_name = "the present, 0 for diagnostics"

    def __init__(
        self,
        states: FieldStates,
        samples: Samples = NO_SAMPLES,
        statistics: Statistics | None = None,
    ):
        self.states = states
        self.samples = samples
        self.statistics = statistics or Statistics.none(states)
        # what `ForecastDataset` documents follows from these three
        vars(self).update(states.description())
        self.left_out = samples.left_out
        self.trained_periods = samples.trained_periods
        self.change_mean = self.statistics.change_mean
        self.change_std = self.statistics.change_std
        self.weights = self.statistics.weights(states.node_weights)
        self.encoding = FieldInputs(states, self.statistics)
        self._compares = self.statistics.of_model  # the first inputs, once

    def within(self, period: np.ndarray) -> "FieldDataset":
        """Return the samples of a period [T] bool that have inputs and truth.

        The normalisation stays the same.
        """
        times = self.states.fields.times
        after = self.states.find(1)
        has_all = self.states.has_inputs() & (after >= 0) & period & period[after]
        expected = np.zeros(0, dtype=bool)
        if period.any():  # those that a record without gaps would have
            first_start = times[0] + (self.input_steps - 1) * self.states.step
            last_start = times[period][-1] - self.states.step
            expected = period & (times >= first_start) & (times <= last_start)
        left_out = int(expected.sum() - has_all.sum()) * len(self.members)
        return self._starting(np.flatnonzero(has_all), left_out)

    def starting_at(self, start: str) -> "FieldDataset":
        """Return the samples, one per member, that start at a date or the "latest" time.

        Raises ValueError if the data do not have this time or all its inputs.
        """
        has_inputs = self.states.has_inputs()
        if not has_inputs.any():
            raise ValueError(self.no_samples_message())
        if start == "latest":
            return self._starting(np.flatnonzero(has_inputs)[-1:], self.left_out)
        index = find_start(self.states.fields.times, start)
        if not has_inputs[index]:
            raise ValueError(
                f"start must have {self.input_steps} input times in the data, {self.lead_time:g} h "
                f"apart, {start} does not have all of them"
            )
        return self._starting(np.array([index]), self.left_out)

    def _starting(self, times: np.ndarray, left_out: int) -> "FieldDataset":
        """Return the samples of all members that start at these time indices."""
        members = np.arange(len(self.members))[:, None]
        starts = (members * len(self.states.fields.times) + times).ravel()
        samples = replace(self.samples, starts=starts, left_out=left_out)
        return FieldDataset(self.states, samples, self.statistics)

    def normalised(self) -> "FieldDataset":
        """Return the same samples, normalised by their own statistics. Raises like `measure`."""
        statistics = measure(self.states, self._statistics_starts())
        return FieldDataset(self.states, self.samples, statistics)

    def normalisation(self) -> dict[str, Tensor]:
        """Return means and standard deviations of variables and forcings, and of the change."""
        return self.statistics.normalisation()

    def normalised_by(self, normalisation: Mapping[str, Tensor]) -> "FieldDataset":
        """Return the same samples, normalised by the statistics of `normalisation`."""
        statistics = Statistics.of_trained(normalisation, self.statistics.missing)
        return FieldDataset(self.states, self.samples, statistics)

    def like(self, schema: DataSchema) -> "FieldDataset":
        """Return the same samples with statistics, missing points and periods of a model."""
        missing = nowhere(self.states)
        if schema.missing:
            missing = missing.repeat(len(self.nodes), 1)
            for name, points in schema.missing.items():
                missing[:, self.states.names.index(name)] = torch.from_numpy(points)
        statistics = Statistics.of_trained(schema.normalisation, missing)
        samples = replace(self.samples, trained_periods=schema.periods)
        return FieldDataset(self.states, samples, statistics)

    def as_training_samples(self) -> "FieldDataset":
        """Return the same samples; their mean is a baseline, also for other periods.

        Not of a trained model, if these are other samples than its own: checkpoints hold the
        training periods since 0.5.0.
        """
        is_other = self.trained_periods and set(self.periods()) != set(self.trained_periods)
        if len(self) == 0 or is_other:
            return self

        @cache
        def mean_state() -> Tensor:
            states = (self._state(t) for t in self._statistics_starts())
            mean, _, _ = moments_of(states, self.states.node_weights)
            return mean

        statistics = replace(self.statistics, mean_state=mean_state)
        return FieldDataset(self.states, self.samples, statistics)

    def missing_points(self) -> dict[str, np.ndarray]:
        """Return the variables without values at some points, and these points, [N] bool."""
        missing = self.statistics.missing
        columns = {name: missing[:, v].numpy() for v, name in enumerate(self.states.names)}
        return {name: points for name, points in columns.items() if points.any()}

    def periods(self) -> tuple[Period, ...]:
        """Return first and last start of the samples of each member, after those of the model."""
        own: dict[str, list[np.datetime64]] = {}
        for i in range(len(self)):
            own.setdefault(self.member(i), []).append(self.start_time(i))
        periods = [(label, minutes(times[0]), minutes(times[-1])) for label, times in own.items()]
        return tuple(dict.fromkeys((*self.trained_periods, *periods)))

    def physical_inputs(self) -> "FieldInputs":
        """Return the module that converts physical values to input channels."""
        return copy.deepcopy(self.encoding)

    def physical_sample(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the physical input channels of sample i, [N, P], and its start time.

        Points without values have the mean.
        """
        return self._physical(i, [])

    def start_time(self, i: int) -> np.datetime64:
        """Return the start time of sample i."""
        return self.states.time(self._start(i))

    def member(self, i: int) -> str:
        """Return the label of the ensemble member of sample i, "" if it has none."""
        return self.states.member(self._start(i))

    def __len__(self) -> int:
        return len(self.samples.starts)

    def __getitem__(self, i: int) -> Sample:
        """Return the normalised sample i; the target is 0 at points without values."""
        sample = super().__getitem__(i)
        missing = self.statistics.missing[:, : len(self.variables)]
        return Sample(sample.inputs, sample.target.masked_fill(missing, 0.0))

    def inputs(self, i: int) -> Tensor:
        return self.encoding.channels(*self.physical_sample(i))

    def present(self, i: int) -> Tensor:
        return self._state(self._start(i))

    def reference(self, i: int) -> Tensor:
        """Return the variables at the start, with 0 for diagnostics, [N, V]."""
        return self.states.reference(self.present(i))

    def truth(self, i: int) -> Tensor:
        end = self.states.later(self._start(i), 1)
        assert end is not None  # samples have a truth
        return self._state(end)

    def advance(self, i: int, forecasts: Sequence[Tensor]) -> Step:
        """Return the step after these forecasts. Raises ValueError if forcings are missing."""
        state = forecasts[-1] if forecasts else self.present(i)
        end = self.states.later(self._start(i), len(forecasts) + 1)
        truth = None if end is None else self._state(end)
        inputs = self.encoding.channels(*self._physical(i, forecasts))
        return Step(inputs, self.states.reference(state), truth)

    def title(self, i: int) -> str:
        """Return the start of the forecast, its lead time, and its member."""
        title = f"{minutes(self.start_time(i))} UTC + {self.lead_time:g} h"
        # a single 0 is what files without an ensemble have
        return title if self.members in (("",), ("0",)) else f"{title}, member {self.member(i)}"

    def baselines(self, step: int | None = None) -> dict[str, Callable[[int], Tensor]]:
        """Return persistence, and the mean of the training samples at each node."""
        mean_state = self.statistics.mean_state
        if mean_state is None:
            return super().baselines(step)
        return super().baselines(step) | {"training mean": lambda _: mean_state()}

    def _statistics_starts(self) -> list[int]:
        """Return the starts of the samples from which statistics are estimated."""
        return self.samples.starts[evenly_spaced(len(self), STATISTICS_SAMPLES)].tolist()

    def no_samples_message(self) -> str:
        """Return the message of `require_samples`, with the spacing of the times."""
        times = self.states.fields.times
        spacing = ""
        if len(times) > 1:
            hours = np.diff(times) / np.timedelta64(1, "h")
            spacing = f" {np.median(hours):g} h apart"
            if hours.min() != hours.max():
                spacing = f" {hours.min():.6g} to {hours.max():.6g} h apart"
        return (
            f"each split must have {self.input_steps} inputs and a truth {self.lead_time:g} h "
            f"apart, got none in the {len(times)} times{spacing} of {self.states.fields.source}: "
            "change data.lead_time, data.input_steps, or the dates of the splits"
        )

    def _state(self, t: int) -> Tensor:
        """Return the variables of a state, [N, V]; raise like `FieldStates.checked`."""
        return self.states.checked(t, self.statistics.missing)[:, : len(self.variables)]

    def _start(self, i: int) -> int:
        """Return the state at which sample i starts."""
        return int(self.samples.starts[i])

    def _physical(self, i: int, forecasts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the inputs of `encoding` for the step that follows `forecasts`."""
        states, statistics = self.states, self.statistics
        now = len(forecasts)
        channels = []
        for step, columns in enumerate(states.inputs, start=now - self.input_steps + 1):
            # After the start, only forcings are read, unless all of them are constant.
            field_step = step if step <= 0 or states.has_dynamic_forcings else 0
            t = states.later(self._start(i), field_step)
            if t is None:
                raise ValueError(
                    f"a rollout needs the forcings of every step, the data end before step {step}"
                )
            state = states.checked(t, statistics.missing)
            fields = torch.where(statistics.missing, statistics.mean, state)
            if self._compares:
                self._compares = False
                statistics.compare(states.names, fields)
            if step > 0:
                fields = torch.cat([forecasts[step - 1], fields[:, len(self.variables) :]], dim=1)
            channels.append(fields[:, columns])
        time = self.start_time(i) + now * states.step
        seconds = time.astype("datetime64[ms]").astype("int64") / 1000
        return torch.cat(channels, dim=1), torch.tensor(seconds, dtype=torch.float64)


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

    def __init__(self, states: FieldStates, statistics: Statistics):
        super().__init__()
        columns = [column for step in states.inputs for column in step]
        first_present = len(columns) - len(states.inputs[-1])
        self.names = states.input_names[: len(columns)]
        self.units = tuple(states.units[column] for column in columns)
        self.present = slice(first_present, first_present + len(states.roles.variables))
        self.diagnostics = len(states.roles.diagnostics)
        self.register_buffer("mean", statistics.mean[columns])
        self.register_buffer("std", statistics.std[columns])
        self.register_buffer("missing", statistics.missing[:, columns])
        self.register_buffer("position", states.position)
        self.register_buffer("longitudes", torch.from_numpy(states.fields.nodes.radians[:, 1]))

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
