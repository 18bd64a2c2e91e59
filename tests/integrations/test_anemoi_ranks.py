"""Two and three ranks with Anemoi's own sharding compute with us what one rank computes."""

import os
import subprocess
import sys

import pytest
import torch
from support import anemoi_ranks
from support.anemoi_model import draw
from support.anemoi_ranks import STRATEGIES, WORLDS, direction_of, make_model
from support.same_numbers import assert_same_numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, anemoi_ranks.__file__, str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def unsharded(graph):
    """Output and gradients of Anemoi's model on one rank."""
    model = make_model("edges")
    out = model(draw(graph))["data"]
    (out * direction_of(out)).sum().backward()
    return out.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def load(folder, world, strategy, who):
    return torch.load(folder / f"{world}_{strategy}_{who}.pt")


cases = pytest.mark.parametrize(
    ("world", "strategy"), [(world, strategy) for world in WORLDS for strategy in STRATEGIES]
)


@cases
def test_numbers_on_ranks_are_those_of_anemoi_on_ranks_and_of_one_rank(folder, unsharded, world, strategy):
    out, gradients, _ = load(folder, world, strategy, "ours")
    _, theirs, _ = load(folder, world, strategy, "theirs")
    assert_same_numbers(out, unsharded[0])
    assert_same_numbers(gradients, theirs)
    assert_same_numbers(gradients, unsharded[1])


@pytest.mark.parametrize("world", WORLDS)
def test_shards_are_sorted_once_over_all_steps(folder, world):
    _, _, (first, second) = load(folder, world, "edges", "ours")
    assert (first, second) == (
        2 + 2 + 2,
        0,
    )  # two chunks of the encoder, two layers with halos of their own, two of the decoder


@pytest.mark.parametrize("world", WORLDS)
def test_gathered_lists_of_sharded_heads_are_sorted_once_over_all_steps(folder, world):
    _, _, (first, second) = load(folder, world, "heads", "ours")
    assert (first, second) == (3, 0)  # those of encoder, processor and decoder, recompute included
