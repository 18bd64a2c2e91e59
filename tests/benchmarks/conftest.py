"""Paths for the benchmarks, which are not part of the package, and a tiny problem."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def tiny(monkeypatch):
    """A problem that every implementation computes in no time, the only one of the suite."""
    from suite import problems

    passes = ("forward", "forward_backward", "structure", "structure_unstable")
    sizes = {"heads": 2, "channels": 8, "edge_dim": 3, "dtype": "float32", "passes": passes}
    tiny = problems.Problem("encoder-tiny-c8", "tiny", problems.Random(9, 7, 30), **sizes)
    monkeypatch.setattr(problems, "PROBLEMS", {tiny.name: tiny})
    return tiny
