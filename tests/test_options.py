"""Numbers among options: one wording for all rooms."""

import numpy as np
import pytest

from anemoi_gt.option_checks import check_integer, check_number, check_probability


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "heads must be at least 1, or null, got 0"),
        (2.0, "heads must be an integer, or null, got 2.0"),
        ("2", "heads must be an integer, or null, got '2'"),
        (True, "heads must be an integer, or null, got True"),
        (None, "heads must be an integer, or null, got None"),
        (float("nan"), "heads must be an integer, or null, got nan"),
    ],
)
def test_what_is_no_whole_number_is_refused_with_what_came(value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_integer("heads", value, note=", or null")


def test_whole_numbers_of_numpy_are_taken():
    check_integer("heads", np.int64(2))


def test_range_is_left_to_the_caller_where_there_is_no_least():
    check_integer("heads", -3, least=None)


@pytest.mark.parametrize("value", ["1", None, True, [1.0]])
def test_what_is_no_number_is_refused_with_what_came(value):
    with pytest.raises(ValueError, match="scale must be a number, got "):
        check_number("scale", value)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_what_is_no_probability_is_refused_with_what_came(value):
    with pytest.raises(ValueError, match="dropout must be a probability in 0 .. 1, got "):
        check_probability("dropout", value)


def test_probabilities_of_numpy_are_taken():
    check_probability("dropout", np.float32(0.5))
