"""Checks of numeric options."""

import numpy as np
import pytest
from support.refusals import raises

from anemoi_gt.option_checks import check_integer, check_number, check_probability


@pytest.mark.parametrize("value", [2.0, "2", True, None, float("nan"), 0])
def test_what_is_not_an_integer_in_range_is_refused(value):
    expected = "be at least 1" if value == 0 else "be an integer"
    raises(lambda: check_integer("heads", value, note=", or null"), f"^heads must {expected}, or null, got {value!r}$")


@pytest.mark.parametrize("value", ["1", None, True, [1.0]])
def test_what_is_not_a_number_is_refused(value):
    raises(lambda: check_number("scale", value), "scale must be a number, got ")


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_what_is_not_a_probability_is_refused(value):
    raises(lambda: check_probability("dropout", value), "dropout must be a probability in 0 .. 1, got ")


def test_numpy_numbers_and_unbounded_integers_are_allowed():
    check_integer("heads", np.int64(2))
    check_integer("heads", -3, least=None)
    check_probability("dropout", np.float32(0.5))
