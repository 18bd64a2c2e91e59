"""Tests of many wrong inputs and the messages that they must raise."""

import pytest


def refused(*cases):
    """Parametrise a test over (wrong, message): a call, or what else is wrong, and the message of its ValueError."""
    return pytest.mark.parametrize(("wrong", "message"), cases, ids=[message[:60] for _, message in cases])


def raises(call, message):
    """Assert that a call raises ValueError with a message."""
    with pytest.raises(ValueError, match=message):
        call()
