"""The `sphere` data set: advection of a tracer on the globe, generated, with the exact solution.

A tracer q that the wind carries keeps its value along trajectories, so

    q(x, end) = q(where x came from, start)

and with the exact trajectories of `flows` the truth is exact on any grid. Each sample has a flow and a tracer of its own:
turned at random on the globe, started at a random phase of the flow's period, with random hills. No two samples share a
flow, so the test samples measure skill on flows never seen.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.data.area import area_weights
from anemoi_gt.data.datasets import ForecastDataset, Splits, Step
from anemoi_gt.data.flows import Flow
from anemoi_gt.data.grids import grid
from anemoi_gt.option_checks import check_integer, check_number

DEFORMATION = {"rotation": 0.0, "deformation": 10.0}
STATISTICS_SAMPLES = 64  # the normalisation is estimated from so many of the training samples


@dataclass(frozen=True, eq=False)
class Hills:
    """A smooth tracer: sum over m of height_m exp(-sharpness_m |x - centre_m|^2), as in Nair and Lauritzen, section 4.

    Parameters
    ----------
    centres : numpy.ndarray
        [M, 3] unit vectors.
    heights : numpy.ndarray
        [M], kg/kg.
    sharpness : numpy.ndarray
        [M]; 5 makes a hill of 21 degrees half width at half height, 20 one of 11 degrees.
    """

    centres: np.ndarray
    heights: np.ndarray
    sharpness: np.ndarray

    def __call__(self, xyz: np.ndarray) -> np.ndarray:
        """Return the tracer at unit vectors `xyz` [N, 3]: [N]."""
        squared_distance = 2 - 2 * xyz @ self.centres.T  # [N, M]
        return np.exp(-self.sharpness * squared_distance) @ self.heights


@dataclass(frozen=True, eq=False)
class Case:
    """One advection problem: `hills` at time `start` (hours into the period), carried by `flow`."""

    flow: Flow
    hills: Hills
    start: float

    def tracer(self, xyz: np.ndarray, hours: float) -> np.ndarray:
        """Return the exact tracer [N] at `xyz` [N, 3], `hours` after the start."""
        return self.hills(self.flow.transport(xyz, self.start + hours, self.start))


def draw_case(rng: np.random.Generator, flows: tuple[str, ...]) -> Case:
    """Draw a problem: kind of flow, its orientation, its phase, two to five hills.

    Parameters
    ----------
    rng : numpy.random.Generator
        Where the randomness comes from.
    flows : tuple of str
        Kinds to choose from, keys of `DEFORMATION`.

    Returns
    -------
    Case
        The problem.
    """
    kind = flows[rng.integers(len(flows))]
    frame, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    flow = Flow(axis=frame[:, 0], centre=frame[:, 1], deformation=DEFORMATION[kind])
    num_hills = rng.integers(2, 6)
    centres = rng.standard_normal((num_hills, 3))
    hills = Hills(
        centres=centres / np.linalg.norm(centres, axis=1, keepdims=True),
        heights=rng.uniform(0.3, 1.0, num_hills),
        sharpness=rng.uniform(5.0, 20.0, num_hills),
    )
    return Case(flow, hills, start=rng.uniform(0, flow.period))


@dataclass(frozen=True)
class Statistics:
    """What the channels are divided by, from training samples: tracer mean, spreads of tracer, its change and the wind."""

    tracer_mean: float
    tracer_std: float
    change_std: float
    wind_std: float

    @classmethod
    def of(cls, cases: list[Case], xyz: np.ndarray, lead_time: float) -> "Statistics":
        """Measure the statistics of these problems at the points `xyz` [N, 3]."""
        tracer = np.stack([case.tracer(xyz, 0) for case in cases])
        change = np.stack([case.tracer(xyz, lead_time) for case in cases]) - tracer
        wind = np.stack([case.flow.wind(xyz, case.start) for case in cases])
        return cls(tracer.mean(), tracer.std(), np.sqrt((change**2).mean()), np.sqrt((wind**2).sum(-1).mean() / 2))


class SphereDataset(ForecastDataset):
    """Advection problems on one grid, each made when it is asked for and always the same.

    Inputs are the tracer, the wind at the start and at the end of the forecast (a transport model is given the wind), and
    the position. The two components of the wind refer to the frame of the edge directions (`Nodes.frame`), so that how
    far upstream a neighbour lies is an inner product of what the network sees.

    Parameters
    ----------
    nodes : Nodes
        The grid.
    size : int
        Number of samples.
    flows : tuple of str
        Kinds of flow, "rotation" or "deformation".
    lead_time : float
        Hours.
    key : tuple of int
        Seeds sample i together with i.
    statistics : Statistics or None
        The normalisation; None measures it on the first samples of this data set.
    """

    variables = ("tracer",)
    units = ("kg/kg",)
    input_names = (
        "tracer",
        *("wind x", "wind y", "wind x at the end", "wind y at the end"),
        *("sin latitude", "cos latitude", "sin longitude", "cos longitude"),
    )

    def __init__(self, nodes, size, flows, lead_time, key, statistics=None):
        self.nodes, self.size, self.flows, self.lead_time, self.key = nodes, size, flows, lead_time, key
        self.weights = torch.from_numpy(area_weights(nodes)).float()
        self._xyz, self._frame = nodes.xyz, nodes.frame
        self._position = torch.from_numpy(np.stack([f(x) for x in nodes.radians.T for f in (np.sin, np.cos)], axis=-1))
        first = (self.case(i) for i in range(min(size, STATISTICS_SAMPLES)))
        self.statistics = statistics or Statistics.of(list(first), self._xyz, lead_time)
        self.change_mean = torch.zeros(1)
        self.change_std = torch.tensor([self.statistics.change_std], dtype=torch.float32)

    def __len__(self):
        return self.size

    def case(self, i: int) -> Case:
        """Return the problem of sample i; IndexError where there is none, for any number would make one."""
        self.check_sample(i)
        return draw_case(np.random.default_rng((*self.key, i)), self.flows)

    def inputs(self, i: int) -> Tensor:
        """Return the normalised input channels of sample i, [N, 9] float32."""
        case = self.case(i)
        return self._channels(case, case.tracer(self._xyz, 0), hours=0)

    def present(self, i: int) -> Tensor:
        """Return the tracer at the start, [N, 1] in kg/kg."""
        return self._tracer(i, 0)

    def truth(self, i: int) -> Tensor:
        """Return the exact tracer after the lead time, [N, 1] in kg/kg."""
        return self._tracer(i, self.lead_time)

    def advance(self, i: int, forecasts: Sequence[Tensor]) -> Step:
        """Return the step that follows some forecasts: their last tracer, and the wind of its hours."""
        if not forecasts:
            return Step(self.inputs(i), self.present(i), self.truth(i))
        hours = len(forecasts) * self.lead_time
        inputs = self._channels(self.case(i), forecasts[-1][:, 0].numpy(), hours)
        return Step(inputs, forecasts[-1], self._tracer(i, hours + self.lead_time))

    def part(self, rows: Tensor) -> "SphereDataset":
        """Return the same samples, computed at some of the nodes alone."""
        part, chosen = copy.copy(self), rows.numpy()
        part.nodes, part.weights, part._position = self.nodes[chosen], self.weights[rows], self._position[rows]
        part._xyz, part._frame = self._xyz[chosen], self._frame[chosen]
        return part

    def title(self, i: int) -> str:
        """Return the kind of flow and the lead time."""
        kind = "deformational flow" if self.case(i).flow.deformation else "solid-body rotation"
        return f"{kind}, {self.lead_time:g} h"

    def _channels(self, case, tracer, hours):
        """The input channels for a tracer [N], `hours` after the start of a case."""
        tracer = (tracer - self.statistics.tracer_mean) / self.statistics.tracer_std
        winds = [case.flow.wind(self._xyz, case.start + at) for at in (hours, hours + self.lead_time)]
        components = [np.einsum("nid,nd->ni", self._frame, wind) / self.statistics.wind_std for wind in winds]
        changing = np.concatenate([tracer[:, None], *components], axis=1)
        return torch.cat([torch.from_numpy(changing), self._position], dim=1).float()

    def _tracer(self, i, hours):
        return torch.from_numpy(self.case(i).tracer(self._xyz, hours)).float()[:, None]


def sphere(
    grid_name: str = "O24",
    flows: Sequence[str] = ("rotation", "deformation"),
    lead_time: float = 12.0,
    train_size: int = 1024,
    valid_size: int = 64,
    test_size: int = 64,
    seed: int = 0,
) -> Splits:
    """Make the `sphere` data set.

    Parameters
    ----------
    grid_name : str
        Grid of the fields, as `grids.grid` takes it.
    flows : sequence of str
        Kinds of flow to draw from: "rotation", "deformation", or both.
    lead_time : float
        Hours from the present to the truth. The flows turn once in 288 h.
    train_size, valid_size, test_size : int
        Numbers of samples.
    seed : int
        At least 0. Another seed makes other samples; the same makes the same.

    Returns
    -------
    Splits
        Training, validation and test samples, no two with the same flow.

    Raises
    ------
    ValueError
        For an unknown kind of flow, a lead time or a size that is not positive, or a negative seed.

    Examples
    --------
    >>> train, valid, test = sphere("O8", train_size=4, valid_size=1, test_size=1)
    >>> train[0].inputs.shape, train[0].target.shape
    (torch.Size([544, 9]), torch.Size([544, 1]))
    """
    if isinstance(flows, str) or not isinstance(flows, Sequence):
        raise ValueError(f"flows must be a list of kinds, as [{', '.join(DEFORMATION)}], got {flows!r}")
    if not flows or any(kind not in tuple(DEFORMATION) for kind in flows):
        raise ValueError(f"flows must be one or more of {', '.join(DEFORMATION)}, got {list(flows)}")
    for name, size in {"train_size": train_size, "valid_size": valid_size, "test_size": test_size}.items():
        check_integer(name, size)
    check_integer("seed", seed, least=0)
    check_number("lead_time", lead_time)
    if not 0 < lead_time < np.inf:
        raise ValueError(f"lead_time must be positive and finite, in hours, got {lead_time}")
    nodes, flows = grid(grid_name), tuple(flows)
    train = SphereDataset(nodes, train_size, flows, lead_time, key=(seed, 0))
    held_out = (
        SphereDataset(nodes, size, flows, lead_time, (seed, split), train.statistics)
        for split, size in ((1, valid_size), (2, test_size))
    )
    return Splits(train, *held_out)
