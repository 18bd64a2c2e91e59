"""Programs: modules after torch.export, with sizes left open, and with none of our operators in them."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from support.differentiate import randomise
from support.graphs import GRAPHS
from support.run import structure
from torch.export import Dim

import anemoi_gt
from anemoi_gt import AttentionConfig, GraphTransformerProcessorBlock
from anemoi_gt.deploy import Autocast, GraphAsInput, LayerOnTensors, export_model, export_program, graph_tensors
from anemoi_gt.deploy.program import _replacement

from .conftest import OTHER


def names(program):
    """Names of the operators in a program."""
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def assert_same(program, inputs, expected):
    torch.testing.assert_close(program.module()(*inputs), expected)


def test_a_model_takes_any_number_of_samples_and_leaves_no_operator_of_ours(make_model, fields):
    model = make_model(dropout=0.5, checkpoint_groups=1).train()
    program = export_model(model, fields(1), max_batch=8)
    assert not {name for name in names(program) if "anemoi_gt" in name}
    assert model.training and all(part.training for part in model.modules())
    assert model.processor_edges.structure().has_reverse
    model.eval()
    with torch.no_grad():
        for samples in (1, 2, 5):
            assert_same(program, (fields(samples),), model(fields(samples)))


def test_source_sides_of_static_graphs_stay_behind(make_model, fields):
    program = export_model(make_model(), fields(1), max_batch=1)
    assert not {name for name in program.constants if "csr_to_csc" in name or "rowptr" in name}
    assert {name for name in program.constants if "colptr" in name}


def test_a_model_whose_graph_is_an_input_serves_other_graphs(make_model, fields):
    model, other = make_model().eval(), make_model(*OTHER).eval()
    trained = {name: value for name, value in model.state_dict().items() if "trainable" not in name}
    other.load_state_dict(trained, strict=False)
    with_graph = GraphAsInput(model)
    shapes = with_graph.dynamic_shapes(Dim("samples", min=1, max=64))
    program = export_program(with_graph, (fields(2), graph_tensors(model)), shapes)
    with torch.no_grad():
        assert_same(program, (fields(2), graph_tensors(model)), model(fields(2)))
        x = fields(3, OTHER[0]["data"])
        assert_same(program, (x, graph_tensors(other)), other(x))


def test_a_block_on_tensors_takes_any_nodes_and_edges():
    block = GraphTransformerProcessorBlock(
        in_channels=8, hidden_dim=16, out_channels=8, num_heads=2, edge_dim=3, config=AttentionConfig(backend="torch")
    )
    layer, (samples, nodes, edges) = LayerOnTensors(randomise(block)), map(Dim, ("samples", "nodes", "edges"))

    def problem(name, batch):
        graph = structure(GRAPHS[name])
        state = {field: graph.state_dict()[field] for field in ("colptr", "row", "sources")}
        return torch.randn(batch, graph.num_src, 8), state, torch.randn(graph.num_edges, 3)

    shapes = {"colptr": {0: nodes + 1}, "row": {0: edges}, "sources": {0: nodes}}
    program = export_program(layer, problem("self_loops", 2), ({0: samples, 1: nodes}, shapes, {0: edges}))
    with torch.no_grad():
        for name, batch in (("self_loops", 1), ("duplicates", 3)):
            inputs = problem(name, batch)
            assert_same(program, inputs, layer(*inputs))


def test_under_autocast_a_program_rounds_as_the_model_does(make_model, fields):
    model = Autocast(make_model(), "cpu", torch.bfloat16).eval()
    program = export_model(model, fields(1), max_batch=4)
    with torch.no_grad():
        assert torch.equal(program.module()(fields(3)), model(fields(3)))


def test_a_batch_of_no_samples_is_refused(make_model, fields):
    with pytest.raises(ValueError, match="max_batch must be a number of samples, at least 1, got 0"):
        export_model(make_model(), fields(1), max_batch=0)


def test_pieces_of_mappers_cannot_have_an_open_size(make_model):
    with pytest.raises(ValueError, match="must have mapper_chunks=1, got 3"):
        GraphAsInput(make_model(mapper_chunks=3))


def test_an_operator_without_another_form_is_named():
    operator = torch.ops.anemoi_gt.edge_attention_torch_backward.default
    with pytest.raises(ValueError, match="must not sort edges, the module calls .*edge_attention_torch_backward"):
        _replacement(operator)


def test_kernels_of_the_interpreter_cannot_be_exported():
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled here")
    with pytest.raises(ValueError, match="Triton's interpreter cannot be exported; unset TRITON_INTERPRET"):
        _replacement(torch.ops.anemoi_gt.edge_attention_triton.default)


@cache
def traced(what):
    """The lines that traced.py prints; in a process where Triton does not interpret."""
    here = Path(__file__).parent
    paths = [Path(anemoi_gt.__file__).parents[1], here.parent / "kernels", here.parent]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(here / "traced.py"), what]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


WRITTEN = {  # by each kernel of the forward pass
    "project": ["projected"],
    "edge_attention_fwd": ["attr_sums", "inverse", "lse", "numerators", "out", "scores"],
    "embed": ["rows"],
}


def test_a_program_for_a_gpu_holds_kernels_that_compile_and_no_operator_of_ours():
    lines = traced("kernels")
    assert [line["ours"] for line in lines if "ours" in line] == [[], []]
    found = [line for line in lines if "kernel" in line]
    assert [line["kernel"] for line in found] == list(WRITTEN) * 4  # encoder, processor, decoder; the layer
    for line in found:
        assert line["written"] == WRITTEN[line["kernel"]], line  # else AOTInductor would copy what is only read
        assert line["symbolic"] and line["cubin"] > 1000, line


def test_kernels_count_in_32_bits_where_ranges_of_sizes_let_them():
    wide = {line["program"]: line["wide"] for line in traced("kernels") if "kernel" in line}
    assert wide == {"model": False, "layer": True}  # 1 to 64 samples of a small graph; anything


def test_exported_kernels_are_compiled_and_called_as_eager_ones():
    lines = traced("eager")
    assert {line["kernel"] for line in lines} == set(WRITTEN)
    for line in lines:
        assert line["exported"] | {"edge_id": None} == line["eager"] | {"edge_id": None}  # which dropout alone reads
