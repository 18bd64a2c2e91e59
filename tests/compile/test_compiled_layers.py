"""Every layer compiles into one graph, in training and inference, and computes what it computes without."""

import pytest
import torch
from support.compiled import (
    LAYERS,
    SIZES,
    assert_compiled_is_eager,
    counting,
    differentiate,
    make_layer,
    sample_for,
)
from support.weather import IN, NODES, OUT, SAMPLES, weather_graph
from torch.utils.checkpoint import checkpoint

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder


def compile_layer(layer, **options):
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_in_one_graph(name):
    layer, sample, call = make_layer(name), sample_for(name, SIZES[0]), LAYERS[name][1]
    compiled = compile_layer(layer)
    assert_compiled_is_eager(
        layer,
        lambda leaves: call(compiled, sample.graph, leaves),
        lambda leaves: call(layer, sample.graph, leaves),
        sample.tensors,
    )


def test_a_layer_trains_in_one_graph_with_kernels(kernel_device):
    layer = make_layer("processor_block", "triton", kernel_device)
    sample, call = sample_for("processor_block", (4, 4, 9, 1), kernel_device), LAYERS["processor_block"][1]
    compiled = compile_layer(layer)
    assert_compiled_is_eager(
        layer,
        lambda leaves: call(compiled, sample.graph, leaves),
        lambda leaves: call(layer, sample.graph, leaves),
        sample.tensors,
    )


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_infers_in_one_graph(name):
    layer, sample, call = make_layer(name).eval(), sample_for(name, SIZES[0]), LAYERS[name][1]
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.inference_mode():
        actual, expected = (call(f, sample.graph, sample.tensors) for f in (compiled, layer))
    torch.testing.assert_close(actual, expected)


def test_the_model_infers_in_one_graph():
    sizes = {"channels": 8, "heads": 2, "num_layers": 1, "config": AttentionConfig(backend="torch")}
    model = EncoderProcessorDecoder(weather_graph(), IN, OUT, residual={0: 1}, **sizes).eval()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(SAMPLES, NODES["data"], IN)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))


def test_inference_after_training_records_nothing():
    layer, sample = make_layer("conv"), sample_for("conv", SIZES[0])
    compiled, call = compile_layer(layer), LAYERS["conv"][1]
    assert call(compiled, sample.graph, sample.leaves()).requires_grad
    with torch.no_grad():
        assert not call(compiled, sample.graph, sample.leaves()).requires_grad


@torch._dynamo.config.patch(specialize_float=True)  # as docs/compile.md asks for pieces that are checkpointed
def test_the_model_in_checkpointed_pieces_compiles_for_any_number_of_samples():
    torch.manual_seed(0)
    options = {"mapper_chunks": 2, "checkpoint_groups": 1, "dropout": 0.2}
    sizes = {"channels": 8, "heads": 2, "num_layers": 1, "config": AttentionConfig(backend="torch")}
    model = EncoderProcessorDecoder(weather_graph(), IN, OUT, residual={0: 1}, **sizes, **options)
    counter, compilations = counting(), []
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for samples in (SAMPLES, 7):
        fields = {"x": torch.randn(samples, NODES["data"], IN)}
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_compiled_is_eager(model, lambda t: compiled(t["x"]), lambda t: model(t["x"]), fields)
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[1]


@pytest.mark.parametrize("where", ["around", "inside"])
def test_checkpointing_and_compilation_go_together_with_dropout(where):
    layer, sample = make_layer("processor_block"), sample_for("processor_block", SIZES[0])

    def recompute(function, leaves):
        return checkpoint(function, leaves["dst"], sample.graph, leaves["attr"], use_reentrant=False)

    compiled = compile_layer(layer if where == "around" else lambda leaves: recompute(layer, leaves))
    assert_compiled_is_eager(
        layer,
        (lambda leaves: recompute(compiled, leaves)) if where == "around" else compiled,
        lambda leaves: layer(leaves["dst"], sample.graph, leaves["attr"]),
        sample.tensors,
    )


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_gives_the_bits_of_eager(where):
    layer, sample = make_layer("processor_block"), sample_for("processor_block", SIZES[0])

    def call(function, leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return function(leaves["dst"], sample.graph, leaves["attr"])

    compiled = compile_layer(layer if where == "around" else lambda leaves: call(layer, leaves))
    around = (lambda leaves: call(compiled, leaves)) if where == "around" else compiled
    actual = differentiate(layer, around, sample.leaves())
    expected = differentiate(layer, lambda leaves: call(layer, leaves), sample.leaves())
    there = [name for name, tensor in expected.items() if tensor is not None]
    assert [name for name in there if not torch.equal(actual[name], expected[name])] == []


CONFIGS = [AttentionConfig(), AttentionConfig(precision="bf16"), AttentionConfig("torch", "fp16")]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.backend}-{config.precision}")
def test_every_config_compiles(config):
    layer, sample, call = make_layer("conv"), sample_for("conv", SIZES[0]), LAYERS["conv"][1]
    layer.config = config
    compiled = compile_layer(layer)
    assert_compiled_is_eager(
        layer,
        lambda leaves: call(compiled, sample.graph, leaves),
        lambda leaves: call(layer, sample.graph, leaves),
        sample.tensors,
    )


def test_a_backend_that_cannot_run_says_why_while_compiling():
    layer, sample = make_layer("conv", "triton").double(), sample_for("conv", SIZES[0])
    doubles = {name: tensor.double() for name, tensor in sample.tensors.items()}
    with pytest.raises(Exception, match="its kernels take float16, bfloat16 or float32, got torch.float64"):
        LAYERS["conv"][1](compile_layer(layer), sample.graph, doubles)


def test_a_second_derivative_raises():
    layer, sample, call = make_layer("conv"), sample_for("conv", SIZES[0]), LAYERS["conv"][1]
    leaves = sample.leaves()
    out = call(compile_layer(layer), sample.graph, leaves)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaves["attr"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()
