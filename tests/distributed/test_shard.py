"""Who owns what, what travels, and what is refused, on 2, 3 and 4 ranks; the claims are the checks of `checks_shard`."""

import pytest

from distributed.ranks import cases


@pytest.mark.parametrize(("check", "ranks"), cases("distributed.checks_shard"))
def test_on_ranks(check, ranks, verdicts_of):
    assert verdicts_of("checks_shard")[check, ranks] == {}
