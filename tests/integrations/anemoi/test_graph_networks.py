"""Anemoi's graph networks under `install`: fused updates compute what Anemoi computes, or are refused and named."""

import copy

import pytest
import torch
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, GraphShardInfo
from anemoi.models.layers.block import GraphConvMapperBlock, GraphConvProcessorBlock
from anemoi.models.layers.mlp import MLP
from anemoi.models.layers.utils import load_layer_kernels
from support.same_numbers import assert_same_numbers
from torch import nn

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import report

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("few_programs")]

NODES = 13
EDGES = 29
FEATURES = 16
AUTOCAST = {"LayerNorm": {"_target_": "anemoi.models.layers.normalization.AutocastLayerNorm"}}
KINDS = {"processor": GraphConvProcessorBlock, "mapper": GraphConvMapperBlock}


def make_block(kind, kernels=AUTOCAST, **options):
    """Return a block whose norms have parameters that matter."""
    torch.manual_seed(0)
    sizes = {"in_channels": FEATURES, "out_channels": FEATURES, "num_chunks": 1}
    block = KINDS[kind](layer_kernels=load_layer_kernels(kernels), **(sizes | options))
    for module in block.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.2)
            nn.init.normal_(module.bias, 0.0, 0.2)
    return block


def run(block, kind, dtype=torch.float32, batch=1, call=None):
    """Return outputs and gradients of a block on unsorted edges; no edge ends in the last node."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows, features=FEATURES):
        return torch.randn(rows, features, generator=generator).to(dtype).requires_grad_()

    x = draw(batch * NODES)
    if kind == "mapper":
        x = (x, draw(batch * NODES))
    emb_edges = getattr(block, "emb_edges", None)
    edge_attr = draw(batch * EDGES, FEATURES if emb_edges is None else 5)
    one = torch.randint(NODES - 1, (2, EDGES), generator=generator)
    edge_index = torch.cat([one + entry * NODES for entry in range(batch)], dim=1)
    size = batch * NODES
    shards = GraphShardInfo() if kind == "processor" else BipartiteGraphShardInfo()
    arguments = (x, edge_attr, edge_index, shards, None, (size, size))
    nodes, edges = (block if call is None else call)(*arguments)
    outputs = [*(nodes if kind == "mapper" else (nodes,)), edges]
    loss = 0.0
    for out in outputs:
        direction = torch.randn(out.shape, generator=generator)
        loss = loss + (out.float() * direction).sum()
    leaves = [*(x if kind == "mapper" else (x,)), edge_attr, *block.parameters()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return {"out": outputs, "gradients": list(gradients)}


def outcome_of(block):
    """Return how a block was computed, and why not fused."""
    (computed,) = [record for record in report.computed() if record.kind == type(block).__name__]
    return computed.outcome, computed.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kernels", "options", "batch"),
    [
        (AUTOCAST, {}, 1),
        ({}, {"mlp_implementation": "swiglu", "mlp_hidden_ratio": 2.0}, 2),
        (AUTOCAST, {"update_src_nodes": False, "num_chunks": 2}, 1),
        ({"Activation": {"_target_": "torch.nn.SiLU"}}, {"edge_dim": 5}, 1),
    ],
)
def test_a_fused_block_computes_what_anemoi_computes(kind, kernels, options, batch):
    if kind == "mapper":
        options = {name: value for name, value in options.items() if name != "edge_dim"}
    block = make_block(kind, kernels, **options)
    expected = run(block, kind, batch=batch)
    with integration.install(backend="triton", fusion="sublayers"):
        assert_same_numbers(run(block, kind, batch=batch), expected)
        assert outcome_of(block) == ("fused", None)
    assert_same_numbers(run(block, kind, batch=batch), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernels", [AUTOCAST, {}], ids=["autocast norm", "norm"])
def test_dtypes_under_autocast_are_those_of_anemoi(kind, kernels):
    block = make_block(kind, kernels)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(block, kind, torch.bfloat16)
        with integration.install(backend="triton", fusion="sublayers"):
            actual = run(block, kind, torch.bfloat16)
    for out, other in zip(actual["out"], expected["out"], strict=True):
        assert out.dtype == other.dtype
    for gradient, other in zip(actual["gradients"], expected["gradients"], strict=True):
        assert gradient.dtype == other.dtype


def scale(module, arguments, out):
    """Scale the results of a module, as a hook."""
    return tuple(1.5 * part for part in out) if isinstance(out, tuple) else 1.5 * out


HOOKS = {  # of message passing: test_edits
    "forward hook": lambda conv: conv.register_forward_hook(scale),
    "hook of the network": lambda conv: conv.edge_mlp.register_forward_hook(scale),
    "hook of an activation": lambda conv: conv.edge_mlp.mlp[1].register_forward_hook(scale),
}
CHANGES = {
    "flow": lambda conv: setattr(conv, "flow", "target_to_source"),
    "activation": lambda conv: conv.edge_mlp.mlp.__setitem__(1, nn.Tanh()),
    "layer": lambda conv: conv.edge_mlp.mlp.append(nn.GELU()),
    "layer_norm": lambda conv: setattr(conv.edge_mlp, "layer_norm", nn.Tanh()),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_with_a_hook_in_its_edge_update_a_block_is_computed_by_anemoi(hook):
    block = make_block("processor")
    HOOKS[hook](block.conv)
    expected = run(block, "processor")
    with integration.install(backend="triton", fusion="sublayers"):
        assert_same_numbers(run(block, "processor"), expected)
        outcome, reason = outcome_of(block)
    assert outcome == "networks only"  # Anemoi's forward, whose MLPs are fused
    assert "its conv" in reason
    assert "has hooks" in reason


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_edge_update_is_refused_by_a_named_backend(change):
    block = make_block("processor")
    CHANGES[change](block.conv)
    with (
        integration.install(backend="triton", fusion="sublayers"),
        pytest.raises(ValueError, match="cannot compute this Anemoi block: its conv"),
    ):
        run(block, "processor")


def test_a_changed_node_update_costs_only_itself():
    block = make_block("mapper")
    block.node_mlp.register_forward_hook(lambda module, arguments, out: 1.5 * out)
    expected = run(block, "mapper")
    with integration.install(backend="triton", fusion="sublayers"):
        assert_same_numbers(run(block, "mapper"), expected)
        outcome, reason = outcome_of(block)
    assert outcome == "edge update only"
    assert "node_mlp has hooks" in reason


def test_a_method_of_the_class_patched_after_install_is_called(monkeypatch):
    block = make_block("processor")
    with integration.install(backend="triton", fusion="sublayers"):
        run(block, "processor")

        def message(self, x_i, x_j, edge_attr, dim_size=None):
            return x_j + edge_attr

        monkeypatch.setattr(type(block.conv), "message", message)
        with pytest.raises(ValueError, match="whose message was replaced"):
            run(block, "processor")


def test_in_float32_blocks_are_left_to_anemoi():
    block = make_block("processor")
    with integration.install(backend="triton"):
        run(block, "processor")
        outcome, reason = outcome_of(block)
    assert outcome == "upstream"
    assert "16-bit autocast" in reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fusion", ["auto", "none", "attention", "sublayers"])
def test_a_precision_is_refused_by_name_however_a_block_is_computed(kind, fusion):
    block = make_block(kind)
    with integration.install(precision="bf16", fusion=fusion):
        run(block, kind)
        _, reason = outcome_of(block)
    assert "a precision is set" in reason
    with (
        integration.install(backend="triton", precision="bf16", fusion="sublayers"),
        pytest.raises(ValueError, match="a precision is set"),
    ):
        run(block, kind)


def test_an_embedding_is_fused_and_its_own_hooks_are_called():
    torch.manual_seed(0)
    mlp = MLP(5, 16, 16, load_layer_kernels(AUTOCAST), n_extra_layers=1)
    calls = []
    mlp.register_forward_hook(lambda *_: calls.append(0))
    x = torch.randn(2, 7, 5, requires_grad=True)

    def differentiate():
        out = mlp(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *mlp.parameters()])]

    expected = differentiate()
    with integration.install(backend="triton", fusion="sublayers"):
        out = mlp(x)
        assert out.grad_fn.next_functions[0][0].name() == "FunctionBackward"
        assert_same_numbers(differentiate(), expected)
    assert len(calls) == 3


@pytest.mark.parametrize("implementation", ["mlp", "swiglu"])
def test_a_network_of_two_hidden_layers_is_fused_without_a_norm_and_refuses_other_inputs(
    implementation,
):
    sizes = {"n_extra_layers": 1, "layer_norm": False, "mlp_implementation": implementation}
    mlp = MLP(6, 16, 4, load_layer_kernels(AUTOCAST), **sizes)
    x = torch.randn(7, 6)
    expected = mlp(x)
    with integration.install(backend="triton", fusion="sublayers"):
        out = mlp(x)
        assert out.grad_fn.name() == "FunctionBackward"
        assert_same_numbers(out, expected)
        with pytest.raises(ValueError, match="the first layer must take the 3 features"):
            mlp(x[:, :3])  # half of them, as a layer that takes its rows twice would have


def test_blocks_of_one_model_are_swapped():
    block = make_block("processor")
    other = copy.deepcopy(block)
    expected = run(block, "processor")
    integration.swap_layers(nn.ModuleList([block]), backend="triton", fusion="sublayers")
    try:
        assert_same_numbers(run(block, "processor"), expected)
        assert_same_numbers(run(other, "processor"), expected)
        assert outcome_of(block) == ("fused", None)
    finally:
        integration.uninstall()


@pytest.mark.compiled
def test_a_compiled_block_is_one_graph_with_both_operators():
    block = make_block("mapper")
    expected = run(block, "mapper")
    names = set()

    def record(graph, example):
        names.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with integration.install(backend="triton", fusion="sublayers"):
        compiled = torch.compile(block, backend=record, fullgraph=True)
        assert_same_numbers(run(block, "mapper", call=compiled), expected)
    assert {"anemoi_gt.interaction_triton.default", "anemoi_gt.network_triton.default"} <= names
