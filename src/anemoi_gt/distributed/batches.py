"""The share of a rank in the batches of a run."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import RandomSampler

from anemoi_gt.data.datasets import Sample
from anemoi_gt.training.batches import TrainingBatches, load


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
        self.part, self.parts = mesh.get_local_rank("data"), mesh["data"].size()
        if self.batch_size % self.parts:
            raise ValueError(
                f"training.batch_size must be a multiple of the {self.parts} ranks of the data axis, got {self.batch_size}"
            )

    def since(self, step: int) -> Iterator[Sample]:
        """Yield this rank's part of the batches that are left when `step` of them have been taken."""
        generator, size = torch.Generator().manual_seed(self.seed), self.batch_size // self.parts
        order = RandomSampler(self.dataset, num_samples=self.steps * self.batch_size, generator=generator)
        left = islice(enumerate(order), step * self.batch_size, None)
        own = (sample for place, sample in left if place % self.batch_size // size == self.part)
        return load(self.dataset, size, self.device, own)
