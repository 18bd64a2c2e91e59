"""Parts of blocks: norms under a condition and under autocast, gated networks, widths."""

import pytest
import torch
from support.differentiate import randomise
from torch.nn.functional import gelu, layer_norm, linear, relu, sigmoid, silu

from anemoi_gt.nn import AutocastLayerNorm, ConditionalLayerNorm, LayerKernels
from anemoi_gt.nn.feed_forward import FeedForward, hidden_width

GATES = {"glu": sigmoid, "swiglu": silu, "geglu": gelu, "reglu": relu}


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_conditional_norm_begins_as_a_norm_without_parameters():
    x = draw(5, 8)
    assert torch.equal(ConditionalLayerNorm(8, condition_shape=3)(x, cond=draw(5, 3)), layer_norm(x, (8,)))


def test_conditional_norm_is_its_formula():
    norm, x, cond = randomise(ConditionalLayerNorm(8, condition_shape=3)), draw(2, 5, 8), draw(2, 1, 3)
    expected = (1 + norm.scale(cond)) * layer_norm(x, (8,)) + norm.bias(cond)
    torch.testing.assert_close(norm(x, cond=cond), expected)


def test_one_row_of_a_condition_is_every_nodes():
    norm, x, cond = randomise(ConditionalLayerNorm(8, condition_shape=3)), draw(2, 5, 8), draw(2, 1, 3)
    torch.testing.assert_close(norm(x, cond=cond), norm(x, cond=cond.expand(2, 5, 3)))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_norms_give_the_dtype_of_their_input_back_under_autocast(dtype):
    x = draw(5, 8).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert AutocastLayerNorm(8)(x).dtype == dtype
        assert ConditionalLayerNorm(8, condition_shape=3)(x, cond=draw(5, 3)).dtype == dtype


@pytest.mark.parametrize("implementation", GATES)
def test_gated_network_is_its_formula(implementation):
    network, x = FeedForward(6, 9, implementation, LayerKernels()), draw(5, 6)
    p = dict(network.mlp.named_parameters())
    gate = GATES[implementation](linear(x, p["0.gate_proj.weight"], p["0.gate_proj.bias"]))
    hidden = gate * linear(x, p["0.value_proj.weight"], p["0.value_proj.bias"])
    torch.testing.assert_close(network(x), linear(hidden, p["1.weight"], p["1.bias"]))


@pytest.mark.parametrize(("ratio", "width"), ((4, 48), (0.5, 6), (1.3, 16), (1.375, 17), (0.05, 1)))
def test_width_of_the_hidden_layer_is_rounded_with_halves_up(ratio, width):
    assert hidden_width(12, ratio) == width


@pytest.mark.parametrize("ratio", (0.01, 0, -1, float("inf"), float("nan")))
def test_network_without_width_is_refused(ratio):
    with pytest.raises(ValueError, match=r"mlp_ratio \* channels must be finite and at least 1/2, got .* \* 12"):
        hidden_width(12, ratio)
