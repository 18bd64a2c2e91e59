from itertools import pairwise

import pytest
import torch
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import attend, structure
from torch._dynamo.testing import CompileCounterWithBackend

from anemoi_gt import GraphStructure
from anemoi_gt.graph import build
from anemoi_gt.graph.build import Sides, group_both_ends_unordered, group_coo, group_edges, group_edges_unordered

DTYPES = (torch.int32, torch.int64)


@pytest.fixture(params=GRAPHS)
def named(request, kernel_device):
    edge_index, sizes = GRAPHS[request.param]
    return edge_index.to(kernel_device), sizes


@pytest.fixture
def unordered(monkeypatch):
    """Take the way without order where kernels are interpreted too."""
    monkeypatch.setattr(build, "_order_may_be_open", lambda _: True)


def refuse(*_):
    raise AssertionError("the other way was taken")


def assert_same_edges_of_each_node(pointers, order, stable_order):
    for begin, end in pairwise(pointers.tolist()):
        assert torch.equal(order[begin:end].sort().values, stable_order[begin:end])


def assert_by_destination(sides, edge_index, num_dst, dtype):
    """colptr, perm and row hold the edges as a stable sort would, but for the order inside a destination."""
    src, dst = edge_index.to(dtype)
    colptr, perm, _ = group_edges(dst, src, num_dst, stable=True)
    assert torch.equal(sides.colptr, colptr)
    assert torch.equal(sides.row, src[sides.perm.long()])
    assert_same_edges_of_each_node(colptr, sides.perm, perm)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouping_without_sorting_holds_the_same_edges_of_each_destination(named, dtype):
    edge_index, (_, num_dst) = named
    sides = Sides(*group_edges_unordered(edge_index, num_dst, dtype))
    assert {tensor.dtype for tensor in sides[:3]} == {dtype}
    assert_by_destination(sides, edge_index, num_dst, dtype)


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouping_both_ends_holds_the_same_edges_of_each_node(named, given, dtype):
    edge_index, (num_src, num_dst) = named
    sides = Sides(*group_both_ends_unordered(edge_index.to(given), num_src, num_dst, dtype))
    assert {tensor.dtype for tensor in sides} == {dtype}
    assert_by_destination(sides, edge_index, num_dst, dtype)
    dst = edge_index[1][sides.perm.long()].to(dtype)
    rowptr, csr_to_csc, _ = group_edges(sides.row, dst, num_src, stable=True)
    assert torch.equal(sides.rowptr, rowptr)
    assert torch.equal(sides.col, dst[sides.csr_to_csc.long()])
    assert_same_edges_of_each_node(rowptr, sides.csr_to_csc, csr_to_csc)


def test_sums_over_both_ends_past_32_bits_change_nothing(named, monkeypatch):
    edge_index, (num_src, num_dst) = named
    assert [build._counting_dtype(edges) for edges in (2**30 - 1, 2**30)] == [torch.int32, torch.int64]
    monkeypatch.setattr(build, "_counting_dtype", lambda _: torch.int64)
    sides = group_both_ends_unordered(edge_index, num_src, num_dst, torch.int32)
    GraphStructure(**Sides(*sides)._asdict(), sources=edge_index.new_empty(num_src, 0)).validate()


def test_more_edges_than_a_program_holds_and_more_nodes_than_edges_are_grouped(kernel_device):
    generator = torch.Generator().manual_seed(0)
    for sizes, edges in (((30, 20), 2 * build.EDGES_PER_PROGRAM + 3), ((3 * build.EDGES_PER_PROGRAM, 700), 5)):
        edge_index = torch.stack([torch.randint(nodes, (edges,), generator=generator) for nodes in sizes])
        edge_index = edge_index.to(kernel_device)
        sides = Sides(*group_both_ends_unordered(edge_index, *sizes, torch.int32))
        graph = GraphStructure(**sides._asdict(), sources=edge_index.new_empty(sizes[0], 0)).validate()
        assert torch.equal(graph.edge_index(), edge_index)


def test_an_edge_index_that_is_not_contiguous_is_read_as_it_is(kernel_device):
    edge_index, (num_src, num_dst) = GRAPHS["shuffled"]
    edge_index = edge_index.to(kernel_device)
    laid_out = edge_index.T.contiguous().T
    assert not laid_out.is_contiguous()
    sides = Sides(*group_both_ends_unordered(laid_out, num_src, num_dst, torch.int32))
    assert_by_destination(sides, edge_index, num_dst, torch.int32)


def test_structure_without_order_is_whole_and_gives_the_same_attention(named, unordered):
    edge_index, sizes = named
    loose = GraphStructure.from_edge_index(edge_index, sizes, stable=False).with_reverse(stable=False).validate()
    assert torch.equal(loose.edge_index(), edge_index)
    graph = (edge_index.cpu(), sizes)
    problem = make_problem(graph, 3, 4, 5, dtype=torch.float64)
    result, expected = attend(problem, loose.to("cpu"), "torch"), attend(problem, structure(graph), "torch")
    for name in expected:
        torch.testing.assert_close(result[name], expected[name], rtol=1e-12, atol=1e-12)


def test_edge_numbers_follow_their_edges_without_order(kernel_device, unordered):
    edge_index, sizes = GRAPHS["shuffled"]
    edge_index, numbers = edge_index.to(kernel_device), torch.arange(64, device=kernel_device) + 2**33
    graph = GraphStructure.from_edge_index(edge_index, sizes, global_edge_id=numbers, stable=False)
    assert torch.equal(graph.global_edge_ids(), numbers[graph.perm.long()])


def test_the_source_side_comes_with_it_while_gradients_are_recorded(kernel_device, unordered):
    edge_index, sizes = GRAPHS["shuffled"]
    graph = GraphStructure.from_edge_index(edge_index.to(kernel_device), sizes, stable=False)
    assert graph.with_reverse(stable=False) is graph


def test_the_source_side_is_left_out_where_no_gradients_are_recorded(kernel_device, unordered, monkeypatch):
    monkeypatch.setattr(build, "group_both_ends_unordered", refuse)
    edge_index, sizes = GRAPHS["shuffled"]
    with torch.no_grad():
        graph = GraphStructure.from_edge_index(edge_index.to(kernel_device), sizes, stable=False)
    assert not graph.has_reverse
    assert graph.with_reverse(stable=False).validate().has_reverse


@pytest.mark.parametrize("recorded", [True, False])
def test_it_steps_aside_when_deterministic_algorithms_are_asked_for(kernel_device, monkeypatch, recorded):
    monkeypatch.setattr(build, "group_edges_unordered", refuse)
    monkeypatch.setattr(build, "group_both_ends_unordered", refuse)
    edge_index, (num_src, num_dst) = GRAPHS["shuffled"]
    edge_index = edge_index.to(kernel_device)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.set_grad_enabled(recorded):
            sides = group_coo(edge_index, num_src, num_dst, torch.int64, stable=False)
        group_edges(edge_index[1], edge_index[0], num_dst, stable=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(sides.perm, edge_index[1].sort(stable=True).indices)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_structure_made_in_a_compiled_function_never_recompiles(kernel_device, unordered, recorded):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def build(edge_index, src, dst):
        sizes = (src.shape[0], dst.shape[0])
        graph = GraphStructure.from_edge_index(edge_index, sizes, stable=False, validate=False)
        return graph.with_reverse(stable=False).state_dict()

    build, compilations = torch.compile(build, fullgraph=True, dynamic=True, backend=counter), []
    for num_src, num_dst, num_edges in ((7, 11, 29), (13, 5, 37), (19, 17, 23)):  # no two sizes are equal
        numbers = torch.arange(num_edges, device=kernel_device)
        edge_index = torch.stack([numbers % num_src, numbers * 3 % num_dst])
        src, dst = (torch.empty(nodes, device=kernel_device) for nodes in (num_src, num_dst))
        with torch._dynamo.config.patch(error_on_recompile=True), torch.set_grad_enabled(recorded):
            state = build(edge_index, src, dst)
        compilations.append(counter.frame_count)
        assert torch.equal(GraphStructure.from_state(state).validate().edge_index(), edge_index)
    assert compilations == [1, 1, 1]


@pytest.mark.parametrize("name", ["sorted", "no_edges"])
def test_operators_pass_opcheck(kernel_device, name):
    edge_index, (num_src, num_dst) = GRAPHS[name]
    arguments = (edge_index.to(kernel_device), num_src, num_dst, torch.int32)
    utilities = ("test_schema", "test_faketensor")  # the order inside a node is open, so outputs may differ
    operators = torch.ops.anemoi_gt
    torch.library.opcheck(operators.group_both_ends_unordered.default, arguments, test_utils=utilities)
    by_destination = (arguments[0], *arguments[2:])
    torch.library.opcheck(operators.group_edges_unordered.default, by_destination, test_utils=utilities)
