"""Embeddings and output layers of Anemoi's mappers under `install`: numbers, dtypes, what is refused and named."""

from functools import partial

import pytest
import torch
from support import anemoi_model as small
from support.anemoi_model import OwnLinear
from support.operators import LINEAR_LAYER, Operators
from support.same_numbers import assert_same_numbers
from torch import nn

from anemoi_gt.integrations import anemoi as integration

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("few_programs")]
LAYER = LINEAR_LAYER
CHUNKS = 2  # of each mapper of the small model
OPTIONS = small.make_options(layers=1, layer_chunks=1)
autocast = partial(torch.autocast, "cpu", torch.bfloat16)
in_triton = partial(integration.install, backend="triton", activation_checkpointing="none")


@pytest.fixture(scope="session")
def graph(small_graph):
    return small_graph


@pytest.fixture
def model(graph):
    """A model whose layers run once for each chunk of a mapper, unless they are recomputed."""
    return small.build(graph, OPTIONS)


def extractor_of(model):
    """Return path and module of the output layer."""
    (found,) = ((path, m) for path, m in layers_of(model).items() if path.endswith("extractor"))
    return found


def calls_of(operators):
    """Return the number of fused layers, each called once for a chunk."""
    number, rest = divmod(operators.names.count(LAYER), CHUNKS)
    assert rest == 0
    return number


def layers_of(model):
    """Return the layers of mappers that are calls of modules, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in ("emb_nodes_src", "emb_nodes_dst", "node_data_extractor")
        and not isinstance(module, nn.Identity)
    }


def test_a_model_in_float32_has_the_numbers_of_anemoi_by_fused_layers(model, graph):
    expected = small.differentiate(model, small.draw(graph, batch=2))
    with in_triton(fusion="sublayers"), Operators() as operators:
        actual = small.differentiate(model, small.draw(graph, batch=2))
    assert calls_of(operators) == len(layers_of(model)) > 2
    assert_same_numbers(actual, expected)


def test_under_autocast_layers_are_fused_and_return_its_dtype(model, graph):
    x = small.draw(graph)
    mapper = next(m for m in model.modules() if hasattr(m, "node_data_extractor"))
    rows = torch.randn(5, mapper.hidden_dim)
    with autocast():
        expected = small.differentiate(model, x)
        theirs = mapper.post_process(rows)
    with in_triton(activation_checkpointing="full"), autocast():
        with Operators() as operators:
            actual = small.differentiate(model, x)
        ours = mapper.post_process(rows)
        computed = integration.installed().computed
    assert calls_of(operators) == 2 * len(layers_of(model))
    assert {block.outcome for block in computed} == {"fused"}
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()
    assert (actual[0] - expected[0]).abs().max() <= 0.05 * expected[0].abs().max()
    for name, gradient in expected[1].items():
        assert actual[1][name].dtype == gradient.dtype, name


@pytest.mark.parametrize("settings", [{"fusion": "attention"}, {}], ids=str)
def test_layers_are_modules_where_sublayers_are_not_fused(model, graph, settings):
    with in_triton(**settings), Operators() as operators:
        small.differentiate(model, small.draw(graph))
        computed = integration.installed().computed
    assert LAYER not in operators.names
    assert not [block for block in computed if block.path in layers_of(model)]


CHANGES = {
    "a hook": lambda layer: layer[0].register_forward_hook(lambda *_: None),
    "another class": lambda layer: layer.__setitem__(1, own_like(layer[1])),
    "three modules": lambda layer: layer.append(nn.Identity()),
    "a forward set on it": lambda layer: setattr(layer, "forward", layer.forward),
}
REASONS = {
    "a hook": "its node_data_extractor.0 has hooks, which would be skipped",
    "another class": "its node_data_extractor.1 is a support.anemoi_model.OwnLinear",
    "three modules": "its node_data_extractor has 3 layers, and a norm and a linear map are needed",
    "a forward set on it": "its node_data_extractor has a forward set on it",
}


def own_like(linear):
    own = OwnLinear(linear.in_features, linear.out_features)
    own.load_state_dict(linear.state_dict())
    return own


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_is_not_plain_is_called_and_named(model, graph, change, said):
    path, layer = extractor_of(model)
    CHANGES[change](layer)
    x = small.draw(graph)
    with torch.no_grad():  # what is not ours differentiates itself
        expected = model(x)
    with in_triton(fusion="sublayers"):
        with torch.no_grad(), Operators() as operators:
            assert_same_numbers(model(x), expected)
        (refused,) = (block for block in integration.installed().computed if block.path == path)
    assert calls_of(operators) == len(layers_of(model)) - 1
    assert refused.outcome == "upstream"
    assert refused.reason.startswith(REASONS[change])
    assert any(REASONS[change] in message for message in said())


def test_a_layer_is_no_longer_named_when_its_hook_has_gone(model, graph):
    path, layer = extractor_of(model)
    handle = layer.register_forward_hook(lambda *_: None)
    with in_triton(fusion="sublayers"), torch.no_grad():
        model(small.draw(graph))
        assert path in [block.path for block in integration.installed().computed]
        handle.remove()
        model(small.draw(graph))
        assert path not in [block.path for block in integration.installed().computed]


def test_rows_of_another_width_raise_as_upstream(model):
    mapper = next(m for m in model.modules() if hasattr(m, "node_data_extractor"))
    with in_triton(fusion="sublayers"), pytest.raises(RuntimeError, match="normalized_shape"):
        mapper.post_process(torch.randn(5, mapper.hidden_dim + 1))


def test_the_layers_of_a_swapped_model_are_fused_and_of_others_are_not(model, graph):
    other = small.build(graph, OPTIONS)
    integration.swap_layers(model, backend="triton", fusion="sublayers")
    for one, count in ((model, len(layers_of(model))), (other, 0)):
        with Operators() as operators, torch.no_grad():
            one(small.draw(graph))
        assert calls_of(operators) == count
