"""What a run prints and leaves behind: one line a check, below where, when and with what it ran."""

import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from gpu_checks import DEVICE, ROOT


class Report:
    """Lines on the screen and in a log file; knows whether any check failed."""

    def __init__(self, path: Path | None, commit: str | None):
        self.file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("w")
        self.failed = False
        device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, Triton's interpreter"
        self.line(f"device   {device}")
        self.line(f"commit   {commit or current_commit()}")
        self.line(
            f"versions torch {torch.__version__}, triton {triton.__version__}, python {platform.python_version()}"
        )
        self.line(f"date     {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")

    def line(self, text: str) -> None:
        """Print and log a line."""
        print(text, flush=True)
        if self.file is not None:
            print(text, file=self.file, flush=True)

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Run a check, which returns what it saw or raises, and write its line."""
        start = time.perf_counter()
        try:
            verdict, detail = "PASS", check()
        except Exception as error:  # whatever it is, the other checks still run
            verdict, self.failed = "FAIL", True
            where = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        self.line(f"{verdict} {name} ({time.perf_counter() - start:.0f} s): {detail}")


def current_commit() -> str:
    """The commit that is checked out, with a mark where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git here, pass --commit"
    return f"{head} with changes in src" if changed.strip() else head
