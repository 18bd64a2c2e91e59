"""Whole blocks by one operator under `install(blocks=True)`: numbers, compiled code, and what is refused."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from anemoi.models.layers.block import GraphTransformerMapperBlock, GraphTransformerProcessorBlock
from anemoi.models.layers.mlp import MLP
from support import anemoi_model as small
from support.anemoi_model import OwnLinear, block_inputs, differentiate_block, for_gpu, make_block
from support.same_numbers import assert_same_numbers
from support.weather import KINDS as KINDS_OF_EDGES
from support.weather import weather_graph
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import blocks

pytestmark = pytest.mark.usefixtures("few_programs")
KINDS = {"processor": GraphTransformerProcessorBlock, "mapper": GraphTransformerMapperBlock}
SERVED = ({}, {"edge_pre_mlp": True}, {"attn_channels": 8}, {"shard_strategy": "heads"}, {"bias": False})
OPERATOR = "anemoi_gt.attention_sublayer_triton.default"
BLOCKS = partial(integration.install, backend="triton", blocks=True)


@pytest.fixture(scope="session")
def graph():
    """13 data points, 7 hidden nodes: the interpreter runs them one by one."""
    return weather_graph({"data": 13, "hidden": 7}, dict.fromkeys(KINDS_OF_EDGES, 24))


def block_of(kind, backend="pyg", **options):
    """A block, as a GPU machine would have it with the backend `triton`."""
    block = make_block(KINDS[kind], **options)
    return for_gpu(block) if backend == "triton" else block


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "options"), (("pyg", {}), *(("triton", each) for each in SERVED)), ids=str)
def test_a_compiled_block_is_one_operator_with_the_same_numbers(kind, backend, options, traced):
    compiler, graphs = traced
    inputs = block_inputs(KINDS[kind])
    expected = differentiate_block(make_block(KINDS[kind], **options), inputs)
    block = block_of(kind, backend, **options)
    names = list(block.state_dict())
    with BLOCKS():
        assert_same_numbers(differentiate_block(block, inputs), expected)
        compiled = torch.compile(block, fullgraph=True, backend=compiler)
        assert_same_numbers(differentiate_block(block, inputs, compiled), expected)
    (graph,) = graphs
    assert len(graph[OPERATOR]) == 1
    assert not [name for name in graph if "edge_attention" in name or ("linear" in name and not options)]
    assert list(block.state_dict()) == names


def widened(inputs, dtype):
    """Inputs with floating-point tensors in another dtype, as leaves."""
    if isinstance(inputs, tuple):
        return tuple(widened(each, dtype) for each in inputs)
    is_real = isinstance(inputs, torch.Tensor) and inputs.is_floating_point()
    return inputs.detach().to(dtype).requires_grad_() if is_real else inputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nodes", "compiler"), ((torch.bfloat16, None), (torch.float16, "aot_eager")), ids=str)
def test_errors_are_at_most_three_times_those_of_anemois_block(kind, nodes, compiler):
    """Against float64, for 16-bit nodes, as Anemoi's embeddings are under autocast."""
    inputs = block_inputs(KINDS[kind])
    exact = differentiate_block(block_of(kind).double(), widened(inputs, torch.float64))
    block, (x, *rest) = block_of(kind), inputs
    given = (widened(x, nodes), *rest)
    results = []
    for install in (nullcontext, BLOCKS):
        with install(), torch.autocast("cpu", nodes):
            forward = torch.compile(block, fullgraph=True, backend=compiler) if compiler else block
            results.append(differentiate_block(block, given, forward))
    anemoi, ours = results
    for name, expected in exact.items():
        error, theirs = (((found[name] - expected).square().mean().sqrt()).item() for found in (ours, anemoi))
        allowed = 3 * theirs + 4 * torch.finfo(nodes).eps * expected.square().mean().sqrt().item()
        assert error <= allowed, f"{name}: RMS error {error:.1e}, Anemoi's {theirs:.1e}"


def test_a_model_gives_what_anemoi_gives(graph, monkeypatch):
    model, x = small.build(graph, small.make_options(checkpointing=False, mapper_chunks=3)), small.draw(graph, batch=2)
    expected = small.differentiate(model, x)
    batches, run = [], blocks.attention_sublayer

    def spy(tensors, graph, options):
        batches.append(options.batch)
        return run(tensors, graph, options)

    monkeypatch.setattr(blocks, "attention_sublayer", spy)
    with BLOCKS():
        assert_same_numbers(small.differentiate(model, x), expected)
    assert 2 in batches  # chunks of mappers hold a batch as one graph
    assert len(batches) >= 4


@pytest.mark.parametrize(("kind", "options"), (("mapper", {"update_src_nodes": True}), ("processor", {})), ids=str)
def test_sources_that_are_updated_and_a_block_without_gradients_are_anemois(kind, options):
    block, inputs = block_of(kind, **options), block_inputs(KINDS[kind])
    expected = block(*inputs)[0]
    with BLOCKS():
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert_same_numbers(block(*inputs)[0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_around_or_inside_compiled_code_gives_the_same_gradients(kind, traced):
    compiler, graphs = traced
    inputs, block = block_inputs(KINDS[kind]), block_of(kind)
    expected = differentiate_block(block, inputs)
    again = partial(checkpoint, block, use_reentrant=False)
    with BLOCKS():
        for forward in (again, torch.compile(again, fullgraph=True, backend=compiler)):
            assert_same_numbers(differentiate_block(block, inputs, forward), expected)
    assert sum(len(graph.get(OPERATOR, ())) for graph in graphs) == 1


def with_part(name, make):
    """Return what replaces a part of a block by `make` of it."""
    return lambda block: block.set_submodule(name, make(block.get_submodule(name)))


class OwnMLP(MLP):
    """A feed-forward network of somebody's own."""

    def forward(self, x):
        return 2 * super().forward(x)


class OwnUpdate(GraphTransformerProcessorBlock):
    """A block that updates its nodes in a way of its own."""

    def run_node_dst_mlp(self, *arguments):
        return 2 * super().run_node_dst_mlp(*arguments)


def double(owner, method):
    """Replace a method of one instance by twice what it returns."""
    upstream = getattr(owner, method)
    setattr(owner, method, lambda *arguments: 2 * upstream(*arguments))


UNSERVED = {
    "its feed-forward network is not a linear map, an exact": with_part(
        "node_dst_mlp.mlp.1", lambda _: nn.GELU("tanh")
    ),
    "its query is a support.anemoi_model.OwnLinear, and torch.nn.Linear is": lambda block: setattr(
        block.lin_query, "__class__", OwnLinear
    ),
    "its norm is a torch.nn.modules.normalization.RMSNorm": with_part("layer_norm_attention", lambda _: nn.RMSNorm(16)),
    "its mlp_norm lacks a weight or a bias": with_part("layer_norm_mlp_dst", lambda _: nn.LayerNorm(16, bias=False)),
    "its value lacks": with_part("lin_value", lambda _: nn.Linear(16, 16, bias=False)),
    "hooks watch a part of it": lambda block: block.node_dst_mlp.mlp[1].register_full_backward_hook(lambda *_: None),
    "OwnUpdate has a run_node_dst_mlp of its own": lambda block: setattr(block, "__class__", OwnUpdate),
    "its feed-forward network is not a": lambda block: setattr(block.node_dst_mlp, "__class__", OwnMLP),
    "its run_node_dst_mlp was replaced": lambda block: double(block, "run_node_dst_mlp"),
    "hooks watch a part of it that": lambda block: double(block.lin_query, "forward"),
    "its attention drops": lambda block: setattr(block.conv, "dropout", 1.0),
    "its query has weights that are a tensor subclass": lambda block: setattr(
        block.lin_query, "weight", nn.Parameter(TwoTensor(*[block.lin_query.weight.detach()] * 2))
    ),
}


@pytest.mark.parametrize(
    ("reason", "is_compiled"),
    [
        *((each, False) for each in UNSERVED),
        *((each, True) for each in UNSERVED if "network" in each or "run_" in each),
    ],
)
def test_another_block_has_its_attention_alone_computed_and_that_is_said_once(reason, is_compiled, said, traced):
    compiler, _ = traced
    block, inputs = block_of("processor"), block_inputs()
    UNSERVED[reason](block)
    forward = torch.compile(block, backend=compiler) if is_compiled else block
    with integration.install():
        expected = differentiate_block(block, inputs)
    with integration.install(blocks=True):
        for _ in range(2):
            assert_same_numbers(differentiate_block(block, inputs, forward), expected)
    (message,) = said()
    assert message.startswith(f"an Anemoi block has its attention alone computed by anemoi_gt: {reason}")
    if reason.startswith("hooks"):  # of a tool that watches, which must not end a run
        with BLOCKS():
            assert_same_numbers(differentiate_block(block, inputs, forward), expected)
        return
    refused = f"blocks=True with backend 'triton' cannot compute this Anemoi block: {reason}"
    with BLOCKS(), pytest.raises(ValueError, match=refused):
        forward(*inputs)


@pytest.mark.parametrize("is_compiled", (False, True))
def test_hooks_of_all_modules_see_the_parts_of_a_block(is_compiled, said, traced):
    block, inputs = block_of("processor"), block_inputs()
    forward = torch.compile(block, backend=traced[0]) if is_compiled else block
    double_activations = lambda module, _, out: 2 * out if isinstance(module, nn.GELU) else out  # noqa: E731
    hook = nn.modules.module.register_module_forward_hook(double_activations)
    try:
        expected = differentiate_block(block, inputs)
        with integration.install(blocks=True):
            assert_same_numbers(differentiate_block(block, inputs, forward), expected)
        with BLOCKS():
            assert_same_numbers(differentiate_block(block, inputs), expected)
    finally:
        hook.remove()
    assert "hooks watch all modules, and those of its parts would not be called" in said()[0]


def test_norms_of_queries_and_keys_compute_with_our_attention_alone(said):
    block, inputs = block_of("processor", qk_norm=True), block_inputs()
    expected = differentiate_block(block, inputs)
    with integration.install(blocks=True):
        assert_same_numbers(differentiate_block(block, inputs), expected)
    assert "its queries and keys are normed" in said()[0]


@pytest.mark.parametrize("name", ("lin_edge", "projection"))
def test_a_forward_set_on_a_linear_map_is_called(name):
    block, inputs = block_of("processor"), block_inputs()
    double(block.get_submodule(name), "forward")
    expected = differentiate_block(block, inputs)
    with integration.install(blocks=True):
        assert_same_numbers(differentiate_block(block, inputs), expected)


def test_conditional_norms_compute_with_anemois_code(graph, said):
    model = small.build(graph, small.make_ensemble_options())
    x = small.draw(graph, ensemble=2)
    expected = small.differentiate(model, x, fcstep=1)
    with integration.install(blocks=True):
        assert_same_numbers(small.differentiate(model, x, fcstep=1), expected)
    assert [message for message in said() if "its norms take a condition" in message]


@pytest.mark.parametrize(("mode", "times"), (("full", 2), ("none", 1)))
def test_only_a_full_checkpoint_computes_a_whole_block_again(mode, times, graph, monkeypatch):
    model, x = small.build(graph, small.make_options(mapper_chunks=1)), small.draw(graph)
    expected = small.differentiate(model, x)
    calls, gelu = [], node_rows.gelu
    monkeypatch.setattr(node_rows, "gelu", lambda hidden: calls.append(hidden) or gelu(hidden))
    with BLOCKS(activation_checkpointing=mode):
        assert_same_numbers(small.differentiate(model, x), expected)
    blocks = len([each for each in model.modules() if isinstance(each, tuple(KINDS.values()))])
    assert len(calls) == times * blocks


@pytest.mark.parametrize(
    ("options", "dtype", "whole"),
    (
        ({}, torch.bfloat16, True), ({}, torch.float16, True), ({}, None, False),
        ({"blocks": False}, torch.bfloat16, False),
        ({"backend": "auto"}, torch.bfloat16, False),  # which computes with the reference on a CPU
        ({"blocks": True}, None, True),
    ),
)  # fmt: skip
def test_whole_blocks_are_the_default_under_16_bit_autocast_where_triton_attends(options, dtype, whole, traced, said):
    compiler, graphs = traced
    with integration.install(**({"backend": "triton"} | options)), torch.autocast("cpu", dtype, enabled=bool(dtype)):
        torch.compile(block_of("processor"), fullgraph=True, backend=compiler)(*block_inputs())
    assert sum(len(graph.get(OPERATOR, ())) for graph in graphs) == whole
    assert not said()


def test_blocks_that_backend_torch_computes_are_named_if_they_were_asked_for(said):
    with integration.install(blocks=True):
        block_of("processor")(*block_inputs())
    assert "another backend than triton computes its attention" in said()[0]


def test_blocks_must_be_a_switch():
    with pytest.raises(ValueError, match="blocks must be True, False or None, got 'yes'"):
        integration.install(blocks="yes")
