"""The pages hold the tables of the results files, and quote no other measurement."""

import json
import re

import pytest
import report
import run
import sharding
import train_9km
from suite import plot, problems
from suite.page_tables import SPOT, TABLES, fill
from suite.results_files import RESULTS, FileFacts, load
from suite.training_tables import FAMILIES, steps_of
from support.pages import BLOCK, ROOT, name_of

DOCS = ROOT / "docs"
# Pages for users; design and contributing tell what was tried.
GUIDES = [page for page in report.pages() if page.stem not in ("design", "contributing")]
# A measurement: a number before a unit, a factor, or both ends of a range.
QUOTED = re.compile(r"(\d[\d.,]*)(?:-(\d[\d.,]*))?(?: (?:ms|s|GB)\b|x (?:faster|less|slower))")
# Limits and settings, not measurements.
SETTINGS = {"300 s", "30 s"}


def words_of(name):
    return " ".join((ROOT / name).read_text().split())


def numbers_in(text):
    return set(re.findall(r"\d+(?:[.,]\d+)*", text))


def quoted_in(text):
    """Return the measurements in a text, as they are written."""
    return {match[0] for match in QUOTED.finditer(text)} - SETTINGS


@pytest.mark.parametrize("page", report.pages(), ids=name_of)
def test_tables_of_a_page_are_those_of_the_results(page):
    text = page.read_text()
    assert fill(text) == text, "run make tables"


def test_every_table_is_on_a_page_once():
    names = [spot[1] for page in report.pages() for spot in SPOT.finditer(page.read_text())]
    assert sorted(names) == sorted(TABLES)


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_measurements_that_a_page_quotes_are_in_the_tables_of_performance(page):
    tables = "".join(spot[0] for spot in SPOT.finditer((DOCS / "performance.md").read_text()))
    known = numbers_in(tables)
    prose = " ".join(SPOT.sub("", BLOCK.sub("", page.read_text())).split())
    unknown = [text for text in quoted_in(prose) if not numbers_in(text) <= known]
    assert unknown == []


def test_every_results_file_is_on_a_page_or_in_the_notes():
    told = (ROOT / "benchmarks" / "NOTES.md").read_text()
    told += "".join(page.read_text() for page in report.pages())
    told += "".join(path.read_text() for path in (ROOT / "src").rglob("tested_versions.py"))
    assert [path.name for path in RESULTS.iterdir() if path.name not in told] == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_say_device_versions_commit_and_date(path):
    facts = FileFacts.of(path.name)
    assert re.match(r"NVIDIA H[12]00|x86_64 CPU", facts.device)
    assert re.fullmatch(r"[0-9a-f]{7}", facts.commit)
    assert re.match(r"\d{4}-\d{2}-\d{2}", facts.date)
    assert "torch" in dict(facts.versions)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_baseline_of_a_family_is_the_fastest_of_all_runs(family):
    gpu = "h100" if family == "aifs" else "h200"  # where it was measured
    steps = steps_of(family, gpu)
    assert any(step.library == "anemoi_gt" and step.ms for step in steps)
    fastest = min(step.ms for step in steps if step.library == "anemoi-models" and step.ms)
    for path in RESULTS.glob(f"families_*_{gpu}.json"):
        for case in json.loads(path.read_text())["cases"]:
            for name, record in case["variants"].items():
                if case["name"] == family and name.startswith("untouched"):
                    assert fastest <= record.get("median_ms", fastest)


def test_plots_of_the_readme_match_the_results():
    for name, theme in (("speed", plot.LIGHT), ("speed-dark", plot.DARK)):
        committed = (DOCS / "_static" / f"{name}.svg").read_text()
        assert committed == plot.as_file(plot.bars(load("n320_h200.json")), theme), (
            "run make tables"
        )


@pytest.mark.parametrize("script", [run, report, sharding, train_9km])
def test_the_commands_that_a_program_begins_with_are_valid(script):
    doc = re.sub(r"\\\n *", "", script.__doc__)
    found = re.findall(rf"python benchmarks/{script.__name__}\.py((?: \S+)*)", doc)
    parsed = [script.parse(words.split()) for words in found]
    assert parsed
    if script is run:
        assert all(problems.select(options.problems) for options in parsed)


def test_replayed_losses_are_those_of_eager_steps_bit_for_bit():
    losses = load("anemoi_curves_h200.json")["benchmark"]["16-mixed"]["losses"]
    for seed in (0, 1):
        launched, replayed = (losses[f"install{how}, seed {seed}"] for how in ("", ", captured"))
        assert replayed == launched


def test_the_readme_has_the_scores_of_era5_uk():
    scores = re.findall(r"^\| model, seed \d \| ([\d.]+) \|", TABLES["era5-uk"](), re.MULTILINE)
    assert len(scores) == 2
    assert {f"{float(rmse):.2f}" for rmse in scores} <= numbers_in(words_of("README.md"))
