"""Activation checkpointing under `install`: the same numbers in all modes, what is computed twice, what is refused."""

from collections import Counter
from functools import partial

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from hydra.utils import instantiate
from support.anemoi_model import build, differentiate, draw, for_gpu, make_options
from support.backward_graph import whole_blocks_of_backward
from support.operators import Operators
from support.same_numbers import assert_same_numbers
from support.weather import weather_graph
from torch._dynamo.backends.common import aot_autograd

from anemoi_gt.integrations import anemoi

BLOCKS = ("GraphTransformerProcessorBlock", "GraphTransformerMapperBlock")
WHOLE = ("GraphTransformerProcessor", "GraphTransformerForwardMapper", "GraphTransformerBackwardMapper")
ATTENTION, PRODUCT, ACTIVATION = "anemoi_gt.edge_attention_torch.default", "aten.addmm.default", "aten.gelu.default"
MODES = ("none", "selective", "full")


graph = pytest.fixture(weather_graph, scope="module")  # 30 data points, 11 hidden nodes


def make_model(graph, conv="pyg", **options):
    """A model of two layers; with `triton` its blocks have what they have on a GPU."""
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


@pytest.fixture
def expected(graph):
    """Output and gradients without checkpointing, eager, and how often an operator runs."""
    with anemoi.install(), Operators() as calls:
        numbers = differentiate(make_model(graph, checkpointing=False), draw(graph))
    return numbers, counted(calls)


def flat(numbers):
    output, gradients = numbers
    return {"output": output} | gradients


@pytest.mark.parametrize("conv", ["pyg", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_have_the_same_bits_and_run_the_attention_once_unless_full(graph, expected, mode, conv):
    numbers, counts = expected
    with anemoi.install(activation_checkpointing=mode), Operators() as calls:
        found = differentiate(make_model(graph, conv), draw(graph))
    for name, value in flat(numbers).items():
        assert torch.equal(flat(found)[name], value), name
    again = {name: counted(calls)[name] / counts[name] for name in (ATTENTION, ACTIVATION)}
    assert again == {ATTENTION: 2 if mode == "full" else 1, ACTIVATION: 1 if mode == "none" else 2}
    assert (counted(calls)[PRODUCT] > counts[PRODUCT]) == (mode == "full")


@pytest.mark.parametrize("mode", [None, "selective", "full"])
def test_hooks_on_saved_tensors_may_copy_what_is_saved(graph, expected, mode):
    """As `save_on_cpu` does, and offloading of activations."""
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)
    with anemoi.install(activation_checkpointing=mode), copies:
        found = differentiate(make_model(graph), draw(graph))
    assert_same_numbers(flat(found), flat(expected[0]))


@pytest.mark.parametrize("cached", [True, False])
def test_a_selective_checkpoint_under_autocast_casts_weights_anew_in_every_chunk(graph, cached):
    found = []
    for mode, cache in (("none", False), ("selective", cached)):
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)
        with anemoi.install(activation_checkpointing=mode), autocast:
            found.append(flat(differentiate(make_model(graph), draw(graph))))
            assert torch.is_autocast_cache_enabled() == cache
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("switches", [(), ("processor",), ("encoder", "decoder"), ("processor", "encoder", "decoder")])
@pytest.mark.parametrize("modes", [None, {"processor": "none", "decoder": None}], ids=str)
def test_components_without_a_mode_follow_their_switch(graph, expected, switches, modes):
    options = make_options(channels=16, heads=2)
    mappers = {name: options[f"{name}s"][name]["mapper"] for name in ("encoder", "decoder")}
    for name, component in {"processor": options["processor"], **mappers}.items():
        component["gradient_checkpointing"] = name in switches
    with anemoi.install(activation_checkpointing=modes), Operators() as calls:
        differentiate(build(graph, options), draw(graph))
    twice = [name for name in switches if modes is None or modes.get(name) is None]
    assert expected[1][ATTENTION] == 2 * 3  # two layers of the processor, two chunks of encoder and decoder
    assert counted(calls)[ATTENTION] == 2 * (3 + len(twice))


@pytest.mark.parametrize("conv", ["pyg", "triton"])
def test_compiled_whole_selective_checkpoints_keep_the_attention_and_products(graph, expected, conv):
    torch.compiler.reset()
    (numbers, eager), forward, backward = expected, Counter(), Counter()

    def count(operators, module, inputs):
        operators.update(str(node.target) for node in module.graph.nodes)
        return module.forward

    compilers = {"fw_compiler": partial(count, forward), "bw_compiler": partial(count, backward)}
    backend = aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)
    with anemoi.install(activation_checkpointing="selective"):
        model = compiled(make_model(graph, conv), WHOLE, backend=backend)
        assert_same_numbers(flat(differentiate(model, draw(graph))), flat(numbers))
    attention = forward[ATTENTION]
    assert attention == eager[ATTENTION]
    assert backward[ATTENTION] == 0 and backward["anemoi_gt.edge_attention_torch_backward.default"] == attention
    assert backward[PRODUCT] == 0 and backward[ACTIVATION] == attention
    assert forward["anemoi_gt.chunk_result.default"] == 3  # nodes and edges between the processor's two, last nodes


def test_compiled_whole_blocks_are_recomputed_one_chunk_at_a_time(graph):
    model, block = make_model(graph, layers=4, layer_chunks=2), "anemoi_gt.transformer_block"
    with anemoi.install(backend="triton", blocks=True):
        found = whole_blocks_of_backward(lambda backend: compiled(model, WHOLE[:1], backend=backend)(draw(graph)))
    assert found == 2 * (2 * [block] + 2 * [f"{block}_backward"])


def test_inductor_keeps_them_too(graph):
    sizes = {"layers": 1, "layer_chunks": 1}  # Inductor takes seconds for each layer
    with anemoi.install(activation_checkpointing="selective"):
        eager, model = make_model(graph, **sizes), compiled(make_model(graph, **sizes), WHOLE[:1])
        assert_same_numbers(*(flat(differentiate(each, draw(graph))) for each in (model, eager)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_in_a_selective_checkpoint_are_refused(graph, backend):
    with anemoi.install(activation_checkpointing={"processor": "selective"}):
        model = compiled(make_model(graph), BLOCKS[:1], backend=backend)
        with pytest.raises(ValueError, match="must not be around compiled code, .* blocks compiled one by one"):
            differentiate(model, draw(graph))


def test_compiled_blocks_beside_a_selective_checkpoint_are_right(graph, expected):
    with anemoi.install(activation_checkpointing={"processor": "selective", "decoder": "full"}):
        model = compiled(make_model(graph), BLOCKS[1:], backend="aot_eager")
        assert_same_numbers(flat(differentiate(model, draw(graph))), flat(expected[0]))


def test_a_config_chooses_modes(graph):
    config = {"_target_": "anemoi_gt.integrations.anemoi.install", "activation_checkpointing": {"processor": "none"}}
    with instantiate(config), Operators() as calls:
        differentiate(make_model(graph), draw(graph))
    assert counted(calls)[ATTENTION] == 2 + 2 * 4


@pytest.mark.parametrize("choice", ["some", {"mapper": "full"}, {"encoder": "attention"}, True])
def test_other_modes_and_components_are_refused(choice):
    with pytest.raises(ValueError, match="activation_checkpointing must be one of none, selective, full, or .* got"):
        anemoi.install(activation_checkpointing=choice)
