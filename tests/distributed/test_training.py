"""Training on (data, model) meshes of four ranks; the claims are the checks of `checks_training`."""

import pytest

from distributed.ranks import cases


@pytest.mark.parametrize(("check", "ranks"), cases("distributed.checks_training"))
def test_on_ranks(check, ranks, verdicts_of):
    assert verdicts_of("checks_training")[check, ranks] == {}
