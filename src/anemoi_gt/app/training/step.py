"""One training step: forward, backward, clipping, AdamW and weight averaging, in mixed precision.

loss      = sum over nodes of weight * (model(inputs) - target)^2,  mean over batch, nodes, channels
g         = clip(d loss / d weights, clip_norm)
weights   = AdamW(weights, g, learning rate of the step)
average   = d average + (1 - d) weights,  d = average_decay; initially the weights
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from anemoi_gt.app.datasets.forecast_dataset import Sample
from anemoi_gt.app.training.capture_choice import replays_steps
from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.run_files import load_weights
from anemoi_gt.nn import (
    BaseMapper,
    GraphTransformerBackwardMapper,
    GraphTransformerBaseBlock,
    GraphTransformerMapperBlock,
    InteractionBlock,
)
from anemoi_gt.replay.cuda_graph import Capture, CUDAGraphedStep, capture_cuda_graph

LOSS_SCALE = 2.0**10  # initial scale for float16; losses are about 1, and the scaler increases it
# a gradient that overflows float16 even at this scale is above 2**30, so no scale helps
LOWEST_SCALE = 2.0**-14
AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
REMEDY = "set training.cuda_graph=false"

# Inductor sends messages as early as possible and waits for them as late as possible.
OVERLAP_MESSAGES = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}
STATEFUL = ("optimizer", "schedule", "scaler")  # attributes with a state dict, besides the weights


class TrainingStep:
    """A model, the moving average of its weights, its optimiser, learning rate and loss scale.

    Raises ValueError if the device, the model or the ranks do not support `config.compile` or
    `config.cuda_graph`.

    Parameters
    ----------
    model : nn.Module
        Maps [B, N, in_channels] to [B, N, out_channels]. It is moved to the device and trained in
        place.
    weights : Tensor
        [N] of mean 1, weight of each node in the loss.
    mesh : DeviceMesh, optional
        With axes (data, model): the ranks that train a sharded model. None for one device.
    divide : callable, optional
        Divides the parameters of the model and of its average among ranks, in place.

    Attributes
    ----------
    model : nn.Module
        The model with the weights after the last step; its blocks are compiled if `config.compile`
        is True.
    average : torch.optim.swa_utils.AveragedModel
        A copy with an exponential moving average of the weights, for forecasts. It shares the
        buffers of `model`.
    global_step : int
        Number of steps taken.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Tensor,
        config: TrainingConfig,
        device: torch.device,
        *,
        mesh: DeviceMesh | None = None,
        divide: Callable[[nn.Module], None] | None = None,
    ):
        self.config = config
        self.device = device
        self.model = model.to(device)
        self.weights = weights.to(device)
        self.average = AveragedModel(
            self.model, multi_avg_fn=get_ema_multi_avg_fn(config.average_decay)
        )
        share_buffers(self.average.module, self.model)
        if config.compile:
            compile_blocks(self.model, has_messages=mesh is not None)
        # of the model as it was given: a CUDA graph captures what the hooks of `divide` compute
        is_replayed = replays_steps(config, self.model, device, mesh, type(self))
        if divide is not None:
            for replica in (self.model, self.average.module):
                divide(replica)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, config.weight_decay), lr=config.learning_rate
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._relative_rate)
        self.optimizer.zero_grad()
        # A step without gradients changes nothing; without it, LambdaLR warns if the scaler skips
        # the first step.
        self.optimizer.step()
        # disabled in other precisions, it passes losses, gradients and steps on unchanged
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=LOSS_SCALE, enabled=config.precision == "16-mixed"
        )
        self.global_step = 0
        self._captured: CUDAGraphedStep | None = None
        if is_replayed:
            self.capture(capture_cuda_graph)

    def training_step(self, batch: Sample) -> Tensor:
        """Take one optimiser step and return the loss before it, a detached scalar."""
        self.model.train()  # validation has left it in evaluation mode
        loss = self.forward_backward(batch)
        self.optimizer_step()
        return loss

    def forward_backward(self, batch: Sample) -> Tensor:
        """Set the gradients of the scaled loss; return the detached loss.

        They replace the gradients of the last call, with and without a CUDA graph.

        Raises ValueError for a batch of another shape than the first one, if that is captured.
        """
        self.optimizer.zero_grad()
        if self._captured is None:
            return self._forward_backward(batch)
        return self._captured(batch)

    def optimizer_step(self) -> None:
        """Clip gradients; update weights, their average, learning rate and loss scale."""
        if self.scaler.is_enabled():
            self.wait_for_ranks()  # the scaler reads back from the device
        self.update_weights()
        self.schedule.step()
        self.average.update_parameters(self.model)
        self.global_step += 1

    def update_weights(self) -> None:
        """Unscale the gradients, clip their norm to `config.clip_norm` and step the optimiser."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have launched the same work; called before each device wait."""

    def capture(self, capture: Capture) -> None:
        """Replay forward and backward from the next step on, by a `CUDAGraphedStep`."""
        self._captured = CUDAGraphedStep(
            self._forward_backward, self.model, self.device, capture, REMEDY
        )

    def close(self) -> None:
        """Release a captured step with its memory and NCCL messages, before the process group."""
        if self._captured is not None:
            self._captured.reset()

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return the loss of a model on a batch, over all ranks, a scalar."""
        return self.own_loss(model, batch)

    def own_loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return the loss part of this process, a scalar with gradient, in run precision."""
        with autocast(self.config.precision, self.device):
            return weighted_mse(model(batch.inputs), batch.target, self.weights)

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    def is_finite(self) -> bool:
        """Return whether all weights are finite; synchronises."""
        return all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())

    def has_lost_gradients(self) -> bool:
        """Return whether skipped steps have used up the loss scale; synchronises."""
        return self.scaler.is_enabled() and self.scaler.get_scale() < LOWEST_SCALE

    def state_dict(self) -> dict:
        """Return all state that a step changes."""
        return {
            "model": self.model.state_dict(),
            "average": self.average.module.state_dict(),
            **{name: getattr(self, name).state_dict() for name in STATEFUL},
            "step": self.global_step,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore a `state_dict`. Raises ValueError if its weights belong to another model."""
        load_weights(self.model, state, "model")
        load_weights(self.average.module, state, "average")
        for name in STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            # from the schedule of this config, because `steps` may have increased
            group["lr"] = rate * self._relative_rate(state["step"])
        self.global_step = state["step"]
        # at 0, the next step would overwrite the average
        self.average.n_averaged.fill_(self.global_step)

    def _forward_backward(self, batch: Sample) -> Tensor:
        loss = self.own_loss(self.model, batch)
        # Autograd's own thread runs on another core: what the forward pass left in the caches of
        # this one would have to move there and back in every step.
        with torch.autograd.set_multithreading_enabled(mode=False):
            self.scaler.scale(loss).backward()
        return loss.detach()

    def _relative_rate(self, step: int) -> float:
        return warmup_cosine(
            step, min(self.config.warmup_steps, self.config.steps), self.config.steps
        )


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast context for a precision of `TrainingConfig` on a device."""
    dtype = AUTOCAST[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def share_buffers(copied: nn.Module, model: nn.Module) -> None:
    """Share a model's buffers with its copy, so that the graph is stored once."""
    for module, original in zip(copied.modules(), model.modules(), strict=True):
        for name, buffer in original.named_buffers(recurse=False):
            setattr(module, name, buffer)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return the parameter groups of AdamW: matrices decay, vectors (biases, norms) do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def weighted_mse(output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over batch, nodes and channels of weight * (output - target)^2, a scalar.

    Output and target [B, N, C] are normalised, and weights [N] or [N, C] have mean 1. The mean is
    about 1 for a forecast without skill, because targets have unit variance. Raises ValueError if
    the shapes of output and target differ, because PyTorch would broadcast them.
    """
    return node_errors(output, target, weights).mean()


def node_errors(output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Return the addends of `weighted_mse`, its mean over batch and channels, [N]."""
    if output.shape != target.shape:
        raise ValueError(
            f"output must have the shape of target, {tuple(target.shape)}, got "
            f"{tuple(output.shape)}"
        )
    squares = (output - target).square()
    if weights.ndim == 1:
        return squares.mean(dim=(0, 2)) * weights
    return (squares.mean(dim=0) * weights).mean(dim=1)


def warmup_cosine(step: int, warmup_steps: int, steps: int) -> float:
    """Return the learning rate of a step, 0 to steps - 1, as a fraction of its maximum, in [0, 1].

        (step + 1) / (warmup_steps + 1)                                         step < warmup_steps
        (1 + cos(pi (step - warmup_steps) / (steps - warmup_steps))) / 2        later, down to 0

    Examples
    --------
    >>> [round(warmup_cosine(step, warmup_steps=2, steps=6), 3) for step in range(7)]
    [0.333, 0.667, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(steps - warmup_steps, 1)
    return (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def compile_blocks(model: nn.Module, *, has_messages: bool = False) -> None:
    """Compile each block in place, at its first call and for each size or dtype.

    Blocks are compiled one by one. Blocks of one kind, and all chunks of a mapper, share compiled
    code, so a deep model compiles as fast as a shallow one. The norm and linear map at the end of a
    decoder are compiled as well. Weights and their names do not change, and a copy of the model is
    not compiled. `has_messages` says that blocks exchange rows between ranks; these messages then
    overlap with computation. Raises ValueError if the model has no such block.
    """
    modules = list(model.modules())
    kinds = (GraphTransformerBaseBlock, InteractionBlock)
    blocks = [module for module in modules if isinstance(module, kinds)]
    if not blocks:
        name = type(model).__name__
        raise ValueError(
            "training.compile must be false for a model without blocks of graph transformers or "
            f"graph networks, got true and {name}"
        )
    has_chunks = any(len(getattr(module, "chunks", ())) > 1 for module in modules)
    ends = [
        module.node_data_extractor
        for module in modules
        if isinstance(module, GraphTransformerBackwardMapper)
    ]
    # PyTorch 2.9 moves messages only in a process group, and looks for one even without messages.
    options = OVERLAP_MESSAGES if has_messages else None
    in_mappers: set[nn.Module] = set()
    for module in modules:
        if isinstance(module, BaseMapper | GraphTransformerMapperBlock):
            in_mappers.update(module.modules())
    for module in (*blocks, *ends):
        # Only chunks have dynamic sizes. With dynamic sizes elsewhere, PyTorch 2.13 fails on the
        # row counts of all-to-all messages.
        module.compile(dynamic=has_chunks and module in in_mappers, options=options)
