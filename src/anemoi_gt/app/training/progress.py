"""Progress of a run: progress bar, meter of loss and speed, and stopping on a signal.

On SIGTERM or SIGINT, a run finishes its step and saves a checkpoint.
"""

import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from anemoi_gt.extras import import_extra

if TYPE_CHECKING:
    from tqdm import tqdm

SECONDS_BETWEEN_LINES = 15  # where the bar cannot be redrawn in place, as in a log file


def progress_bar(steps: int, done: int, **options: Any) -> "tqdm":
    """Return a tqdm progress bar on standard error over the steps of a run.

    `done` is the number of steps that were taken before. Raises ImportError if tqdm is missing.
    """
    tqdm = import_extra("tqdm", "train").tqdm
    interval = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    # after maxinterval, tqdm's own thread redraws the bar even without a step
    options |= {"mininterval": interval, "maxinterval": interval}
    return tqdm(total=steps, initial=done, unit=" steps", desc="training", **options)


class Meter:
    """Mean loss and speed since the last reading; only reading synchronises with the device.

    Validations and checkpoints since then count in the time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._losses: list[Tensor] = []  # on the device: reading one would wait for its step
        self.start()

    def start(self) -> None:
        """Restart the measurement of the speed; unread losses are kept."""
        self._samples = 0
        self._since = time.perf_counter()

    def add(self, loss: Tensor, samples: int) -> None:
        """Count one step."""
        self._losses.append(loss)
        self._samples += samples

    def loss(self) -> float:
        """Return the mean loss of the steps since the last reading; 0 if there is none."""
        return torch.stack(self._losses).mean().item() if self._losses else 0.0

    def read(self) -> tuple[float, float]:
        """Return the mean loss and the samples per second, and reset both."""
        loss = self.loss()
        speed = self._samples / (time.perf_counter() - self._since)
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
    """A signal stopped the run after `step` steps.

    Its last checkpoint holds all of them if `saved` is True. Otherwise the signal has ended the
    next step as well, such as the compiler in it, and the run continues from an earlier checkpoint.

    `exit_status` is 128 plus the number of the signal, as in a shell: 143 for SIGTERM, 130 for
    SIGINT.
    """

    def __init__(self, received: signal.Signals, step: int, *, saved: bool = True):
        when = f"after step {step}, which is saved"
        if not saved:
            when = f"in step {step + 1}, which is not saved"
        super().__init__(f"stopped by {received.name} {when}")
        self.exit_status = 128 + received
        self.saved = saved


class StopRequest:
    """A context that records SIGTERM and SIGINT (Ctrl-C) instead of their default actions.

    `received` is the last recorded signal, or None. A second Ctrl-C interrupts immediately. A
    signal that the process ignores, such as SIGINT in a shell's background job, stays ignored.
    Outside the main thread, where Python cannot set signal handlers, nothing is recorded.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None if it was not set from Python
        self._before = {}

    def should_stop(self) -> signal.Signals | None:
        """Return the signal that stops the run, or None; called once after every step."""
        return self.received

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if number == signal.SIGINT:  # the next one interrupts
            signal.signal(signal.SIGINT, signal.default_int_handler)
