"""Captured steps on four ranks; the claims are the checks of `checks_cuda_graph`."""

import pytest

from distributed.ranks import cases


@pytest.mark.parametrize(("check", "ranks"), cases("distributed.checks_cuda_graph"))
def test_on_ranks(check, ranks, verdicts_of):
    assert verdicts_of("checks_cuda_graph")[check, ranks] == {}
