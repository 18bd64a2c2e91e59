"""What a benchmark has found is on the disk, whatever becomes of the parts behind it."""

import json

import pytest
from parts import Parts


def fail():
    raise RuntimeError("it broke")


def test_a_part_that_fails_is_reported_and_the_next_one_runs(tmp_path):
    parts = Parts({"found": {}}, tmp_path / "new" / "report.json", seconds=100.0)
    assert parts.run("first", fail) is None
    parts.report["found"]["second"] = parts.run("second", lambda: 2)
    with pytest.raises(SystemExit, match="^first: RuntimeError: it broke$"):
        parts.end()
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert report == {"found": {"second": 2}, "problems": {"first": "RuntimeError: it broke"}}


def test_what_a_part_found_is_written_before_the_next_one_begins(tmp_path):
    file = tmp_path / "report.json"
    parts = Parts({}, file, seconds=100.0)
    parts.report["first"] = parts.run("first", lambda: 1)
    seen = parts.run("second", lambda: json.loads(file.read_text()))
    assert seen["first"] == 1 and parts.end()["first"] == 1


def test_no_part_begins_when_the_time_is_up():
    parts = Parts({}, None, seconds=-1.0)
    assert parts.run("late", fail) is None
    assert parts.problems == {"late": "not run: no time was left"}
