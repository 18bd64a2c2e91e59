"""The checks of whole models on a GPU, tried in small where there is none: replays that compute, and replays that do not."""

import pytest
import torch
from gpu_checks import model


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(model, "HERE", model.TINY)
    monkeypatch.setattr(model, "STEPS", 2)


def every_time(call):
    """In place of a capture: every replay is a call."""
    return call


def stale(call):
    """In place of a capture: a graph that does not see new fields."""
    result = call().clone()
    return lambda: result


def test_replays_that_are_calls_pass():
    assert "2 replays on new fields" in model.forward_in_graph(capture=every_time)


def test_a_replay_that_misses_new_fields_fails():
    with pytest.raises(AssertionError, match="output: 1 of 2 tensors differ"):
        model.forward_in_graph(capture=stale)


def test_training_begins_again_after_the_warm_up():
    said = model.step_in_graph(capture=every_time)
    assert "2 replays of forward, backward and AdamW" in said and "in pieces" in said


def test_a_replay_that_does_not_train_fails():
    with pytest.raises(AssertionError, match=r"losses and parameters with \{\}: \d+ of \d+ tensors differ"):
        model.step_in_graph(capture=stale)


def test_the_compiled_model_is_compared_with_eager():
    said = model.compiled(("traced",), backend="aot_eager")
    assert said.endswith("traced")


def test_a_compiled_model_that_computes_something_else_fails():
    def half(graph, _):
        return lambda *inputs: [0.5 * out if torch.is_floating_point(out) else out for out in graph(*inputs)]

    with pytest.raises(AssertionError, match="loss off by"):
        model.compiled(("wrong",), backend=half)
