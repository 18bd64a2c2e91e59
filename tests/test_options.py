"""Checks of numeric options."""

import numpy as np
import pytest

from anemoi_gt.option_checks import check_integer, check_number, check_probability


@pytest.mark.parametrize("value", [2.0, "2", True, None, float("nan"), 0])
def test_what_is_not_an_integer_in_range_is_refused(value):
    expected = "be at least 1" if value == 0 else "be an integer"
    with pytest.raises(ValueError, match=f"^heads must {expected}, or null, got {value!r}$"):
        check_integer("heads", value, note=", or null")


@pytest.mark.parametrize("value", ["1", None, True, [1.0]])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(ValueError, match="scale must be a number, got "):
        check_number("scale", value)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_what_is_not_a_probability_is_refused(value):
    with pytest.raises(ValueError, match="dropout must be a probability in 0 .. 1, got "):
        check_probability("dropout", value)


def test_numpy_numbers_and_unbounded_integers_are_allowed():
    check_integer("heads", np.int64(2))
    check_integer("heads", -3, least=None)
    check_probability("dropout", np.float32(0.5))
