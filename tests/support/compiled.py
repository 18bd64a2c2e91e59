"""Small layers by name, their inputs, and the comparison of compiled with eager code."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from anemoi_gt import GraphStructure, KernelConfig, edge_attention, nn
from support.differentiate import differentiate, randomise
from support.run import leaves_of
from support.same_numbers import assert_same

CHANNELS = 8
HEADS = 2
DIM = 3
# Sources, destinations, edges, batch. Dynamo unifies sizes that are equal in the first call, so all
# differ from each other, from the lengths of pointers (nodes + 1), and from CHANNELS, HEADS and DIM.
SIZES = ((9, 14, 31, 4), (11, 17, 53, 5), (43, 6, 77, 10))


@dataclass
class Sample:
    """A graph and tensors by name: src [B, N_src, F], dst [B, N_dst, F], attr [E, D]."""

    graph: GraphStructure
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def leaves(self) -> dict[str, Tensor]:
        """Return copies that require gradients."""
        leaves = {}
        for name, tensor in self.tensors.items():
            leaves[name] = tensor.detach().clone().requires_grad_()
        return leaves


def make_edges(num_src, num_dst, num_edges):
    """Return edge_index [2, E]."""
    generator = torch.Generator().manual_seed(num_edges)
    sources = torch.randint(num_src, (num_edges,), generator=generator)
    destinations = torch.randint(num_dst, (num_edges,), generator=generator)
    return torch.stack([sources, destinations])


BLOCK = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "hidden_dim": 12,
    "num_heads": HEADS,
    "edge_dim": DIM,
}
LAYERS = {  # makers by name
    "conv": partial(
        nn.GraphTransformerConv, CHANNELS, CHANNELS, heads=HEADS, edge_dim=DIM, beta=True
    ),
    "interaction_block": partial(nn.InteractionBlock, CHANNELS, DIM, hidden_dim=12),
    "processor_block": partial(
        nn.GraphTransformerProcessorBlock, **BLOCK, qk_norm=True, dropout=0.3
    ),
    "mapper_block": partial(nn.GraphTransformerMapperBlock, **BLOCK, update_src_nodes=True),
}


def call(layer, graph, tensors):
    """Call a layer on a graph with tensors by name."""
    x = (tensors["src"], tensors["dst"]) if "src" in tensors else tensors["dst"]
    return layer(x, graph, tensors["attr"])


def make_layer(name, backend="torch", device="cpu", **options):
    """Return a layer with random parameters."""
    torch.manual_seed(0)
    layer = LAYERS[name](config=KernelConfig(backend=backend), **options)
    return randomise(layer).to(device)


def sample_for(name, sizes, device="cpu"):
    """Return a sample with a graph for a layer: square for processors."""
    num_src, num_dst, num_edges, samples = sizes
    is_square = name.startswith("processor")
    if is_square:
        num_src = num_dst
    edge_index = make_edges(num_src, num_dst, num_edges)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)]  # as the edges of a model
    graph = GraphStructure.from_edge_index(edge_index.to(device), (num_src, num_dst))
    generator = torch.Generator().manual_seed(num_edges)
    shapes = {
        "src": (samples, num_src, CHANNELS),
        "dst": (samples, num_dst, CHANNELS),
        "attr": (num_edges, DIM),
    }
    if is_square:
        del shapes["src"]
    tensors = {}
    for part, shape in shapes.items():
        tensors[part] = torch.randn(shape, generator=generator).to(device)
    return Sample(graph, tensors)


def counting(backend="aot_eager"):
    """Return a backend of torch.compile that counts compilations in `frame_count`."""
    torch.compiler.reset()
    return CompileCounterWithBackend(backend)


def assert_compiled_attention_is_eager(config, cases) -> None:
    """Assert that attention of (problem, graph) pairs compiles once for all sizes, with bitwise the eager gradients."""
    counter = counting()
    compilations = []

    def loss(graph, query, key, value, *edge_operands):
        out, lse = edge_attention(query, key, value, graph, *edge_operands, config=config)
        return out.square().sum() + torch.where(torch.isfinite(lse), lse, 0.0).sum()

    step = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    for problem, graph in cases:
        gradients = []
        for function in (step, loss):
            leaves = leaves_of(problem, graph)
            with torch._dynamo.config.patch(error_on_recompile=True):
                function(graph, *leaves.values()).backward()
            gradients.append({name: leaf.grad for name, leaf in leaves.items()})
        assert_same(*gradients, 0)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


def differentiate_seeded(module, function, tensors) -> dict[str, Tensor | None]:
    """Differentiate a function of named tensors, with the same random numbers in every call."""
    torch.manual_seed(3)
    return differentiate(module, tensors, function)


def assert_compiled_is_eager(module, compiled, eager, tensors) -> None:
    """Assert that two functions of named tensors give the same output and gradients."""
    actual = differentiate_seeded(module, compiled, tensors)
    expected = differentiate_seeded(module, eager, tensors)
    torch.testing.assert_close(actual, expected)
