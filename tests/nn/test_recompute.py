"""Activation checkpointing: what it keeps of the random numbers, and that a pass can be captured."""

import pytest
import torch

from anemoi_gt.nn.activation_checkpointing import recompute


@pytest.fixture
def asked(monkeypatch):
    """How often the state of the random numbers was asked for."""
    calls, state = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: calls.append(1) or state())
    return calls


def run(x, capturing, monkeypatch, draws):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return recompute(lambda x: x.sin() * x, x, device=torch.device("cuda"), draws=draws)


@pytest.mark.parametrize(("capturing", "draws"), [(False, False), (False, True), (True, True)])
def test_the_state_of_random_numbers_is_kept(asked, monkeypatch, capturing, draws):
    run(torch.randn(3, requires_grad=True), capturing, monkeypatch, draws)
    assert asked


def test_a_captured_pass_without_draws_leaves_the_state_alone_and_has_the_gradient(asked, monkeypatch):
    x = torch.randn(3, requires_grad=True)
    run(x, True, monkeypatch, draws=False).sum().backward()
    assert not asked
    torch.testing.assert_close(x.grad, (x.cos() * x + x.sin()).detach())


def test_the_stream_of_a_cpu_is_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("there is none"))
    recompute(torch.sin, torch.randn(3, requires_grad=True), device=torch.device("cpu"), draws=False).sum().backward()
