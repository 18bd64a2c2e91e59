"""Training of a sharded model: the parts with which a `Trainer` runs on several ranks, and the run itself.

step            loss of own nodes, gradients reduced over the mesh, one norm of all gradients: `ShardedTrainingStep`
batches         of each batch the share of this data rank, of each sample the rows of this model rank: `ShardedBatches`
save            torch.distributed.checkpoint, one folder for all ranks
stop_request    one decision of all ranks: `SharedStopRequest`
"""

import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.data.datasets import Splits
from anemoi_gt.distributed.consensus import check_same, fingerprint, raise_on_all_ranks
from anemoi_gt.distributed.model_shard import ModelShard
from anemoi_gt.distributed.sharded_checkpoint import load_checkpoint, require_checkpoint, save_checkpoint, sharded
from anemoi_gt.training import Trainer, TrainingConfig
from anemoi_gt.training.atomic_write import atomic_write
from anemoi_gt.training.data_loading import TrainingBatches
from anemoi_gt.training.metrics_log import MetricsFile
from anemoi_gt.training.parallel.step import ShardedTrainingStep
from anemoi_gt.training.signals import StopRequest
from anemoi_gt.training.trainer import BEST, LAST

DATA = "data"


def make_sharded_trainer(
    model: nn.Module,
    shard: ModelShard,
    splits: Splits,
    config: TrainingConfig,
    folder: Path | str,
    description: dict,
    *,
    mesh: DeviceMesh,
    group: dist.ProcessGroup,
) -> Trainer:
    """Return a trainer that trains a sharded model on all ranks.

    Parameters
    ----------
    model : nn.Module
        With the rows of this rank, as `shard_model` or `scatter_model` left it.
    shard : ModelShard
        From the same function.
    splits : Splits
        Whole; the trainer keeps the rows of this rank.
    config, description
        As for `Trainer`, the same on all ranks.
    folder : Path or str
        On a file system that all ranks see.
    mesh : DeviceMesh
        With axes (data, model), over all ranks.
    group : ProcessGroup
        All ranks, communicating from the CPU: `make_cpu_group`.
    """
    rows = shard.partitions[DATA].nodes(shard.rank, "cpu")
    num_nodes = len(splits.train.weights)
    return Trainer(
        model,
        Splits(*(split.select_nodes(rows) for split in splits)),
        config,
        folder,
        description,
        make_step=partial(ShardedTrainingStep, num_nodes=num_nodes, shard=shard, mesh=mesh, group=group),
        make_batches=partial(TrainingBatches, rank=mesh.get_local_rank("data"), ranks=mesh["data"].size()),
        save=partial(_save, shard),
        stop_request=partial(SharedStopRequest, group),
    )


def fit_sharded(trainer: Trainer, shard: ModelShard, *, resume: bool) -> list[dict] | None:
    """Train on all ranks to the end, from the start or from the last checkpoint in the folder. Collective.

    Takes a trainer of `make_sharded_trainer` and the shard of its model; `resume` continues from the last checkpoint in
    the folder, written on any number of ranks. Returns the records of `metrics.jsonl` on rank 0, which also leaves
    `best.pt` as one device reads it, and None on the others. Raises Stopped on all ranks, after the same step, when one
    of them received a signal; the last checkpoint holds that step.
    """
    if resume:
        load_last(trainer, shard)
    is_first = dist.get_rank() == 0
    path = trainer.folder / "metrics.jsonl"
    with MetricsFile(path, until=trainer.step.global_step) if is_first else nullcontext() as metrics:
        trainer.fit(metrics)
    if not is_first:
        return None
    write_as_file(trainer.folder / BEST)
    return metrics.records


def check_same_data(splits: Splits, folder: Path) -> None:
    """Raise on all ranks a ValueError that names what differs, unless they have the same data and see the same folder.

    Compares the nodes, the number of samples, and the normalisation, which depends on the training samples. Collective.
    """
    train, group = splits.train, dist.group.WORLD
    unseen = None if folder.is_dir() else f"{folder} must be on a file system that all ranks see"
    raise_on_all_ranks(unseen, group)
    check_same(
        {
            "the nodes of the data set": fingerprint(torch.from_numpy(train.nodes.radians), train.weights),
            "the number of samples": [len(part) for part in splits],
            "the normalisation of the data set": fingerprint(train.change_mean, train.change_std),
        },
        group,
    )


def load_last(trainer: Trainer, shard: ModelShard) -> None:
    """Load the last checkpoint in a trainer's folder, written on any number of ranks. Collective."""
    template = trainer.state_dict()
    config = template.pop("config")  # the checkpoint's may have other keys
    state = load_checkpoint(sharded(trainer.folder / LAST), template, shard.tables, dist.group.WORLD)
    trainer.load_state_dict(state | {"config": config})


def write_as_file(path: Path) -> None:
    """Write a checkpoint of several ranks, such as `best.pt`, as one file with whole tables, as one device reads it.

    On one rank; the former file stays until the new one is whole. Raises FileNotFoundError when the ranks left no such
    checkpoint; OSError, which names `path` and the reason, if it cannot be written.
    """
    source = require_checkpoint(sharded(path))
    with atomic_write(path) as file:  # torch.save takes an open file in place of a path
        dcp_to_torch_save(source, file)


def _save(shard: ModelShard, path: Path, state: dict) -> None:
    save_checkpoint(sharded(path), state, shard.tables, dist.group.WORLD)


class SharedStopRequest(StopRequest):
    """A stop request on which all ranks agree after each step, when one of them has received a signal.

    After each step the ranks start a vote and read that of the step before, so none waits for it and a run ends one
    step after the signal. A vote fails when a rank is gone: it is on the CPU, in a gloo group of all ranks, and never
    waits for a GPU.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self._group, self._vote = group, None
        self._highest = torch.zeros((), dtype=torch.int64, device="cpu")

    def __exit__(self, kind, *rest):
        if kind is None:  # a rank that failed must not wait for the others
            self._read_vote()
        super().__exit__(kind, *rest)

    def should_stop(self) -> signal.Signals | None:
        """Return the signal that ends the run on all ranks, None to continue. Collective."""
        if number := self._read_vote():
            return signal.Signals(number)
        self._highest.fill_(self.received or 0)
        self._vote = dist.all_reduce(self._highest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return None

    def _read_vote(self) -> int:
        """Return the highest signal number of the pending vote, 0 for none."""
        if self._vote is None:
            return 0
        self._vote.wait()
        self._vote = None
        return int(self._highest)
