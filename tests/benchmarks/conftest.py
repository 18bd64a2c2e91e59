"""A tiny problem."""

import pytest


@pytest.fixture
def tiny(monkeypatch):
    """A problem that every implementation computes in no time, the only one of the suite."""
    from suite import problems

    passes = ("forward", "forward_backward", "structure", "structure_unstable")
    sizes = {"heads": 2, "channels": 8, "edge_dim": 3, "dtype": "float32", "passes": passes}
    tiny = problems.Problem("encoder-tiny-c8", "tiny", problems.Random(9, 7, 30), **sizes)
    monkeypatch.setattr(problems, "PROBLEMS", {tiny.name: tiny})
    return tiny
