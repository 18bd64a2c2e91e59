"""Tests of many wrong inputs and their error messages."""

import pytest


def refused(*cases):
    """Parametrise a test over (*wrong, message): a call or wrong values, and the message of the ValueError."""
    parameters = []
    for *wrong, message in cases:
        parameters.append((wrong[0] if len(wrong) == 1 else wrong, message))
    ids = [message[:60] for _, message in parameters]
    return pytest.mark.parametrize(("wrong", "message"), parameters, ids=ids)


def raises(call, message):
    """Assert that a call raises ValueError with a message."""
    with pytest.raises(ValueError, match=message):
        call()
