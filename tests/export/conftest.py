"""Fixtures of the export tests: small models on random weather graphs."""

import pytest
import torch
from support.differentiate import randomise
from support.weather import IN, KINDS, NODES, OUT, weather_graph

from anemoi_gt import EncoderProcessorDecoder, KernelConfig

SMALL = {"channels": 16, "heads": 2, "num_layers": 1, "config": KernelConfig(backend="torch")}


@pytest.fixture(scope="session", autouse=True)
def compile_packages_fast(unoptimised_packages):
    """Compile all packages without optimisation."""


@pytest.fixture
def make_model():
    """Build a model with random weights on a graph of these sizes."""

    def make(**options):
        torch.manual_seed(2)
        model = EncoderProcessorDecoder(weather_graph(NODES, KINDS), IN, OUT, **SMALL | options)
        randomise(model)
        return model

    return make


@pytest.fixture
def fields():
    def fields(batch):
        return torch.randn(batch, NODES["data"], IN, generator=torch.Generator().manual_seed(batch))

    return fields
