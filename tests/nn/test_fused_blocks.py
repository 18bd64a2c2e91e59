"""Blocks of this library by fused sub-layers: which are, with what numbers, in chunks and compiled."""

import copy
from functools import partial

import pytest
import torch
from support.backward_graph import sublayers_of_backward
from support.operators import Operators
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs

from anemoi_gt import AttentionConfig, GraphStructure
from anemoi_gt.nn import (
    ConditionalLayerNorm,
    GraphTransformerMapperBlock,
    GraphTransformerProcessor,
    GraphTransformerProcessorBlock,
    LayerKernels,
)
from anemoi_gt.nn.chunking import split_destinations

pytestmark = [
    pytest.mark.usefixtures("few_programs", "default_device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of the interpreter
]
KINDS = {"processor": GraphTransformerProcessorBlock, "mapper": GraphTransformerMapperBlock}
ATTENTION, FEED_FORWARD = "attention_sublayer_triton", "feed_forward_triton"
ALONE = "edge_attention_triton"
TRITON = AttentionConfig("triton")
autocast = partial(torch.autocast, "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)


def operators_of_ours(names):
    """Return the operators of this library among names, without their namespace."""
    prefix = "anemoi_gt."
    return [
        name.removeprefix(prefix).removesuffix(".default")
        for name in names
        if name.startswith(prefix)
    ]


@pytest.fixture
def default_device(kernel_device):
    with kernel_device:
        yield


def make(kind, batch=(), num_chunks=1, shared=False, **options):
    """A block, and nodes, edges and attributes that it takes, shared by a batch or not."""
    torch.manual_seed(0)
    sizes = {"in_channels": 24, "hidden_dim": 40, "out_channels": 24, "num_heads": 2, "edge_dim": 3}
    block = KINDS[kind](**sizes | {"config": TRITON} | options)
    for parameter in block.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    edge_index = torch.randint(9, (2, 31))
    graph = GraphStructure.from_edge_index(edge_index[:, edge_index[1].argsort(stable=True)], 9)
    x = [torch.randn(*batch, 9, 24) for _ in range(1 if kind == "processor" else 2)]
    graph = graph if num_chunks == 1 else split_destinations(graph, num_chunks)
    return block, x, graph, torch.randn(*(() if shared else batch), 31, 3)


def differentiate(block, x, graph, attr, dtype=torch.float32, forward=None):
    """The destinations and gradients by name, of a loss that weights all elements apart."""
    *x, attr = (each.detach().to(dtype).requires_grad_() for each in (*x, attr))
    out = (block if forward is None else forward)(x[0] if len(x) == 1 else tuple(x), graph, attr)
    out = out[1] if isinstance(out, tuple) else out
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    wanted = (
        {f"x {i}": each for i, each in enumerate(x)}
        | {"attr": attr}
        | dict(block.named_parameters())
    )
    gradients = torch.autograd.grad(
        out.double().mul(weight).sum(), list(wanted.values()), allow_unused=True
    )
    return {"out": out.detach()} | {
        name: x for name, x in zip(wanted, gradients, strict=True) if x is not None
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize(("batch", "num_chunks"), (((1,), 3), ((2,), 1), ((2,), 3)))
def test_errors_are_at_most_three_times_separate_operators(kind, batch, num_chunks, shared):
    block, *given = make(kind, batch, num_chunks, shared, config=AttentionConfig("torch"))
    exact = differentiate(copy.deepcopy(block).double(), *given, torch.float64)
    results = []
    for config, calls in ((block.config, 0), (TRITON, num_chunks)):
        block.config = config
        with autocast(), Operators() as operators:
            results.append(differentiate(block, *given))
        forward = [
            name for name in operators_of_ours(operators.names) if not name.endswith("_backward")
        ]
        fused = [name for name in forward if name in (ATTENTION, FEED_FORWARD)]
        assert fused == calls * [ATTENTION, FEED_FORWARD]
    for name, expected in exact.items():
        plain, ours = ((found[name] - expected).square().mean().sqrt().item() for found in results)
        allowed = (
            3 * plain + 4 * torch.finfo(torch.bfloat16).eps * expected.square().mean().sqrt().item()
        )
        assert ours <= allowed, f"{name}: RMS error {ours:.1e}, of separate operators {plain:.1e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", (False, True))
def test_a_compiled_block_gives_the_bits_of_the_eager_one(kind, dynamic):
    torch.compiler.reset()
    block, *given = make(kind, (2,))
    recorder = EagerAndRecordGraphs()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=recorder)
    with autocast():
        eager, again = (
            differentiate(block, *given, forward=forward) for forward in (block, compiled)
        )
    (traced,) = recorder.graphs
    assert operators_of_ours(str(node.target) for node in traced.graph.nodes) == [
        ATTENTION,
        FEED_FORWARD,
    ]
    assert all(torch.equal(again[name], expected) for name, expected in eager.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "shape"), (((), (30, 3)), ((), (1, 31, 3)), ((2,), (1, 31, 3)), ((2,), (3, 31, 3)))
)
def test_attributes_of_another_shape_are_refused_as_by_the_attention(kind, batch, shape):
    block, x, graph, _ = make(kind, batch)
    with autocast(), pytest.raises(ValueError, match=r"edge_attr must have shape \[E, D\]"):
        block(x[0] if kind == "processor" else x, graph, torch.randn(shape))
    with autocast(), pytest.raises(ValueError, match="edge_attr must be floating point"):
        block(x[0] if kind == "processor" else x, graph, torch.ones(31, 3, dtype=torch.int64))


class OwnBlock(GraphTransformerProcessorBlock):
    """A block of somebody's own."""

    def make_query(self, dst):
        return 2 * super().make_query(dst)


def with_own_combine(block):
    block.combine = lambda out, skip: 2 * type(block).combine(block, out, skip)


def with_hook(name):
    def hook(block):
        block.get_submodule(name).register_forward_hook(lambda module, given, out: 2 * out)

    return hook


CONDITIONAL = {
    "layer_kernels": LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=4))
}


def operators_of(kind, options, change=None, cond=None):
    """Operators of this library that a block calls in a forward pass."""
    block, x, *given = make(kind, **options)
    if change is not None:
        change(block)
    with autocast(), torch.no_grad(), Operators() as operators:
        block(tuple(x) if len(x) > 1 else x[0], *given, cond=cond)
    return operators_of_ours(operators.names)


@pytest.mark.parametrize(
    "options", ({"qk_norm": True}, {"mlp_implementation": "glu"}, {"edge_pre_mlp": True}), ids=str
)
def test_norms_of_queries_gated_networks_and_networks_of_edges_are_fused(options):
    assert operators_of("processor", options) == [ATTENTION, FEED_FORWARD]


@pytest.mark.parametrize("rows", (1, 9))
def test_conditional_norms_are_fused_with_a_condition_of_each_node_or_of_all(rows):
    assert operators_of("processor", CONDITIONAL, cond=torch.randn(rows, 4)) == [
        ATTENTION,
        FEED_FORWARD,
    ]


def test_a_mapper_that_updates_its_sources_is_three_sublayers():
    assert operators_of("mapper", {"update_src_nodes": True}) == [
        ATTENTION,
        FEED_FORWARD,
        FEED_FORWARD,
    ]


@pytest.mark.parametrize(
    ("options", "change", "expected"),
    (
        ({"dropout": 0.5}, None, [ALONE, FEED_FORWARD]),
        ({"config": AttentionConfig("triton", precision="fp32")}, None, [ALONE, FEED_FORWARD]),
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
def test_what_cannot_be_fused_costs_its_own_sublayer_alone(options, change, expected):
    assert operators_of("processor", options, change) == expected


def test_a_mapper_whose_norm_has_two_modules_keeps_its_attention():
    change = lambda block: setattr(block, "layer_norm_attention", nn.LayerNorm(24))  # noqa: E731
    assert operators_of("mapper", {}, change) == [ALONE, FEED_FORWARD]


def test_compiled_groups_of_layers_are_recomputed_one_at_a_time():
    _, (x,), *given = make("processor")
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
            lambda backend: torch.compile(processor, backend=backend)(x, *given)
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
