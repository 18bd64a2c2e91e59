"""The learning rate over the steps of a run."""

import math

import pytest

from anemoi_gt.training.schedule import warmup_cosine


@pytest.mark.parametrize(
    ("warmup_steps", "steps", "rates"),
    [
        (4, 100, {step: (step + 1) / 5 for step in range(5)}),  # warm-up
        (10, 110, {s: (1 + math.cos(math.pi * p)) / 2 for s, p in ((10, 0), (35, 0.25), (60, 0.5), (110, 1))}),
        (0, 10, {0: 1.0}),
        (10, 10, {9: 10 / 11}),
    ],
)
def test_the_rate_is_a_linear_warm_up_and_half_a_cosine(warmup_steps, steps, rates):
    assert {step: warmup_cosine(step, warmup_steps, steps) for step in rates} == pytest.approx(rates)


def test_the_trainer_follows_the_schedule(run):
    _, records = run(steps=6, warmup_steps=2, learning_rate=0.01)
    rates = [record["learning_rate"] for record in records if record["split"] == "train"]
    assert rates == pytest.approx([0.01 * warmup_cosine(step, 2, 6) for step in range(6)])
