"""Many problems over processes, within the time that there is."""

import time

import pytest
from gpu_checks.many import Outcome, _over_processes


def one(seconds):
    """Of a problem that takes so long."""
    time.sleep(seconds)
    return Outcome(count=1)


@pytest.mark.parametrize("processes", (1, 2))
def test_every_problem_is_judged_where_there_is_time(processes):
    assert _over_processes(one, [0.0] * 5, processes).count == 5


@pytest.mark.parametrize("processes", (1, 2))
def test_problems_are_left_out_when_the_time_is_over(processes):
    assert _over_processes(one, [0.0, *[20.0] * processes, 0.0], processes, seconds=0).count < 4


def test_a_run_that_judged_nothing_does_not_pass():
    with pytest.raises(AssertionError, match="nothing was judged"):
        Outcome().verdict()
