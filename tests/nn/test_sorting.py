"""When layers sort edges: once a side where a structure is built, in every call for raw edges, or not at all."""

import pytest
import torch
from support.graphs import GRAPHS
from support.operators import Operators
from support.refusals import raises
from support.same_numbers import assert_same

from anemoi_gt import GraphStructure, GraphTransformerConv, KernelConfig

EDGE_INDEX = GRAPHS["shuffled"][0]
NODES = max(GRAPHS["shuffled"][1])


def groupings(operators):
    return [name.split(".")[1] for name in operators.names if ".sort" in name or "group_" in name]


def train(layers, edges, steps=1):
    """Run training steps; return the last output and the last input gradient."""
    for _ in range(steps):
        x = torch.linspace(-1, 1, NODES * 4, device=edges.device).view(NODES, 4).requires_grad_()
        out = x
        for layer in layers:
            out = layer(out, edges)
        out.square().sum().backward()
    return out.detach(), x.grad


def test_a_graph_is_sorted_once_per_side_when_built_and_never_in_training():
    layers = [GraphTransformerConv(4, 4) for _ in range(2)]
    with Operators() as building:
        graph = GraphStructure.from_edge_index(EDGE_INDEX, NODES)
    with Operators() as training:
        train(layers, graph, steps=3)
    assert groupings(building) == ["sort", "sort"]
    assert groupings(training) == []


def as_adjacency(edge_index):
    src, dst = edge_index
    return torch.sparse_coo_tensor(
        torch.stack([dst, src]), torch.ones(src.shape[0]), (NODES, NODES)
    )


@pytest.mark.parametrize(
    ("edges", "expected"),
    (
        (EDGE_INDEX, ["group_both_ends_unordered"]),
        (as_adjacency(EDGE_INDEX), ["group_both_ends_unordered"]),
        (as_adjacency(EDGE_INDEX).to_sparse_csr(), ["group_edges_unordered"]),
        (
            GraphStructure.from_edge_index(EDGE_INDEX, NODES, reverse=False),
            ["group_edges_unordered"],
        ),
    ),
    ids=("edge_index", "COO", "CSR", "structure without reverse"),
)
def test_raw_edges_are_grouped_without_sorting_on_request(
    edges, expected, unordered, kernel_device
):
    layer = GraphTransformerConv(4, 4, config=KernelConfig("triton", stable_sort=False)).to(
        kernel_device
    )
    edges = edges.to(kernel_device)
    with Operators() as operators:
        result = train([layer], edges)
    assert groupings(operators) == expected
    layer.config = KernelConfig("triton")
    with Operators() as operators:
        assert_same(result, train([layer], edges), 1e-5)
    assert set(groupings(operators)) == {"sort"}


def test_raw_edges_are_grouped_only_by_destination_without_gradients(unordered, kernel_device):
    layer = GraphTransformerConv(4, 4, config=KernelConfig("triton", stable_sort=False)).to(
        kernel_device
    )
    with torch.no_grad(), Operators() as operators:
        layer(torch.ones(NODES, 4, device=kernel_device), EDGE_INDEX.to(kernel_device))
    assert groupings(operators) == ["group_edges_unordered"]


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_raw_edges_on_a_cpu_are_sorted_once_a_side_in_every_call(dtype):
    layer, edge_index = GraphTransformerConv(4, 4), EDGE_INDEX.to(dtype)
    with Operators() as operators:
        result = train([layer], edge_index)
    assert groupings(operators) == ["sort", "sort"]
    assert_same(result, train([layer], GraphStructure.from_edge_index(edge_index, NODES)), 0)


@pytest.mark.parametrize("wrong", (-1, NODES))
def test_an_index_that_is_no_node_is_refused(wrong):
    layer, edge_index = GraphTransformerConv(4, 4), EDGE_INDEX.clone()
    edge_index[1, -1] = wrong
    raises(
        lambda: train([layer], edge_index),
        r"destination \(row 1 of edge_index\) must hold values in 0 .. ",
    )
