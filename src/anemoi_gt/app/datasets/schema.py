"""Data schema: everything besides the weights on which forecasts depend.

Checkpoints store it, and data are compared with it. If order of variables, units, normalisation or
grid were derived again from a file, they could silently differ.
"""

import logging
import zlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.app.datasets.fields import TOLERANCE, Key, Level, distance, position
from anemoi_gt.data.nodes import Nodes

log = logging.getLogger(__name__)

# Label of a member, first and last start of its training samples, as "2019-03-01 06:00".
Period = tuple[str, str, str]

TEXT = ("variables", "diagnostics", "forcings", "constants", "input_names")


@dataclass(frozen=True, eq=False)
class DataSchema:
    """The channels, grid, times and normalisation that a model was trained with.

    Parameters
    ----------
    variables : tuple of str
        Forecast variables, in the order of the output channels.
    diagnostics : tuple of str
        The `variables` that are not inputs.
    forcings : tuple of str
        Inputs that are not forecast, in the order of the channels.
    constants : tuple of str
        The `forcings` that do not change with time.
    units : dict of str to str
        Units of each variable and forcing; "" if unknown.
    keys : dict of str to Key
        All keys of each variable and forcing in its file. Data are searched by them, because the
        name of a variable depends on the others of its file. Empty for data that are not from
        files, and for checkpoints of 0.3.0.
    input_names : tuple of str
        Names of the input channels, in order.
    lead_time : float
        Hours from the present to the truth.
    input_steps : int
        Number of input times, including the present.
    reference : str
        Description of the state to which the predicted change is added.
    time_encoding : str
        Description of the inputs that encode the time.
    nodes : Nodes
        The grid, in the order of the data.
    normalisation : dict of str to Tensor
        Means and standard deviations by name, for `ForecastDataset.normalised_by`.
    missing : dict of str to np.ndarray
        Variables that have no values at some points, and these points, [N] bool.
    periods : tuple
        Label of the member, first and last start of all training samples; empty if they have no
        dates, and for checkpoints before 0.5.0.
    """

    variables: tuple[str, ...]
    diagnostics: tuple[str, ...]
    forcings: tuple[str, ...]
    constants: tuple[str, ...]
    units: dict[str, str]
    keys: dict[str, Key]
    input_names: tuple[str, ...]
    lead_time: float
    input_steps: int
    reference: str
    time_encoding: str
    nodes: Nodes
    normalisation: dict[str, Tensor]
    missing: dict[str, np.ndarray]
    periods: tuple[Period, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; coordinates are compressed float32 degrees."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["nodes"]
        values |= {name: list(values[name]) for name in TEXT}
        # Dicts become lists of pairs, because DCP drops empty dicts.
        values["units"] = list(map(list, self.units.items()))
        values["keys"] = [[name, _plain(key)] for name, key in self.keys.items()]
        values["latitudes"] = _pack(self.nodes.lat)
        values["longitudes"] = _pack(self.nodes.lon)
        values["normalisation"] = [
            [name, tensor.tolist()] for name, tensor in self.normalisation.items()
        ]
        values["missing"] = [
            [name, zlib.compress(np.packbits(points).tobytes())]
            for name, points in self.missing.items()
        ]
        values["periods"] = list(map(list, self.periods))
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DataSchema":
        """Restore a schema from `to_dict`. Raises ValueError if an entry is missing."""
        values = {"missing": [], "periods": []} | values
        if "keys" not in values and "levels" in values:
            log.warning(
                "the checkpoint was written by 0.3.0, which did not keep the levels and intervals "
                "of all variables: they are found by their names, %s",
                ", ".join(values["variables"]),
            )
            values["keys"] = []
        expected = {field.name for field in fields(cls)} - {"nodes"} | {"latitudes", "longitudes"}
        missing = sorted(expected - values.keys())
        if missing:
            raise ValueError(
                f"the schema of a checkpoint must hold {', '.join(sorted(expected))}, got no "
                f"{missing}"
            )
        values = {name: value for name, value in values.items() if name in expected}
        nodes = Nodes(_unpack(values.pop("latitudes")), _unpack(values.pop("longitudes")))
        values |= {name: tuple(values[name]) for name in TEXT}
        values["units"] = dict(values["units"])
        values["keys"] = {name: _key(plain) for name, plain in values["keys"]}
        values["missing"] = {
            name: np.unpackbits(
                np.frombuffer(zlib.decompress(packed), np.uint8), count=len(nodes)
            ).astype(bool)
            for name, packed in values["missing"]
        }
        values["periods"] = tuple(tuple(period) for period in values["periods"])
        statistics = values.pop("normalisation")
        normalisation = {
            name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in statistics
        }
        return cls(nodes=nodes, normalisation=normalisation, **values)

    def check_same(self, data: "DataSchema") -> None:
        """Raise ValueError if the schema of data differs in anything but the normalisation."""
        for name, meaning in (
            ("variables", "the variables, in this order,"),
            ("forcings", "the forcings, in this order,"),
            ("lead_time", "the lead time, in hours,"),
            ("input_steps", "the number of input steps"),
            ("diagnostics", "the diagnostics"),
            ("constants", "the forcings without time"),
            ("reference", "the reference of the change"),
            ("time_encoding", "the encoding of time"),
            ("input_names", "the input channels"),
        ):
            expected, got = getattr(self, name), getattr(data, name)
            if expected != got:
                raise ValueError(
                    f"{meaning} must be {_text(expected)}, as in the checkpoint, got {_text(got)}"
                )
        for name, units in self.units.items():
            got = data.units.get(name, "")
            if units and got and units != got:  # unknown ones are not compared
                raise ValueError(
                    f"{name} must be in {units}, as in the checkpoint, got {got}: convert the data"
                )
        for name, key in self.keys.items():  # the name of the parameter may differ
            differences = key.differences(data.keys.get(name, key))
            if differences:
                raise ValueError(
                    f"{name} must have the keys of the checkpoint: {'; '.join(differences)}"
                )
        if len(data.nodes) != len(self.nodes):
            raise ValueError(
                f"the grid must have the {len(self.nodes)} nodes of the checkpoint, got "
                f"{len(data.nodes)} nodes"
            )
        is_different = distance(data.nodes, self.nodes) > TOLERANCE
        if is_different.any():
            first = int(np.argmax(is_different))
            raise ValueError(
                f"the grid must equal the checkpoint's, whose node {first} is at "
                f"{position(self.nodes, first)}, got {position(data.nodes, first)}"
            )


def _pack(degrees: np.ndarray) -> bytes:
    return zlib.compress(degrees.astype("<f4").tobytes())


def _unpack(packed: bytes) -> np.ndarray:
    return np.frombuffer(zlib.decompress(packed), "<f4").astype(np.float64)


def _plain(key: Key) -> list:
    others = None if key.others is None else [list(pair) for pair in key.others]
    return [key.parameter, [list(level) for level in key.levels], key.interval, others]


def _key(plain: list) -> Key:
    parameter, levels, interval, *rest = plain  # 0.4.0 had these three
    others = None
    if rest and rest[0] is not None:
        others = tuple((name, _as_tuple(value)) for name, value in rest[0])
    return Key(parameter, tuple(Level(*level) for level in levels), interval, others)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
