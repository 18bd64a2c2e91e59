"""The interface between data sets and training: what a sample is and how it becomes physical again.

A network sees normalised channels and predicts a normalised change of the variables. Only the data set knows what was
subtracted and divided, so only the data set turns an output back into a forecast in physical units.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from anemoi_gt.data.nodes import Nodes


class Sample(NamedTuple):
    """One forecast problem, normalised; what a network trains on.

    Attributes
    ----------
    inputs : Tensor
        [N, in_channels] float32: the present, the past, and what is known beforehand.
    target : Tensor
        [N, out_channels] float32: the normalised change of each variable from `reference` to `truth`.
    """

    inputs: Tensor
    target: Tensor


class Step(NamedTuple):
    """One step of a rollout, in which a network's forecasts are its own next present.

    Attributes
    ----------
    inputs : Tensor
        [N, in_channels] float32, normalised: what the network sees.
    reference : Tensor
        [N, V] float32, physical: what its change is added to.
    truth : Tensor or None
        [N, V] float32, physical: the variables at the end of the step; None where the data end before.
    """

    inputs: Tensor
    reference: Tensor
    truth: Tensor | None


class ForecastDataset(Dataset, ABC):
    """Forecast problems on one set of nodes.

    With V variables the network's output has V channels, and

        forecast = reference + change_mean + output * change_std.

    A subclass gives `__len__`, `inputs`, `present`, `truth` and `title`, all by sample number, `reference` where the
    change is better not counted from the present, and `advance` where forecasts can go on from forecasts.

    Attributes
    ----------
    nodes : Nodes
        Where the values live; N of them.
    weights : Tensor
        [N] float32 of mean 1: each node's share in loss and scores.
    variables, units : tuple of str
        Names and physical units of the V variables.
    lead_time : float
        Hours from the present to the truth.
    input_names : tuple of str
        What the input channels are.
    change_mean, change_std : Tensor
        [V] float32, the normalisation of the change, from training samples alone.
    """

    nodes: Nodes
    weights: Tensor
    variables: tuple[str, ...]
    units: tuple[str, ...]
    lead_time: float
    input_names: tuple[str, ...]
    change_mean: Tensor
    change_std: Tensor

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
        """Return the known state that the predicted change is added to, in physical units, [N, V] float32: the present."""
        return self.present(i)

    @abstractmethod
    def truth(self, i: int) -> Tensor:
        """Return the variables after the lead time in physical units, [N, V] float32."""

    @abstractmethod
    def title(self, i: int) -> str:
        """Return what sample i is, for pictures and logs."""

    @property
    def in_channels(self) -> int:
        """Number of input channels."""
        return len(self.input_names)

    @property
    def out_channels(self) -> int:
        """Number of output channels, one per variable."""
        return len(self.variables)

    def __getitem__(self, i: int) -> Sample:
        """Return sample i, normalised.

        Raises
        ------
        IndexError
            If i is not in [0, len).
        """
        self.check_sample(i)
        change = self.truth(i) - self.reference(i)
        return Sample(self.inputs(i), (change - self.change_mean) / self.change_std)

    def check_sample(self, i: int) -> None:
        """Raise IndexError unless there is a sample i."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample must be in [0, {len(self)}), got {i}")

    def forecast(self, i: int, output: Tensor) -> Tensor:
        """Return the forecast that a network's output means.

        Parameters
        ----------
        i : int
            Number of the sample.
        output : Tensor
            [N, out_channels], the network's output for `inputs(i)`; any floating dtype, on the CPU.

        Returns
        -------
        Tensor
            [N, V] float32, in physical units.

        Raises
        ------
        ValueError
            If output has another shape.
        """
        expected = (len(self.nodes), self.out_channels)
        if not isinstance(output, Tensor) or tuple(output.shape) != expected:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"output must be a tensor {expected}, one row per node and one column per variable, got {got}"
            )
        return self.add_change(self.reference(i), output)

    def add_change(self, reference: Tensor, output: Tensor) -> Tensor:
        """Return reference + change_mean + output * change_std, [N, V] float32 in physical units."""
        return reference + self.change_mean + output.to(torch.float32) * self.change_std

    def advance(self, i: int, forecasts: Sequence[Tensor]) -> Step:
        """Return the step of a rollout that follows some forecasts.

        Parameters
        ----------
        i : int
            Number of the sample that the rollout starts from.
        forecasts : sequence of Tensor
            [N, V] each, physical: the forecasts of the steps before, a lead time apart. After none comes sample i itself.

        Returns
        -------
        Step
            The step from `len(forecasts)` to `len(forecasts) + 1` lead times after the start.

        Raises
        ------
        ValueError
            If the data set's inputs do not follow from forecasts.
        """
        raise ValueError(
            f"a rollout needs a data set whose inputs follow from forecasts, {type(self).__name__} has none"
        )

    def part(self, rows: Tensor) -> Dataset:
        """Return the same samples at some of the nodes, with their `weights`.

        Here a sample is made whole and cut. A data set that can make or read a part of one does so.

        Parameters
        ----------
        rows : Tensor [n], int64
            Numbers of the nodes.
        """
        return CutSamples(self, rows)

    def baselines(self) -> dict[str, Callable[[int], Tensor]]:
        """Return simple forecasts by name, each a function from sample number to [N, V] in physical units."""
        return {"persistence": self.present}


class CutSamples(Dataset):
    """The samples of a data set, made whole and then cut to some of the nodes.

    Parameters
    ----------
    dataset : ForecastDataset
        Makes the samples.
    rows : Tensor [n], int64
        Numbers of the nodes.
    """

    def __init__(self, dataset: ForecastDataset, rows: Tensor):
        self.dataset, self.rows = dataset, rows
        self.weights = dataset.weights[rows]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        """Return these rows of sample i."""
        return Sample(*(part[self.rows] for part in self.dataset[i]))


class Splits(NamedTuple):
    """The three parts of a data set; no truth of one is seen by another.

    Attributes
    ----------
    train, valid, test : ForecastDataset
        To fit, to choose, to report.
    """

    train: ForecastDataset
    valid: ForecastDataset
    test: ForecastDataset
