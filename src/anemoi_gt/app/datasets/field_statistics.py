"""Statistics of the training samples of fields: normalisation, extremes, points without values."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.app.datasets.field_states import FieldStates
from anemoi_gt.app.datasets.fields import Key, minutes, position
from anemoi_gt.app.datasets.forecast_dataset import aligned

log = logging.getLogger(__name__)

FAR = 10.0  # standard deviations beyond the range of the training samples, of a warning
UNKNOWN_EXTREMES = 10.0  # standard deviations from the mean, where a checkpoint has no extremes
COLUMNS = ("mean", "deviation", "smallest", "largest", "missing")  # numbers of the table
# Values that are written for missing ones: of WMO and GIS, and netCDF's default
FILL_VALUES = {-9999.0, -32767.0, -32768.0, *np.array([1e20, -1e20, 9.969209968386869e36], "f4")}
QUARTILE_NODES = 20_000  # number of nodes from which quartiles are estimated, about
FAR_OUT = 1000.0  # interquartile ranges from the quartiles of an extreme that may be a fill value


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of the training samples, by which inputs and the change are normalised.

    Parameters
    ----------
    mean, std, smallest, largest : Tensor
        [variables and forcings].
    change_mean, change_std : Tensor
        [V], of the change in a lead time.
    missing : Tensor
        [N, variables and forcings] bool, where a variable has no values at any time; [1, ..] if all
        variables have values everywhere.
    mean_state : callable, optional
        Returns the mean of the training samples at each node, [N, V]. None without such samples, as
        for a trained model on other data.
    of_model : bool
        True for the statistics of a trained model: its first inputs are compared with them.
    """

    mean: Tensor
    std: Tensor
    smallest: Tensor
    largest: Tensor
    change_mean: Tensor
    change_std: Tensor
    missing: Tensor
    mean_state: Callable[[], Tensor] | None = None
    of_model: bool = False

    @classmethod
    def none(cls, states: FieldStates) -> "Statistics":
        """Return statistics that leave values as they are."""
        zeros, ones = torch.zeros(len(states.names)), torch.ones(len(states.names))
        change = zeros[: len(states.variables)], ones[: len(states.variables)]
        return cls(zeros, ones, zeros, zeros, *change, missing=nowhere(states))

    @classmethod
    def of_trained(cls, normalisation: Mapping[str, Tensor], missing: Tensor) -> "Statistics":
        """Return the statistics in the `normalisation` of a trained model."""
        values: dict[str, Any] = {name: tensor.float() for name, tensor in normalisation.items()}
        if "smallest" not in values:  # checkpoints of 0.3.0 have no extremes
            spread = UNKNOWN_EXTREMES * values["std"]
            values |= {"smallest": values["mean"] - spread, "largest": values["mean"] + spread}
        return cls(**values, missing=missing, of_model=True)

    def normalisation(self) -> dict[str, Tensor]:
        """Return means, deviations and extremes of the columns and of the change, by name."""
        names = ("mean", "std", "smallest", "largest", "change_mean", "change_std")
        return {name: getattr(self, name) for name in names}

    def compare(self, names: Sequence[str], state: Tensor) -> None:
        """Warn if a state [N, V] is far from the training samples."""
        lowest, highest = state.amin(dim=0), state.amax(dim=0)
        beyond = torch.maximum(self.smallest - lowest, highest - self.largest) / self.std
        for v in torch.nonzero(beyond > FAR)[:, 0].tolist():
            log.warning(
                "%s is from %.5g to %.5g in the first inputs, %.3g standard deviations beyond the "
                "%.5g to %.5g of the training samples: check units and missing values",
                *(names[v], lowest[v], highest[v], beyond[v], self.smallest[v], self.largest[v]),
            )

    def weights(self, node_weights: Tensor) -> Tensor:
        """Return weights of mean 1 in loss and scores: [N], or [N, V] with 0 at missing points."""
        missing = self.missing[:, : len(self.change_mean)]
        if not missing.any():
            return node_weights
        weights = node_weights[:, None] * ~missing
        return weights / weights.mean(dim=0)


def nowhere(states: FieldStates) -> Tensor:
    """Return `missing` of variables that have values everywhere."""
    return torch.zeros(1, len(states.names), dtype=torch.bool)


def measure(states: FieldStates, starts: Sequence[int]) -> Statistics:
    """Return the statistics of samples that start at these states; log a table of them.

    Raises ValueError if a variable does not change, has no values, or has values that look like an
    undeclared fill value; FloatingPointError if points without values change.
    """
    num_variables = len(states.variables)
    seen = _Extremes(len(states.fields.nodes), len(states.names))
    moments = moments_of(seen.watch(states.read(t) for t in starts), states.node_weights)
    mean_state, mean, std = moments
    log.info("%s", _table(states, mean, std, seen))
    missing = _find_missing(states, seen)
    _check_fill_values(states, starts, seen)
    least_growth = torch.full((num_variables,), torch.inf)

    def changes() -> Iterator[Tensor]:
        nonlocal least_growth
        for t in starts:
            end = states.later(t, 1)
            assert end is not None  # samples have a truth
            # these raise, with name and date, if points without values change
            present = states.checked(t, missing)[:, :num_variables]
            truth = states.checked(end, missing)[:, :num_variables]
            growth = (truth - present).nan_to_num(nan=torch.inf).amin(dim=0)
            least_growth = torch.minimum(least_growth, growth)
            yield truth - states.reference(present)

    _, change_mean, change_std = moments_of(changes(), states.node_weights)
    spreads = zip(states.variables, change_std, strict=True)
    constant = ",".join(name for name, spread in spreads if not spread > 0)
    if constant:
        raise ValueError(
            f"variables must change within {states.lead_time:g} h, {constant} does not: leave it "
            f"out of data.variables, or take it as an input only, data.forcings=[{constant}]"
        )
    for v, name in enumerate(states.variables):
        if least_growth[v] >= 0:
            log.warning(
                "%s never decreases at any point, as a sum since the start of a run does: take its "
                "differences in time, if it is one",
                name,
            )
    std = torch.where(std > 0, std, 1.0)
    extremes = (seen.smallest, seen.largest)
    mean_state = mean_state[:, :num_variables]
    return Statistics(
        *(mean, std, *extremes, change_mean, change_std), missing, mean_state=lambda: mean_state
    )


def check_values(states: FieldStates, starts: Iterable[int], missing: Tensor) -> None:
    """Read all states of samples that start at these; raise like `measure` for missing values."""
    steps = range(1 - states.input_steps, 2)  # inputs and truth
    used = {states.later(int(t), step) for t in starts for step in steps}
    times = sorted(t for t in used if t is not None)
    seen = _Extremes(len(states.fields.nodes), len(states.names))
    for _ in seen.watch(states.checked(t, missing) for t in times):
        pass
    _check_fill_values(states, times, seen)


def _find_missing(states: FieldStates, seen: "_Extremes") -> Tensor:
    """Return the points without values at any time, as `Statistics.missing`.

    Raises ValueError if a variable has no values at all.
    """
    if not seen.always_missing.any():
        return nowhere(states)
    num_nodes = len(states.fields.nodes)
    for v, name in enumerate(states.names):
        count = int(seen.always_missing[:, v].sum())
        if count == num_nodes:
            raise ValueError(
                f"{name} must have values, got none at any point: leave it out of data.variables "
                "and data.forcings"
            )
        if count:
            log.info(
                "%s has no values at %d of %d points, as over land: they are filled with its mean, "
                "and have no weight in statistics, loss and scores",
                *(name, count, num_nodes),
            )
    return seen.always_missing


def _check_fill_values(states: FieldStates, starts: Sequence[int], seen: "_Extremes") -> None:
    """Raise ValueError if an extreme of a variable looks like an undeclared fill value.

    It is one of `FILL_VALUES`, or further from the quartiles than `FAR_OUT` times their difference,
    while all other values are within a hundredth of its distance.
    """
    every = len(states.fields.nodes) // QUARTILE_NODES + 1
    some = torch.cat([states.read(t)[::every] for t in starts[:: len(starts) // 8 + 1]])
    values = torch.where(torch.isfinite(some), some, torch.nan).double().numpy()
    for v, name in enumerate(states.names):
        if np.isnan(values[:, v]).all():  # missing at these nodes
            continue
        quartiles = np.nanquantile(values[:, v], [0.25, 0.75])
        extremes = (seen.smallest[v].item(), seen.largest[v].item())
        for extreme, quartile in zip(extremes, quartiles, strict=True):
            is_far = 0 < FAR_OUT * (quartiles[1] - quartiles[0]) < abs(extreme - quartile)
            if extreme in FILL_VALUES or (
                is_far and _is_alone(states, starts, v, extreme, quartile)
            ):
                t, n = _first(states, starts, v, extreme)
                raise ValueError(
                    f"{name} must have its fill value declared, got {extreme:g} at "
                    f"{position(states.fields.nodes, n)}, {minutes(states.time(t))}, where half of "
                    f"the values are from {quartiles[0]:g} to {quartiles[1]:g}: set its attribute "
                    f"_FillValue in the file, or leave {name} out"
                )


def _is_alone(
    states: FieldStates, starts: Sequence[int], v: int, extreme: float, quartile: float
) -> bool:
    """Return whether all other values are within a hundredth of the distance of an extreme."""
    for t in starts:
        values = states.read(t)[:, v].double()
        others = values[torch.isfinite(values) & (values != extreme)]
        if ((others - quartile).abs() > abs(extreme - quartile) / 100).any():
            return False
    return True


def _first(states: FieldStates, starts: Sequence[int], v: int, value: float) -> tuple[int, int]:
    """Return the first state and node that have a value."""
    for t in starts:
        found = torch.nonzero(states.read(t)[:, v] == value)[:, 0].tolist()
        if found:
            return t, found[0]
    raise LookupError(f"{value} must be a value of {states.names[v]}")


def _table(states: FieldStates, mean: Tensor, std: Tensor, seen: "_Extremes") -> str:
    """Return a table of the variables in the training samples, for the log."""
    fields, roles = states.fields, states.roles
    kinds = ["variable"] * len(roles.variables) + ["diagnostic"] * len(roles.diagnostics)
    kinds += ["constant" if name in fields.static else "forcing" for name in roles.forcings]
    rows = [["name", "in the file", "level", "units", "role", *COLUMNS]]
    for v, name in enumerate(states.names):
        key = fields.keys.get(name, Key(name))
        missing = int(seen.missing[v])
        changes = missing != seen.states * int(seen.always_missing[:, v].sum())
        figures = ["-", "-"] if changes else [f"{mean[v]:.5g}", f"{std[v]:.3g}"]
        figures += [f"{number:.5g}" for number in (seen.smallest[v], seen.largest[v])]
        words = [name, key.parameter, key.text(), states.units[v], kinds[v]]
        rows.append([*words, *figures, str(missing)])
    return aligned(rows, texts=5)


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


def moments_of(states: Iterable[Tensor], weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
