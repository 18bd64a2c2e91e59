"""Replays of a plan's runs: CUDA graphs, one for each set of addresses that recurs.

What a run launches depends on its plan and on the addresses of its memory alone. In a loop that
does the same work at each step, the allocator hands out the same memory again, so runs recur:

    first run on some addresses     launched
    second                          captured in a CUDA graph, which is replayed, if most runs recur
    later                           replayed: one launch in place of a dozen

A graph holds addresses, not tensors: a replay reads and writes the memory of the run that asks for
it, in the order of the default stream. So no memory is kept alive for it, and whatever surrounds a
run (hooks, checkpoints, other allocations) may change. Two runs at a time never share a graph,
because each holds its own results.

Capturing takes as long as several launched runs. So nothing is captured while fewer than half of
the recent runs of a plan recur, as where other allocations come between them. Where they recur but
seldom again, the captures of a plan end: it has a balance of them, to which replays add.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock

import torch

from anemoi_gt.ops.triton_backend import captured_launches

log = logging.getLogger(__name__)

MAX_GRAPHS = 128  # of a plan, about 0.3 MB each; the least recently replayed is dropped
MAX_SEEN = 512  # sets of addresses that were launched once
MAX_BALANCE = 64.0  # captures; the balance of a new plan
REPLAY_EARNS = 1 / 8
LAUNCH_EARNS = 1 / 256  # so that a loop that becomes steady is noticed
RECENT = 1 / 8  # weight of a run in the share of recent runs that recur
FEWEST_RECUR = 1 / 2
# bytes that a run may allocate, as cuBLAS does for a workspace: graphs hold them until they go
MAX_ALLOCATED = 2**26
RUNS_TO_LOG = 1000

Run = Callable[[], None]


def allocated_bytes() -> int | None:
    """Return the bytes that the process has allocated on the current device, freed ones too.

    None for an allocator that does not count, as one of `CUDAPluggableAllocator`.
    """
    try:
        return torch.cuda.memory_stats().get("allocated_bytes.all.allocated")
    except RuntimeError:
        return None


@dataclass(slots=True)
class Graph:
    """A captured run."""

    key: tuple
    replay: Run
    last: int  # number of the replay that was the last of this graph


class Replays:
    """The graphs of one plan, by the key of a run: the addresses, and all else that it depends on.

    Parameters
    ----------
    capture : callable
        Returns a replay of a run, or None if it cannot be captured now.
    allocated : callable
        Returns the bytes allocated until now, None if unknown: then nothing is captured.
    """

    def __init__(
        self,
        capture: Callable[[Run], Run | None] = captured_launches.capture,
        allocated: Callable[[], int | None] = allocated_bytes,
    ):
        self.capture = capture
        self.allocated = allocated
        # both by the hash of a key: hashing takes as long as the rest of a lookup, so it is done
        # once, and whole keys of runs that never recur would fill the caches
        self.graphs: dict[int, Graph] = {}
        self.seen: set[int] = set()
        self.balance = MAX_BALANCE
        self.share_recurring = 0.0
        self.allocates_little = False  # until a run was seen to
        self.num_launched = 0
        self.num_replayed = 0
        self._lock = Lock()  # of insertions

    def run(self, key: tuple, run: Run) -> None:
        """Run `run`, or replay it."""
        key_hash = hash(key)
        graph = self.graphs.get(key_hash)
        if graph is not None and graph.key != key:
            graph = None  # of another run with this hash
        recurs = graph is not None or key_hash in self.seen
        self.share_recurring += RECENT * (recurs - self.share_recurring)
        if graph is not None:
            self.num_replayed += 1
            self._earn(REPLAY_EARNS)
            graph.last = self.num_replayed
            graph.replay()
        else:
            self.num_launched += 1
            if recurs:
                self._earn(LAUNCH_EARNS)
                self._run_again(key, key_hash, run)
            else:
                self._run_first(key_hash, run)
        if self.num_launched + self.num_replayed == RUNS_TO_LOG:
            log.info(
                "%d of the first %d runs of a plan were replayed, from %d CUDA graphs",
                self.num_replayed,
                RUNS_TO_LOG,
                len(self.graphs),
            )

    def _earn(self, captures: float) -> None:
        # capped: a long loop must not save up for thousands of captures
        self.balance = min(MAX_BALANCE, self.balance + captures)

    def _run_first(self, key_hash: int, run: Run) -> None:
        if len(self.seen) >= MAX_SEEN:
            self.seen.clear()
        self.seen.add(key_hash)
        run()

    def _run_again(self, key: tuple, key_hash: int, run: Run) -> None:
        if self.balance < 1 or self.share_recurring < FEWEST_RECUR:
            run()
        elif not self.allocates_little:
            self.balance -= 1
            before = self.allocated()
            run()
            after = self.allocated()
            if before is not None and after is not None:
                self.allocates_little = after - before <= MAX_ALLOCATED
        else:
            self.balance -= 1
            self._capture(key, key_hash, run)

    def _capture(self, key: tuple, key_hash: int, run: Run) -> None:
        """Capture a run and replay it; launch it if that fails, and from then on."""
        replay = None
        try:
            replay = self.capture(run)
        except RuntimeError as error:
            self.balance = float("-inf")
            _log_failure(str(error))
        if replay is None:
            run()
            return
        with self._lock:
            self.seen.discard(key_hash)
            if len(self.graphs) >= MAX_GRAPHS:
                oldest = min(self.graphs, key=lambda number: self.graphs[number].last)
                del self.graphs[oldest]
            self.graphs[key_hash] = Graph(key, replay, self.num_replayed)
        replay()


@cache
def _log_failure(reason: str) -> None:
    log.warning("calls are launched and not replayed: capturing failed: %s", reason)
