"""Wrong types, missing parts and odd sizes at the public entry points: none is accepted silently.

What Python, PyTorch or PyG answers with a clear error of its own is left to them. What a package
refuses by its own rules is tested with it.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from support.refusals import options, raises, refused
from torch_geometric.data import HeteroData
from torch_geometric.nn import TransformerConv

from anemoi_gt import (
    EncoderProcessorDecoder,
    GraphStructure,
    GraphTransformerConv,
    attention_weights,
    edge_attention,
    merge,
    nn,
)
from anemoi_gt.app.datasets.sphere_advection import Flow, sphere
from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.step import weighted_mse
from anemoi_gt.data import graphs
from anemoi_gt.data.edge_attributes import edge_direction, edge_length
from anemoi_gt.data.grids import classic, grid, octahedral
from anemoi_gt.data.meshes import icosphere, stretched_icosphere
from anemoi_gt.data.nodes import Nodes, area_weights
from anemoi_gt.distributed import Partition, ShardingConfig
from anemoi_gt.distributed.graph_shard import LocalExchange
from anemoi_gt.integrations.pyg import swap_layers
from anemoi_gt.nn import (
    ConditionalLayerNorm,
    LayerKernels,
    StaticEdges,
    StaticNodes,
    split_destinations,
)
from anemoi_gt.option_checks import check_integer, check_number, check_probability

EDGES = torch.tensor([[3, 0, 2, 1, 0], [0, 2, 0, 2, 0]])
from_edge_index = GraphStructure.from_edge_index
GRAPH = from_edge_index(EDGES, (4, 3))
RING = torch.tensor([[0, 1, 2], [1, 2, 0]])
QUERY = torch.ones(3, 2, 8)
KEY = torch.ones(4, 2, 8)
LSE = torch.ones(3, 2)
POINTS = octahedral(4)
AREA = (60, 0, 30, 30)
SQUARE = from_edge_index(torch.tensor([[1, 2, 0], [0, 1, 2]]), 3)
X = torch.ones(3, 16)
ATTRIBUTES = torch.ones(3, 3)
SIZES = {"num_heads": 2, "edge_dim": 3}
BLOCK = {"in_channels": 16, "hidden_dim": 32, "out_channels": 16} | SIZES
NARROW = torch.ones(3, 15)
WIDTH = r"{} must have shape \[N, 16\] or \[B, N, 16\], got \(3, 15\)"
PAIR = r"x must be a pair of tensors \(x_src, x_dst\), "
NO_GRAPH = r"graph must be a GraphStructure, got Tensor; .*from_edge_index"
MAPPER = {"in_channels_src": 16, "in_channels_dst": 16, "num_channels": 16} | SIZES
ONE = torch.ones(1, 4)  # a condition
PROCESSOR = {"num_layers": 2, "num_channels": 16} | SIZES
BLOCKS = (nn.GraphTransformerProcessorBlock(**BLOCK), nn.GraphTransformerProcessor(**PROCESSOR))
ONE_SET = (GraphTransformerConv(16, 8, heads=2, edge_dim=3), *BLOCKS)  # layers on one set of nodes
PAIRED = (nn.GraphTransformerMapperBlock(**BLOCK), nn.GraphTransformerForwardMapper(**MAPPER))
CONV = GraphTransformerConv(16, 8)
BIPARTITE = GraphTransformerConv((16, 16), 8)
WITH_EDGES = GraphTransformerConv((16, 16), 8, edge_dim=3)
AGAINST_EDGES = GraphTransformerConv((16, 16), 8, flow="target_to_source")
ENDS = (torch.ones(4, 16), X)
OF_EDGES = torch.ones(5, 3)
NORM = ConditionalLayerNorm(16, 4)
CHUNKS = split_destinations(SQUARE, 2)
FIELDS = torch.ones(1, 208, 2)
ENCODER = ("data", "to", "hidden")
MESHED = graphs.icosphere_graph(POINTS, refinement=1)
LENGTH = MESHED[ENCODER].edge_length
TURNED = MESHED[ENCODER].edge_index.T
CONDITIONAL = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=4))


def attend(**wrong):
    return edge_attention(QUERY, KEY, KEY, GRAPH, **wrong)


def with_ids(count):
    return from_edge_index(EDGES, (4, 3), global_edge_id=torch.arange(count))


def meshed(**wrong):
    return graphs.icosphere_graph(POINTS, refinement=1, **wrong)


def tracer(**wrong):
    return sphere("O4", **{"train_size": 2, "valid_size": 1, "test_size": 1} | wrong).train


def block(**wrong):
    return nn.GraphTransformerProcessorBlock(**{**BLOCK, **wrong})


def conditioned(cond):
    return nn.GraphTransformerMapperBlock(**BLOCK, layer_kernels=CONDITIONAL)(
        (X, X), SQUARE, ATTRIBUTES, cond=cond
    )


def processor(**wrong):
    return nn.GraphTransformerProcessor(**PROCESSOR | wrong)


def forward_mapper(**wrong):
    return nn.GraphTransformerForwardMapper(**{**MAPPER, **wrong})


def mapped(graph, edge_attr, layer_kernels=None, **wrong):
    return forward_mapper(layer_kernels=layer_kernels or LayerKernels())(
        (X, X), graph, edge_attr, **wrong
    )


def backward_mapper(out):
    return nn.GraphTransformerBackwardMapper(out_channels_dst=out, **MAPPER)


def model(in_channels=2, out_channels=1, **wrong):
    graph = wrong.pop("graph", MESHED)
    sizes = {"channels": 16, "heads": 2, "num_layers": 1}
    return EncoderProcessorDecoder(graph, in_channels, out_channels, **sizes | wrong)


def spoiled(**fields):
    graph = graphs.icosphere_graph(POINTS, refinement=1)
    graph[ENCODER].update(fields)
    return graph


@refused(
    *options(attend, "be a number", dropout_p="0.1", scale="1"),
    *(
        (lambda x=x: attend(scale=x), f"scale must be finite, or None for 1 / sqrt.*, got {x}")
        for x in (math.nan, math.inf)
    ),
    *options(attend, "be a KernelConfig", config=None),
    *options(partial(attention_weights, QUERY, KEY, GRAPH), "be a", config="torch", scale="1"),
    (lambda: merge(QUERY.int(), LSE, QUERY, LSE), "out1 must be floating point, got torch.int32"),
)
def test_the_operation_names_wrong_arguments(wrong, message):
    raises(wrong, message)


@refused(
    (
        lambda: from_edge_index(EDGES, torch.tensor(4)),
        "num_src must be a number of nodes >= 0, got tensor",
    ),
    *(
        (lambda n=n: with_ids(n), f"global_edge_id must have 5 entries, one per edge, got {n}")
        for n in (4, 9)
    ),
    (
        lambda: LocalExchange(QUERY, is_prepared=True).wait(),
        "prepared rows must be awaited by wait_halo",
    ),
    (
        lambda: GraphStructure(GRAPH.colptr, GRAPH.row, 4),
        r"sources must be a tensor \[num_src, 0\].*, got int",
    ),
)
def test_the_graph_names_wrong_arguments(wrong, message):
    raises(wrong, message)


def test_numpy_integers_are_sizes():
    graph = from_edge_index(EDGES, (np.int64(4), np.int64(3)))
    assert (graph.num_src, graph.num_dst) == (4, 3)


@refused(
    *options(TrainingConfig, "be an integer", steps="5", batch_size=True, seed=1.5, threads=1.5),
    *options(TrainingConfig, "be a number", learning_rate="1e-3"),
    (
        lambda: weighted_mse(QUERY, QUERY[:1], LSE),
        r"output must have the shape of target, .*, got \(3, 2, 8\)",
    ),
    *options(partial(ShardingConfig, "edges"), "be a", model=1.5, timeout="5"),
    (lambda: Partition.balanced(torch.ones(3).long(), 0), "num_ranks must be at least 1, got 0"),
)
def test_a_run_names_wrong_arguments(wrong, message):
    raises(wrong, message)


@refused(
    *options(tracer, "be", lead_time=math.inf, seed=-1, train_size=1.5),
    *options(
        partial(graphs.limited_area_graph, POINTS, refinement=1), "be a", margin="a", nearest="a"
    ),
    (lambda: grid(None), 'grid must be "O" or "N" followed by a number of rows, .*, got None'),
    (lambda: octahedral("8"), "n must be an integer, .*, got '8'"),
    (lambda: icosphere(1.5), "refinement must be an integer, got 1.5"),
    (lambda: stretched_icosphere(1, "2", POINTS, 0), "area_refinement must be an integer, got '2'"),
    (lambda: meshed(cutoff=1e-9), "cutoff must connect data nodes to the hidden mesh, .* raise it"),
    (lambda: meshed(cutoff="a"), "factor must be a number, got 'a'"),
    (lambda: meshed(nearest=1.5), "k must be an integer, got 1.5"),
    (lambda: classic("320"), "n must be an integer, the number of rows .*, got '320'"),
    (
        lambda: edge_length(POINTS, POINTS, RING),
        r"edge_index must be a NumPy array \[2, E\], got Tensor",
    ),
    (
        lambda: edge_direction(POINTS, POINTS, np.zeros((2, 3))),
        r"edge_index must be integers .* got float64 \(2, 3\)",
    ),
    (
        lambda: area_weights(Nodes([1, 1, 2, 2, 50], [1, 1, 2, 3, 9])),
        "all at distinct positions, got 5",
    ),
    (
        lambda: area_weights(Nodes([0, 0, 0, 0], [0, 90, 180, 270])),
        "nodes must be at least four, .*, got 4",
    ),
    (lambda: tracer(flows="rotation"), "flows must be one or more of rotation, deformation, got"),
    (
        lambda: tracer(flows=[["rotation"]]),
        "flows must be one or more of rotation, deformation, got",
    ),
)
def test_data_names_wrong_arguments(wrong, message):
    raises(wrong, message)


@pytest.mark.parametrize("part", ["inputs", "present", "truth", "title"])
def test_a_missing_sample_is_not_made(part):
    with pytest.raises(IndexError, match=r"sample index must be in \[0, 2\), got 2"):
        getattr(tracer(), part)(2)


def test_flows_accept_lists():
    flow = Flow([1, 0, 0], [0, 1, 0])
    assert np.isfinite(flow.wind(POINTS.xyz, 0.0)).all()


@refused(
    *(
        (check_integer, x, f"^x must be an integer, or null, got {x!r}$")
        for x in (2.0, "2", True, None, math.nan)
    ),
    (check_integer, 0, "^x must be at least 1, or null, got 0$"),
    *((check_number, x, "^x must be a number, got ") for x in ("1", None, True, [1.0])),
    *(
        (check_probability, x, "^x must be a probability in 0 .. 1, got ")
        for x in (-0.1, 1.1, math.nan, math.inf)
    ),
)
def test_what_is_not_an_integer_in_range_a_number_or_a_probability_is_refused(wrong, message):
    check, value = wrong
    raises(
        lambda: check("x", value, **{"note": ", or null"} if check is check_integer else {}),
        message,
    )


def test_numpy_numbers_and_unbounded_integers_are_allowed():
    check_integer("heads", np.int64(2))
    check_integer("heads", -3, least=None)
    check_probability("dropout", np.float32(0.5))


@refused(
    *options(partial(GraphTransformerConv, 6), "be an integer", out_channels=8.0),
    *options(partial(GraphTransformerConv, out_channels=8), "be an integer", in_channels=None),
    *options(partial(GraphTransformerConv, out_channels=8), "be at least 1, or -1", in_channels=0),
    *options(
        partial(GraphTransformerConv, 6, 8),
        "be a",
        heads="2",
        edge_dim="3",
        dropout=None,
        config="torch",
    ),
    *options(partial(GraphTransformerConv, 6, 8), "be at least 1, or None", edge_dim=-5),
    (lambda: GraphTransformerConv((6, 6, 6), 8), "too many values to unpack"),
    (lambda: CONV(None, RING), r"x_src must be a tensor .*, got NoneType"),
    (lambda: CONV(X.long(), RING), "x_src must be floating point, got torch.int64; cast it"),
    (
        lambda: CONV(X.double(), RING),
        "x_src must have the dtype of the weights, .*float32, got .*float64",
    ),
    *(
        (lambda n=n: CONV(X, RING + n), f"source .* in 0 .. 2, .* got values from {n} to {n + 2}")
        for n in (1, -1)
    ),
    (
        lambda: CONV(torch.ones(5, 16), SQUARE),
        r"x must have 3 rows, one per source of the graph, got \(5, 16\)",
    ),
    (
        lambda: CONV((torch.ones(2, 4, 16), X), GRAPH),
        r"must have the same batch .*, got \(2, 4, 16\) and \(3, 16\)",
    ),
    (
        lambda: WITH_EDGES((ENDS[0], None), EDGES, OF_EDGES),
        r"x_dst must be a tensor .*, got NoneType",
    ),
    (lambda: WITH_EDGES((*ENDS, X), EDGES, OF_EDGES), "too many values to unpack"),
    (
        lambda: WITH_EDGES((ENDS[0][0], X), EDGES, OF_EDGES),
        r"x_src must have shape .* got \(16,\)",
    ),
    (
        lambda: WITH_EDGES(ENDS, EDGES),
        "edge_attr must be passed if and only if .* got none and edge_dim=3",
    ),
    (lambda: BIPARTITE(ENDS, EDGES, OF_EDGES), r"got shape \(5, 3\) and edge_dim=None"),
    (
        lambda: WITH_EDGES(ENDS, EDGES, OF_EDGES[1:]),
        r"edge_attr must have shape .* got \(4, 3\)",
    ),
    (
        lambda: WITH_EDGES(ENDS, GRAPH, OF_EDGES[:, 1:]),
        r"edge_attr must have shape .* got \(5, 2\)",
    ),
    (
        lambda: WITH_EDGES(ENDS, EDGES[0], OF_EDGES),
        r"edge_index must have shape \[2, E\] .* got \(5,\)",
    ),
    (
        lambda: WITH_EDGES(ENDS, EDGES.float(), OF_EDGES),
        "edge_index must have dtype int32 or int64, got .*float32",
    ),
    (
        lambda: WITH_EDGES(ENDS, "edges", OF_EDGES),
        "edge_index must be a tensor .*, got str",
    ),
    (
        lambda: AGAINST_EDGES(ENDS, GRAPH),
        "'target_to_source' must be used with an edge_index .* got GraphStructure",
    ),
    (
        lambda: GraphTransformerConv(-1, 8)(X.long(), RING),
        "x_src must be floating point, got torch.int64; cast it",
    ),
    (
        lambda: GraphTransformerConv(-1, 8)(X[:, :0], RING),
        r"x_src must have at least one feature, got \(3, 0\)",
    ),
    (
        lambda: from_edge_index([[0], [1]], (2, 2)),
        r"edge_index must be a tensor \[2, E\] .*, got list",
    ),
    *options(
        partial(swap_layers, torch.nn.ModuleList([TransformerConv(4, 8)])),
        "be one of",
        backend="cuda",
    ),
)
def test_a_layer_names_wrong_arguments(wrong, message):
    raises(wrong, message)


@refused(
    *options(
        block, "be a", num_heads=2.0, edge_dim=None, hidden_dim="32", dropout="x", config=None
    ),
    *(
        (lambda layer=layer: layer(NARROW, SQUARE, ATTRIBUTES), WIDTH.format("x\\w*"))
        for layer in ONE_SET
    ),
    *(
        (lambda layer=layer: layer((X, NARROW), SQUARE, ATTRIBUTES), WIDTH.format("x_dst"))
        for layer in PAIRED
    ),
    *((lambda layer=layer: layer(X, SQUARE, ATTRIBUTES), PAIR + "got Tensor") for layer in PAIRED),
    *(
        (lambda layer=layer: layer((X,) * 3, SQUARE, ATTRIBUTES), PAIR + "got 3 elements")
        for layer in PAIRED
    ),
    *(
        (lambda layer=layer: layer([1.0], SQUARE, ATTRIBUTES), "x must be a tensor .*, got list")
        for layer in BLOCKS
    ),
    *((lambda layer=layer: layer(X, RING, ATTRIBUTES), NO_GRAPH) for layer in BLOCKS),
    (lambda: block()(X, object(), ATTRIBUTES), "graph must be a GraphStructure, got object"),
    (
        lambda: block()(torch.ones(4, 16), GRAPH, ATTRIBUTES),
        "x must have 3 rows, one per destination of the graph",
    ),
    (lambda: block()(X, SQUARE, None), "edge_weight must come with edge_attr .*, got .* None"),
    (lambda: block()(X, SQUARE, X), r"edge_attr must have shape \[E, D\] .*, got \(3, 16\)"),
    (lambda: block()(X.int(), SQUARE, ATTRIBUTES), "x must be floating point, got torch.int32"),
    (lambda: NORM(X, torch.ones(1, 5)), r"cond must have shape \[..., 3 or 1, 4\], got \(1, 5\)"),
    (lambda: NORM(X, torch.ones(2, 4)), r"cond must have shape \[..., 3 or 1, 4\], got \(2, 4\)"),
    (lambda: ConditionalLayerNorm("16"), "normalized_shape must be an integer, got '16'"),
    (lambda: ConditionalLayerNorm(16, 0), "condition_shape must be at least 1, got 0"),
    (
        lambda: conditioned(torch.ones(2, 4)),
        r"cond must be a pair \(cond_src, cond_dst\), .* got Tensor",
    ),
    (lambda: conditioned((ONE,) * 3), "cond must be a pair .* got 3 elements"),
    *options(processor, "be an integer", num_layers=1.5, checkpoint_groups=1.5),
    (
        lambda: processor(checkpoint_groups=2)(X.numpy(), SQUARE, ATTRIBUTES),
        r"x must be a tensor .*, got ndarray",
    ),
    *options(forward_mapper, "be at least 1", in_channels_src=0, in_channels_dst=-1),
    *((partial(backward_mapper, n), f"out_channels_dst must be a.*, got {n!r}") for n in (0, "1")),
    (lambda: mapped(RING, ATTRIBUTES), "graph must be a GraphStructure, got Tensor"),
    (
        lambda: mapped([SQUARE], ATTRIBUTES),
        "or its chunks from split_destinations, got a list of GraphStructure",
    ),
    (
        lambda: mapped(CHUNKS[:1], ATTRIBUTES),
        r"graph must hold all chunks .*, in order, got destinations \[\(0, 1\)\]",
    ),
    (
        lambda: mapped(CHUNKS[::-1], ATTRIBUTES),
        r"in order, got destinations \[\(1, 3\), \(0, 1\)\]",
    ),
    (lambda: mapped(split_destinations(SQUARE, 1) * 2, ATTRIBUTES), "all chunks of one"),
    (
        lambda: mapped(CHUNKS, ATTRIBUTES.numpy()),
        "edge_attr must be a tensor of 3 rows, .* whole graph, got ndarray",
    ),
    (lambda: StaticNodes(np.zeros((3, 2))), r"positions must be a tensor \[N, 2\], .* got ndarray"),
    (lambda: StaticEdges(RING, None, 3), r"edge_attr must be a tensor \[3, D\], .*, got NoneType"),
    (lambda: split_destinations(RING, 1), "graph must be a GraphStructure, got Tensor"),
    (lambda: split_destinations(SQUARE, "2"), "num_chunks must be an integer, got '2'"),
    (
        lambda: block(layer_kernels=CONDITIONAL)(X, CHUNKS, ATTRIBUTES, cond=(ONE,) * 2),
        "cond_src must be a tensor of 3 rows, .* or one for all, got tuple",
    ),
)
def test_a_part_of_a_model_names_wrong_arguments(wrong, message):
    raises(wrong, message)


@refused(
    (lambda: model(graph=HeteroData()), "graph must have nodes 'data' with positions"),
    (
        lambda: model({"data": "2"}, {"data": 1}),
        r"in_channels\['data'\] must be an integer, got '2'",
    ),
    *options(model, "be a", config="torch", in_channels="2"),
    (
        lambda: model(trainable_nodes=None),
        "trainable must be an integer, .* trainable features of a node, got None",
    ),
    (
        lambda: model(trainable_edges=1.5),
        "trainable must be an integer, .* trainable attributes .*, got 1.5",
    ),
    (lambda: model(mapper_chunks="2"), "num_chunks must be an integer, got '2'"),
    (lambda: model()(FIELDS.long()), "x must be floating point, got torch.int64"),
    (
        lambda: model()(FIELDS.double()),
        "x must have the dtype of the weights, .*float32, got .*float64",
    ),
    (
        lambda: model(graph=spoiled(edge_length=LENGTH * math.nan)),
        "edge_attr must be finite, got NaN or infinity",
    ),
    (
        lambda: model(graph=spoiled(edge_index=TURNED)),
        r"edge_index must have shape \[2, E\] .*, got \(\d+, 2\)",
    ),
    (lambda: model()([1.0]), r"x must be a tensor \[B, 208, 2\], got list"),
)
def test_a_model_names_wrong_arguments(wrong, message):
    raises(wrong, message)
