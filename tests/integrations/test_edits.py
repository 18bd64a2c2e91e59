"""Whoever edits a block gets the numbers of the untouched one under the same edit, or a refusal that says why."""

import copy
import warnings
from unittest import mock

import pytest
import torch
from anemoi.models.distributed.shapes import GraphShardInfo
from anemoi.models.layers.mlp import MLP
from support.anemoi_model import build, differentiate, draw, make_family_options, make_options
from support.edits import (
    CHANNELS,
    EDGES,
    EDITS,
    LAYER_EDITS,
    NODES,
    OWNERS,
    attention_block,
    call_anemoi,
    editing_the_layer,
    network_block,
    pair_of,
    results_of,
)
from support.same_numbers import assert_same_numbers
from support.weather import KINDS, weather_graph
from torch import nn
from torch.utils.checkpoint import checkpoint

from anemoi_gt import GraphStructure, GraphTransformerConv, InteractionBlock, InteractionConv
from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import report
from anemoi_gt.nn import GraphTransformerProcessor, GraphTransformerProcessorBlock

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.usefixtures("few_programs"),
    pytest.mark.filterwarnings("ignore"),
]
owners = pytest.mark.parametrize("owner", OWNERS)


# this library's own layers do not call Anemoi's code
CASES = [(o, e) for o in OWNERS for e in EDITS if not ("own" in o and "Anemoi" in e)]


def assert_right(owner, edit):
    """Assert that an edited block has the untouched numbers, or raises with a reason."""
    theirs, ours = pair_of(owner)
    try:
        expected = results_of(*theirs, edit)
    except (RuntimeError, ValueError):
        with pytest.raises((RuntimeError, ValueError)):  # where it raises, this library does, too
            results_of(*ours, edit)
        return
    try:
        actual = results_of(*ours, edit)
    except ValueError as error:
        if "cannot" not in str(error):
            raise
        return
    assert_same_numbers(actual, expected)


@pytest.mark.parametrize(("owner", "edit"), CASES)
def test_an_edited_block_has_the_untouched_numbers_or_a_named_refusal(owner, edit):
    assert_right(owner, EDITS[edit])


# attentions under these edits: test_recognition, test_pyg
LAYER_CASES = [
    (owner, name)
    for owner in OWNERS
    for name in LAYER_EDITS
    if "network" in owner and (owner, name) != ("own graph network", "hook of aggr_module")
]


@pytest.mark.parametrize(("owner", "name"), LAYER_CASES)
def test_an_edited_layer_has_the_untouched_numbers_or_a_named_refusal(owner, name):
    assert_right(owner, editing_the_layer(name))


@owners
def test_a_block_without_edits_has_the_untouched_numbers(owner):
    theirs, ours = pair_of(owner)
    with_nothing = lambda block: warnings.catch_warnings()  # noqa: E731
    assert_same_numbers(results_of(*ours, with_nothing), results_of(*theirs, with_nothing))


def inputs():
    torch.manual_seed(2)
    x, edges = torch.randn(NODES, CHANNELS).requires_grad_(), torch.randn(EDGES, CHANNELS)
    return x, edges.requires_grad_(), torch.randint(NODES, (2, EDGES))


def retained(nodes, edges):
    edges.retain_grad()
    (nodes.sin().sum() + edges.cos().sum()).backward()
    return edges.grad


def asked(nodes, edges):
    return torch.autograd.grad(nodes.sin().sum(), edges)[0]


def hooked(nodes, edges):
    seen = []
    edges.register_hook(lambda grad: seen.append(grad.clone()))
    (nodes.sin().sum() + edges.cos().sum()).backward()
    return seen[0]


@pytest.mark.parametrize("owner", [owner for owner in OWNERS if "network" in owner])
@pytest.mark.parametrize("look", (retained, asked, hooked))
def test_the_gradient_of_returned_edges_holds_the_path_through_their_sums(owner, look):
    (_, theirs), (_, ours) = pair_of(owner)
    assert_same_numbers(look(*ours(*inputs())), look(*theirs(*inputs())))


def with_a_diagnostic(block, call):
    """Compute and differentiate while a hook, in its first call only, calls a copy of the block with other weights."""
    teacher, seen = copy.deepcopy(block), []
    for parameter in teacher.parameters():
        parameter.data.mul_(3)

    def probe(module, args, kwargs, out):
        if not seen:
            seen.append(None)
            with torch.no_grad():
                teacher(*args, **kwargs)

    handle = block.register_forward_hook(probe, with_kwargs=True)
    gradients = call()
    handle.remove()
    return gradients


@pytest.mark.parametrize("family", ("graph transformer", "graph network"))
def test_a_diagnostic_of_another_block_leaves_a_recomputation_of_anemois_alone(family):
    """Answers that were kept for the recomputation were taken by position, with the parameters in them."""
    graph = weather_graph({"data": 7, "hidden": 5}, dict.fromkeys(KINDS, 13))
    sizes = {"channels": 8, "heads": 2, "trainable": 2, "layers": 2, "layer_chunks": 1}
    options = make_options(**sizes)
    if family == "graph network":
        options = make_family_options(family, **sizes)
    model, x = build(graph, options), draw(graph)
    block = model.processor.proc[0]
    expected = with_a_diagnostic(block, lambda: differentiate(model, x))
    with integration.install("triton", fusion="sublayers"):
        assert_same_numbers(with_a_diagnostic(block, lambda: differentiate(model, x)), expected)


def test_a_diagnostic_of_another_block_leaves_a_recomputation_of_an_own_processor_alone():
    sizes = {"num_layers": 3, "num_channels": CHANNELS, "num_heads": 2, "edge_dim": CHANNELS}
    x, edges, index = inputs()
    graph = GraphStructure.from_edge_index(index, NODES)

    def gradients(groups):
        torch.manual_seed(0)
        processor = GraphTransformerProcessor(**sizes, checkpoint_groups=groups)
        block = next(
            m for m in processor.modules() if isinstance(m, GraphTransformerProcessorBlock)
        )

        def call():
            out = processor(x, graph, edges).sin().sum()
            return torch.autograd.grad(out, [x, edges, *processor.parameters()])

        return list(with_a_diagnostic(block, call))

    assert_same_numbers(gradients(1), gradients(None))


@owners
def test_a_metric_in_float32_between_two_passes_leaves_a_checkpoint_under_autocast_alone(owner):
    _, (_, call) = pair_of(owner)
    x, edges, index = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(lambda x: call(x, edges, index)[0], x, use_reentrant=False)
    with torch.no_grad():
        call(x, edges, index)
    out.float().sin().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("make", (attention_block, network_block))
def test_an_edge_index_that_numpy_rewrites_is_sorted_again(make):
    block = make()
    x, edges, index = inputs()
    memory = index.numpy().copy()
    shared = torch.from_numpy(memory)
    with integration.install("triton", fusion="sublayers"):
        call_anemoi(block, x, edges, shared)
        memory[:] = memory[:, ::-1].copy()
        actual = call_anemoi(block, x, edges, shared)[0]
    assert_same_numbers(actual, call_anemoi(block, x, edges, shared)[0])


def test_a_patch_on_a_replaced_method_stays_when_the_replacement_goes():
    block, (x, edges, index) = network_block(), inputs()
    original = MLP.forward
    with integration.install():
        inner = MLP.forward
        MLP.forward = lambda self, x, **options: 1.5 * inner(self, x, **options)
        inside = call_anemoi(block, x, edges, index)
    try:
        assert_same_numbers(call_anemoi(block, x, edges, index), inside)
    finally:
        MLP.forward = original
    with mock.patch.object(MLP, "forward"):
        integration.install()
        integration.uninstall()
    integration.install()
    with mock.patch.object(MLP, "forward") as patch:
        integration.uninstall()
        assert MLP.forward is patch
    assert_same_numbers(call_anemoi(block, x, edges, index), call_anemoi(block, x, edges, index))
    integration.install()
    integration.uninstall()
    assert MLP.forward is original


@pytest.mark.parametrize("number", (NODES - 1, NODES + 1))
def test_sizes_that_do_not_fit_the_nodes_raise_as_in_anemoi(number):
    block, (x, edges, index) = network_block(), inputs()
    arguments = (x, edges, index, GraphShardInfo(), None, (number, number))
    with pytest.raises(ValueError, match="size"):
        block(*arguments)
    with integration.install("triton", fusion="sublayers"), pytest.raises(ValueError, match="size"):
        block(*arguments)


def test_a_graph_network_in_float64_runs_under_a_named_backend_that_would_fuse_nothing():
    block, (x, edges, index) = network_block().double(), inputs()
    arguments = (x.double(), edges.double(), index)
    expected = call_anemoi(block, *arguments)
    with integration.install("triton"):
        assert_same_numbers(call_anemoi(block, *arguments), expected)


NETWORKS = {
    "Sequential": lambda block: setattr(
        block.conv, "edge_mlp", nn.Sequential(nn.Linear(3 * CHANNELS, CHANNELS), nn.Tanh())
    ),
    "Linear": lambda block: setattr(block.conv, "edge_mlp", nn.Linear(3 * CHANNELS, CHANNELS)),
    "another activation": lambda block: block.conv.edge_mlp.mlp.append(nn.GELU()),
    "dropout": lambda block: block.conv.edge_mlp.mlp.append(nn.Dropout(0.0)),
    "compiled": lambda block: setattr(
        block.conv.edge_mlp, "mlp", torch.compile(block.conv.edge_mlp.mlp, backend="eager")
    ),
    "quantised": lambda block: torch.ao.quantization.quantize_dynamic(
        block, {nn.Linear}, dtype=torch.qint8, inplace=True
    ),
}


@pytest.mark.parametrize("edit", NETWORKS)
def test_any_module_may_be_the_network_of_an_edge_update(edit):
    block, (x, edges, index) = InteractionBlock(CHANNELS, CHANNELS), inputs()
    NETWORKS[edit](block)
    updated = edges + block.conv.edge_mlp(torch.cat([x[index[1]], x[index[0]], edges], -1))
    sums = torch.zeros(NODES, CHANNELS).index_add(0, index[1], updated)
    nodes = x + block.node_mlp(torch.cat([x, sums], -1))
    assert_same_numbers(block(x, index, edges), (nodes, updated))


@pytest.mark.parametrize("kind", (InteractionConv, InteractionBlock))
def test_torchscript_traces_a_layer_with_an_edge_index(kind):
    layer, (x, edges, index) = kind(CHANNELS, CHANNELS), inputs()
    traced = torch.jit.trace(layer, (x, index, edges), check_trace=False)
    assert_same_numbers(traced(2 * x, index, edges), layer(2 * x, index, edges))


@pytest.mark.parametrize("name", LAYER_EDITS)
def test_gradients_of_messages_do_not_depend_on_the_dtype_of_indices(name):
    """Those of PyG's own layer do: PyTorch differentiates sums by int32 indices wrongly on a CPU (2.13)."""
    layer, (x, edges, index) = (
        GraphTransformerConv(CHANNELS, 4, heads=2, edge_dim=CHANNELS),
        inputs(),
    )
    LAYER_EDITS[name](layer)

    def gradients(index):
        out = layer(x, index, edges)
        return torch.autograd.grad(out.sin().sum(), [x, edges, *layer.parameters()])

    assert_same_numbers(gradients(index.int()), gradients(index))


@pytest.mark.parametrize("kind", (InteractionConv, InteractionBlock))
def test_gradients_of_a_trace_do_not_depend_on_the_dtype_of_indices(kind):
    layer, (x, edges, index) = kind(CHANNELS, CHANNELS), inputs()
    index = index.int()
    traced = torch.jit.trace(layer, (x, index, edges), check_trace=False)

    def gradients(layer):
        first, second = layer(x, index, edges)
        return torch.autograd.grad(first.sin().sum() + second.cos().sum(), [x, edges])

    assert_same_numbers(gradients(traced), gradients(layer))


def test_the_report_names_a_network_that_is_not_fused_and_one_that_is():
    graph = weather_graph({"data": 7, "hidden": 5}, dict.fromkeys(KINDS, 13))
    sizes = {"channels": 8, "heads": 2, "trainable": 2}
    model, x = build(graph, make_family_options("graph network", **sizes)), draw(graph)
    model.encoder["encoder"].emb_nodes_src.mlp[1] = nn.LeakyReLU()
    with torch.no_grad(), integration.install("triton", fusion="sublayers"):
        model(x)
        computed = {block.path: block for block in integration.installed().computed}
    refused = computed["encoder.encoder.emb_nodes_src"]
    assert refused.outcome == "upstream"
    assert "LeakyReLU" in refused.reason


@pytest.mark.compiled
def test_the_report_of_compiled_blocks_of_a_class_that_differ_claims_neither_of_one():
    blocks = nn.ModuleDict({"plain": network_block(), "leaky": network_block()})
    blocks["leaky"].node_mlp.mlp[1] = nn.LeakyReLU()
    with torch.no_grad(), integration.install("triton", fusion="auto"):
        report.add_model(blocks)
        for block in blocks.values():
            block.compile(backend="eager")
            with torch.autocast("cpu", torch.bfloat16):
                call_anemoi(block, *inputs())
        outcomes = {block.path: block for block in integration.installed().computed}
    assert {block.outcome for block in outcomes.values()} == {"several"}
    for block in outcomes.values():
        assert "fused, or edge update only" in block.reason
