"""Estimate of the memory of a training step, and advice where it is short."""

from dataclasses import replace

import pytest
import torch
from support.weather import weather_graph
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anemoi_gt import EncoderProcessorDecoder, KernelConfig
from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.memory_estimate import GATHERED, STATE, advice, estimate_memory
from anemoi_gt.app.training.step import autocast

NODES = {"data": 3000, "hidden": 700}
KINDS = {
    ("data", "to", "hidden"): 4400,
    ("hidden", "to", "hidden"): 2000,
    ("hidden", "to", "data"): 9000,
}
CONFIG = TrainingConfig(batch_size=1)


@pytest.fixture(scope="module")
def make_model():
    graph = weather_graph(NODES, KINDS)
    return lambda **options: EncoderProcessorDecoder(graph, 20, 9, channels=128, heads=4, **options)


WHOLE = {"num_layers": 2, "config": KernelConfig("triton")}


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({"num_layers": 1}, "32-true"),
        ({"num_layers": 4}, "32-true"),
        ({"num_layers": 1, "mapper_chunks": 3}, "32-true"),
        (WHOLE, "bf16-mixed"),
        (WHOLE | {"mapper_chunks": 3}, "bf16-mixed"),
    ],
)
def test_estimate_is_at_most_30_percent_above_the_saved_activations(make_model, options, precision):
    model = make_model(**options)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model_tensors = [*model.parameters(), *model.buffers()]
    model_tensors += [mode.from_tensor(tensor) for tensor in model_tensors]
    saved = {}  # storages by address

    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with mode, hooks, autocast(precision, torch.device("cpu")):
        model(torch.randn(1, NODES["data"], 20))
    for tensor in model_tensors:
        saved.pop(tensor.untyped_storage()._cdata, None)
    activations = sum(storage.nbytes() for storage in saved.values())
    estimate = estimate_memory(model, replace(CONFIG, precision=precision))
    assert activations <= estimate.kept <= 1.3 * activations


def test_divided_parameters_lower_the_estimated_state_only(make_model):
    model = make_model()
    whole, divided = (estimate_memory(model, CONFIG, ranks) for ranks in (1, 4))
    rows = sum(p.numel() for name, p in model.named_parameters() if name.endswith("trainable"))
    block = sum(parameter.numel() for parameter in model.processor.proc[0].parameters())
    shared = whole.state // STATE - rows
    assert divided.state == STATE * (rows + shared // 4) + GATHERED * block
    assert divided._replace(state=whole.state) == whole


def test_checkpointing_chunks_and_precision_lower_the_estimate(make_model):
    checkpointed = {"checkpoint_groups": 4}
    chunked = checkpointed | {"mapper_chunks": 4}
    mixed = TrainingConfig(batch_size=1, precision="bf16-mixed")
    estimates = [
        estimate_memory(make_model(), CONFIG),
        estimate_memory(make_model(**checkpointed), CONFIG),
        estimate_memory(make_model(**chunked), CONFIG),
        estimate_memory(make_model(**chunked), mixed),
    ]
    totals = [estimate.total for estimate in estimates]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 2 * totals[-1]
    assert estimate_memory(nn.Linear(2, 2), CONFIG) is None


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
