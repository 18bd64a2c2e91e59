"""PyTorch's and PyG's tools work on GraphTransformerConv."""

import copy
import pickle
import sys
import types

import pytest
import torch
from support.pyg_models import DIM, TwoLayers, make_hetero
from support.refusals import raises
from torch.export import Dim
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.nn import HeteroConv, Sequential, TransformerConv, summary, to_hetero

from anemoi_gt import GraphStructure, GraphTransformerConv, KernelConfig


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(8, (2, 25), generator=generator)
    return (
        torch.randn(8, 6, generator=generator),
        edge_index,
        torch.randn(25, DIM, generator=generator),
    )


def test_pygs_sequential_runs_it(data):
    x, edge_index, edge_attr = data
    first = GraphTransformerConv(6, 4, heads=2, edge_dim=DIM)
    second = GraphTransformerConv(8, 2, edge_dim=DIM)
    names = "x, edge_index, edge_attr"
    model = Sequential(
        names, [(first, f"{names} -> x"), torch.nn.ReLU(), (second, f"{names} -> x")]
    )
    graph = GraphStructure.from_edge_index(edge_index, 8)
    expected = second(first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)
    assert torch.equal(model(x, edge_index, edge_attr), expected)
    assert torch.equal(model(x, graph, edge_attr), expected)


def test_to_hetero_converts_it_like_pygs_layer():
    graph = make_hetero()
    inputs = (graph.x_dict, graph.edge_index_dict, graph.edge_attr_dict)
    layers = (TransformerConv, GraphTransformerConv)
    theirs, ours = (to_hetero(TwoLayers(layer, (-1, -1)), graph.metadata()) for layer in layers)
    theirs(*inputs)  # takes the lazy sizes
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))


def test_hetero_conv_runs_it_on_structures():
    graph = make_hetero()
    conv = HeteroConv(
        {kind: GraphTransformerConv((-1, -1), 4, edge_dim=DIM) for kind in graph.edge_types}
    )
    expected = conv(graph.x_dict, graph.edge_index_dict, edge_attr_dict=graph.edge_attr_dict)
    structures = {
        kind: GraphStructure.from_edge_index(
            edges, tuple(graph[name].num_nodes for name in (kind[0], kind[2]))
        )
        for kind, edges in graph.edge_index_dict.items()
    }
    actual = conv(graph.x_dict, structures, edge_attr_dict=graph.edge_attr_dict)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_summary_names_it(data, monkeypatch):
    # the package that PyG draws its table with
    writer = types.SimpleNamespace(tabulate=lambda rows, **_: rows)
    monkeypatch.setitem(sys.modules, "tabulate", writer)
    rows = summary(TwoLayers(GraphTransformerConv), *data)
    first = next(row for row in rows if "(first)GraphTransformerConv" in row[0])
    assert first[1:] == ["[8, 6], [2, 25], [25, 3]", "[8, 8]", "248"]


def explain(model, algorithm, data, **masks):
    x, edge_index, edge_attr = data
    mode = {"mode": "regression", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(
        model.eval(), algorithm, explanation_type="model", model_config=mode, **masks
    )
    torch.manual_seed(3)
    return explainer(x, edge_index, edge_attr=edge_attr, index=2)


@pytest.mark.filterwarnings("ignore:GraphTransformerConv falls back to per-edge messages")
def test_explainers_agree_with_pygs_layer(data):
    theirs, ours = TwoLayers(TransformerConv), TwoLayers(GraphTransformerConv)
    ours.load_state_dict(theirs.state_dict())
    masks = {"edge_mask_type": "object"}
    for make in (AttentionExplainer, lambda: GNNExplainer(epochs=5)):
        expected, actual = (explain(model, make(), data, **masks) for model in (theirs, ours))
        assert actual.edge_mask.count_nonzero() > 0
        torch.testing.assert_close(actual.edge_mask, expected.edge_mask)


@pytest.mark.filterwarnings("error")
def test_layer_warns_of_per_edge_messages_only_while_a_hook_is_active(data):
    x, edge_index, edge_attr = data
    conv = GraphTransformerConv(6, 4, heads=2, edge_dim=DIM, beta=True)
    seen = []
    expected = conv(x, edge_index, edge_attr)
    hook = conv.register_message_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    with pytest.warns(UserWarning, match="falls back to per-edge messages"):
        watched = conv(x, edge_index, edge_attr)
    hook.remove()
    torch.testing.assert_close(watched, expected)
    assert seen == [(25, 2, 4)]
    assert torch.equal(conv(x, edge_index, edge_attr), expected)


@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
def test_messages_say_that_a_precision_has_no_effect_on_them(data, precision):
    conv = GraphTransformerConv(6, 4, edge_dim=DIM, config=KernelConfig(precision=precision))
    conv.register_message_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=f"messages in the dtype of its inputs, not '{precision}'"):
        conv(*data)


@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.filterwarnings("ignore:GraphTransformerConv falls back to per-edge messages")
def test_a_tool_that_watches_does_not_end_a_run_with_a_named_backend(data, backend):
    conv = GraphTransformerConv(6, 4, heads=2, edge_dim=DIM)
    expected = conv(*data)
    conv.config = KernelConfig(backend)
    explain(conv, AttentionExplainer(), data, edge_mask_type="object")
    seen = []
    conv.register_message_forward_hook(lambda *_: seen.append(None))
    torch.testing.assert_close(conv(*data), expected)
    assert seen == [None]


@pytest.mark.parametrize("backend", ("torch", "triton"))
def test_a_named_backend_raises_for_a_layer_that_computes_something_else(data, backend):
    conv = GraphTransformerConv(6, 4, heads=2, edge_dim=DIM, config=KernelConfig(backend))
    conv.message = conv.message
    refusal = f"attention backend '{backend}' cannot run .*: it has a message set on it, .* 'auto'"
    raises(lambda: conv(*data), refusal)


@pytest.mark.filterwarnings("ignore:GraphTransformerConv falls back to per-edge messages")
def test_layer_accepts_every_form_of_edges_while_a_hook_is_active(data):
    x, edge_index, edge_attr = data
    sides = (x, torch.randn(5, 4))
    edge_index = torch.stack([edge_index[0], edge_index[1] % 5])
    conv = GraphTransformerConv((6, 4), 4, edge_dim=DIM)
    reverse = GraphTransformerConv((6, 4), 4, edge_dim=DIM, flow="target_to_source")
    reverse.load_state_dict(conv.state_dict())
    expected = conv(sides, edge_index, edge_attr)
    for layer in (conv, reverse):
        layer.register_propagate_forward_hook(lambda *_: None)
    torch.testing.assert_close(conv(sides, edge_index, edge_attr), expected)
    torch.testing.assert_close(
        conv(sides, GraphStructure.from_edge_index(edge_index, (8, 5)), edge_attr), expected
    )
    torch.testing.assert_close(reverse(sides, edge_index.flip(0), edge_attr), expected)


def test_layer_refuses_a_batch_while_a_hook_is_active(data):
    x, edge_index, edge_attr = data
    conv = GraphTransformerConv(6, 4, edge_dim=DIM)
    conv.register_message_forward_hook(lambda *_: None)
    raises(
        lambda: conv(x.expand(3, -1, -1), edge_index, edge_attr),
        r"shape \[N, F\] while .* got a batch of 3",
    )


@pytest.mark.parametrize("smallest", [None, 0])
def test_an_exported_layer_accepts_any_named_number_of_nodes_and_edges(data, smallest):
    x, edge_index, edge_attr = data
    conv = GraphTransformerConv(6, 4, heads=2, edge_dim=DIM).eval()
    nodes, edges = (Dim(name, min=smallest) for name in ("N", "E"))
    sizes = ({0: nodes}, {1: edges}, {0: edges})
    program = torch.export.export(conv, data, dynamic_shapes=sizes)
    for num_nodes, num_edges in ((8, 7), (11, 25)):
        inputs = (x.repeat(2, 1)[:num_nodes], edge_index[:, :num_edges], edge_attr[:num_edges])
        torch.testing.assert_close(program.module()(*inputs), conv(*inputs))


def test_copies_are_complete_and_independent(data):
    conv = GraphTransformerConv(6, 4, heads=2, edge_dim=DIM)
    with pytest.warns(UserWarning, match="falls back to per-edge messages"):
        hook = conv.register_message_forward_hook(lambda *_: None)
        conv(*data)  # leaves nothing on the layer that a copy would trip over
        hook.remove()
    expected = conv(*data)
    for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(twin(*data), expected)
        twin.reset_parameters()
        assert not torch.equal(twin(*data), expected)
    assert torch.equal(conv(*data), expected)
