"""The benchmark of sharding runs in small on two ranks, and the page holds its tables."""

import json
import re

import pytest
import sharding
from suite.table import put_into
from support.forked import forked_commands
from support.pages import ROOT


def test_one_and_two_ranks_and_models_of_anemoi_are_compared_timed_and_plotted(
    tmp_path, monkeypatch
):
    # gloo cannot exchange what anemoi-models' sharding sends
    def feasible(options, ranks, tasks=sharding.tasks_of):
        return [task for task in tasks(options, ranks) if ranks == 1 or task["part"] != "anemoi"]

    monkeypatch.setattr(sharding, "tasks_of", feasible)
    out, parts, reports = tmp_path / "sharding.json", ("strong", "sizes", "anemoi"), []
    arguments = [
        "--tiny",
        "--ranks",
        "2",
        "--parts",
        *parts,
        "--output",
        str(out),
        "--commit",
        "abc",
    ]
    with forked_commands():
        for switch in ([], ["--alone", "1"]):
            assert sharding.main([*arguments, *switch]) == 0, out.read_text()
            reports.append(json.loads(out.read_text()))
    work, work_alone = ([each.get("work", 0) for each in report["results"]] for report in reports)
    assert work_alone == pytest.approx(work, rel=0.01)
    found = [
        (each["part"], each["ranks"], each.get("halo_bytes", 0) > 0)
        for each in reports[0]["results"]
    ]
    assert found[:2] + found[5:] == [
        (part, ranks, ranks == 2) for ranks in (1, 2) for part in parts[:2]
    ]
    assert [each["model"] for each in reports[0]["results"][2:5]] == [
        *sharding.ANEMOI[::2],
        sharding.HALO,
    ]
    assert all(
        "efficiency" in sharding.tables(report) and "<svg" in sharding.plot(report)
        for report in reports
    )


def test_strategies_of_anemoi_are_compiled_too_and_its_halo_is_replayed(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # a CUDA graph is asked for
    options = sharding.parse(["--ranks", "2", "--parts", "compiled", "replay", "anemoi"])
    names = [
        [sharding.name_of(task) for task in sharding.tasks_of(options, ranks)] for ranks in (1, 2)
    ]
    edges, heads, install = sharding.ANEMOI
    ways = ("", ", compiled", ", CUDA graph", ", compiled, CUDA graph")
    expected = [
        *(name + way for name in (edges, install) for way in ways[:2]),
        *(sharding.HALO + way for way in ways),
    ]
    found = [[name for name in each if name.startswith("anemoi-models")] for each in names]
    assert found[0] == expected and sorted(found[1]) == sorted([*expected, heads])


def test_the_page_holds_the_figures_of_the_results():
    page = (ROOT / "docs" / "distributed.md").read_text()
    (file,) = set(re.findall(r"^```\{sharding.*\} (.+)$", page, re.MULTILINE))
    two, four = (
        json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        for name in (file, "sharding_h200x4.json")
    )
    expected = put_into(page, file, sharding.summary(two))
    assert expected == page, (
        f"run python benchmarks/sharding.py --table {file} --page docs/distributed.md"
    )
    numbers, found = set(re.findall(r"\d+\.\d+", page)), sharding.series(four)
    for name in (
        "anemoi_gt, compiled, CUDA graph",
        "O96, icosphere 5",
        "O96, icosphere 5, CUDA graph",
    ):
        assert {f"{found[name][ranks]['ms']:.1f}" for ranks in (1, 4)} <= numbers
    assert {
        f"{found[name][4]['ms']:.1f}" for name in ("anemoi_gt, compiled", "anemoi-models, edges")
    } <= numbers
