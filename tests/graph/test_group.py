import pytest
import torch
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import attend, structure

from anemoi_gt import GraphStructure
from anemoi_gt.graph.group import group_edges, group_edges_unordered


@pytest.fixture(params=GRAPHS)
def named(request, kernel_device):
    edge_index, sizes = GRAPHS[request.param]
    return edge_index.to(kernel_device), sizes


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_grouping_without_sorting_holds_the_same_edges_of_each_node(named, dtype):
    edge_index, (_, num_dst) = named
    src, dst = edge_index.to(dtype)
    pointers, order, neighbours = group_edges_unordered(dst, src, num_dst)
    expected, stable_order, _ = group_edges(dst, src, num_dst, stable=True)
    assert pointers.dtype == order.dtype == dtype
    assert torch.equal(pointers, expected)
    assert torch.equal(src[order.long()], neighbours)
    for node in range(num_dst):
        begin, end = pointers[node], pointers[node + 1]
        assert torch.equal(order[begin:end].sort().values, stable_order[begin:end])


def test_structure_without_order_is_whole_and_gives_the_same_attention(kernel_device):
    graph = GRAPHS["shuffled"]
    edge_index = graph[0].to(kernel_device)
    loose = GraphStructure.from_edge_index(edge_index, graph[1], stable=False).with_reverse(stable=False).validate()
    assert torch.equal(loose.edge_index(), edge_index)
    problem = make_problem(graph, 3, 4, 5, dtype=torch.float64)
    result, expected = attend(problem, loose.to("cpu"), "torch"), attend(problem, structure(graph), "torch")
    for name in expected:
        torch.testing.assert_close(result[name], expected[name], rtol=1e-12, atol=1e-12)


def test_it_steps_aside_when_deterministic_algorithms_are_asked_for(kernel_device, monkeypatch):
    from anemoi_gt.graph import group

    def refuse(*_):
        raise AssertionError("the unordered way was taken")

    monkeypatch.setattr(group, "group_edges_unordered", refuse)
    src, dst = GRAPHS["shuffled"][0].to(kernel_device)
    torch.use_deterministic_algorithms(True)
    try:
        group_edges(dst, src, 13, stable=False)
    finally:
        torch.use_deterministic_algorithms(False)


def test_operator_passes_opcheck(kernel_device):
    edge_index, (_, num_dst) = GRAPHS["sorted"]
    src, dst = edge_index.to(kernel_device)
    utilities = ("test_schema", "test_faketensor")  # the order inside a node is open, so outputs may differ
    torch.library.opcheck(torch.ops.anemoi_gt.group_edges_unordered.default, (dst, src, num_dst), test_utils=utilities)
