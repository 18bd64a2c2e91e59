"""Blocks of this library by fused sub-layers: which are, with what numbers, in chunks and compiled."""

import copy
from functools import partial

import pytest
import torch
from support.backward_graph import sublayers_of_backward
from support.operators import Operators
from support.same_numbers import assert_same
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

from anemoi_gt import GraphStructure, KernelConfig
from anemoi_gt.nn import (
    ConditionalLayerNorm,
    GraphTransformerMapperBlock,
    GraphTransformerProcessor,
    GraphTransformerProcessorBlock,
    LayerKernels,
    fused_block,
)
from anemoi_gt.nn.chunking import split_destinations

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.usefixtures("few_programs", "default_device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of the interpreter
]
KINDS = {"processor": GraphTransformerProcessorBlock, "mapper": GraphTransformerMapperBlock}
ATTENTION = "attention_sublayer_triton"
BLOCK = f"{ATTENTION}, block"
FEED_FORWARD = "network_triton"
ALONE = "edge_attention_triton"
TRITON = KernelConfig("triton")
# few, because the interpreter runs them one by one
NODES = 5
EDGES = 13
autocast = partial(torch.autocast, "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)


def operators_of_ours(names):
    """Return the operators of this library among names, without their namespace."""
    prefix = "anemoi_gt."
    return [
        name.removeprefix(prefix).replace(".default", "")
        for name in names
        if name.startswith(prefix)
    ]


@pytest.fixture
def default_device(kernel_device):
    with kernel_device:
        yield


def make(kind, batch=(), num_chunks=1, *, shared=False, **options):
    """Return a block and its arguments: nodes, graph, and edge attributes, which a batch may share."""
    torch.manual_seed(0)
    sizes = {"in_channels": 24, "hidden_dim": 40, "out_channels": 24, "num_heads": 2, "edge_dim": 3}
    block = KINDS[kind](**sizes | {"config": TRITON} | options)
    for parameter in block.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    edge_index = torch.randint(NODES, (2, EDGES))
    graph = GraphStructure.from_edge_index(edge_index[:, edge_index[1].argsort(stable=True)], NODES)
    x = [torch.randn(*batch, NODES, 24) for _ in range(1 if kind == "processor" else 2)]
    if num_chunks > 1:
        graph = split_destinations(graph, num_chunks)
    attr_batch = () if shared else batch
    return block, x, graph, torch.randn(*attr_batch, EDGES, 3)


def differentiate(block, x, graph, attr, dtype=torch.float32, forward=None):
    """Return the destinations and all gradients by name, for a loss with a weight per element."""
    x = [rows.detach().to(dtype).requires_grad_() for rows in x]
    attr = attr.detach().to(dtype).requires_grad_()
    call = block if forward is None else forward
    out = call(x[0] if len(x) == 1 else tuple(x), graph, attr)
    if isinstance(out, tuple):
        _, out = out
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    leaves = {f"x {i}": rows for i, rows in enumerate(x)}
    leaves |= {"attr": attr, **dict(block.named_parameters())}
    loss = out.double().mul(weight).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    result = {"out": out.detach()}
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            result[name] = gradient
    return result


def rms(tensor):
    return tensor.square().mean().sqrt().item()


@pytest.mark.parametrize(
    ("kind", "batch", "num_chunks", "shared"),
    (
        ("mapper", (1,), 3, True),
        ("processor", (2,), 1, True),
        ("processor", (2,), 3, False),
    ),
)
def test_errors_are_at_most_three_times_separate_operators(kind, batch, num_chunks, shared):
    block, *inputs = make(kind, batch, num_chunks, shared=shared, config=KernelConfig("torch"))
    exact = differentiate(copy.deepcopy(block).double(), *inputs, torch.float64)
    results = []
    for config, calls in ((block.config, 0), (TRITON, num_chunks)):
        block.config = config
        with autocast(), Operators() as operators:
            results.append(differentiate(block, *inputs))
        fused = []
        for name in operators_of_ours(operators.names):
            if name in (BLOCK, ATTENTION, FEED_FORWARD):
                fused.append(name)
        assert fused == calls * [BLOCK]
    separate, fused = results
    for name, expected in exact.items():
        separate_error = rms(separate[name] - expected)
        error = rms(fused[name] - expected)
        allowed = 3 * separate_error + 4 * torch.finfo(torch.bfloat16).eps * rms(expected)
        assert error <= allowed, (
            f"{name}: RMS error {error:.1e}, with separate operators {separate_error:.1e}"
        )


@pytest.mark.compiled
def test_a_compiled_block_gives_the_bits_of_the_eager_one():
    torch.compiler.reset()
    block, *inputs = make("processor", (2,))
    recorder = AotEagerAndRecordGraphs()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=recorder)
    with autocast():
        expected = differentiate(block, *inputs)
        actual = differentiate(block, *inputs, forward=compiled)
    traced = recorder.graphs[-1]
    assert operators_of_ours(str(node.target) for node in traced.graph.nodes) == [
        ATTENTION,
        FEED_FORWARD,
    ]
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "shape"),
    (((), (EDGES - 1, 3)), ((), (1, EDGES, 3)), ((2,), (1, EDGES, 3)), ((2,), (3, EDGES, 3))),
)
def test_attributes_of_another_shape_are_refused_as_by_the_attention(kind, batch, shape):
    block, x, graph, _ = make(kind, batch)
    with autocast(), pytest.raises(ValueError, match=r"edge_attr must have shape \[E, D\]"):
        block(x[0] if kind == "processor" else x, graph, torch.randn(shape))
    with autocast(), pytest.raises(ValueError, match="edge_attr must be floating point"):
        block(x[0] if kind == "processor" else x, graph, torch.ones(EDGES, 3, dtype=torch.int64))


def test_weights_on_another_device_are_refused():
    block, x, graph, attributes = make("processor", ())
    with autocast(), pytest.raises(ValueError, match="edge_weight must be on the device of the"):
        block.to("meta")(x[0], graph, attributes)


class OwnBlock(GraphTransformerProcessorBlock):
    """A user-defined block."""

    def make_query(self, dst):
        return 2 * super().make_query(dst)


def with_own_combine(block):
    block.combine = lambda out, skip: 2 * type(block).combine(block, out, skip)


def with_hook(name):
    def hook(block):
        block.get_submodule(name).register_forward_hook(lambda module, inputs, out: 2 * out)

    return hook


CONDITIONAL = {
    "layer_kernels": LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=4))
}


def operators_of(kind, options, change=None, cond=None):
    """Return the operators of this library that a block calls in a forward pass."""
    block, x, *edges = make(kind, **options)
    if change is not None:
        change(block)
    with autocast(), torch.no_grad(), Operators() as operators:
        block(tuple(x) if len(x) > 1 else x[0], *edges, cond=cond)
    return operators_of_ours(operators.names)


@pytest.mark.parametrize(
    "options", ({"qk_norm": True}, {"mlp_implementation": "glu"}, {"edge_pre_mlp": True}), ids=str
)
def test_norms_of_queries_gated_networks_and_networks_of_edges_are_fused(options):
    assert operators_of("processor", options) == [BLOCK]


@pytest.mark.parametrize("rows", (1, NODES))
def test_conditional_norms_are_fused_with_a_condition_of_each_node_or_of_all(rows):
    assert operators_of("processor", CONDITIONAL, cond=torch.randn(rows, 4)) == [BLOCK]


def test_a_block_on_many_rows_is_two_operators_with_the_same_bits(monkeypatch):
    block, *inputs = make("processor", (2,))
    with autocast():
        expected = differentiate(block, *inputs)
        monkeypatch.setattr(fused_block, "MOST_OF_ONE", 2 * NODES * 24 - 1)
        with Operators() as operators:
            actual = differentiate(block, *inputs)
    called = operators_of_ours(operators.names)
    assert called == [ATTENTION, FEED_FORWARD, f"{FEED_FORWARD}_backward", f"{ATTENTION}_backward"]
    assert_same(actual, expected, tolerance=0)


def test_a_mapper_that_updates_its_sources_has_an_operator_for_them():
    assert operators_of("mapper", {"update_src_nodes": True}) == [BLOCK, FEED_FORWARD]


@pytest.mark.parametrize(
    ("options", "change", "expected"),
    (
        ({"dropout": 0.5}, None, [ALONE, FEED_FORWARD]),
        ({"config": KernelConfig("triton", precision="fp32")}, None, [ALONE, FEED_FORWARD]),
        ({}, with_hook("lin_query"), [ALONE, FEED_FORWARD]),
        ({}, with_hook("node_dst_mlp"), [ATTENTION]),
        ({}, with_hook("layer_norm_mlp_dst"), [ATTENTION]),
        (
            {},
            lambda block: setattr(block, "projection", nn.Sequential(block.projection)),
            [ALONE, FEED_FORWARD],
        ),
        ({}, with_own_combine, [ALONE]),
        ({}, lambda block: setattr(block, "__class__", OwnBlock), [ALONE]),
    ),
)
def test_an_unsupported_part_unfuses_only_its_own_sublayer(options, change, expected):
    assert operators_of("processor", options, change) == expected


@pytest.mark.compiled
def test_compiled_groups_of_layers_are_recomputed_one_at_a_time():
    _, (x,), *edges = make("processor")
    sizes = {
        "num_layers": 4,
        "num_channels": 24,
        "num_heads": 2,
        "edge_dim": 3,
        "checkpoint_groups": 2,
    }
    processor = GraphTransformerProcessor(**sizes, config=TRITON)
    with autocast():
        names = sublayers_of_backward(
            lambda backend: torch.compile(processor, backend=backend)(x, *edges)
        )
    layers = 2 * [f"{FEED_FORWARD}_backward", f"{ATTENTION}_backward"]
    backward = [name for name in names if name.endswith("_backward")]
    assert backward == 2 * layers
    second_group = (
        names.index(f"{ATTENTION}_backward", names.index(f"{ATTENTION}_backward") + 1) + 1
    )
    for recomputed in (
        names[: names.index(layers[0])],
        names[second_group : names.index(layers[0], second_group)],
    ):
        assert recomputed[:3] == [ATTENTION, FEED_FORWARD, ATTENTION]
