"""Two and three ranks with Anemoi's own sharding compute with us what one rank computes."""

import os
import subprocess
import sys

import pytest
import torch
from support import anemoi_ranks
from support.anemoi_model import draw
from support.anemoi_ranks import STRATEGIES, WORLDS, make_model
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
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    return out.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def load(folder, world, strategy, who):
    return torch.load(folder / f"{world}_{strategy}_{who}.pt")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", WORLDS)
def test_numbers_on_ranks_are_those_of_anemoi_on_ranks_and_of_one_rank(folder, unsharded, world, strategy):
    out, gradients, _ = load(folder, world, strategy, "ours")
    _, theirs, _ = load(folder, world, strategy, "theirs")
    assert_same_numbers(out, unsharded[0])
    assert_same_numbers(gradients, theirs)
    assert_same_numbers(gradients, unsharded[1])


SORTS = {
    "edges": 2 + 2 + 2,  # two chunks of the encoder, two layers with halos of their own, two of the decoder
    "heads": 3,  # gathered lists of encoder, processor and decoder, recompute included
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", WORLDS)
def test_each_list_of_a_rank_is_sorted_once_over_all_steps(folder, world, strategy):
    assert load(folder, world, strategy, "ours")[2] == [SORTS[strategy], 0]
