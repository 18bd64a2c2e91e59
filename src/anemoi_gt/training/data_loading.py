"""Which samples make which batch: the only place that decides the order of the data."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch.utils.data import DataLoader, RandomSampler

from anemoi_gt.data.datasets import ForecastDataset, Sample


class TrainingBatches:
    """The batches of a run: the training samples in one random order after another.

    The batch of a step follows from seed and step alone, so a run continues anywhere.

    Parameters
    ----------
    dataset : ForecastDataset
        The training samples.
    batch_size : int
        Samples of a batch.
    steps : int
        Batches of the run.
    seed : int
        Draws the orders.
    device : torch.device
        Where the batches go.
    """

    def __init__(self, dataset: ForecastDataset, batch_size: int, steps: int, seed: int, device: torch.device):
        self.dataset, self.batch_size, self.steps, self.seed, self.device = dataset, batch_size, steps, seed, device

    def since(self, step: int) -> Iterator[Sample]:
        """Yield the batches that are left when `step` of them have been taken; each is made when it is asked for."""
        generator = torch.Generator().manual_seed(self.seed)
        order = RandomSampler(self.dataset, num_samples=self.steps * self.batch_size, generator=generator)
        return load(self.dataset, self.batch_size, self.device, islice(order, step * self.batch_size, None))


def load(dataset: ForecastDataset, batch_size: int, device: torch.device, order=None) -> Iterator[Sample]:
    """Yield the samples of a data set in batches [B, N, channels], on a device.

    Parameters
    ----------
    dataset : ForecastDataset
        The samples.
    batch_size : int
        Samples of a batch; the last may have fewer.
    device : torch.device
        Where the batches go.
    order : iterable of int, optional
        Numbers of the samples; None is every sample once, as they are numbered.
    """
    # Its own generator: else each loader draws a number from the one that dropout uses.
    loader = DataLoader(dataset, batch_size=batch_size, sampler=order, generator=torch.Generator())
    for batch in loader:
        yield Sample(*(part.to(device) for part in batch))
