"""Parts of a benchmark, one after the other: what they find is written after each; one that fails or comes too late is a line of the report."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

LONGEST = 2000  # characters of a problem: a compiler's messages have their reason at the end


class Parts:
    """What a benchmark has found so far.

    Parameters
    ----------
    report : dict
        What is written, as JSON; `problems` is added to it.
    path : Path or None
        Where it is written.
    seconds : float
        After these no part begins.
    """

    def __init__(self, report: dict, path: Path | None, seconds: float):
        self.report, self.path, self.deadline = report, path, time.monotonic() + seconds
        self.problems = report["problems"] = {}
        self.write()

    def run(self, name: str, call: Callable[[], object]):
        """Return what `call()` returns; None when it raises or no time is left. Writes the report as it was left by the part before."""
        self.write()
        if time.monotonic() > self.deadline:
            self._note(name, "not run: no time was left")
            return None
        try:
            return call()
        except Exception as error:  # whatever it is, the other parts still run
            self._note(name, f"{type(error).__name__}: {str(error)[-LONGEST:]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the failed part may have been out of memory
        return None

    def write(self) -> None:
        """Write what there is, whole or not at all."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(self.path.name + ".part")
        unfinished.write_text(json.dumps(self.report, indent=1, default=str) + "\n")
        unfinished.replace(self.path)

    def end(self) -> dict:
        """Write the report and return it.

        Raises
        ------
        SystemExit
            With the problems, when there are any.
        """
        self.write()
        if self.problems:
            raise SystemExit("\n".join(f"{name}: {problem}" for name, problem in self.problems.items()))
        return self.report

    def _note(self, name: str, problem: str) -> None:
        self.problems[name] = problem
        print(f"{name}: {problem}", flush=True)
        self.write()
