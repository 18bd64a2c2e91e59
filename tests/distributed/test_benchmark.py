"""The benchmark of sharding runs small on two ranks, and outlives parts that fail; its results become tables and a picture."""

import json
import re
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from distributed.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import sharding
import sharding_rank
import sharding_report
from sharding import Bench, Job
from suite.table import put_into

RESULTS, FILES = ROOT / "benchmarks" / "results", ("sharding_h200x2.json", "sharding_replay_h200x2.json")


def results_of_two():
    """What was measured on two GPUs, as one report."""
    return sharding_report.merged([json.loads((RESULTS / name).read_text()) for name in FILES])


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
    assert "| O4, icosphere 1 | " in sharding_report.tables(report)


def report_of(commit="abc", device="NVIDIA H200", results=()):
    """A results file."""
    facts = {"device": device, "versions": {"torch": "2"}, "commit": commit, "date": "today", "dtype": "x", "nccl": "2"}
    return {"environment": facts, "jobs": [], "results": list(results)}


def passes(*found, **facts):
    """Passes on so many ranks, of so many ms and GB."""
    facts = {"part": "strong", "way": "after_exchange"} | facts
    return [facts | {"ranks": n, "ms": ms, "peak_gb": gb} for n, ms, gb in found]


def test_bars_are_as_long_as_their_times_and_lines_show_a_perfect_division():
    drawn = sharding_report.picture(report_of(results=passes((1, 100.0, 40.0), (2, 60.0, 25.0))))
    ElementTree.fromstring(drawn)
    lengths = [float(length) for length in re.findall(r'<rect class="peer\d" x="0" y="\d+" width="(\d+\.\d)"', drawn)]
    (end,) = re.findall(r'<path class="floor" d="M([\d.]+),', drawn)
    assert [length / lengths[0] for length in (*lengths, float(end))] == pytest.approx([1.0, 0.6, 0.5], abs=1e-3)
    assert "60.0 (0.833)" in drawn and not re.search('(?:fill|stroke)="#', drawn)


def test_what_was_measured_on_one_rank_alone_is_not_drawn():
    with pytest.raises(ValueError, match="must hold times of one graph on one rank and on several, got none"):
        sharding_report.picture(report_of(results=passes((1, 100.0, 40.0))))


def test_reports_of_one_machine_are_merged_with_all_their_commits():
    merged = sharding_report.merged([report_of(results=passes((1, 2.0, 3.0))), report_of("def")])
    assert merged["environment"]["commit"] == "abc, def" and len(merged["results"]) == 1


def test_reports_of_several_machines_are_not_merged():
    with pytest.raises(ValueError, match="must be of one device with the same versions, got .*Abacus"):
        sharding_report.merged([report_of(), report_of(device="Abacus")])


def test_a_smaller_graph_on_one_rank_is_not_taken_for_that_of_another():
    facts = {"part": "sizes", "refinement": 5}
    small = passes((1, 10.0, 1.0), grid="O96", **facts) + passes((1, 30.0, 2.0), (2, 20.0, 1.0), grid="O176", **facts)
    assert "| O96, icosphere 5 | 10.0 | – | – | 1.0 | – |" in sharding_report.tables(report_of(results=small))  # noqa: RUF001
    assert "| O176, icosphere 5 | 30.0 | 20.0 | 0.750 | 2.0 | 1.0 |" in sharding_report.tables(report_of(results=small))


def test_the_page_holds_the_tables_of_the_results():
    page = (ROOT / "docs" / "distributed.md").read_text()
    expected = put_into(page, sharding_report.FIGURES, sharding_report.tables(results_of_two()))
    assert expected == page, "python benchmarks/sharding_report.py FILES --page docs/distributed.md"


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
