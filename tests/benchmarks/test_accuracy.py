"""The measured table of errors: made from a file, on the page as the file has it, and of nothing that breaks the criterion."""

import itertools
import json

import accuracy
import pytest
import torch
from suite import table
from support.corpus import corpus
from support.pages import ROOT

PAGE = ROOT / "docs" / "backends.md"


@pytest.fixture
def a_few(monkeypatch):
    """Measure every 13th problem of the corpus in one dtype."""
    monkeypatch.setattr(accuracy, "DTYPES", (torch.float32,))
    monkeypatch.setattr(accuracy, "corpus", lambda dtype, device: itertools.islice(corpus(dtype, device), 40, 200, 13))


def test_measured_errors_become_a_file_and_a_table_on_a_page(a_few, tmp_path, capsys):
    out, page = tmp_path / "a.json", tmp_path / "page.md"
    page.write_text("<!-- figures of a.json -->\n<!-- end of a.json -->\n")
    accuracy.main(["--device", "cpu", "--out", str(out), "--page", str(page), "--commit", "abc"])
    measured = json.loads(out.read_text())
    assert list(measured["errors"]) == ["float32"] and set(measured["errors"]["float32"]) == set(accuracy.TITLES)
    assert all(0 < error["relative"] < 1e-6 for error in measured["errors"]["float32"].values())
    assert accuracy.as_table(measured) in page.read_text() and "commit abc" in capsys.readouterr().out


def test_what_breaks_the_criterion_is_not_written(a_few, monkeypatch, tmp_path):
    attend = accuracy.attend
    monkeypatch.setattr(accuracy, "attend", lambda *given: {k: v * 1.001 for k, v in attend(*given).items()})
    with pytest.raises(AssertionError, match="times that of plain PyTorch"):
        accuracy.main(["--device", "cpu", "--out", str(tmp_path / "a.json"), "--commit", "abc"])
    assert not (tmp_path / "a.json").exists()


def test_the_page_holds_the_table_of_the_file():
    file = ROOT / "benchmarks" / "results" / "accuracy_cpu.json"
    page = PAGE.read_text()
    assert table.put_into(page, file.name, accuracy.as_table(json.loads(file.read_text()))) == page
