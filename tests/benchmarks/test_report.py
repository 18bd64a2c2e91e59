"""What is made of results: tables, the page, pictures; and the whole way from the command line."""

import json
import re
from xml.etree import ElementTree

import accuracy
import pytest
import report
import run
from suite import picture, problems, table
from suite.table import figure
from support.pages import PAGES, ROOT, commands

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


def test_the_roofline_has_a_point_for_each_measurement(results):
    found = picture.points(results, picture.drawn(results), "forward")
    assert [(peer, intensity) for peer, _, intensity, _ in found] == [("ours", 2.0), ("pyg", 2.0), ("ours", 4.0)]
    assert [speed for *_, speed in found] == pytest.approx([1.0, 1 / 3, 2.0])  # 10^12 operations a second
    forward, _ = picture.roofline(results)
    assert forward.count('class="peer0"') == 2 and forward.count('class="peer1"') == 1


def test_a_point_on_the_line_runs_at_the_speed_of_a_copy(results):
    results["results"][0]["median_ms"] = 2.0  # 2 * 10^9 bytes at 10^12 a second
    forward, _ = picture.roofline(results)
    assert "anemoi_gt, encoder-x-c64: 100% of the copy's speed" in forward
    mark = re.search(r'class="peer0" transform="translate\(([\d.]+),([\d.]+)\)"', forward)
    line = re.search(r'class="line" d="M([\d.]+),([\d.]+)L([\d.]+),([\d.]+)"', forward)
    x, y, (x0, y0, x1, y1) = *map(float, mark.groups()), map(float, line.groups())
    assert y == pytest.approx(y0 + (x - x0) * (y1 - y0) / (x1 - x0), abs=0.2)


def test_a_bar_is_as_long_as_its_time(results):
    for line in [line for line in results["results"] if "median_ms" in line]:
        results["results"].append(line | {"pass": "forward_backward"})
    drawn = picture.bars(results)
    lengths = [
        float(length)
        for length in re.findall(r'<rect class="peer\d" x="86" y="\d+" width="([\d.]+)" height="16"', drawn)
    ]
    assert lengths == pytest.approx([lengths[1] / 3, lengths[1], lengths[1] / 3], abs=0.1)  # 4, 12 and 4 ms
    assert "12 (3.0" in drawn


def test_a_picture_of_nothing_is_refused(results):
    with pytest.raises(ValueError, match="must hold times of encoders"):
        picture.roofline(results | {"results": []})


def test_results_become_pictures_and_a_page(results, tmp_path):
    file, page = tmp_path / "r.json", tmp_path / "page.md"
    file.write_text(json.dumps(results))
    page.write_text("<!-- figures of r.json -->\n<!-- end of r.json -->\n")
    report.main([str(file), "--page", str(page), "--roofline", str(tmp_path / "roofline.svg")])
    assert "12 (3.0)" in page.read_text()
    light, dark = (ElementTree.parse(tmp_path / name) for name in ("roofline.svg", "roofline-dark.svg"))
    colours = [re.findall(r"text\{fill:(#\w+)\}", tree.getroot()[0].text) for tree in (light, dark)]
    assert colours == [["#1a1a1a"], ["#e6e6e6"]]


def test_pictures_of_the_readme_are_those_of_the_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "n320_h200.json").read_text())
    for name, theme in (("speed", picture.LIGHT), ("speed-dark", picture.DARK)):
        committed = (ROOT / "docs" / "_static" / f"{name}.svg").read_text()
        assert committed == picture.as_file(picture.bars(results), theme), (
            "python benchmarks/report.py FILE --bars FILE"
        )


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
        if "peers" in results:  # other benchmarks leave files there too
            files[path.name] = results
    assert sorted(re.findall(r"<!-- figures of (.*) -->", page)) == sorted(files)
    for name, results in files.items():
        expected = table.put_into(page, name, table.tables(results))
        assert expected == page, f"{name} has changed: run benchmarks/report.py with --page docs/performance.md"


@pytest.mark.parametrize("script", [run, report, accuracy])
def test_commands_on_the_pages_are_understood(script):
    shown = [words[2:] for page in PAGES for words in commands(page) if f"benchmarks/{script.__name__}.py" in words]
    assert shown
    understood = [script.parse(words) for words in shown]
    assert script is not run or all(problems.select(options.problems) for options in understood)


def test_the_readme_has_the_factors_of_the_results():
    text = " ".join((ROOT / "README.md").read_text().split())
    results = json.loads((ROOT / "benchmarks" / "results" / "n320_h200.json").read_text())
    lines = {(line["problem"], line["peer"]): line for line in results["results"] if line["pass"] == "forward_backward"}

    def factors(name, figure):
        pairs = [(lines[key, "anemoi"], lines[key, "ours"]) for key, _ in lines if re.fullmatch(name, key)]
        ratios = [f"{theirs[figure] / ours[figure]:.1f}" for theirs, ours in pairs]
        return min(ratios), max(ratios)

    wide = r"\w+-n320-c64"
    assert "takes {} to {} times as long, and {} to {} times".format(
        *factors(wide, "median_ms"), *factors(wide, "peak_bytes")
    ) in text  # fmt: skip
    assert "With 32 channels a head the factor is {} to {}.".format(*factors(r"\w+-n320-c32", "median_ms")) in text
    assert "where the host takes the time, it is {}.".format(factors("edges1000-c64", "median_ms")[0]) in text
    replays = {line["peer"]: line["median_ms"] for line in results["results"] if line["pass"] == "replay"}
    assert f"From a CUDA graph it is {replays['anemoi'] / replays['ours']:.1f}." in text
    drawn = [(key, peer) for key, peer in lines if re.fullmatch(wide, key) and peer in ("ours", "anemoi")]
    bars = [figure(lines[line]["median_ms"]) for line in drawn]
    described = re.search(r'alt="(Bars: [^"]+)"', text)[1]
    assert sorted(re.findall(r"\d+\.\d+", described)) == sorted(bars)


def test_readme_and_page_have_the_times_of_an_anemoi_step():
    results = json.loads((ROOT / "benchmarks" / "results" / "anemoi_step_h200.json").read_text())["variants"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    names = ("untouched", "install", "our blocks, compiled")
    told = (round(results[name]["median_ms"]) for name in names)
    assert "takes {} ms untouched, {} with `install`, {} with".format(*told) in readme
    kernels = (round(results[name]["profile"]["total_ms"]) for name in names)
    assert "{}, {} and {} ms of that are kernels".format(*kernels) in readme
    page = (ROOT / "docs" / "anemoi.md").read_text()
    for variant in results.values():
        families = variant["profile"]["families_ms"].items()
        attention = sum(ms for family, ms in families if family.startswith("attention"))
        times = (variant["median_ms"], variant["peak_gb"], variant["profile"]["total_ms"], attention)
        assert f"| {' | '.join(f'{time:.1f}' for time in times)} |" in page


@pytest.mark.parametrize(
    ("precision", "name"), [("bf16-mixed", "anemoi_curves_h200.json"), ("16-mixed", "anemoi_curves_16_mixed_h200.json")]
)
def test_the_page_has_how_far_loss_curves_of_an_anemoi_model_are_apart(precision, name):
    found = json.loads((ROOT / "benchmarks" / "results" / name).read_text())[precision]
    page = (ROOT / "docs" / "anemoi.md").read_text()
    apart = (*found["apart"].values(), found["spread_of_seeds"])
    assert f"| {precision} | {' | '.join(f'{far:.1e}'.replace('e-0', 'e-') for far in apart)} |" in page
    assert found["within"]


def test_the_page_of_pyg_has_the_times_of_its_models():
    results = json.loads((ROOT / "benchmarks" / "results" / "pyg_models_h200.json").read_text())["models"]
    page = (ROOT / "docs" / "pyg.md").read_text()
    for model in results.values():
        cells = (
            f"{model[way]['median_ms']:.1f} ({model[way]['peak_gb']:.1f})" for way in ("pyg", "new graph", "one graph")
        )
        assert f"| {' | '.join(cells)} |" in page


def test_the_page_has_the_times_of_a_cpu():
    results = json.loads((ROOT / "benchmarks" / "results" / "cpu_attention.json").read_text())["results"]
    for line in results:
        for kind in ("forward", "forward_backward"):
            time, title = line[kind], f"{kind.replace('_', ' and ')}, {line['channels']} channels a head"
            theirs = f"{time['pyg']:.0f} ({time['pyg_over_anemoi_gt']:.1f})"
            assert f"| {title} | {time['anemoi_gt']:.0f} | {theirs} |" in PAGE.read_text()


def test_the_readme_has_the_factors_of_a_cpu():
    results = json.loads((ROOT / "benchmarks" / "results" / "cpu_attention.json").read_text())["results"]
    ratios = [f"{line[kind]['pyg_over_anemoi_gt']:.1f}" for line in results for kind in ("forward", "forward_backward")]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"layer takes {min(ratios)} to {max(ratios)} times as long as ours" in text
