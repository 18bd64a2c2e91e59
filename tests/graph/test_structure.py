"""GraphStructure: its construction from every input, its values, and how it travels through PyTorch."""

import io
from dataclasses import replace

import pytest
import torch
from support.graphs import GRAPHS
from support.refusals import raises, refused
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree
from torch_geometric import EdgeIndex

from anemoi_gt import GraphStructure, KernelConfig, edge_attention

EXAMPLE = torch.tensor([[2, 0, 2, 1], [0, 2, 2, 0]])
GRAPH = GraphStructure.from_edge_index(EXAMPLE, (3, 3), reverse=False)
REVERSE = GraphStructure.from_edge_index(EXAMPLE, (3, 3))


@pytest.fixture(params=GRAPHS)
def named(request):
    return GRAPHS[request.param]


def edge_set(edge_index):
    return sorted(map(tuple, edge_index.T.tolist()))


def same(left, right):
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def from_coo(edge_index, sizes):
    return GraphStructure.from_edge_index(torch.as_tensor(edge_index), sizes)


def from_csc(colptr, row, dtype=torch.int64, device=None):
    return GraphStructure.from_csc(
        torch.tensor(colptr, dtype=dtype), torch.tensor(row, device=device).long(), 1
    )


def disjoint(*graphs):
    return GraphStructure.disjoint(graphs)


def changed(graph=GRAPH, **fields):
    return GraphStructure.from_state(graph.state_dict() | fields)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_worked_example_of_the_docstring_holds():
    graph = REVERSE
    csc = [graph.perm.tolist(), graph.row.tolist(), graph.colptr.tolist()]
    assert csc == [[0, 3, 1, 2], [2, 1, 0, 2], [0, 2, 2, 4]]
    csr = [graph.rowptr.tolist(), graph.col.tolist(), graph.csr_to_csc.tolist()]
    assert csr == [[0, 1, 2, 4], [2, 0, 0, 2], [2, 1, 0, 3]]


def test_csc_and_csr_hold_the_callers_edges(named):
    edge_index, sizes = named
    graph = GraphStructure.from_edge_index(edge_index, sizes).validate()
    assert torch.equal(graph.edge_index(), edge_index)
    src = torch.arange(graph.num_src).repeat_interleave(graph.rowptr.diff())
    assert edge_set(torch.stack([src, graph.col])) == edge_set(edge_index)
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (*sizes, edge_index.shape[1])


def test_order_within_a_destination_is_the_callers(named):
    graph = GraphStructure.from_edge_index(*named)
    order, same_destination = graph.edge_order(), graph.dst[1:] == graph.dst[:-1]
    assert bool((order[1:] > order[:-1])[same_destination].all())


def test_unchecked_conversion_gives_the_checked_structure(named):
    checked, unchecked = (
        GraphStructure.from_edge_index(*named, validate=validate) for validate in (True, False)
    )
    assert torch.equal(unchecked.edge_order(), checked.edge_order())
    assert torch.equal(unchecked.colptr, checked.colptr)
    assert torch.equal(unchecked.row, checked.row)


def test_sorted_edges_need_no_permutation():
    assert GraphStructure.from_edge_index(*GRAPHS["sorted"]).perm is None
    assert GraphStructure.from_edge_index(*GRAPHS["shuffled"]).perm is not None


@pytest.mark.parametrize(
    ("num_src", "dtype"), [(3, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int64)]
)
def test_indices_are_32_bit_when_sizes_allow_and_64_bit_when_not(num_src, dtype):
    graph = GraphStructure.from_edge_index(EXAMPLE, (num_src, 3), reverse=False)
    assert graph.row.dtype == graph.colptr.dtype == dtype


@pytest.mark.parametrize("name", ["sorted", "shuffled"])
def test_csc_input_gives_the_structure_of_its_edges(name):
    coo = GraphStructure.from_edge_index(*GRAPHS[name])
    assert same(
        GraphStructure.from_csc(coo.colptr.long(), coo.row.long(), coo.num_src, coo.perm), coo
    )


def test_edge_index_object_provides_its_sizes():
    graph = GraphStructure.from_edge_index(EdgeIndex(EXAMPLE, sparse_size=(3, 4)))
    assert same(graph, GraphStructure.from_edge_index(EXAMPLE, (3, 4)))
    assert type(graph.row) is torch.Tensor


def test_disjoint_concatenates_graphs():
    first, second = GRAPHS["shuffled"], GRAPHS["many_to_few"]
    graph = GraphStructure.disjoint(
        [GraphStructure.from_edge_index(*first), GraphStructure.from_edge_index(*second)]
    )
    shift = torch.tensor(first[1])[:, None]
    assert torch.equal(
        graph.validate().edge_index(), torch.cat([first[0], second[0] + shift], dim=1)
    )
    assert (graph.num_src, graph.num_dst) == tuple(
        a + b for a, b in zip(first[1], second[1], strict=True)
    )


ADJ_T = torch.sparse_coo_tensor(EXAMPLE.flip(0), torch.ones(4), (3, 3))
MAKERS = {
    "edge_index": lambda **options: GraphStructure.from_edge_index(EXAMPLE, 3, **options),
    "csc": lambda **options: GraphStructure.from_csc(
        GRAPH.colptr, GRAPH.row, 3, GRAPH.perm, **options
    ),
    "COO": lambda **options: GraphStructure.from_adj_t(ADJ_T, **options),
    "CSR": lambda **options: GraphStructure.from_adj_t(ADJ_T.to_sparse_csr(), **options),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_structure_has_both_sides_unless_the_reverse_is_left_out(make):
    whole, bare = make(), make(reverse=False)
    assert not bare.has_reverse
    assert same(bare.with_reverse(), whole.validate())


def test_disjoint_joins_the_reverse_structures_without_sorting(monkeypatch):
    first, second = (
        GraphStructure.from_edge_index(*GRAPHS[name]) for name in ("shuffled", "many_to_few")
    )
    expected = GraphStructure.disjoint(
        [replace(first, rowptr=None, col=None, csr_to_csc=None), second]
    ).with_reverse()
    monkeypatch.setattr(torch, "sort", lambda *_, **__: pytest.fail("sorted"))
    assert same(GraphStructure.disjoint([first, second]), expected)


def csc_inputs():
    return [ints(0, 2, 2, 4), ints(2, 1, 0, 2), ints(0, 3, 1, 2)]


@pytest.mark.parametrize(
    ("make", "inputs"),
    (
        (lambda colptr, row, perm: GraphStructure.from_csc(colptr, row, 3, perm), csc_inputs()),
        (
            lambda edges, ids: GraphStructure.from_edge_index(
                edges, 3, global_edge_id=ids, reverse=False
            ),
            [torch.stack([ints(2, 1, 0, 2), ints(0, 0, 2, 2)]), torch.arange(4)],
        ),
        (
            lambda *csr: GraphStructure.from_adj_t(torch.sparse_csr_tensor(*csr, torch.ones(4))),
            csc_inputs()[:2],
        ),
    ),
    ids=("from_csc", "from_edge_index", "from_adj_t"),
)
def test_writing_into_the_inputs_does_not_change_the_structure(make, inputs):
    expected = make(*(tensor.clone() for tensor in inputs))
    graph = make(*inputs)
    for tensor in inputs:
        tensor.zero_()
    assert same(graph, expected)


def test_disjoint_keeps_a_shared_in_degree():
    three, one = (GraphStructure.from_edge_index(*GRAPHS[name]) for name in ("nearest", "one_each"))
    assert disjoint(three, three).fixed_in_degree.shape == (3, 0)
    assert disjoint(three, one).fixed_in_degree is None


def test_methods_return_new_values_and_nothing_can_be_set():
    assert GRAPH.rowptr is None
    assert REVERSE.has_reverse
    assert REVERSE.with_reverse() is REVERSE
    with pytest.raises(AttributeError):
        GRAPH.row = REVERSE.row


def test_saved_structure_loads_with_safe_defaults():
    graph = REVERSE
    for saved, restore in (
        (graph, lambda loaded: loaded),
        (graph.state_dict(), GraphStructure.from_state),
    ):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        assert same(restore(torch.load(file)), graph)


def test_repr_is_one_line():
    assert (
        repr(GRAPH)
        == "GraphStructure(num_src=3, num_dst=3, num_edges=4, reverse=False, int32, cpu)"
    )
    assert "reverse=True, fixed_in_degree=3, int32" in repr(
        GraphStructure.from_edge_index(*GRAPHS["nearest"])
    )


def test_a_schedule_of_the_former_release_is_left_out():
    with pytest.warns(DeprecationWarning, match="with_dst_schedule does nothing"):
        assert GRAPH.with_dst_schedule(torch.zeros(3, 2)) is GRAPH
    saved = REVERSE.state_dict() | {"dst_schedule": ints(2, 0, 1)}
    assert same(GraphStructure.from_state(saved), REVERSE)


@pytest.mark.parametrize(
    ("name", "degree"), [("nearest", 3), ("one_each", 1), ("shuffled", None), ("no_edges", None)]
)
def test_fixed_in_degree_is_detected_where_values_are_checked(name, degree):
    edge_index, sizes = GRAPHS[name]
    graph = GraphStructure.from_edge_index(edge_index, sizes)
    again = GraphStructure.from_csc(graph.colptr, graph.row, graph.num_src)
    for checked in (graph, again):
        if degree is None:
            assert checked.fixed_in_degree is None
        else:
            assert checked.fixed_in_degree.shape[0] == degree
    assert GraphStructure.from_edge_index(edge_index, sizes, validate=False).fixed_in_degree is None


def sparse(*shape, dims=None):
    return torch.ones(*shape).to_sparse(dims) if dims else torch.ones(*shape).to_sparse()


NEAREST = GraphStructure.from_edge_index(*GRAPHS["nearest"])
ADJACENCY = r"adj_t must have two sparse dimensions \[N_dst, N_src\].*got shape "
CSC_ENDS = "colptr must start at 0 and end at the number of edges 3, got "


@refused(
    (lambda: from_coo(torch.zeros(4).long(), (1, 1)), r"shape \[2, E\].*got \(4,\)"),
    (lambda: from_coo(torch.zeros(3, 4).long(), (1, 1)), r"shape \[2, E\].*got \(3, 4\)"),
    (lambda: from_coo(torch.zeros(2, 4), (1, 1)), "dtype int32 or int64, got torch.float32"),
    (lambda: from_coo([[0, 3], [0, 0]], (3, 3)), r"source .*0 .. 2.*got values from 0 to 3"),
    (lambda: from_coo([[0, -1], [0, 0]], (3, 3)), "source .*got values from -1 to 0"),
    (lambda: from_coo([[0, 1], [0, 2]], (3, 2)), "destination .*got values from 0 to 2"),
    (lambda: from_coo(EXAMPLE, (3, -1)), "num_dst must be a number of nodes >= 0, got -1"),
    (lambda: from_coo(EXAMPLE, (3, 3.0)), "num_dst must be a number of nodes >= 0, got 3.0"),
    (lambda: from_coo(EXAMPLE, (3, 3, 3)), "too many values to unpack"),
    (
        lambda: from_coo(EXAMPLE, None),
        r"num_nodes must be \(num_src, num_dst\), got None and an edge_index without",
    ),
    (
        lambda: from_coo(EdgeIndex(EXAMPLE, sparse_size=(3, 4)), (3, 3)),
        "num_dst must be 4, .* EdgeIndex, got 3",
    ),
    (lambda: from_csc([0, 2, 1, 3], [0, 0, 0]), "colptr must not decrease, got 2, 1 at position 1"),
    (lambda: from_csc([1, 2, 3], [0, 0, 0]), CSC_ENDS + "1 and 3"),
    (lambda: from_csc([0, 2], [0, 0, 0]), CSC_ENDS + "0 and 2"),
    (lambda: from_csc([0, 3], [0, 1, 0]), "row must hold values in 0 .. 0"),
    (lambda: from_csc([0, 3], [0, -1, 0]), "got values from -1 to 0"),
    (lambda: from_csc([], []), "colptr must have num_dst"),
    (lambda: from_csc([0, 1], [[0]]), "row must be one-dimensional"),
    (
        lambda: from_csc([0, 1], [0], torch.float32),
        "colptr must have dtype .*int32 or .*int64, got torch.float32",
    ),
    (lambda: from_csc([0, 1], [0], device="meta"), "one device, got row on meta and others on cpu"),
    (lambda: GraphStructure.from_adj_t(torch.ones(2, 2)), "sparse COO, CSR or CSC layout"),
    (lambda: GraphStructure.from_adj_t(sparse(3)), ADJACENCY + r"\(3,\) with 1 sparse"),
    (lambda: GraphStructure.from_adj_t(sparse(2, 2, 2)), ADJACENCY + r"\(2, 2, 2\) with 3 sparse"),
    (
        lambda: GraphStructure.from_adj_t(sparse(2, 3, dims=1)),
        ADJACENCY + r"\(2, 3\) with 1 sparse and 1 dense",
    ),
    (
        lambda: GraphStructure.from_adj_t(torch.ones(2, 3, 3).to_sparse_csc()),
        ADJACENCY + r"\(2, 3, 3\) with 2 sparse",
    ),
    (
        lambda: disjoint(changed(global_edge_id=torch.arange(4))),
        "graphs must be whole, got .* global_edge_id",
    ),
    (lambda: GRAPH.to(torch.float16), "device must be a device, got torch.float16"),
    (lambda: changed(perm=ints(0, 0, 0)), "perm must have 4 entries, got 3"),
    (
        lambda: changed(perm=torch.zeros(4).long()),
        "perm must have dtype torch.int32, got torch.int64",
    ),
    (lambda: changed(rowptr=ints(0, 0, 0, 0)), "rowptr, col, csr_to_csc must come together"),
    (lambda: changed(sources=torch.zeros(3, 1)), r"sources must have shape \[num_src, 0\]"),
    (
        lambda: changed(perm=ints(0, 0, 1, 2)).validate(),
        "perm must be a permutation of 0 .. 3, got 1 values missing",
    ),
    (
        lambda: changed(REVERSE, col=REVERSE.col.roll(1)).validate(),
        "rowptr, col must hold the edges of colptr, row",
    ),
    (
        lambda: replace(NEAREST, fixed_in_degree=torch.empty(2, 0)),
        r"K \* 13 destinations = 39 edges, got K = 2",
    ),
    (
        lambda: replace(NEAREST, fixed_in_degree=torch.empty(3)),
        r"degree must have shape \[K, 0\].*got \(3,\)",
    ),
    (lambda: replace(NEAREST, fixed_in_degree=3), r"degree must be a tensor \[K, 0\].*got int"),
    (
        lambda: replace(
            from_coo([[0, 1, 0, 1], [0, 0, 0, 1]], 2), fixed_in_degree=torch.empty(2, 0)
        ).validate(),
        "fixed_in_degree must be the in-degree of every destination, got 2 .*leave it out",
    ),
)
def test_wrong_structures_are_refused_with_the_reason(wrong, message):
    raises(wrong, message)


class Attend(torch.nn.Module):
    """Attention among nodes whose graph is an input."""

    def forward(self, x, graph):
        return edge_attention(x, x, x, graph, config=KernelConfig("torch"))[0] + graph.num_src


def draw_graph(nodes, edges):
    edge_index = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(edges))
    graph = GraphStructure.from_edge_index(edge_index, nodes)
    return torch.linspace(0, 1, nodes * 8).view(nodes, 2, 4), graph


@pytest.mark.parametrize("graph", [GRAPH, REVERSE, NEAREST], ids=repr)
def test_a_pytree_of_its_tensors_round_trips(graph):
    leaves, spec = pytree.tree_flatten(graph)
    assert len(leaves) == len(graph.state_dict())
    assert same(
        pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec))), graph
    )
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(graph)[0]]
    assert paths == [f"['{name}']" for name in graph.state_dict()]
    assert pytree.tree_map(lambda tensor: tensor.to("meta"), [graph])[0].device.type == "meta"
    assert "'row': 1" in repr(pytree.tree_map(torch.Tensor.dim, graph))


@pytest.mark.compiled
def test_a_graph_is_an_input_of_a_compiled_function():
    torch._dynamo.reset()
    attend, counter = Attend(), CompileCounter()
    options = {"fullgraph": True, "dynamic": True, "backend": counter}
    step = torch.compile(lambda x, graph: attend(x, pytree.tree_map(torch.clone, graph)), **options)
    for sizes in ((5, 9), (7, 20)):
        torch.testing.assert_close(step(*draw_graph(*sizes)), attend(*draw_graph(*sizes)))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "dim", [torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO], ids=["dynamic", "auto"]
)
def test_a_graph_is_an_input_of_an_exported_program(dim):
    attend, (x, graph) = Attend(), draw_graph(5, 9)
    sizes = [{0: dim} for _ in graph.state_dict()]
    program = torch.export.export(
        attend, (x, graph), dynamic_shapes={"x": {0: dim}, "graph": sizes}
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for loaded in (program, torch.export.load(file)):
        torch.testing.assert_close(loaded.module()(*draw_graph(7, 20)), attend(*draw_graph(7, 20)))


@pytest.mark.parametrize(("row", "index"), [(0, 4), (1, 3), (0, -1), (1, -1)])
def test_indices_that_the_host_does_not_check_are_asserted_before_memory_is_read_with_them(
    row, index
):
    edge_index = torch.tensor([[3, 0, 2], [0, 2, 1]])
    edge_index[row, 1] = index
    message = (
        f"{('source', 'destination')[row]} .* must hold values from 0 to below the number of nodes"
    )
    with pytest.raises(RuntimeError, match=message):
        GraphStructure.from_edge_index(edge_index, (4, 3), validate=False)


@pytest.mark.parametrize(
    ("colptr", "row"), [((0, 2, 4), (0, 1, 1)), ((0, 2, 1, 3), (0, 1, 1)), ((0, 3), (0, 1, 2))]
)
def test_pointers_and_sources_that_the_host_does_not_check_are_asserted(colptr, row):
    with pytest.raises(RuntimeError, match="colptr must increase|row must hold values"):
        GraphStructure.from_csc(torch.tensor(colptr), torch.tensor(row), 2, validate=False)


@pytest.mark.parametrize("position", [-1, 3])
def test_positions_of_edges_that_the_host_does_not_check_are_asserted(position):
    colptr, row, perm = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2])
    GraphStructure.from_csc(colptr, row, 2, perm=perm, validate=False)
    perm[1] = position
    with pytest.raises(RuntimeError, match="perm must hold values .* below the number of edges"):
        GraphStructure.from_csc(colptr, row, 2, perm=perm, validate=False)
