"""EncoderProcessorDecoder: shapes, gradients, checkpointing, copies, and graphs that do not fit."""

import copy
import io

import pytest
import torch
from omegaconf import OmegaConf
from support.differentiate import randomise
from support.weather import IN, KINDS, NODES, OUT, SAMPLES, weather_graph
from torch_geometric.data import HeteroData

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder, GraphStructure
from anemoi_gt.nn.block import GraphTransformerBaseBlock


@pytest.fixture
def graph():
    return weather_graph()


@pytest.fixture
def x():
    return torch.randn(SAMPLES, NODES["data"], IN, generator=torch.Generator().manual_seed(1))


def make_model(graph, seed=2, **options):
    torch.manual_seed(seed)
    return EncoderProcessorDecoder(graph, IN, OUT, **{"channels": 16, "heads": 4, "num_layers": 2, **options})


def train_step(model, x, seed=4):
    """Output and gradients by name, after a loss that weighs each output differently."""
    torch.manual_seed(seed)
    model.zero_grad()
    out = model(x)
    (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
    return out.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_fields_on_the_data_grid_come_out(graph, x):
    assert make_model(graph)(x).shape == (SAMPLES, NODES["data"], OUT)


def test_gradient_reaches_every_parameter(graph, x):
    model = randomise(make_model(graph).double())
    torch.manual_seed(0)
    _, gradients = train_step(model, x.double())
    for name, gradient in gradients.items():
        reached = gradient is not None and bool(gradient.abs().max() > 1e-6)
        # A constant on all keys changes no softmax, so that bias never learns.
        assert reached != name.endswith("lin_key.bias"), name


def test_samples_do_not_see_each_other(graph, x):
    model = make_model(graph)
    torch.testing.assert_close(model(x)[1:], model(x[1:]))


def test_forward_is_encoder_processor_decoder(graph, x):
    model = randomise(make_model(graph).double())
    x = x.double()

    def edges(part, kind):
        sizes = (NODES[kind[0]], NODES[kind[2]])
        order = graph[kind].edge_index[1].sort(stable=True).indices
        given = torch.cat([graph[kind].edge_length, graph[kind].edge_dirs], dim=1)[order].double()
        structure = GraphStructure.from_edge_index(graph[kind].edge_index[:, order], sizes)
        return structure, torch.cat([given, part.trainable], dim=1)

    def nodes(name):
        sin_cos_lat_lon = torch.cat([graph[name].x.sin(), graph[name].x.cos()], dim=1).double()
        return torch.cat([sin_cos_lat_lon, model.nodes[name].trainable], dim=1).expand(SAMPLES, -1, -1)

    down, across, up = KINDS
    data = torch.cat([x, nodes("data")], dim=2)
    hidden = model.encoder["data"]((data, nodes("hidden")), *edges(model.encoder_edges["data"], down))
    for block in model.processor.proc:
        hidden = block(hidden, *edges(model.processor_edges, across))
    expected = model.decoder["data"]((hidden, data), *edges(model.decoder_edges["data"], up))
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_checkpointing_changes_no_output_and_no_gradient(graph, x, dropout, groups):
    kept, recomputed = (make_model(graph, dropout=dropout, checkpoint_groups=number) for number in (None, groups))
    (out, gradients), (same_out, same_gradients) = (train_step(model, x) for model in (kept, recomputed))
    assert torch.equal(same_out, out)
    for name, gradient in gradients.items():
        assert torch.equal(same_gradients[name], gradient), name


@pytest.mark.parametrize("number", (2, 11))
def test_number_of_mapper_chunks_changes_no_output_and_no_gradient(graph, x, number):
    whole, chunked = (randomise(make_model(graph, mapper_chunks=chunks).double()) for chunks in (1, number))
    (out, gradients), (same_out, same_gradients) = (train_step(model, x.double()) for model in (whole, chunked))
    torch.testing.assert_close(same_out, out, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(same_gradients[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("chunks", (1, 2, 5))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_fields_leave_in_the_dtype_in_which_they_came_for_any_number_of_chunks(graph, x, dtype, chunks):
    model = make_model(graph, mapper_chunks=chunks)
    assert model.to(dtype)(x.to(dtype)).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(x).dtype == torch.float32


def test_checkpointing_and_chunks_go_together(graph, x):
    plain, both = make_model(graph), make_model(graph, mapper_chunks=3, checkpoint_groups=2)
    (out, gradients), (same_out, same_gradients) = (train_step(model, x) for model in (plain, both))
    torch.testing.assert_close(same_out, out)
    for name, gradient in gradients.items():
        torch.testing.assert_close(same_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_residual_adds_the_prognostic_input_to_its_output(graph, x):
    plain, residual = make_model(graph), make_model(graph, residual={0: 4, 2: 1})
    expected = plain(x)
    expected[..., 0] += x[..., 4]
    expected[..., 2] += x[..., 1]
    torch.testing.assert_close(residual(x), expected)


def test_residual_of_a_composed_config_is_a_mapping_as_any(graph, x):
    composed = OmegaConf.create({"residual": {0: 4, 2: 1}})
    expected = make_model(graph, residual={0: 4, 2: 1})(x)
    assert torch.equal(make_model(graph, residual=composed.residual)(x), expected)


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ({"qk_norm": True}, "q_norm.weight"),
        ({"mlp_implementation": "swiglu"}, "node_dst_mlp.mlp.0.gate_proj.weight"),
        ({"edge_pre_mlp": True}, "edge_pre_mlp.0.weight"),
    ],
)
def test_option_of_a_block_reaches_every_block(graph, option, key):
    plain, model = make_model(graph).state_dict(), make_model(graph, **option).state_dict()
    assert not any(name.endswith(key) for name in plain)
    assert sum(name.endswith(key) for name in model) == 4  # encoder, two layers, decoder


def test_width_of_the_attention_reaches_every_block(graph, x):
    model = make_model(graph, attn_channels=8)
    queries = [value for name, value in model.state_dict().items() if name.endswith("lin_query.weight")]
    assert [tuple(query.shape) for query in queries] == [(8, 16)] * 4
    assert model(x).shape == (SAMPLES, NODES["data"], OUT)


def test_config_and_dropout_reach_every_block(graph):
    config = AttentionConfig("torch", "bf16")
    model = make_model(graph, config=config, dropout=0.25)
    blocks = [module for module in model.modules() if isinstance(module, GraphTransformerBaseBlock)]
    assert len(blocks) == 4 and {(block.config, block.dropout) for block in blocks} == {(config, 0.25)}


def test_checkpointing_keeps_less_for_backward(graph, x):
    def kept(model):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        return sum(sizes)

    everything, groups, all_in_one = (
        kept(make_model(graph, checkpoint_groups=number, num_layers=4)) for number in (None, 4, 1)
    )
    assert all_in_one < groups < 0.5 * everything


def test_dropout_acts_in_training_only(graph, x):
    model = make_model(graph, dropout=0.5)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_state_dict_goes_to_another_model_on_the_same_graph(graph, x):
    model, other = randomise(make_model(graph)), make_model(graph, seed=5)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), model(x))


def test_state_dict_holds_parameters_and_no_graph(graph):
    model = make_model(graph)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters(remove_duplicate=False)}


def test_copy_is_whole_and_independent(graph, x):
    model = make_model(graph)
    expected = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), expected)
    randomise(twin)
    assert not torch.equal(twin(x), expected)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("chunks", (1, 3))
def test_whole_model_moves_to_a_device(graph, chunks):
    model = make_model(graph, mapper_chunks=chunks).to("meta")
    structure, edge_attr = model.processor_edges()
    tensors = [*model.parameters(), *model.buffers(), edge_attr, *structure.state_dict().values()]
    for part in (model.encoder_edges["data"], model.decoder_edges["data"]):
        pieces, edge_attr = part()
        tensors.append(edge_attr)
        for piece in pieces:
            tensors += [*piece.graph.state_dict().values(), *([] if piece.src is None else [piece.src])]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_double_precision_is_one_call_away(graph, x):
    model = make_model(graph)
    torch.testing.assert_close(copy.deepcopy(model).double()(x.double()).float(), model(x), rtol=1e-4, atol=1e-5)


def test_autocast_gives_gradients_in_the_dtype_of_the_parameters(graph, x):
    model = make_model(graph)
    with torch.autocast("cpu", torch.bfloat16):
        out, gradients = train_step(model, x)
    assert bool(out.isfinite().all())
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


def test_order_of_edges_in_the_graph_does_not_matter(graph, x):
    expected = make_model(graph)(x)
    for kind, edges in KINDS.items():
        order = torch.randperm(edges)
        graph[kind].edge_index = graph[kind].edge_index[:, order]
        graph[kind].edge_length, graph[kind].edge_dirs = graph[kind].edge_length[order], graph[kind].edge_dirs[order]
    torch.testing.assert_close(make_model(graph)(x), expected)


@pytest.mark.parametrize("option", ({"trainable_nodes": 0}, {"trainable_edges": 0}))
def test_trained_attributes_may_be_left_out(graph, x, option):
    _, gradients = train_step(make_model(graph, **option), x)
    assert not any(gradient is None for gradient in gradients.values())


def test_whole_model_compiles_into_one_graph(graph, x):
    torch.compiler.reset()
    options = {"qk_norm": True, "mlp_implementation": "swiglu", "edge_pre_mlp": True, "mapper_chunks": 2}
    model = randomise(make_model(graph, num_layers=1, residual={0: 0}, **options))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, actual = train_step(model, x), train_step(compiled, x)
    torch.testing.assert_close(actual[0], expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][f"_orig_mod.{name}"], gradient)


def test_model_learns_a_field(graph, x):
    model = make_model(graph)
    target = x[..., :OUT].flip(0).roll(1, dims=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def without(graph, kind, name):
    del graph[kind][name]
    return graph


def with_value(graph, kind, name, value):
    graph[kind][name] = value
    return graph


DOWN = ("data", "to", "hidden")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: without(graph, "hidden", "x"), "graph must have nodes 'hidden' with positions x"),
        (lambda graph: HeteroData(), r"graph must have nodes 'data' .* got nodes \[\]"),
        (
            lambda graph: graph.edge_type_subgraph([DOWN]),
            r"graph must have edges \('hidden', 'to', 'hidden'\), got edges",
        ),
        (lambda graph: without(graph, DOWN, "edge_dirs"), "edge_length and edge_dirs, missing edge_dirs"),
        (lambda graph: with_value(graph, "data", "x", torch.full((30, 2), 57.0)), "convert degrees"),
        (lambda graph: with_value(graph, DOWN, "edge_index", torch.full((2, 60), 11)), "must hold values in 0 .. 10"),
        (
            lambda graph: with_value(graph, DOWN, "edge_length", torch.ones(59, 1)),
            r"edge_length of edges .* must have shape \[60, features\], .* got \(59, 1\)",
        ),
    ],
)
def test_graph_that_does_not_fit_is_refused_with_what_came(graph, change, message):
    with pytest.raises(ValueError, match=message):
        make_model(change(graph))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 10, "heads": 4}, "num_heads must divide the attention channels, got 4 heads and 10 channels"),
        ({"checkpoint_groups": 3}, r"checkpoint_groups must be in 1 .. 2, .* or None, got 3"),
        ({"checkpoint_groups": 0}, r"checkpoint_groups must be in 1 .. 2, .* or None, got 0"),
        ({"mapper_chunks": 0}, r"num_chunks must be in 1 .. 11, the number of destinations, got 0"),
        ({"mapper_chunks": 12}, r"num_chunks must be in 1 .. 11, the number of destinations, got 12"),
        ({"mlp_ratio": 0}, r"mlp_ratio \* channels must be finite and at least 1/2, got 0 \* 16"),
        ({"residual": {3: 0}}, r"residual must name output channels in 0 .. 2, got \[3\]"),
        ({"residual": {0: -1}}, r"residual must name input channels in 0 .. 4, got \[-1\]"),
        ({"residual": 3}, r"residual must map output channels to input channels, both integers, .* got 3"),
        ({"residual": [0]}, r"residual must map output channels to input channels, both integers, .* got \[0\]"),
        ({"residual": {0: 1.5}}, r"residual must map output channels .* got \{0: 1.5\}"),
        ({"residual": {"0": 1}}, r"residual must map output channels .* got \{'0': 1\}"),
        ({"residual": {True: 1}}, r"residual must map output channels .* got \{True: 1\}"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"trainable_nodes": -1}, "trainable must be at least 0, the number of trainable features of a node, got -1"),
        (
            {"trainable_edges": -1},
            "trainable must be at least 0, the number of trainable attributes of an edge, got -1",
        ),
    ],
)
def test_option_that_does_not_fit_is_refused_with_what_came(graph, options, message):
    with pytest.raises(ValueError, match=message):
        make_model(graph, **options)


@pytest.mark.parametrize("name", ("in_channels", "out_channels"))
def test_model_without_fields_is_refused(graph, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        EncoderProcessorDecoder(graph, **{"in_channels": IN, "out_channels": OUT, name: 0})


@pytest.mark.parametrize("shape", ((30, 5), (2, 29, 5), (2, 30, 4), (2, 5, 30)))
def test_input_of_another_shape_is_refused(graph, shape):
    with pytest.raises(ValueError, match=r"x must have shape \[B, 30, 5\], got"):
        make_model(graph)(torch.randn(shape))
