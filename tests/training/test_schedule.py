"""The learning rate over the steps of a run."""

import math

import pytest

from anemoi_gt.training.schedule import warmup_cosine


def test_warm_up_grows_by_equal_amounts_to_the_highest_rate():
    assert [warmup_cosine(step, 4, 100) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_decay_is_half_a_cosine_down_to_nothing():
    for step, share in ((10, 0.0), (35, 0.25), (60, 0.5), (110, 1.0)):
        assert warmup_cosine(step, 10, 110) == pytest.approx((1 + math.cos(math.pi * share)) / 2)
    assert warmup_cosine(110, 10, 110) == 0


def test_decay_never_turns_back():
    rates = [warmup_cosine(step, 3, 50) for step in range(3, 51)]
    assert rates == sorted(rates, reverse=True)


def test_a_run_may_be_all_warm_up_or_have_none():
    assert warmup_cosine(0, 0, 10) == 1
    assert 0 < warmup_cosine(9, 10, 10) < 1


def test_the_trainer_follows_the_schedule(run):
    _, records = run(steps=6, warmup_steps=2, learning_rate=0.01)
    rates = [record["learning_rate"] for record in records if record["split"] == "train"]
    assert rates == pytest.approx([0.01 * warmup_cosine(step, 2, 6) for step in range(6)])
