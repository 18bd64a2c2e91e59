"""Tests of many wrong inputs and their error messages."""

import re
from functools import partial

import pytest


def refused(*cases):
    """Parametrise a test over (*wrong, message): a call or wrong values, and the message of the ValueError."""
    parameters = []
    for *wrong, message in cases:
        parameters.append((wrong[0] if len(wrong) == 1 else wrong, message))
    ids = [message[:60] for _, message in parameters]
    return pytest.mark.parametrize(("wrong", "message"), parameters, ids=ids)


def options(call, must, **wrong):
    """Return a case for each option of a call and its wrong value: "<option> must <must> .. got <value>"."""
    cases = []
    for name, value in wrong.items():
        message = f"{name} must {must}.*, got {re.escape(repr(value))}"
        cases.append((partial(call, **{name: value}), message))
    return cases


def raises(call, message):
    """Assert that a call raises ValueError with a message."""
    with pytest.raises(ValueError, match=message):
        call()
