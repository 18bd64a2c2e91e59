"""Wrong types, missing parts and odd sizes at the public entry points: none is accepted silently.

None ends in an error of another package either. What a package refuses by its own rules is tested
with it.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.refusals import options, raises, refused

from anemoi_gt import GraphStructure, GraphTransformerConv, attention_weights, edge_attention, merge
from anemoi_gt.app.datasets.sphere_advection import Flow, sphere
from anemoi_gt.app.training import Trainer, TrainingConfig
from anemoi_gt.app.training.step import weighted_mse
from anemoi_gt.data import edges, graphs
from anemoi_gt.data.edge_attributes import edge_direction, edge_length
from anemoi_gt.data.grids import classic, grid, octahedral
from anemoi_gt.data.meshes import icosphere, limited_area_icosphere, stretched_icosphere
from anemoi_gt.data.nodes import Nodes, area_weights
from anemoi_gt.distributed import Partition, ShardingConfig
from anemoi_gt.distributed.graph_shard import LocalExchange
from anemoi_gt.option_checks import check_integer, check_number, check_probability

EDGES = torch.tensor([[3, 0, 2, 1, 0], [0, 2, 0, 2, 0]])
from_edge_index = GraphStructure.from_edge_index
GRAPH = from_edge_index(EDGES, (4, 3))
RING = torch.tensor([[0, 1, 2], [1, 2, 0]])
QUERY = torch.ones(3, 2, 8)
KEY = torch.ones(4, 2, 8)
LSE = torch.ones(3, 2)
POINTS = octahedral(4)
CONV = GraphTransformerConv(8, 8)
AREA = (60, 0, 30, 30)


def attend(**wrong):
    return edge_attention(QUERY, KEY, KEY, GRAPH, **wrong)


def with_ids(count):
    return from_edge_index(EDGES, (4, 3), global_edge_id=torch.arange(count))


def meshed(**wrong):
    return graphs.icosphere_graph(POINTS, refinement=1, **wrong)


def tracer(**wrong):
    return sphere("O4", **{"train_size": 2, "valid_size": 1, "test_size": 1} | wrong).train


@refused(
    *options(attend, "be a number", dropout_p="0.1", scale="1"),
    *(
        (lambda x=x: attend(scale=x), f"scale must be finite, or None for 1 / sqrt.*, got {x}")
        for x in (math.nan, math.inf)
    ),
    *options(attend, "be a KernelConfig", config=None),
    *options(partial(attention_weights, QUERY, KEY, GRAPH), "be a", config="torch", scale="1"),
    (lambda: merge(QUERY, None, QUERY, LSE), "lse1 must be a tensor, got NoneType"),
    (lambda: merge(QUERY.int(), LSE, QUERY, LSE), "out1 must be floating point, got torch.int32"),
    (
        lambda: merge(QUERY, LSE, QUERY.to("meta"), LSE),
        "must be on one device, got out2 on meta and out1 on cpu",
    ),
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
        lambda: GraphStructure.from_adj_t(None),
        "adj_t must be a torch.sparse tensor .* NoneType; use from_edge_index",
    ),
    (
        lambda: GraphStructure.from_adj_t(np.eye(3)),
        "adj_t must be a torch.sparse tensor .*, got ndarray",
    ),
    (
        lambda: GraphStructure.disjoint(GRAPH),
        "disjoint must get a sequence of GraphStructures, got GraphStructure",
    ),
    (
        lambda: GraphStructure.disjoint([EDGES]),
        "disjoint must get a sequence of GraphStructures, got Tensor",
    ),
    (
        lambda: LocalExchange(QUERY, is_prepared=True).wait(),
        "prepared rows must be awaited by wait_halo",
    ),
    (
        lambda: GraphStructure.from_state(None),
        "state must be a dict of tensors from state_dict.., got NoneType",
    ),
    (
        lambda: GraphStructure.from_state({"row": EDGES[0]}),
        "state must hold .*, got no colptr, sources",
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
        lambda: Trainer(torch.nn.Linear(1, 1), None, {}, Path(), {}),
        "config must be a TrainingConfig, got {}",
    ),
    (
        lambda: weighted_mse(QUERY, QUERY[:1], LSE),
        r"output must have the shape of target, .*, got \(3, 2, 8\)",
    ),
    *options(partial(ShardingConfig, "edges"), "be a", model=1.5, timeout="5"),
    (lambda: Partition.balanced([1, 1], 2), r"cost must be a tensor \[N\], got list"),
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
    (
        lambda: graphs.icosphere_graph("O4", refinement=1),
        r"source must be Nodes, such as grid\('O96'\) .*, got str",
    ),
    (lambda: meshed(cutoff=1e-9), "cutoff must connect data nodes to the hidden mesh, .* raise it"),
    (lambda: meshed(cutoff="a"), "factor must be a number, got 'a'"),
    (lambda: meshed(nearest=1.5), "k must be an integer, got 1.5"),
    (
        lambda: graphs.hierarchical_graph(POINTS, refinements=3),
        r"refinements must be two or more, .*, got \[3\]",
    ),
    (
        lambda: graphs.hierarchical_graph(POINTS, refinements=("3", "2")),
        "refinement must be an integer, got '3'",
    ),
    (lambda: edges.cutoff(3, POINTS, 1.0), "source must be Nodes, .*, got int"),
    (lambda: Nodes("a", [0.0]), "lat must be a vector of numbers, in degrees, got 'a'"),
    (lambda: Nodes([0.0], [[1.0], [1.0, 2.0]]), "lon must be a vector of numbers, in degrees, got"),
    (lambda: classic("320"), "n must be an integer, the number of rows .*, got '320'"),
    (
        lambda: icosphere(2, levels=2),
        r"levels must be one or more of 0 to 2, .* such as \(1, 2\), got 2",
    ),
    (lambda: icosphere(2, levels=([1],)), "levels must be one or more of 0 to 2"),
    (lambda: limited_area_icosphere(2, None), "area must be Nodes, .*, got NoneType"),
    (lambda: graphs.limited_area_graph("O4", refinement=2), "nodes must be Nodes, .*, got str"),
    (
        lambda: graphs.stretched_graph(None, refinement=1, area_refinement=2, area=AREA),
        "nodes must be Nodes, .*NoneType",
    ),
    (
        lambda: graphs.encoder_processor_decoder(POINTS, POINTS),
        r"mesh must be a Mesh, .* got Nodes",
    ),
    (lambda: edges.grid_spacing("O4"), "nodes must be Nodes, .*, got str"),
    (lambda: edge_length("O4", POINTS, RING.numpy()), "source must be Nodes, .*, got str"),
    (
        lambda: edge_length(POINTS, POINTS, RING),
        r"edge_index must be a NumPy array \[2, E\], got Tensor",
    ),
    (
        lambda: edge_direction(POINTS, POINTS, np.zeros((2, 3))),
        r"edge_index must be integers .* got float64 \(2, 3\)",
    ),
    (lambda: area_weights("O4"), "nodes must be Nodes, .*, got str"),
    (
        lambda: area_weights(Nodes([1, 1, 2, 2, 50], [1, 1, 2, 3, 9])),
        "all at distinct positions, got 5",
    ),
    (
        lambda: area_weights(Nodes([0, 0, 0, 0], [0, 90, 180, 270])),
        "nodes must be at least four, .*, got 4",
    ),
    (lambda: Flow([1, 0, 0], [0, 1]), r"centre must be a vector \[3\], got \(2,\)"),
    (
        lambda: tracer(flows="rotation"),
        r"flows must be a list of kinds, such as \[rotation, .*, got 'rotation'",
    ),
    (lambda: tracer(flows=3), "flows must be a list of kinds, .*, got 3"),
    (
        lambda: tracer(flows=[["rotation"]]),
        "flows must be one or more of rotation, deformation, got",
    ),
    (
        lambda: tracer().forecast(0, np.zeros((208, 1))),
        r"output must be a tensor \(208, 1\), .* got ndarray",
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
