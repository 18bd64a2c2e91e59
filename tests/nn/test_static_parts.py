"""StaticNodes and StaticEdges: fixed and trainable features, and the structure, as modules."""

import copy
import math

import pytest
import torch
from support.refusals import raises, refused
from support.weather import weather_graph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from anemoi_gt import GraphStructure
from anemoi_gt.nn import EncoderProcessorDecoder, StaticEdges, StaticNodes
from anemoi_gt.nn.static_graph import StaticStructure

EDGE_INDEX = torch.tensor([[2, 0, 2, 1], [0, 1, 1, 0]])


def make_edges(trainable=8):
    return StaticEdges(EDGE_INDEX, torch.arange(12.0).reshape(4, 3), (3, 2), trainable)


def test_edges_give_both_directions_of_the_structure_and_attributes_sorted_by_destination():
    graph, edge_attr = make_edges()()
    order = [0, 3, 1, 2]  # by destination, then as they came
    expected = GraphStructure.from_edge_index(EDGE_INDEX[:, order], (3, 2)).state_dict()
    torch.testing.assert_close(graph.state_dict(), expected, rtol=0, atol=0)
    fixed = torch.arange(12.0).reshape(4, 3)[order]
    assert torch.equal(edge_attr, torch.cat([fixed, torch.zeros(4, 8)], dim=1))


def test_trainable_attributes_are_optional():
    edges = make_edges(trainable=0)
    assert edges.edge_dim == 3
    assert not list(edges.parameters())
    assert torch.equal(edges()[1], edges.edge_attr)


@pytest.mark.parametrize(
    "part", (make_edges(), StaticNodes(torch.zeros(4, 2), 8)), ids=("edges", "nodes")
)
def test_state_dict_holds_only_trainable_features(part):
    assert list(part.state_dict()) == ["trainable"]


def test_dtype_of_the_module_does_not_change_indices():
    graph, edge_attr = make_edges().double()()
    assert edge_attr.dtype == torch.float64
    assert graph.row.dtype == torch.int32


def test_nodes_give_sine_and_cosine_of_latitude_and_longitude():
    lat, lon = torch.tensor([0.5, -1.0]), torch.tensor([3.0, 6.0])
    features = StaticNodes(torch.stack([lat, lon], dim=1), trainable=2)()
    expected = torch.stack(
        [lat.sin(), lon.sin(), lat.cos(), lon.cos(), torch.zeros(2), torch.zeros(2)], dim=1
    )
    torch.testing.assert_close(features, expected)


def test_fixed_features_are_cast_to_the_default_dtype():
    edges = StaticEdges(EDGE_INDEX, torch.zeros(4, 3, dtype=torch.float64), (3, 2))
    assert (
        edges()[1].dtype
        == StaticNodes(torch.zeros(4, 2, dtype=torch.float64))().dtype
        == torch.float32
    )


def test_poles_rounded_to_float32_are_accepted():
    assert len(StaticNodes(torch.tensor([[math.pi / 2, 0.0], [-math.pi / 2, 0.0]]))) == 2


@refused(
    (
        lambda: StaticNodes(torch.tensor([[50.0, 10.0]])),
        "within .* radians, got up to 50; convert degrees",
    ),
    (lambda: StaticNodes(torch.tensor([[math.nan, 0.0]])), "positions must be finite, got NaN"),
    (lambda: StaticNodes(torch.zeros(4, 3)), r"shape \[N, 2\], .* got \(4, 3\)"),
    (
        lambda: StaticNodes(torch.zeros(4, 2, dtype=torch.int64)),
        "positions must be floating point, got torch.int64",
    ),
    (
        lambda: make_edges(-1),
        "trainable must be at least 0, the number of trainable attributes of an edge, got -1",
    ),
    (
        lambda: StaticEdges(EDGE_INDEX, torch.zeros(5, 3), (3, 2)),
        r"shape \[4, D\], .* got \(5, 3\)",
    ),
    (
        lambda: StaticEdges(EDGE_INDEX, torch.zeros(4, 3), (2, 3)),
        "source .* must hold values in 0 .. 1",
    ),
)
def test_wrong_static_graph_is_refused(wrong, message):
    raises(wrong, message)


def test_a_structure_for_inference_drops_the_reverse_and_the_fixed_in_degree():
    ends = torch.arange(6)
    kept = StaticStructure(GraphStructure.from_edge_index(torch.stack([ends % 3, ends // 2]), 3))
    assert kept().has_reverse
    assert kept().fixed_in_degree.shape == (2, 0)
    kept.keep_for_inference()
    assert not kept().has_reverse
    assert kept().fixed_in_degree is None


def test_an_average_of_the_buffers_of_a_model_is_refused():
    """Lightning's default averages buffers; integers are truncated by it."""
    graph = weather_graph()
    sizes = {"in_channels": 4, "out_channels": 1, "channels": 16, "heads": 2}
    model = EncoderProcessorDecoder(graph, **sizes, residual={0: 0}, mapper_chunks=2)
    x = torch.randn(1, len(graph["data"].x), 4)
    averages = [
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
        for use_buffers in (False, True)
    ]
    for average in averages:
        average.update_parameters(model)  # the first copies
        torch.testing.assert_close(average(x), model(x))
        average.update_parameters(model)
    torch.testing.assert_close(averages[0](x), model(x))
    with pytest.raises(ValueError, match="must not average its buffers.*use_buffers=False"):
        averages[1](x)


def test_indices_that_move_stay_as_they_are():
    structure = StaticStructure(GraphStructure.from_edge_index(torch.tensor([[0, 1], [1, 1]]), 2))
    for moved in (structure.to(torch.float64), copy.deepcopy(structure), structure.half()):
        assert moved().num_edges == 2
    structure.row.copy_(structure.row.clone())  # as a broadcast of buffers
    assert structure().num_edges == 2
    structure.row.add_(1)
    with pytest.raises(ValueError, match="got another row"):
        structure()


def test_indices_that_were_written_are_compared_outside_of_modes_that_make_no_data():
    edges = make_edges()
    edges()
    indices = next(b for b in edges.buffers() if not b.is_floating_point())
    indices.add_(0)  # as an average of a model writes its buffers
    with FakeTensorMode(allow_non_fake_inputs=True):
        edges()
    indices.add_(1)
    with pytest.raises(ValueError, match="the indices of a graph must stay as they are"):
        edges()
