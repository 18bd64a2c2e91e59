"""What is made of results: tables, the page, the picture; and the whole way from the command line."""

import json
import re
import shlex
from pathlib import Path

import pytest
import report
import run
from suite import picture, problems, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"


def test_times_stand_beside_the_floor_and_as_multiples_of_ours(results):
    text = table.tables(results)
    assert "| `encoder-x-c64` | 2 | 4 | 50% | 12 (3.0) |" in text
    assert "| `processor-x-c64` | 2 | 4 | 50% | – |" in text  # noqa: RUF001


def test_the_reason_of_an_empty_cell_is_told(results):
    assert "- PyG, out of memory: `processor-x-c64`" in table.tables(results)


def test_where_figures_were_made_comes_first(results):
    assert table.tables(results).startswith("Abacus, today, commit abc; torch 2. Copy in the same run: 1,000 GB/s.")


def test_a_column_that_says_nothing_is_left_out(results):
    for line in results["results"]:
        if line["peer"] == "pyg":
            line.pop("median_ms", None)
            line["reason"] = "not installed"
    assert "| PyG |" not in table.tables(results)


def test_figures_replace_those_that_the_page_holds():
    page = "before\n<!-- figures of a.json -->\nold\n<!-- end of a.json -->\nafter\n"
    once = table.put_into(page, "a.json", "new")
    assert once == "before\n<!-- figures of a.json -->\n\nnew\n\n<!-- end of a.json -->\nafter\n"
    assert table.put_into(once, "a.json", "new") == once


def test_a_page_without_a_place_for_figures_is_refused():
    with pytest.raises(ValueError, match="must hold the lines '<!-- figures of a.json -->'"):
        table.put_into("nothing", "a.json", "new")


def test_the_picture_has_a_point_for_each_measurement(results, monkeypatch, tmp_path):
    drawn = {}
    monkeypatch.setattr(picture.Figure, "savefig", lambda figure, path, **_: drawn.update(figure=figure))
    picture.draw(results, tmp_path / "x.png")
    points = {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in drawn["figure"].axes[0].lines
        if line.get_marker() != "None"
    }
    assert points["anemoi_gt"] == [(2.0, 1.0), (4.0, 2.0)]  # operations a byte; 10^12 operations a second
    assert points["PyG"] == [(2.0, pytest.approx(1 / 3))]


def test_a_picture_of_nothing_is_refused(results, tmp_path):
    with pytest.raises(ValueError, match="must hold times of encoders"):
        picture.draw(results | {"results": []}, tmp_path / "x.png")


def test_results_become_a_picture_and_a_page(results, tmp_path):
    file, page, roofline = tmp_path / "r.json", tmp_path / "page.md", tmp_path / "roofline.png"
    file.write_text(json.dumps(results))
    page.write_text("<!-- figures of r.json -->\n<!-- end of r.json -->\n")
    report.main([str(file), "--page", str(page), "--picture", str(roofline)])
    assert "12 (3.0)" in page.read_text() and roofline.read_bytes()[:4] == b"\x89PNG"


def test_one_command_measures_and_leaves_a_file(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(problems, "PROBLEMS", {"tiny": tiny(passes=("forward", "forward_backward"))})
    out = tmp_path / "results" / "r.json"
    run.main(["--problems", "tiny", "--peers", "ours", "--device", "cpu", "--out", str(out), "--commit", "abc"])
    found = json.loads(out.read_text())
    assert [line["pass"] for line in found["results"]] == ["forward", "forward_backward"]
    assert all(line["median_ms"] > 0 for line in found["results"])
    assert found["environment"]["commit"] == "abc" and "torch" in found["environment"]["versions"]
    assert "anemoi_gt" in table.tables(found)


def test_the_command_line_lists_problems_and_peers(capsys):
    run.main(["--list"])
    told = capsys.readouterr().out
    assert "encoder-n320-c64" in told and "peers ours" in told


def test_the_page_holds_the_tables_of_every_results_file():
    page, files = PAGE.read_text(), {}
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        results = json.loads(path.read_text())
        if "problems" in results:  # other benchmarks leave files there too
            files[path.name] = results
    assert sorted(re.findall(r"<!-- figures of (.*) -->", page)) == sorted(files)
    for name, results in files.items():
        expected = table.put_into(page, name, table.tables(results))
        assert expected == page, f"{name} has changed: run benchmarks/report.py with --page docs/performance.md"


def test_commands_on_the_page_are_understood():
    lines = re.findall(r"^python benchmarks/run\.py(.*)$", PAGE.read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        options = run.parse(shlex.split(line))
        assert problems.select(options.problems)
