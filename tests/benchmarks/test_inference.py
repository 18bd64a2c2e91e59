"""Inference at scale, in small: what is right is called right, what is wrong is called wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from suite import inference
from suite.inference import CONTENDERS, PARTS, Setting, build_graphs, judge, judged_destinations

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "inference_9km.py"
SMALL = Setting("O4", 1, channels=32, heads=2, fields=5, dtype="float32", repeats=1, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    sizes = build_graphs(SMALL, list(PARTS), folder)
    assert sizes["decoder"]["nodes"] == (42, 208) and sizes["decoder"]["edges"] == 3 * 208
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("part", PARTS)
def test_every_contender_is_right(folder, part, contender, dtype):
    problem = replace(SMALL, dtype=dtype).problem(part, folder)
    found = judge(problem, CONTENDERS[contender](problem, 2)(), judged_destinations(problem))
    assert found["outcome"] == "right", found


@pytest.mark.parametrize("value", [float("nan"), 0.5])
@pytest.mark.parametrize("row", [0, -1])
def test_one_destination_that_is_off_makes_a_result_wrong(folder, row, value):
    problem = SMALL.problem("decoder", folder)
    result = CONTENDERS["ours"](problem, 1)()
    result[row] = value
    assert judge(problem, result, judged_destinations(problem))["outcome"] == "wrong"


def test_destinations_of_the_last_sources_are_judged(folder):
    problem = SMALL.problem("encoder", folder)
    src, dst = problem.edge_index
    judged = judged_destinations(problem)
    assert set(dst[src == src.max()].tolist()) <= set(judged.tolist())
    assert {0, problem.x[1].shape[0] - 1} <= set(judged.tolist())


def test_a_contender_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(inference, "missing", lambda package, name: f"{name} is not installed")
    assert inference.unsupported_reason("anemoi") == "anemoi-models is not installed"
    assert inference.unsupported_reason("ours") is None


def test_the_script_reports_each_run_and_compares_pieces(tmp_path):
    sizes = "--grid O4 --refinement 1 --channels 32 --heads 2 --fields 5 --dtype float32 --repeats 1 --device cpu"
    options = [
        "--parts",
        "decoder",
        "--contenders",
        "ours",
        "--chunks",
        "1",
        "2",
        "--output",
        str(tmp_path / "report.json"),
    ]
    command = [sys.executable, str(SCRIPT), *sizes.split(), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert [(run["num_chunks"], run["outcome"]) for run in report["runs"]] == [(1, "right"), (2, "right")]
    assert "numbers_that_differ" in report["runs"][1]


def test_the_documentation_has_the_figures_of_a_gpu():
    runs = json.loads((ROOT / "benchmarks" / "results" / "inference_9km_h200.json").read_text())["runs"]
    page = (ROOT / "docs" / "layers.md").read_text()
    names = {"ours": "our mapper", "anemoi": "mapper of anemoi-models"}
    for run in (run for run in runs if run["outcome"] == "right"):
        errors = f"{run['rms_error']:.4f}, {run['rms_error_of_plain']:.4f}"
        times = f"{run['seconds']:.3f}", f"{run['peak_gib']:.1f}", errors
        cells = [run["part"], names[run["contender"]], str(run["num_chunks"]), *times]
        assert f"| {' | '.join(cells)} |" in page
