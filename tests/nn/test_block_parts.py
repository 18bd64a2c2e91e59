"""Submodules of blocks: norms with a condition and under autocast, widths; test_anemoi_blocks.py has the gates."""

import copy

import pytest
import torch
from support.differentiate import randomise
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import layer_norm
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch_geometric.nn import Linear

from anemoi_gt import (
    GraphStructure,
    GraphTransformerConv,
    GraphTransformerMapperBlock,
    GraphTransformerProcessorBlock,
)
from anemoi_gt.nn import AutocastLayerNorm, ConditionalLayerNorm, LayerKernels
from anemoi_gt.nn.mlp import hidden_width
from anemoi_gt.nn.norm import norm_in_chunks, overflows


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_conditional_norm_is_its_formula_and_initialised_as_a_norm_without_parameters():
    norm, x, cond = ConditionalLayerNorm(8, condition_shape=3), draw(2, 5, 8), draw(2, 1, 3)
    assert torch.equal(norm(x, cond=cond), layer_norm(x, (8,)))
    randomise(norm)
    expected = (1 + norm.scale(cond)) * layer_norm(x, (8,)) + norm.bias(cond)
    torch.testing.assert_close(norm(x, cond=cond), expected)


@pytest.mark.compiled
def test_a_condition_with_fewer_dimensions_than_the_rows_is_traced():
    norm, x, cond = ConditionalLayerNorm(8, condition_shape=3), draw(2, 5, 8), draw(5, 3)
    randomise(norm)
    traced = torch.compile(norm, fullgraph=True, backend="eager")
    assert torch.equal(traced(x, cond=cond), norm(x, cond=cond))


@pytest.mark.parametrize("most", [1, 16, 40, 10_000])
@pytest.mark.parametrize("nodes", [None, 1, 5])
def test_norms_in_chunks_give_the_same_bits(nodes, most):
    norm, x = randomise(ConditionalLayerNorm(8, condition_shape=3)), draw(2, 5, 8)
    cond = draw(2, nodes or 1, 3).mul(8).round() / 8
    for parameter in norm.parameters():  # few bits: a BLAS may sum fewer rows in another order
        parameter.data = parameter.data.mul(8).round() / 8
    if nodes is None:
        norm, cond = randomise(AutocastLayerNorm(8)), None
    expected = norm(x) if cond is None else norm(x, cond=cond)
    assert torch.equal(norm_in_chunks(norm, x, cond, most), expected)


def test_heads_are_normed_in_chunks_of_nodes():
    norm, x = randomise(torch.nn.LayerNorm(8)), draw(7, 2, 8)
    assert torch.equal(norm_in_chunks(norm, x, None, max_numel=48), norm(x))


def test_norms_are_chunked_where_a_gpu_kernel_would_overflow_32_bits():
    norm = torch.nn.LayerNorm(1024)
    with FakeTensorMode():
        most, more = (torch.empty(rows, 1024, device="cuda") for rows in (2**22 - 1, 2**22))
        on_cpu = torch.empty(2**22, 1024)
    assert overflows(norm, more)
    assert not overflows(norm, most)
    assert not overflows(norm, on_cpu)
    assert not overflows(torch.nn.Identity(), more)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_norms_keep_the_dtype_of_their_input_under_autocast(dtype):
    x = draw(5, 8).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert AutocastLayerNorm(8)(x).dtype == dtype
        assert ConditionalLayerNorm(8, condition_shape=3)(x, cond=draw(5, 3)).dtype == dtype


@pytest.mark.parametrize(("ratio", "width"), ((4, 48), (0.5, 6), (1.3, 16), (1.375, 17), (0.05, 1)))
def test_width_of_the_hidden_layer_is_rounded_with_halves_up(ratio, width):
    assert hidden_width(12, ratio) == width


def test_conditions_of_another_batch_raise():
    with pytest.raises(RuntimeError, match="must match"):
        ConditionalLayerNorm(8, condition_shape=3)(draw(2, 5, 8), cond=draw(3, 1, 3))


SIZES = {"in_channels": 8, "hidden_dim": 16, "out_channels": 8, "num_heads": 2, "edge_dim": 3}
GRAPH = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4, 2], [0, 0, 1, 3]]), 5)


def read_by_projections(block, x):
    """Return the inputs of the node projections by name, under bfloat16 autocast."""
    seen = {}
    for name in ("lin_query", "lin_key", "lin_value", "lin_self"):
        getattr(block, name).register_forward_pre_hook(
            lambda _, rows, name=name: seen.update({name: rows[0]})
        )
    with torch.autocast("cpu", torch.bfloat16):
        block(x, GRAPH, draw(4, 3))
    return seen


def test_autocast_casts_the_nodes_of_a_processor_block_once_for_all_projections():
    seen = read_by_projections(GraphTransformerProcessorBlock(**SIZES), draw(5, 8))
    assert len({id(rows) for rows in seen.values()}) == 1
    assert seen["lin_query"].dtype == torch.bfloat16


def test_autocast_casts_each_side_of_a_mapper_block_once():
    seen = read_by_projections(GraphTransformerMapperBlock(**SIZES), (draw(5, 8), draw(5, 8)))
    assert seen["lin_key"] is seen["lin_value"]
    assert seen["lin_query"] is seen["lin_self"]
    assert all(rows.dtype == torch.bfloat16 for rows in seen.values())


class Doubled(torch.nn.Module):
    """An adapter that has the weight of what it wraps."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.weight, self.bias = linear, linear.weight, linear.bias

    def forward(self, x):
        return 2 * self.linear(x)


def wrap(layer):
    layer.lin_edge = Doubled(layer.lin_edge)


class Bare(torch.nn.Module):
    """An adapter without weight, bias and sizes, as many are written by hand."""

    def __init__(self, linear, factor=1):
        super().__init__()
        self.linear, self.factor = linear, factor

    def forward(self, x):
        return self.factor * self.linear(x)


def wrap_without_weight(layer):
    layer.lin_edge = Bare(layer.lin_edge, 2)


def hook(layer):
    layer.lin_edge.register_forward_hook(lambda module, inputs, out: 2 * out)


def add_bias(layer):
    bias = (
        torch.zeros_like(layer.lin_edge.weight[:, 0])
        if layer.lin_edge.bias is None
        else layer.lin_edge.bias.data
    )
    layer.lin_edge.weight.data.mul_(2)
    layer.lin_edge.bias = torch.nn.Parameter(2 * bias)


@pytest.fixture(params=("conv", "block"))
def layer(request):
    conv = GraphTransformerConv(8, 4, heads=2, edge_dim=3)
    block = GraphTransformerProcessorBlock(**SIZES)
    return randomise(conv if request.param == "conv" else block)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("change", "compiled"),
    ((wrap, False), (wrap_without_weight, False), (hook, False), (hook, True)),
)
def test_adapters_and_hooks_of_an_edge_embedding_are_called(layer, change, compiled):
    expected, inputs = copy.deepcopy(layer), (draw(5, 8), GRAPH, draw(4, 3))
    add_bias(expected)
    change(layer)
    torch.compiler.reset()
    call = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
    with pytest.warns(
        UserWarning, match="edge attributes are embedded .*: its lin_edge (is a|has hooks)"
    ):
        out = call(*inputs)
    torch.testing.assert_close(out, expected(*inputs))


def linear_maps(layer):
    """The linear maps of a layer, each as (parent, name, itself)."""
    return [
        (parent, name, child)
        for parent in list(layer.modules())
        for name, child in parent.named_children()
        if isinstance(child, (torch.nn.Linear, Linear))
    ]


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.filterwarnings("ignore:edge attributes are embedded:UserWarning")
def test_every_linear_map_may_be_an_adapter_without_a_weight(layer, compiled):
    inputs = draw(5, 8), GRAPH, draw(4, 3)
    expected = layer(*inputs)
    for parent, name, linear in linear_maps(layer):
        setattr(parent, name, Bare(linear))
    torch.compiler.reset()
    call = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
    torch.testing.assert_close(call(*inputs), expected)


class Counted(torch.nn.Module):
    """A parametrisation that changes nothing and counts how often a weight is computed."""

    def forward(self, weight):
        self.calls = getattr(self, "calls", 0) + 1
        return weight.clone()


def count_weights(layer):
    """Parametrise all linear maps of a layer; return their counters, at zero."""
    counters = []
    for _, _, linear in linear_maps(layer):
        counters.append(Counted())
        parametrize.register_parametrization(linear, "weight", counters[-1])
        counters[-1].calls = 0  # registering calls it
    return counters


@pytest.mark.filterwarnings("ignore:edge attributes are embedded:UserWarning")
def test_a_parametrised_weight_is_computed_once_a_call(layer):
    inputs = draw(5, 8), GRAPH, draw(4, 3)
    expected, counters = layer(*inputs), count_weights(layer)
    torch.testing.assert_close(layer(*inputs), expected)
    assert [counter.calls for counter in counters] == [1] * len(counters)


@pytest.mark.filterwarnings("ignore:edge attributes are embedded:UserWarning")
def test_attention_weights_compute_no_parametrised_weight_again():
    layer = GraphTransformerConv(8, 4, heads=2, edge_dim=3)
    counters = count_weights(layer)
    layer(draw(5, 8), GRAPH, draw(4, 3), return_attention_weights=True)
    assert [counter.calls for counter in counters] == [1] * len(counters)


def test_an_edge_embedding_with_weights_that_compute_for_themselves_is_called(layer):
    inputs = draw(5, 8), GRAPH, draw(4, 3)
    expected, weight = layer(*inputs), layer.lin_edge.weight.detach()
    layer.lin_edge.weight = torch.nn.Parameter(TwoTensor(weight, weight))
    with pytest.warns(UserWarning, match="its lin_edge has a weight of the tensor subclass"):
        out = layer(*inputs)
    torch.testing.assert_close(out.a if isinstance(out, TwoTensor) else out, expected)


@pytest.mark.filterwarnings("ignore:edge attributes are embedded:UserWarning")
def test_projections_of_another_class_read_nodes_as_they_are():
    class Linear(torch.nn.Linear):
        pass

    block = GraphTransformerProcessorBlock(**SIZES, layer_kernels=LayerKernels(Linear=Linear))
    assert {rows.dtype for rows in read_by_projections(block, draw(5, 8)).values()} == {
        torch.float32
    }
