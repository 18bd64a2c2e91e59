"""GraphTransformerConv takes edges in every form that PyG writes them, and batches on one graph or on several."""

import pytest
import torch
from support.differentiate import draw
from support.refusals import raises
from support.same_numbers import assert_same
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.nn import TransformerConv

from anemoi_gt import GraphStructure, GraphTransformerConv

SRC = 9
DST = 7
EDGES = 30
DIM = 5


@pytest.fixture
def conv():
    torch.manual_seed(0)
    return GraphTransformerConv((6, 4), 8, heads=3, edge_dim=DIM).double()


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(n, f, generator=generator, dtype=torch.float64) for n, f in ((SRC, 6), (DST, 4))
    )


@pytest.fixture
def edge_index():
    """Edges without duplicates, which a sparse matrix cannot hold, in no order; the last destination has none."""
    cells = torch.randperm(SRC * (DST - 1), generator=torch.Generator().manual_seed(2))[:EDGES]
    return torch.stack([cells % SRC, cells // SRC])


@pytest.fixture
def edge_attr():
    return torch.randn(EDGES, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class FakeSparseTensor:
    """Stand-in for torch_sparse.SparseTensor, whose package is not installed: rows are destinations."""

    def __init__(self, edge_index, value, sizes):
        self.order = torch.argsort(edge_index[1] * sizes[1] + edge_index[0])
        self.src, dst = edge_index[:, self.order]
        self.rowptr = torch.searchsorted(dst.contiguous(), torch.arange(sizes[0] + 1))
        self.value, self.sizes = None if value is None else value[self.order], sizes

    def csr(self):
        return self.rowptr, self.src, self.value

    def sparse_sizes(self):
        return self.sizes

    def sparse_size(self, dim):
        return self.sizes[dim]

    def set_value(self, value, layout):
        assert layout == "coo"
        return value


def make_adj_t(layout, edge_index, values):
    coo = torch.sparse_coo_tensor(
        edge_index.flip(0), values, (DST, SRC, *values.shape[1:]), check_invariants=True
    )
    convert = {
        "COO": coo.coalesce,
        "uncoalesced COO": lambda: coo,
        "CSR": coo.to_sparse_csr,
        "CSC": coo.to_sparse_csc,
    }
    return convert[layout]()


def stored_order(adj_t):
    """Return the caller's edge of each stored value; the values of `adj_t` are 1 + the edge."""
    values = adj_t._values() if adj_t.layout == torch.sparse_coo else adj_t.values()
    return values.long() - 1


@pytest.mark.parametrize("sort_order", (None, "row", "col"))
def test_edge_index_of_pyg_matches_a_tensor(conv, x, edge_index, edge_attr, sort_order):
    edges, order = EdgeIndex(edge_index, sparse_size=(SRC, DST)), torch.arange(EDGES)
    if sort_order is not None:
        edges, order = edges.sort_by(sort_order)
    assert edges.sort_order == sort_order
    assert_same(conv(x, edges, edge_attr[order]), conv(x, edge_index, edge_attr))


def test_edge_index_of_pyg_with_other_sizes_than_x_is_refused(conv, x, edge_index, edge_attr):
    edges = EdgeIndex(edge_index, sparse_size=(12, DST))
    raises(
        lambda: conv(x, edges, edge_attr), "num_src must be 12, the size of the EdgeIndex, got 9"
    )


def test_graph_structure_matches_a_tensor_with_weights_in_the_callers_order(
    conv, x, edge_index, edge_attr
):
    expected, (_, expected_weights) = conv(x, edge_index, edge_attr, return_attention_weights=True)
    for reverse in (True, False):
        structure = GraphStructure.from_edge_index(edge_index, (SRC, DST), reverse=reverse)
        out, (same, weights) = conv(x, structure, edge_attr, return_attention_weights=True)
        assert same is structure
        assert_same((out, weights), (expected, expected_weights))


@pytest.mark.parametrize("layout", ("COO", "uncoalesced COO", "CSR", "CSC"))
def test_sparse_adjacency_matches_a_tensor(conv, x, edge_index, edge_attr, layout):
    adj_t = make_adj_t(layout, edge_index, torch.arange(1.0, EDGES + 1))
    assert_same(conv(x, adj_t, edge_attr[stored_order(adj_t)]), conv(x, edge_index, edge_attr))


@pytest.mark.parametrize("layout", ("COO", "uncoalesced COO", "CSR"))
def test_values_of_a_sparse_adjacency_are_its_edge_attributes(
    conv, x, edge_index, edge_attr, layout
):
    assert_same(conv(x, make_adj_t(layout, edge_index, edge_attr)), conv(x, edge_index, edge_attr))


def test_weights_of_a_sparse_adjacency_are_not_attributes_as_in_pyg(x, edge_index):
    theirs, ours = TransformerConv((6, 4), 8).double(), GraphTransformerConv((6, 4), 8).double()
    ours.load_state_dict(theirs.state_dict())
    adj_t = make_adj_t("CSR", edge_index, torch.rand(EDGES, dtype=torch.float64))
    assert_same(ours(x, adj_t), theirs(x, adj_t))


def test_attention_weights_of_a_sparse_adjacency_are_in_its_order_as_in_pyg(
    x, edge_index, edge_attr
):
    layers = (TransformerConv, GraphTransformerConv)
    theirs, ours = (layer((6, 4), 8, heads=3, edge_dim=DIM).double() for layer in layers)
    ours.load_state_dict(theirs.state_dict())
    adj_t = make_adj_t("COO", edge_index, edge_attr)
    _, (same, weights) = ours(x, adj_t, return_attention_weights=True)
    _, (_, expected) = theirs(x, adj_t, return_attention_weights=True)
    assert same is adj_t
    assert_same(weights, expected)


def test_sparse_tensor_matches_a_tensor_and_holds_the_weights(conv, x, edge_index, edge_attr):
    adj_t = FakeSparseTensor(edge_index, edge_attr, (DST, SRC))
    out, weights = conv(x, adj_t, return_attention_weights=True)
    expected, (_, expected_weights) = conv(x, edge_index, edge_attr, return_attention_weights=True)
    assert_same((out, weights), (expected, expected_weights[adj_t.order]))
    assert_same(
        conv(x, FakeSparseTensor(edge_index, None, (DST, SRC)), edge_attr[adj_t.order]), expected
    )


@pytest.mark.parametrize("shared", (True, False), ids=("one edge_attr", "edge_attr per element"))
def test_a_batch_on_one_graph_matches_its_elements(conv, edge_index, shared):
    x = (torch.randn(3, SRC, 6, dtype=torch.float64), torch.randn(3, DST, 4, dtype=torch.float64))
    edge_attr = torch.randn(3, EDGES, DIM, dtype=torch.float64)
    edge_attr = edge_attr[:1].expand(3, -1, -1) if shared else edge_attr
    out, (_, weights) = conv(
        x, edge_index, edge_attr[0] if shared else edge_attr, return_attention_weights=True
    )
    for b in range(3):
        alone, (_, alone_weights) = conv(
            (x[0][b], x[1][b]), edge_index, edge_attr[b], return_attention_weights=True
        )
        assert_same((out[b], weights[b]), (alone, alone_weights))


def make_graphs(*sizes):
    torch.manual_seed(6)
    edge_lists = [torch.randint(nodes, (2, edges)) for nodes, edges in sizes]
    return [
        Data(draw(n, 6), edge_index, draw(e, DIM))
        for (n, e), edge_index in zip(sizes, edge_lists, strict=True)
    ]


def test_a_pyg_batch_of_different_graphs_matches_its_graphs():
    conv = GraphTransformerConv(6, 8, heads=3, edge_dim=DIM).double()
    graphs = make_graphs((7, 20), (3, 1), (4, 0), (9, 40))
    batch = Batch.from_data_list(graphs)
    out = conv(batch.x, batch.edge_index, batch.edge_attr)
    assert_same(out, torch.cat([conv(data.x, data.edge_index, data.edge_attr) for data in graphs]))
    structure = GraphStructure.disjoint(
        [GraphStructure.from_edge_index(g.edge_index, g.num_nodes) for g in graphs]
    )
    from_structure = conv(batch.x, structure, batch.edge_attr)
    sorted_once = GraphStructure.from_edge_index(batch.edge_index, 23)
    assert torch.equal(from_structure, conv(batch.x, sorted_once, batch.edge_attr))
    assert_same(from_structure, out)
