"""Estimate of the memory of a training step, and advice where it is short."""

import copy
from dataclasses import replace

import pytest
import torch
from support.weather import weather_graph
from torch import nn

from anemoi_gt import EncoderProcessorDecoder, KernelConfig
from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.memory_estimate import GATHERED, STATE, advice, estimate_memory
from anemoi_gt.app.training.step import autocast
from anemoi_gt.nn import GNNMapper, GNNProcessor

NODES = {"data": 150, "hidden": 35}
KINDS = {
    ("data", "to", "hidden"): 220,
    ("hidden", "to", "hidden"): 100,
    ("hidden", "to", "data"): 450,
}
CONFIG = TrainingConfig(batch_size=1)
FIELDS = (20, 9)


INPUTS = (NODES["data"], 20)


@pytest.fixture(scope="module")
def make_model():
    graph = weather_graph(NODES, KINDS)
    return lambda **options: EncoderProcessorDecoder(graph, *FIELDS, channels=64, **options)


FUSED = {"num_layers": 1, "config": KernelConfig("triton")}
GRAPH_NETWORK = {"processor": GNNProcessor, "mapper": GNNMapper}
CASES = [
    ({"num_layers": 1}, "32-true"),
    (FUSED, "bf16-mixed"),
    (GRAPH_NETWORK | {"num_layers": 1}, "32-true"),
    (GRAPH_NETWORK | FUSED, "bf16-mixed"),
]


@pytest.mark.parametrize(("options", "precision"), CASES)
def test_what_is_kept_is_what_autograd_saves(make_model, options, precision):
    model = make_model(**options)
    weights = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved = {}  # storages by address, of a real pass

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, autocast(precision, torch.device("cpu")):
        model(torch.randn(1, *INPUTS))
    activations = sum(storage.nbytes() for storage in saved.values())
    estimate = estimate_memory(model, replace(CONFIG, precision=precision), INPUTS)
    # the result, the input and copies of the graph's indices come with it
    assert activations <= estimate.kept <= 1.15 * activations


def test_the_working_set_is_what_the_allocator_adds(make_model):
    model = make_model(num_layers=3, checkpoint_groups=3)
    estimate = estimate_memory(model, CONFIG, INPUTS)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        (model(torch.randn(1, *INPUTS)) ** 2).mean().backward()
    allocated = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    assert estimate.kept + estimate.working_set == pytest.approx(peak, rel=0.2)


def test_divided_parameters_lower_the_estimated_state_only(make_model):
    model = make_model()
    whole, divided = (estimate_memory(model, CONFIG, INPUTS, ranks) for ranks in (1, 4))
    rows = sum(p.numel() for name, p in model.named_parameters() if name.endswith("trainable"))
    layers = (model.encoder["data"], model.decoder["data"], model.processor.proc[0])
    largest = max(sum(weight.numel() for weight in layer.parameters()) for layer in layers)
    shared = whole.state // STATE - rows
    assert divided.state == STATE * (rows + shared // 4) + GATHERED * largest
    assert divided._replace(state=whole.state) == whole


def test_checkpointing_chunks_and_precision_lower_the_estimate(make_model):
    checkpointed = {"num_layers": 2, "checkpoint_groups": 2}
    chunked = checkpointed | {"mapper_chunks": 2}
    large = replace(CONFIG, batch_size=20)
    estimates = [
        estimate_memory(make_model(num_layers=2), large, INPUTS),
        estimate_memory(make_model(**checkpointed), large, INPUTS),
        estimate_memory(make_model(**chunked), large, INPUTS),
        estimate_memory(make_model(**chunked), replace(large, precision="bf16-mixed"), INPUTS),
    ]
    activations = [estimate.kept + estimate.working_set for estimate in estimates]
    assert activations == sorted(activations, reverse=True)
    assert activations[0] > 2 * activations[-1]


def test_an_estimate_draws_nothing_and_needs_no_layer_of_this_library(make_model):
    model = make_model(num_layers=1, dropout=0.5, checkpoint_groups=1)
    own = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(NODES["data"]))
    before = copy.deepcopy(own.state_dict())
    state = torch.get_rng_state()
    weights = list(map(id, model.parameters()))  # of a module with two names, too
    assert estimate_memory(model.train(), CONFIG, INPUTS).total > 0
    assert list(map(id, model.parameters())) == weights
    estimate = estimate_memory(own, CONFIG, INPUTS)
    assert estimate.state == STATE * (21 * 50 + 2 * NODES["data"])
    assert estimate.kept >= 4 * NODES["data"] * (20 + 2 * 50)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(own.state_dict()[name], value) for name, value in before.items())


def test_a_model_that_reads_values_has_no_estimate(caplog):
    class Reading(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.mean().item()

    with caplog.at_level("INFO"):
        assert estimate_memory(Reading(20, 9), CONFIG, INPUTS) is None
    assert "the memory of a step is not estimated, because it needs data" in caplog.text


@pytest.mark.parametrize(
    ("model", "training", "expected"),
    [
        ({"num_layers": 4}, {}, "set model.checkpoint_groups=4 and model.mapper_chunks=2"),
        ({"num_layers": 4, "checkpoint_groups": 2}, {}, "set model.checkpoint_groups=4"),
        (
            {"num_layers": 4, "checkpoint_groups": 4},
            {"precision": "32-true"},
            "set training.precision=bf16-mixed",
        ),
        (
            {"num_layers": 4, "checkpoint_groups": 4, "mapper_chunks": 8},
            {},
            "set model.mapper_chunks=32",
        ),
        (
            {"num_layers": 4, "checkpoint_groups": 4, "mapper_chunks": 64},
            {},
            "lower training.batch_size or",
        ),
    ],
)
def test_advice_names_the_option_that_saves_most(model, training, expected):
    assert advice(model, training).startswith(expected)
