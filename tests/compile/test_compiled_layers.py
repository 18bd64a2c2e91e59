"""Every layer compiles into one graph, in training and inference, and computes what it computes eagerly."""

import pytest
import torch
from support import compiled as support
from support.compiled import LAYERS, SIZES, assert_compiled_is_eager, call, counting, make_layer, sample_for
from support.weather import IN, NODES, OUT, SAMPLES, weather_graph
from torch.utils.checkpoint import checkpoint

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder


def compile_layer(layer, backend="aot_eager"):
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend=backend)


def make_model(**options):
    sizes = {"channels": 8, "heads": 2, "num_layers": 1, "config": AttentionConfig(backend="torch")}
    return EncoderProcessorDecoder(weather_graph(), IN, OUT, residual={0: 1}, **sizes, **options)


def assert_trains(layer, sample):
    functions = [lambda leaves, f=f: call(f, sample.graph, leaves) for f in (compile_layer(layer), layer)]
    assert_compiled_is_eager(layer, *functions, sample.tensors)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_in_one_graph(name):
    assert_trains(make_layer(name), sample_for(name, SIZES[0]))


def test_a_layer_trains_in_one_graph_with_kernels(kernel_device):
    sample = sample_for("processor_block", (4, 4, 9, 1), kernel_device)
    assert_trains(make_layer("processor_block", "triton", kernel_device), sample)


CONFIGS = [AttentionConfig(), AttentionConfig(precision="bf16"), AttentionConfig("torch", "fp16")]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.backend}-{config.precision}")
def test_every_config_compiles(config):
    layer = make_layer("conv")
    layer.config = config
    assert_trains(layer, sample_for("conv", SIZES[0]))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_infers_in_one_graph(name):
    layer, sample = make_layer(name).eval(), sample_for(name, SIZES[0])
    compiled = compile_layer(layer, "eager")
    with torch.inference_mode():
        actual, expected = (call(f, sample.graph, sample.tensors) for f in (compiled, layer))
    torch.testing.assert_close(actual, expected)


def test_the_model_infers_in_one_graph():
    model = make_model().eval()
    compiled, x = compile_layer(model, "eager"), torch.randn(SAMPLES, NODES["data"], IN)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))


def test_inference_after_training_records_nothing():
    sample, compiled = sample_for("conv", SIZES[0]), compile_layer(make_layer("conv"))
    assert call(compiled, sample.graph, sample.leaves()).requires_grad
    with torch.no_grad():
        assert not call(compiled, sample.graph, sample.leaves()).requires_grad


@torch._dynamo.config.patch(specialize_float=True)  # as docs/compile.md asks for checkpointed chunks
def test_the_model_in_checkpointed_chunks_compiles_once_for_any_batch_size():
    torch.manual_seed(0)
    model, counter, compilations = make_model(mapper_chunks=2, checkpoint_groups=1, dropout=0.2), counting(), []
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for batch in (SAMPLES, 7):
        fields = {"x": torch.randn(batch, NODES["data"], IN)}
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_compiled_is_eager(model, lambda t: compiled(t["x"]), lambda t: model(t["x"]), fields)
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[1]


def compiled_with(layer, wrap, where):
    """Return `wrap` around the compiled layer, or compiled with the layer inside."""
    if where == "inside":
        return compile_layer(lambda leaves: wrap(layer, leaves))
    compiled = compile_layer(layer)
    return lambda leaves: wrap(compiled, leaves)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_checkpointing_and_compilation_work_together_with_dropout(where):
    layer, sample = make_layer("processor_block"), sample_for("processor_block", SIZES[0])

    def checkpointed(function, leaves):
        return checkpoint(function, leaves["dst"], sample.graph, leaves["attr"], use_reentrant=False)

    compiled = compiled_with(layer, checkpointed, where)
    assert_compiled_is_eager(layer, compiled, lambda leaves: call(layer, sample.graph, leaves), sample.tensors)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_gives_the_bits_of_eager(where):
    layer, sample = make_layer("processor_block"), sample_for("processor_block", SIZES[0])

    def cast(function, leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return call(function, sample.graph, leaves)

    actual = support.differentiate_seeded(layer, compiled_with(layer, cast, where), sample.tensors)
    expected = support.differentiate_seeded(layer, lambda leaves: cast(layer, leaves), sample.tensors)
    present = [name for name, tensor in expected.items() if tensor is not None]
    assert [name for name in present if not torch.equal(actual[name], expected[name])] == []


def test_a_backend_that_cannot_run_says_why_while_compiling():
    layer, sample = make_layer("conv", "triton").double(), sample_for("conv", SIZES[0])
    doubles = {name: tensor.double() for name, tensor in sample.tensors.items()}
    with pytest.raises(Exception, match="its kernels take float16, bfloat16 or float32, got torch.float64"):
        call(compile_layer(layer), sample.graph, doubles)


def test_double_backward_raises():
    sample = sample_for("conv", SIZES[0])
    leaves = sample.leaves()
    out = call(compile_layer(make_layer("conv")), sample.graph, leaves)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaves["attr"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()
