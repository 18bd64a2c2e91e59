"""States of fields from files: all variables and forcings at a valid time, of a member."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.app.datasets.fields import Fields, minutes, position
from anemoi_gt.app.datasets.roles import Roles
from anemoi_gt.data.nodes import Nodes, area_weights, row_weights

CACHE_BYTES = 4 * 2**30  # size of the cache of states from files


@dataclass(frozen=True, eq=False)
class FieldStates:
    """States [N, variables and forcings] of fields, and the input channels that are read of them.

    A state is named by its index, `member * T + time`. The lead time is in hours.
    """

    fields: Fields
    roles: Roles
    lead_time: float
    input_steps: int

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the V forecast variables, diagnostics last, which are the first columns."""
        return (*self.roles.variables, *self.roles.diagnostics)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns: variables and forcings."""
        return (*self.variables, *self.roles.forcings)

    @property
    def units(self) -> tuple[str, ...]:
        """Units of all columns."""
        return tuple(self.fields.units[name] for name in self.names)

    @property
    def has_dynamic_forcings(self) -> bool:
        """True if a forcing changes with time, so that a rollout reads it."""
        return not self.fields.static.issuperset(self.roles.forcings)

    @cached_property
    def inputs(self) -> list[list[int]]:
        """The columns that are inputs, for each input time; static ones only at the present."""
        first_forcing = len(self.variables)
        present = [*range(len(self.roles.variables)), *range(first_forcing, len(self.names))]
        past = [column for column in present if self.names[column] not in self.fields.static]
        return [*[past] * (self.input_steps - 1), present]

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the input channels."""
        names = []
        for step, columns in enumerate(self.inputs, start=1 - self.input_steps):
            suffix = f" {step * self.lead_time:g} h" if step < 0 else ""
            names += [f"{self.names[column]}{suffix}" for column in columns]
        for coordinate in ("latitude", "longitude", "local time", "day of the year"):
            names += [f"sin {coordinate}", f"cos {coordinate}"]
        return tuple(names)

    def description(self) -> dict[str, Any]:
        """Return the attributes of `ForecastDataset` that follow from these fields."""
        fields, roles = self.fields, self.roles
        return {
            "nodes": fields.nodes,
            "grid": fields.grid,
            "members": fields.members,
            "variables": self.variables,
            "units": self.units[: len(self.variables)],
            "diagnostics": roles.diagnostics,
            "forcings": roles.forcings,
            "forcing_units": {name: fields.units[name] for name in roles.forcings},
            "constants": tuple(name for name in roles.forcings if name in fields.static),
            "keys": {name: fields.keys[name] for name in self.names if name in fields.keys},
            "attributes": fields.attributes,
            "lead_time": self.lead_time,
            "input_steps": self.input_steps,
            "input_names": self.input_names,
        }

    @cached_property
    def node_weights(self) -> Tensor:
        """Area weights of mean 1, [N] float32."""
        return cell_weights(self.fields.nodes)

    @cached_property
    def position(self) -> Tensor:
        """Standardised sine and cosine of latitude and longitude, [N, 4] float32."""
        lat, lon = torch.from_numpy(self.fields.nodes.radians).T
        waves = torch.stack([lat.sin(), lat.cos(), lon.sin(), lon.cos()], dim=1)
        # clamped: along one parallel, the latitude has no spread
        return ((waves - waves.mean(dim=0)) / waves.std(dim=0).clamp(min=1e-6)).float()

    @cached_property
    def step(self) -> np.timedelta64:
        """The lead time; NumPy's durations are integers, and it may be a fraction of an hour."""
        return np.timedelta64(round(self.lead_time * 3_600_000), "ms")

    def time(self, t: int) -> np.datetime64:
        """Return the valid time of a state."""
        return self.fields.times[t % len(self.fields.times)]

    def member(self, t: int) -> str:
        """Return the label of the ensemble member of a state, "" if it has none."""
        return self.fields.members[t // len(self.fields.times)]

    def later(self, t: int, steps: int) -> int | None:
        """Return the index of the state `steps` lead times later, None if it is missing."""
        member, time = divmod(t, len(self.fields.times))
        index = int(self.find(steps, np.array([time]))[0])
        return None if index < 0 else member * len(self.fields.times) + index

    def find(self, steps: int, index: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the indices of the times `steps` lead times after each time, -1 if missing."""
        times = self.fields.times
        dates = times[index] + steps * self.step
        found = np.searchsorted(times, dates).clip(max=len(times) - 1)
        return np.where(times[found] == dates, found, -1)

    def has_inputs(self) -> np.ndarray:
        """Return whether all input times of each time are in the data, [T] bool."""
        return np.all([self.find(m) >= 0 for m in range(1 - self.input_steps, 1)], axis=0)

    @cached_property
    def read(self) -> Any:
        """A function from the index of a state to [N, variables and forcings], with a cache."""
        return lru_cache(max(1, self._cached_states))(self._read_file)

    @property
    def fit_in_cache(self) -> bool:
        """True if every state is read from the files once."""
        return len(self.fields.members) * len(self.fields.times) <= self._cached_states

    @property
    def _cached_states(self) -> int:
        return CACHE_BYTES // (4 * len(self.fields.nodes) * len(self.names))

    def _read_file(self, t: int) -> Tensor:
        values = [self.fields.readers[name](t) for name in self.names]
        return torch.from_numpy(np.stack(values, axis=1))

    def checked(self, t: int, missing: Tensor) -> Tensor:
        """Return a state, NaN at the points that are `missing`, [N or 1, variables and forcings].

        Raises FloatingPointError if other values are not finite, or these points have values.
        """
        state = self.read(t)
        is_wrong = torch.isfinite(state) == missing
        if is_wrong.any():
            v = int(is_wrong.any(dim=0).int().argmax())
            n = int(is_wrong[:, v].int().argmax())
            expected = "be finite"
            if missing[:, v].any():
                expected = "have values at the same points at all times"
            raise FloatingPointError(
                f"{self.names[v]} must {expected}, got {state[n, v]:g} at "
                f"{position(self.fields.nodes, n)}, {minutes(self.time(t))}: leave it out of "
                "data.variables, or fill it in the file"
            )
        return state

    def reference(self, present: Tensor) -> Tensor:
        """Return variables [N, V] with 0 for diagnostics, except at points without values."""
        reference = present.clone()
        diagnostics = reference[:, len(self.roles.variables) :]
        diagnostics.copy_(torch.where(diagnostics.isnan(), diagnostics, 0.0))
        return reference


def cell_weights(nodes: Nodes) -> Tensor:
    """Return area weights of mean 1, [N] float32.

    On a regular or reduced grid, or a part of one such as its land points, these are `row_weights`.
    On other global grids, weights are areas of Voronoi cells; on other regional grids, they are 1.
    """
    weights = row_weights(nodes)
    if weights is None and np.ptp(nodes.lat) > 90:
        weights = area_weights(nodes)
    elif weights is None:
        weights = np.ones(len(nodes))
    return torch.from_numpy(weights).float()
