"""The benchmark of packages: it reports numbers that agree, and none that do not."""

import json

import export
import pytest
import torch

FIGURES = {"export_s": 1.0, "compile_s": 2.0, "package_mb": 3.0}


@pytest.fixture
def loaded(monkeypatch):
    """Stand in for the compiler and the other process, whose output is the model's plus `error` of it."""

    def loaded(error):
        outputs = []
        eager = export.eager

        def remember(*arguments):
            outputs.append(eager(*arguments))
            return outputs[-1]

        monkeypatch.setattr(export, "eager", remember)
        monkeypatch.setattr(export, "package", lambda *_: FIGURES)
        monkeypatch.setattr(export, "load", lambda *_: ((1 + error) * outputs.pop(0)[0], {"package_ms": 0.5}))

    return loaded


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for the CPU")
def test_size_and_latency_are_written_beside_what_they_belong_to(loaded, tmp_path, capsys):
    loaded(0.0)
    export.main(["--tiny", "--output", str(tmp_path / "export.json"), "--commit", "abc"])
    report = json.loads((tmp_path / "export.json").read_text())
    assert report["environment"]["commit"] == "abc" and report["case"]["grid"] == "O4"
    assert {name: report["results"][name] for name in FIGURES} == FIGURES
    for name in ("batch_1", "batch_2"):
        assert report["results"][name]["package_ms"] == 0.5 and report["results"][name]["eager_ms"] > 0
    assert json.loads(capsys.readouterr().out) == report and report["problems"] == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for the CPU")
def test_no_times_are_reported_of_a_package_with_other_numbers_and_what_came_before_is_kept(loaded, tmp_path):
    loaded(1e-3)
    with pytest.raises(SystemExit, match="must give the numbers of the model within 1e-05, its error is 0.00"):
        export.main(["--tiny", "--output", str(tmp_path / "export.json")])
    results = json.loads((tmp_path / "export.json").read_text())["results"]
    assert "package_ms" not in results["batch_1"] and results["compile_s"] == FIGURES["compile_s"]
