"""Results files: where they are, and what they say about device, versions, commit and date."""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from suite import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SHORT = 7  # digits of a commit
TOLD = ("anemoi-models", "torch", "torch-geometric")  # versions that pages name


def load(name: str) -> dict:
    """Return the contents of a JSON file."""
    return json.loads((RESULTS / name).read_text())


class FileFacts(NamedTuple):
    """What was measured where and when."""

    name: str
    device: str
    versions: tuple[tuple[str, str], ...]
    commit: str
    date: str  # year-month-day hour:minute, which sorts by time

    @classmethod
    def of(cls, name: str) -> "FileFacts":
        """Read the environment of a JSON file, or the header of a text file.

        A text file says device, versions, commit and date as `describe` does, one a line:

            device   NVIDIA H200
            versions python 3.12.3, torch 2.11.0+cu130
            commit   4253340
            date     2026-11-26
        """
        if name.endswith(".json"):
            facts = load(name)["environment"]
            versions = facts["versions"].items()
        else:
            text = (RESULTS / name).read_text()
            facts = dict(re.findall(r"^(device|versions|commit|date) +(.+)$", text, re.MULTILINE))
            versions = [entry.split(" ", 1) for entry in facts["versions"].split(", ")]
        told = tuple((package, number) for package, number in versions if package in TOLD)
        return cls(name, facts["device"], told, facts["commit"][:SHORT], facts["date"])


def sources(used: Iterable[FileFacts]) -> str:
    """Return the line below a table: devices, versions, commits by date, and files."""
    files = sorted(set(used), key=lambda facts: (facts.date, facts.name))
    devices = " and ".join(dict.fromkeys(facts.device for facts in files))
    versions, commits = {}, {}
    for facts in files:
        commits.setdefault(facts.date.split()[0], {})[f"`{facts.commit}`"] = None
        for package, number in facts.versions:
            versions.setdefault(package, {})[number] = None
    told = [f"{package} {' and '.join(versions[package])}" for package in sorted(versions)]
    dated = [f"{', '.join(commits[date])} ({date})" for date in commits]
    names = ", ".join(sorted(facts.name for facts in files))
    return f"{'; '.join([devices, ', '.join(told), *dated])}: {names}."
