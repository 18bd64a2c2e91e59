"""The whole model, cut to the rows of a rank, on up to four ranks; the claims are the checks of `checks_model`."""

import pytest

from distributed.ranks import cases


@pytest.mark.parametrize(("check", "ranks"), cases("distributed.checks_model"))
def test_on_ranks(check, ranks, verdicts_of):
    assert verdicts_of("checks_model")[check, ranks] == {}
