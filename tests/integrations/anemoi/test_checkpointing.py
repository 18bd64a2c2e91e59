"""Activation checkpointing under `install`: the same numbers in all modes, what is computed twice, what is refused."""

from collections import Counter
from functools import partial

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from hydra.utils import instantiate
from support.anemoi_model import (
    build,
    differentiate,
    draw,
    for_gpu,
    make_family_options,
    make_options,
)
from support.backward_graph import sublayers_of_backward
from support.operators import Operators
from support.same_numbers import assert_same_numbers
from support.weather import weather_graph
from torch._dynamo.backends.common import aot_autograd

from anemoi_gt.integrations import anemoi

BLOCKS = ("GraphTransformerProcessorBlock", "GraphTransformerMapperBlock")
WHOLE = ("GraphTransformerProcessor", "GraphTransformerForwardMapper")
ATTENTION = "anemoi_gt.edge_attention_torch.default"
ACTIVATION = "aten.gelu.default"


graph = pytest.fixture(weather_graph, scope="module")  # 30 data points, 11 hidden nodes


def make_model(graph, conv="pyg", **options):
    """Return a model with two layers; with `triton`, its blocks are as Anemoi builds them on a GPU."""
    model = build(graph, make_options(channels=16, heads=2, **options))
    for block in model.modules():
        if conv == "triton" and type(block).__name__ in BLOCKS:
            for_gpu(block)
    return model


def compiled(model, kinds, **options):
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.compile(dynamic=False, **options)
    return model


def counted(operators):
    return Counter(operators.names)


@pytest.fixture(scope="module")
def expected(graph):
    """Output and gradients without checkpointing, eager, and how often an operator runs."""
    with anemoi.install(), Operators() as calls:
        numbers = differentiate(make_model(graph, checkpointing=False), draw(graph))
    return numbers, counted(calls)


def flat(numbers):
    output, gradients = numbers
    return {"output": output} | gradients


@pytest.mark.parametrize(("mode", "conv"), [("none", "pyg"), ("full", "triton")])
def test_modes_have_the_same_bits_and_compute_once_unless_full(graph, expected, mode, conv):
    numbers, counts = expected
    with anemoi.install(activation_checkpointing=mode), Operators() as calls:
        actual = differentiate(make_model(graph, conv), draw(graph))
    for name, value in flat(numbers).items():
        assert torch.equal(flat(actual)[name], value), name
    again = {name: counted(calls)[name] / counts[name] for name in (ATTENTION, ACTIVATION)}
    times = {"none": 1, "full": 2}[mode]
    assert again == {ATTENTION: times, ACTIVATION: times}


@pytest.mark.parametrize("component", ["encoder", "processor", "decoder"])
def test_modes_are_of_graph_networks_too(graph, component):
    model = build(graph, make_family_options("graph network", channels=16, checkpointing=False))
    results = {}
    for mode in ("none", "full"):
        with anemoi.install(activation_checkpointing={component: mode}), Operators() as calls:
            numbers = differentiate(model, draw(graph))
        results[mode] = flat(numbers), counted(calls)[ACTIVATION]
    assert_same_numbers(results["full"][0], results["none"][0])
    assert results["full"][1] > results["none"][1]


@pytest.mark.parametrize("mode", [None, "none", "full", {"decoder": "full"}], ids=str)
def test_modes_are_logged_where_a_version_has_none(mode, monkeypatch, caplog):
    for path in ("mapper", "processor"):  # before 0.12.1
        monkeypatch.delattr(f"anemoi.models.layers.{path}.maybe_checkpoint")
    with anemoi.install(activation_checkpointing=mode):
        pass
    is_logged = "activation_checkpointing has no effect in anemoi-models" in caplog.text
    assert is_logged == (mode is not None)


@pytest.mark.parametrize("mode", [None, "full"])
def test_hooks_on_saved_tensors_may_copy_them(graph, expected, mode):
    """`save_on_cpu` and activation offloading copy them."""
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)
    with anemoi.install(activation_checkpointing=mode), copies:
        actual = differentiate(make_model(graph), draw(graph))
    assert_same_numbers(flat(actual), flat(expected[0]))


@pytest.mark.parametrize(
    ("switches", "modes"),
    [
        (("encoder", "decoder"), None),
        (("processor", "encoder", "decoder"), {"processor": "none", "decoder": None}),
    ],
    ids=str,
)
def test_components_without_a_mode_follow_their_switch(graph, expected, switches, modes):
    options = make_options(channels=16, heads=2)
    mappers = {name: options[f"{name}s"][name]["mapper"] for name in ("encoder", "decoder")}
    for name, component in {"processor": options["processor"], **mappers}.items():
        component["gradient_checkpointing"] = name in switches
    with anemoi.install(activation_checkpointing=modes), Operators() as calls:
        differentiate(build(graph, options), draw(graph))
    twice = [name for name in switches if modes is None or modes.get(name) is None]
    # two layers of the processor, two chunks of encoder and decoder
    assert expected[1][ATTENTION] == 2 * 3
    assert counted(calls)[ATTENTION] == 2 * (3 + len(twice))


@pytest.mark.compiled
def test_compiled_whole_checkpoints_recompute_the_attention_and_keep_results_of_chunks(
    graph, expected
):
    torch.compiler.reset()
    numbers, forward, backward = expected[0], Counter(), Counter()

    def count(operators, module, inputs):
        operators.update(str(node.target) for node in module.graph.nodes)
        return module.forward

    compilers = {"fw_compiler": partial(count, forward), "bw_compiler": partial(count, backward)}
    backend = aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)
    with anemoi.install(activation_checkpointing="full"):
        model = compiled(make_model(graph), WHOLE, backend=backend)
        assert_same_numbers(flat(differentiate(model, draw(graph))), flat(numbers))
    assert backward[ATTENTION] == forward[ATTENTION] == 2 + 2  # layers, chunks of the encoder
    # nodes and edges between the processor's two, last nodes
    assert forward["anemoi_gt.chunk_result.default"] == 3


@pytest.mark.compiled
def test_compiled_fused_sub_layers_are_recomputed_one_chunk_at_a_time(graph):
    model = make_model(graph)
    with anemoi.install(backend="triton", fusion="sublayers"):
        names = sublayers_of_backward(
            lambda backend: compiled(model, WHOLE[:1], backend=backend)(draw(graph))
        )
    attention, feed_forward = "attention_sublayer_triton", "network_triton"
    recomputed = [attention, feed_forward]
    backward = [f"{feed_forward}_backward", f"{attention}_backward"]
    assert names == 2 * (recomputed + backward)


def test_a_config_chooses_modes(graph):
    config = {
        "_target_": "anemoi_gt.integrations.anemoi.install",
        "activation_checkpointing": {"processor": "none"},
    }
    with instantiate(config), Operators() as calls:
        differentiate(make_model(graph), draw(graph))
    assert counted(calls)[ATTENTION] == 2 + 2 * 4


@pytest.mark.parametrize(
    "choice", ["selective", {"mapper": "full"}, {"encoder": "attention"}, True]
)
def test_other_modes_and_components_are_refused(choice):
    with pytest.raises(
        ValueError, match="activation_checkpointing must be one of none, full, or .* got"
    ):
        anemoi.install(activation_checkpointing=choice)
