"""Weights that are cast together: the numbers of weights that autocast casts one by one, in all that reads them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.nn import ConditionalLayerNorm, GraphTransformerProcessor, LayerKernels
from anemoi_gt.training import TrainingConfig
from anemoi_gt.training.batches import TrainingBatches
from anemoi_gt.training.learner import Learner
from anemoi_gt.training.mixed import CastTogether

CASTS = torch.ops.aten._to_copy.default
ALL_AT_ONCE = torch.ops.aten._foreach_copy_.default


class Operators(TorchDispatchMode):
    """What is called in the block, with the shape of its first operand."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        first = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else None
        self.called.append((function, None if first is None else tuple(first.shape)))
        return function(*arguments, **(options or {}))


@pytest.fixture
def make_model(splits):
    """Make a model with dropout, the same for each call, whatever its options."""
    graph = icosphere_graph(splits.train.nodes, refinement=1)
    fields = splits.train.in_channels, splits.train.out_channels

    def make(**options):
        torch.manual_seed(0)
        return EncoderProcessorDecoder(graph, *fields, channels=8, heads=2, num_layers=2, dropout=0.1, **options)

    return make


@pytest.fixture
def differentiate(splits):
    """Call what stands for a model under autocast; returns what comes out and the gradients of the model's parameters."""
    x = torch.randn(2, 208, splits.train.in_channels, generator=torch.Generator().manual_seed(2))

    def differentiate(call, model, dtype):
        torch.manual_seed(1)
        model.train().zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            out = call(x)
        out.square().sum().backward()
        return out.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}

    return differentiate


def assert_same_bits(actual, expected):
    (out, gradients), (expected_out, expected_gradients) = actual, expected
    assert torch.equal(out, expected_out) and len(set(out.flatten().tolist())) > 1
    given = {name for name, gradient in expected_gradients.items() if gradient is not None}
    assert {name for name, gradient in gradients.items() if gradient is not None} == given
    assert [name for name in given if not torch.equal(gradients[name], expected_gradients[name])] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checkpoint_groups": 1},
        {"edge_pre_mlp": True, "qk_norm": True, "mlp_implementation": "swiglu"},
        {"config": AttentionConfig(precision="fp32")},
    ],
    ids=["plain", "computed again", "all parts", "attention in float32"],
)
def test_output_and_gradients_are_those_of_autocast_bit_by_bit(make_model, differentiate, dtype, options):
    model = make_model(**options)
    assert_same_bits(differentiate(CastTogether(model), model, dtype), differentiate(model, model, dtype))


def test_no_weight_is_cast_alone_but_those_that_attention_reads(make_model, differentiate):
    model = make_model()
    with Operators() as operators:
        differentiate(CastTogether(model), model, torch.bfloat16)
    alone = sum(
        function is CASTS and shape in {(8, 8), (32, 8), (8, 32), (32,)} for function, shape in operators.called
    )
    together = sum(function is ALL_AT_ONCE for function, _ in operators.called)
    with Operators() as operators:
        differentiate(model, model, torch.bfloat16)
    by_autocast = sum(
        function is CASTS and shape in {(8, 8), (32, 8), (8, 32), (32,)} for function, shape in operators.called
    )
    assert (alone, together) == (0, 2) and by_autocast > 2 * 4 * 7  # forward and backward of four blocks


def test_weights_that_are_frozen_get_no_gradient(make_model, differentiate):
    model = make_model()
    together = CastTogether(model)
    model.processor.proc[0].lin_key.weight.requires_grad_(False)
    actual, expected = (differentiate(call, model, torch.bfloat16) for call in (together, model))
    assert_same_bits(actual, expected)
    assert actual[1]["processor.proc.0.lin_key.weight"] is None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not together(torch.randn(1, 208, model.in_channels["data"])).requires_grad


def test_a_weight_that_nothing_reads_gets_no_gradient(make_model, differentiate):
    model = make_model()
    model.processor.proc[0].spare = nn.Linear(8, 8)
    together = differentiate(CastTogether(model), model, torch.bfloat16)
    assert together[1]["processor.proc.0.spare.weight"] is None
    assert_same_bits(together, differentiate(model, model, torch.bfloat16))


def test_weights_of_two_layers_that_are_one_get_both_gradients(make_model, differentiate):
    model = make_model()
    first, second = model.processor.proc
    second.lin_query.weight = first.lin_query.weight
    assert_same_bits(
        differentiate(CastTogether(model), model, torch.bfloat16), differentiate(model, model, torch.bfloat16)
    )


def test_outside_autocast_and_without_gradients_a_model_is_called_as_it_is(make_model):
    model = make_model().eval()
    together, x = CastTogether(model), torch.randn(1, 208, model.in_channels["data"])
    with Operators() as operators:
        assert torch.equal(together(x), model(x))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(together(x), model(x))
    assert ALL_AT_ONCE not in dict(operators.called)


def test_a_model_of_other_layers_is_left_to_autocast():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    with torch.autocast("cpu", dtype=torch.bfloat16), Operators() as operators:
        CastTogether(model)(torch.randn(2, 4)).float().sum().backward()
    assert ALL_AT_ONCE not in dict(operators.called) and model[0].weight.grad is not None


class NormInFloat32(nn.Module):
    """A norm with a map of its own, which it keeps from autocast."""

    def __init__(self, normalized_shape):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(normalized_shape), nn.Linear(normalized_shape, normalized_shape)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.mix(self.norm(x.float()))


def with_a_norm_of_its_own(model):
    for block in model.processor.proc:
        block.layer_norm_attention = NormInFloat32(8)


def with_a_hook(model):
    model.processor.proc[0].lin_value.register_forward_pre_hook(lambda part, inputs: (inputs[0] + part.weight.norm(),))


def with_normed_weights(model):
    nn.utils.parametrizations.weight_norm(model.processor.proc[0].lin_value)


def with_pruned_weights(model):
    prune.l1_unstructured(model.processor.proc[0].lin_value, "weight", 0.3)


@pytest.mark.parametrize("change", [with_a_norm_of_its_own, with_a_hook, with_normed_weights, with_pruned_weights])
def test_maps_that_something_else_reads_too_are_left_to_autocast(make_model, differentiate, change):
    model = make_model()
    change(model)
    assert_same_bits(
        differentiate(CastTogether(model), model, torch.bfloat16), differentiate(model, model, torch.bfloat16)
    )


def test_a_map_under_spectral_norm_is_left_to_autocast(make_model):
    model = make_model()
    nn.utils.spectral_norm(model.processor.proc[0].lin_value)
    left = {name for name, _ in model.named_parameters()} - set(CastTogether(model).weights)
    assert {"processor.proc.0.lin_value.weight_orig", "processor.proc.0.lin_value.bias"} <= left


def test_a_model_with_compiled_parts_is_left_to_autocast(make_model):
    model = make_model()
    model.processor.proc[1].compile(backend="eager")
    assert (
        CastTogether(model).weights == {} and CastTogether(torch.compile(make_model(), backend="eager")).weights == {}
    )


@pytest.mark.parametrize(("precision", "times"), [("bf16-mixed", 2), ("16-mixed", 2), ("32-true", 0)])
def test_a_training_step_casts_weights_together_in_mixed_precision(make_model, splits, precision, times):
    config = TrainingConfig(steps=2, batch_size=2, warmup_steps=1, device="cpu", precision=precision)
    learner = Learner(make_model(), splits.train.weights, config, torch.device("cpu"))
    batch = next(TrainingBatches(splits.train, 2, 2, seed=0, device=torch.device("cpu")).since(0))
    with Operators() as operators:
        learner.differentiate(batch)
    assert sum(function is ALL_AT_ONCE for function, _ in operators.called) == times


def test_maps_of_conditional_norms_are_cast_with_the_others():
    kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=3))
    processor = GraphTransformerProcessor(num_layers=1, num_channels=8, num_heads=2, edge_dim=3, layer_kernels=kernels)
    names = set(CastTogether(nn.ModuleList(processor.proc)).weights)
    assert {"0.layer_norm_attention.scale.weight", "0.lin_query.bias"} <= names
    assert not names & {"0.lin_edge.weight", "0.lin_edge.bias"}
