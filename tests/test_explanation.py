"""explain reports the backend and kernels of each attention of a model and leaves the model unchanged."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from anemoi.models.layers.block import GraphTransformerMapperBlock, GraphTransformerProcessorBlock
from support.anemoi_model import block_inputs, build, draw, graph_of, make_block, make_options
from support.launches import noted_launches
from support.refusals import raises
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module

from anemoi_gt import (
    EncoderProcessorDecoder,
    GraphStructure,
    GraphTransformerConv,
    InteractionBlock,
    KernelConfig,
)
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.explanation import explain, explain_attention
from anemoi_gt.integrations import anemoi
from anemoi_gt.ops import backends
from anemoi_gt.ops.operator import OPERATORS

TRITON = KernelConfig(backend="triton")
EDGES = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 2]])
TORCH_PASSES = ["anemoi_gt::edge_attention_torch", "anemoi_gt::edge_attention_torch_backward"]


@pytest.fixture
def graph():
    return GraphStructure.from_edge_index(EDGES, 3)


@pytest.fixture
def conv():
    torch.manual_seed(0)
    return GraphTransformerConv(4, 16, heads=2, edge_dim=3)


@pytest.fixture
def inputs(graph):
    return torch.randn(3, 4), graph, torch.randn(4, 3)


def weather_model(**options):
    torch.manual_seed(0)
    model = EncoderProcessorDecoder(
        icosphere_graph(grid("O4"), refinement=1), 2, 1, channels=16, heads=2, **options
    )
    return model, torch.randn(1, 208, 2)


def operators(layer):
    return [pass_.operator for pass_ in layer.passes]


def test_a_layer_has_its_sizes_and_backend_and_without_gradients_no_backward(conv, inputs):
    (layer,) = explain(conv, *inputs).layers
    assert (layer.name, layer.module, layer.backend, layer.dtype) == (
        "",
        "GraphTransformerConv",
        "torch",
        "float32",
    )
    assert (layer.device, layer.features) == ("cpu", "raw")
    assert list(layer.sizes.values()) == [1, 3, 3, 4, 2, 16, 3]
    assert operators(layer) == TORCH_PASSES
    with torch.no_grad():
        assert operators(explain(conv, *inputs).layers[0]) == TORCH_PASSES[:1]


def test_rejected_backends_have_a_reason(conv, inputs, monkeypatch):
    reason = explain(conv, *inputs).layers[0].rejected["triton"]
    assert reason.startswith("its kernels run on a GPU, got tensors on cpu")
    able = backends.BACKENDS["triton"]._replace(why_not=lambda *call: None)
    monkeypatch.setitem(backends.BACKENDS, "triton", able)
    conv.config = KernelConfig(backend="torch")
    assert explain(conv, *inputs).layers[0].rejected == {
        "triton": "supported; the config names 'torch'"
    }


def test_layers_have_the_names_of_their_modules_and_are_listed_once_if_they_differ_only_by_name():
    model, x = weather_model(num_layers=3, trainable_edges=8)
    explanation = explain(model, x)
    names = ["encoder.data.proc", *(f"processor.proc.{i}" for i in range(3)), "decoder.data.proc"]
    assert [layer.name for layer in explanation.layers] == names
    assert {layer.features for layer in explanation.layers} == {"raw"}
    edges = model.encoder_edges["data"], *[model.processor_edges] * 3, model.decoder_edges["data"]
    num_edges = [part.structure().num_edges for part in edges]
    assert [layer.sizes["edges"] for layer in explanation.layers] == num_edges
    text = str(explanation)
    assert "processor.proc.0 .. processor.proc.2: 3 alike GraphTransformerProcessorBlock" in text
    assert text.count("backend torch") == 3


def test_each_chunk_of_a_chunked_layer_is_listed():
    explanation = explain(*weather_model(num_layers=1, mapper_chunks=2))
    assert [layer.name for layer in explanation.layers].count("encoder.data.proc") == 2


def test_activation_checkpointing_still_records_gradients():
    explanation = explain(*weather_model(num_layers=2, checkpoint_groups=1))
    assert all(operators(layer) == TORCH_PASSES for layer in explanation.layers)


def test_the_dtype_follows_autocast(conv, inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(conv, *inputs).layers[0].dtype == "bfloat16"


@pytest.mark.compiled
def test_a_compiled_module_is_explained_by_the_original(conv, inputs):
    assert explain(torch.compile(conv, backend="eager"), *inputs).layers[0].name == ""


def test_a_function_or_a_model_without_attention_raises(conv, inputs):
    raises(
        lambda: explain(lambda *arguments: conv(*arguments), *inputs),
        "model must be a torch.nn.Module, got function",
    )
    with pytest.raises(
        ValueError, match="an operator of anemoi_gt on these inputs, Linear called none"
    ):
        explain(nn.Linear(2, 2), torch.randn(1, 2))


def test_no_operand_is_kept_while_later_layers_compute(conv, inputs):
    _, graph, edge_attr = inputs
    other = GraphTransformerConv(32, 16, heads=2, edge_dim=3)
    queries = []
    alive = []
    conv.lin_query.register_forward_hook(
        lambda _, __, query: queries.append(StorageWeakRef(query.untyped_storage()))
    )
    other.register_forward_pre_hook(
        lambda *_: alive.append([not query.expired() for query in queries])
    )
    two = nn.ModuleList([conv, other])
    two.forward = lambda x: other(conv(x, graph, edge_attr), graph, edge_attr)
    with torch.no_grad():
        assert len(explain(two, inputs[0]).layers) == 2
    assert alive == [[False]]


def test_model_hooks_and_generator_are_left_unchanged_after_an_error_too(conv, inputs):
    conv.dropout = 0.5
    before, state = copy.deepcopy(conv.__dict__), torch.get_rng_state()
    explain(conv, *inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert conv.__dict__.keys() == before.keys()
    assert not conv._forward_hooks
    assert not conv._forward_pre_hooks
    raises(lambda: explain(conv, *inputs[:2], torch.randn(1, 3)), "edge_attr must")
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks


def meta_attention():
    """The decoder of N320 and icosphere 6, on meta tensors."""
    num_src, num_dst, num_edges = 40_962, 542_080, 1_626_240

    def draw(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def index(n):
        return torch.empty(n, dtype=torch.int32, device="meta")

    graph = GraphStructure(
        index(num_dst + 1),
        index(num_edges),
        torch.empty(num_src, 0, device="meta"),
        rowptr=index(num_src + 1),
        col=index(num_edges),
        csr_to_csc=index(num_edges),
    )
    rows = [draw(nodes, 16, 64) for nodes in (num_dst, num_src, num_src)]
    edges = draw(num_edges, 11), draw(1024, 11), draw(1024)
    return explain_attention(*rows, graph, *edges, config=TRITON)


@pytest.fixture(scope="module")
def decoder():
    return meta_attention()


def test_meta_tensors_are_enough_for_the_names_of_the_kernels_in_the_order_of_their_launches(
    decoder,
):
    forward, backward = decoder.layers[0].passes
    assert forward.kernels == tuple(
        f"edge_attention_{name}_bf16_h16_c64_d11" for name in ("project", "fwd", "embed")
    )
    lines = str(decoder).splitlines()
    at = lines.index("  forward: anemoi_gt::edge_attention_triton")
    assert lines[at + 1 : at + 4] == [f"    {kernel}" for kernel in forward.kernels]
    assert lines[at + 5 :] == [f"    {kernel}" for kernel in backward.kernels]


def test_everything_becomes_json(decoder):
    described = json.loads(json.dumps(decoder.to_dict()))
    kernels = described["layers"][0]["passes"][0]["kernels"]
    assert kernels[0] == "edge_attention_project_bf16_h16_c64_d11"


def test_a_graph_without_destinations_is_explained_by_the_kernels_that_have_programs():
    graph = GraphStructure.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), (3, 0))
    conv = GraphTransformerConv((4, 4), 16, heads=2, edge_dim=3, config=TRITON)
    text = str(explain(conv, (torch.randn(3, 4), torch.randn(0, 4)), graph, torch.zeros(0, 3)))
    assert "edge_attention_bwd_src_fp32_h2_c16" in text
    assert "edge_attention_fwd" not in text


@pytest.mark.parametrize(("fusion", "features"), [("auto", "raw"), ("none", "embedded")])
def test_swapped_blocks_of_anemoi_are_listed_and_keep_raw_edges(anemoi_as_it_is, fusion, features):
    graph = graph_of("O4", 1)
    model = build(graph, make_options())
    with anemoi.install(fusion=fusion):
        layers = explain(model, draw(graph)).layers
    assert len(layers) >= 3
    assert all("proc" in layer.name for layer in layers)
    assert {layer.features for layer in layers} == {features}
    assert all(layer.module.startswith("GraphTransformer") for layer in layers)


@pytest.mark.parametrize("kind", [GraphTransformerProcessorBlock, GraphTransformerMapperBlock])
def test_a_fused_block_of_anemoi_is_listed_with_all_its_kernels(anemoi_as_it_is, kind):
    block = make_block(kind)
    with anemoi.install(backend="triton", fusion="attention"):
        (attention,) = explain(block, *block_inputs(kind)).layers
    with anemoi.install(backend="triton", fusion="sublayers"):
        (whole,) = explain(block, *block_inputs(kind)).layers
    name = "anemoi_gt::attention_sublayer_triton"
    assert [pass_.operator for pass_ in whole.passes] == [name, f"{name}_backward"]
    for fused, alone in zip(whole.passes, attention.passes, strict=True):
        in_attention = [kernel for kernel in fused.kernels if kernel.startswith("edge_attention_")]
        assert in_attention == list(alone.kernels)
        assert any("anemoi_gt_norm" in kernel for kernel in fused.kernels)
    assert replace(whole, passes=attention.passes) == attention


def test_a_graph_network_is_listed_with_the_kernels_that_it_launches():
    block = InteractionBlock(8, edge_dim=6, config=KernelConfig("triton"))
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2))
    inputs = torch.randn(2, 8), graph, torch.randn(3, 6)
    explanation = explain(block, *inputs)
    edges, sums, nodes = explanation.layers
    assert [layer.passes[0].operator for layer in explanation.layers] == [
        "anemoi_gt::interaction_triton",
        "anemoi_gt::edge_sums_triton",
        "anemoi_gt::network_triton",
    ]
    assert [layer.passes[1].operator for layer in (edges, sums)] == [
        "anemoi_gt::interaction_triton_backward",
        "anemoi_gt::edge_gather_triton",
    ]
    assert edges.sizes == {"batch": 1, "sources": 2, "destinations": 2, "edges": 3, "hidden": 6}
    assert sums.sizes == {"batch": 1, "destinations": 2, "edges": 3, "features": 6}
    assert nodes.sizes == {"rows": 2, "inputs": 8, "outputs": 8}
    assert "3 edges, 2 to 2 nodes, batch 1, 6 hidden features, float32, cpu" in str(explanation)
    assert "3 edges, to 2 nodes, batch 1, 6 features, float32, cpu" in str(explanation)
    with noted_launches() as launches:
        out, _ = block(*inputs)
        forward = [launch.name for launch in launches]
        launches.clear()
        out.sum().backward()
    listed = [layer.passes[0].kernels for layer in explanation.layers]
    assert [name for names in listed for name in names] == forward
    listed = [layer.passes[1].kernels for layer in reversed(explanation.layers)]
    assert [name for names in listed for name in names] == [launch.name for launch in launches]


def test_every_forward_operator_of_the_library_is_listed():
    names = {name for name in dir(torch.ops.anemoi_gt) if name.endswith(("_triton", "_torch"))}
    listed = {operator.op.name() for operator in OPERATORS.values()}
    backward = {operator.op_backward.name() for operator in OPERATORS.values()}
    assert {f"anemoi_gt::{name}" for name in names} <= {
        name.partition(".")[0] for name in listed | backward
    }
