"""The mask of dropout: published random numbers, and others for every seed, sample, head and edge."""

import itertools

import pytest
import torch

from anemoi_gt.ops.dropout import dropout_factor, philox


def keep(seed, ids, batch=0, heads=range(1)):
    return dropout_factor(torch.tensor([seed]), batch, ids, heads, 0.5, torch.float64)


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        (0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (0xFFFFFFFF, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_philox_gives_the_published_values(counter, seed, words):
    output = philox((torch.tensor([counter]),) * 4, torch.tensor([seed]))
    assert " ".join(f"{int(word):08x}" for word in output) == words


def test_masks_of_seeds_batch_indices_heads_and_edges_beyond_32_bits_differ():
    ids = torch.arange(1000)
    masks = [
        keep(seed, ids, batch=b, heads=range(h, h + 1))
        for seed, b, h in itertools.product((0, 1, 2**40), (0, 1), (0, 1))
    ]
    for left, right in itertools.combinations([*masks, keep(0, ids + 2**32)], 2):
        assert 0.4 < (left == right).double().mean() < 0.6


def test_the_mask_of_a_head_does_not_depend_on_the_group_of_heads():
    ids = torch.arange(30_000)  # of which two heads are drawn at once
    together = keep(5, ids, batch=1, heads=range(2, 7))
    alone = [keep(5, ids, batch=1, heads=range(head, head + 1)) for head in range(2, 7)]
    assert torch.equal(together, torch.cat(alone, dim=1))
