"""The `sphere` data set: generated advection of a tracer on the globe, with the exact solution.

A tracer q is constant along the trajectories of the wind:

    q(x, end) = q(X(x; end -> start), start)

`Flow` has its trajectories X in closed form, so the truth is exact on any grid. On the unit sphere,
with axis a, centre b orthogonal to it, and period T:

    dx/dt = w a x x  +  2 k cos(pi t / T) <b(t), x> (x x b(t)),   w = 2 pi / T,
    b(t)  = b rotated about a by w t

k = 0 is solid-body rotation. k > 0 is case 4 of Nair and Lauritzen (2010): in the rotating frame,
the stream function is k cos(pi t / T) <b, y>^2, which for b on the equator at 90 E is k sin^2(lon)
cos^2(lat) cos(pi t / T). In that frame <b, y> is constant, because the velocity is orthogonal to b.
So every particle circles b at a rate of its own. With the effective time
s = (T / pi) (sin(pi t1 / T) - sin(pi t0 / T)),

    y(t1) = y(t0) rotated about b by -2 k <b, y> s

without time integration. After one period, every particle is back at its start.

Each sample has its own flow and tracer: a random orientation, a random phase of the flow's period,
and random hills. No two samples share a flow, so the test samples measure skill on unseen flows.

References
----------
Nair, R. D. and Lauritzen, P. H. (2010), A class of deformational flow test cases for linear
transport problems on the sphere, J. Comput. Phys. 229, 8868-8887, section 3. Lauritzen, P. H. et
al. (2012), A standard test case suite for two-dimensional linear transport on the sphere, Geosci.
Model Dev. 5, 887-901, section 2: the same with dimensions, T = 12 days and k T = 10.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset, Splits, Step
from anemoi_gt.app.datasets.physical import PhysicalInputs
from anemoi_gt.data.grids import grid
from anemoi_gt.data.nodes import EARTH_RADIUS, Nodes, area_weights
from anemoi_gt.option_checks import check_integer, check_positive

SECONDS_PER_HOUR = 3600.0
DEFORMATION = {"rotation": 0.0, "deformation": 10.0}
# numbers of training samples and nodes from which the normalisation is estimated
STATISTICS_SAMPLES = 64
STATISTICS_NODES = 2**16
BLOCK = 2**16  # number of nodes whose arrays fit in the cache


def in_blocks(function: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """Compute `function(*arrays)` in blocks of rows, in threads; arrays have one row per node."""
    if len(arrays[0]) <= BLOCK:
        return function(*arrays)

    def compute(start: int) -> np.ndarray:
        return function(*(array[start : start + BLOCK] for array in arrays))

    with ThreadPoolExecutor() as pool:
        blocks = list(pool.map(compute, range(0, len(arrays[0]), BLOCK)))
    return np.concatenate(blocks)


def rotate(x: np.ndarray, axis: np.ndarray, angle: float | np.ndarray) -> np.ndarray:
    """Rotate vectors `x` [N, 3] anticlockwise about the unit vector `axis` [3], by Rodrigues.

    `angle`, in radians, is a scalar or [N].
    """
    cos, sin = np.cos(angle)[..., None], np.sin(angle)[..., None]
    return x * cos + np.cross(axis, x) * sin + axis * (x @ axis)[:, None] * (1 - cos)


@dataclass(frozen=True, eq=False)
class Flow:
    """Wind on the Earth with exact trajectories: solid-body rotation with optional deformation.

    Raises ValueError if the vectors are not orthonormal, or the period is not positive.

    Parameters
    ----------
    axis : array_like
        [3], unit vector a of the rotation.
    centre : array_like
        [3], unit vector b orthogonal to `axis`: the centre of the deformation at time 0.
    deformation : float
        k T, the strength of the deformation; 10 in the published test case, 0 for solid-body
        rotation.
    period : float
        T in hours.
    """

    axis: np.ndarray
    centre: np.ndarray
    deformation: float = 10.0
    period: float = 288.0

    def __post_init__(self) -> None:
        for name in ("axis", "centre"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        vectors = np.stack([self.axis, self.centre])
        if not np.allclose(vectors @ vectors.T, np.eye(2), atol=1e-12):
            raise ValueError(
                f"axis and centre must be orthogonal unit vectors, got {self.axis} and "
                f"{self.centre}"
            )
        check_positive("period", self.period, ", in hours")

    @property
    def angular_speed(self) -> float:
        """Speed w of the solid-body rotation in radians per hour."""
        return 2 * np.pi / self.period

    def wind(self, xyz: np.ndarray, time: float) -> np.ndarray:
        """Return the velocity [N, 3] in m/s at unit vectors `xyz` [N, 3] and `time` in hours."""
        centre = rotate(self.centre[None], self.axis, self.angular_speed * time)[0]
        strength = 2 * self.deformation / self.period * np.cos(np.pi * time / self.period)
        rotation = self.angular_speed * np.cross(self.axis, xyz)  # radians per hour
        deformation = strength * (xyz @ centre)[:, None] * np.cross(xyz, centre)
        return (rotation + deformation) * EARTH_RADIUS / SECONDS_PER_HOUR

    def transport(self, xyz: np.ndarray, start: float, end: float) -> np.ndarray:
        """Return positions [N, 3] at time `end` of particles at unit vectors `xyz` at `start`.

        Times are in hours. If `end` is before `start`, trajectories are followed backwards.
        """
        y = rotate(xyz, self.axis, -self.angular_speed * start)
        phase = np.pi / self.period
        effective_time = (np.sin(phase * end) - np.sin(phase * start)) / phase
        k = self.deformation / self.period
        y = rotate(y, self.centre, -2 * k * (y @ self.centre) * effective_time)
        return rotate(y, self.axis, self.angular_speed * end)


@dataclass(frozen=True, eq=False)
class Hills:
    """A smooth tracer, as in Nair and Lauritzen, section 4.

    sum over m of height_m exp(-sharpness_m |x - centre_m|^2)

    Centres [M, 3] are unit vectors, heights [M] are in kg/kg. A sharpness [M] of 5 gives a half
    width at half height of 21 degrees, a sharpness of 20 gives 11 degrees.
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
    """An advection problem: a `flow`, and `hills` at time `start` (hours into the period)."""

    flow: Flow
    hills: Hills
    start: float

    def tracer(self, xyz: np.ndarray, hours: float) -> np.ndarray:
        """Return the exact tracer [N] at `xyz` [N, 3], `hours` after the start."""
        return self.hills(self.flow.transport(xyz, self.start + hours, self.start))


@dataclass(frozen=True, eq=False)
class Sites:
    """Nodes and their weights, with the arrays that each sample needs, made once."""

    nodes: Nodes
    weights: Tensor
    xyz: np.ndarray
    frame: np.ndarray
    position: Tensor

    @classmethod
    def of(cls, nodes: Nodes) -> "Sites":
        """Return the sites of all nodes of a grid."""
        lat, lon = nodes.radians.T
        position = np.stack([np.sin(lat), np.cos(lat), np.sin(lon), np.cos(lon)], axis=-1)
        weights = torch.from_numpy(area_weights(nodes)).float()
        return cls(nodes, weights, nodes.xyz, nodes.frame, torch.from_numpy(position).float())

    def at(self, index: Tensor) -> "Sites":
        """Return the sites of the nodes `index` [n] int64."""
        rows = index.numpy()
        return Sites(
            self.nodes[rows],
            self.weights[index],
            self.xyz[rows],
            self.frame[rows],
            self.position[index],
        )


class Statistics(NamedTuple):
    """Statistics of training samples: mean of the tracer, deviations of tracer, change and wind."""

    tracer_mean: float
    tracer_std: float
    change_std: float
    wind_std: float


UNNORMALISED = Statistics(tracer_mean=0.0, tracer_std=1.0, change_std=1.0, wind_std=1.0)


@dataclass(eq=False)
class SphereDataset(ForecastDataset):
    """Reproducible advection problems on one grid, generated on access.

    Inputs are the tracer, the wind at the start and the end of the forecast (as in a transport
    model, which also gets the wind as input), and the position. Wind components are in the frame of
    the edge directions (`Nodes.frame`), so that the upstream distance of a neighbour is an inner
    product of inputs.

    There are `size` samples. The kind of flow of each is drawn from `flows`, "rotation" or
    "deformation"; the lead time is in hours. Sample i is seeded with the integers `key` and i.
    `statistics` is the normalisation.
    """

    sites: Sites
    size: int
    flows: tuple[str, ...]
    lead_time: float
    key: tuple[int, ...]
    statistics: Statistics = UNNORMALISED

    variables = ("tracer",)
    units = ("kg/kg",)
    input_names = (
        "tracer",
        *("wind x", "wind y", "wind x at the end", "wind y at the end"),
        *("sin latitude", "cos latitude", "sin longitude", "cos longitude"),
    )

    def __post_init__(self) -> None:
        self.nodes = self.sites.nodes
        self.weights = self.sites.weights
        self.change_mean = torch.zeros(1)
        self.change_std = torch.tensor([self.statistics.change_std], dtype=torch.float32)

    def normalised(self) -> "SphereDataset":
        """Return the same samples, normalised by the statistics of the first ones."""
        cases = [self.case(i) for i in range(min(self.size, STATISTICS_SAMPLES))]
        stride = -(-len(self.nodes) // STATISTICS_NODES)
        xyz = self.sites.xyz[::stride]
        tracer = np.stack([case.tracer(xyz, 0) for case in cases])
        later = np.stack([case.tracer(xyz, self.lead_time) for case in cases])
        wind = np.stack([case.flow.wind(xyz, case.start) for case in cases])
        change_std = np.sqrt(((later - tracer) ** 2).mean())
        wind_std = np.sqrt((wind**2).sum(-1).mean() / 2)
        statistics = Statistics(tracer.mean(), tracer.std(), change_std, wind_std)
        return replace(self, statistics=statistics)

    def normalisation(self) -> dict[str, Tensor]:
        """Return the statistics of tracer, change and wind."""
        return {
            name: torch.tensor(value, dtype=torch.float64)
            for name, value in self.statistics._asdict().items()
        }

    def normalised_by(self, normalisation: Mapping[str, Tensor]) -> "SphereDataset":
        """Return the same samples, normalised by the statistics of `normalisation`."""
        values = {name: normalisation[name].item() for name in Statistics._fields}
        return replace(self, statistics=Statistics(**values))

    def __len__(self) -> int:
        return self.size

    def case(self, i: int) -> Case:
        """Draw the problem of sample i: kind of flow, orientation, phase, and two to five hills.

        Raises IndexError if i is not in [0, len).
        """
        self.check_sample(i)
        rng = np.random.default_rng((*self.key, i))
        kind = self.flows[rng.integers(len(self.flows))]
        frame, _ = np.linalg.qr(rng.standard_normal((3, 3)))
        flow = Flow(axis=frame[:, 0], centre=frame[:, 1], deformation=DEFORMATION[kind])
        num_hills = rng.integers(2, 6)
        centres = rng.standard_normal((num_hills, 3))
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
        hills = Hills(
            centres,
            heights=rng.uniform(0.3, 1.0, num_hills),
            sharpness=rng.uniform(5.0, 20.0, num_hills),
        )
        return Case(flow, hills, start=rng.uniform(0, flow.period))

    def inputs(self, i: int) -> Tensor:
        return self.physical_inputs().channels(*self.physical_sample(i))

    def present(self, i: int) -> Tensor:
        return self._tracer(i, 0)

    def truth(self, i: int) -> Tensor:
        return self._tracer(i, self.lead_time)

    def advance(self, i: int, forecasts: Sequence[Tensor]) -> Step:
        """Return the step after these forecasts: the last tracer, and the wind at that time."""
        if not forecasts:
            return Step(self.inputs(i), self.present(i), self.truth(i))
        hours = len(forecasts) * self.lead_time
        inputs = self.physical_inputs().channels(self._fields(i, forecasts[-1], hours))
        return Step(inputs, forecasts[-1], self._tracer(i, hours + self.lead_time))

    def physical_inputs(self) -> "SphereInputs":
        """Return the module that converts tracer and winds to input channels."""
        return SphereInputs(self.statistics, self.sites.position)

    def physical_sample(self, i: int) -> tuple[Tensor]:
        """Return tracer and winds of sample i, [N, 5]."""
        return (self._fields(i, self.present(i), 0),)

    def select_nodes(self, index: Tensor) -> "SphereDataset":
        """Return the same samples, computed only at the nodes `index` [n] int64."""
        return replace(self, sites=self.sites.at(index))

    def title(self, i: int) -> str:
        """Return the kind of flow and the lead time."""
        kind = "deformational flow" if self.case(i).flow.deformation else "solid-body rotation"
        return f"{kind}, {self.lead_time:g} h"

    def _fields(self, i: int, tracer: Tensor, hours: float) -> Tensor:
        """Return a tracer [N, 1] and winds of sample i, `hours` after its start, [N, 5]."""
        case = self.case(i)

        def wind_components(xyz: np.ndarray, frame: np.ndarray) -> np.ndarray:
            components = []
            for hour in (hours, hours + self.lead_time):
                wind = case.flow.wind(xyz, case.start + hour)
                components.append(np.einsum("nid,nd->ni", frame, wind))
            return np.concatenate(components, axis=1)

        winds = in_blocks(wind_components, self.sites.xyz, self.sites.frame)
        return torch.cat([tracer, torch.from_numpy(winds).float()], dim=1)

    def _tracer(self, i: int, hours: float) -> Tensor:
        case = self.case(i)
        tracer = in_blocks(lambda xyz: case.tracer(xyz, hours), self.sites.xyz)
        return torch.from_numpy(tracer).float()[:, None]


class SphereInputs(PhysicalInputs):
    """The input channels of `SphereDataset`: normalised tracer and winds, and the position."""

    names = SphereDataset.input_names[:5]
    units = ("kg/kg", "m/s", "m/s", "m/s", "m/s")
    needs_time = False

    mean: Tensor  # buffers
    std: Tensor
    position: Tensor

    def __init__(self, statistics: Statistics, position: Tensor):
        super().__init__()
        mean = torch.tensor([statistics.tracer_mean, 0, 0, 0, 0], dtype=torch.float32)
        std = torch.tensor([statistics.tracer_std, *[statistics.wind_std] * 4]).float()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.register_buffer("position", position)

    # `time` is never passed, because needs_time is False.
    def forward(self, fields: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return normalised channels [B, N, 9] and the tracer [B, N, 1]."""
        position = self.position.expand(fields.shape[0], -1, -1)
        return torch.cat([(fields - self.mean) / self.std, position], dim=2), fields[..., :1]


def sphere(
    grid_name: str = "O24",
    flows: Sequence[str] = ("rotation", "deformation"),
    lead_time: float = 12.0,
    train_size: int = 1024,
    valid_size: int = 64,
    test_size: int = 64,
    seed: int = 0,
) -> Splits:
    """Make the `sphere` data set: training, validation and test samples with distinct flows.

    Raises ValueError for an unknown kind of flow, a lead time or a size that is not positive, or a
    negative seed.

    Parameters
    ----------
    grid_name : str
        Grid of the fields, a name for `grids.grid`.
    flows : sequence of str
        Kinds of flow to draw from: "rotation", "deformation", or both.
    lead_time : float
        Hours from the present to the truth. The flows rotate once in 288 h.
    train_size, valid_size, test_size : int
        Number of samples of each split.
    seed : int
        Seed of the samples, at least 0.

    Examples
    --------
    >>> train, valid, test = sphere("O8", train_size=4, valid_size=1, test_size=1)
    >>> train[0].inputs.shape, train[0].target.shape
    (torch.Size([544, 9]), torch.Size([544, 1]))
    """
    if not flows or any(kind not in tuple(DEFORMATION) for kind in flows):
        raise ValueError(
            f"flows must be one or more of {', '.join(DEFORMATION)}, got {list(flows)}"
        )
    check_integer("train_size", train_size)
    check_integer("valid_size", valid_size)
    check_integer("test_size", test_size)
    check_integer("seed", seed, least=0)
    check_positive("lead_time", lead_time, ", in hours")
    sites = Sites.of(grid(grid_name))
    train = SphereDataset(sites, train_size, tuple(flows), lead_time, (seed, 0)).normalised()
    valid = replace(train, size=valid_size, key=(seed, 1))
    return Splits(train, valid, replace(train, size=test_size, key=(seed, 2)))
