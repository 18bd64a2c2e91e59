"""Progress of a run: a bar, and the meter of loss and samples per second beside it."""

import sys
import time

import torch
from torch import Tensor

from anemoi_gt.extras import import_extra

SECONDS_BETWEEN_LINES = 15  # if the bar cannot be redrawn in place, as in a log file


def progress_bar(steps: int, done: int, **options):
    """Return a bar on standard error over the steps of a run, `done` before it continues: tqdm's, with its `options`.

    Raises ImportError if tqdm is missing.
    """
    tqdm = import_extra("tqdm", "train").tqdm
    interval = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    options |= {"mininterval": interval, "maxinterval": interval}
    return tqdm(total=steps, initial=done, unit=" steps", desc="training", **options)


class Meter:
    """Mean loss and speed of the steps since the last reading; synchronises with the losses' device only on reading."""

    def __init__(self, device: torch.device):
        self._device = device
        self._losses: list[Tensor] = []
        self.start()

    def start(self) -> None:
        """Restart the measurement of speed; unread losses are kept."""
        self._samples, self._since = 0, time.perf_counter()

    def add(self, loss: Tensor, samples: int) -> None:
        """Count one step."""
        self._losses.append(loss)
        self._samples += samples

    def loss(self) -> float:
        """Return the mean loss of the steps since the last reading; 0 if there is none."""
        return torch.stack(self._losses).mean().item() if self._losses else 0.0

    def read(self) -> tuple[float, float]:
        """Return the mean loss and the samples per second, and reset both."""
        loss, speed = self.loss(), self._samples / (time.perf_counter() - self._since)
        self._losses = []
        self.start()
        return loss, speed

    def state_dict(self) -> list[float]:
        """Return the unread losses, so that a resumed run records the same mean."""
        return [loss.item() for loss in self._losses]

    def load_state_dict(self, state: list[float]) -> None:
        """Restore the unread losses."""
        self._losses = list(torch.tensor(state, device=self._device))
