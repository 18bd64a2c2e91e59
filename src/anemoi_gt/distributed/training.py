"""Training of a divided model: what stands in the places that a Trainer leaves open. The only place of this room that knows the loop.

learner     the loss over own nodes, gradients over the mesh, the length of all gradients together
batches     this data rank's samples of every batch, this model rank's rows of every sample
save        torch.distributed.checkpoint instead of a file
progress    on rank 0 alone
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, RandomSampler

from anemoi_gt.data.datasets import ForecastDataset, Sample
from anemoi_gt.distributed.agreement import check_same
from anemoi_gt.distributed.checkpoint import load_checkpoint, require_checkpoint, save_checkpoint
from anemoi_gt.distributed.folder import TORCHRUN, checkpoint_to_continue, sharded
from anemoi_gt.distributed.gradients import clip_gradients, reduce_gradients, sum_loss
from anemoi_gt.distributed.model import ModelShard, shard_model
from anemoi_gt.distributed.start import ShardingConfig
from anemoi_gt.training import Trainer, TrainingConfig
from anemoi_gt.training.batches import TrainingBatches, load
from anemoi_gt.training.files import replacing
from anemoi_gt.training.learner import AUTOCAST, Learner
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.trainer import BEST, LAST

DATA = "data"


class OwnRows(Dataset):
    """The samples of a data set, with the rows of this rank's nodes.

    Parameters
    ----------
    dataset : ForecastDataset
    rows : Tensor [n], int64, on the CPU
    """

    def __init__(self, dataset: ForecastDataset, rows: Tensor):
        self.dataset, self.rows = dataset, rows
        self.weights = dataset.weights[rows]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        """Return own rows of sample i."""
        return Sample(*(part[self.rows] for part in self.dataset[i]))


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


class ShardedLearner(Learner):
    """A learner whose model is divided; every rank takes the same steps, and knows the loss of all.

    Parameters
    ----------
    model : nn.Module
        As `shard_model` left it.
    weights : Tensor [n]
        Of own nodes.
    config : TrainingConfig
    device : torch.device
    num_nodes : int
        Of all ranks of the model.
    cut : ModelShard
    mesh : DeviceMesh
        With axes (data, model).
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Tensor,
        config: TrainingConfig,
        device: torch.device,
        *,
        num_nodes: int,
        cut: ModelShard,
        mesh: DeviceMesh,
    ):
        super().__init__(model, weights, config, device)
        self.num_nodes, self.mesh = num_nodes, mesh
        self.shared, self.own = cut.parameters(self.model)

    def learn(self, batch: Sample) -> Tensor:
        """Take one optimiser step, on all ranks; returns the loss of all before it, a scalar."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.own_loss(self.model, batch)
        self.scaler.scale(loss).backward()
        reduce_gradients(self.shared, self.own, self.mesh)
        # Before they are unscaled: what is not finite on one rank is so on all, and all skip the step or none.
        clip_gradients(self.shared, self.own, self.config.clip_norm * self.scaler.get_scale(), self.mesh)
        self.scaler.unscale_(self.optimizer)
        self.move()
        return sum_loss(loss, self.mesh)

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return the loss of a model on the batches of all ranks, a scalar without gradient. Collective."""
        return sum_loss(self.own_loss(model, batch), self.mesh)

    def own_loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return what own nodes add to `weighted_mse` of the whole."""
        dtype = AUTOCAST[self.config.precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            error = (model(batch.inputs) - batch.target).square().mean(dim=(0, 2))
            return (error * self.weights).sum() / self.num_nodes

    def is_finite(self) -> bool:
        """Whether the weights of all ranks are finite. Collective; waits for the device."""
        finite = torch.tensor(float(super().is_finite()), device=self.device)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    def state_dict(self) -> dict:
        """Return everything that a step changes; the optimiser by names of parameters."""
        return super().state_dict() | {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}

    def load_state_dict(self, state: dict) -> None:
        """Continue from what `state_dict` returned."""
        by_name = state["optimizer"]
        super().load_state_dict(state | {"optimizer": self.optimizer.state_dict()})
        set_optimizer_state_dict(self.model, self.optimizer, by_name)


class Silence:
    """A progress bar, or a file of metrics, of a rank that shows and writes nothing."""

    def __init__(self, samples: int = 0, done: int = 0):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def advance(self, samples: int) -> None:
        """Show nothing."""

    def show(self, **numbers: float) -> None:
        """Show nothing."""

    def write(self, **record: int | float | str) -> None:
        """Write nothing."""

    def sync(self) -> None:
        """Wait for nothing."""


def train_on_ranks(trainer: Trainer, mesh: DeviceMesh, sharding: ShardingConfig, *, resumes: bool) -> list[dict] | None:
    """Train on all ranks from the beginning, or from where a run ended, to the end. Collective.

    Parameters
    ----------
    trainer : Trainer
        New, with a whole model, made of the same config on all ranks; its folder is one that all of them see.
    mesh : DeviceMesh
        From `started`.
    sharding : ShardingConfig
    resumes : bool
        Continue from the last checkpoint in the folder where there is one, of any number of ranks.

    Returns
    -------
    list of dict or None
        The records of `metrics.jsonl` on rank 0, which also leaves `best.pt` as one device reads it; None on the others.

    Raises
    ------
    ValueError
        On all ranks, when they differ in config or folder, or the folder holds a run that is not to be continued.
    """
    check_same({"config": trainer.description, "sharding": sharding, "folder": str(trainer.folder)}, dist.group.WORLD)
    last = trainer.folder / LAST
    former = checkpoint_to_continue(last, TORCHRUN, resume=resumes)
    strategy = "edges" if sharding.strategy == "none" else sharding.strategy
    cut = shard_trainer(trainer, mesh, strategy, overlap=sharding.overlap)
    if former is not None:
        resume(trainer, cut, last)
    is_first = dist.get_rank() == 0
    path = trainer.folder / "metrics.jsonl"
    with MetricsFile(path, until=trainer.learner.step) if is_first else Silence() as metrics:
        trainer.fit(metrics)
    if not is_first:
        return None
    write_whole(trainer.folder / BEST)
    return metrics.records


def shard_trainer(trainer: Trainer, mesh: DeviceMesh, strategy: str = "edges", *, overlap: bool = True) -> ModelShard:
    """Make a trainer train on all ranks, in place. Collective.

    Parameters
    ----------
    trainer : Trainer
        New, with a whole model, made of the same config on all ranks.
    mesh : DeviceMesh
        With axes (data, model), over all ranks.
    strategy : {"edges", "heads"}
    overlap : bool
        As for `shard_model`.

    Returns
    -------
    ModelShard
        How the model is divided.
    """
    learner, splits, config = trainer.learner, trainer.splits, trainer.config
    cut = shard_model(learner.model, mesh, strategy, overlap=overlap)
    rows = cut.partitions[DATA].nodes(cut.rank, "cpu")
    train, valid = OwnRows(splits.train, rows), OwnRows(splits.valid, rows)
    trainer.splits = splits._replace(train=train, valid=valid)
    trainer.learner = ShardedLearner(
        learner.model, train.weights, config, trainer.device, num_nodes=len(splits.train.weights), cut=cut, mesh=mesh
    )
    numbers = {"batch_size": config.batch_size, "steps": config.steps, "seed": config.seed, "device": trainer.device}
    trainer.batches = ShardedBatches(mesh, dataset=train, **numbers)
    trainer.save = partial(_save, cut)
    trainer.progress = trainer.progress if dist.get_rank() == 0 else Silence
    return cut


def resume(trainer: Trainer, cut: ModelShard, path: Path) -> None:
    """Continue a run from a checkpoint of a sharded trainer, of any number of ranks. Collective.

    Parameters
    ----------
    trainer : Trainer
        As `shard_trainer` left it.
    cut : ModelShard
        What that returned.
    path : Path
        Such as folder / "last.pt": the name under which the trainer saved it.
    """
    template = trainer.state_dict()
    trainer.load_state_dict(load_checkpoint(sharded(path), template, cut.tables, dist.group.WORLD))


def write_whole(path: Path) -> None:
    """Write the checkpoint of a sharded trainer as one file with the whole tables, as one device reads it. On one rank.

    Parameters
    ----------
    path : Path
        Such as folder / "best.pt"; what stood there stays until the new one is whole.

    Raises
    ------
    FileNotFoundError
        When the ranks left no such checkpoint.
    OSError
        If it cannot be written; names `path` and the reason.
    """
    source = require_checkpoint(sharded(path))
    with replacing(path) as file:  # which torch.save takes as it takes a path
        dcp_to_torch_save(source, file)


def _save(cut: ModelShard, path: Path, state: dict) -> None:
    save_checkpoint(sharded(path), state, cut.tables, dist.group.WORLD)
