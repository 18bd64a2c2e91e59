"""Test cases that only `make nightly` runs; docs/contributing.md says which."""

import pytest


def nightly(*cases):
    """Return the cases as parameters of a test; a tuple has the arguments of one case."""
    parameters = []
    for case in cases:
        arguments = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*arguments, marks=pytest.mark.nightly))
    return parameters
