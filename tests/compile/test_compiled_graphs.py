"""Graphs in compiled code: handed in, held, or made there from edges whose number only the run knows."""

import pytest
import torch
from support.compiled import (
    DIM,
    LAYERS,
    SIZES,
    assert_compiled_is_eager,
    counting,
    make_edges,
    make_layer,
    make_sample,
    sample_for,
)
from torch import nn

from anemoi_gt import GraphStructure
from anemoi_gt.graph import build


def compiled_once(function, **options):
    """The function compiled for sizes that change, and the counter of compilations."""
    counter = counting()
    return torch.compile(function, fullgraph=True, dynamic=True, backend=counter, **options), counter


def by_nonzero(layer, stable):
    """Edges where a matrix [N_src, N_dst] holds true; `weights` [N_src, N_dst, D] become attributes."""

    def step(matrix, leaves):
        edge_index = matrix.nonzero().T
        sizes = (leaves["src"].shape[-2], leaves["dst"].shape[-2])
        graph = GraphStructure.from_edge_index(edge_index, sizes, stable=stable, validate=False)
        return layer((leaves["src"], leaves["dst"]), graph, leaves["weights"][edge_index[0], edge_index[1]])

    return step


def by_mask(layer):
    """Edges that a mask [E] keeps; the mask cuts `weights` [E, D] too, whose number of rows is then another unknown."""

    def step(mask, leaves, edge_index):
        edge_index = edge_index[:, mask]
        sizes = (leaves["src"].shape[-2], leaves["dst"].shape[-2])
        graph = GraphStructure.from_edge_index(edge_index, sizes, validate=False).with_reverse()
        return layer((leaves["src"], leaves["dst"]), graph, leaves["weights"][mask])

    return step


def draw_matrix(size, density, device="cpu"):
    """A matrix of edges, and tensors by name."""
    num_src, num_dst, num_edges, _ = size
    sample = make_sample(*size, device=device)
    tensors = {name: sample.tensors[name] for name in ("src", "dst")}
    generator = torch.Generator().manual_seed(num_edges)
    tensors["weights"] = torch.randn(num_src, num_dst, DIM, generator=generator).to(device)
    return (torch.rand(num_src, num_dst, generator=generator) < density).to(device), tensors


def test_edges_found_by_nonzero_are_compiled_once_for_any_number():
    layer = make_layer("conv")
    step = by_nonzero(layer, stable=True)
    compiled, counter = compiled_once(step)
    compilations = []
    for size, density in zip(SIZES[:2], (0.4, 0.0), strict=True):
        matrix, tensors = draw_matrix(size, density)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_compiled_is_eager(layer, lambda t, m=matrix: compiled(m, t), lambda t, m=matrix: step(m, t), tensors)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


def test_edges_kept_by_a_mask_are_compiled_once_for_any_number():
    layer = make_layer("conv")
    step = by_mask(layer)
    compiled, counter = compiled_once(step)
    compilations = []
    for size in SIZES[:2]:
        edge_index, sample = make_edges(*size[:3]), make_sample(*size)
        mask = torch.rand(size[2], generator=torch.Generator().manual_seed(1)) < 0.6
        tensors = {"src": sample.tensors["src"], "dst": sample.tensors["dst"], "weights": sample.tensors["attr"]}
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_compiled_is_eager(
                layer,
                lambda t, m=mask, e=edge_index: compiled(m, t, e),
                lambda t, m=mask, e=edge_index: step(m, t, e),
                tensors,
            )
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


def test_kernels_take_edges_that_are_grouped_without_order(kernel_device, monkeypatch):
    monkeypatch.setattr(build, "_order_may_be_open", lambda index: True)  # on a CPU the sort would take its place
    layer = make_layer("conv", "triton", kernel_device)
    step = by_nonzero(layer, stable=False)
    compiled, _ = compiled_once(step)
    matrix, tensors = draw_matrix((5, 4, 9, 1), 0.4, kernel_device)
    assert_compiled_is_eager(layer, lambda t: compiled(matrix, t), lambda t: step(matrix, t), tensors)


def test_a_layer_takes_found_edges_without_a_structure():
    layer = make_layer("conv")

    def step(matrix, leaves):
        edge_index = matrix.nonzero().T
        return layer((leaves["src"], leaves["dst"]), edge_index, leaves["weights"][edge_index[0], edge_index[1]])

    matrix, tensors = draw_matrix(SIZES[0], 0.4)
    compiled, _ = compiled_once(step)
    assert_compiled_is_eager(layer, lambda t: compiled(matrix, t), lambda t: step(matrix, t), tensors)


def test_attributes_of_another_number_of_edges_raise_in_the_run():
    layer = make_layer("conv")

    def step(matrix, other, leaves):
        graph = GraphStructure.from_edge_index(matrix.nonzero().T, matrix.shape, validate=False)
        return layer((leaves["src"], leaves["dst"]), graph, leaves["weights"][other])

    compiled, _ = compiled_once(step)
    matrix, tensors = draw_matrix(SIZES[0], 0.4)
    with torch.no_grad():  # whose graph is compiled sooner
        compiled(matrix, matrix, tensors)
        with pytest.raises(RuntimeError, match="Runtime assertion failed for expression Eq"):
            compiled(matrix, ~matrix, tensors)


@pytest.mark.parametrize("row", [0, 1])
def test_indices_out_of_range_raise_in_the_run(row):
    compiled, _ = compiled_once(lambda e, n: GraphStructure.from_edge_index(e, (n.shape[0], n.shape[1])).row)
    edge_index, nodes = make_edges(9, 7, 31), torch.empty(9, 7)
    assert torch.equal(compiled(edge_index, nodes), GraphStructure.from_edge_index(edge_index, (9, 7)).row)
    edge_index[row, 5] = (9, 7)[row]
    with pytest.raises(RuntimeError, match="must hold values from 0 to below the number of nodes"):
        compiled(edge_index, nodes)


BREAK = {  # each makes one field of a structure wrong, its metadata not
    "colptr must rise": lambda state: state["colptr"][:1].fill_(1),
    "row must hold values": lambda state: state["row"][:1].fill_(9),
    "perm must be a permutation": lambda state: state["perm"][:2].fill_(0),
    "col must hold the edges of colptr, row": lambda state: state["col"].copy_(state["col"].flip(0)),
}


@pytest.mark.parametrize("message", BREAK)
def test_a_wrong_structure_raises_in_the_run(message):
    compiled, _ = compiled_once(lambda state: GraphStructure(**state).validate().dst)
    state = GraphStructure.from_edge_index(make_edges(9, 7, 31), (9, 7)).with_reverse().state_dict()
    compiled(state)
    BREAK[message](state)
    with pytest.raises(RuntimeError, match=message):
        compiled(state)


def test_indices_are_as_wide_as_a_number_of_edges_that_is_not_known():
    def width(mask, edge_index):
        return GraphStructure.from_edge_index(edge_index[:, mask], (9, 7), validate=False).row

    def bounded(mask, edge_index):
        edge_index = edge_index[:, mask]
        torch._check(edge_index.shape[1] < 2**31)
        return GraphStructure.from_edge_index(edge_index, (9, 7), validate=False).row

    mask, edge_index = torch.ones(31, dtype=torch.bool), make_edges(9, 7, 31)
    dtypes = [compiled_once(function)[0](mask, edge_index).dtype for function in (width, bounded)]
    assert dtypes == [torch.int64, torch.int32]


class Holding(nn.Module):
    """A layer that holds its graph."""

    def __init__(self, layer, graph):
        super().__init__()
        self.layer, self.graph = layer, graph

    def forward(self, leaves):
        return LAYERS["conv"][1](self.layer, self.graph, leaves)


@pytest.fixture(scope="module")
def held():
    """A module that holds its graph, the module compiled, and a sample."""
    sample = sample_for("conv", SIZES[0])
    module = Holding(make_layer("conv"), sample.graph)
    compiled, _ = compiled_once(module)
    assert_compiled_is_eager(module, compiled, module, sample.tensors)
    return module, compiled, sample


def test_a_graph_that_a_module_holds_may_be_replaced_by_one_of_its_sizes(held):
    module, compiled, sample = held
    src, dst = make_edges(*SIZES[0][:3])
    edge_index = torch.stack([src.flip(0), dst.sort().values])
    other = GraphStructure.from_edge_index(edge_index, SIZES[0][:2]).with_reverse()
    assert not torch.equal(other.row, sample.graph.row)
    module.graph = other
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_compiled_is_eager(module, compiled, module, sample.tensors)


def test_a_graph_that_a_module_holds_may_be_replaced_by_one_of_other_sizes(held):
    module, compiled, _ = held
    other = sample_for("conv", SIZES[1])
    module.graph = other.graph
    assert_compiled_is_eager(module, compiled, module, other.tensors)


def test_a_graph_without_source_side_gets_it_in_passing():
    layer, sample = make_layer("conv"), sample_for("conv", SIZES[0])
    fields = ("colptr", "row", "sources", "perm")
    state = sample.graph.state_dict()
    bare = GraphStructure.from_state({name: state[name] for name in fields if name in state})
    compiled, _ = compiled_once(layer)
    assert_compiled_is_eager(
        layer,
        lambda leaves: LAYERS["conv"][1](compiled, bare, leaves),
        lambda leaves: LAYERS["conv"][1](layer, bare, leaves),
        sample.tensors,
    )
