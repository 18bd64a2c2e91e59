"""Training of a divided model: what stands in the places that a Trainer leaves open. The only place of this room that knows the loop.

learner         the loss over own nodes, gradients over the mesh, the length of all gradients together
batches         this data rank's samples of every batch, this model rank's rows of every sample
save            torch.distributed.checkpoint instead of a file
progress        on rank 0 alone
stop_request    one verdict of all ranks
"""

from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.data.datasets import Splits
from anemoi_gt.distributed.consensus import check_same, fingerprint, raise_on_all_ranks
from anemoi_gt.distributed.model_shard import ModelShard, shard_model
from anemoi_gt.distributed.sharded_checkpoint import load_checkpoint, require_checkpoint, save_checkpoint, sharded
from anemoi_gt.training import Trainer
from anemoi_gt.training.atomic_write import atomic_write
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.parallel.sharded_batches import ShardedBatches
from anemoi_gt.training.parallel.sharded_signals import AgreedStop
from anemoi_gt.training.parallel.sharded_step import ShardedLearner
from anemoi_gt.training.trainer import BEST, LAST

DATA = "data"
PATIENCE = timedelta(days=1)  # for the making of a large graph; when a rank dies, the watch ends the wait


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


def cpu_group() -> dist.ProcessGroup:
    """Return a group of all ranks that communicates from the CPU, and waits as long as all are alive. Collective."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def check_samples(splits: Splits, folder: Path) -> None:
    """Raise on all ranks unless they have the same data set and see the same folder. Collective.

    Compares the nodes, the numbers of samples, and the normalisation, in which the training samples take part.

    Raises
    ------
    ValueError
        On all ranks, naming what differs.
    """
    train, group = splits.train, dist.group.WORLD
    unseen = None if folder.is_dir() else f"{folder} must be on a file system that all ranks see"
    raise_on_all_ranks(unseen, group)
    check_same(
        {
            "the nodes of the data set": fingerprint(torch.from_numpy(train.nodes.radians), train.weights),
            "the numbers of samples": [len(part) for part in splits],
            "the normalisation of the data set": fingerprint(train.change_mean, train.change_std),
        },
        group,
    )


def train_on_ranks(trainer: Trainer, cut: ModelShard, *, resumes: bool) -> list[dict] | None:
    """Train on all ranks from the beginning, or from where a run ended, to the end. Collective.

    Parameters
    ----------
    trainer : Trainer
        As `divide_trainer` left it; its folder is one that all ranks see.
    cut : ModelShard
        How its model is divided.
    resumes : bool
        Continue from the last checkpoint in the folder, which may be of any number of ranks.

    Returns
    -------
    list of dict or None
        The records of `metrics.jsonl` on rank 0, which also leaves `best.pt` as one device reads it; None on the others.

    Raises
    ------
    Stopped
        On all ranks, after the same step, when one of them is told to stop; the last checkpoint holds that step.
    """
    if resumes:
        resume(trainer, cut)
    is_first = dist.get_rank() == 0
    path = trainer.folder / "metrics.jsonl"
    with MetricsFile(path, until=trainer.learner.step) if is_first else Silence() as metrics:
        trainer.fit(metrics)
    if not is_first:
        return None
    write_whole(trainer.folder / BEST)
    return metrics.records


def shard_trainer(trainer: Trainer, mesh: DeviceMesh) -> ModelShard:
    """Make a trainer that every rank holds train on all ranks, in place. Collective.

    Parameters
    ----------
    trainer : Trainer
        New, with a whole model, made of the same config on all ranks.
    mesh : DeviceMesh
        With axes (data, model), over all ranks.

    Returns
    -------
    ModelShard
        How the model is divided.
    """
    cut = shard_model(trainer.learner.model, mesh)
    divide_trainer(trainer, cut, mesh, cpu_group())
    return cut


def divide_trainer(trainer: Trainer, cut: ModelShard, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Make a trainer of a model that is divided already train on all ranks, in place.

    Parameters
    ----------
    trainer : Trainer
        New, with this rank's part of the model and the whole data set.
    cut : ModelShard
        How the model is divided.
    mesh : DeviceMesh
        With axes (data, model), over all ranks.
    group : ProcessGroup
        From `cpu_group`.
    """
    model, splits, config = trainer.learner.model, trainer.splits, trainer.config
    parts = Splits(*(split.select_nodes(_own_rows(cut)) for split in splits))
    trainer.splits = parts
    trainer.learner = ShardedLearner(
        model, parts.train.weights, config, trainer.device, num_nodes=len(splits.train.weights), cut=cut, mesh=mesh
    )
    numbers = {"batch_size": config.batch_size, "steps": config.steps, "seed": config.seed, "device": trainer.device}
    trainer.batches = ShardedBatches(mesh, dataset=parts.train, **numbers)
    trainer.save = partial(_save, cut)
    trainer.progress = trainer.progress if dist.get_rank() == 0 else Silence
    trainer.stop_request = partial(AgreedStop, group)


def resume(trainer: Trainer, cut: ModelShard) -> None:
    """Continue the run in a trainer's folder, of any number of ranks. Collective.

    Parameters
    ----------
    trainer : Trainer
        As `divide_trainer` left it.
    cut : ModelShard
        How its model is divided.
    """
    template = trainer.state_dict()
    config = template.pop("config")  # which `former_config` reads: it may name what this run does not
    state = load_checkpoint(sharded(trainer.folder / LAST), template, cut.tables, dist.group.WORLD)
    trainer.load_state_dict(state | {"config": config})


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
    with atomic_write(path) as file:  # which torch.save takes as it takes a path
        dcp_to_torch_save(source, file)


def _save(cut: ModelShard, path: Path, state: dict) -> None:
    save_checkpoint(sharded(path), state, cut.tables, dist.group.WORLD)


def _own_rows(cut: ModelShard) -> Tensor:
    return cut.partitions[DATA].nodes(cut.rank, "cpu")
