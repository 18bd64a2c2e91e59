"""Checks on up to 4 ranks; each claim is a function of a `checks_` module."""

import pytest

from distributed.ranks import cases


@pytest.mark.parametrize(("module", "check", "ranks"), cases())
def test_on_ranks(module, check, ranks, verdicts):
    assert verdicts[f"{module}-{check}-{ranks}"] == {}
