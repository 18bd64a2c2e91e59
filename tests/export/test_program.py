"""Exported programs: dynamic sizes, and none of this library's operators in them."""

from pathlib import Path

import pytest
import torch
from support.batch import share, stack
from support.compiling import lines_of
from support.differentiate import randomise
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.refusals import raises, refused
from support.run import structure
from torch.export import Dim

from anemoi_gt import GraphTransformerProcessorBlock, KernelConfig
from anemoi_gt.export import (
    Autocast,
    TensorGraphLayer,
    export_model,
    export_program,
)
from anemoi_gt.export.program import decomposition_of
from anemoi_gt.nn import GNNMapper, GNNProcessor
from anemoi_gt.ops.tensors import EdgeAttentionOptions, IndexTensors
from anemoi_gt.ops.torch_backend.aten_decomposition import decompose
from anemoi_gt.ops.torch_backend.edge_attention_torch import edge_attention_torch


def operator_names(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def assert_same(program, inputs, expected):
    torch.testing.assert_close(program.module()(*inputs), expected)


GRAPH_TRANSFORMER = {"dropout": 0.5}
GRAPH_NETWORK = {"processor": GNNProcessor, "mapper": GNNMapper, "heads": 8}


@pytest.mark.compiled
@pytest.mark.parametrize("family", [GRAPH_TRANSFORMER, GRAPH_NETWORK])
def test_a_compiled_autocast_model_becomes_a_program_for_any_batch_size_without_our_operators(
    make_model, fields, family
):
    model = make_model(checkpoint_groups=1, **family).train()
    compiled = torch.compile(model, backend="eager")
    program = export_model(Autocast(compiled, "cpu", torch.bfloat16), fields(1), max_batch=8)
    assert not {name for name in operator_names(program) if "anemoi_gt" in name}
    of_structures = {name.rpartition(".")[2] for name in program.constants}
    assert "colptr" in of_structures
    assert not of_structures & {"csr_to_csc", "rowptr", "col", "fixed_in_degree"}
    assert model.training
    assert all(part.training for part in model.modules())
    assert model.processor_edges.structure().has_reverse
    model.eval()
    under_autocast = Autocast(model, "cpu", torch.bfloat16)
    with torch.no_grad():
        for batch in (1, 2, 5):
            assert torch.equal(program.module()(fields(batch)), under_autocast(fields(batch)))


@pytest.mark.compiled
def test_a_tensor_graph_layer_accepts_any_nodes_and_edges():
    sizes = {"in_channels": 8, "hidden_dim": 16, "out_channels": 8, "num_heads": 2, "edge_dim": 3}
    block = GraphTransformerProcessorBlock(**sizes, config=KernelConfig(backend="torch"))
    layer = TensorGraphLayer(randomise(block))
    batch, nodes, edges = map(Dim, ("batch", "nodes", "edges"))

    def problem(name, size):
        graph = structure(GRAPHS[name])
        state = {field: graph.state_dict()[field] for field in ("colptr", "row", "sources")}
        return torch.randn(size, graph.num_src, 8), state, torch.randn(graph.num_edges, 3)

    shapes = {"colptr": {0: nodes + 1}, "row": {0: edges}, "sources": {0: nodes}}
    program = export_program(
        layer, problem("self_loops", 2), ({0: batch, 1: nodes}, shapes, {0: edges})
    )
    with torch.no_grad():
        for name, size in (("self_loops", 1), ("duplicates", 3)):
            inputs = problem(name, size)
            assert_same(program, inputs, layer(*inputs))


EXAMPLE = r"x must .*\[B, N, channels\] with B at least 1, got"


@refused(
    (lambda x: x, 0, "max_batch must be at least 1, got 0"),
    *((lambda x: x, n, f"max_batch must be an integer, got {n!r}") for n in (2.5, "4", True)),
    (lambda x: x[0], 4, rf"{EXAMPLE} \(30, 5\)"),
    (lambda x: x[:0], 4, rf"{EXAMPLE} \(0, 30, 5\)"),
    (lambda x: {"data": None}, 4, f"{EXAMPLE} NoneType"),
)
def test_invalid_example_or_batch_size_raises(make_model, fields, wrong, message):
    change, max_batch = wrong
    raises(lambda: export_model(make_model(), change(fields(1)), max_batch=max_batch), message)


OPS = torch.ops.anemoi_gt
KERNELS = lambda _: decomposition_of(OPS.edge_attention_triton.default)  # noqa: E731
INTERPRETED = (
    [] if torch.cuda.is_available() else [(KERNELS, "Triton's interpreter: unset TRITON_INTERPRET")]
)


@refused(
    (
        lambda _: decomposition_of(OPS.edge_attention_torch_backward.default),
        "not sort .* calls .*_torch_backward",
    ),
    *INTERPRETED,
)
def test_module_that_cannot_be_exported_raises(make_model, wrong, message):
    raises(lambda: wrong(make_model), message)


TRACED = Path(__file__).with_name("traced.py")
WRITTEN = {  # arguments that each kernel of the forward pass writes
    "project": ["projected"],
    "edge_attention_fwd": ["attr_sums", "exp_scores", "inv_denominator", "lse", "out", "scores"],
    "embed": ["rows"],
}


@pytest.mark.process
def test_a_gpu_program_holds_kernels_that_compile_and_no_operator_of_this_library():
    lines = lines_of(TRACED, "kernels")
    assert [line["ours"] for line in lines if "ours" in line] == [[], []]
    kernels = [line for line in lines if "kernel" in line]
    # encoder, processor, decoder; the layer
    assert [line["kernel"] for line in kernels] == 4 * list(WRITTEN)
    for line in kernels:
        # otherwise AOTInductor would copy read-only arguments
        assert line["written"] == WRITTEN[line["kernel"]], line
        assert line["symbolic"], line
        assert line["cubin"] > 1000, line
    # 32-bit offsets where ranges of sizes allow it: batch 1 to 64 on a small graph; any sizes
    assert {line["program"]: line["wide"] for line in kernels} == {"model": False, "layer": True}


@pytest.mark.process
def test_exported_kernels_have_the_arguments_of_eager_ones():
    lines = lines_of(TRACED, "eager")
    assert {line["kernel"] for line in lines} == set(WRITTEN) | {"join_segments"}
    for line in lines:
        only_for_dropout = {"global_edge_id": None}
        assert line["exported"] | only_for_dropout == line["eager"] | only_for_dropout


SHAPE = (3, 4, 2)  # heads, channels, attributes


def arguments(name, form, dtype, *, shared):
    """Arguments of the operator and of its decomposition, for a batch of two."""
    samples = [make_problem(GRAPHS[name], *SHAPE, form, dtype, seed) for seed in range(2)]
    batch = stack(share(samples, "edge_weight", "edge_bias", *(["edge_attr"] if shared else [])))
    attr, graph = batch.edge_attr, structure(GRAPHS[name])
    attr = attr[None] if shared and attr is not None else attr
    sides = IndexTensors(graph.colptr, graph.row, graph.perm, graph.global_edge_id)
    rows = (batch.query, batch.key, batch.value, attr, batch.edge_weight, batch.edge_bias)
    options = EdgeAttentionOptions(0.3, 0.0, replay=True)
    return (*rows, *sides, None, *edge_attention_torch.option_arguments(options), False)


@pytest.mark.parametrize("shared", [True, False], ids=["shared attributes", "batched attributes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["raw", "raw_without_bias", "embedded", "none"])
@pytest.mark.parametrize("name", GRAPHS)
def test_decomposition_agrees_with_the_operator(name, form, dtype, shared):
    operands = arguments(name, form, dtype, shared=shared)
    for expected, actual in zip(
        edge_attention_torch.op(*operands), decompose(*operands), strict=True
    ):
        assert (actual.dtype, actual.is_contiguous()) == (expected.dtype, True)
        torch.testing.assert_close(actual, expected)


def test_dropout_raises():
    operands = arguments("shuffled", "raw", torch.float32, shared=True)
    save = False
    with pytest.raises(
        ValueError, match="exported for inference, got dropout_p=0.1; call model.eval"
    ):
        options = EdgeAttentionOptions(0.3, 0.1, replay=True)
        options = edge_attention_torch.option_arguments(options)
        decompose(*operands[:-4], torch.tensor([1]), *options, save)
