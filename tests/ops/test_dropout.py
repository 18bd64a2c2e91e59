"""Dropout of edge attention: its mask, its rate and its seed."""

import itertools

import pytest
import torch
from support.dropout import keep_of
from support.graphs import GRAPHS
from support.oracle import make_problem, oracle
from support.run import attend, structure

from anemoi_gt import AttentionConfig, edge_attention
from anemoi_gt.ops.dropout import keep_factor, philox

TORCH = AttentionConfig(backend="torch")


@pytest.fixture
def problem():
    return make_problem(GRAPHS["shuffled"], 3, 4, 5, dtype=torch.float64)


@pytest.fixture
def graph():
    return structure(GRAPHS["shuffled"])


def keep(seed, ids, rate=0.5, batch=0, head=0):
    return keep_factor(torch.tensor([seed]), batch, ids, head, rate, torch.float64)


def test_result_is_that_of_the_oracle_with_the_defined_mask(problem, graph):
    torch.manual_seed(5)
    result = attend(problem, graph, "torch", dropout_p=0.3)
    problem.keep = keep_of(graph, 3, 0.3, 5)
    for name, expected in oracle(problem).items():
        torch.testing.assert_close(result[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_gives_the_published_values(counter, seed, words):
    assert [int(word) for word in philox((torch.tensor([counter]),) * 4, torch.tensor([seed]))] == words


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_is_met_and_the_mean_is_kept(rate):
    ids = torch.arange(200_000)
    factor = keep(9, ids, rate)
    five_sigma = 5 * (rate * (1 - rate) / len(ids)) ** 0.5
    assert abs((factor == 0).double().mean() - rate) < five_sigma
    assert abs(factor.mean() - 1) < five_sigma / (1 - rate)


def test_masks_of_seeds_batch_indices_heads_and_edges_beyond_32_bits_differ():
    ids = torch.arange(1000)
    masks = [keep(seed, ids, batch=b, head=h) for seed, b, h in itertools.product((0, 1, 2**40), (0, 1), (0, 1))]
    for left, right in itertools.combinations([*masks, keep(0, ids + 2**32)], 2):
        assert 0.4 < (left == right).double().mean() < 0.6


def test_manual_seed_repeats_the_mask_and_lse_is_not_dropped(problem, graph):
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(edge_attention(**problem.operands(), graph=graph, dropout_p=0.5, config=TORCH))
    assert torch.equal(results[0][0], results[1][0]) and not torch.equal(results[0][0], results[2][0])
    assert torch.equal(results[0][1], edge_attention(**problem.operands(), graph=graph, config=TORCH)[1])


def test_rate_one_drops_everything(problem, graph):
    out, _ = edge_attention(**problem.operands(), graph=graph, dropout_p=1.0, config=TORCH)
    assert bool((out == 0).all())


def test_activation_checkpointing_repeats_the_mask(problem, graph):
    names, gradients = list(problem.operands()), []

    def run(*values):
        return edge_attention(**dict(zip(names, values, strict=True)), graph=graph, dropout_p=0.5, config=TORCH)[0]

    for checkpointed in (False, True):
        torch.manual_seed(11)
        leaves = [operand.clone().requires_grad_() for operand in problem.operands().values()]
        out = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False) if checkpointed else run(*leaves)
        out.backward(problem.grad_out)
        gradients.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))
