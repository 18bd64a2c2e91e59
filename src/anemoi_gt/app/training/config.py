"""Hyperparameters of a training run, validated at construction; its device and CPU threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch

from anemoi_gt.option_checks import check_integer, check_number, check_positive

DEVICES = ("auto", "cpu", "cuda")
LOGGERS = ("tensorboard", "mlflow")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class TrainingConfig:
    """Hyperparameters of a training run. Raises ValueError or TypeError for a value out of range.

    Parameters
    ----------
    steps : int
        Optimiser steps.
    batch_size : int
        Samples per step, over all ranks.
    learning_rate : float
        Maximum learning rate, reached after `warmup_steps`.
    warmup_steps : int
        Steps of linear warm-up, at most all `steps`; then the learning rate decreases to 0 as half
        a cosine.
    weight_decay : float
        Weight decay of AdamW, on matrices only; vectors (biases, norms) do not decay.
    clip_norm : float
        Maximum norm of the gradient over all parameters.
    average_decay : float
        Forecasts use an exponential moving average of the weights, over about 1 / (1 -
        average_decay) steps; 0 uses the last weights.
    valid_every : int
        Steps between validations; the weights with the lowest validation loss are kept.
    log_every : int
        Steps per record of the mean loss.
    seed : int
        Seed of the initial weights, the order of the samples and dropout.
    device : {"auto", "cpu", "cuda"}
        `auto` uses a GPU if there is one.
    precision : {"32-true", "bf16-mixed", "16-mixed"}
        Lightning's names, for training and validation: float32 throughout, or autocast to bfloat16,
        or to float16 with a scaled loss. Scores and forecasts are computed without autocast.
    compile : bool
        Compile the blocks of the model by `torch.compile` for training: fewer kernels and less
        memory, for up to a minute of compilation in the first step. Results agree to rounding, and
        dropout draws other masks; validation and forecasts are not compiled.
    cuda_graph : bool, optional
        Capture forward and backward of the first step in a CUDA graph and replay it in every step:
        the same results, bit for bit, without Python between the kernels. The graph keeps its
        memory until the end. None captures on a GPU where a step can be captured; True raises
        ValueError elsewhere, and False never captures.
    threads : int, optional
        CPU threads of PyTorch during training. None is one per core, which suits large models;
        small models are faster with fewer. Runs are bitwise reproducible only with the same number.
    logger : {"tensorboard", "mlflow"}, optional
        Log the records of `metrics.jsonl` there, too.
    """

    steps: int = 1000
    batch_size: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    average_decay: float = 0.99
    valid_every: int = 100
    log_every: int = 10
    seed: int = 0
    device: str = "auto"
    precision: str = "32-true"
    compile: bool = False
    cuda_graph: bool | None = None
    threads: int | None = None
    logger: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "valid_every", "log_every"):
            check_integer(f"training.{name}", getattr(self, name))
        check_integer("training.warmup_steps", self.warmup_steps, least=0)
        check_integer("training.seed", self.seed, least=None)
        check_positive("training.learning_rate", self.learning_rate)
        for name in ("weight_decay", "clip_norm", "average_decay"):
            check_number(f"training.{name}", getattr(self, name))
        if self.threads is not None:
            check_integer("training.threads", self.threads, note=", or null")
        for name, is_valid, must in (
            ("clip_norm", self.clip_norm > 0, "positive"),
            ("weight_decay", 0 <= self.weight_decay < inf, "finite and not negative"),
            ("seed", 0 <= self.seed < 2**64, "0 to 2^64 - 1"),
            ("average_decay", 0 <= self.average_decay < 1, "in [0, 1)"),
            ("device", self.device in DEVICES, f"one of {', '.join(DEVICES)}"),
            ("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
            ("compile", isinstance(self.compile, bool), "true or false"),
            ("cuda_graph", isinstance(self.cuda_graph, bool | None), "true, false or null"),
            (
                "logger",
                self.logger is None or self.logger in LOGGERS,
                f"null or one of {', '.join(LOGGERS)}",
            ),
        ):
            if not is_valid:
                raise ValueError(f"training.{name} must be {must}, got {getattr(self, name)!r}")


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda". Raises ValueError for "cuda" without a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "training.device must be cpu or auto, got cuda: PyTorch finds no CUDA device"
        )
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Set the number of PyTorch's CPU threads in the block; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
