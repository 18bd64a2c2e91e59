"""Report of a run, printed and logged: device, commit, date, versions, one line per check."""

import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from suite.environment import describe
from suite.timing import Gpu

from gpu_checks import DEVICE


class Report:
    """Lines on the screen and in a log file; knows whether any check failed."""

    def __init__(self, path: Path | None, commit: str | None):
        self.file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("w")
        self.failed = False
        about = describe(DEVICE.type, {"torch", "triton"}, commit)
        packages = about.pop("versions").items()
        versions = ", ".join(f"{package} {version}" for package, version in packages)
        for name, value in (about | {"versions": versions}).items():
            self.line(f"{name:8s} {value}")

    def line(self, text: str) -> None:
        """Print and log a line."""
        print(text, flush=True)
        if self.file is not None:
            print(text, file=self.file, flush=True)

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Run a check, which returns a summary or raises, and write its line.

        Cached memory is released afterwards: the next check may start processes that need it.
        """
        start = time.perf_counter()
        try:
            detail = check()
            verdict = "PASS"
        except Exception as error:  # whatever it is, the other checks still run
            verdict = "FAIL"
            self.failed = True
            frame = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
        if DEVICE.type == "cuda":
            gc.collect()
            Gpu.free()
        self.line(f"{verdict} {name} ({time.perf_counter() - start:.0f} s): {detail}")
