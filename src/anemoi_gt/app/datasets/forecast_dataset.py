"""Interface between data sets and training: normalised samples, batches, physical forecasts.

A network maps normalised channels to the normalised change of the variables. The data set, which
holds the normalisation, converts outputs to forecasts:

    forecast = reference + change_mean + output * change_std
"""

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, RandomSampler, default_collate

from anemoi_gt.app.datasets.fields import Grid, Key, minutes
from anemoi_gt.app.datasets.physical import PhysicalInputs
from anemoi_gt.app.datasets.schema import TEXT, DataSchema, Period
from anemoi_gt.data.nodes import Nodes


class Sample(NamedTuple):
    """Normalised inputs [N, in_channels] and target [N, out_channels] of one forecast, float32.

    The target is the normalised change of each variable from `reference` to `truth`.
    """

    inputs: Tensor
    target: Tensor


class Step(NamedTuple):
    """Normalised inputs [N, in_channels] and two physical states [N, V] of a rollout step, float32.

    The predicted change is added to `reference`. `truth` is the state at the end of the step, or
    None beyond the end of the data.
    """

    inputs: Tensor
    reference: Tensor
    truth: Tensor | None


class ForecastDataset(Dataset, ABC):
    """Forecast samples on one set of nodes.

    A subclass implements `__len__`, `inputs`, `present`, `truth` and `title`, which take a sample
    index (except `__len__`). It also implements `reference` if the change is not relative to the
    present, `advance` to support rollouts, `start_time` if samples have dates, and `normalisation`
    and `normalised_by` if inputs are normalised by statistics, so that checkpoints store them.
    Samples may draw from the CPU's global generators, such as noise on the inputs: these are seeded
    for each sample of a batch, by the seed of the run and the number of the sample in its order.

    Attributes
    ----------
    nodes : Nodes
        N grid points.
    weights : Tensor
        [N] float32 of mean 1: weights of the nodes in loss and scores; or [N, V], a column per
        variable, 0 at points where physical fields are NaN, as at sea points of a soil moisture.
    variables, units : tuple of str
        Names and physical units of the V variables.
    lead_time : float
        Hours from the present to the truth.
    input_names : tuple of str
        Names of the input channels.
    change_mean, change_std : Tensor
        [V] float32, statistics of the change in the training samples.
    diagnostics, forcings, constants, input_steps, time_encoding, keys
        As in `DataSchema`; by default none, and one input step.
    forcing_units : dict of str to str
        Units of the forcings.
    reference_name : str
        Description of `reference`.
    grid : Grid, optional
        The dimensions of the nodes in the data, for files of forecasts.
    members : tuple of str
        Labels of the ensemble members; the samples of `starting_at` are one for each.
    left_out : int
        Number of samples that are left out because some of their times are missing.
    trained_periods : tuple
        The `periods` of the training samples of a trained model.
    attributes : dict of str to dict
        CF attributes of the variables, such as `standard_name`, for files of forecasts.
    """

    nodes: Nodes
    weights: Tensor
    variables: tuple[str, ...]
    units: tuple[str, ...]
    lead_time: float
    input_names: tuple[str, ...]
    change_mean: Tensor
    change_std: Tensor
    diagnostics: tuple[str, ...] = ()
    forcings: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    forcing_units: Mapping[str, str] = MappingProxyType({})
    keys: Mapping[str, Key] = MappingProxyType({})
    attributes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    input_steps: int = 1
    time_encoding: str = "none"
    reference_name: str = "the present"
    grid: Grid | None = None
    members: tuple[str, ...] = ("",)
    left_out: int = 0
    trained_periods: tuple[Period, ...] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def inputs(self, i: int) -> Tensor:
        """Return the normalised input channels of sample i, [N, in_channels] float32."""

    @abstractmethod
    def present(self, i: int) -> Tensor:
        """Return the variables at the start of the forecast in physical units, [N, V] float32."""

    def reference(self, i: int) -> Tensor:
        """Return the state to which the change is added, by default the present, [N, V]."""
        return self.present(i)

    @abstractmethod
    def truth(self, i: int) -> Tensor:
        """Return the variables after the lead time in physical units, [N, V] float32."""

    @abstractmethod
    def title(self, i: int) -> str:
        """Return a title of sample i for plots and logs."""

    def start_time(self, i: int) -> np.datetime64 | None:
        """Return the start time of sample i, or None if samples have no dates."""
        return None

    def member(self, i: int) -> str:
        """Return the label of the ensemble member of sample i, "" if it has none."""
        return ""

    def starting_at(self, start: str) -> "ForecastDataset":
        """Return the data set reduced to the sample that starts at a date or the "latest" time.

        The sample need not have a truth. Raises ValueError if the data set has no dates, or lacks
        the inputs of that time.
        """
        raise ValueError(
            f"start needs a data set with dates, {type(self).__name__} has none: choose a test "
            "sample"
        )

    def require_samples(self) -> None:
        """Raise ValueError if there is no sample."""
        if len(self) == 0:
            raise ValueError(self.no_samples_message())

    def no_samples_message(self) -> str:
        """Return the message of `require_samples`."""
        return "each split must have a sample, got none"

    def normalisation(self) -> dict[str, Tensor]:
        """Return the statistics that normalise inputs and change, by name."""
        return {"change_mean": self.change_mean, "change_std": self.change_std}

    def normalised_by(self, normalisation: Mapping[str, Tensor]) -> Self:
        """Return the same samples, normalised by the `normalisation` of a trained model."""
        other = copy.copy(self)
        other.change_mean = normalisation["change_mean"].float()
        other.change_std = normalisation["change_std"].float()
        return other

    def missing_points(self) -> dict[str, np.ndarray]:
        """Return the variables without values at some points, and these points, [N] bool."""
        return {}

    def periods(self) -> tuple[Period, ...]:
        """Return first and last start of these samples, by member; none if they have no dates."""
        return ()

    def physical_inputs(self) -> PhysicalInputs:
        """Return the module that converts physical values to input channels, for packages.

        Raises ValueError if the data set does not have one.
        """
        raise ValueError(
            f"a package needs a data set that implements physical_inputs() and physical_sample(), "
            f"{type(self).__name__} does not: export the model itself by "
            "anemoi_gt.export.export_model"
        )

    def physical_sample(self, i: int) -> tuple[Tensor, ...]:
        """Return the inputs of `physical_inputs` for sample i: fields [N, P], and time if needed.

        Raises ValueError if the data set does not implement it.
        """
        raise ValueError(f"{type(self).__name__} does not implement physical_sample()")

    def schema(self) -> DataSchema:
        """Return the schema of the data for the checkpoints of a model trained on them."""
        return DataSchema(
            **{name: tuple(getattr(self, name)) for name in TEXT},
            units=dict(zip(self.variables, self.units, strict=True)) | dict(self.forcing_units),
            keys=dict(self.keys),
            lead_time=float(self.lead_time),
            input_steps=self.input_steps,
            reference=self.reference_name,
            time_encoding=self.time_encoding,
            nodes=self.nodes,
            normalisation=self.normalisation(),
            missing=self.missing_points(),
            periods=self.periods(),
        )

    @property
    def in_channels(self) -> int:
        """Number of input channels."""
        return len(self.input_names)

    @property
    def out_channels(self) -> int:
        """Number of output channels, one per variable."""
        return len(self.variables)

    def __getitem__(self, i: int) -> Sample:
        """Return the normalised sample i. Raises IndexError if i is not in [0, len)."""
        self.check_sample(i)
        change = self.truth(i) - self.reference(i)
        return Sample(self.inputs(i), (change - self.change_mean) / self.change_std)

    def check_sample(self, i: int) -> None:
        """Raise IndexError unless i is in [0, len)."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample index must be in [0, {len(self)}), got {i}")

    def forecast(self, i: int, output: Tensor) -> Tensor:
        """Convert a network's output for `inputs(i)` to a forecast, [N, V] float32, physical units.

        The output is [N, out_channels], of any floating dtype, on the CPU. Raises ValueError if it
        has another shape.
        """
        expected = (len(self.nodes), self.out_channels)
        if output.shape != expected:
            raise ValueError(
                f"output must be a tensor {expected}, one row per node and one column per "
                f"variable, got {tuple(output.shape)}"
            )
        return self.add_change(self.reference(i), output)

    def add_change(self, reference: Tensor, output: Tensor) -> Tensor:
        """Return reference + change_mean + output * change_std, [N, V] float32, physical."""
        return reference + self.change_mean + output.to(torch.float32) * self.change_std

    def advance(self, i: int, forecasts: Sequence[Tensor]) -> Step:
        """Return the next rollout step, `len(forecasts)` lead times after the start of sample i.

        `forecasts` are the physical forecasts [N, V] of the previous steps; for the first step,
        which is sample i, there are none. Raises ValueError if the data set does not support
        rollouts.
        """
        raise ValueError(
            f"a rollout needs a data set that implements advance(), {type(self).__name__} does not"
        )

    def select_nodes(self, index: Tensor) -> Dataset:
        """Return the same samples and `weights` at the nodes `index` [n] int64.

        The default slices whole samples; override it to compute or read only the selected nodes.
        """
        return NodeSubset(self, index)

    def baselines(self, step: int | None = None) -> dict[str, Callable[[int], Tensor]]:
        """Return baseline forecasts by name: functions from sample index to physical [N, V].

        With `step`, the number of a rollout step from 1, return only baselines that exist at any
        lead time.
        """
        return {"persistence": self.present}


def starts_in_training(samples: ForecastDataset) -> tuple[int, str]:
    """Return the number of samples that start in a training period of their member, and its text.

    The periods are those of the trained model. Data without members are compared with all.
    """
    periods = [
        (label, np.datetime64(first), np.datetime64(last))
        for label, first, last in samples.trained_periods
    ]
    count = 0
    found = set()
    for i in range(len(samples)):
        member, time = samples.member(i), samples.start_time(i)
        if time is None:
            continue
        inside = []
        for label, first, last in periods:
            if (label == member or "" in (label, member)) and first <= time <= last:
                inside.append((first, last))
        count += len(inside) > 0
        found.update(inside)
    if not found:
        return 0, ""
    first, last = min(first for first, _ in found), max(last for _, last in found)
    return count, f"{minutes(first)} to {minutes(last)}"


def with_units(name: str, units: str) -> str:
    """Return "name [units]", or the name if there are no units."""
    return f"{name} [{units}]" if units else name


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return rows of cells as a table, with the first `texts` columns on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        for i in range(texts):
            cells[i] = row[i].ljust(widths[i])
        lines.append("  ".join(cells))
    return "\n".join(lines)


def find_start(times: np.ndarray, start: str) -> int:
    """Return the index of a date in ascending times [T]; "latest" is the last one.

    Raises ValueError if it is not a date, or not in the data.
    """
    if start == "latest":
        return len(times) - 1
    try:
        date = np.datetime64(str(start).replace(" ", "T"))
    except ValueError:
        raise ValueError(
            f"start must be latest or a date, such as 2020-01-31T18, got {start}"
        ) from None
    index = int(np.searchsorted(times, date))
    if index == len(times) or times[index] != date:
        near = times[max(0, index - 1) : index + 1]
        nearest = " and ".join(np.datetime_as_string(time, unit="m") for time in near)
        first, last = (np.datetime_as_string(time, unit="m") for time in times[[0, -1]])
        raise ValueError(
            f"start must be a time of the data, which are from {first} to {last}, got {start}; "
            f"nearest: {nearest}"
        )
    return index


class NodeSubset(Dataset):
    """The samples of `dataset` at the nodes `index` [n] int64."""

    def __init__(self, dataset: ForecastDataset, index: Tensor):
        self.dataset = dataset
        self.index = index
        self.weights = dataset.weights[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        """Return sample i at these nodes."""
        return Sample(*(field[self.index] for field in self.dataset[i]))


class Splits(NamedTuple):
    """Training, validation and test samples; no truth of a split occurs in an earlier split."""

    train: ForecastDataset
    valid: ForecastDataset
    test: ForecastDataset


@dataclass(eq=False)
class TrainingBatches:
    """Batches of a run, or of one data rank, from repeated random orders of the samples.

    The batch of a step depends only on seed and step, so a run can continue from any step, on any
    number of ranks. `batch_size` is the total over all data ranks, `steps` the number of batches of
    the run, `rank` the data rank, and `ranks` the number of data ranks that share a batch. Raises
    ValueError if the batch cannot be split evenly, or is larger than the data set.
    """

    dataset: ForecastDataset
    batch_size: int
    steps: int
    seed: int
    device: torch.device
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        share_of_batch(self.batch_size, self.ranks)
        if self.batch_size > len(self.dataset):
            raise ValueError(
                f"training.batch_size must be at most {len(self.dataset)}, the number of training "
                f"samples, got {self.batch_size}"
            )

    def since(self, step: int) -> Iterator[Sample]:
        """Yield the batches after the first `step` batches; each is loaded when it is requested."""
        generator = torch.Generator().manual_seed(self.seed)
        # without replacement: one permutation of the samples after the other
        order = RandomSampler(
            self.dataset, num_samples=self.steps * self.batch_size, generator=generator
        )
        # skipped indices are drawn, and their samples not loaded
        remaining = islice(enumerate(order), step * self.batch_size, None)
        share = share_of_batch(self.batch_size, self.ranks)
        local = ((n, i) for n, i in remaining if n % self.batch_size // share == self.rank)
        return load(self.dataset, share, self.device, local, self.seed)


def share_of_batch(batch_size: int, ranks: int) -> int:
    """Return the batch size of each data rank. Raises ValueError if the split is uneven."""
    if batch_size % ranks != 0:
        raise ValueError(
            f"training.batch_size must be a multiple of the {ranks} ranks of the data axis, got "
            f"{batch_size}"
        )
    return batch_size // ranks


def load(
    dataset: ForecastDataset,
    batch_size: int,
    device: torch.device,
    order: Iterable[tuple[int, int]] | None = None,
    seed: int = 0,
) -> Iterator[Sample]:
    """Yield the batches [B, N, channels] of a data set on a device; the last one may be smaller.

    `order` yields numbers, which seed what a sample draws, and indices of samples; None is all of
    them once, in order.
    """
    if order is None:
        order = enumerate(range(len(dataset)))
    samples: Any = (seeded_sample(dataset, i, seed, n) for n, i in order)
    for batch in BatchSampler(samples, batch_size, drop_last=False):
        inputs, target = default_collate(batch)
        yield Sample(inputs.to(device), target.to(device))


def seeded_sample(dataset: ForecastDataset, i: int, *seeds: int) -> Sample:
    """Return sample i, which may draw from the CPU's global generators, seeded by `seeds`.

    PyTorch's generator, from which dropout draws, is restored.
    """
    random.seed(str(seeds))
    np.random.seed(random.getrandbits(32))  # noqa: NPY002  this is about the global generator
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(random.getrandbits(64))
        return dataset[i]
