"""Compiled code takes other nodes, edges and samples without being compiled again."""

import pytest
import torch
from support.compiled import LAYERS, SIZES, assert_compiled_is_eager, counting, make_layer, sample_for


def mark(graph, leaves):
    """Say of nodes, edges and samples that they will change."""
    for tensor in graph.state_dict().values():
        torch._dynamo.mark_dynamic(tensor, 0)
    for tensor in leaves.values():
        torch._dynamo.mark_dynamic(tensor, list(range(tensor.dim() - 1)))


def run_sizes(name, sizes, prepare=lambda graph, leaves: None, **options):
    """Compare with eager for each of some sizes; how often was compiled after each."""
    layer, counter, compilations, call = make_layer(name), counting(), [], LAYERS[name][1]
    compiled = torch.compile(layer, fullgraph=True, backend=counter, **options)
    for size in sizes:
        sample = sample_for(name, size)

        def run(leaves, graph=sample.graph):
            prepare(graph, leaves)
            return call(compiled, graph, leaves)

        def eager(leaves, graph=sample.graph):
            return call(layer, graph, leaves)

        assert_compiled_is_eager(layer, run, eager, sample.tensors)
        compilations.append(counter.frame_count)
    return compilations


@pytest.mark.parametrize("name", ["mapper_block", "processor_in_groups"])
def test_dynamic_code_is_compiled_once(name):
    with torch._dynamo.config.patch(error_on_recompile=True):
        first, second = run_sizes(name, SIZES[:2], dynamic=True)
    assert first == second


def test_marked_nodes_edges_and_samples_are_compiled_once():
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert run_sizes("processor_block", SIZES[:2], prepare=mark) == [1, 1]


def test_unmarked_sizes_are_compiled_twice_and_no_more():
    assert run_sizes("conv", SIZES) == [1, 2, 2]


def test_no_edges_are_right_however_often_it_takes_to_compile():
    num_src, num_dst, _, samples = SIZES[0]
    run_sizes("conv", (SIZES[0], (num_src, num_dst, 0, samples)), dynamic=True)
