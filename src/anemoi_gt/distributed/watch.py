"""The end of a job of which one rank died: on all ranks, in time, with one message. The only place that ends a process.

    beat       every rank counts up a number in the store of the process group, from a thread
    ring       rank r looks at the number of rank r + 1: when it stands still for too long, that rank is dead or frozen, and so is every other
               whose number has stood still as well: with a host all of its ranks go
    obituary   the first to know writes one line into the store and prints it; every rank looks there at each beat, and ends

A collective that waits for a dead rank cannot be left from Python, so the thread ends the process. What a rank was writing stays half
written; checkpoints must be renamed into place when they are whole.

A thread of gloo lets go of a collective's tensors after its caller has the result, and needs Python's interpreter for it. Before Python
3.14, to wait for an interpreter when its finalisation begins aborts the process ("terminate called without an active exception"). So a
rank that ends by itself does so without finalisation; and one that comes to its end leaves the interpreter to these threads before.
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

from anemoi_gt.distributed.launcher import holds_store, is_first_of_host

BEATS_IN_TIMEOUT = 8
NAMED = 8  # ranks, in a message
LONGEST_PERIOD = 5.0  # s
NEVER = ""
FAILED = " failed: "  # in an obituary: that rank still has to tell
TELLING = 1.0  # s, that it takes, on a busy machine
LETTING_GO = 0.2  # s, for threads of gloo that are late, on a busy machine
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
    atexit.unregister(_let_threads_go)  # once is enough
    atexit.register(_let_threads_go)  # so early that exit functions of the body have run before
    atexit.register(watch.leave_uncaught)
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


def _let_threads_go() -> None:
    """Sleep as the last act before finalisation: a thread that asks for the interpreter later finds that there is none, and ends in peace."""
    time.sleep(LETTING_GO)


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
        self.holds_store = holds_store(rank)
        self.store.set(f"beat {rank}", self._beat(0))
        self.seen, self.seen_at = None, time.monotonic()
        self.beats: list[str] = []  # of all ranks, from when the neighbour was first missed
        self.beats_at = self.seen_at
        self.told: BaseException | None = None

    def run(self):
        """Beat, look and sleep, until the body is through."""
        count = 0
        while not self.done.wait(self.period):
            count += 1
            answered = threading.Event()
            threading.Thread(target=self._miss_answer, args=[answered], daemon=True).start()
            try:
                self._look(count)
            except Exception as error:  # whatever the store throws when its host is gone
                self._miss_store(error)
            finally:
                answered.set()

    def fail(self, error: BaseException) -> None:
        """Tell the others what ended the body here, or follow them when they told first."""
        if self._is_loss(error):
            self.done.wait(self.timeout + 2 * self.period)  # the thread ends this process when it finds out who died
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
            self._leave()

    def _look(self, count: int) -> None:
        self.store.set(f"beat {self.rank}", self._beat(count))
        if self.store.check(["obituary"]):
            if self._is_mine(self.store.get("obituary").decode()):
                return  # the main thread is telling
            self._follow()
        beat = self.store.get(f"beat {self.neighbour}").decode()
        if beat != self.seen:
            self.seen, self.seen_at, self.beats = beat, time.monotonic(), []
        silence = time.monotonic() - self.seen_at
        if silence <= self.timeout - 4 * self.period:
            return
        if not self.beats:
            self.beats, self.beats_at = self._all_beats(), time.monotonic()
        elif silence > self.timeout - 2 * self.period and time.monotonic() > self.beats_at + 1.5 * self.period:
            silent = self._silent_ranks()
            if self.neighbour not in silent:
                return  # it has just come back
            more = f", and {len(silent) - NAMED} more," * (len(silent) > NAMED)
            message = (
                f"{', '.join(list(silent.values())[:NAMED])}{more} died or froze: no sign of life for {silence:.1f} s"
            )
            self._end(message, speaks=self._write(message))

    def _miss_answer(self, answered: threading.Event) -> None:
        """Miss a store whose host stands still: what waits for it cannot be told to give up. This rank may have stood still itself, in one wait."""
        waits = round(self.timeout / self.period) - 2
        if not any(answered.wait(self.period) for _ in range(waits)):
            self._miss_store("frozen, or off the network")

    def _miss_store(self, reason: Exception | str) -> None:
        if not self.done.is_set():
            speaks = self.rank == 1 or (self.rank > 1 and is_first_of_host())  # nobody can ask who else does
            self._end(f"rank 0 or its launcher, which holds the store, does not answer ({reason})", speaks=speaks)

    def _follow(self) -> NoReturn:
        """End in silence; where a rank is telling its error, a moment later: a launcher ends all ranks when one has ended."""
        if FAILED in self.store.get("obituary").decode():
            time.sleep(TELLING)
        self._leave()

    def _leave(self) -> NoReturn:
        """End; where the store ends with this rank, once the others have read there that they are to end."""
        if self.holds_store:
            time.sleep(self.period + TELLING)
        leave(1)

    def _all_beats(self) -> list[str]:
        return [beat.decode() for beat in self.store.multi_get([f"beat {rank}" for rank in range(self.world_size)])]

    def _silent_ranks(self) -> dict[int, str]:
        """The ranks whose numbers have stood still since the neighbour was missed, with their processes and hosts."""
        both = enumerate(zip(self.beats, self._all_beats(), strict=True))
        return {rank: f"rank {rank} ({now.partition(' ')[2]})" for rank, (before, now) in both if before == now}

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
        self._leave()

    @staticmethod
    def _is_loss(error: BaseException) -> bool:
        """Whether an error says that a collective lost another rank."""
        return isinstance(error, LOST) or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS_OF_LOSS)
        )
