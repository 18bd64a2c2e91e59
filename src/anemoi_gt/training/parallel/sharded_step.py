"""A learner whose model is divided: gradients over the mesh, the loss of all, one verdict on what is finite."""

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
from anemoi_gt.training.step import AUTOCAST, Learner


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

    Raises
    ------
    ValueError
        When `config.compile` or `config.cuda_graph` asks for what the device, the model or the ranks cannot do.
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
        if config.cuda_graph:
            check_messages_recordable(mesh)
        self.num_nodes, self.mesh = num_nodes, mesh
        self.shared, self.own = cut.parameters(self.model)

    def learn(self, batch: Sample) -> Tensor:
        """Take one optimiser step, on all ranks; returns the loss of all before it, a scalar."""
        self.model.train()
        self.optimizer.zero_grad()
        with own_draws(self.mesh, self.device):
            loss = self.differentiate(batch)
        reduce_gradients(self.shared, self.own, self.mesh)
        # Before they are unscaled: what is not finite on one rank is so on all, and all skip the step or none.
        clip_gradients(self.shared, self.own, self.config.clip_norm * self.scaler.get_scale(), self.mesh)
        self.scaler.unscale_(self.optimizer)
        self.move()
        return sum_loss(loss, self.mesh)

    def training_loss(self, batch: Sample) -> Tensor:
        """Return what own nodes add to the loss, a scalar; its gradients come from all ranks of the model."""
        return self.own_loss(self.model, batch)

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


def check_messages_recordable(mesh: DeviceMesh) -> None:
    """Raise a ValueError unless the ranks of a model communicate by NCCL, whose messages a CUDA graph records."""
    backends = dist.get_backend_config(mesh.get_group("model"))
    if "cuda:nccl" not in backends:
        raise ValueError(
            f"training.cuda_graph must be false where the ranks of a model do not communicate by NCCL, got true and {backends}"
        )


@contextmanager
def own_draws(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    """Let every model draw random numbers of its own in the block, the same on all its ranks; behind it all ranks draw the same again.

    So dropout treats the samples of two data ranks differently, and one model is treated as one device would.

    Parameters
    ----------
    mesh : DeviceMesh
        With axes (data, model); all ranks come with generators in the same state.
    device : torch.device
        Whose generator is used beside that of the CPU.
    """
    models = mesh["data"].size()
    if models == 1:
        yield
        return
    seeds = torch.randint(2**62, (models,), device="cpu").tolist()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seeds[mesh.get_local_rank("data")])
        yield
