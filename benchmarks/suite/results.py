"""Results files: JSON, one record per line, written after each step; failed steps are listed."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from anemoi_gt.app.training.run_files import atomic_write

LONGEST = 2000  # characters of an error: a compiler's messages have their reason at the end


def write(report: dict, path: Path) -> None:
    """Write a report, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write((as_json(report) + "\n").encode())


def as_json(report: dict) -> str:
    """Return JSON with a line per key, and a line per element of its list or dict."""

    def lines(value) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            elements = [f"  {json.dumps(element, default=str)}" for element in value]
            return "[\n" + ",\n".join(elements) + "\n ]"
        if isinstance(value, dict) and value:
            entries = []
            for key, entry in value.items():
                entries.append(f"  {json.dumps(str(key))}: {json.dumps(entry, default=str)}")
            return "{\n" + ",\n".join(entries) + "\n }"
        return json.dumps(value, default=str)

    entries = [f" {json.dumps(str(key))}: {lines(value)}" for key, value in report.items()]
    return "{\n" + ",\n".join(entries) + "\n}"


class Results:
    """Report of a benchmark that runs in steps.

    Parameters
    ----------
    report : dict
        The content of the file; `problems` is added to it.
    path : Path or None
        The file; None writes nothing.
    seconds : float
        Time limit; after it, no further step begins.
    """

    def __init__(self, report: dict, path: Path | None, seconds: float):
        self.report = report
        self.path = path
        self.deadline = time.monotonic() + seconds
        self.problems = {}
        report["problems"] = self.problems
        self.write()

    def run(self, name: str, call: Callable[[], object]):
        """Return `call()`, or None if it raises or no time is left; log the error in `problems`."""
        self.write()
        if time.monotonic() > self.deadline:
            self._add_problem(name, "not run: no time was left")
            return None
        try:
            return call()
        except Exception as error:  # the other steps still run
            self._add_problem(name, f"{type(error).__name__}: {str(error)[-LONGEST:]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the failed step may have been out of memory
        return None

    def write(self) -> None:
        """Write the report as it is."""
        if self.path is not None:
            write(self.report, self.path)

    def end(self) -> dict:
        """Write the report and return it.

        Raises
        ------
        SystemExit
            With the problems, if there are any.
        """
        self.write()
        if self.problems:
            raise SystemExit(
                "\n".join(f"{name}: {problem}" for name, problem in self.problems.items())
            )
        return self.report

    def _add_problem(self, name: str, problem: str) -> None:
        self.problems[name] = problem
        print(f"{name}: {problem}", flush=True)
        self.write()
