"""A seed of dropout that is handed in: the same mask in every call, whatever the generator does."""

import pytest
import torch
from support.graphs import GRAPHS
from support.run import structure

from anemoi_gt import AttentionConfig, edge_attention

HEADS, CHANNELS = 2, 4


@pytest.fixture(params=["torch", "triton"])
def attend(request, kernel_device):
    """Attention over the graph "shuffled" on each backend, with dropout."""
    graph, config = structure(GRAPHS["shuffled"], kernel_device), AttentionConfig(backend=request.param)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(nodes, HEADS, CHANNELS, generator=generator) for nodes in (13, 11, 11)]
    rows = [tensor.to(kernel_device) for tensor in rows]
    return lambda **options: edge_attention(*rows, graph, config=config, **{"dropout_p": 0.5, **options})[0]


def seed(number, device):
    return torch.tensor([number], device=device)


def test_a_seed_repeats_its_mask_and_draws_nothing(attend, kernel_device):
    state = torch.get_rng_state()
    first, second = (attend(dropout_seed=seed(7, kernel_device)) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, attend(dropout_seed=seed(8, kernel_device)))


def test_it_is_the_seed_that_is_drawn_without(attend, kernel_device):
    torch.manual_seed(3)
    drawn = torch.randint(2**62, (1,), device=kernel_device)
    torch.manual_seed(3)
    assert torch.equal(attend(), attend(dropout_seed=drawn))


def test_without_dropout_it_changes_nothing(attend, kernel_device):
    assert torch.equal(attend(dropout_p=0.0), attend(dropout_p=0.0, dropout_seed=seed(7, kernel_device)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (7, "dropout_seed must be a tensor, got int"),
        (torch.tensor([7], dtype=torch.int32), "dropout_seed must have dtype torch.int64, got torch.int32"),
        (torch.tensor([7, 8]), "dropout_seed must have 1 entry, got 2"),
        (torch.tensor(7), "dropout_seed must be one-dimensional"),
    ],
)
def test_a_wrong_seed_raises(attend, kernel_device, wrong, message):
    wrong = wrong.to(kernel_device) if torch.is_tensor(wrong) else wrong
    with pytest.raises(ValueError, match=message):
        attend(dropout_seed=wrong)
