"""Progress of a run: bar, meter of loss and speed, and an early end by a signal.

On SIGTERM or SIGINT a run finishes its step and saves a checkpoint.
"""

import signal
import sys
import threading
import time
from types import FrameType

import torch
from torch import Tensor

from anemoi_gt.extras import import_extra

SECONDS_BETWEEN_LINES = 15  # if the bar cannot be redrawn in place, as in a log file


def progress_bar(steps: int, done: int, **options):
    """Return a tqdm bar on standard error over the steps of a run, `done` before it continues.

    Raises ImportError if tqdm is missing.
    """
    tqdm = import_extra("tqdm", "train").tqdm
    interval = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    options |= {"mininterval": interval, "maxinterval": interval}
    return tqdm(total=steps, initial=done, unit=" steps", desc="training", **options)


class Meter:
    """Mean loss and speed since the last reading; synchronises with the device only on reading."""

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


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A run ended early by a signal; its last checkpoint holds all `step` steps taken.

    `exit_status` is 128 and the number of the signal, as a shell reports it: 143 for SIGTERM, 130
    for SIGINT.
    """

    def __init__(self, received: signal.Signals, step: int):
        super().__init__(f"stopped by {received.name} after step {step}, which is saved")
        self.exit_status = 128 + received


class StopRequest:
    """A context that records SIGTERM and SIGINT (Ctrl-C) instead of their default actions.

    `received` is the last signal noted, None before. A second Ctrl-C interrupts at once. A signal
    that the process ignores, such as SIGINT after a shell script's `&`, stays ignored. Outside the
    main thread, where Python sets no signal handlers, nothing is noted.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            heeded = (
                number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
            )
            self._before = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python

    def should_stop(self) -> signal.Signals | None:
        """Return the signal that ends the run, None to continue; called once after every step."""
        return self.received

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
