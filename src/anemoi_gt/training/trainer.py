"""Trainer: the loop. Draws batches, takes optimiser steps, validates, records, and keeps the weights that validate best."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, RandomSampler

from anemoi_gt.data.datasets import ForecastDataset, Sample, Splits
from anemoi_gt.training.checkpoint import load_checkpoint, save_checkpoint
from anemoi_gt.training.device import choose_device, cpu_threads
from anemoi_gt.training.loss import weighted_mse
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.progress import Meter, ProgressBar
from anemoi_gt.training.schedule import warmup_cosine
from anemoi_gt.training.settings import TrainingConfig

LAST, BEST = "last.pt", "best.pt"
LOSS_SCALE = 2.0**10  # where float16 begins; losses are about 1, and it grows by itself
AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Trainer:
    """Fits a model to a data set, and leaves checkpoints in a folder.

    `last.pt` is the state after the latest validation, `best.pt` that of the lowest validation loss. On a CPU two runs
    with the same config, data and number of threads give the same numbers, bit by bit.

    Parameters
    ----------
    model : nn.Module
        Maps [B, N, in_channels] to [B, N, out_channels]. It is trained in place.
    splits : Splits
        Trains on `train`, validates on `valid`.
    config : TrainingConfig
        The numbers.
    folder : Path
        Where the checkpoints go; it exists.
    description : dict
        Plain values kept in the checkpoints: the whole config of the run.
    """

    def __init__(self, model: nn.Module, splits: Splits, config: TrainingConfig, folder: Path, description: dict):
        self.splits, self.config, self.folder, self.description = splits, config, folder, description
        self.device = choose_device(config.device)
        self.model = model.to(self.device)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(config.average_decay))
        self.optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), lr=config.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        scaled = config.precision == "16-mixed"
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=LOSS_SCALE, enabled=scaled)
        self.weights = splits.train.weights.to(self.device)
        self.step = 0
        self.best_loss = math.inf

    def fit(self, metrics: MetricsFile) -> None:
        """Take all steps of the run.

        Parameters
        ----------
        metrics : MetricsFile
            Gets a record with split "train" every `log_every` steps and one with split "valid" every `valid_every`.

        Raises
        ------
        FloatingPointError
            If the loss is not finite; the checkpoints stay those of the last validation before.
        """
        torch.manual_seed(self.config.seed)  # of dropout
        meter = Meter()
        with cpu_threads(self.config.threads), ProgressBar(self.config.steps * self.config.batch_size) as bar:
            for batch in self._batches():
                meter.add(self._train_step(batch), len(batch.inputs))
                bar.advance(len(batch.inputs))
                if self._is_due(self.config.log_every):
                    loss = self._record_training(meter, metrics)
                    bar.show(loss=loss)
                if self._is_due(self.config.valid_every):
                    loss = self._validate()
                    metrics.write(split="valid", step=self.step, loss=loss)
                    bar.show(valid=loss)

    def best_model(self) -> nn.Module:
        """Return a model with the averaged weights that validated best, in evaluation mode."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(load_checkpoint(self.folder / BEST, self.device)["average"])
        return model.eval()

    def state_dict(self) -> dict:
        """Return the state of the run, as a checkpoint holds it."""
        return {
            "model": self.model.state_dict(),
            "average": self.average.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "best_loss": self.best_loss,
            "config": self.description,
        }

    def _rate(self, step: int) -> float:
        """The learning rate of a step over its highest value."""
        return warmup_cosine(step, self.config.warmup_steps, self.config.steps)

    def _batches(self) -> Iterator[Sample]:
        """As many batches as the run has steps: the training samples in one random order after another."""
        order = torch.Generator().manual_seed(self.config.seed)
        samples = self.config.steps * self.config.batch_size
        sampler = RandomSampler(self.splits.train, num_samples=samples, generator=order)
        return self._load(self.splits.train, sampler=sampler)

    def _load(self, dataset: ForecastDataset, **options) -> Iterator[Sample]:
        for batch in DataLoader(dataset, batch_size=self.config.batch_size, **options):
            yield Sample(*(part.to(self.device) for part in batch))

    def _train_step(self, batch: Sample) -> Tensor:
        self.model.train()
        self.optimizer.zero_grad()
        loss = self._loss(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.average.update_parameters(self.model)
        self.step += 1
        return loss.detach()

    def _loss(self, model: nn.Module, batch: Sample) -> Tensor:
        dtype = AUTOCAST[self.config.precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            return weighted_mse(model(batch.inputs), batch.target, self.weights)

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

    def _record_training(self, meter: Meter, metrics: MetricsFile) -> float:
        loss, speed = meter.read()
        self._check_finite(loss)
        rate = self.config.learning_rate * self._rate(self.step - 1)
        metrics.write(split="train", step=self.step, loss=loss, learning_rate=rate, samples_per_second=speed)
        return loss

    @torch.no_grad()
    def _validate(self) -> float:
        """Measure the averaged weights on the validation samples and write the checkpoints."""
        self.average.eval()
        losses = [self._loss(self.average, batch) * len(batch.inputs) for batch in self._load(self.splits.valid)]
        loss = torch.stack(losses).sum().item() / len(self.splits.valid)
        self._check_finite(loss)  # before the last good checkpoint is replaced
        is_best = loss < self.best_loss
        self.best_loss = min(loss, self.best_loss)
        for name in (LAST, BEST) if is_best else (LAST,):
            save_checkpoint(self.folder / name, self.state_dict())
        return loss

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss must stay finite, got {loss} at step {self.step}: lower training.learning_rate"
            )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return the parameters for AdamW: matrices decay, vectors (biases, norms) do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
