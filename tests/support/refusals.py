"""Tests of many wrong inputs at once: what was given, and what must be said."""

import pytest


def refused(calls):
    """Parametrise a test over (call, message)."""
    cases = [pytest.param(call, message, id=message[:60]) for call, message in calls]
    return pytest.mark.parametrize(("call", "message"), cases)


def raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()
