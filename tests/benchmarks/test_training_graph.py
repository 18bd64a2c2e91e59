"""The check of recorded training steps: what it finds, here with a recorder that needs no GPU."""

import json

import check_training_graph
import pytest
from support.aot_eager import without_inductor
from support.capturing import capture_in_place


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Run the check in its shortest form; returns the exit status and what was said."""
    monkeypatch.setattr(check_training_graph, "STEPS", 2)
    monkeypatch.setattr(check_training_graph, "DEVICE_TYPE", "cpu")

    def found(*options):
        out = tmp_path / "found.json"
        status = check_training_graph.main(["--tiny", "--commit", "abc", "--out", str(out), *options])
        return status, json.loads(out.read_text())

    with without_inductor():
        yield found


def test_recorded_steps_are_held_to_the_bits_of_others_and_timed(found):
    status, results = found("--precisions", "bf16-mixed")
    assert status == 0 and results["environment"]["commit"] == "abc"
    recorded = [(line["dropout"], line["launched"], line["recorded"]) for line in results["checks"]]
    both = (0.1, "compiled", "compiled, recorded")
    assert recorded == [(0.0, "launched", "recorded"), (0.1, "launched", "recorded"), both]
    assert {line["said"] for line in results["checks"]} == {"same bits"}
    assert [line["run"] for line in results["times"]] == ["launched", "recorded", "compiled", "compiled, recorded"]
    assert all(line["said"]["step_ms"] > 0 for line in results["times"])


def test_one_call_times_several_grids(found, monkeypatch):
    monkeypatch.setattr(check_training_graph, "measure", lambda problem, *case: {"nodes": len(problem.weights)})
    status, results = found("--parts", "times", "--grids", "O4:1", "O8:1")
    assert status == 0 and [line["said"]["nodes"] for line in results["times"]] == [208] * 4 + [544] * 4
    assert [line["model"]["refinement"] for line in results["times"]] == [1] * 8


def test_other_bits_fail(found, monkeypatch, capsys):
    def wrong(function):
        outputs, replay = capture_in_place(function)
        return outputs, lambda: (replay(), outputs.gradients[0].mul_(1.001))

    monkeypatch.setattr(check_training_graph, "capture_in_place", wrong)
    status, results = found("--precisions", "32-true", "--parts", "checks")
    assert status == 1 and all("FAIL: other bits in " in line["said"] for line in results["checks"])
    assert "FAIL: other bits" in capsys.readouterr().out


def test_an_error_is_told_and_the_other_checks_go_on(found, monkeypatch):
    def broken(function):
        raise RuntimeError("no memory")

    monkeypatch.setattr(check_training_graph, "capture_in_place", broken)
    status, results = found("--precisions", "32-true")
    assert status == 1 and results["times"][0]["said"]["pass_ms"] > 0 and "no memory" in results["times"][1]["said"]
    assert [line["said"] for line in results["checks"]] == ["FAIL: RuntimeError: no memory"] * 2
