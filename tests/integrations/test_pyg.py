"""swap_layers puts our layer in the place of PyG's with everything that hung on it; models compute the same."""

import copy
import logging
import pickle
import re

import pytest
import torch
from support.differentiate import differentiate
from support.edits import LAYER_EDITS
from support.pyg_models import (
    DIM,
    MODELS,
    TextGraphEncoder,
    TwoLayers,
    UnifiedMessagePassing,
    make_hetero,
)
from support.same_numbers import assert_same_numbers
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader
from torch_geometric.nn import HeteroConv, Linear, Sequential, TransformerConv, to_hetero
from torch_geometric.utils import k_hop_subgraph

from anemoi_gt import GraphStructure, GraphTransformerConv, KernelConfig
from anemoi_gt.integrations.pyg import GraphData, swap_back, swap_layers
from anemoi_gt.nn import GraphTransformerProcessorBlock

NODES = 12
EDGES = 50


models = pytest.mark.parametrize("make", MODELS, ids=lambda model: model.__name__)


def make_graph(seed=0, nodes=NODES):
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(nodes, (2, EDGES), generator=generator)
    return (
        torch.randn(nodes, 6, generator=generator),
        edge_index,
        torch.randn(EDGES, DIM, generator=generator),
    )


def make_pair(make):
    """Return a PyG model and a swapped copy, without dropout."""
    torch.manual_seed(1)
    theirs = make().eval()
    return theirs, swap_layers(copy.deepcopy(theirs))


def swap_one(conv, **options):
    return swap_layers(nn.ModuleList([conv]), **options)[0]


def layers_of(model, kind):
    return [module for module in model.modules() if type(module) is kind]


def assert_same_gradients(ours, theirs, *inputs):
    """Check that output and gradients of two models are the same."""
    assert_same_numbers(
        *(differentiate(model, {}, lambda _, m=model: m(*inputs)) for model in (ours, theirs))
    )


@models
def test_a_swapped_model_matches_on_a_graph_and_on_mini_batches(make):
    theirs, ours = make_pair(make)
    assert not layers_of(ours, TransformerConv)
    assert len(layers_of(ours, GraphTransformerConv)) == len(layers_of(theirs, TransformerConv))
    x, edge_index, edge_attr = make_graph()
    assert_same_gradients(ours, theirs, x, edge_index, edge_attr)
    for seed in ([0], [3, 7], [11]):
        nodes, edges, _, chosen = k_hop_subgraph(
            seed, 2, edge_index, relabel_nodes=True, num_nodes=NODES
        )
        assert_same_gradients(ours, theirs, x[nodes], edges, edge_attr[chosen])


@models
def test_parameters_are_the_same_objects_under_the_same_names(make):
    model = make()
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    swap_layers(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert list(model.state_dict()) == keys
    assert all(after[name] is parameter for name, parameter in before.items())


def test_a_layer_that_appears_twice_still_does():
    conv = TransformerConv(6, 6)
    model = swap_layers(nn.ModuleList([conv, nn.ModuleDict({"again": conv})]))
    assert model[0] is model[1]["again"]
    assert type(model[0]) is GraphTransformerConv


@pytest.mark.parametrize("training", (False, True))
def test_other_attributes_of_the_layer_stay_and_nothing_is_drawn_or_allocated(training):
    conv = TransformerConv(6, 4).train(training)
    conv.extra, conv.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    conv.register_buffer("kept", torch.ones(1))
    conv.register_buffer("dropped", torch.ones(1), persistent=False)
    conv.number = 3
    keys, state = list(conv.state_dict()), torch.get_rng_state()
    ours = swap_one(conv)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(parameter.is_meta for parameter in ours.parameters())
    assert type(ours) is GraphTransformerConv
    assert list(ours.state_dict()) == keys
    assert ours.extra is conv.extra
    assert ours.scale is conv.scale
    assert ours.dropped is conv.dropped
    assert ours.number == 3
    assert ours.training is training


@pytest.mark.parametrize("weights", (None, True), ids=("output", "attention weights"))
@pytest.mark.parametrize("flow", ("source_to_target", "target_to_source"))
def test_the_direction_of_flow_and_the_attention_weights_are_pygs(flow, weights):
    conv = TransformerConv(6, 4, heads=2, edge_dim=DIM, flow=flow)
    expected = conv(*make_graph(), return_attention_weights=weights)
    assert_same_numbers(swap_one(conv)(*make_graph(), return_attention_weights=weights), expected)


def test_a_lazy_layer_infers_its_sizes_afterwards():
    torch.manual_seed(1)
    ours = swap_one(TransformerConv(-1, 4, heads=2, edge_dim=-1))
    ours(*make_graph())
    theirs = TransformerConv(6, 4, heads=2, edge_dim=DIM)
    theirs.load_state_dict(ours.state_dict())
    assert_same_numbers(ours(*make_graph()), theirs(*make_graph()))


def sequential(hetero):
    return Sequential(
        "x, edges",
        [(TransformerConv(6, 4), "x, edges -> x"), (TransformerConv(4, 2), "x, edges -> x")],
    )


@pytest.mark.parametrize(
    ("make", "layers"),
    (
        (lambda hetero: to_hetero(TwoLayers(TransformerConv, (-1, -1)), hetero.metadata()), 2 * 3),
        (
            lambda hetero: HeteroConv(
                {kind: TransformerConv((2, 2), 4, edge_dim=DIM) for kind in hetero.edge_types}
            ),
            3,
        ),
        (sequential, 2),
    ),
    ids=("to_hetero", "HeteroConv", "Sequential"),
)
def test_a_model_that_pyg_composes_is_swapped(make, layers):
    hetero = make_hetero()
    torch.manual_seed(1)
    model = make(hetero)
    inputs = (
        make_graph()[:2]
        if make is sequential
        else (hetero.x_dict, hetero.edge_index_dict, hetero.edge_attr_dict)
    )
    expected = model(*inputs)
    assert len(layers_of(swap_layers(model), GraphTransformerConv)) == layers
    assert_same_numbers(model(*inputs), expected)


def test_a_swapped_model_pickles_and_copies():
    _, ours = make_pair(TextGraphEncoder)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same_numbers(twin(*make_graph()), ours(*make_graph()))


def test_the_options_of_each_call_reach_every_layer():
    model = swap_layers(TextGraphEncoder(), "torch", "bf16", stable_sort=False)
    first = layers_of(model, GraphTransformerConv)
    assert {layer.config for layer in first} == {KernelConfig("torch", "bf16", stable_sort=False)}
    assert layers_of(swap_layers(model, precision="fp16"), GraphTransformerConv) == first
    assert {layer.config for layer in first} == {KernelConfig(precision="fp16")}


def test_swapping_back_restores_the_layers_with_the_current_parameters():
    model, calls = TextGraphEncoder().eval(), []
    before = [
        (name, module) for name, module in model.named_modules() if type(module) is TransformerConv
    ]
    before[0][1].number = 3
    swap_layers(model).train()
    ours = layers_of(model, GraphTransformerConv)
    ours[0].register_forward_hook(lambda *_: calls.append(None))
    ours[0].number, ours[0].dropout = 4, 0.0
    nn.init.ones_(ours[0].lin_key.weight)
    model.double()
    names, state = [name for name, _ in model.named_parameters()], model.state_dict()
    assert swap_back(model) is model
    assert [name for name, _ in model.named_parameters()] == names
    assert [
        (name, module) for name, module in model.named_modules() if type(module) is TransformerConv
    ] == before
    assert_same_numbers(model.state_dict(), state)
    first = before[0][1]
    assert (first.number, first.dropout, first.training, first.lin_key.weight.dtype) == (
        4,
        0.0,
        True,
        torch.float64,
    )
    x, edge_index, edge_attr = make_graph()
    expected = model.eval()(x.double(), edge_index, edge_attr.double())
    assert calls == [None]
    assert_same_numbers(swap_layers(model)(x.double(), edge_index, edge_attr.double()), expected)


def test_a_submodule_that_the_layer_does_not_have_is_not_made():
    """As in an open change of PyG, whose layers without root weight have no `lin_skip`."""
    upstream = TransformerConv(6, 4, root_weight=False)
    del upstream.lin_skip
    model, inputs = nn.ModuleList([upstream]), make_graph()[:2]
    state, expected = copy.deepcopy(model.state_dict()), upstream(*inputs)
    swap_layers(model)
    assert model.state_dict().keys() == state.keys()
    model.to("cpu", torch.float64).float().load_state_dict(state)
    torch.testing.assert_close(model[0](*inputs), expected)
    swap_back(model).load_state_dict(state)
    torch.testing.assert_close(model[0](*inputs), expected)


def test_a_submodule_removed_from_a_swapped_layer_stays_removed():
    model = swap_layers(nn.ModuleList([TransformerConv(6, 4, root_weight=False)]))
    del model[0].lin_skip
    assert not [name for name in swap_back(model).state_dict() if "lin_skip" in name]


def test_swapping_back_leaves_layers_that_were_built_as_anemoi_gt():
    model = nn.ModuleList([GraphTransformerConv(6, 4), TransformerConv(6, 4)])
    swap_back(swap_layers(model))
    assert [type(layer) for layer in model] == [GraphTransformerConv, TransformerConv]
    with pytest.raises(
        ValueError, match="model must have a layer of swap_layers, got ModuleList without one"
    ):
        swap_back(model)


@pytest.mark.parametrize("swap", (swap_layers, swap_back))
@pytest.mark.parametrize("layer", (TransformerConv(6, 4), GraphTransformerConv(6, 4)), ids=repr)
def test_a_bare_layer_is_refused_with_the_remedy(swap, layer):
    with pytest.raises(
        ValueError, match=rf"got a bare {type(layer).__name__}, .* torch.nn.ModuleList\(\[layer\]\)"
    ):
        swap(layer)


class OwnConv(TransformerConv):
    """A user-defined layer."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.name = "own"


def test_a_subclass_is_swapped_on_request_and_restored_as_itself():
    model = nn.ModuleList([OwnConv(6, 4, edge_dim=DIM)]).eval()
    original = model[0]
    expected = original(*make_graph())
    swapped = swap_layers(model, subclasses=[OwnConv])[0]
    assert type(swapped) is GraphTransformerConv
    assert swapped.name == "own"
    assert_same_numbers(swapped(*make_graph()), expected)
    assert swap_back(model)[0] is original


class OwnMessage(OwnConv):
    def message(self, value_j):
        return value_j


class OwnPropagate(OwnConv):
    def propagate(self, *arguments, **options):
        return super().propagate(*arguments, **options)


@pytest.mark.parametrize("kind", (OwnMessage, OwnPropagate, Linear))
def test_a_subclass_that_computes_something_else_is_refused(kind):
    OwnConv(6, 4)  # PyG writes methods on its class
    with pytest.raises(ValueError, match=f"subclasses must .*, got .*{kind.__name__}"):
        swap_layers(TextGraphEncoder(), subclasses=(kind,))


@pytest.mark.filterwarnings("ignore:GraphTransformerConv falls back to per-edge messages")
def test_a_layer_that_was_explained_is_swapped():
    conv = conv_with()
    for explain in (True, None, False, None):
        conv.explain = explain
    assert type(swap_one(conv, backend="torch")) is GraphTransformerConv
    conv.explain = False
    assert swap_one(conv).explain is False


@pytest.mark.parametrize("workers", (0, 1))
def test_a_data_loader_joins_structures(workers):
    theirs, ours = make_pair(UnifiedMessagePassing)
    graphs = []
    data = []
    for i in range(4):
        x, edge_index, edge_attr = make_graph(i, NODES + i)
        graph = GraphStructure.from_edge_index(edge_index, NODES + i)
        graphs.append(graph)
        data.append(GraphData(x=x, edge_index=edge_index, edge_attr=edge_attr, graph=graph))
    for number, batch in enumerate(DataLoader(data, batch_size=2, num_workers=workers)):
        assert batch.num_graphs == 2
        assert batch.graph.has_reverse
        expected = GraphStructure.disjoint(graphs[2 * number : 2 * number + 2])
        assert torch.equal(batch.graph.edge_index(), expected.edge_index())
        inputs = batch.x, batch.edge_index, batch.edge_attr
        assert_same_numbers(ours(batch.x, batch.graph, batch.edge_attr), theirs(*inputs))


def test_a_graph_moves_with_its_data_and_other_lists_stay():
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    data = copy.deepcopy(GraphData(x=torch.ones(2, 4), graph=graph, graphs=[graph, graph]))
    assert isinstance(data.graphs, list)
    assert type(copy.copy(data).graph) is GraphStructure
    assert Batch.from_data_list([data, data]).to("meta").graph.device.type == "meta"


class OwnLinear(Linear):
    """A user-defined linear layer."""


def conv_with(change=lambda conv: None, kind=TransformerConv, **options):
    """A layer of PyG's after `change`, a function that changes it."""
    conv = kind(6, 4, edge_dim=DIM, **options)
    change(conv)
    return conv


def adapt(name):
    return lambda conv: setattr(conv, name, nn.Sequential(getattr(conv, name)))


UNSERVED = {
    f"{__name__}.OwnConv is a subclass": {"kind": OwnConv},
    "its aggr_module is a .*MaxAggregation, and PyG's SumAggregation is needed": {"aggr": "max"},
    f"its lin_edge is a {__name__}.OwnLinear, and PyG's Linear is needed": {
        "change": lambda conv: setattr(conv, "lin_edge", OwnLinear(DIM, 4, bias=False))
    },
    "its lin_query is torch.nn.modules.container.Sequential; PyG's Linear is needed": {
        "change": adapt("lin_query")
    },
    "its lin_key is torch.nn.modules.container.Sequential; PyG's Linear is needed": {
        "change": adapt("lin_key")
    },
    "it has a forward set on it, which would be skipped": {
        "change": lambda conv: setattr(conv, "forward", print)
    },
    "it has a propagate set on it, which would be skipped": {
        "change": lambda conv: setattr(conv, "propagate", print)
    },
}


@pytest.mark.parametrize("reason", UNSERVED)
def test_a_named_backend_raises_for_an_unsupported_layer_and_auto_logs_why_it_stays(reason, caplog):
    model = nn.ModuleList([TransformerConv(6, 4), conv_with(**UNSERVED[reason])])
    last = model[1]
    with pytest.raises(ValueError, match=f"attention backend 'torch' cannot run .*: {reason}"):
        swap_layers(model, backend="torch")
    assert type(model[0]) is TransformerConv
    with caplog.at_level(logging.WARNING, logger="anemoi_gt"):
        swap_layers(model)
    assert model[1] is last
    assert type(model[0]) is GraphTransformerConv
    (record,) = caplog.records
    assert re.search(reason, record.message)


def test_a_bias_of_the_edge_embedding_is_added():
    conv = conv_with(lambda conv: setattr(conv.lin_edge, "bias", nn.Parameter(torch.ones(4))))
    expected = conv(*make_graph())
    torch.testing.assert_close(swap_one(conv, backend="torch")(*make_graph()), expected)


class FirstLayer(nn.Module):
    """The first layer of a model, called with the arguments of a PyG layer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return self.model[0](*inputs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*legacy TorchScript-based ONNX export")
def test_the_error_of_an_onnx_export_points_to_swap_back(tmp_path):
    model = swap_layers(nn.Sequential(TransformerConv(6, 4)))
    forward, (x, edge_index, _) = FirstLayer(model), make_graph()
    with pytest.raises(
        RuntimeError, match=r"export PyG's TransformerConv: .*pyg\.swap_back\(model\) puts it back"
    ):
        torch.onnx.export(forward, (x, edge_index), tmp_path / "swapped.onnx", dynamo=False)


def test_a_model_without_such_a_layer_is_refused():
    with pytest.raises(
        ValueError, match="must have a TransformerConv of PyG, got Linear without one"
    ):
        swap_layers(nn.Linear(2, 2))


CHANGES = LAYER_EDITS | {
    "hook of lin_edge": lambda conv: conv.lin_edge.register_forward_hook(lambda *_: _[-1] * 1.5)
}


@pytest.mark.parametrize("when", ("before", "after"))
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:GraphTransformerConv falls back to per-edge messages")
@pytest.mark.filterwarnings("ignore:edge attributes are embedded")
def test_a_changed_layer_computes_what_pyg_computes(name, when):
    model = nn.ModuleList([TransformerConv(6, 4, heads=2, edge_dim=DIM)])
    theirs = copy.deepcopy(model)[0]
    CHANGES[name](theirs)
    expected = theirs(*make_graph())
    if when == "before":
        CHANGES[name](model[0])
    swap_layers(model)
    if when == "after":
        CHANGES[name](model[0])
    torch.testing.assert_close(model[0](*make_graph()), expected)


@pytest.mark.parametrize(
    "register",
    (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_backward_hook",
    ),
)
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_hook_of_every_registry_is_called_after_a_swap_and_back(register):
    model, calls = nn.ModuleList([TransformerConv(6, 4)]), []
    handle = getattr(model[0], register)(lambda *_: calls.append(None))
    x, edge_index, _ = make_graph()
    for change in (lambda: None, lambda: swap_layers(model), lambda: swap_back(model)):
        change()
        model[0](x.requires_grad_(), edge_index).sum().backward()
    assert len(calls) == 3
    handle.remove()
    model[0](x, edge_index).sum().backward()
    assert len(calls) == 3


@pytest.mark.parametrize("seen", ("swapped layer", "own block"))
@pytest.mark.filterwarnings("ignore:edge attributes are embedded")
def test_hooks_on_all_modules_see_the_edge_embedding(seen):
    """As of fake quantisation, which rounds what linear maps return."""

    def quantise(module, arguments, out):
        if isinstance(module, nn.Linear | Linear):
            return out.mul(16).round().div(16)
        return None

    x, edge_index, edge_attr = make_graph()
    if seen == "swapped layer":
        reference = TransformerConv(6, 4, heads=2, edge_dim=DIM)
        inputs = x, edge_index, edge_attr
        layer = swap_one(copy.deepcopy(reference))
    else:
        sizes = {"in_channels": 6, "hidden_dim": 8, "out_channels": 6}
        layer = GraphTransformerProcessorBlock(**sizes, num_heads=2, edge_dim=DIM)
        inputs = x, GraphStructure.from_edge_index(edge_index, NODES), edge_attr
        reference = copy.deepcopy(layer)
        reference.lin_edge = Called(reference.lin_edge)
    hook = torch.nn.modules.module.register_module_forward_hook(quantise)
    try:
        torch.testing.assert_close(layer(*inputs), reference(*inputs))
    finally:
        hook.remove()


class Called(nn.Module):
    """A linear map that must be called."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("kind", (TransformerConv, GraphTransformerConv))
@pytest.mark.filterwarnings("ignore:GraphTransformerConv falls back to per-edge messages")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("flow", ("source_to_target", "target_to_source"))
def test_a_model_is_traced_by_torchscript(kind, flow):
    """TensorBoard's `add_graph` traces a model."""
    layers = [(kind(6, 4, flow=flow), "x, edges -> x"), (kind(4, 2, flow=flow), "x, edges -> x")]
    model, inputs = swap_layers(Sequential("x, edges", layers)), make_graph()[:2]
    traced = torch.jit.trace(model, inputs, check_trace=False)
    torch.testing.assert_close(traced(*inputs), model(*inputs))
