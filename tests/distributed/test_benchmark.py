"""The benchmark of sharding runs in small on two ranks, and the page holds its tables."""

import json
import re

import sharding
from suite.table import put_into
from support.forked import forked_commands
from support.pages import ROOT


def test_one_and_two_ranks_and_models_of_anemoi_are_compared_timed_and_plotted(tmp_path, monkeypatch):
    tasks = sharding.tasks_of

    def feasible(options, ranks):  # gloo cannot exchange what anemoi-models' sharding sends
        return [task for task in tasks(options, ranks) if ranks == 1 or task["part"] != "anemoi"]

    monkeypatch.setattr(sharding, "tasks_of", feasible)
    out, figure = tmp_path / "sharding.json", tmp_path / "sharding.svg"
    arguments = ["--tiny", "--ranks", "2", "--parts", "strong", "sizes", "anemoi", "--out", str(out), "--commit", "abc"]
    with forked_commands():
        assert sharding.main([*arguments, "--plot", str(figure)]) == 0, out.read_text()
    report = json.loads(out.read_text())
    ours = [record for record in report["results"] if record["part"] != "anemoi"]
    found = [(record["part"], record["ranks"], record["halo_bytes"] > 0) for record in ours]
    assert found == [(part, ranks, ranks == 2) for ranks in (1, 2) for part in ("strong", "sizes")]
    models = [record["model"] for record in report["results"] if record["part"] == "anemoi"]
    assert models == ["anemoi-models, edges", "anemoi-models, edges, install", sharding.HALO]
    assert "efficiency" in sharding.tables(report) and figure.read_text().count("<svg") == 1


def test_the_page_holds_the_tables_of_the_results():
    page = (ROOT / "docs" / "distributed.md").read_text()
    file = re.search(r"^```\{sharding\} (.+)$", page, re.MULTILINE)[1]
    report = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    expected = put_into(page, file, sharding.summary(report))
    assert expected == page, f"run python benchmarks/sharding.py --table {file} --page docs/distributed.md"
