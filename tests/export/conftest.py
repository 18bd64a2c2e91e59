"""What the tests of programs and packages share: small models on random weather graphs, and processes without our code."""

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
def wrappers_as_they_are():
    """Let the compiler of C++ leave the code around the kernels of packages as it is: to optimise it takes seconds."""
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        yield


@pytest.fixture
def make_model():
    """Make a model with random weights, on the graph of these nodes and edges."""

    def make(nodes=NODES, kinds=KINDS, **options):
        torch.manual_seed(2)
        model = EncoderProcessorDecoder(weather_graph(nodes, kinds), IN, OUT, **SMALL | options)
        randomise(model)
        return model

    return make


@pytest.fixture
def fields():
    """Draw fields of so many samples on so many nodes."""

    def fields(samples, nodes=NODES["data"]):
        return torch.randn(samples, nodes, IN, generator=torch.Generator().manual_seed(samples))

    return fields


@pytest.fixture(scope="session")
def without_our_code():
    """Run Python code with arguments in a process that cannot import this library; returns what it prints."""

    def run(*arguments):
        guard = "import runpy, sys; sys.modules['anemoi_gt'] = None; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-I", "-c", guard, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
