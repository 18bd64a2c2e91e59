"""Mappers and processor against anemoi-models': one state dict, the same numbers, in chunks or whole."""

from functools import partial

import pytest
import torch
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, GraphShardInfo
from anemoi.models.layers import mapper as their_mappers
from anemoi.models.layers.graph_provider import StaticGraphProvider
from anemoi.models.layers.processor import GNNProcessor as TheirGNNProcessor
from anemoi.models.layers.processor import GraphTransformerProcessor as TheirProcessor
from support.differentiate import differentiate, draw, randomise
from support.same_numbers import assert_same
from torch_geometric.data import HeteroData

from anemoi_gt import GraphStructure, nn
from anemoi_gt.nn import ConditionalLayerNorm, LayerKernels, StaticEdges, split_destinations

SRC = 13
DST = 11
EDGES = 50
DIM = 5
CONDITION = 4
SIZES = {
    "num_channels": 12,
    "num_heads": 3,
    "mlp_hidden_ratio": 1.3,
    "edge_dim": DIM,
    "qk_norm": True,
}
KINDS = {  # class, channels
    "forward": ("GraphTransformerForwardMapper", {"in_channels_src": 6}),
    "backward": ("GraphTransformerBackwardMapper", {"in_channels_src": 12, "out_channels_dst": 3}),
    "backward from other channels": (
        "GraphTransformerBackwardMapper",
        {"in_channels_src": 8, "out_channels_dst": 3},
    ),
}
THEIRS = {"layer_kernels": {}, "graph_attention_backend": "pyg", "gradient_checkpointing": False}


def make_edges(num_src):
    """edge_index [2, EDGES] sorted by destination, the last of which has no in-edge."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(num_src, (EDGES,), generator=generator)
    return torch.stack([src, torch.randint(DST - 1, (EDGES,), generator=generator).sort().values])


def make_pair(kind, *, conditional=False, num_chunks=1):
    name, channels = KINDS[kind]
    sizes = SIZES | channels | {"in_channels_dst": 4}
    condition = {
        "_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm",
        "condition_shape": CONDITION,
    }
    kernels = {"layer_kernels": {"LayerNorm": condition}} if conditional else {}
    theirs = randomise(
        getattr(their_mappers, name)(**sizes, **THEIRS | kernels, num_chunks=num_chunks).double()
    )
    norm = (
        partial(ConditionalLayerNorm, condition_shape=CONDITION)
        if conditional
        else torch.nn.LayerNorm
    )
    ours = getattr(nn, name)(**sizes, layer_kernels=LayerKernels(LayerNorm=norm))
    ours.double().load_state_dict(theirs.state_dict())
    return theirs, ours


def make_inputs(kind, *, conditional=False):
    inputs = {
        "src": draw(SRC, KINDS[kind][1]["in_channels_src"]),
        "dst": draw(DST, 4),
        "edge_attr": draw(EDGES, DIM),
    }
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
    chunks = split_destinations(
        GraphStructure.from_edge_index(make_edges(SRC), (SRC, DST)), num_chunks
    )

    def call(tensors):
        return mapper(
            (tensors["src"], tensors["dst"]), chunks, tensors["edge_attr"], **cond_of(tensors)
        )

    return differentiate(mapper, inputs, call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conditional", (False, True))
@pytest.mark.parametrize("num_chunks", (1, 3))
def test_mapper_gives_their_output_and_all_their_gradients_and_loads_both_ways(
    kind, conditional, num_chunks
):
    theirs, ours = make_pair(kind, conditional=conditional, num_chunks=num_chunks)
    inputs = make_inputs(kind, conditional=conditional)
    assert_same(run_ours(ours, inputs, num_chunks), run_theirs(theirs, inputs))
    assert_state_loads_back(theirs, ours)


@pytest.mark.parametrize("kind", ("encoder", "decoder"))
def test_a_mapper_of_graph_networks_gives_their_numbers(kind):
    sizes = {"in_channels_src": 12, "in_channels_dst": 12, "num_channels": 12, "edge_dim": DIM}
    name = "GNNForwardMapper"
    if kind == "decoder":
        sizes["out_channels_dst"] = 3
        name = "GNNBackwardMapper"
    options = {"mlp_extra_layers": 0, "num_chunks": 1, "layer_kernels": {}}
    torch.manual_seed(5)
    theirs = getattr(their_mappers, name)(**sizes, **options, gradient_checkpointing=False)
    torch.manual_seed(5)
    ours = nn.GNNMapper(**sizes, hidden_layers=2)
    if kind == "encoder":
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert_same(ours.state_dict(), theirs.state_dict(), 0.0)
    randomise(theirs.double())
    unknown = ours.double().load_state_dict(theirs.state_dict(), strict=False)
    assert not unknown.unexpected_keys
    if kind == "decoder":  # whose destinations their encoder has embedded
        assert {name.partition(".")[0] for name in unknown.missing_keys} == {"emb_nodes_dst"}
        randomise(ours.emb_nodes_dst, seed=3)
        theirs.pre_process = lambda x: (x[0], ours.emb_nodes_dst(x[1]))
    inputs = {"src": draw(SRC, 12), "dst": draw(DST, 12), "edge_attr": draw(EDGES, DIM)}
    actual, expected = run_ours(ours, inputs), run_theirs(theirs, inputs)
    assert_same({name: actual[name] for name in expected}, expected)


def test_a_processor_of_graph_networks_gives_their_numbers():
    sizes = {"num_channels": 12, "num_layers": 2, "edge_dim": DIM}
    options = {"mlp_extra_layers": 0, "num_chunks": 1, "layer_kernels": {}}
    theirs = randomise(TheirGNNProcessor(**sizes, **options).double())
    ours = nn.GNNProcessor(**sizes, hidden_layers=2).double()
    ours.load_state_dict(
        {
            name.replace("proc.0.emb_edges", "emb_edges"): w
            for name, w in theirs.state_dict().items()
        }
    )
    edge_index = make_edges(DST)
    inputs = {"x": draw(DST, 12), "edge_attr": draw(EDGES, DIM)}

    def run_their_processor(tensors):
        shards = GraphShardInfo(nodes=[DST])
        return theirs(tensors["x"], 1, shards, tensors["edge_attr"], edge_index)

    graph = GraphStructure.from_edge_index(edge_index, DST)
    expected = differentiate(theirs, inputs, run_their_processor)
    actual = differentiate(ours, inputs, lambda t: ours(t["x"], graph, t["edge_attr"]))
    expected = {name.replace("proc.0.emb_edges", "emb_edges"): v for name, v in expected.items()}
    assert_same(actual, expected)


def assert_state_loads_back(theirs, ours):
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(randomise(ours, seed=1).state_dict())
    assert_same(theirs.state_dict(), ours.state_dict(), 0)


def test_processor_gives_their_output_and_all_their_gradients_and_state_dicts_load_both_ways():
    theirs = TheirProcessor(num_layers=3, num_chunks=1, **SIZES, **THEIRS).double()
    ours, edge_index = nn.GraphTransformerProcessor(num_layers=3, **SIZES).double(), make_edges(DST)
    ours.load_state_dict(randomise(theirs).state_dict())
    graph, shards = GraphStructure.from_edge_index(edge_index, DST), GraphShardInfo()
    inputs = {"x": draw(DST, 12), "edge_attr": draw(EDGES, DIM)}
    expected = differentiate(
        theirs, inputs, lambda t: theirs(t["x"], 1, shards, t["edge_attr"], edge_index)
    )
    assert_same(
        differentiate(ours, inputs, lambda t: ours(t["x"], graph, t["edge_attr"])), expected
    )
    assert_state_loads_back(theirs, ours)


def test_edges_and_their_trainable_attributes_are_in_the_same_order():
    generator = torch.Generator().manual_seed(2)
    edge_index = torch.stack([torch.randint(n, (EDGES,), generator=generator) for n in (SRC, DST)])
    store = HeteroData()["data", "to", "hidden"]
    store.edge_index, store.edge_length = edge_index, torch.arange(float(EDGES))[:, None]
    theirs = StaticGraphProvider(store, ["edge_length"], SRC, DST, trainable_size=2)
    graph, edge_attr = StaticEdges(edge_index, store.edge_length, (SRC, DST), trainable=2)()
    assert torch.equal(edge_attr[:, :1], theirs.edge_attr)
    assert torch.equal(graph.edge_index(), theirs.edge_index_base)
