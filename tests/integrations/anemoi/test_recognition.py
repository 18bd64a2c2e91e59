"""Blocks, convolutions and providers that were changed as users change them compute what Anemoi would."""

import copy
import io
import pickle
from functools import partial, wraps

import pytest
import torch
from anemoi.models.layers import block as blocks
from anemoi.models.layers import mapper, processor
from anemoi.models.layers.conv import GraphTransformerConv
from anemoi.models.layers.graph_provider import StaticGraphProvider
from support.anemoi_model import (
    block_inputs,
    build,
    differentiate,
    draw,
    for_gpu,
    make_block,
    make_options,
)
from support.anemoi_model import differentiate_block as run
from support.edits import LAYER_EDITS
from support.same_numbers import assert_same_numbers
from support.weather import weather_graph
from torch import nn

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import report
from anemoi_gt.integrations.anemoi.versions import KNOWN

BASE = blocks.GraphTransformerBaseBlock
inputs = pytest.fixture(block_inputs)
graph = pytest.fixture(weather_graph, scope="module")


def scaled(function):
    """Return a function with the result of another, times 1.5."""

    @wraps(function)
    def other(*args, **kwargs):
        return function(*args, **kwargs) * 1.5

    return other


def with_other_width(conv):
    conv.out_channels = 100


CHANGES = LAYER_EDITS | {"out_channels": with_other_width}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_attention_computes_what_anemoi_computes_and_is_named(inputs, name):
    block = make_block()
    CHANGES[name](block.conv)
    expected = run(block, inputs)
    with integration.install():
        assert_same_numbers(run(block, inputs), expected)
        (computed,) = integration.installed().computed
    assert computed.outcome == "upstream"
    assert computed.reason.startswith("its conv")


@pytest.mark.compiled
def test_compiled_code_of_a_changed_attention_has_none_of_our_operators(inputs, traced):
    compiler, graphs = traced
    block = make_block()
    CHANGES["_message_forward_hooks"](block.conv)
    # PyG itself runs no message hooks in compiled code
    expected = run(block, inputs, torch.compile(block, backend="eager"))
    torch.compiler.reset()
    with integration.install():
        assert_same_numbers(run(block, inputs, torch.compile(block, backend=compiler)), expected)
    assert graphs
    assert not [target for traced in graphs for target in traced if "anemoi_gt" in target]


CALLED = (
    *("apply_gt", "get_qkve", "_apply_qk_norm", "attention_block", "prepare_qkve_edge_sharding"),
    "run_node_dst_mlp",
)


@pytest.mark.parametrize("on_gpu", (False, True), ids=("pyg", "triton"))
@pytest.mark.parametrize("name", CALLED)
def test_a_method_that_is_patched_after_install_is_called(inputs, name, on_gpu, monkeypatch):
    block, calls, method = make_block(), [], getattr(BASE, name)
    if on_gpu:  # its attention is a function, which does not run here
        block = for_gpu(block)

    def patched(*args, **kwargs):
        calls.append(name)
        return method(*args, **kwargs)

    with integration.install():
        run(block, inputs)
        monkeypatch.setattr(BASE, name, patched)
        if on_gpu:
            monkeypatch.setattr(block, "conv", lambda query, *_: query)
        run(block, inputs)
        (computed,) = integration.installed().computed
    assert calls
    assert f"whose {name} was replaced" in computed.reason


@pytest.mark.parametrize("name", ("message", "forward", "aggregate", "update"))
def test_a_method_of_the_attention_that_is_patched_after_install_is_called(
    inputs, name, monkeypatch
):
    block = make_block()
    with integration.install():
        before = run(block, inputs)
        method = getattr(GraphTransformerConv, name)
        monkeypatch.setattr(GraphTransformerConv, name, scaled(method))
        after = run(block, inputs)
    assert not torch.equal(before["out"], after["out"])
    assert_same_numbers(after, run(block, inputs))


def test_a_method_that_was_patched_and_restored_is_stood_in_for_again(inputs, attentions):
    block = make_block()
    with integration.install():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BASE, "apply_gt", scaled(BASE.apply_gt))
            run(block, inputs)
        assert not attentions
        run(block, inputs)
    assert len(attentions) == 1


class OwnEdges(StaticGraphProvider):
    """A provider with other edges at each call."""

    calls = 0

    def _expand_edges(self, edge_index, edge_inc, batch_size):
        self.calls += 1
        src, dst = super()._expand_edges(edge_index, edge_inc, batch_size)
        return torch.stack([src.roll(self.calls), dst])


class OwnProvider(StaticGraphProvider):
    """A provider in a module without Anemoi's functions, which overrides nothing."""


def edges_of(provider, *, shard_edges=False):
    """Return what a provider hands out for a batch of one, on one rank."""
    return provider._get_edges_impl(1, shard_edges, None)


def test_edges_that_a_provider_makes_at_each_call_are_those_of_the_call(graph):
    model = build(graph, make_options(channels=16, heads=2))
    provider = model.encoder_graph_provider["data"]
    provider.__class__ = OwnEdges
    with integration.install():
        first, second = (edges_of(provider)[1] for _ in range(2))
        assert not torch.equal(first, second)
        provider._expand_edges = lambda edge_index, edge_inc, batch_size: edge_index[:, :1]
        assert edges_of(provider)[1].shape == (2, 1)


@pytest.mark.parametrize("kind", (OwnEdges, OwnProvider))
@pytest.mark.parametrize("shard_edges", (False, True))
def test_a_model_with_a_provider_of_its_own_computes_what_anemoi_computes(graph, kind, shard_edges):
    model, x = build(graph, make_options(channels=16, heads=2)), draw(graph)
    for provider in (model.encoder_graph_provider["data"], model.processor_graph_provider):
        provider.__class__ = kind
    twin = copy.deepcopy(model)
    expected = differentiate(twin, x)
    with integration.install():
        assert_same_numbers(differentiate(model, x), expected)
        edges = edges_of(provider, shard_edges=shard_edges)
    assert edges[1].shape[0] == 2


def test_cached_edges_are_handed_out_by_a_provider_that_overrides_nothing(graph):
    model = build(graph, make_options(channels=16, heads=2))
    provider = model.encoder_graph_provider["data"]
    provider.__class__ = OwnProvider
    with integration.install():
        first, second = (edges_of(provider, shard_edges=True)[1] for _ in range(2))
    assert first is second


@pytest.mark.parametrize("module", (mapper, processor))
@pytest.mark.parametrize("enabled", (False, True))
def test_anemois_checkpoint_takes_any_function(module, enabled):
    linear, x = nn.Linear(2, 2), torch.randn(3, 2, requires_grad=True)
    expected = linear(x)
    functions = {
        "function": lambda x: linear(x),
        "partial": partial(linear.forward),
        "module": linear,
        "method": linear.forward,
    }
    with integration.install():
        for name, function in functions.items():
            out = module.maybe_checkpoint(function, enabled, x)
            torch.testing.assert_close(out, expected, msg=name)
            out.sum().backward()


def test_nothing_is_checkpointed_without_gradients(graph, monkeypatch):
    model, x = build(graph, make_options(channels=16, heads=2, checkpointing=True)), draw(graph)
    began = []

    def count():
        began.append(True)
        return get_rng_state()

    get_rng_state = torch.get_rng_state  # by which a checkpoint begins
    monkeypatch.setattr(torch, "get_rng_state", count)
    with integration.install():
        trained = model(x)
        assert began
        began.clear()
        with torch.no_grad():
            forecast = model(x)
    assert not began
    assert torch.equal(forecast["data"], trained["data"])


@pytest.mark.parametrize(
    "copied",
    (
        lambda edges: pickle.loads(pickle.dumps(edges)),
        copy.deepcopy,
        copy.copy,
        lambda edges: torch.load(save(edges)),
    ),
    ids=("pickle", "deepcopy", "copy", "torch.save"),
)
def test_an_edge_list_is_copied_without_its_cache(graph, copied, attentions):
    model, x = build(graph, make_options(channels=16, heads=2)), draw(graph)
    provider = model.processor_graph_provider
    with integration.install():
        model(x)
        edge_attr, edge_index, _ = edges_of(provider)
        twin = copied(edge_index)
        assert torch.equal(twin, edge_index)
        block = model.processor.proc[0]
        rows = torch.randn(int(provider.edge_inc[0]), 16)
        arguments = (blocks.GraphShardInfo(), 1, rows.shape[0])
        expected = block(rows, edge_attr, edge_index, *arguments)[0]
        torch.testing.assert_close(block(rows, edge_attr, twin, *arguments)[0], expected)


def save(edges):
    file = io.BytesIO()
    torch.save(edges, file)
    file.seek(0)
    return file


def test_a_block_whose_forward_was_wrapped_before_install_is_reported(inputs, monkeypatch):
    kind = blocks.GraphTransformerProcessorBlock
    monkeypatch.setattr(kind, "forward", scaled_first(kind.forward))
    block = make_block()
    expected = run(block, inputs)
    with integration.install():
        report.add_model(block)
        assert_same_numbers(run(block, inputs), expected)
        (computed,) = integration.installed().computed
    assert computed.outcome == "upstream"
    assert computed.reason.startswith("its forward is not replaced: ")


def scaled_first(forward):
    """Return a forward whose rows are scaled."""

    @wraps(forward)
    def wrapped(*args, **kwargs):
        rows, *others = forward(*args, **kwargs)
        return (rows * 1.5, *others)

    return wrapped


def test_a_block_with_a_forward_of_its_own_is_reported(inputs):
    class OwnForward(blocks.GraphTransformerProcessorBlock):
        def forward(self, x, *args, **kwargs):
            return (x,)

    block = make_block(OwnForward)
    with integration.install():
        report.add_model(block)
        block(*inputs)
        (computed,) = integration.installed().computed
    assert computed.outcome == "upstream"
    assert "OwnForward" in computed.reason


def test_an_attention_for_a_gpu_with_another_body_is_left_to_anemoi(inputs, monkeypatch):
    monkeypatch.setitem(KNOWN, "graph_transformer_attention_conv", {})
    with (
        integration.install(backend="torch"),
        pytest.raises(ValueError, match="its conv is a builtins.function, and Anemoi's attention"),
    ):
        for_gpu(make_block())(*inputs)
