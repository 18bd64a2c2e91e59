"""The share of a rank in the batches of a run."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import RandomSampler

from anemoi_gt.data.datasets import Sample
from anemoi_gt.training.data_loading import TrainingBatches, load


class ShardedBatches(TrainingBatches):
    """The share of a data rank in the batches of a run: the same batches for every mesh, split in order.

    Parameters
    ----------
    mesh : DeviceMesh
        With axes (data, model).
    **options
        Of `TrainingBatches`; `batch_size` is that of all data ranks together.

    Raises
    ------
    ValueError
        When the batch cannot be split evenly.
    """

    def __init__(self, mesh: DeviceMesh, **options: Any):
        super().__init__(**options)
        self.part = mesh.get_local_rank("data")
        self.own_size = share_of_batch(self.batch_size, mesh["data"].size())

    def since(self, step: int) -> Iterator[Sample]:
        """Yield this rank's part of the batches that are left when `step` of them have been taken."""
        generator = torch.Generator().manual_seed(self.seed)
        order = RandomSampler(self.dataset, num_samples=self.steps * self.batch_size, generator=generator)
        left = islice(enumerate(order), step * self.batch_size, None)
        own = (sample for place, sample in left if place % self.batch_size // self.own_size == self.part)
        return load(self.dataset, self.own_size, self.device, own)


def share_of_batch(batch_size: int, parts: int) -> int:
    """Return how many samples of a batch each of so many data ranks takes.

    Raises
    ------
    ValueError
        When the batch cannot be split evenly.
    """
    if batch_size % parts:
        raise ValueError(
            f"training.batch_size must be a multiple of the {parts} ranks of the data axis, got {batch_size}"
        )
    return batch_size // parts
