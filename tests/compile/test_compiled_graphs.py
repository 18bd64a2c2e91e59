"""Graphs in compiled code: inputs, attributes of a module, or built there from a data-dependent number of edges."""

import pytest
import torch
from support.compiled import (
    DIM,
    SIZES,
    assert_compiled_is_eager,
    call,
    counting,
    make_edges,
    make_layer,
    sample_for,
)
from torch import nn

from anemoi_gt import GraphStructure

pytestmark = pytest.mark.compiled


@pytest.fixture(autouse=True)
def sizes_from_data():
    """Let Dynamo trace operators whose results have sizes from data, the default since torch 2.10."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def compiled_once(function, backend="aot_eager"):
    """Return the function compiled for dynamic sizes, and the counter of compilations."""
    counter = counting(backend)
    return torch.compile(function, fullgraph=True, dynamic=True, backend=counter), counter


def from_nonzero(layer, *, stable=True, as_structure=True):
    """Return a step with edges where a matrix [N_src, N_dst] is true, and attributes `weights` [N_src, N_dst, D]."""

    def step(matrix, leaves):
        edge_index = matrix.nonzero().T
        attr = leaves["weights"][edge_index[0], edge_index[1]]
        if as_structure:
            sizes = (leaves["src"].shape[-2], leaves["dst"].shape[-2])
            edge_index = GraphStructure.from_edge_index(
                edge_index, sizes, stable=stable, validate=False
            )
        return layer((leaves["src"], leaves["dst"]), edge_index, attr)

    return step


def draw_matrix(size, density=0.4, device="cpu"):
    """Return a matrix of edges, and tensors by name."""
    num_src, num_dst, num_edges, _ = size
    sample, generator = sample_for("conv", size, device), torch.Generator().manual_seed(num_edges)
    tensors = {name: sample.tensors[name] for name in ("src", "dst")}
    tensors["weights"] = torch.randn(num_src, num_dst, DIM, generator=generator).to(device)
    return (torch.rand(num_src, num_dst, generator=generator) < density).to(device), tensors


def assert_step_is_eager(layer, step, *draws, backend="aot_eager"):
    """Assert that a step compiled for dynamic sizes is eager's, and not recompiled, for each of `draws`."""
    compiled, counter = compiled_once(step, backend)
    compilations = []
    for edges, tensors in draws:
        with torch._dynamo.config.patch(error_on_recompile=True):
            functions = [lambda t, f=function, e=edges: f(e, t) for function in (compiled, step)]
            assert_compiled_is_eager(layer, *functions, tensors)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


def test_edges_from_nonzero_are_compiled_once_for_any_number():
    layer = make_layer("conv")
    assert_step_is_eager(
        layer, from_nonzero(layer), draw_matrix(SIZES[0]), draw_matrix(SIZES[1], 0.0)
    )


def test_kernels_accept_edges_grouped_without_order(kernel_device, unordered):
    layer = make_layer("conv", "triton", kernel_device)
    draw = draw_matrix((5, 4, 9, 1), device=kernel_device)
    assert_step_is_eager(layer, from_nonzero(layer, stable=False), draw, backend="eager")


def test_a_layer_accepts_an_edge_index_of_unknown_size():
    step = from_nonzero(make_layer("conv"), as_structure=False)
    matrix, tensors = draw_matrix(SIZES[0])
    with torch.no_grad():  # gradients are those of a structure, which the test above differentiates
        actual = compiled_once(step, "eager")[0](matrix, tensors)
        torch.testing.assert_close(actual, step(matrix, tensors))


def test_attributes_of_another_number_of_edges_raise_at_run_time():
    layer = make_layer("conv")

    def step(matrix, other, leaves):
        graph = GraphStructure.from_edge_index(matrix.nonzero().T, matrix.shape, validate=False)
        return layer((leaves["src"], leaves["dst"]), graph, leaves["weights"][other])

    compiled, _ = compiled_once(step, "eager")
    matrix, tensors = draw_matrix(SIZES[0])
    with torch.no_grad():
        compiled(matrix, matrix, tensors)
        with pytest.raises(RuntimeError, match="Runtime assertion failed for expression Eq"):
            compiled(matrix, ~matrix, tensors)


@pytest.mark.parametrize(("row", "validate"), [(0, False), (1, True)])
def test_indices_out_of_range_raise_at_run_time(row, validate):
    compiled, _ = compiled_once(
        lambda e, n: GraphStructure.from_edge_index(e, tuple(n.shape), validate=validate).row,
        "eager",
    )
    edge_index, nodes = make_edges(9, 7, 31), torch.empty(9, 7)
    assert torch.equal(
        compiled(edge_index, nodes), GraphStructure.from_edge_index(edge_index, (9, 7)).row
    )
    edge_index[row, 5] = (9, 7)[row]
    with pytest.raises(RuntimeError, match="must hold values from 0 to below the number of nodes"):
        compiled(edge_index, nodes)


@pytest.mark.parametrize(("bounded", "dtype"), [(False, torch.int64), (True, torch.int32)])
def test_indices_are_64_bit_unless_the_number_of_edges_is_bounded(bounded, dtype):
    def row(mask, edge_index):
        edge_index = edge_index[:, mask]
        if bounded:
            torch._check(edge_index.shape[1] < 2**31)
        return GraphStructure.from_edge_index(edge_index, (9, 7), validate=False).row

    assert (
        compiled_once(row, "eager")[0](torch.ones(31, dtype=torch.bool), make_edges(9, 7, 31)).dtype
        == dtype
    )


class Holding(nn.Module):
    """A layer with its graph."""

    def __init__(self, layer, graph):
        super().__init__()
        self.layer, self.graph = layer, graph

    def forward(self, leaves):
        return call(self.layer, self.graph, leaves)


def test_a_graph_held_by_a_module_may_be_replaced():
    sample, other_sizes = sample_for("conv", SIZES[0]), sample_for("conv", SIZES[1])
    module = Holding(make_layer("conv"), sample.graph)
    compiled, _ = compiled_once(module, "eager")  # whose guards are those of every backend
    assert_compiled_is_eager(module, compiled, module, sample.tensors)
    src, dst = make_edges(*SIZES[0][:3])
    edge_index = torch.stack([src.flip(0), dst.sort().values])
    module.graph = GraphStructure.from_edge_index(edge_index, SIZES[0][:2])
    assert not torch.equal(module.graph.row, sample.graph.row)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_compiled_is_eager(module, compiled, module, sample.tensors)
    module.graph = other_sizes.graph
    assert_compiled_is_eager(module, compiled, module, other_sizes.tensors)


def test_a_missing_reverse_structure_is_built_in_the_compiled_code():
    layer, sample = make_layer("conv"), sample_for("conv", SIZES[0])
    fields = ("colptr", "row", "sources", "perm")
    state = sample.graph.state_dict()
    bare = GraphStructure.from_state({name: state[name] for name in fields if name in state})
    compiled, _ = compiled_once(layer, "eager")
    functions = [lambda leaves, f=f: call(f, bare, leaves) for f in (compiled, layer)]
    assert_compiled_is_eager(layer, *functions, sample.tensors)
