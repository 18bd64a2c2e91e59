"""EncoderProcessorDecoder: shapes, gradients, checkpointing, copies, and graphs that do not fit."""

from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from support.differentiate import differentiate, randomise
from support.refusals import raises, refused
from support.same_numbers import assert_same
from support.weather import IN, KINDS, NODES, OUT, SAMPLES, weather_graph
from torch.utils._python_dispatch import TorchDispatchMode

from anemoi_gt import EncoderProcessorDecoder, GraphStructure, KernelConfig
from anemoi_gt.nn import (
    GNNMapper,
    GNNProcessor,
    GraphTransformerBackwardMapper,
    GraphTransformerForwardMapper,
    GraphTransformerProcessor,
)
from anemoi_gt.nn.block import GraphTransformerBaseBlock

graph = pytest.fixture(weather_graph)
GRAPH_NETWORK = {
    "processor": partial(GNNProcessor, hidden_layers=2),
    "mapper": partial(GNNMapper, sum_of="updates"),
    "heads": 8,
}


@pytest.fixture
def x():
    return torch.randn(SAMPLES, NODES["data"], IN, generator=torch.Generator().manual_seed(1))


def make_model(graph, seed=2, **options):
    torch.manual_seed(seed)
    return EncoderProcessorDecoder(
        graph, IN, OUT, **{"channels": 16, "heads": 4, "num_layers": 2, **options}
    )


def train_step(model, x):
    """Output and gradients by name."""
    torch.manual_seed(4)
    return differentiate(model, {"x": x}, lambda tensors: model(tensors["x"]))


def test_forward_is_encoder_processor_decoder(graph, x):
    model = randomise(make_model(graph).double())
    x = x.double()

    def edges(part, kind):
        sizes = (NODES[kind[0]], NODES[kind[2]])
        order = graph[kind].edge_index[1].sort(stable=True).indices
        fixed = torch.cat([graph[kind].edge_length, graph[kind].edge_dirs], dim=1)[order].double()
        structure = GraphStructure.from_edge_index(graph[kind].edge_index[:, order], sizes)
        return structure, torch.cat([fixed, part.trainable], dim=1)

    def nodes(name):
        sin_cos_lat_lon = torch.cat([graph[name].x.sin(), graph[name].x.cos()], dim=1).double()
        return torch.cat([sin_cos_lat_lon, model.nodes[name].trainable], dim=1).expand(
            SAMPLES, -1, -1
        )

    down, across, up = KINDS
    data = torch.cat([x, nodes("data")], dim=2)
    hidden = model.encoder["data"](
        (data, nodes("hidden")), *edges(model.encoder_edges["data"], down)
    )
    for block in model.processor.proc:
        hidden = block(hidden, *edges(model.processor_edges, across))
    expected = model.decoder["data"]((hidden, data), *edges(model.decoder_edges["data"], up))
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("chunks", "groups", "family"),
    [
        (None, 1, {}),
        (None, 2, {"dropout": 0.3}),
        (2, None, {}),
        (11, None, {}),
        (3, 2, {}),
        (3, 2, GRAPH_NETWORK),
    ],
)
def test_options_that_save_memory_change_no_output_and_no_gradient(
    graph, x, chunks, groups, family
):
    options = {"checkpoint_groups": groups}
    if chunks:
        options["mapper_chunks"] = chunks
    plain = randomise(make_model(graph, **family).double())
    saving = randomise(make_model(graph, **family, **options).double())
    expected = train_step(plain, x.double())
    actual = train_step(saving, x.double())
    tolerance = 1e-9 if chunks else 0.0
    assert_same(actual["out"], expected["out"], tolerance / 10)
    assert_same(actual, expected, tolerance)


def test_a_graph_transformer_has_the_weights_of_its_layers_made_in_order(graph):
    sizes = {"num_channels": 16, "num_heads": 4, "edge_dim": 11}
    torch.manual_seed(2)
    layers = {
        "processor": GraphTransformerProcessor(num_layers=2, **sizes),
        "encoder.data": GraphTransformerForwardMapper(
            in_channels_src=IN + 12, in_channels_dst=12, **sizes
        ),
        "decoder.data": GraphTransformerBackwardMapper(
            in_channels_src=16, in_channels_dst=IN + 12, out_channels_dst=OUT, **sizes
        ),
    }
    expected = {
        f"{path}.{name}": weight
        for path, layer in layers.items()
        for name, weight in layer.state_dict().items()
    }
    state = make_model(graph).state_dict()
    weights = {name: weight for name, weight in state.items() if not name.endswith("trainable")}
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_processor_and_mapper_are_what_callables_build(graph, x):
    made = []

    class Processor(torch.nn.Module):
        def __init__(self, **options):
            super().__init__()
            made.append(options)

        def forward(self, x, graph, edge_attr):
            return x + edge_attr.sum()

    config = KernelConfig("torch")
    model = make_model(graph, processor=Processor, checkpoint_groups=2, config=config)
    sizes = {"num_channels": 16, "num_layers": 2, "edge_dim": 11}
    assert made == [sizes | {"checkpoint_groups": 2, "config": config}]
    assert isinstance(model.encoder["data"], GraphTransformerForwardMapper)
    assert model(x).shape == (SAMPLES, NODES["data"], OUT)

    model = make_model(graph, **GRAPH_NETWORK | {"processor": Processor})
    assert [type(part["data"]) for part in (model.encoder, model.decoder)] == [GNNMapper] * 2
    assert model(x).shape == (SAMPLES, NODES["data"], OUT)


@pytest.mark.parametrize("chunks", (1, 2, 5))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_output_has_the_dtype_of_the_input_for_any_number_of_chunks(graph, x, dtype, chunks):
    model = make_model(graph, mapper_chunks=chunks)
    assert model.to(dtype)(x.to(dtype)).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(x).dtype == torch.float32


@pytest.mark.parametrize("mapping", (dict, OmegaConf.create))
def test_residual_adds_the_prognostic_input_to_its_output(graph, x, mapping):
    plain, residual = make_model(graph), make_model(graph, residual=mapping({0: 4, 2: 1}))
    expected = plain(x)
    expected[..., 0] += x[..., 4]
    expected[..., 2] += x[..., 1]
    torch.testing.assert_close(residual(x), expected)


def test_options_of_a_block_reach_every_block(graph, x):
    same = {
        "mlp_implementation": "swiglu",
        "dropout": 0.25,
        "config": KernelConfig("torch", "bf16"),
    }
    model = make_model(graph, attn_channels=8, qk_norm=True, edge_pre_mlp=True, **same)
    blocks = [module for module in model.modules() if isinstance(module, GraphTransformerBaseBlock)]
    assert len(blocks) == 4  # encoder, two layers, decoder
    for block in blocks:
        assert {name: getattr(block, name) for name in same} == same
        assert block.q_norm.normalized_shape == block.k_norm.normalized_shape == (2,)
        assert len(block.edge_pre_mlp) == 2
        assert block.lin_query.weight.shape == (8, 16)
    assert model(x).shape == (SAMPLES, NODES["data"], OUT)


def test_checkpointing_keeps_less_for_backward(graph, x):
    def kept(model):
        tensors = []
        with torch.autograd.graph.saved_tensors_hooks(tensors.append, lambda _: None):
            model(x)
        return sum(tensor.numel() for tensor in tensors)

    models = (make_model(graph, checkpoint_groups=number, num_layers=4) for number in (None, 4, 1))
    everything, groups, all_in_one = map(kept, models)
    assert all_in_one < groups < 0.5 * everything


def test_chunks_of_fields_are_embedded_one_at_a_time(graph, x):
    class Widest(TorchDispatchMode):
        widest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[1] == NODES["data"]:
                self.widest = max(self.widest, out.shape[-1])
            return out

    # hidden layers; trainable features, above fields and outputs
    for chunks, widest in (
        (1, 64),
        (2, 8),
    ):
        with Widest() as mode:
            train_step(make_model(graph, mapper_chunks=chunks, checkpoint_groups=1), x)
        assert mode.widest == widest


@pytest.mark.parametrize("chunks", (1, 3))
def test_model_with_its_graph_moves_to_a_device(graph, chunks):
    model = make_model(graph, mapper_chunks=chunks).to("meta")
    structure, edge_attr = model.processor_edges()
    tensors = [*model.parameters(), *model.buffers(), edge_attr, *structure.state_dict().values()]
    for edges in (model.encoder_edges["data"], model.decoder_edges["data"]):
        graph, edge_attr = edges()
        tensors.append(edge_attr)
        for chunk in graph if chunks > 1 else ():
            tensors += [*chunk.graph.state_dict().values(), chunk.src]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("option", ({"trainable_nodes": 0}, {"trainable_edges": 0}))
def test_trainable_features_and_attributes_are_optional(graph, x, option):
    assert not any(
        gradient is None for gradient in train_step(make_model(graph, **option), x).values()
    )


def change(graph, kind, **fields):
    """Return the graph with other fields, or without those that are None."""
    graph[kind].update(fields)
    return graph


DOWN = ("data", "to", "hidden")


@refused(
    (
        lambda graph: change(graph, "hidden", x=None),
        "graph must have nodes 'hidden' with positions x",
    ),
    (
        lambda graph: graph.edge_type_subgraph([DOWN]),
        r"graph must have edges \('hidden', 'to', 'hidden'\), got edges",
    ),
    (
        lambda graph: change(graph, DOWN, edge_dirs=None),
        "edge_length and edge_dirs, missing edge_dirs",
    ),
)
def test_wrong_graph_is_refused(graph, wrong, message):
    raises(lambda: make_model(wrong(graph)), message)


@refused(
    ({"checkpoint_groups": 3}, r"checkpoint_groups must be in 1 .. 2, .* or None, got 3"),
    ({"mapper_chunks": 12}, r"num_chunks must be in 1 .. 11, the number of destinations, got 12"),
    *(({"mlp_ratio": ratio}, "hidden_dim must be at least 1, got 0") for ratio in (0, 0.01)),
    ({"mlp_ratio": float("nan")}, "cannot convert float NaN to integer"),
    ({"residual": {3: 0}}, r"residual must name output channels in 0 .. 2, got \[3\]"),
    ({"residual": {0: -1}}, r"residual must name input channels in 0 .. 4, got \[-1\]"),
    (
        {"residual": 3},
        r"residual must map output channels to input channels, both integers, .* got 3",
    ),
    ({"residual": {"0": 1}}, r"residual must map output channels .* got \{'0': 1\}"),
    (
        GRAPH_NETWORK | {"heads": 4},
        r"options of graph transformers must be left out .* \{'heads': 4\}",
    ),
)
def test_wrong_option_is_refused(graph, wrong, message):
    raises(lambda: make_model(graph, **wrong), message)


@pytest.mark.parametrize("shape", ((30, 5), (2, 29, 5), (2, 30, 4), (2, 5, 30)))
def test_input_of_another_shape_is_refused(graph, shape):
    raises(lambda: make_model(graph)(torch.randn(shape)), r"x must have shape \[B, 30, 5\], got")
