"""Early end by SIGTERM or SIGINT: the run finishes its step and saves a checkpoint."""

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A run ended early by a signal; its last checkpoint holds all `step` steps taken.

    `exit_status` is 128 and the number of the signal, as a shell reports it: 143 for SIGTERM, 130 for SIGINT.
    """

    def __init__(self, received: signal.Signals, step: int):
        super().__init__(f"stopped by {received.name} after step {step}, which is saved")
        self.exit_status = 128 + received


class StopRequest:
    """A context that notes SIGTERM (sent by batch queues) and SIGINT (Ctrl-C) in place of their default actions.

    `received` is the last signal noted, None before. A second Ctrl-C interrupts at once. A signal that the process
    ignores, such as SIGINT after a shell script's `&`, stays ignored. Outside the main thread, where Python sets no
    signal handlers, nothing is noted.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            heeded = (number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
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
