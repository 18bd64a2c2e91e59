"""GraphTransformerConv against PyG's TransformerConv: the same parameters give the same numbers."""

import pytest
import torch
from support.differentiate import differentiate
from support.pairwise import pairwise
from support.refusals import raises, refused
from support.same_numbers import assert_same
from torch_geometric.nn import TransformerConv

from anemoi_gt import GraphTransformerConv

SRC = 9
DST = 7
EDGES = 40
FLAGS = (False, True)
OF_EACH_PAIR = pairwise(
    heads=(1, 3), concat=FLAGS, beta=FLAGS, edge_dim=(None, 5), bias=FLAGS, root_weight=FLAGS
)
OPTIONS = [{**options, "dropout": 0.4} for options in OF_EACH_PAIR]


def name_of(options):
    return "-".join(f"{name}={value}" for name, value in options.items() if name != "dropout")


def make_inputs(edge_dim, *, bipartite):
    """x, edge_index, edge_attr in float64; the last destination has no in-edge."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    src = torch.randint(SRC if bipartite else DST, (EDGES,), generator=generator)
    dst = torch.randint(DST - 1, (EDGES,), generator=generator)
    x = (draw(SRC, 6), draw(DST, 4)) if bipartite else draw(DST, 6)
    return x, torch.stack([src, dst]), None if edge_dim is None else draw(EDGES, edge_dim)


def make_pair(options, *, bipartite):
    """PyG's layer and ours, PyG's parameters loaded into ours, in eval mode."""
    channels = (6, 4) if bipartite else 6
    theirs = TransformerConv(channels, 8, **options).double().eval()
    ours = GraphTransformerConv(channels, 8, **options).double().eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("bipartite", FLAGS, ids=("one set of nodes", "bipartite"))
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_output_and_gradients_equal_pygs(options, bipartite):
    x, edge_index, edge_attr = make_inputs(options["edge_dim"], bipartite=bipartite)
    inputs = dict(enumerate(x if bipartite else (x,))) | (
        {} if edge_attr is None else {"edge_attr": edge_attr}
    )
    results = []
    for layer in make_pair(options, bipartite=bipartite):
        call = lambda t, layer=layer: layer(  # noqa: E731
            (t[0], t[1]) if bipartite else t[0], edge_index, t.get("edge_attr")
        )
        results.append(differentiate(layer, inputs, call))
    assert_same(*reversed(results))


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_state_dict_loads_to_and_from_pyg(options):
    theirs, ours = make_pair(options, bipartite=True)
    ours.reset_parameters()
    theirs.load_state_dict(ours.state_dict())
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert_same(theirs.state_dict(), ours.state_dict(), tolerance=0)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("edge_dim", (None, 5))
def test_attention_weights_and_their_gradient_equal_pygs(edge_dim, flag):
    x, edge_index, edge_attr = make_inputs(edge_dim, bipartite=True)
    theirs, ours = make_pair({"heads": 3, "edge_dim": edge_dim}, bipartite=True)
    out, (edges, weights) = ours(x, edge_index, edge_attr, return_attention_weights=flag)
    expected_out, (_, expected) = theirs(x, edge_index, edge_attr, return_attention_weights=flag)
    assert edges is edge_index
    assert_same(out, expected_out)
    assert_same(weights, expected)
    ramp = torch.linspace(0, 1, weights.numel(), dtype=weights.dtype).reshape(weights.shape)
    assert_same(
        torch.autograd.grad((weights * ramp).sum(), x),
        torch.autograd.grad((expected * ramp).sum(), x),
    )


def test_one_seed_gives_both_layers_the_same_parameters():
    states = []
    for layer in (GraphTransformerConv, TransformerConv):
        torch.manual_seed(3)
        states.append(layer((6, 4), 8, heads=2, beta=True, edge_dim=5).state_dict())
    assert_same(*states, tolerance=0)


def test_options_have_the_names_places_and_defaults_of_pyg():
    def options(layer):
        code, defaults = layer.__init__.__code__, layer.__init__.__defaults__
        return code.co_varnames[: code.co_argcount], defaults

    assert options(GraphTransformerConv) == options(TransformerConv)
    assert repr(GraphTransformerConv(6, 8)) == repr(TransformerConv(6, 8)).replace("T", "GraphT")


@pytest.mark.parametrize("bipartite", FLAGS, ids=("one set of nodes", "bipartite"))
def test_lazy_sizes_are_taken_from_the_first_input_as_in_pyg(bipartite):
    x, edge_index, edge_attr = make_inputs(5, bipartite=bipartite)
    lazy = (-1, -1) if bipartite else -1
    theirs, ours = (
        layer(lazy, 8, heads=3, edge_dim=-1).double()
        for layer in (TransformerConv, GraphTransformerConv)
    )
    expected = theirs(x, edge_index, edge_attr)
    ours.load_state_dict(theirs.state_dict())
    assert_same(ours(x, edge_index, edge_attr), expected)
    fresh = GraphTransformerConv(lazy, 8, heads=3, edge_dim=-1).double()
    fresh(x, edge_index, edge_attr)
    shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert {name: tensor.shape for name, tensor in fresh.state_dict().items()} == shapes


@pytest.mark.parametrize("rate", (0.1, 0.5, 0.9, 1.0))
def test_dropout_drops_weights_at_its_rate_and_scales_the_others(rate):
    nodes, heads = 50_000, 4
    conv = GraphTransformerConv(1, 1, heads=heads, dropout=rate, root_weight=False)
    torch.nn.init.zeros_(conv.lin_value.weight)
    # each value is 1 and each node has one in-edge: out is the kept weight
    torch.nn.init.ones_(conv.lin_value.bias)
    loops = torch.arange(nodes).expand(2, -1)
    torch.manual_seed(0)
    out = conv(torch.randn(nodes, 1), loops)
    dropped = out == 0
    deviations = abs(int(dropped.sum()) - rate * out.numel()) / max(
        (out.numel() * rate * (1 - rate)) ** 0.5, 1
    )
    assert deviations < 5, (
        f"the binomial count of dropped weights is {deviations:.1f} standard deviations off"
    )
    kept = out[~dropped]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate) if rate < 1 else 0))


@refused(
    ({"heads": 0}, "heads must be at least 1, got 0"),
    ({"out_channels": 0}, "out_channels must be at least 1, got 0"),
    ({"edge_dim": 0}, "edge_dim must be at least 1, .* got 0"),
    ({"dropout": 1.5}, "dropout must be a probability in 0 .. 1, got 1.5"),
    ({"aggr": "max"}, "aggr must be 'add', .* got 'max'"),
    ({"decomposed_layers": 2}, "decomposed_layers must be 1, .* got 2"),
)
def test_wrong_option_is_refused(wrong, message):
    raises(lambda: GraphTransformerConv(**{"in_channels": 6, "out_channels": 8, **wrong}), message)
