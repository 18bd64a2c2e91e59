"""Training of a sharded model: the parts of a `Trainer` for several ranks, and the run itself.

step            loss of local nodes, reduced gradients, one gradient norm: `ShardedTrainingStep`
batches         this data rank's share of each batch, this model rank's rows of each sample
save            torch.distributed.checkpoint, one folder for all ranks
stop_request    one decision for all ranks: `SharedStopRequest`

local loss      = sum over local nodes of weight * error / number of nodes of the whole model
loss            = mean over data of sum over model of local loss
"""

import math
import signal
from collections.abc import Callable, Iterator
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
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim.swa_utils import get_ema_multi_avg_fn

from anemoi_gt.app.datasets.forecast_dataset import Sample, Splits, TrainingBatches
from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.loggers import open_metrics
from anemoi_gt.app.training.progress import StopRequest
from anemoi_gt.app.training.run_files import atomic_write, sharded
from anemoi_gt.app.training.run_folder import BEST, LAST
from anemoi_gt.app.training.step import TrainingStep, autocast, node_errors
from anemoi_gt.app.training.trainer import Trainer, describe_samples
from anemoi_gt.distributed.consensus import (
    check_same,
    fingerprint,
    raise_on_all_ranks,
    run_on_rank0,
)
from anemoi_gt.distributed.gradients import local_shard, optimizer_step, sum_loss
from anemoi_gt.distributed.module_shard import ModuleShard
from anemoi_gt.distributed.parameter_shard import shard_parameters
from anemoi_gt.distributed.process_group import world_group
from anemoi_gt.distributed.sharded_checkpoint import (
    find_checkpoint,
    load_checkpoint,
    load_values,
    require_checkpoint,
    save_checkpoint,
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
    divide_parameters: bool = False,
) -> Trainer:
    """Return a trainer for a sharded model on all ranks.

    Parameters
    ----------
    model, shard
        The model with the rows of this rank, and its shard, from `shard_model` or `scatter_model`.
    splits : Splits
        Data sets of all nodes; the trainer keeps the rows of this rank.
    config, description
        As for `Trainer`, the same on all ranks.
    folder : Path or str
        A folder on a file system that all ranks share.
    mesh : DeviceMesh
        With axes (data, model), over all ranks.
    group : ProcessGroup
        All ranks, communicating from the CPU, from `make_cpu_group`.
    divide_parameters : bool
        Divide parameters, gradients, optimiser states and averages among all ranks
        (`shard_parameters`).
    """
    divide = None
    if divide_parameters:
        divide = partial(shard_parameters, shard=shard, mesh=mesh)
    rows = shard.partitions["data"].nodes(shard.rank, "cpu")
    num_nodes = len(splits.train.weights)
    # not ForecastDatasets, but samples and weights are all that training reads
    parts: list[Any] = [split.select_nodes(rows) for split in splits]
    return Trainer(
        model,
        Splits(*parts),
        config,
        folder,
        description,
        schema=splits.train.schema(),
        valid=describe_samples(splits.valid),
        make_step=partial(
            ShardedTrainingStep,
            num_nodes=num_nodes,
            shard=shard,
            mesh=mesh,
            group=group,
            divide=divide,
        ),
        make_batches=partial(
            TrainingBatches, rank=mesh.get_local_rank("data"), ranks=mesh["data"].size()
        ),
        save=lambda path, state: save_checkpoint(sharded(path), state, shard.tables, world_group()),
        read_best_loss=lambda path: run_on_rank0(partial(read_sharded_best_loss, sharded(path))),
        stop_request=partial(SharedStopRequest, group),
    )


def fit_sharded(trainer: Trainer, shard: ModuleShard, *, resume: bool) -> list[dict] | None:
    """Train on all ranks to the end, from scratch or from the last checkpoint. Collective.

    `trainer` is from `make_sharded_trainer`, and `shard` the shard of its model. `resume` continues
    from the last checkpoint in the folder, which any number of ranks may have written. Rank 0 also
    writes `best.pt` for a single device, and returns the records of `metrics.jsonl`; other ranks
    return None. If any rank received a signal, raises Stopped on all ranks after the same step,
    which the last checkpoint holds.
    """
    if resume:
        template = trainer.state_dict()
        # not read as the rest, because their keys in the checkpoint may differ
        plain = {name: template.pop(name) for name in ("config", "schema", "valid")}
        folder = sharded(trainer.folder / LAST)
        for name in ("config", "valid"):
            plain[name] = run_on_rank0(partial(load_values, folder, name))
        state = load_checkpoint(folder, template, shard.tables, world_group())
        trainer.load_state_dict(state | plain)
    if dist.get_rank() != 0:
        trainer.fit(None)
        return None
    with open_metrics(trainer) as metrics:
        trainer.fit(metrics)
    write_as_file(trainer.folder / BEST)
    return metrics.records


def read_sharded_best_loss(folder: Path) -> float:
    """Return the lowest validation loss in a checkpoint, infinity if there is none."""
    if find_checkpoint(folder) is None:
        return math.inf
    return load_values(folder, "best_loss")


def check_same_data(splits: Splits, folder: str | Path) -> None:
    """Raise ValueError on all ranks unless data and folder are the same on all. Collective.

    Compares the nodes, the number of samples, and the normalisation, which depends on the training
    samples. The message names the difference.
    """
    train = splits.train
    group = world_group()
    problem = None
    if not Path(folder).is_dir():
        problem = f"{folder} must be on a file system that all ranks see"
    raise_on_all_ranks(problem, group)
    nodes = fingerprint(torch.from_numpy(train.nodes.radians), train.weights)
    values = {
        "the nodes of the data set": nodes,
        "the number of samples": [len(split) for split in splits],
        "the normalisation of the data set": fingerprint(train.change_mean, train.change_std),
    }
    check_same(values, group)


def write_as_file(path: str | Path) -> None:
    """Convert a checkpoint of several ranks to a file for one device, such as `best.pt`.

    Call it on one rank. The former file stays until the new one is complete. Raises
    FileNotFoundError if there is no such checkpoint, and an OSError that names `path` and the
    reason if the file cannot be written.
    """
    source = require_checkpoint(sharded(path))
    with atomic_write(path) as file:
        target: Any = file  # torch.save accepts an open file instead of a path
        dcp_to_torch_save(source, target)


class ShardedTrainingStep(TrainingStep):
    """A training step of a sharded model; all ranks take the same steps and return the same loss.

    Raises ValueError if the device, the model or the ranks do not support `config.compile` or
    `config.cuda_graph`.

    Parameters
    ----------
    model, weights, config, device, divide
        As for `TrainingStep`, with a model from `shard_model` or `scatter_model`, and weights [n]
        of local nodes.
    num_nodes : int
        Number of nodes of the whole model.
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
        divide: Callable[[nn.Module], None] | None = None,
    ):
        super().__init__(model, weights, config, device, mesh=mesh, divide=divide)
        average = get_ema_multi_avg_fn(config.average_decay)
        self.average.multi_avg_fn = partial(average_local_shards, average)
        self.num_nodes = num_nodes
        self.mesh = mesh
        self.group = group
        self.shared, self.own = shard.parameters(self.model)

    def forward_backward(self, batch: Sample) -> Tensor:
        """Set the gradients of the local loss; return the loss over all ranks. Collective."""
        with data_parallel_rng(self.mesh, self.device):
            loss = super().forward_backward(batch)
        return sum_loss(loss, self.mesh)

    def update_weights(self) -> None:
        """Reduce the gradients over the mesh, clip them and step the optimiser. Collective."""
        norm = self.config.clip_norm
        optimizer_step(
            self.optimizer, self.shared, self.own, self.mesh, max_norm=norm, scaler=self.scaler
        )

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have launched the same work; raise if one is lost, or on timeout.

        Waiting for the device could then last forever: NCCL's watchdog does not see the collectives
        of a CUDA graph.
        """
        dist.barrier(self.group)

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return the loss over the batches of all ranks, a detached scalar. Collective."""
        return sum_loss(self.own_loss(model, batch), self.mesh)

    def own_loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return the local part of `weighted_mse`, whose gradients depend on all ranks."""
        with autocast(self.config.precision, self.device):
            errors = node_errors(model(batch.inputs), batch.target, self.weights)
            return errors.sum() / self.num_nodes

    def is_finite(self) -> bool:
        """Return whether the weights of all ranks are finite. Collective; synchronises."""
        shards = map(local_shard, self.model.parameters())
        own = all(bool(shard.isfinite().all()) for shard in shards)
        finite = torch.tensor(float(own), device=self.device)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    def state_dict(self) -> dict:
        """Return all state that a step changes; the optimiser state is by parameter name."""
        # `save_checkpoint` finds the tables of a state by the names of their parameters
        with implicit_replication():  # PyTorch steps the optimiser to make its states
            by_name = get_optimizer_state_dict(self.model, self.optimizer)
        return super().state_dict() | {"optimizer": by_name}

    def load_state_dict(self, state: dict) -> None:
        with implicit_replication():  # as for a `state_dict`
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        # afterwards, because it sets the learning rate, which the optimiser's state holds too
        super().load_state_dict(state | {"optimizer": self.optimizer.state_dict()})


def average_local_shards(
    average: Callable[..., None], averages: list[Tensor], weights: list[Tensor], count: Tensor
) -> None:
    """Update averages by `average` on the shards of this rank, which are tensors of one kind."""
    average([*map(local_shard, averages)], [*map(local_shard, weights)], count)


@contextmanager
def data_parallel_rng(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    """Seed the random generators per replica of the model in the block; restore them afterwards.

    Dropout then differs between the batches of data ranks, and a sharded model drops the same edges
    as on one device, but in chunks of mappers, which draw a mask each and have other destinations.
    All ranks of the mesh must enter with the same states of the generators of the CPU and of
    `device`.
    """
    num_replicas = mesh["data"].size()
    if num_replicas == 1:
        yield
        return
    # from the CPU's generator, which has the same state on all ranks: each draws all seeds
    seeds = torch.randint(2**62, (num_replicas,), device="cpu").tolist()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seeds[mesh.get_local_rank("data")])
        yield


class SharedStopRequest(StopRequest):
    """A stop request shared by all ranks, which agree after each step whether one got a signal.

    After each step, the ranks start a vote and read the vote of the previous step, so no rank waits
    for it, and a run stops one step after the signal. Votes are on the CPU, in a gloo group of all
    ranks, so they never wait for a GPU, and fail if a rank is lost.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self._group = group
        self._vote = None
        self._highest = torch.zeros((), dtype=torch.int64, device="cpu")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:  # a failed rank must not wait for the others
            self._read_vote()
        super().__exit__(kind, *rest)

    def should_stop(self) -> signal.Signals | None:
        """Return the signal that stops the run on all ranks, or None. Collective."""
        number = self._read_vote()
        if number != 0:
            return signal.Signals(number)
        self._highest.fill_(self.received or 0)
        self._vote = dist.all_reduce(
            self._highest, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return None

    def _read_vote(self) -> int:
        """Return the highest signal number in the pending vote, or 0."""
        if self._vote is None:
            return 0
        self._vote.wait()
        self._vote = None
        return int(self._highest)
