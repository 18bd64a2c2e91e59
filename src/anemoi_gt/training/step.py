"""Learner: one optimiser step, and all that it changes. The only place that scales losses and moves weights."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from anemoi_gt.data.datasets import Sample
from anemoi_gt.training.checkpoint import load_weights
from anemoi_gt.training.compilation import compile_blocks
from anemoi_gt.training.config import TrainingConfig
from anemoi_gt.training.cuda_graph import RecordedPass, Recorder, check_recordable, record_cuda_graph
from anemoi_gt.training.loss import weighted_mse
from anemoi_gt.training.schedule import warmup_cosine

LOSS_SCALE = 2.0**10  # where float16 begins; losses are about 1, and it grows by itself
LOWEST_SCALE = 2.0**-14  # a gradient that overflows float16 even here is above 2**30, and no scale will mend it
AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
PARTS = ("optimizer", "schedule", "scaler")  # beside the weights, with state dicts of their own


class Learner:
    """A model, its averaged weights, and what moves them.

    Parameters
    ----------
    model : nn.Module
        Maps [B, N, in_channels] to [B, N, out_channels]. It is moved to the device and trained in place.
    weights : Tensor
        [N] of mean 1: each node's share in the loss.
    config : TrainingConfig
        The numbers.
    device : torch.device
        Where to compute.

    Attributes
    ----------
    model : nn.Module
        With the weights that the optimiser last left; its blocks are compiled when `config.compile` asks for it.
    average : torch.optim.swa_utils.AveragedModel
        With an exponential moving average of them, which forecasts; its buffers are those of `model`.
    step : int
        Steps taken.

    Raises
    ------
    ValueError
        When `config.compile` or `config.cuda_graph` asks for what the device or the model cannot do.
    """

    def __init__(self, model: nn.Module, weights: Tensor, config: TrainingConfig, device: torch.device):
        self.config, self.device = config, device
        self.model, self.weights = model.to(device), weights.to(device)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(config.average_decay))
        share_buffers(self.average.module, self.model)
        if config.compile:
            compile_blocks(self.model)
        self.optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), lr=config.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.optimizer.zero_grad()
        self.optimizer.step()  # without gradients nothing moves; LambdaLR warns when a scaler skips the very first step
        scaled = config.precision == "16-mixed"
        self.scaler = torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE, enabled=scaled)
        self.step = 0
        self._recorded: RecordedPass | None = None
        if config.cuda_graph:
            check_recordable(self.model, device)
            self.record(record_cuda_graph)

    def learn(self, batch: Sample) -> Tensor:
        """Take one optimiser step; returns the loss before it, a scalar."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.differentiate(batch)
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.move()
        return loss

    def differentiate(self, batch: Sample) -> Tensor:
        """Leave the gradients of the scaled loss at the parameters, which have none; returns the loss, a scalar without history."""
        return (self._recorded or self._differentiate)(batch)

    def record(self, recorder: Recorder) -> None:
        """From the next step on, replay what `recorder` makes of forward and backward, as `RecordedPass` says."""
        self._recorded = RecordedPass(self._differentiate, list(self.model.parameters()), self.device, recorder)

    def close(self) -> None:
        """Let go of a recorded step: of its memory, and of messages in it, for which the end of a process group would wait."""
        if self._recorded is not None:
            self._recorded.forget()

    def move(self) -> None:
        """Move the weights along the clipped gradients, and all that follows the steps."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.average.update_parameters(self.model)
        self.step += 1

    def training_loss(self, batch: Sample) -> Tensor:
        """Return the loss that gradients are taken of, a scalar."""
        return self.loss(self.model, batch)

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return the loss of a model on a batch, a scalar, in the precision of the run."""
        dtype = AUTOCAST[self.config.precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            return weighted_mse(model(batch.inputs), batch.target, self.weights)

    def rate(self) -> float:
        """Return the learning rate that the optimiser holds, which the next step uses."""
        return self.optimizer.param_groups[0]["lr"]

    def is_finite(self) -> bool:
        """Whether all weights are finite; waits for the device."""
        return all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())

    def has_lost_gradients(self) -> bool:
        """Whether so many steps were skipped for their gradients that the loss scale is spent; waits for the device."""
        return self.scaler.is_enabled() and self.scaler.get_scale() < LOWEST_SCALE

    def state_dict(self) -> dict:
        """Return everything that a step changes."""
        return {
            "model": self.model.state_dict(),
            "average": self.average.module.state_dict(),
            **{name: getattr(self, name).state_dict() for name in PARTS},
            "step": self.step,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from what `state_dict` returned.

        Raises
        ------
        ValueError
            If the weights are those of another model.
        """
        load_weights(self.model, state, "model")
        load_weights(self.average.module, state, "average")
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.step = state["step"]
        self.average.n_averaged.fill_(self.step)  # 0 would make the next step overwrite the average

    def _differentiate(self, batch: Sample) -> Tensor:
        loss = self.training_loss(batch)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _rate(self, step: int) -> float:
        """The learning rate of a step over its highest value."""
        return warmup_cosine(step, self.config.warmup_steps, self.config.steps)


def share_buffers(copied: nn.Module, model: nn.Module) -> None:
    """Give a copy of a model the model's own buffers: a graph is held once, and AveragedModel finds nothing to copy."""
    for part, original in zip(copied.modules(), model.modules(), strict=True):
        for name, buffer in original.named_buffers(recurse=False):
            setattr(part, name, buffer)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return the parameters for AdamW: matrices decay, vectors (biases, norms) do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
