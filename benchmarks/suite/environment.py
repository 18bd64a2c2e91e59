"""Device, versions, commit and date of a measurement."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from suite import ROOT


def describe(device: str, packages: set[str], commit: str | None) -> dict:
    """Return device, versions, commit and date."""
    versions = {"python": platform.python_version()}
    versions |= {name: _version(name) for name in sorted(packages)}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "versions": versions,
        "commit": commit or current_commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def current_commit() -> str:
    """Return the commit that is checked out, marked if files of the package differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        status = [*git, "status", "--porcelain", "src"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git here, pass --commit"
    return f"{head} with changes in src" if changed.strip() else head


def _processor() -> str:
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # distinguishes CPU from GPU builds
    try:
        return version(package)
    except PackageNotFoundError:
        return None
