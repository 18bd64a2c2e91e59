"""Batches of a run: the order of the samples, and loading them to a device."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch.utils.data import DataLoader, RandomSampler

from anemoi_gt.data.forecast_dataset import ForecastDataset, Sample


class TrainingBatches:
    """Batches of a run, or the share of one data rank in them: the training samples in one random order after another.

    The batch of a step depends on seed and step alone, so a run can continue from any step, on any number of ranks.
    `batch_size` is that of all data ranks together, `steps` the number of batches of the run, `rank` the data rank, and
    `ranks` the number of data ranks that share a batch. Raises ValueError when the batch cannot be split evenly, or is
    larger than the data set.
    """

    def __init__(
        self,
        dataset: ForecastDataset,
        batch_size: int,
        steps: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.dataset, self.batch_size, self.steps, self.seed, self.device = dataset, batch_size, steps, seed, device
        self.rank, self.own_size = rank, share_of_batch(batch_size, ranks)
        if batch_size > len(dataset):
            must = f"must be at most {len(dataset)}, the number of training samples"
            raise ValueError(f"training.batch_size {must}, got {batch_size}")

    def since(self, step: int) -> Iterator[Sample]:
        """Yield the batches after the first `step` ones; each is loaded when it is requested."""
        generator = torch.Generator().manual_seed(self.seed)
        order = RandomSampler(self.dataset, num_samples=self.steps * self.batch_size, generator=generator)
        remaining = islice(enumerate(order), step * self.batch_size, None)
        own = (sample for n, sample in remaining if n % self.batch_size // self.own_size == self.rank)
        return load(self.dataset, self.own_size, self.device, own)


def share_of_batch(batch_size: int, ranks: int) -> int:
    """Return the batch size of each data rank; raise a ValueError when the batch cannot be split evenly."""
    if batch_size % ranks:
        must = f"must be a multiple of the {ranks} ranks of the data axis"
        raise ValueError(f"training.batch_size {must}, got {batch_size}")
    return batch_size // ranks


def load(dataset: ForecastDataset, batch_size: int, device: torch.device, order=None) -> Iterator[Sample]:
    """Yield a data set in batches [B, N, channels] on a device, the last one possibly smaller.

    `order` yields indices of the samples; None is all of them once, in order.
    """
    # Its own generator: otherwise each loader draws from the one that dropout uses.
    for batch in DataLoader(dataset, batch_size=batch_size, sampler=order, generator=torch.Generator()):
        yield Sample(*(part.to(device) for part in batch))
