"""What a run shows while it goes: a bar with the loss and the samples per second."""

import sys
import time

import torch
from torch import Tensor

from anemoi_gt.extras import import_extra

SECONDS_BETWEEN_LINES = 15  # where the bar cannot be redrawn in place, as in a log file


class ProgressBar:
    """A bar over the samples of a run, on standard error.

    Parameters
    ----------
    samples : int
        How many there will be.

    Raises
    ------
    ImportError
        If tqdm is missing.
    """

    def __init__(self, samples: int):
        tqdm = import_extra("tqdm", "train").tqdm
        interval = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        self._bar = tqdm(total=samples, unit=" samples", desc="training", mininterval=interval, maxinterval=interval)
        self._shown: dict[str, str] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def advance(self, samples: int) -> None:
        """Count samples as done."""
        self._bar.update(samples)

    def show(self, **numbers: float) -> None:
        """Show numbers beside the bar, until others of the same name come."""
        self._shown |= {name: f"{number:.4f}" for name, number in numbers.items()}
        self._bar.set_postfix(self._shown, refresh=False)


class Meter:
    """Mean loss and speed of the steps since it was last read; waits for the device only when it is read."""

    def __init__(self):
        self._restart()

    def add(self, loss: Tensor, samples: int) -> None:
        """Count one step."""
        self._losses.append(loss)
        self._samples += samples

    def read(self) -> tuple[float, float]:
        """Return the mean loss and the samples per second, and begin anew."""
        loss = torch.stack(self._losses).mean().item()
        speed = self._samples / (time.perf_counter() - self._since)
        self._restart()
        return loss, speed

    def _restart(self):
        self._losses, self._samples, self._since = [], 0, time.perf_counter()
