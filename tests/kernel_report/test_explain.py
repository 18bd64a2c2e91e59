"""explain reports the backend and kernels of each attention of a model and leaves the model unchanged."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from anemoi.models.layers.block import GraphTransformerMapperBlock, GraphTransformerProcessorBlock
from support.anemoi_model import block_inputs, build, draw, graph_of, make_block, make_options
from support.refusals import raises
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.profiler import profile

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder, GraphStructure, GraphTransformerConv
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.integrations import anemoi
from anemoi_gt.kernel_report import Explanation, Layer, Pass, explain, explain_attention
from anemoi_gt.kernel_report.explanation import BLOCK
from anemoi_gt.ops import backends

TRITON = AttentionConfig(backend="triton")
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
    model = EncoderProcessorDecoder(icosphere_graph(grid("O4"), refinement=1), 2, 1, channels=16, heads=2, **options)
    return model, torch.randn(1, 208, 2)


def operators(layer):
    return [pass_.operator for pass_ in layer.passes]


def test_a_layer_has_its_sizes_and_backend_and_without_gradients_no_backward(conv, inputs):
    (layer,) = explain(conv, *inputs).layers
    assert (layer.name, layer.module, layer.backend, layer.dtype) == ("", "GraphTransformerConv", "torch", "float32")
    assert (layer.device, layer.features) == ("cpu", "raw")
    assert list(layer.sizes.values()) == [1, 3, 3, 4, 2, 16, 3]
    assert operators(layer) == TORCH_PASSES
    with torch.no_grad():
        assert operators(explain(conv, *inputs).layers[0]) == TORCH_PASSES[:1]


def test_rejected_backends_have_a_reason(conv, inputs, monkeypatch):
    reason = explain(conv, *inputs).layers[0].rejected["triton"]
    assert reason.startswith("its kernels run on a GPU, got tensors on cpu")
    able = backends.BACKENDS["triton"]._replace(auto_unsupported_reason=lambda query: None)
    monkeypatch.setitem(backends.BACKENDS, "triton", able)
    conv.config = AttentionConfig(backend="torch")
    assert explain(conv, *inputs).layers[0].rejected == {"triton": "could serve; the config names 'torch'"}


def test_layers_have_the_names_of_their_modules_and_share_a_table_if_they_differ_by_name_alone():
    model, x = weather_model(num_layers=3, trainable_edges=8)
    found = explain(model, x)
    names = ["encoder.data.proc", *(f"processor.proc.{i}" for i in range(3)), "decoder.data.proc"]
    assert [layer.name for layer in found.layers] == names and {layer.features for layer in found.layers} == {"raw"}
    edges = model.encoder_edges["data"], *[model.processor_edges] * 3, model.decoder_edges["data"]
    assert [layer.sizes["edges"] for layer in found.layers] == [part.structure().num_edges for part in edges]
    assert "processor.proc.0 .. processor.proc.2: 3 alike GraphTransformerProcessorBlock" in str(found)
    assert str(found).count("backend torch") == 3


def test_each_chunk_of_a_chunked_layer_is_listed():
    found = explain(*weather_model(num_layers=1, mapper_chunks=2))
    assert [layer.name for layer in found.layers].count("encoder.data.proc") == 2


def test_activation_checkpointing_still_records_gradients():
    found = explain(*weather_model(num_layers=2, checkpoint_groups=1))
    assert all(operators(layer) == TORCH_PASSES for layer in found.layers)


def test_the_dtype_is_that_of_autocast(conv, inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(conv, *inputs).layers[0].dtype == "bfloat16"


def test_a_compiled_module_is_explained_by_the_original(conv, inputs):
    assert explain(torch.compile(conv, backend="eager"), *inputs).layers[0].name == ""


@pytest.mark.parametrize("bandwidth", [0, -1.0, float("nan"), float("inf"), "4e12"])
def test_a_bandwidth_that_is_not_a_positive_number_raises(conv, inputs, bandwidth):
    with pytest.raises(ValueError, match="bandwidth must be a positive number of bytes per second, or None, got"):
        explain(conv, *inputs, bandwidth=bandwidth)


def test_a_function_or_a_model_without_attention_raises(conv, inputs):
    raises(lambda: explain(lambda *given: conv(*given), *inputs), "model must be a torch.nn.Module, got function")
    with pytest.raises(ValueError, match="an attention of anemoi_gt on these inputs, Linear computed none"):
        explain(nn.Linear(2, 2), torch.randn(1, 2))


def test_no_operand_is_kept_while_later_layers_compute(conv, inputs):
    _, graph, edge_attr = inputs
    queries, held, other = [], [], GraphTransformerConv(32, 16, heads=2, edge_dim=3)
    conv.lin_query.register_forward_hook(lambda _, __, query: queries.append(StorageWeakRef(query.untyped_storage())))
    other.register_forward_pre_hook(lambda *_: held.append([not query.expired() for query in queries]))
    two = nn.ModuleList([conv, other])
    two.forward = lambda x: other(conv(x, graph, edge_attr), graph, edge_attr)
    with torch.no_grad():
        assert len(explain(two, inputs[0]).layers) == 2
    assert held == [[False]]


def test_model_hooks_and_generator_are_left_unchanged_after_an_error_too(conv, inputs):
    conv.dropout = 0.5
    before, state = copy.deepcopy(conv.__dict__), torch.get_rng_state()
    explain(conv, *inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert conv.__dict__.keys() == before.keys() and not conv._forward_hooks and not conv._forward_pre_hooks
    raises(lambda: explain(conv, *inputs[:2], torch.randn(1, 3)), "edge_attr must")
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks


def operands(heads=2, channels=16, dtype=torch.float32):
    rows = [torch.randn(3, heads, channels, dtype=dtype, requires_grad=True) for _ in range(3)]
    width = heads * channels
    return rows, [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((4, 3), (width, 3), (width,))]


@pytest.fixture
def explained(graph):
    rows, edges = operands()
    return explain_attention(*rows, graph, *edges, config=TRITON)


def meta_attention(channels=64, bandwidth=None):
    """The decoder of N320 and icosphere 6, on meta tensors."""
    num_src, num_dst, num_edges = 40_962, 542_080, 1_626_240

    def draw(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def index(n):
        return torch.empty(n, dtype=torch.int32, device="meta")

    graph = GraphStructure(
        index(num_dst + 1), index(num_edges), torch.empty(num_src, 0, device="meta"),
        rowptr=index(num_src + 1), col=index(num_edges), csr_to_csc=index(num_edges),
    )  # fmt: skip
    rows = [draw(nodes, 16, channels) for nodes in (num_dst, num_src, num_src)]
    edges = draw(num_edges, 11), draw(16 * channels, 11), draw(16 * channels)
    return explain_attention(*rows, graph, *edges, config=TRITON, bandwidth=bandwidth)


@pytest.fixture(scope="module")
def decoder():
    return meta_attention()


def test_meta_tensors_are_enough_for_bytes_and_lower_bounds_over_the_bandwidth(decoder):
    forward, backward = decoder.layers[0].passes
    assert forward.bytes == 2_465_115_392  # as in benchmarks/results/n320_h200.json
    assert forward.bytes + backward.bytes == 6_249_389_056
    assert decoder.bandwidth == 4.27e12 and forward.lower_bound_ms == pytest.approx(2_465_115_392 / 4.27e9)
    slower = meta_attention(bandwidth=1e12)
    assert slower.bandwidth == 1e12 and slower.layers[0].passes[0].lower_bound_ms == pytest.approx(2.465115392)


def test_bytes_of_kernels_are_what_an_h200_has_counted(decoder):
    """DRAM bytes of benchmarks/NOTES.md, of the kernels whose rows stay in the L2 cache between readers."""
    counted = {"fwd": 3.24, "bwd_dst": 3.14, "embed": 2.47, "project": 1.38, "bwd_weight": 2.90}
    kernels = {kernel.name: kernel.bytes for pass_ in decoder.layers[0].passes for kernel in pass_.kernels}
    for name, gigabytes in counted.items():
        (found,) = (size for kernel, size in kernels.items() if kernel.startswith(f"edge_attention_{name}_bf16"))
        assert 1e-9 * found == pytest.approx(gigabytes, rel=0.05), name


def test_the_table_shows_kernels_tiles_and_lower_bounds(decoder):
    text = str(decoder)
    assert "edge_attention_fwd_bf16_h16_c64_d11" in text and "heads 16, channels 64, unroll 1, packed 1" in text
    assert "2.47 GB       577 us" in text and "lower bound: bytes over 4.27 TB/s" in text
    assert len({len(line) for line in text.splitlines() if line.lstrip().startswith(("forward", "backward"))}) == 1


def test_everything_becomes_json(decoder):
    described = json.loads(json.dumps(decoder.to_dict()))
    kernel = described["layers"][0]["passes"][0]["kernels"][0]
    assert kernel["name"].startswith("edge_attention_project") and kernel["achieved_bandwidth"] is None


def test_a_graph_without_destinations_has_a_table():
    graph = GraphStructure.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), (3, 0))
    conv = GraphTransformerConv((4, 4), 16, heads=2, edge_dim=3, config=TRITON)
    text = str(explain(conv, (torch.randn(3, 4), torch.randn(0, 4)), graph, torch.zeros(0, 3)))
    assert "edge_attention_fwd_fp32_h2_c16_d3" in text and "nan" not in text


def test_the_torch_operator_gets_its_time_from_a_profile(conv, inputs):
    found = explain(conv, *inputs)
    with profile(record_shapes=True) as seen:
        conv(*inputs).sum().backward()
    assert {event.name for event in seen.events()} >= set(TORCH_PASSES)
    (layer,) = found.with_profile(seen).layers
    total = sum(pass_.achieved_ms for pass_ in layer.passes)
    measured = 1e-3 * sum(event.cpu_time_total for event in seen.events() if event.name in TORCH_PASSES)
    assert 0 < total <= measured * 1.001
    forward = layer.passes[0]
    assert forward.achieved_bandwidth == pytest.approx(1e3 * forward.bytes / forward.achieved_ms)


def test_the_triton_operator_gets_its_time_from_a_profile(graph):
    rows, edges = operands(1, 16)
    found = explain_attention(*rows, graph, *edges, config=TRITON)
    with torch.no_grad(), profile(record_shapes=True) as seen:
        explain_attention(*rows, graph, *edges, config=TRITON)
    assert found.with_profile(seen).layers[0].passes[0].achieved_ms > 0


def event(name, shapes, kernels, microseconds=50):
    """One element of torch.profiler.profile.events()."""
    timed = [SimpleNamespace(name=kernel, duration=duration) for kernel, duration in kernels.items()]
    node = SimpleNamespace(kernels=timed, cpu_children=[])  # autograd's, inside which the operator launches
    return SimpleNamespace(name=name, input_shapes=shapes, kernels=[], cpu_children=[node], cpu_time_total=microseconds)


SHAPES = [[3, 2, 16], [3, 2, 16], [3, 2, 16], [4, 3], [32, 3], [32], [4], [4]]
OTHER_SHAPES = [[9, 2, 16], *SHAPES[1:]]


def test_kernels_get_their_mean_times_from_calls_of_their_sizes(explained):
    name, kernel = explained.layers[0].passes[0].operator, "edge_attention_fwd_fp32_h2_c16_d3"
    calls = (SHAPES, {kernel: 10, "copy": 2}), (SHAPES, {kernel: 20}), (OTHER_SHAPES, {kernel: 99})
    events = [event(name, *call) for call in calls]
    events.append(event(f"{name}_backward", [[3, 2, 16], [], *SHAPES], {"edge_attention_bwd_src_fp32_h2_c16": 5}))
    forward, backward = explained.with_profile(SimpleNamespace(events=lambda: events)).layers[0].passes
    assert forward.kernels[1].achieved_ms == pytest.approx(0.015) and forward.kernels[0].achieved_ms is None
    assert forward.achieved_ms == pytest.approx(0.016)
    assert backward.kernels[-1].achieved_ms == pytest.approx(0.005)
    assert backward.kernels[-1].achieved_bandwidth == pytest.approx(backward.kernels[-1].bytes / 5e-6)


@pytest.mark.parametrize(
    ("device", "shapes", "message"),
    [
        ("cpu", [], "with their shapes, got none"), ("cpu", OTHER_SHAPES, "it has others"),
        ("cuda:0", SHAPES, "must contain the calls that were explained"),  # a profile of a CPU has no time of a GPU
    ],
)  # fmt: skip
def test_a_profile_without_the_explained_calls_raises(explained, device, shapes, message):
    (layer,) = explained.layers
    seen = SimpleNamespace(events=lambda: [event(layer.passes[0].operator, shapes, {})])
    raises(lambda: replace(explained, layers=(replace(layer, device=device),)).with_profile(seen), message)


@pytest.mark.parametrize("fuse_edges", [True, False])
def test_swapped_blocks_of_anemoi_are_listed_and_keep_raw_edges(anemoi_as_it_is, fuse_edges):
    graph = graph_of("O4", 1)
    model = build(graph, make_options())
    with anemoi.install(fuse_edges=fuse_edges):
        found = explain(model, draw(graph))
    assert len(found.layers) >= 3 and all("proc" in layer.name for layer in found.layers)
    assert {layer.features for layer in found.layers} == {"raw" if fuse_edges else "embedded"}
    assert all(layer.module.startswith("GraphTransformer") for layer in found.layers)


@pytest.mark.parametrize("kind", [GraphTransformerProcessorBlock, GraphTransformerMapperBlock])
def test_a_whole_block_of_anemoi_is_listed_with_the_kernels_of_its_attention(anemoi_as_it_is, kind):
    block, found = make_block(kind), []
    for blocks in (False, True):
        with anemoi.install(backend="triton", blocks=blocks):
            found += explain(block, *block_inputs(kind)).layers
    attention, whole = found
    assert [pass_.operator for pass_ in whole.passes] == [BLOCK, f"{BLOCK}_backward"]
    passes = [replace(one, operator=own.operator) for one, own in zip(whole.passes, attention.passes, strict=True)]
    assert replace(whole, passes=tuple(passes)) == attention


def test_times_of_a_whole_block_come_from_its_operator():
    sizes = {"batch": 2, "sources": 5, "destinations": 7, "edges": 9, "heads": 4, "channels": 8, "attributes": 3}
    passes = tuple(Pass(name, BLOCK + end, 1, None, ()) for name, end in (("forward", ""), ("backward", "_backward")))
    layer = Layer("block", "Block", sizes, "raw", "bfloat16", "cpu", "triton", {}, passes)
    shapes = {"x_src": [10, 32], "x_dst": [14, 32], "row": [9], "query_weight": [32, 32], "edge_weight": [32, 3]}
    events = []
    for pass_, ms in zip(passes, (3.0, 5.0), strict=True):
        operator = getattr(torch.ops.anemoi_gt, pass_.operator.partition("::")[2]).default
        given = [shapes.get(argument.name, []) for argument in operator._schema.arguments]
        events.append(event(pass_.operator, given, {}))
        events[-1].cpu_time_total = 1e3 * ms
    timed = Explanation((layer,), None).with_profile(SimpleNamespace(events=lambda: events))
    assert [pass_.achieved_ms for pass_ in timed.layers[0].passes] == [3.0, 5.0]
