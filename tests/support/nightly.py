"""Cases that `make nightly` adds to those of `make test`: they repeat a path, and take seconds."""

import pytest


def nightly(*cases):
    """Return the cases as parameters of a test, each a value or a tuple of several."""
    parameters = []
    for case in cases:
        arguments = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*arguments, marks=pytest.mark.nightly))
    return parameters
