"""A trainer on up to four ranks; the claims are the checks of `checks_trainer`."""

import pytest

from distributed.ranks import cases


@pytest.mark.parametrize(("check", "ranks"), cases("distributed.checks_trainer"))
def test_on_ranks(check, ranks, verdicts_of):
    assert verdicts_of("checks_trainer")[check, ranks] == {}
