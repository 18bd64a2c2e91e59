"""Blocks of Anemoi's transformers under `install`: their feed-forward sub-layer is fused, their attention is Anemoi's."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, GraphShardInfo
from anemoi.models.layers.block import TransformerMapperBlock, TransformerProcessorBlock
from anemoi.models.layers.utils import load_layer_kernels
from support.anemoi_model import NOISE, conditional_kernels
from support.operators import Operators
from support.same_numbers import assert_same_numbers

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi.installation import examine

pytestmark = pytest.mark.usefixtures("few_programs")
KINDS = {"processor": TransformerProcessorBlock, "mapper": TransformerMapperBlock}
NODES = 12
CHANNELS = 16
FEED_FORWARD = "anemoi_gt.network_triton.default"
FUSED = partial(integration.install, backend="triton", fusion="sublayers")


def block_of(kind, **options):
    """Return a block with 2 heads of 8 channels."""
    torch.manual_seed(0)
    sizes = {"num_channels": CHANNELS, "hidden_dim": 32, "num_heads": 2, "window_size": None}
    defaults = {
        "layer_kernels": load_layer_kernels(),
        "attention_implementation": "scaled_dot_product_attention",
    }
    return KINDS[kind](**(sizes | defaults | options))


def inputs_of(kind, *, conditioned=False):
    """Return the arguments of a block, its conditions as keyword arguments, and the inputs with gradients."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(NODES, CHANNELS, generator=generator, requires_grad=True) for _ in "ab")
    conditions = tuple(
        torch.randn(NODES, NOISE, generator=generator, requires_grad=True) for _ in "ab"
    )
    if kind == "processor":
        if conditioned:
            return (x, GraphShardInfo(), 1), {"cond": conditions[0]}, (x, conditions[0])
        return (x, GraphShardInfo(), 1), {}, (x,)
    if conditioned:
        return ((x, y), BipartiteGraphShardInfo(), 1), {"cond": conditions}, (x, y, *conditions)
    return ((x, y), BipartiteGraphShardInfo(), 1), {}, (x, y)


def differentiate(block, kind, *, conditioned=False, call=None):
    """Return output and gradients of inputs and parameters by name."""
    arguments, keywords, inputs = inputs_of(kind, conditioned=conditioned)
    if call is None:
        call = block
    result = call(*arguments, **keywords)
    out = result[0] if kind == "processor" else torch.cat(result[0])
    parameters = dict(block.named_parameters())
    tensors = (*inputs, *parameters.values())
    gradients = torch.autograd.grad(out.float().sin().sum(), tensors, allow_unused=True)
    names = [*(f"input {i}" for i in range(len(inputs))), *parameters]
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("conditioned", (False, True), ids=("plain", "conditional"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_feed_forward_sublayer_is_fused_with_the_same_numbers(kind, dtype, conditioned):
    options = {"layer_kernels": conditional_kernels()} if conditioned else {}
    block = block_of(kind, **options)
    autocast = nullcontext()
    if dtype is torch.bfloat16:
        autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast:
        expected = differentiate(block, kind, conditioned=conditioned)
        with FUSED(), Operators() as operators:
            actual = differentiate(block, kind, conditioned=conditioned)
    assert operators.names.count(FEED_FORWARD) == 1
    assert_same_numbers(actual, expected, dtype)


@pytest.mark.compiled
def test_a_compiled_block_holds_the_operator(traced):
    compiler, graphs = traced
    block = block_of("processor")
    expected = differentiate(block, "processor")
    with FUSED():
        compiled = torch.compile(block, fullgraph=True, backend=compiler)
        assert_same_numbers(differentiate(block, "processor", call=compiled), expected)
    (graph,) = graphs
    assert len(graph[FEED_FORWARD]) == 1


def test_a_hook_on_the_network_leaves_the_block_to_anemoi_with_the_reason():
    block = block_of("processor")
    calls = []
    hook = block.mlp.register_forward_hook(lambda *_: calls.append(1))
    with FUSED():
        differentiate(block, "processor")
        (computed,) = integration.installed().computed
        assert calls == [1]
        assert computed.outcome == "upstream"
        assert computed.reason == "its mlp has hooks, which would be skipped"
        hook.remove()


def test_without_fused_sublayers_blocks_compute_with_anemois_code():
    block = block_of("processor")
    with integration.install(fusion="attention"), Operators() as operators:
        differentiate(block, "processor")
    assert FEED_FORWARD not in operators.names


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_examined_and_reported(kind):
    model = torch.nn.Sequential(block_of(kind))
    (computed,) = examine(model)
    assert (computed.path, computed.kind) == ("0", KINDS[kind].__name__)
    with FUSED():
        differentiate(model[0], kind)
        (computed,) = integration.installed().computed
        assert (computed.outcome, computed.reason) == ("feed-forward only", None)
