"""Tests of many wrong inputs: calls and the messages that they must raise."""

import pytest


def refused(calls):
    """Parametrise a test over (call, message)."""
    cases = [pytest.param(call, message, id=message[:60]) for call, message in calls]
    return pytest.mark.parametrize(("call", "message"), cases)


def raises(call, message):
    """Assert that a call raises ValueError with a message."""
    with pytest.raises(ValueError, match=message):
        call()
