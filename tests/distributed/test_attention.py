"""Attention of a divided graph is that of the whole, on 2, 3 and 4 ranks; the claims are the checks of `checks_attention`."""

import pytest

from distributed.ranks import cases


@pytest.mark.parametrize(("check", "ranks"), cases("distributed.checks_attention"))
def test_on_ranks(check, ranks, verdicts_of):
    assert verdicts_of("checks_attention")[check, ranks] == {}
