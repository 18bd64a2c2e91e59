"""Wrong inputs, tried on purpose at the public entries: none is taken in silence, none ends in another package's words.

What a room refuses by its own rules is tested beside it; here are the wrong types, the missing parts and the sizes that nobody
would write on purpose.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import TransformerConv

from anemoi_gt import (
    EncoderProcessorDecoder,
    GraphStructure,
    GraphTransformerConv,
    GraphTransformerProcessorBlock,
    attention_weights,
    edge_attention,
    explain,
    merge,
)
from anemoi_gt.data import edges
from anemoi_gt.data.graphs import hierarchical_graph, icosphere_graph, limited_area_graph
from anemoi_gt.data.grids import grid, octahedral
from anemoi_gt.data.icosphere import icosphere, stretched_icosphere
from anemoi_gt.data.sphere import sphere
from anemoi_gt.deploy import export_model
from anemoi_gt.distributed import Partition, ShardingConfig
from anemoi_gt.integrations.pyg import swap_layers
from anemoi_gt.nn import (
    ChunkedInference,
    ConditionalLayerNorm,
    GraphTransformerBackwardMapper,
    GraphTransformerForwardMapper,
    GraphTransformerProcessor,
    split_destinations,
)
from anemoi_gt.training import Trainer, TrainingConfig
from anemoi_gt.training.loss import weighted_mse

EDGES = torch.tensor([[3, 0, 2, 1, 0], [0, 2, 0, 2, 0]])
GRAPH = GraphStructure.from_edge_index(EDGES, (4, 3))
SQUARE = GraphStructure.from_edge_index(torch.tensor([[1, 2, 0], [0, 1, 2]]), 3)
RING = torch.tensor([[0, 1, 2], [1, 2, 0]])
QUERY, KEY = torch.ones(3, 2, 8), torch.ones(4, 2, 8)
OUT, LSE = torch.ones(3, 2, 8), torch.ones(3, 2)
X, ATTRIBUTES = torch.ones(3, 16), torch.ones(3, 3)
SIZES = {"num_heads": 2, "edge_dim": 3}
BLOCK = {"in_channels": 16, "hidden_dim": 32, "out_channels": 16} | SIZES
MAPPER = {"in_channels_src": 16, "in_channels_dst": 16, "num_channels": 16} | SIZES
POINTS = octahedral(4)
ENCODER = ("data", "to", "hidden")
MESHED = icosphere_graph(POINTS, refinement=1)


def refused(calls):
    """Parametrise a test over (call, message)."""
    cases = [pytest.param(call, message, id=message[:60]) for call, message in calls]
    return pytest.mark.parametrize(("call", "message"), cases)


def raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@refused(
    [
        (lambda: attend(dropout_p="0.1"), "dropout_p must be a number, got '0.1'"),
        (lambda: attend(dropout_p=None), "dropout_p must be a number, got None"),
        (lambda: attend(scale=math.nan), "scale must be finite, or None for 1 / sqrt.channels., got nan"),
        (lambda: attend(scale=math.inf), "scale must be finite, or None .*, got inf"),
        (lambda: attend(scale="1"), "scale must be a number, got '1'"),
        (lambda: attend(scale=torch.ones(2)), "scale must be a number, got tensor"),
        (lambda: attend(config="torch"), "config must be an AttentionConfig, .*, got 'torch'"),
        (lambda: attend(config=None), "config must be an AttentionConfig, .*, got None"),
        (lambda: attention_weights(QUERY, KEY, GRAPH, config="torch"), "config must be an AttentionConfig"),
        (lambda: attention_weights(QUERY, KEY, GRAPH, scale="1"), "scale must be a number, got '1'"),
        (lambda: merge(OUT, None, OUT, LSE), "lse1 must be a tensor, got NoneType"),
        (lambda: merge(OUT.int(), LSE, OUT, LSE), "out1 must be floating point, got torch.int32"),
        (
            lambda: merge(OUT, LSE, OUT.to("meta"), LSE),
            "all tensors must be on one device, got out2 on meta and others on cpu",
        ),
    ]
)
def test_operation_names_what_it_cannot_take(call, message):
    raises(call, message)


def attend(**options):
    return edge_attention(QUERY, KEY, KEY, GRAPH, **options)


@refused(
    [
        (lambda: GraphStructure.from_edge_index(EDGES, 4.0), "num_src must be a number of nodes >= 0, got 4.0"),
        (
            lambda: GraphStructure.from_edge_index(EDGES, torch.tensor(4)),
            "num_src must be a number of nodes >= 0, got tensor",
        ),
        (lambda: numbered(4), "edge_id must have 5 entries, one per edge, got 4"),
        (lambda: numbered(9), "edge_id must have 5 entries, one per edge, got 9"),
        (
            lambda: GraphStructure.from_adj_t(None),
            "adj_t must be a torch.sparse tensor .*, got NoneType; use from_edge_index",
        ),
        (lambda: GraphStructure.from_adj_t(np.eye(3)), "adj_t must be a torch.sparse tensor .*, got ndarray"),
        (lambda: GraphStructure.disjoint(GRAPH), "disjoint must get a sequence of GraphStructures, got GraphStructure"),
        (lambda: GraphStructure.disjoint([EDGES]), "disjoint must get a sequence of GraphStructures, got Tensor"),
        (lambda: GRAPH.with_program_order([[0.0]] * 3), r"positions must be a tensor \[3, 1 to 3\], got list"),
        (lambda: GraphStructure.from_state(None), "state must map names to tensors as state_dict.. does, got NoneType"),
        (lambda: GraphStructure.from_state({"row": EDGES[0]}), "state must hold .*, got none named colptr, sources"),
        (lambda: GraphStructure(GRAPH.colptr, GRAPH.row, 4), r"sources must have shape \[num_src, 0\].*, got 4"),
    ]
)
def test_graph_names_what_it_cannot_take(call, message):
    raises(call, message)


def numbered(count):
    return GraphStructure.from_edge_index(EDGES, (4, 3), edge_id=torch.arange(count))


def test_sizes_of_numpy_are_sizes():
    graph = GraphStructure.from_edge_index(EDGES, (np.int64(4), np.int64(3)))
    assert (graph.num_src, graph.num_dst) == (4, 3)


@refused(
    [
        (lambda: GraphTransformerConv(6, 8, heads="2"), "heads must be a whole number, got '2'"),
        (lambda: GraphTransformerConv(6, 8.0), "out_channels must be a whole number, got 8.0"),
        (lambda: GraphTransformerConv(0, 8), "in_channels must be at least 1, or -1 .*, got 0"),
        (lambda: GraphTransformerConv(None, 8), "in_channels must be a whole number, or -1 .*, got None"),
        (lambda: GraphTransformerConv((6, 6, 6), 8), "in_channels must be a number or a pair"),
        (lambda: GraphTransformerConv(6, 8, edge_dim=-5), "edge_dim must be at least 1, or None .*, got -5"),
        (lambda: GraphTransformerConv(6, 8, edge_dim="3"), "edge_dim must be a whole number, or None .*, got '3'"),
        (lambda: GraphTransformerConv(6, 8, dropout=None), "dropout must be a number, got None"),
        (lambda: GraphTransformerConv(6, 8, config="torch"), "config must be an AttentionConfig"),
        (lambda: GraphTransformerConv(16, 8)(None, RING), r"x must be a tensor or a pair .*, got \(NoneType\)"),
        (lambda: GraphTransformerConv(16, 8)(X.long(), RING), "x_src must be floating point, got torch.int64; cast it"),
        (
            lambda: GraphTransformerConv(16, 8)(X.double(), RING),
            "x_src must have the dtype of the weights, torch.float32, got torch.float64",
        ),
        (
            lambda: GraphTransformerConv(16, 8)(X, RING + 1),
            "source .* must hold values in 0 .. 2, .* got values from 1 to 3",
        ),
        (
            lambda: GraphTransformerConv(16, 8)(X, RING - 1),
            "source .* must hold values in 0 .. 2, .* got values from -1 to 1",
        ),
        (lambda: swap_layers(None), "model must be a torch.nn.Module, got None"),
        (lambda: swap_layers(TransformerConv(4, 8), "torch"), "config must be an AttentionConfig"),
    ]
)
def test_layer_names_what_it_cannot_take(call, message):
    raises(call, message)


@refused(
    [
        (lambda: block(num_heads=2.0), "num_heads must be a whole number, got 2.0"),
        (lambda: block(edge_dim=None), "edge_dim must be a whole number, got None"),
        (lambda: block(hidden_dim="32"), "hidden_dim must be a whole number, got '32'"),
        (lambda: block(dropout="x"), "dropout must be a number, got 'x'"),
        (lambda: block(layer_kernels={}), "layer_kernels must have the attributes Linear, .*, got dict without Linear"),
        (lambda: block(config=None), "config must be an AttentionConfig"),
        (lambda: block()(X.int(), SQUARE, ATTRIBUTES), "x must be floating point, got torch.int32"),
        (lambda: block()(X, SQUARE, ATTRIBUTES, cond="c"), "cond must be None, .* got str"),
        (
            lambda: ConditionalLayerNorm(16, 4)(X, torch.ones(1, 5)),
            r"cond must have shape \[..., 3 or 1, 4\], got \(1, 5\)",
        ),
        (
            lambda: ConditionalLayerNorm(16, 4)(X, torch.ones(2, 4)),
            r"cond must have shape \[..., 3 or 1, 4\], got \(2, 4\)",
        ),
        (lambda: processor(num_layers=1.5), "num_layers must be a whole number, got 1.5"),
        (lambda: processor(checkpoint_groups=1.5), "checkpoint_groups must be a whole number, or None, got 1.5"),
        (lambda: processor(mlp_hidden_ratio="4"), "mlp_ratio must be a number, got '4'"),
        (lambda: processor(num_channels=None), "channels must be a whole number, got None"),
        (lambda: forward_mapper(in_channels_src=0), "in_channels_src must be at least 1, got 0"),
        (lambda: forward_mapper(in_channels_dst=-1), "in_channels_dst must be at least 1, got -1"),
        (lambda: backward_mapper(0), "out_channels_dst must be at least 1, got 0"),
        (lambda: backward_mapper("1"), "out_channels_dst must be a whole number, got '1'"),
        (lambda: forward_mapper()((X, X), RING, ATTRIBUTES), "graph must be a GraphStructure, got Tensor"),
        (
            lambda: forward_mapper()((X, X), [SQUARE], ATTRIBUTES),
            "at least one piece from split_destinations, got GraphStructure",
        ),
        (lambda: split_destinations(RING, 1), "graph must be a GraphStructure, got Tensor"),
        (lambda: split_destinations(SQUARE, "2"), "num_chunks must be a whole number, got '2'"),
        (lambda: ChunkedInference(SQUARE, "1"), "num_chunks must be a whole number, got '1'"),
        (lambda: ChunkedInference(SQUARE, rows=1.5), "rows must be a whole number, got 1.5"),
    ]
)
def test_part_of_a_model_names_what_it_cannot_take(call, message):
    raises(call, message)


def block(**options):
    return GraphTransformerProcessorBlock(**{**BLOCK, **options})


def processor(**options):
    return GraphTransformerProcessor(**{"num_layers": 2, "num_channels": 16, **SIZES, **options})


def forward_mapper(**options):
    return GraphTransformerForwardMapper(**{**MAPPER, **options})


def backward_mapper(out):
    return GraphTransformerBackwardMapper(out_channels_dst=out, **MAPPER)


@refused(
    [
        (lambda: model(graph=None), "graph must be a HeteroData, .*, got NoneType"),
        (lambda: model(graph=HeteroData()), "graph must have nodes 'data' with positions"),
        (lambda: model(in_channels="2"), "in_channels must be a whole number, got '2'"),
        (
            lambda: model(in_channels={"data": "2"}, out_channels={"data": 1}),
            r"in_channels\['data'\] must be a whole number, got '2'",
        ),
        (lambda: model(channels="16"), "channels must be a whole number, got '16'"),
        (
            lambda: model(trainable_nodes=None),
            "trainable must be a whole number, the number of trained features of a node, got None",
        ),
        (
            lambda: model(trainable_edges=1.5),
            "trainable must be a whole number, the number of trained attributes .*, got 1.5",
        ),
        (lambda: model(mapper_chunks="2"), "num_chunks must be a whole number, got '2'"),
        (lambda: model(config="torch"), "config must be an AttentionConfig"),
        (lambda: model()(torch.ones(1, 208, 2).long()), "x must be floating point, got torch.int64"),
        (
            lambda: model()(torch.ones(1, 208, 2).double()),
            "x must have the dtype of the weights, torch.float32, got torch.float64",
        ),
        (
            lambda: model(graph=spoiled(MESHED[ENCODER].edge_length * math.nan)),
            "edge_attr must be finite, got NaN or infinity",
        ),
        (lambda: model(graph=spoiled([1.0])), "edge_length of edges .* must be a tensor, got list"),
        (lambda: export_model(None, torch.ones(1, 208, 2), 1), "model must be a torch.nn.Module, got NoneType"),
    ]
)
def test_model_names_what_it_cannot_take(call, message):
    raises(call, message)


def model(in_channels=2, out_channels=1, **options):
    graph = options.pop("graph", MESHED)
    return EncoderProcessorDecoder(
        graph, in_channels, out_channels, **{"channels": 16, "heads": 2, "num_layers": 1, **options}
    )


def spoiled(edge_length):
    """The graph with other lengths of its encoder's edges."""
    graph = icosphere_graph(POINTS, refinement=1)
    graph[ENCODER].edge_length = edge_length
    return graph


@refused(
    [
        (lambda: TrainingConfig(steps="5"), "training.steps must be a whole number, got '5'"),
        (lambda: TrainingConfig(steps=2.5), "training.steps must be a whole number, got 2.5"),
        (lambda: TrainingConfig(batch_size=True), "training.batch_size must be a whole number, got True"),
        (lambda: TrainingConfig(learning_rate="1e-3"), "training.learning_rate must be a number, got '1e-3'"),
        (lambda: TrainingConfig(seed=1.5), "training.seed must be a whole number, got 1.5"),
        (lambda: TrainingConfig(threads=1.5), "training.threads must be a whole number, or null, got 1.5"),
        (lambda: Trainer(torch.nn.Linear(1, 1), None, {}, Path(), {}), "config must be a TrainingConfig, got {}"),
        (
            lambda: weighted_mse(torch.ones(1, 3, 2), torch.ones(1, 3, 1), torch.ones(3)),
            r"output must have the shape of target, \(1, 3, 1\), got \(1, 3, 2\)",
        ),
        (lambda: ShardingConfig("edges", model="2"), "sharding.model must be a whole number, got '2'"),
        (lambda: ShardingConfig("edges", model=1.5), "sharding.model must be a whole number, got 1.5"),
        (lambda: ShardingConfig(timeout="5"), "sharding.timeout must be a number, got '5'"),
        (lambda: ShardingConfig(overlap="no"), "sharding.overlap must be true or false, got 'no'"),
        (lambda: Partition.balanced([1, 1], 2), r"cost must be a tensor \[N\], got list"),
        (lambda: Partition.balanced(torch.ones(3).long(), 0), "the number of parts must be at least 1, got 0"),
        (
            lambda: explain(GraphTransformerConv(16, 8), X, RING).with_profile(None),
            "profile must be a torch.profiler.profile",
        ),
    ]
)
def test_run_names_what_it_cannot_take(call, message):
    raises(call, message)


@refused(
    [
        (lambda: grid(None), 'grid must be "O" or "N" and a number of rows, .*, got None'),
        (lambda: octahedral("8"), "n must be a whole number, .*, got '8'"),
        (lambda: icosphere(1.5), "refinement must be a whole number, got 1.5"),
        (lambda: stretched_icosphere(1, "2", POINTS, 0), "area_refinement must be a whole number, got '2'"),
        (lambda: icosphere_graph("O4", refinement=1), r"source must be Nodes, as grid\('O96'\) .*, got str"),
        (
            lambda: icosphere_graph(POINTS, refinement=1, cutoff=1e-9),
            "cutoff must let the hidden mesh reach data nodes, .* raise it",
        ),
        (lambda: icosphere_graph(POINTS, refinement=1, cutoff="a"), "factor must be a number, got 'a'"),
        (lambda: icosphere_graph(POINTS, refinement=1, nearest=1.5), "k must be a whole number, got 1.5"),
        (lambda: hierarchical_graph(POINTS, refinements=3), r"refinements must be two or more, .*, got \[3\]"),
        (lambda: hierarchical_graph(POINTS, refinements=("3", "2")), "refinement must be a whole number, got '3'"),
        (lambda: limited_area_graph(POINTS, refinement=1, margin="a"), "margin must be a number, got 'a'"),
        (lambda: edges.cutoff(3, POINTS, 1.0), "source must be Nodes, .*, got int"),
        (lambda: sphere("O4", train_size=1.5, valid_size=1, test_size=1), "train_size must be a whole number, got 1.5"),
        (
            lambda: sphere("O4", train_size=1, valid_size=1, test_size=1, lead_time=math.inf),
            "lead_time must be positive and finite, in hours, got inf",
        ),
    ]
)
def test_data_name_what_they_cannot_take(call, message):
    raises(call, message)
