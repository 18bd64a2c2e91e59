"""The scores of era5_uk: the pages state what the training application printed, as the results file keeps it."""

import re

import pytest
from support.pages import ROOT

NAMES = {
    "model": "model, seed {seed}",
    "ridge per point, 26 days": "ridge per grid point, 26 days",
    "ridge per point, 24 days": "ridge per grid point, 24 days",
    "same hour yesterday": "same hour yesterday",
    "persistence": "persistence",
}


@pytest.fixture(scope="module")
def printed():
    """RMSE and bias by seed and forecast."""
    text = (ROOT / "benchmarks" / "results" / "era5_uk_cpu.txt").read_text()
    runs = re.findall(r"training\.seed=(\d+)\n((?:    .*\n)+)", text)
    line = r"^    (\S.*?) {2,}(-?\d+\.\d{4}) +(-?\d+\.\d{4})$"
    return {int(seed): {name: numbers for name, *numbers in re.findall(line, run, re.MULTILINE)} for seed, run in runs}


def test_the_training_page_states_the_scores_that_were_printed(printed):
    page = (ROOT / "docs" / "training.md").read_text()
    rows = [
        f"| {NAMES[name].format(seed=seed)} | {' | '.join(f'{float(number):.3f}' for number in numbers)} |"
        for seed, scores in printed.items()
        for name, numbers in scores.items()
    ]
    assert len(rows) == 2 * len(NAMES) and [row for row in rows if row not in page] == []


def test_the_front_page_states_the_errors_of_the_model_that_were_printed(printed):
    errors = ", ".join(f"{float(printed[seed]['model'][0]):.2f}" for seed in (0, 1))
    assert re.search(
        rf"^\| model, .*seeds 0 and 1 \| {re.escape(errors)} \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
