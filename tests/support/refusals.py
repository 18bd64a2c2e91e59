"""Tests of many wrong inputs and the messages that they must raise."""

import re
from functools import partial

import pytest


def refused(*cases):
    """Parametrise a test over (*wrong, message): a call, or what else is wrong, and the message of its ValueError."""
    cases = [(wrong[0] if len(wrong) == 1 else wrong, message) for *wrong, message in cases]
    return pytest.mark.parametrize(
        ("wrong", "message"), cases, ids=[message[:60] for _, message in cases]
    )


def options(call, must, **wrong):
    """Return a case for each option of a call with its wrong value: "<option> must <must> .. got <value>"."""
    return [
        (partial(call, **{n: v}), f"{n} must {must}.*, got {re.escape(repr(v))}")
        for n, v in wrong.items()
    ]


def raises(call, message):
    """Assert that a call raises ValueError with a message."""
    with pytest.raises(ValueError, match=message):
        call()
