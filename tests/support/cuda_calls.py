"""Stubs of PyTorch's calls for CUDA graphs, which record what was called."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch


def stub_cuda_graphs(monkeypatch):
    """Replace the calls by stubs and return the list in which they are recorded."""
    done = []

    @contextmanager
    def within(name):
        done.append(f"enter {name}")
        yield
        done.append(f"leave {name}")

    def stream(name):
        return SimpleNamespace(name=name, wait_stream=lambda other: done.append(f"{name} waits for {other.name}"))

    current, graph = stream("current"), SimpleNamespace(replay=lambda: done.append("replay"))

    def capture(captured, capture_error_mode):
        return within(capture_error_mode) if captured is graph else None

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("free"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within(stream.name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return done
