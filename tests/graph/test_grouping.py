"""Grouping of edges on a GPU without sorting, and when the stable sort is used instead."""

from itertools import pairwise

import pytest
import torch
from support.graphs import GRAPHS
from support.operators import Operators
from support.oracle import make_problem
from support.run import attend, structure
from support.same_numbers import assert_same
from torch._dynamo.testing import CompileCounterWithBackend

from anemoi_gt import GraphStructure
from anemoi_gt.graph import grouping
from anemoi_gt.graph.grouping import (
    GroupedEdges,
    group_both_ends_unordered,
    group_coo,
    group_edges,
    group_edges_unordered,
)

DTYPES = (torch.int32, torch.int64)


@pytest.fixture(params=GRAPHS)
def named(request, kernel_device):
    edge_index, sizes = GRAPHS[request.param]
    return edge_index.to(kernel_device), sizes


@pytest.fixture
def shuffled(kernel_device):
    edge_index, sizes = GRAPHS["shuffled"]
    return edge_index.to(kernel_device), sizes


def groupings(operators):
    return [name.split(".")[1] for name in operators.names if ".sort" in name or "group_" in name]


def group_both_ends(edge_index, sizes, dtype=torch.int32):
    return GroupedEdges(*group_both_ends_unordered(edge_index, *sizes, dtype))


def as_structure(groups, num_src):
    return GraphStructure(**groups._asdict(), sources=groups.row.new_empty(num_src, 0)).validate()


def assert_same_edges_of_each_node(pointers, order, stable_order):
    for begin, end in pairwise(pointers.tolist()):
        assert torch.equal(order[begin:end].sort().values, stable_order[begin:end])


def assert_by_destination(groups, edge_index, num_dst, dtype):
    """colptr, perm and row hold the edges as a stable sort would, but for the order within a destination."""
    src, dst = edge_index.to(dtype)
    colptr, perm, _ = group_edges(dst, src, num_dst, stable=True)
    assert torch.equal(groups.colptr, colptr)
    assert torch.equal(groups.row, src[groups.perm.long()])
    assert_same_edges_of_each_node(colptr, groups.perm, perm)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouping_without_sorting_holds_the_same_edges_of_each_destination(named, dtype):
    edge_index, (_, num_dst) = named
    groups = GroupedEdges(*group_edges_unordered(edge_index, num_dst, dtype))
    assert {tensor.dtype for tensor in groups[:3]} == {dtype}
    assert_by_destination(groups, edge_index, num_dst, dtype)


@pytest.mark.parametrize("index_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouping_both_ends_holds_the_same_edges_of_each_node(named, index_dtype, dtype):
    edge_index, (num_src, num_dst) = named
    groups = group_both_ends(edge_index.to(index_dtype), (num_src, num_dst), dtype)
    assert {tensor.dtype for tensor in groups} == {dtype}
    assert_by_destination(groups, edge_index, num_dst, dtype)
    dst = edge_index[1][groups.perm.long()].to(dtype)
    rowptr, csr_to_csc, _ = group_edges(groups.row, dst, num_src, stable=True)
    assert torch.equal(groups.rowptr, rowptr)
    assert torch.equal(groups.col, dst[groups.csr_to_csc.long()])
    assert_same_edges_of_each_node(rowptr, groups.csr_to_csc, csr_to_csc)


def test_sums_over_both_ends_beyond_32_bits_change_nothing(named, monkeypatch):
    edge_index, sizes = named
    assert [grouping._count_dtype(edges) for edges in (2**30 - 1, 2**30)] == [
        torch.int32,
        torch.int64,
    ]
    monkeypatch.setattr(grouping, "_count_dtype", lambda _: torch.int64)
    as_structure(group_both_ends(edge_index, sizes), sizes[0])


def test_more_edges_than_a_program_holds_and_more_nodes_than_edges_are_grouped(kernel_device):
    generator = torch.Generator().manual_seed(0)
    for sizes, edges in (
        ((30, 20), 2 * grouping.EDGES_PER_PROGRAM + 3),
        ((3 * grouping.EDGES_PER_PROGRAM, 700), 5),
    ):
        edge_index = torch.stack(
            [torch.randint(nodes, (edges,), generator=generator) for nodes in sizes]
        )
        edge_index = edge_index.to(kernel_device)
        assert torch.equal(
            as_structure(group_both_ends(edge_index, sizes), sizes[0]).edge_index(), edge_index
        )


def test_a_strided_edge_index_is_grouped(shuffled):
    edge_index, sizes = shuffled
    strided = edge_index.T.contiguous().T
    assert not strided.is_contiguous()
    assert_by_destination(group_both_ends(strided, sizes), edge_index, sizes[1], torch.int32)


def test_unordered_structure_is_complete_and_gives_the_same_attention(named, unordered):
    edge_index, sizes = named
    unordered_graph = GraphStructure.from_edge_index(edge_index, sizes, stable=False).validate()
    assert torch.equal(unordered_graph.edge_index(), edge_index)
    graph = (edge_index.cpu(), sizes)
    problem = make_problem(graph, 3, 4, 5, dtype=torch.float64)
    actual = attend(problem, unordered_graph.to("cpu"), "torch")
    expected = attend(problem, structure(graph), "torch")
    assert_same(actual, expected, 1e-12)


def test_global_edge_ids_follow_their_edges_without_order(shuffled, unordered):
    ids = torch.arange(64, device=shuffled[0].device) + 2**33
    graph = GraphStructure.from_edge_index(*shuffled, global_edge_id=ids, stable=False)
    assert torch.equal(graph.global_edge_ids(), ids[graph.perm.long()])


def test_both_structures_are_built_in_one_sweep_unless_the_reverse_is_left_out(shuffled, unordered):
    with Operators() as both:
        assert GraphStructure.from_edge_index(*shuffled, stable=False).has_reverse
    with Operators() as one_side:
        graph = GraphStructure.from_edge_index(*shuffled, stable=False, reverse=False)
        assert not graph.has_reverse
    with Operators() as other_side:
        graph = graph.with_reverse(stable=False)
    assert graph.validate().has_reverse
    assert groupings(both) == ["group_both_ends_unordered"]
    assert groupings(one_side) == groupings(other_side) == ["group_edges_unordered"]


@pytest.mark.parametrize("reverse", [True, False])
def test_deterministic_algorithms_use_the_stable_sort(shuffled, reverse):
    edge_index, (num_src, num_dst) = shuffled
    torch.use_deterministic_algorithms(mode=True)
    try:
        with Operators() as operators:
            groups = group_coo(
                edge_index, num_src, num_dst, torch.int64, stable=False, reverse=reverse
            )
            group_edges(edge_index[1], edge_index[0], num_dst, stable=False)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert set(groupings(operators)) == {"sort"}
    assert torch.equal(groups.perm, edge_index[1].sort(stable=True).indices)


@pytest.mark.compiled
@pytest.mark.parametrize("recorded", [True, False])
def test_construction_in_a_compiled_function_never_recompiles(kernel_device, unordered, recorded):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def build(edge_index, src, dst):
        sizes = (src.shape[0], dst.shape[0])
        return GraphStructure.from_edge_index(
            edge_index, sizes, stable=False, validate=False
        ).state_dict()

    build, compilations = torch.compile(build, fullgraph=True, dynamic=True, backend=counter), []
    # no two sizes are equal
    for num_src, num_dst, num_edges in ((7, 11, 29), (13, 5, 37), (19, 17, 23)):
        ids = torch.arange(num_edges, device=kernel_device)
        edge_index = torch.stack([ids % num_src, ids * 3 % num_dst])
        src, dst = (torch.empty(nodes, device=kernel_device) for nodes in (num_src, num_dst))
        with torch._dynamo.config.patch(error_on_recompile=True), torch.set_grad_enabled(recorded):
            state = build(edge_index, src, dst)
        compilations.append(counter.frame_count)
        assert torch.equal(GraphStructure.from_state(state).validate().edge_index(), edge_index)
    assert compilations == [1, 1, 1]


@pytest.mark.parametrize("name", ["sorted", "no_edges"])
def test_operators_pass_opcheck(kernel_device, name):
    edge_index, (num_src, num_dst) = GRAPHS[name]
    edge_index, operators = edge_index.to(kernel_device), torch.ops.anemoi_gt
    both = operators.group_both_ends_unordered.default
    by_destination = operators.group_edges_unordered.default
    # the order within a node varies, so outputs may differ
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(both, (edge_index, num_src, num_dst, torch.int32), test_utils=utilities)
    torch.library.opcheck(by_destination, (edge_index, num_dst, torch.int32), test_utils=utilities)
