"""Order of work: graphs, then all compilation in parallel, then one measurement at a time."""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from suite import graphs
from suite.problems import Problem
from suite.timing import CLOCKS
from suite.worker import Refused, Worker


def warm(
    problems: list[Problem], names: tuple[str, ...], device: str, folder: Path, processes: int
) -> set[tuple]:
    """Check every problem with every baseline, each in its own process; return correct pairs.

    Compiled kernels are on disk afterwards. A check that fails here, perhaps because memory runs
    out, is repeated alone.
    """

    def check(pair: tuple[Problem, str]) -> tuple | None:
        problem, name = pair
        try:
            with Worker(name, device, folder) as worker:
                worker.call("check", problem)
        except Refused:
            return None
        return problem.name, name

    with ThreadPoolExecutor(processes) as pool:
        pairs = pool.map(check, product(problems, names))
        return {pair for pair in pairs if pair is not None}


class Run:
    """Measurements of some baselines on some problems, on one device, in one go."""

    def __init__(self, sizes: dict[str, tuple], device: str, right: set[tuple]):
        self.sizes, self.right = sizes, right
        self.clock = CLOCKS[device]
        self.results: list[dict] = []
        self.copy_speeds: list[float] = []

    def measure(
        self, problems: list[Problem], workers: dict[str, Worker], save: Callable[["Run"], None]
    ) -> None:
        """Take all measurements, one at a time, and save after each problem."""
        first = next(iter(workers.values()))
        self.copy_speeds.append(first.call("copy_speed"))
        for problem in problems:
            correct = {}
            for name, worker in workers.items():
                if self._check(problem, name, worker):
                    correct[name] = worker
            for kind in problem.passes:
                self._time(problem, kind, correct)
            save(self)
        self.copy_speeds.append(first.call("copy_speed"))
        save(self)

    def _check(self, problem: Problem, name: str, worker: Worker) -> bool:
        """Return whether the baseline is correct on the problem; record the reason if not."""
        if (problem.name, name) in self.right:
            return True
        try:
            worker.call("check", problem)
        except Refused as refusal:
            for kind in problem.passes:
                self._add(problem, kind, name, reason=str(refusal))
            return False
        return True

    def _time(self, problem: Problem, kind: str, workers: dict[str, Worker]) -> None:
        """Measure one pass with all baselines, in turns."""
        measured: dict[str, list] = {name: [] for name in workers}
        peaks, reasons = {}, {}
        for _ in range(self.clock.ROUNDS):
            for name in [name for name in measured if name not in reasons]:
                try:
                    times, peaks[name] = workers[name].call("time", problem, kind)
                except Refused as refusal:
                    reasons[name] = str(refusal)
                else:
                    measured[name] += times
        for name, times in measured.items():
            if name in reasons:
                self._add(problem, kind, name, reason=reasons[name])
            else:
                self._add(problem, kind, name, **self._summary(times, peaks[name]))

    def _summary(self, times: list[float], peak: int | None) -> dict:
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return {
            "median_ms": median,
            "quartiles_ms": [low, high],
            "calls": len(times),
            "peak_bytes": peak,
        }

    def _add(self, problem: Problem, kind: str, name: str, **fields) -> None:
        self.results.append({"problem": problem.name, "pass": kind, "baseline": name, **fields})
        text = fields.get("reason") or f"{fields['median_ms']:.3f} ms"
        print(f"{problem.name:32} {kind:18} {name:14} {text}", flush=True)


def run(
    problems: list[Problem],
    names: tuple[str, ...],
    device: str,
    folder: Path,
    save: Callable[[Run], None],
) -> None:
    """Check and measure; save the results so far after each problem."""
    pairs = len(problems) * len(names)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, device, folder)) for name in names}
        # while workers start
        sizes = graphs.build([problem.graph for problem in problems], folder)
        right = set()
        if device == "cuda":
            begin = time.perf_counter()
            right = warm(problems, names, device, folder, min(os.cpu_count() or 1, pairs))
            seconds = time.perf_counter() - begin
            print(f"{len(right)} of {pairs} pairs checked in {seconds:.0f} s", flush=True)
        Run(sizes, device, right).measure(problems, workers, save)
