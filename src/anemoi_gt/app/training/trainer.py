"""Trainer: the loop over training steps, with validation, metrics, checkpoints and early stop."""

import copy
import logging
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from anemoi_gt.app.datasets.fields import minutes
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset, Splits, TrainingBatches, load
from anemoi_gt.app.datasets.schema import DataSchema
from anemoi_gt.app.training.config import TrainingConfig, choose_device, cpu_threads
from anemoi_gt.app.training.progress import Meter, Stopped, StopRequest, progress_bar
from anemoi_gt.app.training.run_files import (
    MetricsFile,
    load_checkpoint,
    load_weights,
    read_best_loss,
    save_checkpoint,
)
from anemoi_gt.app.training.run_folder import BEST, LAST
from anemoi_gt.app.training.step import TrainingStep
from anemoi_gt.replay.rng import generator_states, set_generator_states

log = logging.getLogger(__name__)


class Trainer:
    """Training of a model on a data set, with checkpoints in a folder.

    `last.pt` is the state after the latest validation, or at the step where the run stopped;
    `best.pt` is the state at the lowest validation loss, written after `last.pt`. On a CPU, two
    runs with the same config, data and number of threads are bitwise identical, even if one was
    interrupted and continued from `last.pt`. Raises ValueError if the device of the config is not
    available.

    Parameters
    ----------
    model : nn.Module
        Maps [B, N, in_channels] to [B, N, out_channels]. It is trained in place.
    splits : Splits
        The model is trained on `train` and validated on `valid`.
    folder : Path or str
        Existing folder for the checkpoints.
    description : dict
        The whole config of the run, as plain values, to be stored in the checkpoints.
    schema : DataSchema, optional
        Schema of the data, to be stored in the checkpoints. By default, the schema of
        `splits.train`.
    valid : dict, optional
        What tells the validation samples from others, to be stored in the checkpoints. By default,
        the `describe_samples` of `splits.valid`.
    make_step, make_batches, save, read_best_loss, stop_request : callable
        Called like their defaults: `TrainingStep(model, weights, config, device)`,
        `TrainingBatches(dataset, batch_size, steps, seed, device)`, `save_checkpoint(path, state)`,
        `read_best_loss(path)` and `StopRequest()`.

    Attributes
    ----------
    step : TrainingStep
        Holds the model, its averaged weights and the optimiser.
    best_loss : float
        The lowest validation loss so far.
    """

    def __init__(
        self,
        model: nn.Module,
        splits: Splits,
        config: TrainingConfig,
        folder: Path | str,
        description: dict,
        *,
        schema: DataSchema | None = None,
        valid: dict | None = None,
        make_step: Callable[..., TrainingStep] = TrainingStep,
        make_batches: Callable[..., TrainingBatches] = TrainingBatches,
        save: Callable[[Path, dict], None] = save_checkpoint,
        read_best_loss: Callable[[Path], float] = read_best_loss,
        stop_request: Callable[[], StopRequest] = StopRequest,
    ):
        self.splits = splits
        self.config = config
        self.folder = Path(folder)
        self.description = description
        self.schema = splits.train.schema() if schema is None else schema
        self.valid = describe_samples(splits.valid) if valid is None else valid
        self.device = choose_device(config.device)
        self.step = make_step(model, splits.train.weights, config, self.device)
        self.batches = make_batches(
            splits.train, config.batch_size, config.steps, config.seed, self.device
        )
        self._save_checkpoint = save
        self._read_best_loss = read_best_loss
        self._stop_request = stop_request
        self.best_loss = math.inf
        self._lacks_best = False
        self._meter = Meter(self.device)
        self._generators: dict | None = None  # states from a checkpoint, if the run continues
        self._metrics: MetricsFile | None = None

    def fit(self, metrics: MetricsFile | None) -> None:
        """Take the remaining steps; write `metrics` every `log_every` and `valid_every` steps.

        Records have the split "train" or "valid". If `metrics` is None, as on ranks other than 0,
        nothing is recorded and no progress is shown. On SIGTERM or SIGINT, raises Stopped after the
        step is finished and `last.pt` is written, or at once if the step fails. Raises
        FloatingPointError if loss, gradients or weights are not finite (in 16-mixed, single steps
        with such gradients are skipped), and OSError if a file cannot be written; the former
        checkpoints stay.
        """
        self._metrics = metrics
        shown: dict[str, float] = {}
        if self._generators is None:
            torch.manual_seed(self.config.seed)
        else:
            set_generator_states(self._generators, self.device)
        self._meter.start()
        # samples per step over all ranks, of which the local batch may be a part
        samples = self.config.batch_size
        with (
            cpu_threads(self.config.threads),
            closing(self.step),  # NCCL's groups cannot end while a CUDA graph holds their messages
            progress_bar(self.config.steps, self.step.global_step, disable=metrics is None) as bar,
            self._stop_request() as stop,
        ):
            if self._lacks_best and self.best_loss < math.inf:
                self._save(BEST)
            elif self._lacks_best:
                self._validate()
            self._lacks_best = False
            for batch in self.batches.since(self.step.global_step):
                rate = self.step.learning_rate()
                try:
                    loss = self.step.training_step(batch)
                except Exception as error:
                    if stop.received is None:
                        raise
                    # Batch queues and terminals signal all processes of a run, so a compiler that
                    # the step waits for ends as well.
                    raise Stopped(stop.received, self.step.global_step, saved=False) from error
                self._meter.add(loss, samples)
                bar.update()
                if self._is_due(self.config.log_every):
                    shown |= self._record_training(rate)
                if self._is_due(self.config.valid_every):
                    shown |= {"valid": self._validate()}
                postfix = {name: f"{number:.4g}" for name, number in shown.items()}
                bar.set_postfix(postfix, refresh=False)
                received = stop.should_stop()
                if received is not None:
                    self._save(LAST)
                    raise Stopped(received, self.step.global_step)
        if metrics is not None and self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            log.info("peak GPU memory: %.3g GB", peak / 1e9)

    def best_model(self) -> nn.Module:
        """Return a model in evaluation mode with the averaged weights of the best validation."""
        model = copy.deepcopy(self.step.model)  # which leaves compiled code behind
        load_weights(model, load_checkpoint(self.folder / BEST))
        return model.eval()

    def state_dict(self) -> dict:
        """Return the state of the run, for a checkpoint."""
        return self.step.state_dict() | {
            "best_loss": self.best_loss,
            "pending": self._meter.state_dict(),
            "generators": generator_states(self.device),
            "config": self.description,
            "schema": self.schema.to_dict(),
            "valid": self.valid | {"data.valid": _valid_option(self.description)},
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore the state of a run; the next `fit` takes the remaining steps.

        `state` is a result of `load_checkpoint`. If `best.pt` in the folder is not as good as the
        state says, because the run ended before it was written, `fit` writes it from this state.
        If the validation samples or `data.valid` are others than in the state, or the `best.pt` of
        an earlier validation is missing or replaced, `fit` begins with a validation, which writes
        it.
        Raises ValueError if the state lacks an entry, its weights belong to another model, or
        `best.pt` is damaged.
        """
        own = self.state_dict()
        missing = sorted(own.keys() - state.keys() - {"valid"})
        if missing:
            raise ValueError(
                f"state must be the last.pt of a run, this checkpoint lacks {', '.join(missing)}"
            )
        self.step.load_state_dict(state)
        self.best_loss = state["best_loss"]
        best_loss = self._read_best_loss(self.folder / BEST)
        self._lacks_best = self.best_loss != best_loss
        # A run that has only validated once may have ended before it wrote its first best.pt.
        is_missing = best_loss == math.inf and self.step.global_step > self.config.valid_every
        reason = None
        valid = own["valid"]
        # checkpoints of 0.5.0 and before have the option only
        former = state.get("valid") or valid | {"data.valid": _valid_option(state["config"])}
        if former != valid:
            reason = f"the validation samples were {_as_text(former)}, and are {_as_text(valid)}"
        elif self._lacks_best and (is_missing or best_loss < self.best_loss):
            reason = f"{self.folder} has lost the best weights of the run"
        if reason is not None:
            log.info("%s: best.pt starts again, with a validation at this step", reason)
            self.best_loss, self._lacks_best = math.inf, True
        self._meter.load_state_dict(state["pending"])
        self._generators = state["generators"]

    def _is_due(self, every: int) -> bool:
        return self.step.global_step % every == 0 or self.step.global_step == self.config.steps

    def _record(self, split: str, **numbers: float) -> None:
        if self._metrics is not None:
            self._metrics.write(split=split, step=self.step.global_step, **numbers)

    def _record_training(self, rate: float) -> dict[str, float]:
        self.step.wait_for_ranks()
        loss, speed = self._meter.read()
        self._check_finite(loss)
        self._record("train", loss=loss, learning_rate=rate, samples_per_second=speed)
        return {"loss": loss, "samples/s": speed}

    def _validate(self) -> float:
        """Measure the averaged weights on the validation samples and write the checkpoints."""
        loss = self._validation_loss()
        self._check_finite(loss)
        is_best = loss < self.best_loss
        self.best_loss = min(loss, self.best_loss)
        self._record("valid", loss=loss)
        # last.pt comes first, so that a run that is killed in between, or finds the disk full, has
        # lost nothing: it continues from there and writes best.pt (`load_state_dict`).
        if is_best:
            self._save(LAST, BEST)
        else:
            self._save(LAST)
        return loss

    @torch.no_grad()
    def _validation_loss(self) -> float:
        average = self.step.average.eval()
        batches = load(self.splits.valid, self.config.batch_size, self.device)
        # summed on the device and read once; the last batch may be smaller
        losses = [self.step.loss(average, batch) * len(batch.inputs) for batch in batches]
        self.step.wait_for_ranks()
        return torch.stack(losses).sum().item() / len(self.splits.valid)

    def _save(self, *names: str) -> None:
        self.step.wait_for_ranks()
        # Checked before a good checkpoint is replaced, because an unread loss that is not finite
        # would make every continued run fail.
        self._check_finite(self._meter.loss())
        if not self.step.is_finite():
            raise self._not_finite("the weights must stay finite, got NaN or infinity")
        if self._metrics is not None:
            self._metrics.sync()
        for name in names:
            self._save_checkpoint(self.folder / name, self.state_dict())

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss must stay finite, got {loss}")
        if self.step.has_lost_gradients():
            problem = (
                "the gradients must stay finite at some loss scale, got NaN or infinity at all"
            )
            remedy = "set training.precision=bf16-mixed, or lower training.learning_rate"
            raise self._not_finite(problem, remedy)

    def _not_finite(
        self, problem: str, remedy: str = "lower training.learning_rate"
    ) -> FloatingPointError:
        return FloatingPointError(f"{problem} at step {self.step.global_step}: {remedy}")


def describe_samples(samples: ForecastDataset) -> dict:
    """Return the number of samples, and the first and the last start if they have dates."""
    starts = [samples.start_time(i) for i in (0, len(samples) - 1)]
    dates = [minutes(time) for time in starts if time is not None]
    return {"number": len(samples), "starts": dates}


def _valid_option(config: dict) -> object:
    """Return `data.valid` of a config, None if it names none."""
    return config.get("data", {}).get("valid")


def _as_text(valid: dict) -> str:
    """Return the description of validation samples for the log."""
    return ", ".join(f"{name}={value}" for name, value in valid.items())
