"""Models of Anemoi compute the same with our attention, in every mode that they have."""

import pytest
import torch
from support.anemoi_model import (
    build,
    differentiate,
    draw,
    graph_of,
    make_ensemble_options,
    make_options,
)
from support.same_numbers import assert_same_numbers

from anemoi_gt.integrations import anemoi as integration

pytestmark = pytest.mark.application

LEARNING_RATE = 1e-3


@pytest.fixture
def assert_same(graph, attentions):
    """Check that a model with these options uses anemoi_gt under `install` and gives the same results."""

    def check(options, x, *, fusion="auto", **forward):
        model = build(graph, options)
        out, gradients = differentiate(model, x, **forward)
        assert not attentions
        with integration.install(fusion=fusion):
            ours, our_gradients = differentiate(model, x, **forward)
        assert attentions
        assert_same_numbers(ours, out)
        assert_same_numbers(our_gradients, gradients)

    return check


@pytest.mark.parametrize(
    "changes",
    (
        {},
        {"qk_norm": True, "checkpointing": False},
        {"edge_pre_mlp": True, "trainable": 0},
        {"shard_strategy": "heads", "heads": 1},
        {"channels": 24, "heads": 3, "mapper_chunks": 1},
        {"model": {"processor": {"attn_channels": 16}}, "mapper_chunks": 5},
    ),
    ids=str,
)
def test_output_and_gradients_are_anemois(graph, assert_same, changes):
    assert_same(make_options(**changes), draw(graph))


@pytest.mark.parametrize(
    ("chunks", "batch", "strategy", "fusion"),
    (
        (1, 2, "edges", "auto"),
        (2, 2, "edges", "none"),
        (2, 3, "edges", "auto"),
        (3, 3, "heads", "auto"),
    ),
)
def test_a_batch_matches_anemoi(graph, assert_same, chunks, batch, strategy, fusion):
    options = make_options(mapper_chunks=chunks, shard_strategy=strategy)
    assert_same(options, draw(graph, batch=batch), fusion=fusion)


def test_an_ensemble_with_conditional_layer_norm_matches_anemoi(graph, assert_same):
    assert_same(make_ensemble_options(), draw(graph, batch=2, ensemble=2), fcstep=1)


def train(graph, steps, options):
    """Losses and parameters of a model."""
    model = build(graph, options)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    x, target = draw(graph), draw(graph, seed=4)["data"][:, :1, ..., :3]
    losses = []
    for _ in range(steps):
        loss = (model(x)["data"] - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def test_ten_steps_of_training_with_default_options_are_anemois():
    graph, options = graph_of("O8", 2), make_options()
    losses, parameters = train(graph, 10, options)
    with integration.install():
        our_losses, our_parameters = train(graph, 10, options)
    assert_same_numbers(torch.tensor(our_losses), torch.tensor(losses))
    assert losses[-1] < 0.9 * losses[0]
    for parameter_name, parameter in parameters.items():
        # the softmax drops it: AdamW makes a step of rounding
        if not parameter_name.endswith("lin_key.bias"):
            moved = 10 * LEARNING_RATE  # at most
            error = (our_parameters[parameter_name] - parameter).abs().max().item()
            assert error <= 2e-3 * moved, f"{parameter_name}: off by {error:.1e}"


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16-mixed", "16-mixed"))
def test_mixed_precision_is_as_accurate_as_anemois(graph, dtype):
    model, x = build(graph, make_options()), draw(graph)
    exact, exact_gradients = differentiate(model, x)

    def errors():
        with torch.autocast("cpu", dtype):
            out, gradients = differentiate(model, x)
        named = {"output": (out, exact)} | {
            name: (gradients[name], g) for name, g in exact_gradients.items()
        }
        return {
            name: (a - b).norm().item() / b.norm().item()
            for name, (a, b) in named.items()
            if b is not None
        }

    theirs = errors()
    with integration.install():
        ours = errors()
    for name in ours:
        if not name.endswith("lin_key.bias"):
            assert ours[name] <= 2 * theirs[name] + torch.finfo(dtype).eps, (
                f"{name}: {ours[name]}, {theirs[name]}"
            )


@pytest.fixture
def inference_chunks(monkeypatch):
    """Set what Anemoi reads from ANEMOI_INFERENCE_NUM_CHUNKS when it is imported."""

    def set_chunks(number):
        monkeypatch.setattr("anemoi.models.layers.block.NUM_CHUNKS_INFERENCE_PROCESSOR", number)
        monkeypatch.setattr("anemoi.models.layers.mapper.NUM_CHUNKS_INFERENCE_MAPPER", number)

    return set_chunks


@pytest.mark.parametrize("strategy", ("edges", "heads"))
def test_inference_in_chunks_changes_nothing(graph, inference_chunks, strategy):
    model, x = build(graph, make_options(shard_strategy=strategy)).eval(), draw(graph)
    with integration.install(), torch.inference_mode():
        whole = model(x)["data"]
        inference_chunks(3)
        assert_same_numbers(model(x)["data"], whole)


@pytest.mark.parametrize("chunks", (1, 3))
def test_dtype_of_attention_does_not_depend_on_chunks(graph, inference_chunks, chunks):
    model = build(graph, make_options()).eval()
    block, seen = model.processor.proc[0], []
    block.projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    inference_chunks(chunks)
    with integration.install(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        model(draw(graph))
    assert set(seen) == {torch.bfloat16}


def test_precision_of_the_attention_can_be_chosen(graph):
    model, x = build(graph, make_options()), draw(graph)
    out, _ = differentiate(model, x)
    with integration.install(precision="bf16"):
        coarse, _ = differentiate(model, x)
    error = (coarse - out).norm() / out.norm()
    assert coarse.dtype == torch.float32
    assert 1e-6 < error < 1e-2
