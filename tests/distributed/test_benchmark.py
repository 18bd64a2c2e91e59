"""The benchmark of sharding runs small on two ranks, and outlives parts that fail; its results become tables and a picture."""

import json
import re
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from distributed.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import sharding
import sharding_rank
import sharding_records
import sharding_report
from sharded_model import Case, weather_graph
from sharding import Bench, Job
from suite.table import put_into

RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "distributed.md"


@pytest.fixture
def bench(tmp_path):
    """A benchmark without jobs."""
    options = {"seconds": 100.0, "limit": 60.0, "commit": "abc", "out": tmp_path / "out.json", "ranks": 2, "repeats": 2}
    return Bench(SimpleNamespace(**options), tmp_path)


def planned(ranks, *arguments):
    """The jobs of one command where there are CUDA graphs: their names, and those of their tasks."""
    options = sharding.parse(["--ranks", str(ranks), *arguments])
    return {job.name: [task["name"] for task in job.tasks] for job in sharding.jobs(options, replays=True)}


def test_models_of_one_and_two_ranks_are_judged_timed_and_drawn(tmp_path):
    out = tmp_path / "sharding.json"
    parts = ["--parts", "strong", "exchange", "sizes"]
    arguments = ["--tiny", "--ranks", "2", *parts, "--out", str(out), "--commit", "abc"]
    assert sharding.main(arguments) == 0, out.read_text()
    report = json.loads(out.read_text())
    assert report["environment"]["commit"] == "abc"
    found = [(found["part"], found["ranks"], found.get("halo_bytes", 0) > 0) for found in report["results"]]
    alone = [("strong", 1, False), ("sizes", 1, False)]
    strong = [("strong", 2, True), ("strong", 2, True), ("strong", 2, False)]  # heads have no halo
    assert found == [*alone, *strong, *[("exchange", 2, False)] * 3, ("sizes", 2, True)]
    assert out.with_suffix(".svg").read_text().count("<svg") == 1
    assert "| O4, icosphere 1 | " in sharding_report.tables(report)


def test_each_number_of_ranks_starts_processes_once_for_our_model_and_runs_its_tasks_in_turn():
    found = planned(4, "--parts", "strong", "replay", "exchange", "sizes")
    assert list(found) == ["models on 1", "models on 2", "models on 4"]
    large = ["strong after_exchange", "replay after_exchange", "strong overlapped", "replay overlapped", "strong heads"]
    large = [f"{name} N320-6" + ", replayed" * name.startswith("replay") for name in large]
    small = [
        f"sizes after_exchange {grid}{how}" for grid in ("O96-5", "O176-5", "O192-6") for how in ("", ", replayed")
    ]
    assert found["models on 4"] == found["models on 2"] == [*large, "exchange", "exchange, replayed", *small]
    assert found["models on 1"] == [*large[:2], *small]


def test_parts_that_were_not_asked_for_do_not_run():
    assert planned(2, "--parts", "exchange") == {"models on 2": ["exchange", "exchange, replayed"]}
    assert planned(2, "--parts", "anemoi") == {
        "anemoi on 1": [f"anemoi edges N320-6, {who}" for who in ("theirs", "ours")],
        "anemoi on 2": [
            f"anemoi {how}" for how in ("edges N320-6, theirs", "heads N320-6, theirs", "edges N320-6, ours")
        ],
    }


def test_without_cuda_graphs_nothing_is_replayed():
    options = sharding.parse(["--ranks", "2", "--tiny"])
    assert not [task for job in sharding.jobs(options, replays=False) for task in job.tasks if task["replayed"]]


def test_a_launched_and_a_replayed_pass_are_of_one_model_and_another_case_frees_it(tmp_path, monkeypatch):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    graph, case = tmp_path / "graph.pt", Case("O4", 1, heads=2, channels=4, layers=1, ranks=1, way="after_exchange")
    torch.save(weather_graph(case), graph)
    work = {"tasks": [], "seconds": 60, "graphs": {"O4-1": str(graph)}, "expected": {}, "repeats": 1}
    (tmp_path / "work.json").write_text(json.dumps(work))
    world = sharding_rank.World(tmp_path)
    try:
        models = sharding_rank.Models(world)
        first = models.of(case)
        assert models.of(case) is first and world.work["expected"] == {"O4-1": models.signature}
        held = weakref.ref(first.model)
        del first
        models.of(replace(case, way="heads"))
        assert held() is None
        assert list(world.graphs) == ["O4-1"]
    finally:
        torch.distributed.destroy_process_group()


def test_replayed_records_keep_their_part_and_say_that_they_were_replayed(bench):
    options = sharding.parse(["--tiny", "--ranks", "1", "--parts", "strong", "replay", "sizes"])
    bench.run(Job("models on 1", "sharding_rank.py", 1, sharding.tasks(options, 1, replays=True)))
    assert bench.report["jobs"][0]["problem"] is None
    found = [(record["part"], record.get("replayed", False)) for record in bench.report["results"]]
    assert found == [("strong", False), ("replay", True), ("sizes", False), ("sizes", True)]
    assert set(sharding_records.compared(bench.report)) == {
        *("edges, after exchange", "edges, after exchange, replayed"),
        *("O4, icosphere 1", "O4, icosphere 1, replayed"),
    }


def test_messages_are_sent_by_python_and_replayed(bench):
    options = sharding.parse(["--tiny", "--ranks", "2", "--parts", "exchange"])
    bench.run(Job("models on 2", "sharding_rank.py", 2, sharding.tasks(options, 2, replays=True)))
    assert bench.report["jobs"][0]["problem"] is None
    found = [(record["part"], record["rows"], record["replayed"]) for record in bench.report["results"]]
    assert found == [("exchange", rows, replayed) for replayed in (False, True) for rows in (64, 256, 1024)]


def report_of(commit="abc", device="NVIDIA H200", results=()):
    """A results file."""
    facts = {"device": device, "versions": {"torch": "2"}, "commit": commit, "date": "today", "dtype": "x", "nccl": "2"}
    return {"environment": facts, "jobs": [], "results": list(results)}


STRONG = ((1, 100.0, 40.0), (2, 60.0, 21.0), (4, 40.0, 12.0))


def passes(*found, **facts):
    """Passes on so many ranks, of so many ms and GB."""
    facts = {"part": "strong", "way": "after_exchange", "work": 1e9, "grid": "N320", "refinement": 6} | facts
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
    merged = sharding_records.merged([report_of(results=passes((1, 2.0, 3.0))), report_of("def")])
    assert merged["environment"]["commit"] == "abc, def" and len(merged["results"]) == 1


def test_reports_of_several_machines_are_not_merged():
    with pytest.raises(ValueError, match="must be of one device with the same versions, got .*Abacus"):
        sharding_records.merged([report_of(), report_of(device="Abacus")])


def test_a_smaller_graph_on_one_rank_is_not_taken_for_that_of_another():
    facts = {"part": "sizes", "refinement": 5}
    small = passes((1, 10.0, 1.0), grid="O96", **facts) + passes((1, 30.0, 2.0), (2, 20.0, 1.0), grid="O176", **facts)
    small = [record | {"work": 1.0 + record["ms"]} for record in small]
    told = sharding_report.tables(report_of(results=small))
    assert "| O96, icosphere 5 | 10.0 | – | – |" in told  # noqa: RUF001
    assert "| O176, icosphere 5 | 30.0 | 20.0 | 0.750 |" in told


def test_memory_stands_beside_its_share_and_the_bytes_of_the_halo():
    results = [record | {"halo_bytes": 5e6 * (record["ranks"] - 1), "work": 1.0} for record in passes(*STRONG)]
    told = sharding_report.tables(report_of(results=results))
    assert "| Memory, halo | GB on 1 | GB on 2 | share | GB on 4 | share | MB on 2 | MB on 4 |" in told
    assert "| edges, after exchange | 40.0 | 21.0 | 1.05 | 12.0 | 1.20 | 5.0 | 15.0 |" in told
    assert "| edges, after exchange | 100.0 | 60.0 | 0.833 | 40.0 | 0.625 |" in told


def test_weak_scaling_compares_grids_with_the_same_work_for_a_rank():
    large, small = ({"grid": name, "refinement": 6} for name in ("O192", "O96"))
    results = [record | {"work": 40.0 / record["ranks"]} for record in passes(*STRONG, **large)]
    results += [record | {"work": 9.0} for record in passes((1, 20.0, 5.0), part="sizes", **small)]
    ((one, several),) = sharding_records.weak(report_of(results=results))
    assert (one["grid"], several["grid"], several["ranks"]) == ("O96", "O192", 4)
    assert sharding_records.weak_efficiency(one, several) == pytest.approx((20.0 / 9.0) / (40.0 / 10.0))
    assert "| O96, icosphere 6 | O192, icosphere 6 | 4 |" in sharding_report.tables(report_of(results=results))


def test_weak_scaling_keeps_launched_and_replayed_passes_apart():
    grids = [{"grid": "O192", "refinement": 6, "part": "sizes"}, {"grid": "O96", "refinement": 5, "part": "sizes"}]
    results = [record | {"work": 10.0} for record in passes((1, 20.0, 5.0), **grids[1])]
    results += [record | {"work": 10.0, "replayed": True} for record in passes((4, 40.0, 12.0), **grids[0])]
    assert sharding_records.weak(report_of(results=results)) == []


def test_launched_and_replayed_messages_stand_side_by_side():
    sent = [
        {"part": "exchange", "ranks": 2, "message_bytes": 2e6, "ms": ms, "replayed": how}
        for ms, how in ((0.2, False), (0.05, True))
    ]
    assert "| 2 | 2 | 0.200 | 0.050 |" in sharding_report.tables(report_of(results=[*passes(*STRONG), *sent]))


def test_the_page_holds_the_tables_of_the_results():
    page = PAGE.read_text()
    files = re.search(r"^```\{sharding\} (.+)$", page, re.MULTILINE)[1].split()
    report = sharding_records.merged([json.loads((RESULTS / name).read_text()) for name in files])
    expected = put_into(page, files[0], sharding_report.tables(report))
    assert expected == page, f"python benchmarks/sharding_report.py {' '.join(files)} --page docs/distributed.md"


def test_several_ranks_are_not_timed_without_one_rank_to_judge_them_by():
    with pytest.raises(
        ValueError, match="^2 ranks must be judged by what one rank found, which failed or did not run$"
    ):
        sharding_rank.judge([1.0], None, torch.device("cpu"), 2)


def test_a_job_that_fails_is_reported_and_the_next_one_runs(bench, tmp_path):
    (tmp_path / "fine.py").write_text("pass")
    bench.run(Job("broken", str(tmp_path / "missing.py"), 2, []))
    bench.run(Job("fine", str(tmp_path / "fine.py"), 2, []))
    first, second = json.loads((tmp_path / "out.json").read_text())["jobs"]
    assert first["problem"].startswith("rank 0 failed with 2: ") and "missing.py" in first["problem"]
    assert second["problem"] is None


def test_what_was_found_before_a_task_fails_is_kept_and_the_task_is_named(bench):
    options = sharding.parse(["--tiny", "--ranks", "1", "--parts", "strong", "sizes"])
    good, bad = sharding.tasks(options, 1, replays=False)
    bad["case"]["way"] = "no such way"
    bench.run(Job("models on 1", "sharding_rank.py", 1, [good, bad]))
    assert [record["part"] for record in bench.report["results"]] == ["strong"]
    problem = bench.report["jobs"][0]["problem"]
    assert problem.startswith("in sizes after_exchange O4-1: rank 0 failed with 1: ") and "no such way" in problem


def test_a_job_that_hangs_ends_at_its_limit(bench, tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    bench.options.limit = 0.5
    bench.run(Job("slow", str(tmp_path / "slow.py"), 2, []))
    assert bench.report["jobs"][0]["problem"].startswith("rank 0 did not end within 0 s")


def test_a_job_for_which_no_time_is_left_does_not_run(bench):
    bench.deadline = 0.0
    bench.run(Job("too late", "missing.py", 1, []))
    assert bench.report["jobs"][0]["problem"] == "not run: no time was left"


def test_the_summary_says_what_was_wanted_and_what_failed():
    facts = {"part": "strong", "way": "overlapped", "halo_bytes": 1e6}
    results = [facts | {"ranks": n, "ms": ms, "peak_gb": gb} for n, ms, gb in ((1, 100.0, 40.0), (2, 51.0, 25.0))]
    said = sharding_report.summary({"results": results, "jobs": [{"name": "heads on 2", "problem": "it broke"}]})
    assert "efficiency 0.980 (holds: 0.95 wanted), memory x 2 1.250 (missed: 1.15 wanted)" in said
    assert "FAILED heads on 2: it broke" in said
