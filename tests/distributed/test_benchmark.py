"""The benchmark of sharding runs small on two ranks, and outlives parts that fail."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from distributed.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import sharding
import sharding_rank
import sharding_report
from sharding import Bench, Job


@pytest.fixture
def bench(tmp_path):
    """A benchmark without jobs."""
    options = {"seconds": 100.0, "limit": 60.0, "commit": "abc", "out": tmp_path / "out.json", "ranks": 2, "repeats": 2}
    return Bench(SimpleNamespace(**options), tmp_path)


def test_models_of_one_and_two_ranks_are_judged_timed_and_drawn(tmp_path):
    out = tmp_path / "sharding.json"
    arguments = ["--tiny", "--ranks", "2", "--parts", "sizes", "--out", str(out), "--commit", "abc"]
    assert sharding.main(arguments) == 0, out.read_text()
    report = json.loads(out.read_text())
    assert report["environment"]["commit"] == "abc"
    assert [(found["ranks"], found["halo_bytes"] > 0) for found in report["results"]] == [(1, False), (2, True)]
    assert out.with_suffix(".svg").read_text().count("<svg") == 1


def test_several_ranks_are_not_timed_without_one_rank_to_judge_them_by():
    with pytest.raises(
        ValueError, match="^2 ranks must be judged by what one rank found, which failed or did not run$"
    ):
        sharding_rank.judge([1.0], None, torch.device("cpu"), 2)


def test_a_job_that_fails_is_reported_and_the_next_one_runs(bench, tmp_path):
    (tmp_path / "fine.py").write_text("pass")
    bench.run(Job("strong", "broken", str(tmp_path / "missing.py"), 2, {}))
    bench.run(Job("strong", "fine", str(tmp_path / "fine.py"), 2, {}))
    first, second = json.loads((tmp_path / "out.json").read_text())["jobs"]
    assert first["problem"].startswith("rank 0 failed with 2: ") and "missing.py" in first["problem"]
    assert second["problem"] is None


def test_records_of_a_job_that_fails_later_are_kept(bench, tmp_path):
    (tmp_path / "late.py").write_text(
        "import sys; open(sys.argv[1] + '/records.jsonl', 'w').write('{\"ms\": 1}\\n'); sys.exit(3)"
    )
    bench.run(Job("strong", "late", str(tmp_path / "late.py"), 1, {}))
    assert bench.report["results"] == [{"part": "strong", "job": "late", "ms": 1}]
    assert bench.report["jobs"][0]["problem"].startswith("rank 0 failed with 3")


def test_a_job_that_hangs_ends_at_its_limit(bench, tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    bench.options.limit = 0.5
    bench.run(Job("strong", "slow", str(tmp_path / "slow.py"), 2, {}))
    assert bench.report["jobs"][0]["problem"].startswith("rank 0 did not end within 0 s")


def test_a_job_for_which_no_time_is_left_does_not_run(bench):
    bench.deadline = 0.0
    bench.run(Job("strong", "too late", "missing.py", 1, {}))
    assert bench.report["jobs"][0]["problem"] == "not run: no time was left"


def test_the_summary_says_what_was_wanted_and_what_failed():
    facts = {"part": "strong", "way": "overlapped", "halo_bytes": 1e6}
    results = [facts | {"ranks": n, "ms": ms, "peak_gb": gb} for n, ms, gb in ((1, 100.0, 40.0), (2, 51.0, 25.0))]
    said = sharding_report.summary({"results": results, "jobs": [{"name": "heads on 2", "problem": "it broke"}]})
    assert "efficiency 0.980 (holds: 0.95 wanted), memory x 2 1.250 (missed: 1.15 wanted)" in said
    assert "FAILED heads on 2: it broke" in said
