import io
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graphs import GRAPHS
from torch._dynamo.testing import CompileCounter
from torch_geometric import EdgeIndex

from anemoi_gt import GraphStructure

EXAMPLE = torch.tensor([[2, 0, 2, 1], [0, 2, 2, 0]])


@pytest.fixture(params=GRAPHS)
def named(request):
    return GRAPHS[request.param]


def edge_set(edge_index):
    return sorted(map(tuple, edge_index.T.tolist()))


def same(left, right):
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_worked_example_of_the_docstring_holds():
    graph = GraphStructure.from_edge_index(EXAMPLE, (3, 3)).with_reverse()
    expected = {
        "perm": [0, 3, 1, 2],
        "row": [2, 1, 0, 2],
        "colptr": [0, 2, 2, 4],
        "rowptr": [0, 1, 2, 4],
        "col": [2, 0, 0, 2],
        "csr_to_csc": [2, 1, 0, 3],
    }
    assert {name: getattr(graph, name).tolist() for name in expected} == expected


def test_both_sides_hold_the_callers_edges(named):
    edge_index, sizes = named
    graph = GraphStructure.from_edge_index(edge_index, sizes).with_reverse().validate()
    assert torch.equal(graph.edge_index(), edge_index)
    src = torch.arange(graph.num_src).repeat_interleave(graph.rowptr.diff())
    assert edge_set(torch.stack([src, graph.col])) == edge_set(edge_index)
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (*sizes, edge_index.shape[1])


def test_order_inside_a_destination_is_the_callers(named):
    edge_index, sizes = named
    graph = GraphStructure.from_edge_index(edge_index, sizes)
    order = graph.edge_order()
    same_destination = graph.dst[1:] == graph.dst[:-1]
    assert bool((order[1:] > order[:-1])[same_destination].all())


def test_unchecked_conversion_gives_the_checked_structure(named):
    edge_index, sizes = named
    checked = GraphStructure.from_edge_index(edge_index, sizes)
    unchecked = GraphStructure.from_edge_index(edge_index, sizes, validate=False)
    assert torch.equal(unchecked.edge_order(), checked.edge_order())
    assert torch.equal(unchecked.colptr, checked.colptr) and torch.equal(unchecked.row, checked.row)


def test_sorted_edges_need_no_permutation():
    assert GraphStructure.from_edge_index(*GRAPHS["sorted"]).perm is None
    assert GraphStructure.from_edge_index(*GRAPHS["shuffled"]).perm is not None


def test_indices_are_32_bit_when_sizes_allow_and_64_bit_when_not():
    assert GraphStructure.from_edge_index(EXAMPLE, (3, 3)).row.dtype == torch.int32
    wide = GraphStructure.from_edge_index(EXAMPLE, (2**31, 3))
    assert wide.row.dtype == wide.colptr.dtype == torch.int64
    assert GraphStructure.from_edge_index(EXAMPLE, (2**31 - 1, 3)).row.dtype == torch.int32


def test_csc_input_gives_the_structure_of_its_edges():
    coo = GraphStructure.from_edge_index(*GRAPHS["sorted"])
    assert same(GraphStructure.from_csc(coo.colptr.long(), coo.row.long(), coo.num_src), coo)


def test_csc_input_keeps_the_callers_permutation():
    coo = GraphStructure.from_edge_index(*GRAPHS["shuffled"])
    assert same(GraphStructure.from_csc(coo.colptr, coo.row, coo.num_src, coo.perm), coo)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_adjacency_rows_are_destinations(layout):
    coo = GraphStructure.from_edge_index(torch.tensor([[2, 0, 1, 2], [0, 1, 1, 1]]), (3, 4))
    src, dst = coo.edge_index()
    adj_t = torch.sparse_coo_tensor(torch.stack([dst, src]), torch.ones(4), (4, 3))
    graph = GraphStructure.from_adj_t(adj_t.to_sparse(layout=layout) if layout != torch.sparse_coo else adj_t)
    assert (graph.num_src, graph.num_dst) == (3, 4)
    assert edge_set(graph.edge_index()) == edge_set(coo.edge_index())


def test_sparse_tensor_is_known_by_its_methods():
    class SparseTensorLike:
        def sparse_sizes(self):
            return (3, 4)

        def sparse_size(self, dim):
            return self.sparse_sizes()[dim]

        def csr(self):
            return torch.tensor([0, 1, 3, 3]), torch.tensor([3, 0, 2]), None

    graph = GraphStructure.from_adj_t(SparseTensorLike())
    assert edge_set(graph.edge_index()) == [(0, 1), (2, 1), (3, 0)]
    assert (graph.num_src, graph.num_dst) == (4, 3)


def test_strided_tensor_is_not_an_adjacency():
    with pytest.raises(ValueError, match="sparse COO, CSR or CSC layout"):
        GraphStructure.from_adj_t(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("matrix", "got"),
    [
        (torch.ones(3).to_sparse(), r"got shape \(3,\) with 1 sparse"),
        (torch.ones(2, 2, 2).to_sparse(), r"got shape \(2, 2, 2\) with 3 sparse"),
        (torch.ones(2, 3).to_sparse(1), r"got shape \(2, 3\) with 1 sparse and 1 dense"),
        (torch.ones(2, 3, 3).to_sparse_csc(), r"got shape \(2, 3, 3\) with 2 sparse"),
    ],
    ids=["vector", "three dimensions", "rows", "batch"],
)
def test_a_sparse_tensor_that_is_no_matrix_is_no_adjacency(matrix, got):
    with pytest.raises(ValueError, match=r"adj_t must have two sparse dimensions \[N_dst, N_src\].*" + got):
        GraphStructure.from_adj_t(matrix)


def test_edge_index_object_brings_its_sizes():
    edge_index = EdgeIndex(EXAMPLE, sparse_size=(3, 4))
    graph = GraphStructure.from_edge_index(edge_index)
    assert (graph.num_src, graph.num_dst) == (3, 4)
    assert same(graph, GraphStructure.from_edge_index(EXAMPLE, (3, 4)))
    assert type(graph.row) is torch.Tensor


def test_sizes_that_contradict_an_edge_index_object_raise():
    with pytest.raises(ValueError, match="num_dst must be 4, which the EdgeIndex holds, got 3"):
        GraphStructure.from_edge_index(EdgeIndex(EXAMPLE, sparse_size=(3, 4)), (3, 3))


def test_sizes_are_never_guessed():
    with pytest.raises(ValueError, match=r"num_nodes must be given as \(num_src, num_dst\)"):
        GraphStructure.from_edge_index(EXAMPLE)


def test_disjoint_places_graphs_side_by_side():
    first, second = GRAPHS["shuffled"], GRAPHS["many_to_few"]
    graph = GraphStructure.disjoint([GraphStructure.from_edge_index(*first), GraphStructure.from_edge_index(*second)])
    shift = torch.tensor(first[1])[:, None]
    expected = torch.cat([first[0], second[0] + shift], dim=1)
    assert torch.equal(graph.validate().edge_index(), expected)
    assert (graph.num_src, graph.num_dst) == tuple(a + b for a, b in zip(first[1], second[1], strict=True))


def test_disjoint_keeps_the_program_order_of_each_graph():
    plain, ordered = (GraphStructure.from_edge_index(EXAMPLE, (3, 3)) for _ in range(2))
    ordered = replace(ordered, dst_schedule=torch.tensor([2, 0, 1], dtype=torch.int32))
    joined = GraphStructure.disjoint([ordered, plain, ordered]).validate()
    assert joined.dst_schedule.tolist() == [2, 0, 1, 3, 4, 5, 8, 6, 7]
    assert GraphStructure.disjoint([plain, plain]).dst_schedule is None


def test_disjoint_of_no_graph_raises():
    with pytest.raises(ValueError, match="at least one graph"):
        GraphStructure.disjoint([])


def test_methods_return_new_values_and_nothing_can_be_set():
    graph = GraphStructure.from_edge_index(EXAMPLE, (3, 3))
    reverse = graph.with_reverse()
    assert graph.rowptr is None and reverse.has_reverse and reverse.with_reverse() is reverse
    with pytest.raises(AttributeError):
        graph.row = reverse.row


def test_saved_structure_loads_with_safe_defaults():
    graph = GraphStructure.from_edge_index(EXAMPLE, (3, 3)).with_reverse().with_dst_schedule()
    for saved, restore in ((graph, lambda loaded: loaded), (graph.state_dict(), GraphStructure.from_state)):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        assert same(restore(torch.load(file)), graph)


def test_unknown_state_raises():
    with pytest.raises(ValueError, match="fields of a GraphStructure, got also \\['rows'\\]"):
        GraphStructure.from_state({"rows": torch.zeros(1)})


def test_program_order_puts_neighbours_together():
    side = 16
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    shuffle = torch.randperm(side * side, generator=torch.Generator().manual_seed(0))
    positions = grid[shuffle].double()
    near = torch.cdist(positions, positions) < 1.1
    graph = GraphStructure.from_edge_index(near.nonzero().T, side * side)
    for ordered in (graph.with_dst_schedule(positions), graph.with_dst_schedule()):
        order = ordered.validate().dst_schedule.long()
        jump = (positions[order[1:]] - positions[order[:-1]]).norm(dim=1).mean()
        assert jump < 2.0, f"mean distance of successive destinations is {jump:.2f} cells; at random it is about 8"


def test_program_order_covers_nodes_that_no_path_joins():
    graph = GraphStructure.from_edge_index(*GRAPHS["isolated"]).with_dst_schedule()
    assert sorted(graph.dst_schedule.tolist()) == list(range(6))


@pytest.mark.parametrize("shape", [(2, 2), (3,), (3, 4)])
def test_positions_of_a_wrong_shape_raise(shape):
    with pytest.raises(ValueError, match=r"positions must have shape \[3, 1 to 3\]"):
        GraphStructure.from_edge_index(EXAMPLE, (3, 3)).with_dst_schedule(torch.zeros(shape))


@pytest.mark.parametrize(
    ("edge_index", "sizes", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), (1, 1), r"shape \[2, E\]"),
        (torch.zeros(3, 4, dtype=torch.int64), (1, 1), r"shape \[2, E\].*got \(3, 4\)"),
        (torch.zeros(2, 4), (1, 1), "dtype int32 or int64, got torch.float32"),
        (torch.tensor([[0, 3], [0, 0]]), (3, 3), r"source .*0 .. 2.*got values from 0 to 3"),
        (torch.tensor([[0, -1], [0, 0]]), (3, 3), "source .*got values from -1 to 0"),
        (torch.tensor([[0, 1], [0, 2]]), (3, 2), "destination .*got values from 0 to 2"),
        (EXAMPLE, (3, -1), "num_dst must be a number of nodes >= 0, got -1"),
        (EXAMPLE, (3, 3.0), "num_dst must be a number of nodes >= 0, got 3.0"),
        (EXAMPLE, (3, 3, 3), r"num_nodes must be \(num_src, num_dst\)"),
    ],
)
def test_bad_edge_index_is_named(edge_index, sizes, message):
    with pytest.raises(ValueError, match=message):
        GraphStructure.from_edge_index(edge_index, sizes)


@pytest.mark.parametrize(
    ("colptr", "row", "num_src", "message"),
    [
        ([0, 2, 1, 3], [0, 0, 0], 1, "colptr must not decrease, got 2, 1 at position 1"),
        ([1, 2, 3], [0, 0, 0], 1, "colptr must start at 0 and end at the number of edges 3, got 1 and 3"),
        ([0, 2], [0, 0, 0], 1, "colptr must start at 0 and end at the number of edges 3, got 0 and 2"),
        ([0, 3], [0, 1, 0], 1, "row must hold values in 0 .. 0"),
        ([0, 3], [0, -1, 0], 1, "got values from -1 to 0"),
        ([], [], 1, "colptr must have num_dst"),
    ],
)
def test_bad_csc_is_named(colptr, row, num_src, message):
    with pytest.raises(ValueError, match=message):
        GraphStructure.from_csc(torch.tensor(colptr, dtype=torch.int64), torch.tensor(row, dtype=torch.int64), num_src)


def test_wrong_rank_and_dtype_of_csc_are_named():
    with pytest.raises(ValueError, match="row must be one-dimensional"):
        GraphStructure.from_csc(torch.tensor([0, 1]), torch.tensor([[0]]), 1)
    with pytest.raises(ValueError, match="colptr must have dtype torch.int32 or torch.int64, got torch.float32"):
        GraphStructure.from_csc(torch.tensor([0.0, 1.0]), torch.tensor([0]), 1)


def test_tensors_on_two_devices_raise():
    with pytest.raises(ValueError, match="one device, got row on meta and others on cpu"):
        GraphStructure.from_csc(torch.tensor([0, 1]), torch.tensor([0], device="meta"), 1)
    graph = GraphStructure.from_edge_index(EXAMPLE, (3, 3))
    with pytest.raises(ValueError, match="graphs must be on one device"):
        GraphStructure.disjoint([graph, graph.to("meta")])


def test_validate_finds_two_sides_that_differ():
    graph = GraphStructure.from_edge_index(EXAMPLE, (3, 3)).with_reverse()
    state = graph.state_dict() | {"col": graph.col.roll(1)}
    with pytest.raises(ValueError, match="rowptr, col must hold the edges of colptr, row"):
        GraphStructure.from_state(state).validate()


def test_validate_finds_a_permutation_that_repeats():
    state = GraphStructure.from_edge_index(EXAMPLE, (3, 3)).state_dict()
    state["perm"] = torch.tensor([0, 0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="perm must be a permutation of 0 .. 3, got 1 values missing"):
        GraphStructure.from_state(state).validate()


@pytest.mark.parametrize(
    ("field", "tensor", "message"),
    [
        ("perm", torch.zeros(3, dtype=torch.int32), "perm must have 4 entries, got 3"),
        ("perm", torch.zeros(4, dtype=torch.int64), "perm must have dtype torch.int32, got torch.int64"),
        ("rowptr", torch.zeros(4, dtype=torch.int32), "rowptr, col and csr_to_csc come together"),
        ("sources", torch.zeros(3, 1), r"sources must have shape \[num_src, 0\]"),
    ],
)
def test_fields_that_do_not_fit_together_raise(field, tensor, message):
    state = GraphStructure.from_edge_index(EXAMPLE, (3, 3)).state_dict()
    with pytest.raises(ValueError, match=message):
        GraphStructure.from_state(state | {field: tensor})


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_edge_list_comes_back(data):
    sizes = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    pairs = data.draw(st.lists(st.tuples(st.integers(0, sizes[0] - 1), st.integers(0, sizes[1] - 1)), max_size=20))
    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    graph = GraphStructure.from_edge_index(edge_index, sizes).with_reverse().validate()
    assert torch.equal(graph.edge_index(), edge_index)


def test_construction_and_use_compile_without_recompilation():
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(edge_index, x):
        graph = GraphStructure.from_edge_index(edge_index, (x.shape[0], x.shape[0]), validate=False).with_reverse()
        return x[graph.row].sum() + x[graph.col].sum() + graph.num_src

    for nodes, edges in ((5, 9), (7, 20), (30, 3)):
        edge_index, x = torch.randint(nodes, (2, edges)), torch.randn(nodes)
        torch.testing.assert_close(step(edge_index, x), x[edge_index].sum() + nodes)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("name", "degree"), [("nearest", 3), ("one_each", 1), ("shuffled", None), ("no_edges", None)])
def test_a_degree_that_all_destinations_share_is_found_where_values_are_checked(name, degree):
    edge_index, sizes = GRAPHS[name]
    graph = GraphStructure.from_edge_index(edge_index, sizes)
    again = GraphStructure.from_csc(graph.colptr, graph.row, graph.num_src)
    found = [None if each.fixed_in_degree is None else each.fixed_in_degree.shape[0] for each in (graph, again)]
    assert found == [degree, degree]
    assert GraphStructure.from_edge_index(edge_index, sizes, validate=False).fixed_in_degree is None


def test_graphs_side_by_side_keep_a_degree_that_they_share():
    three, one = (GraphStructure.from_edge_index(*GRAPHS[name]) for name in ("nearest", "one_each"))
    assert GraphStructure.disjoint([three, three]).fixed_in_degree.shape == (3, 0)
    assert GraphStructure.disjoint([three, one]).fixed_in_degree is None


@pytest.mark.parametrize(
    ("degree", "message"),
    [
        (torch.empty(2, 0), r"K \* 13 destinations = 39 edges, got K = 2"),
        (torch.empty(3), r"degree must be a tensor \[K, 0\].*got \(3,\)"),
        (3, r"degree must be a tensor \[K, 0\].*got int"),
    ],
)
def test_a_degree_of_other_edges_is_refused(degree, message):
    graph = GraphStructure.from_edge_index(*GRAPHS["nearest"])
    with pytest.raises(ValueError, match=message):
        replace(graph, fixed_in_degree=degree)


def test_a_degree_that_only_the_mean_has_is_refused_by_validate():
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1]]), (2, 2))
    with pytest.raises(ValueError, match="degree says that every destination has 2 in-edges.*leave it out"):
        replace(graph, fixed_in_degree=torch.empty(2, 0)).validate()
