"""Every layer compiles into one graph, in training and inference, and computes what it computes eagerly.

Compiled code takes any sizes without recompilation, and tensors of any memory layout.
"""

from functools import partial

import pytest
import torch
from support import compiled as support
from support.compiled import (
    DIM,
    SIZES,
    assert_compiled_is_eager,
    call,
    counting,
    make_layer,
    sample_for,
)
from support.weather import IN, NODES, OUT, SAMPLES, weather_graph
from torch.utils.checkpoint import checkpoint

from anemoi_gt import EncoderProcessorDecoder, KernelConfig

pytestmark = pytest.mark.compiled


def compile_layer(layer, backend="aot_eager"):
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend=backend)


def make_model(**options):
    sizes = {"channels": 8, "heads": 2, "num_layers": 1, "config": KernelConfig(backend="torch")}
    return EncoderProcessorDecoder(weather_graph(), IN, OUT, residual={0: 1}, **sizes, **options)


def assert_trains(layer, sample):
    functions = [
        lambda leaves, f=f: call(f, sample.graph, leaves) for f in (compile_layer(layer), layer)
    ]
    assert_compiled_is_eager(layer, *functions, sample.tensors)


# Processors and mappers are parts of the model, which trains below.
ALONE = ("conv", "interaction_block", "processor_block", "mapper_block")


# a convolution: in one more precision, and on strided rows, below
@pytest.mark.parametrize("name", ALONE[1:])
def test_a_layer_trains_in_one_graph(name):
    assert_trains(make_layer(name), sample_for(name, SIZES[0]))


def test_a_layer_with_a_precision_trains_in_one_graph():
    layer = make_layer("conv")
    layer.config = KernelConfig("torch", "fp16")
    assert_trains(layer, sample_for("conv", SIZES[0]))


@pytest.mark.parametrize("name", ALONE)
def test_a_layer_infers_in_one_graph(name):
    layer, sample = make_layer(name).eval(), sample_for(name, SIZES[0])
    compiled = compile_layer(layer, "eager")
    with torch.inference_mode():
        actual, expected = (call(f, sample.graph, sample.tensors) for f in (compiled, layer))
    torch.testing.assert_close(actual, expected)


@torch._dynamo.config.patch(
    specialize_float=True
)  # as docs/compile.md asks for checkpointed chunks
def test_the_model_in_checkpointed_chunks_compiles_once_for_any_batch_size():
    torch.manual_seed(0)
    model = make_model(mapper_chunks=2, checkpoint_groups=1, qk_norm=True, dropout=0.2)
    counter = counting()
    compilations = []
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for batch in (SAMPLES, 7):
        fields = {"x": torch.randn(batch, NODES["data"], IN)}
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_compiled_is_eager(
                model, lambda t: compiled(t["x"]), lambda t: model(t["x"]), fields
            )
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
        return checkpoint(
            function, leaves["dst"], sample.graph, leaves["attr"], use_reentrant=False
        )

    compiled = compiled_with(layer, checkpointed, where)
    assert_compiled_is_eager(
        layer, compiled, lambda leaves: call(layer, sample.graph, leaves), sample.tensors
    )


def test_autocast_gives_the_bits_of_eager():
    layer, sample = make_layer("processor_block"), sample_for("processor_block", SIZES[0])

    def cast(function, leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return call(function, sample.graph, leaves)

    actual = support.differentiate_seeded(
        layer, compiled_with(layer, cast, "inside"), sample.tensors
    )
    expected = support.differentiate_seeded(
        layer, lambda leaves: cast(layer, leaves), sample.tensors
    )
    present = [name for name, tensor in expected.items() if tensor is not None]
    assert [name for name in present if not torch.equal(actual[name], expected[name])] == []


def test_a_backend_that_cannot_run_raises_the_reason_while_compiling():
    layer, sample = make_layer("conv", "triton").double(), sample_for("conv", SIZES[0])
    doubles = {name: tensor.double() for name, tensor in sample.tensors.items()}
    with pytest.raises(
        Exception, match="its kernels take float16, bfloat16 or float32, got torch.float64"
    ):
        call(compile_layer(layer), sample.graph, doubles)


def test_double_backward_raises():
    sample = sample_for("conv", SIZES[0])
    leaves = sample.leaves()
    out = call(compile_layer(make_layer("conv")), sample.graph, leaves)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaves["attr"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def mark(graph, leaves):
    for tensor in graph.state_dict().values():
        torch._dynamo.mark_dynamic(tensor, 0)
    for tensor in leaves.values():
        torch._dynamo.mark_dynamic(tensor, list(range(tensor.dim() - 1)))


def run_sizes(name, sizes, prepare=lambda graph, leaves: None, **options):
    """Compare with eager for each of `sizes`; return the number of compilations after each."""
    # By guards alone; layers above are traced with their gradients.
    layer, counter, compilations = make_layer(name), counting("eager"), []
    compiled = torch.compile(layer, fullgraph=True, backend=counter, **options)
    for size in sizes:
        sample = sample_for(name, size)

        def run(function, leaves, graph=sample.graph):
            prepare(graph, leaves)
            return call(function, graph, leaves)

        assert_compiled_is_eager(
            layer, *(partial(run, function) for function in (compiled, layer)), sample.tensors
        )
        compilations.append(counter.frame_count)
    return compilations


def test_marked_sizes_are_compiled_once():
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert run_sizes("processor_block", SIZES[:2], prepare=mark) == [1, 1]


def test_unmarked_sizes_are_compiled_twice_and_no_more_but_for_no_edges():
    num_src, num_dst, _, batch = SIZES[0]
    assert run_sizes("conv", (*SIZES, (num_src, num_dst, 0, batch))) == [1, 2, 2, 3]


def padded(rows):
    """Return the rows as the inside of a larger buffer."""
    buffer = rows.new_full([size + 3 for size in rows.shape], float("nan"))
    inner = tuple(slice(1, 1 + size) for size in rows.shape)
    buffer[inner] = rows
    return buffer[inner]


LAYOUTS = {
    "padded": padded,
    "transposed": lambda rows: rows.transpose(0, -1).contiguous().transpose(0, -1),
    "every_other_row": lambda rows: rows.repeat_interleave(2, -2)[..., ::2, :],
    "at_an_odd_address": lambda rows: torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view(
        rows.shape
    ),
    "expanded_row": lambda rows: rows[..., :1, :].expand(rows.shape),
}


MIXED = [  # layouts of src, dst and attr
    ("padded", "transposed", "every_other_row"),
    ("expanded_row", "at_an_odd_address", "transposed"),
]


@pytest.mark.parametrize("layouts", MIXED)
def test_strides_change_neither_output_nor_gradients(layouts):
    layer, sample, results = make_layer("conv"), sample_for("conv", SIZES[0]), []
    for function in (compile_layer(layer), layer):
        # leaves of that layout, so that the compiled code is called with it
        leaves = {
            name: LAYOUTS[layout](tensor).detach().requires_grad_()
            for layout, (name, tensor) in zip(layouts, sample.tensors.items(), strict=True)
        }
        out = call(function, sample.graph, leaves)
        weights = torch.linspace(-1, 2, out.numel()).view(out.shape)
        weights = LAYOUTS["transposed"](weights)  # a strided upstream gradient
        gradients = torch.autograd.grad(out, list(leaves.values()), weights)
        results.append({"out": out.detach(), **dict(zip(leaves, gradients, strict=True))})
    torch.testing.assert_close(*results)


def test_attributes_may_differ_within_the_batch():
    layer, sample = make_layer("conv"), sample_for("conv", SIZES[0])
    tensors = sample.tensors | {"attr": torch.randn(SIZES[0][3], SIZES[0][2], DIM)}
    functions = (compile_layer(layer, "eager"), layer)
    with torch.no_grad():
        torch.testing.assert_close(*(call(f, sample.graph, tensors) for f in functions))
