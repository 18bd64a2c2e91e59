"""The implementation of a block is chosen once per forward pass, kept for recomputation, and reported."""

import logging

import pytest
import torch
from anemoi.models.interface import AnemoiModelInterface
from support.anemoi_model import (
    block_inputs,
    build,
    differentiate_block,
    draw,
    make_block,
    make_ensemble_options,
    make_options,
)
from support.same_numbers import assert_same_numbers
from support.weather import weather_graph
from torch import nn

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import report

inputs = pytest.fixture(block_inputs)
graph = pytest.fixture(weather_graph, scope="module")  # 30 data points, 11 hidden nodes


def remove_at_first_call(module):
    """Let a hook watch one call of a module, as Lightning's ModelSummary does."""
    hook = module.register_forward_hook(lambda *_: hook.remove())


@pytest.mark.parametrize("edge_dim", (5, 16), ids=("D", "D = H C"))
@pytest.mark.parametrize("part", ("lin_edge", "conv", "lin_query"))
def test_a_hook_that_removes_itself_changes_nothing(part, edge_dim):
    block, (x, _, *rest) = make_block(edge_dim=edge_dim), block_inputs()
    edge_attr = torch.randn(rest[0].shape[1], edge_dim, requires_grad=True)
    expected = differentiate_block(block, (x, edge_attr, *rest))
    remove_at_first_call(block.get_submodule(part))
    with integration.install():
        for _ in range(2):  # with the hook, and without
            assert_same_numbers(differentiate_block(block, (x, edge_attr, *rest)), expected)
    assert not block.get_submodule(part)._forward_hooks


@pytest.mark.parametrize(
    "everywhere", (False, True), ids=("hooks of each module", "hooks of all modules")
)
def test_a_diagnostic_that_watches_does_not_end_a_run_with_a_named_backend(graph, everywhere):
    model, x, seen = build(graph, make_options(channels=16, heads=2)), draw(graph), []

    def watch(module, *_):
        seen.append(type(module).__name__)

    with integration.install(backend="torch"):
        expected = model(x)["data"]
        if everywhere:
            hooks = [nn.modules.module.register_module_forward_hook(watch)]
        else:
            hooks = [module.register_forward_hook(watch) for module in model.modules()]
        try:
            assert_same_numbers(model(x)["data"], expected)
        finally:
            for hook in hooks:
                hook.remove()
        # two layers, two chunks of encoder and decoder
        assert seen.count("GraphTransformerConv") == 6
        assert {block.outcome for block in integration.installed().computed} == {"upstream"}
        model(x)
        assert {block.outcome for block in integration.installed().computed} == {"attention only"}


def reports(caplog):
    """Return what was logged of models; `install` logs a line of the same beginning."""
    of_report = [record for record in caplog.records if record.name == report.__name__]
    return [record.message for record in of_report if "computes blocks of" in record.message]


def test_block_paths_are_listed_by_module_path_and_reason(graph, caplog):
    model, x = build(graph, make_options(channels=16, heads=2)), draw(graph)
    model.processor.proc[1].conv.register_forward_hook(lambda *_: None)
    with integration.install(), caplog.at_level(logging.INFO, logger="anemoi_gt"):
        assert repr(integration.installed()).endswith("; no block has computed yet)")
        for _ in range(2):
            model(x)
        blocks = {block.path: block for block in integration.installed().computed}
        description = repr(integration.installed())
    (line,) = reports(caplog)
    assert line.startswith("anemoi_gt computes blocks of AnemoiModelEncProcDec: ")
    assert len(blocks) == 4
    assert blocks["processor.proc.1"].outcome == "upstream"
    assert blocks["processor.proc.1"].reason == "its conv has hooks, which would be skipped"
    assert blocks["processor.proc.0"].outcome == "attention only"
    assert blocks["encoder.encoder.proc"].outcome == "attention only"
    for text in (line, description):
        assert "1 upstream (processor.proc.1: its conv has hooks, which would be skipped)" in text
        assert "GraphTransformerMapperBlock: 2 attention only (" in text


@pytest.mark.interpreted
def test_a_second_model_is_logged_with_its_own_blocks(small_graph, caplog, few_programs):
    x = draw(small_graph, ensemble=2)
    options = make_ensemble_options(channels=16, heads=2)
    models = [build(small_graph, options, seed=seed) for seed in (0, 1)]
    with (
        integration.install(backend="triton", fusion="sublayers"),
        caplog.at_level(logging.INFO, logger="anemoi_gt"),
    ):
        for model in models:
            model(x, fcstep=1)
    lines = reports(caplog)
    assert len(lines) == 2
    assert lines[0] == lines[1]
    for kind in ("Processor", "Mapper"):
        assert f"GraphTransformer{kind}Block: 2 fused" in lines[0]


@pytest.mark.compiled
def test_blocks_of_compiled_code_are_counted_by_what_was_traced(graph):
    model, x = build(graph, make_options(channels=16, heads=2)), draw(graph)
    for block in model.processor.proc:
        block.compile(backend="eager")
    with integration.install():
        model(x)
        outcomes = {block.path: block.outcome for block in integration.installed().computed}
    assert outcomes["processor.proc.0"] == outcomes["processor.proc.1"] == "attention only"


class Built(AnemoiModelInterface):
    """Anemoi's interface around a model that is built as the tests build it."""

    def __init__(self, make):
        nn.Module.__init__(self)
        self.make = make
        self._build_model()
        self._update_metadata()


@pytest.fixture
def interface(monkeypatch):
    """Make an interface of a function that makes a model; upstream's own reads a whole config."""
    monkeypatch.setattr(
        AnemoiModelInterface, "_build_model", lambda self: setattr(self, "model", self.make())
    )
    monkeypatch.setattr(AnemoiModelInterface, "_update_metadata", lambda self: None)
    return Built


def test_a_model_without_graph_transformers_is_named_when_it_is_built(interface, said):
    def make():
        integration.install()  # as in Anemoi's configs, while the model is built
        return nn.Linear(2, 2)

    interface(make)
    (message,) = said()
    assert message == "Linear has no block that anemoi_gt computes: it is not used"


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_torchscript_trace_records_anemois_code_which_is_logged(graph, said):
    model = build(graph, make_options(channels=16, heads=2, checkpointing=False)).eval()
    x = draw(graph)["data"]

    class OfTensors(nn.Module):
        """A model of one data set, which traces take and return tensors of."""

        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model({"data": x})["data"]

    expected = OfTensors()(x)
    with integration.install(backend="torch"):
        OfTensors()(x)
        traced = torch.jit.trace(OfTensors(), (x,), check_trace=False)
    torch.testing.assert_close(traced(x), expected)
    assert [message for message in said() if "torch.jit.trace records it" in message]


def test_a_block_outside_of_a_model_is_listed_by_its_class(inputs):
    with integration.install():
        module = make_block()
        module(*inputs)
        (block,) = integration.installed().computed
    assert (block.path, block.kind, block.outcome) == (
        "",
        "GraphTransformerProcessorBlock",
        "attention only",
    )
