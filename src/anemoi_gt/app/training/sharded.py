"""Training of a sharded model: what a `Trainer` needs on several ranks, and the run itself.

step            loss of local nodes, reduced gradients, one gradient norm: `ShardedTrainingStep`
batches         this data rank's share of each batch, this model rank's rows of each sample
save            torch.distributed.checkpoint, one folder for all ranks
stop_request    one decision of all ranks: `SharedStopRequest`

loss here       = sum over own nodes of weight * error / number of nodes of the whole model
loss            = mean over data of sum over model of loss here
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.app.datasets.forecast_dataset import Sample, Splits, TrainingBatches
from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.progress import StopRequest
from anemoi_gt.app.training.run_files import MetricsFile, atomic_write
from anemoi_gt.app.training.step import TrainingStep, autocast
from anemoi_gt.app.training.trainer import BEST, LAST, Trainer
from anemoi_gt.distributed.consensus import check_same, fingerprint, raise_on_all_ranks
from anemoi_gt.distributed.gradients import clip_gradients, reduce_gradients, sum_loss
from anemoi_gt.distributed.module_shard import ModuleShard
from anemoi_gt.distributed.process_group import world_group
from anemoi_gt.distributed.sharded_checkpoint import (
    load_checkpoint,
    require_checkpoint,
    save_checkpoint,
    sharded,
)


def make_sharded_trainer(
    model: nn.Module,
    shard: ModuleShard,
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
    model, shard
        The model with the rows of this rank, and its shard, from `shard_model` or `scatter_model`.
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

    rows = shard.partitions["data"].nodes(shard.rank, "cpu")
    num_nodes = len(splits.train.weights)
    # samples at nodes, all that training reads
    parts: list[Any] = [split.select_nodes(rows) for split in splits]
    return Trainer(
        model,
        Splits(*parts),
        config,
        folder,
        description,
        schema=splits.train.schema(),
        make_step=partial(
            ShardedTrainingStep, num_nodes=num_nodes, shard=shard, mesh=mesh, group=group
        ),
        make_batches=partial(
            TrainingBatches, rank=mesh.get_local_rank("data"), ranks=mesh["data"].size()
        ),
        save=lambda path, state: save_checkpoint(sharded(path), state, shard.tables, world_group()),
        stop_request=partial(SharedStopRequest, group),
    )


def fit_sharded(trainer: Trainer, shard: ModuleShard, *, resume: bool) -> list[dict] | None:
    """Train on all ranks to the end, from the start or the folder's last checkpoint. Collective.

    Takes a trainer of `make_sharded_trainer` and the shard of its model; `resume` continues from
    the last checkpoint in the folder, written on any number of ranks. Returns the records of
    `metrics.jsonl` on rank 0, which also leaves `best.pt` as one device reads it, and None on the
    others. Raises Stopped on all ranks, after the same step, when one of them received a signal;
    the last checkpoint holds that step.
    """
    if resume:
        template = trainer.state_dict()
        # the checkpoint's may have other keys
        plain = {name: template.pop(name) for name in ("config", "schema")}
        state = load_checkpoint(
            sharded(trainer.folder / LAST), template, shard.tables, world_group()
        )
        trainer.load_state_dict(state | plain)
    if dist.get_rank() != 0:
        trainer.fit(None)
        return None
    path = trainer.folder / "metrics.jsonl"
    with MetricsFile(path, until=trainer.step.global_step) as metrics:
        trainer.fit(metrics)
    write_as_file(trainer.folder / BEST)
    return metrics.records


def check_same_data(splits: Splits, folder: str | Path) -> None:
    """Raise ValueError on all ranks, naming the difference, unless data and folder are the same.

    Compares the nodes, the number of samples, and the normalisation, which depends on the training
    samples. Collective.
    """
    train, group = splits.train, world_group()
    unseen = (
        None if Path(folder).is_dir() else f"{folder} must be on a file system that all ranks see"
    )
    raise_on_all_ranks(unseen, group)
    check_same(
        {
            "the nodes of the data set": fingerprint(
                torch.from_numpy(train.nodes.radians), train.weights
            ),
            "the number of samples": [len(part) for part in splits],
            "the normalisation of the data set": fingerprint(train.change_mean, train.change_std),
        },
        group,
    )


def write_as_file(path: str | Path) -> None:
    """Write a checkpoint of several ranks, such as `best.pt`, as one file for one device.

    On one rank; the former file stays until the new one is whole. Raises FileNotFoundError when the
    ranks left no such checkpoint; OSError, which names `path` and the reason, if it cannot be
    written.
    """
    source = require_checkpoint(sharded(path))
    with atomic_write(path) as file:
        target: Any = file  # torch.save accepts an open file instead of a path
        dcp_to_torch_save(source, target)


class ShardedTrainingStep(TrainingStep):
    """A training step of a sharded model; all ranks take the same steps and return the same loss.

    Raises ValueError when `config.compile` or `config.cuda_graph` asks for what the device, the
    model or the ranks do not support.

    Parameters
    ----------
    model, weights, config, device
        As for `TrainingStep`: the model as `shard_model` or `scatter_model` left it, the weights
        [n] of own nodes.
    num_nodes : int
        Of the whole model.
    shard, mesh, group
        As for `make_sharded_trainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Tensor,
        config: TrainingConfig,
        device: torch.device,
        *,
        num_nodes: int,
        shard: ModuleShard,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
    ):
        super().__init__(model, weights, config, device, mesh=mesh)
        self.num_nodes, self.mesh, self.group = num_nodes, mesh, group
        self.shared, self.own = shard.parameters(self.model)

    def forward_backward(self, batch: Sample) -> Tensor:
        """Set the parameters' gradients to this rank's part; return the whole loss. Collective."""
        with data_parallel_rng(self.mesh, self.device):
            loss = super().forward_backward(batch)
        return sum_loss(loss, self.mesh)

    def clip_gradients(self) -> None:
        """Reduce the gradients over the mesh and clip them by the norm of all. Collective."""
        reduce_gradients(self.shared, self.own, self.mesh)
        # Before unscaling: gradients that are not finite on one rank become NaN on all, and all
        # skip the step.
        clip_gradients(
            self.shared, self.own, self.config.clip_norm * self.scaler.get_scale(), self.mesh
        )
        self.scaler.unscale_(self.optimizer)

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have launched the same work; raise if one is lost, or on timeout.

        Waiting for the device could then last forever: NCCL's watchdog does not see the collectives
        of a CUDA graph.
        """
        dist.barrier(self.group)

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return the loss of a model on all ranks' batches, a detached scalar. Collective."""
        return sum_loss(self.own_loss(model, batch), self.mesh)

    def own_loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return this rank's part of `weighted_mse`; its gradients depend on all ranks."""
        with autocast(self.config.precision, self.device):
            error = (model(batch.inputs) - batch.target).square().mean(dim=(0, 2))
            return (error * self.weights).sum() / self.num_nodes

    def is_finite(self) -> bool:
        """Return whether the weights of all ranks are finite. Collective; synchronises."""
        finite = torch.tensor(float(super().is_finite()), device=self.device)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    def state_dict(self) -> dict:
        """Return everything that a step changes; the optimiser by names of parameters."""
        return super().state_dict() | {
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer)
        }

    def load_state_dict(self, state: dict) -> None:
        by_name = state["optimizer"]
        super().load_state_dict(state | {"optimizer": self.optimizer.state_dict()})
        set_optimizer_state_dict(self.model, self.optimizer, by_name)


@contextmanager
def data_parallel_rng(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    """Seed random numbers per model in the block, equal on its ranks; restore the state after.

    So dropout differs between the batches of two data ranks, and a sharded model drops what one
    device would. All ranks of the mesh (data, model) enter with generators in the same state: that
    of the CPU, and of `device`.
    """
    if (models := mesh["data"].size()) == 1:
        yield
        return
    seeds = torch.randint(2**62, (models,), device="cpu").tolist()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seeds[mesh.get_local_rank("data")])
        yield


class SharedStopRequest(StopRequest):
    """A stop request shared by all ranks: they agree after each step whether one got a signal.

    After each step the ranks start a vote and read the vote of the previous step, so none waits for
    it and a run ends one step after the signal. A vote fails when a rank is gone: it is on the CPU,
    in a gloo group of all ranks, and never waits for a GPU.
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
        self._vote = dist.all_reduce(
            self._highest, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return None

    def _read_vote(self) -> int:
        """Return the highest signal number of the pending vote, 0 for none."""
        if self._vote is None:
            return 0
        self._vote.wait()
        self._vote = None
        return int(self._highest)
