"""Trainer: the loop. Takes steps, validates, records, saves, and stops when it is told to."""

import copy
import math
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from anemoi_gt.data.datasets import Splits
from anemoi_gt.training.checkpoint import load_checkpoint, load_weights, save_checkpoint
from anemoi_gt.training.config import TrainingConfig
from anemoi_gt.training.data_loading import TrainingBatches, load
from anemoi_gt.training.device import choose_device, cpu_threads
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.progress import Meter, ProgressBar
from anemoi_gt.training.rng import generator_states, seed_generators, set_generator_states
from anemoi_gt.training.signals import Stopped, StopRequest
from anemoi_gt.training.step import Learner

LAST, BEST = "last.pt", "best.pt"


class Trainer:
    """Fits a model to a data set, and leaves checkpoints in a folder.

    `last.pt` is the state after the latest validation, or where the run was stopped; `best.pt` that of the lowest
    validation loss. On a CPU two runs with the same config, data and number of threads give the same numbers, bit by
    bit, and so does one that was interrupted and continued from `last.pt`.

    Parameters
    ----------
    model : nn.Module
        Maps [B, N, in_channels] to [B, N, out_channels]. It is trained in place.
    splits : Splits
        Trains on `train`, validates on `valid`.
    config : TrainingConfig
        The numbers.
    folder : Path or str
        Where the checkpoints go; it exists.
    description : dict
        Plain values kept in the checkpoints: the whole config of the run.

    Attributes
    ----------
    learner : Learner
        Takes the steps: model, averaged weights, optimiser.
    batches : TrainingBatches
        Says which samples make which batch.
    save : callable
        Writes a checkpoint: `save_checkpoint`.
    progress : callable
        Shows how far the run is: `ProgressBar`.
    stop_request : callable
        Says when the run is to end early: `StopRequest`.
    best_loss : float
        The lowest validation loss so far.

    Raises
    ------
    ValueError
        When config is no TrainingConfig, or names a device that is not here.

    Notes
    -----
    The first five are attributes so that a run on several processes can put its own in their place.
    """

    def __init__(self, model: nn.Module, splits: Splits, config: TrainingConfig, folder: Path | str, description: dict):
        if not isinstance(config, TrainingConfig):
            raise ValueError(f"config must be a TrainingConfig, got {config!r}")
        self.splits, self.config, self.folder, self.description = splits, config, Path(folder), description
        self.device = choose_device(config.device)
        self.learner = Learner(model, splits.train.weights, config, self.device)
        self.batches = TrainingBatches(splits.train, config.batch_size, config.steps, config.seed, self.device)
        self.save, self.progress, self.stop_request = save_checkpoint, ProgressBar, StopRequest
        self.best_loss = math.inf
        self._meter = Meter(self.device)
        self._rate = math.nan  # of the last step
        self._generators: dict | None = None  # where a continued run left them

    def fit(self, metrics: MetricsFile) -> None:
        """Take the steps of the run that are left.

        Parameters
        ----------
        metrics : MetricsFile
            Gets a record with split "train" every `log_every` steps and one with split "valid" every `valid_every`.

        Raises
        ------
        Stopped
            On SIGTERM or SIGINT, when the step is finished and `last.pt` is written.
        FloatingPointError
            If loss, gradients or weights are not finite (in 16-mixed single steps are skipped for their gradients); the
            checkpoints stay those of the last time that they were.
        OSError
            If a file cannot be written; the checkpoints stay those before.
        """
        self._start_generators()
        self._meter.start()
        samples = self.config.batch_size  # of a step, in all processes; a batch here may be a part of them
        total, done = self.config.steps * samples, self.learner.step * samples
        with (
            cpu_threads(self.config.threads),
            closing(self.learner),
            self.progress(total, done) as bar,
            self.stop_request() as stop,
        ):
            for batch in self.batches.since(self.learner.step):
                self._rate = self.learner.rate()
                self._meter.add(self.learner.learn(batch), samples)
                bar.advance(samples)
                if self._is_due(self.config.log_every):
                    bar.show(loss=self._record_training(metrics))
                if self._is_due(self.config.valid_every):
                    bar.show(valid=self._validate(metrics))
                if (received := stop.due()) is not None:
                    self._save(metrics, LAST)
                    raise Stopped(received, self.learner.step)

    def best_model(self) -> nn.Module:
        """Return a model with the averaged weights that validated best, in evaluation mode."""
        model = copy.deepcopy(self.learner.model)
        load_weights(model, load_checkpoint(self.folder / BEST))
        return model.eval()

    def state_dict(self) -> dict:
        """Return the state of the run, as a checkpoint holds it."""
        return self.learner.state_dict() | {
            "best_loss": self.best_loss,
            "pending": self._meter.state_dict(),
            "generators": generator_states(self.device),
            "config": self.description,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue a run from what `state_dict` returned; the next `fit` takes the steps that are left.

        Parameters
        ----------
        state : dict
            From `load_checkpoint`.

        Raises
        ------
        ValueError
            If the state lacks a part, or its weights are those of another model.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise ValueError(f"a run continues from the last.pt of a run, this checkpoint lacks {', '.join(missing)}")
        self.learner.load_state_dict(state)
        self.best_loss = state["best_loss"]
        self._meter.load_state_dict(state["pending"])
        self._generators = state["generators"]

    def _start_generators(self) -> None:
        if self._generators is None:
            seed_generators(self.config.seed)
        else:
            set_generator_states(self._generators, self.device)

    def _is_due(self, every: int) -> bool:
        return self.learner.step % every == 0 or self.learner.step == self.config.steps

    def _record_training(self, metrics: MetricsFile) -> float:
        loss, speed = self._meter.read()
        self._check_finite(loss)
        metrics.write(
            split="train",
            step=self.learner.step,
            loss=loss,
            learning_rate=self._rate,
            samples_per_second=speed,
        )
        return loss

    def _validate(self, metrics: MetricsFile) -> float:
        """Measure the averaged weights on the validation samples and write the checkpoints."""
        loss = self._validation_loss()
        self._check_finite(loss)
        is_best = loss < self.best_loss
        self.best_loss = min(loss, self.best_loss)
        metrics.write(split="valid", step=self.learner.step, loss=loss)
        # last.pt comes second: continued from the one before, a run cut off between the two writes best.pt again.
        self._save(metrics, *((BEST, LAST) if is_best else (LAST,)))
        return loss

    @torch.no_grad()
    def _validation_loss(self) -> float:
        average = self.learner.average.eval()
        batches = load(self.splits.valid, self.config.batch_size, self.device)
        losses = [self.learner.loss(average, batch) * len(batch.inputs) for batch in batches]
        return torch.stack(losses).sum().item() / len(self.splits.valid)

    def _save(self, metrics: MetricsFile, *names: str) -> None:
        # Before a good checkpoint is replaced: a loss that waits to be recorded would fail every continued run.
        self._check_finite(self._meter.loss())
        if not self.learner.is_finite():
            raise self._not_finite("the weights must stay finite, got NaN or infinity")
        metrics.sync()
        for name in names:
            self.save(self.folder / name, self.state_dict())

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss must stay finite, got {loss}")
        if self.learner.has_lost_gradients():
            reason = "the gradients must stay finite at some loss scale, got NaN or infinity at every one"
            raise self._not_finite(reason, "set training.precision=bf16-mixed, or lower training.learning_rate")

    def _not_finite(self, what: str, remedy: str = "lower training.learning_rate") -> FloatingPointError:
        return FloatingPointError(f"{what} at step {self.learner.step}: {remedy}")
