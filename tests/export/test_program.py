"""Programs: modules after torch.export, with sizes left open, and with none of our operators in them."""

from functools import cache
from pathlib import Path

import pytest
import torch
from support.compiling import lines_of
from support.differentiate import randomise
from support.graphs import GRAPHS
from support.run import structure
from support.weather import weather_graph
from torch.export import Dim

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder, GraphTransformerProcessorBlock
from anemoi_gt.export import Autocast, GraphAsInput, LayerOnTensors, export_model, export_program, graph_tensors
from anemoi_gt.export.program import _replacement

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
    assert not {
        name for name in program.constants if "csr_to_csc" in name or "rowptr" in name or "fixed_in_degree" in name
    }
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


@pytest.mark.parametrize("max_batch", [0, 2.5, "4", True])
def test_a_number_of_samples_that_is_none_is_refused(make_model, fields, max_batch):
    with pytest.raises(ValueError, match=f"max_batch must be a whole number of samples, at least 1, got {max_batch!r}"):
        export_model(make_model(), fields(1), max_batch=max_batch)


@pytest.mark.parametrize(
    ("change", "got"),
    [(lambda x: x[0], r"\(30, 5\)"), (lambda x: x[:0], r"\(0, 30, 5\)"), (lambda x: {"data": None}, "NoneType")],
)
def test_an_example_that_is_none_is_refused(make_model, fields, change, got):
    with pytest.raises(ValueError, match=rf"x must be an example \[B, N, channels\] of at least one sample, got {got}"):
        export_model(make_model(), change(fields(1)), max_batch=4)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: Autocast(model, "cpu", torch.bfloat16)])
def test_of_a_compiled_model_the_one_inside_is_exported_and_left_as_it_is(make_model, fields, wrap):
    model = make_model(dropout=0.5).train()
    program = export_model(wrap(torch.compile(model, backend="eager")), fields(1), max_batch=4)
    assert model.training and all(part.training for part in model.modules())
    model.eval()
    with torch.no_grad():
        assert_same(program, (fields(3),), wrap(model)(fields(3)))


def test_the_graph_of_a_compiled_model_is_an_input_like_any_other(make_model, fields):
    model = make_model().eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(GraphAsInput(compiled)(fields(2), graph_tensors(compiled)), model(fields(2)))


def test_a_graph_of_other_tensors_is_refused(make_model, fields):
    model = GraphAsInput(make_model())
    tensors = graph_tensors(make_model())
    tensors["hidden.row"] = tensors.pop("processor_edges.structure.row")
    with pytest.raises(ValueError, match=r"none of \['processor_edges.structure.row'\], and \['hidden.row'\] beside"):
        model(fields(1), tensors)


def test_data_sets_whose_names_read_alike_have_sizes_of_their_own():
    alike = ("a-b", "a_b")
    pairs = [pair for name in alike for pair in ((name, "hidden"), ("hidden", name))] + [("hidden", "hidden")]
    kinds = {(source, "to", destination): 40 for source, destination in pairs}
    graph, channels = weather_graph({"a-b": 17, "a_b": 19, "hidden": 23}, kinds), dict.fromkeys(alike, 2)
    model = EncoderProcessorDecoder(graph, channels, channels, channels=8, heads=2, num_layers=1)
    fields, shapes = GraphAsInput(model).dynamic_shapes()
    sizes = [fields[name][1] for name in alike] + [shapes[f"encoder_edges.{name}.edge_attr"][0] for name in alike]
    assert len({size.__name__ for size in sizes}) == len(sizes)


@pytest.mark.parametrize("function", [GraphAsInput, graph_tensors])
def test_another_model_has_no_graph_that_is_known_by_name(function):
    with pytest.raises(ValueError, match="model must be an EncoderProcessorDecoder, .*, got Linear; LayerOnTensors"):
        function(torch.nn.Linear(2, 2))


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
    """The lines that traced.py prints."""
    return lines_of(Path(__file__).with_name("traced.py"), what)


WRITTEN = {  # by each kernel of the forward pass
    "project": ["projected"],
    "edge_attention_fwd": ["attr_sums", "exp_scores", "inv_denominator", "lse", "out", "scores"],
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
        assert line["exported"] | {"global_edge_id": None} == line["eager"] | {
            "global_edge_id": None
        }  # which dropout alone reads
