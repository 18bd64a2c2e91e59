"""Compiled code takes any sizes without recompilation, and tensors of any memory layout."""

from functools import partial

import pytest
import torch
from support.compiled import DIM, SIZES, assert_compiled_is_eager, call, counting, make_layer, sample_for


def mark(graph, leaves):
    """Mark numbers of nodes, edges and batch elements as dynamic."""
    for tensor in graph.state_dict().values():
        torch._dynamo.mark_dynamic(tensor, 0)
    for tensor in leaves.values():
        torch._dynamo.mark_dynamic(tensor, list(range(tensor.dim() - 1)))


def run_sizes(name, sizes, prepare=lambda graph, leaves: None, **options):
    """Compare with eager for each of `sizes`; return the number of compilations after each."""
    layer, counter, compilations = make_layer(name), counting(), []
    compiled = torch.compile(layer, fullgraph=True, backend=counter, **options)
    for size in sizes:
        sample = sample_for(name, size)

        def run(function, leaves, graph=sample.graph):
            prepare(graph, leaves)
            return call(function, graph, leaves)

        assert_compiled_is_eager(layer, *(partial(run, function) for function in (compiled, layer)), sample.tensors)
        compilations.append(counter.frame_count)
    return compilations


@pytest.mark.parametrize("name", ["mapper_block", "processor_in_groups"])
def test_dynamic_code_is_compiled_once(name):
    with torch._dynamo.config.patch(error_on_recompile=True):
        first, second = run_sizes(name, SIZES[:2], dynamic=True)
    assert first == second


def test_marked_sizes_are_compiled_once():
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert run_sizes("processor_block", SIZES[:2], prepare=mark) == [1, 1]


def test_unmarked_sizes_are_compiled_twice_and_no_more():
    assert run_sizes("conv", SIZES) == [1, 2, 2]


def test_a_graph_without_edges_is_right_after_one_with_edges():
    num_src, num_dst, _, batch = SIZES[0]
    run_sizes("conv", (SIZES[0], (num_src, num_dst, 0, batch)), dynamic=True)


def padded(rows):
    """Return the rows as the inside of a larger buffer."""
    buffer = rows.new_full([size + 3 for size in rows.shape], float("nan"))
    inner = tuple(slice(1, 1 + size) for size in rows.shape)
    buffer[inner] = rows
    return buffer[inner]


LAYOUTS = {
    "padded": padded,
    "transposed": lambda rows: rows.transpose(0, -1).contiguous().transpose(0, -1),
    "every_other_row": lambda rows: rows.repeat_interleave(2, -2)[..., ::2, :],
    "at_an_odd_address": lambda rows: torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view(rows.shape),
    "expanded_row": lambda rows: rows[..., :1, :].expand(rows.shape),
}


@pytest.fixture(scope="module")
def functions():
    """A layer compiled, and the layer."""
    torch.compiler.reset()
    layer = make_layer("conv")
    return torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager"), layer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_neither_output_nor_gradients(functions, layout):
    sample, results = sample_for("conv", SIZES[0]), []
    for function in functions:
        # leaves of that layout, so that the compiled code is called with it
        leaves = {name: LAYOUTS[layout](tensor).detach().requires_grad_() for name, tensor in sample.tensors.items()}
        out = call(function, sample.graph, leaves)
        weights = torch.linspace(-1, 2, out.numel()).view(out.shape).transpose(0, 1).contiguous().transpose(0, 1)
        gradients = torch.autograd.grad(out, list(leaves.values()), weights)  # a strided upstream gradient
        results.append({"out": out.detach(), **dict(zip(leaves, gradients, strict=True))})
    torch.testing.assert_close(*results)


def test_attributes_may_differ_within_the_batch(functions):
    sample = sample_for("conv", SIZES[0])
    tensors = sample.tensors | {"attr": torch.randn(SIZES[0][3], SIZES[0][2], DIM)}
    with torch.no_grad():
        torch.testing.assert_close(*(call(function, sample.graph, tensors) for function in functions))


@pytest.mark.parametrize(("name", "message"), [("attr", "edge_attr must have shape"), ("src", "x_src must have 9")])
def test_missing_rows_raise_while_compiling(name, message):
    torch.compiler.reset()
    layer, sample = make_layer("conv"), sample_for("conv", SIZES[0])
    sample.tensors[name] = sample.tensors[name][..., :-1, :]
    with pytest.raises(Exception, match=message):
        call(torch.compile(layer, fullgraph=True, backend="eager"), sample.graph, sample.tensors)
