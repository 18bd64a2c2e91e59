"""Training step of a sharded model: gradients and losses are reduced over the mesh, and all ranks skip the same steps.

loss here     = sum over own nodes of weight * error / number of nodes of the whole model
loss          = mean over data of sum over model of loss here
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.data.datasets import Sample
from anemoi_gt.distributed.grad_sync import clip_gradients, reduce_gradients, sum_loss
from anemoi_gt.distributed.model_shard import ModelShard
from anemoi_gt.training import TrainingConfig
from anemoi_gt.training.step import AUTOCAST, TrainingStep


class ShardedTrainingStep(TrainingStep):
    """A training step of a sharded model; all ranks take the same steps, and each returns the loss of all.

    Raises ValueError when `config.compile` or `config.cuda_graph` asks for what the device, the model or the ranks do
    not support.

    Parameters
    ----------
    model : nn.Module
        As `shard_model` or `scatter_model` left it.
    weights : Tensor [n]
        Of own nodes, see `TrainingStep`.
    config : TrainingConfig
    device : torch.device
    num_nodes : int
        Of the whole model.
    shard : ModelShard
    mesh : DeviceMesh
        With axes (data, model).
    group : ProcessGroup
        All ranks, communicating from the CPU (gloo).
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Tensor,
        config: TrainingConfig,
        device: torch.device,
        *,
        num_nodes: int,
        shard: ModelShard,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
    ):
        super().__init__(model, weights, config, device)
        if config.cuda_graph:
            check_messages_capturable(mesh)
        self.num_nodes, self.mesh, self.group = num_nodes, mesh, group
        self.shared, self.own = shard.parameters(self.model)

    def forward_backward(self, batch: Sample) -> Tensor:
        """Leave this rank's part of the gradients at the parameters; return the loss of all ranks. Collective."""
        with data_parallel_rng(self.mesh, self.device):
            loss = super().forward_backward(batch)
        return sum_loss(loss, self.mesh)

    def clip_gradients(self) -> None:
        """Reduce the gradients over the mesh and clip them by the norm of all. Collective."""
        reduce_gradients(self.shared, self.own, self.mesh)
        # Before unscaling: gradients that are not finite on one rank become NaN on all, and all skip the step.
        clip_gradients(self.shared, self.own, self.config.clip_norm * self.scaler.get_scale(), self.mesh)
        self.scaler.unscale_(self.optimizer)

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have launched the same work; raise when one is gone, or after the timeout.

        Waiting for the device could then last forever: NCCL's watchdog does not see the collectives of a CUDA graph.
        """
        dist.barrier(self.group)

    def training_loss(self, batch: Sample) -> Tensor:
        """Return the part of the loss of own nodes, a scalar; its gradients come from all ranks of the model."""
        return self.own_loss(self.model, batch)

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return the loss of a model on the batches of all ranks, a scalar without gradient. Collective."""
        return sum_loss(self.own_loss(model, batch), self.mesh)

    def own_loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return the part of own nodes in `weighted_mse` of the whole model."""
        dtype = AUTOCAST[self.config.precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            error = (model(batch.inputs) - batch.target).square().mean(dim=(0, 2))
            return (error * self.weights).sum() / self.num_nodes

    def is_finite(self) -> bool:
        """Return True if the weights of all ranks are finite. Collective; waits for the device."""
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


def check_messages_capturable(mesh: DeviceMesh) -> None:
    """Raise a ValueError unless the ranks of a model communicate by NCCL, whose messages a CUDA graph captures."""
    backends = dist.get_backend_config(mesh.get_group("model"))
    if "cuda:nccl" not in backends:
        raise ValueError(
            "training.cuda_graph must be false unless the ranks of a model communicate by NCCL, "
            f"got true and {backends}"
        )


@contextmanager
def data_parallel_rng(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    """Give each model its own random numbers in the block, the same on all its ranks; restore the common state after.

    So dropout differs between the batches of two data ranks, and a sharded model drops what one device would. All ranks
    of the mesh (data, model) enter with generators in the same state: that of the CPU, and of `device`.
    """
    models = mesh["data"].size()
    if models == 1:
        yield
        return
    seeds = torch.randint(2**62, (models,), device="cpu").tolist()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seeds[mesh.get_local_rank("data")])
        yield
