"""Recorded steps on four ranks; the claims are the checks of `checks_recorded`."""

import pytest

from distributed.ranks import cases


@pytest.mark.parametrize(("check", "ranks"), cases("distributed.checks_recorded"))
def test_on_ranks(check, ranks, verdicts_of):
    assert verdicts_of("checks_recorded")[check, ranks] == {}
