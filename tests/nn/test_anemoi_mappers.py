"""Mappers and processor against those of anemoi-models: one state dict, the same numbers, in chunks or whole."""

from functools import partial

import pytest
import torch
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, GraphShardInfo
from anemoi.models.layers import mapper as their_mappers
from anemoi.models.layers.graph_provider import StaticGraphProvider
from anemoi.models.layers.processor import GraphTransformerProcessor as TheirProcessor
from support.differentiate import differentiate, randomise
from torch_geometric.data import HeteroData

from anemoi_gt import GraphStructure
from anemoi_gt.nn import (
    ConditionalLayerNorm,
    GraphTransformerBackwardMapper,
    GraphTransformerForwardMapper,
    GraphTransformerProcessor,
    LayerKernels,
    StaticEdges,
    split_destinations,
)

SRC, DST, EDGES, DIM, CONDITION = 13, 11, 50, 5, 4
CHANNELS = {"num_channels": 12, "num_heads": 3, "mlp_hidden_ratio": 1.3, "edge_dim": DIM, "qk_norm": True}
KINDS = {  # ours, theirs, keywords
    "forward": (
        GraphTransformerForwardMapper,
        their_mappers.GraphTransformerForwardMapper,
        {"in_channels_src": 6, "in_channels_dst": 4},
    ),
    "backward": (
        GraphTransformerBackwardMapper,
        their_mappers.GraphTransformerBackwardMapper,
        {"in_channels_src": 12, "in_channels_dst": 4, "out_channels_dst": 3},
    ),
    "backward from other channels": (
        GraphTransformerBackwardMapper,
        their_mappers.GraphTransformerBackwardMapper,
        {"in_channels_src": 8, "in_channels_dst": 4, "out_channels_dst": 3},
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make_edges(num_src):
    """edge_index [2, EDGES] sorted by destination, the last of which has no in-edge."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(num_src, (EDGES,), generator=generator)
    return torch.stack([src, torch.randint(DST - 1, (EDGES,), generator=generator).sort().values])


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def make_pair(kind, conditional=False, num_chunks=1):
    ours, theirs, keywords = KINDS[kind]
    condition = {"_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm", "condition_shape": CONDITION}
    kernels = {"LayerNorm": condition} if conditional else {}
    options = {"layer_kernels": kernels, "graph_attention_backend": "pyg", "gradient_checkpointing": False}
    theirs = randomise(theirs(**keywords, **CHANNELS, **options, num_chunks=num_chunks).double())
    norm = partial(ConditionalLayerNorm, condition_shape=CONDITION)
    ours = ours(**keywords, **CHANNELS, layer_kernels=LayerKernels(LayerNorm=norm) if conditional else LayerKernels())
    ours.double().load_state_dict(theirs.state_dict())
    return theirs, ours


def make_inputs(kind, conditional=False):
    inputs = {"src": draw(SRC, KINDS[kind][2]["in_channels_src"]), "dst": draw(DST, 4), "edge_attr": draw(EDGES, DIM)}
    if conditional:
        inputs |= {"cond_src": draw(SRC, CONDITION), "cond_dst": draw(DST, CONDITION)}
    return inputs


def cond_of(tensors):
    return {"cond": (tensors["cond_src"], tensors["cond_dst"])} if "cond_src" in tensors else {}


def run_theirs(mapper, inputs):
    def call(tensors):
        x, edges = (tensors["src"], tensors["dst"]), (tensors["edge_attr"], make_edges(SRC))
        out = mapper(x, 1, BipartiteGraphShardInfo(), *edges, **cond_of(tensors))
        return out if torch.is_tensor(out) else out[1]  # a forward mapper hands the sources on

    return differentiate(mapper, inputs, call)


def run_ours(mapper, inputs, num_chunks=1):
    chunks = split_destinations(GraphStructure.from_edge_index(make_edges(SRC), (SRC, DST)), num_chunks)

    def call(tensors):
        return mapper((tensors["src"], tensors["dst"]), chunks, tensors["edge_attr"], **cond_of(tensors))

    return differentiate(mapper, inputs, call)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


@every_kind
@pytest.mark.parametrize("conditional", (False, True))
@pytest.mark.parametrize("num_chunks", (1, 3))
def test_mapper_gives_their_output_and_all_their_gradients(kind, conditional, num_chunks):
    theirs, ours = make_pair(kind, conditional, num_chunks)
    inputs = make_inputs(kind, conditional)
    assert_same(run_ours(ours, inputs, num_chunks), run_theirs(theirs, inputs))


def make_processors(num_layers=3):
    options = {"layer_kernels": {}, "graph_attention_backend": "pyg", "gradient_checkpointing": False}
    theirs = TheirProcessor(num_layers=num_layers, num_chunks=1, **CHANNELS, **options).double()
    ours = GraphTransformerProcessor(num_layers=num_layers, **CHANNELS).double()
    ours.load_state_dict(randomise(theirs).state_dict())
    return theirs, ours


@pytest.mark.parametrize("kind", [*KINDS, "processor"])
def test_state_dict_loads_both_ways(kind):
    theirs, ours = make_processors() if kind == "processor" else make_pair(kind)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(randomise(ours, seed=1).state_dict())
    for name, value in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value), name


def test_processor_gives_their_output_and_all_their_gradients():
    theirs, ours = make_processors()
    edge_index = make_edges(DST)
    graph = GraphStructure.from_edge_index(edge_index, DST)
    inputs = {"x": draw(DST, 12), "edge_attr": draw(EDGES, DIM)}

    def call_theirs(tensors):
        return theirs(tensors["x"], 1, GraphShardInfo(), tensors["edge_attr"], edge_index)

    expected = differentiate(theirs, inputs, call_theirs)
    actual = differentiate(ours, inputs, lambda tensors: ours(tensors["x"], graph, tensors["edge_attr"]))
    assert_same(actual, expected)


def test_edges_and_their_trainable_attributes_are_in_the_same_order():
    generator = torch.Generator().manual_seed(2)
    edge_index = torch.stack([torch.randint(n, (EDGES,), generator=generator) for n in (SRC, DST)])
    store = HeteroData()["data", "to", "hidden"]
    store.edge_index, store.edge_length = edge_index, torch.arange(float(EDGES))[:, None]
    theirs = StaticGraphProvider(store, ["edge_length"], SRC, DST, trainable_size=2)
    graph, edge_attr = StaticEdges(edge_index, store.edge_length, (SRC, DST), trainable=2)()
    assert torch.equal(edge_attr[:, :1], theirs.edge_attr)
    assert torch.equal(graph.edge_index(), theirs.edge_index_base)
