"""Estimate of the memory of a training step, and advice where it is short."""

import pytest
import torch
from support.weather import weather_graph
from torch import nn

from anemoi_gt import EncoderProcessorDecoder
from anemoi_gt.training import TrainingConfig
from anemoi_gt.training.memory import advice, estimate_memory

NODES = {"data": 3000, "hidden": 700}
KINDS = {("data", "to", "hidden"): 4400, ("hidden", "to", "hidden"): 2000, ("hidden", "to", "data"): 9000}
CONFIG = TrainingConfig(batch_size=1)


@pytest.fixture(scope="module")
def make_model():
    graph = weather_graph(NODES, KINDS)
    return lambda **options: EncoderProcessorDecoder(graph, 20, 9, channels=128, heads=4, **options)


@pytest.mark.parametrize("options", [{"num_layers": 1}, {"num_layers": 4}, {"num_layers": 1, "mapper_chunks": 3}])
def test_estimate_is_at_most_30_percent_above_what_a_model_keeps_for_the_backward_pass(make_model, options):
    model = make_model(**options)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randn(1, NODES["data"], 20))
    found = sum(storage.nbytes() for storage in kept.values())
    assert found <= estimate_memory(model, CONFIG).kept <= 1.3 * found


def test_checkpointing_chunks_and_precision_lower_the_estimate(make_model):
    options = [{}, {"checkpoint_groups": 4}, {"checkpoint_groups": 4, "mapper_chunks": 4}]
    totals = [estimate_memory(make_model(**each), CONFIG).total for each in options]
    mixed = TrainingConfig(batch_size=1, precision="bf16-mixed")
    totals.append(estimate_memory(make_model(**options[-1]), mixed).total)
    assert totals == sorted(totals, reverse=True) and totals[0] > 2 * totals[-1]
    assert estimate_memory(nn.Linear(2, 2), CONFIG) is None


@pytest.mark.parametrize(
    ("model", "training", "expected"),
    [
        ({"num_layers": 4}, {}, "set model.checkpoint_groups=4 and model.mapper_chunks=2"),
        ({"num_layers": 4, "checkpoint_groups": 2}, {}, "set model.checkpoint_groups=4"),
        ({"num_layers": 4, "checkpoint_groups": 4}, {"precision": "32-true"}, "set training.precision=bf16-mixed"),
        ({"num_layers": 4, "checkpoint_groups": 4, "mapper_chunks": 8}, {}, "set model.mapper_chunks=32"),
        ({"num_layers": 4, "checkpoint_groups": 4, "mapper_chunks": 64}, {}, "lower training.batch_size or"),
    ],
)
def test_advice_names_what_saves_most(model, training, expected):
    assert advice(model, training).startswith(expected)
