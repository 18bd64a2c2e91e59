"""The end of a job of which one rank died: on all ranks, in time, with one message. The only place that ends a process.

    beat       every rank counts up a number in the store of the process group, from a thread
    ring       rank r looks at the number of rank r + 1: when it stands still for too long, that rank is dead or frozen
    obituary   the first to know writes one line into the store and prints it; every rank looks there at each beat, and ends

A collective that waits for a dead rank cannot be left from Python, so the thread ends the process. What a rank was writing stays half
written; checkpoints must be renamed into place when they are whole.

A rank that ends by itself does so without Python's finalisation: a thread of gloo may still be letting go of a tensor, for which it needs
the interpreter, and asking one that is being finalised aborts the process ("terminate called without an active exception").
"""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

BEATS_IN_TIMEOUT = 8
LONGEST_PERIOD = 5.0  # s
NEVER = ""
FAILED = " failed: "  # in an obituary: that rank still has to tell
TELLING = 1.0  # s, that it takes, on a busy machine
LOST = (dist.DistError, dist.DistNetworkError, dist.DistBackendError)
WORDS_OF_LOSS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")


@contextmanager
def watched(timeout: timedelta) -> Iterator[None]:
    """Run the body on all ranks; when one of them dies, freezes or fails, end on all of them. Collective at both ends.

    Parameters
    ----------
    timeout : timedelta
        How long after the last sign of life of a rank the others are still there. A rank gives signs from a thread, so it must not hold
        Python's interpreter lock for that long.

    Raises
    ------
    Exception
        What the body raised, where it was the first. Where another rank's error was told already, the process ends with status 1.
    """
    dist.barrier()
    watch = _Watch(dist.get_rank(), dist.get_world_size(), timeout.total_seconds())
    atexit.register(watch.leave_uncaught)  # so early that exit functions of the body have run before
    watch.start()
    try:
        yield
        dist.barrier()  # a rank that is done stays until all are
    except BaseException as error:
        watch.fail(error)
        raise
    finally:
        watch.stop()


def leave(status: int) -> NoReturn:
    """End this process at once, with what was printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Watch(threading.Thread):
    """The thread of one rank."""

    def __init__(self, rank: int, world_size: int, timeout: float):
        super().__init__(name="anemoi_gt watch", daemon=True)
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.period = min(timeout / BEATS_IN_TIMEOUT, LONGEST_PERIOD)
        self.store = _get_default_store().clone()  # another connection: the main thread may wait on the first
        self.store.set_timeout(timedelta(seconds=timeout))
        self.done = threading.Event()
        self.neighbour = (rank + 1) % world_size
        self.signature = f" (told by rank {rank})"
        self.holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.store.set(f"beat {rank}", self._beat(0))
        self.seen, self.seen_at = None, time.monotonic()
        self.told: BaseException | None = None

    def run(self):
        """Beat, look and sleep, until the body is through."""
        count = 0
        while not self.done.wait(self.period):
            count += 1
            try:
                self._look(count)
            except Exception as error:  # whatever the store throws when its host is gone
                if not self.done.is_set():
                    self._end(f"rank 0, which holds the store, does not answer ({error})", speaks=self.rank == 1)

    def fail(self, error: BaseException) -> None:
        """Tell the others what ended the body here, or follow them when they told first."""
        if self._is_loss(error):
            self.done.wait(self.timeout)  # the thread ends this process when it finds out who died
        try:
            is_first = self._write(f"rank {self.rank}{FAILED}{type(error).__name__}: {error}")
        except LOST:  # with the store goes rank 0, which has told; or has died, which the thread finds out
            time.sleep(self.period + TELLING)
            leave(1)
        if not is_first:
            self._follow()
        error.add_note(f"on rank {self.rank}; all ranks end")
        self.told = error

    def stop(self) -> None:
        """End the thread."""
        self.done.set()
        self.join()

    def leave_uncaught(self) -> None:
        """Leave, as an exit function, when it is the error told here that ends the interpreter."""
        if self.told is not None and getattr(sys, "last_value", None) is self.told:
            if self.holds_store:
                time.sleep(self.period + TELLING)  # until the others have read there that they are to end
            leave(1)

    def _look(self, count: int) -> None:
        self.store.set(f"beat {self.rank}", self._beat(count))
        if self.store.check(["obituary"]):
            if self._is_mine(self.store.get("obituary").decode()):
                return  # the main thread is telling
            self._follow()
        beat = self.store.get(f"beat {self.neighbour}").decode()
        if beat != self.seen:
            self.seen, self.seen_at = beat, time.monotonic()
        silence = time.monotonic() - self.seen_at
        if silence > self.timeout - 2 * self.period:
            host = beat.partition(" ")[2]
            message = f"rank {self.neighbour} ({host}) died or froze: no sign of life for {silence:.1f} s"
            self._end(message, speaks=self._write(message))

    def _follow(self) -> NoReturn:
        """End in silence; where a rank is telling its error, a moment later: a launcher ends all ranks when one has ended."""
        if FAILED in self.store.get("obituary").decode():
            time.sleep(TELLING)
        leave(1)

    def _beat(self, count: int) -> str:
        return f"{count} process {os.getpid()} on {socket.gethostname()}"

    def _write(self, message: str) -> bool:
        """Write the obituary; whether this rank was the first."""
        return self._is_mine(self.store.compare_set("obituary", NEVER, f"{message}{self.signature}").decode())

    def _is_mine(self, obituary: str) -> bool:
        return obituary.endswith(self.signature)

    def _end(self, message: str, *, speaks: bool) -> None:
        if speaks:
            print(f"anemoi_gt: {message}; all ranks end, resume from the last checkpoint", file=sys.stderr)
        leave(1)

    @staticmethod
    def _is_loss(error: BaseException) -> bool:
        """Whether an error says that a collective lost another rank."""
        return isinstance(error, LOST) or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS_OF_LOSS)
        )
