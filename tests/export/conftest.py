"""Fixtures of the export tests: small models on random weather graphs, and processes without this library."""

import subprocess
import sys

import pytest
import torch
from support.differentiate import randomise
from support.weather import IN, KINDS, NODES, OUT, weather_graph

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder

SMALL = {"channels": 16, "heads": 2, "num_layers": 1, "config": AttentionConfig(backend="torch")}
OTHER = {"data": 17, "hidden": 23}, {kind: edges // 2 + 9 for kind, edges in KINDS.items()}


@pytest.fixture(scope="session", autouse=True)
def unoptimised_packages():
    """Compile the C++ of packages without optimisation and vector instructions, which take seconds."""
    with torch._inductor.config.patch({"aot_inductor.debug_compile": True, "cpp.vec_isa_ok": False}):
        yield


@pytest.fixture
def make_model():
    """Build a model with random weights on a graph of these sizes."""

    def make(nodes=NODES, kinds=KINDS, **options):
        torch.manual_seed(2)
        model = EncoderProcessorDecoder(weather_graph(nodes, kinds), IN, OUT, **SMALL | options)
        randomise(model)
        return model

    return make


@pytest.fixture
def fields():
    def fields(batch, nodes=NODES["data"]):
        return torch.randn(batch, nodes, IN, generator=torch.Generator().manual_seed(batch))

    return fields


@pytest.fixture(scope="session")
def run_without_library():
    """Run a Python script with arguments in a process that cannot import this library, and return its output."""

    def run(*arguments):
        guard = "import runpy, sys; sys.modules['anemoi_gt'] = None; sys.argv = sys.argv[1:]; "
        guard += "runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-I", "-c", guard, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
