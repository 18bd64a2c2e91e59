"""Dropout of edge attention: its mask, its seed and its rate."""

import itertools

import pytest
import torch
from support.dropout import keep_of
from support.oracle import oracle
from support.run import attend
from support.same_numbers import assert_same

from anemoi_gt.ops.dropout import keep_factor, philox


def keep(seed, ids, rate=0.5, batch=0, head=0):
    return keep_factor(torch.tensor([seed]), batch, ids, head, rate, torch.float64)


def test_result_is_that_of_the_oracle_with_the_defined_mask(problem_and_graph):
    problem, graph = problem_and_graph("shuffled", dtype=torch.float64)
    torch.manual_seed(5)
    result = attend(problem, graph, "torch", dropout_p=0.3)
    problem.keep = keep_of(graph, 3, 0.3, 5)
    assert_same(result, oracle(problem), 1e-12)


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [(0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (0xFFFFFFFF, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd")],
)
def test_philox_gives_the_published_values(counter, seed, words):
    found = philox((torch.tensor([counter]),) * 4, torch.tensor([seed]))
    assert " ".join(f"{int(word):08x}" for word in found) == words


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
