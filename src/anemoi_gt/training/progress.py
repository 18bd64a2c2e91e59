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
    done : int
        How many a continued run has seen already.

    Raises
    ------
    ImportError
        If tqdm is missing.
    """

    def __init__(self, samples: int, done: int = 0):
        tqdm = import_extra("tqdm", "train").tqdm
        interval = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        self._bar = tqdm(
            total=samples,
            initial=done,
            unit=" samples",
            desc="training",
            mininterval=interval,
            maxinterval=interval,
        )
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
    """Mean loss and speed of the steps since it was last read; waits for the device only when it is asked.

    Parameters
    ----------
    device : torch.device
        Where the losses are.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._losses: list[Tensor] = []
        self.start()

    def start(self) -> None:
        """Begin to measure speed; the losses that wait to be read stay."""
        self._samples, self._since = 0, time.perf_counter()

    def add(self, loss: Tensor, samples: int) -> None:
        """Count one step."""
        self._losses.append(loss)
        self._samples += samples

    def loss(self) -> float:
        """Return the mean loss of the steps since it was last read; 0 when there is none."""
        return torch.stack(self._losses).mean().item() if self._losses else 0.0

    def read(self) -> tuple[float, float]:
        """Return the mean loss and the samples per second, and begin anew."""
        loss, speed = self.loss(), self._samples / (time.perf_counter() - self._since)
        self._losses = []
        self.start()
        return loss, speed

    def state_dict(self) -> list[float]:
        """Return the losses that wait to be read: a continued run then records the same mean."""
        return [loss.item() for loss in self._losses]

    def load_state_dict(self, state: list[float]) -> None:
        """Take over the losses that waited to be read."""
        self._losses = list(torch.tensor(state, device=self._device))
