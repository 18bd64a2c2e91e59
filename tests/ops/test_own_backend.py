"""A backend of another package, by its full name in a config: sizes, a subset of the formulas."""

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from support.interaction_networks import make
from support.refusals import raises
from support.weather import IN, OUT, weather_graph

from anemoi_gt import EncoderProcessorDecoder, GraphStructure, KernelConfig, edge_attention

NAME = "support.narrow_backend.BACKEND"
NARROW = KernelConfig(NAME)


def attend(channels, config, heads=2, function=edge_attention):
    torch.manual_seed(0)
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1, 2], [0, 0, 1, 1]]), (3, 4))
    query, rows = torch.randn(4, heads, channels), torch.randn(3, heads, channels)
    edges = torch.randn(4, 3), torch.randn(heads * channels, 3), torch.randn(heads * channels)
    return function(query, rows, rows, graph, *edges, config=config)


def test_it_attends_as_the_others_where_it_takes_the_sizes():
    torch.testing.assert_close(attend(64, NARROW), attend(64, KernelConfig("torch")))
    compiled = torch.compile(edge_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(attend(8, NARROW, function=compiled), attend(8, NARROW))


def test_it_refuses_other_sizes_with_its_reason():
    refused = "cannot run here: it attends with at most 64 channels, got 65"
    raises(lambda: attend(65, NARROW), f"attention backend '{NAME}' {refused}")


def test_a_model_of_a_config_names_it():
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        kernels = compose("train", [f"kernels.backend={NAME}"]).kernels
    config = instantiate(kernels)
    assert config == NARROW
    models = []
    for each in (config, KernelConfig("torch")):
        torch.manual_seed(0)
        sizes = {"channels": 16, "heads": 2, "num_layers": 1}
        models.append(EncoderProcessorDecoder(weather_graph(), IN, OUT, **sizes, config=each))
    x = torch.randn(2, 30, IN)
    narrow, expected = (model(x) for model in models)
    torch.testing.assert_close(narrow, expected)
    with torch.autocast("cpu", torch.bfloat16):  # where fused sub-layers would be faster
        assert models[0](x).isfinite().all()


def test_modules_compute_what_it_has_no_formula_for():
    problem = make("cpu", config=NARROW)
    expected = make("cpu", config=KernelConfig("torch"))
    for actual, value in zip(problem.call(), expected.call(), strict=True):
        torch.testing.assert_close(actual, value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_package.BACKEND", "backend 'no_package.BACKEND' must be importable: No module named"),
        ("support.narrow_backend.OTHER", "must be importable: module 'support.narrow_backend' has"),
        (
            "support.narrow_backend.why_not",
            "must be an anemoi_gt.ops.backend.Backend, got function",
        ),
    ],
)
def test_a_name_that_is_no_backend_is_refused(name, message):
    raises(lambda: attend(8, KernelConfig(name)), message)
