"""Embeddings and output layers of this library's mappers: fused, in chunks, compiled, with hooks."""

from functools import partial

import pytest
import torch
from support.operators import LINEAR_LAYER, Operators

from anemoi_gt import GraphStructure, KernelConfig
from anemoi_gt.nn import GraphTransformerBackwardMapper, GraphTransformerForwardMapper
from anemoi_gt.nn.chunking import split_destinations

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.usefixtures("few_programs", "default_device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of the interpreter
]
LAYER = LINEAR_LAYER
autocast = partial(torch.autocast, "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)


@pytest.fixture
def default_device(kernel_device):
    with kernel_device:
        yield


def make(kind=GraphTransformerBackwardMapper, batch=(), num_chunks=1, backend="triton"):
    """Return a mapper from 5 sources of 24 features to 4 destinations of 5, and its arguments."""
    torch.manual_seed(0)
    options = {} if kind is GraphTransformerForwardMapper else {"out_channels_dst": 11}
    sizes = {"in_channels_src": 24, "in_channels_dst": 5, "num_channels": 24, "num_heads": 2}
    mapper = kind(**sizes, edge_dim=3, config=KernelConfig(backend), **options)
    edge_index = torch.stack([torch.randint(5, (13,)), torch.randint(4, (13,)).sort().values])
    graph = GraphStructure.from_edge_index(edge_index, (5, 4))
    if num_chunks > 1:
        graph = split_destinations(graph, num_chunks)
    x = (torch.randn(*batch, 5, 24), torch.randn(*batch, 4, 5).requires_grad_())
    return mapper, (x, graph, torch.randn(13, 3))


def differentiate(mapper, arguments):
    """Return the output, and gradients of destinations and parameters by name."""
    (_, x_dst), *_ = arguments
    with autocast():
        out = mapper(*arguments)
    leaves = {"x_dst": x_dst, **dict(mapper.named_parameters())}
    weight = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
    gradients = torch.autograd.grad((out.float() * weight).sum(), list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize(
    ("kind", "batch", "num_chunks"),
    [
        (GraphTransformerForwardMapper, (2,), 1),
        (GraphTransformerBackwardMapper, (), 3),
    ],
)
def test_two_layers_are_fused_under_autocast_with_the_dtypes_of_modules(kind, batch, num_chunks):
    mapper, arguments = make(kind, batch, num_chunks)
    with Operators() as operators:
        fused = differentiate(mapper, arguments)
    assert operators.names.count(LAYER) == 2 * num_chunks
    other, arguments = make(kind, batch, num_chunks, backend="torch")
    with Operators() as operators:
        plain = differentiate(other, arguments)
    assert LAYER not in operators.names
    for name, expected in plain.items():
        assert fused[name].dtype == expected.dtype, name
        assert fused[name].shape == expected.shape, name
        if not name.startswith("proc."):
            error = (fused[name].float() - expected.float()).norm() / expected.float().norm()
            assert error < 4 * torch.finfo(torch.bfloat16).eps, (name, error)


def test_layers_are_modules_in_float32_and_in_compiled_code():
    mapper, arguments = make()
    with Operators() as operators:
        mapper(*arguments)
    assert LAYER not in operators.names
    names = []

    def record(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with autocast():
        torch.compile(mapper, backend=record)(*arguments)
    assert "anemoi_gt.network_triton.default" in names
    assert LAYER not in names


def test_a_hook_costs_its_own_layer():
    mapper, arguments = make()
    seen = []
    mapper.emb_nodes_dst.register_forward_hook(lambda *_: seen.append(True))
    with Operators() as operators:
        differentiate(mapper, arguments)
    assert operators.names.count(LAYER) == 1
    assert seen == [True]
