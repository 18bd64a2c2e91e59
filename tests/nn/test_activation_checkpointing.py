"""Activation checkpointing: random numbers, CUDA graph capture, and groups of a processor."""

import pytest
import torch

from anemoi_gt import GraphStructure
from anemoi_gt.nn import GraphTransformerProcessor, LayerKernels
from anemoi_gt.nn.activation_checkpointing import checkpoint_activations

SIZES = {"num_channels": 12, "num_heads": 3, "edge_dim": 3}


@pytest.fixture
def reads(monkeypatch):
    """One element per read of the generator state."""
    calls, state = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: calls.append(1) or state())
    return calls


def run(x, monkeypatch, *, capturing, draws):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return checkpoint_activations(
        lambda x: x.sin() * x, x, device=torch.device("cuda"), draws=draws
    )


@pytest.mark.parametrize(("capturing", "draws"), [(False, False), (False, True), (True, True)])
def test_the_generator_state_is_kept(reads, monkeypatch, capturing, draws):
    run(torch.randn(3, requires_grad=True), monkeypatch, capturing=capturing, draws=draws)
    assert reads


def test_a_captured_pass_without_draws_does_not_read_the_generator_state_and_has_the_gradient(
    reads, monkeypatch
):
    x = torch.randn(3, requires_grad=True)
    run(x, monkeypatch, capturing=True, draws=False).sum().backward()
    assert not reads
    torch.testing.assert_close(x.grad, (x.cos() * x + x.sin()).detach())


def test_without_gradients_no_generator_state_is_read(reads, monkeypatch):
    x = torch.randn(3)
    with torch.no_grad():
        out = run(x, monkeypatch, capturing=False, draws=True)
    assert not reads
    assert torch.equal(out, x.sin() * x)


def test_capture_is_not_queried_on_a_cpu(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("there is none")
    )
    x = torch.randn(3, requires_grad=True)
    checkpoint_activations(torch.sin, x, device=torch.device("cpu"), draws=False).sum().backward()


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    graph = GraphStructure.from_edge_index(torch.randint(11, (2, 50), generator=generator), 11)
    return torch.randn(11, 12, generator=generator), graph, torch.randn(50, 3, generator=generator)


@pytest.mark.parametrize("groups", (1, 2, 5))
def test_groups_of_a_processor_run_every_layer_once_in_order(inputs, groups):
    x, graph, edge_attr = inputs
    processor = GraphTransformerProcessor(num_layers=5, **SIZES, checkpoint_groups=groups)
    expected = x
    for block in processor.proc:
        expected = block(expected, graph, edge_attr)
    assert torch.equal(processor(x, graph, edge_attr), expected)


def test_the_condition_reaches_every_layer_of_a_checkpointed_processor(inputs):
    seen = []

    class Norm(torch.nn.LayerNorm):
        def forward(self, x, cond):
            seen.append(cond)
            return super().forward(x)

    kernels, cond = LayerKernels(LayerNorm=Norm), torch.ones(1, 4)
    processor = GraphTransformerProcessor(
        num_layers=2, **SIZES, layer_kernels=kernels, checkpoint_groups=2
    )
    processor(*inputs, cond=cond)
    assert len(seen) == 4
    assert all(passed is cond for passed in seen)
