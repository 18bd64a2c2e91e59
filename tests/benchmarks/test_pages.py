"""The pages hold the figures of the results files."""

import json
import re

import accuracy
import pytest
import report
import run
from suite import plot, problems, table
from suite.table import figure
from support.pages import PAGES, ROOT, commands

RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def words_of(name):
    return " ".join((ROOT / name).read_text().split())


def numbers_in(text):
    return set(re.findall(r"\d+(?:\.\d+)?", text))


def test_performance_holds_the_tables_of_its_results_files():
    page = (DOCS / "performance.md").read_text()
    files = re.findall(r"<!-- figures of (.*)\.json -->", page)
    named = re.findall(r"(?:figures of|{results-tables}) (.*)\.json", page)
    assert sorted(named) == sorted(
        path.stem for path in RESULTS.glob("*.json") if '"baselines": {' in path.read_text()
    )
    for name in files:
        expected = table.put_into(page, f"{name}.json", table.summary(load(name)))
        assert expected == page, (
            f"run python benchmarks/report.py {name}.json --page docs/performance.md"
        )


def test_backends_holds_the_table_of_errors():
    page = (DOCS / "backends.md").read_text()
    assert (
        table.put_into(page, "accuracy_cpu.json", accuracy.as_table(load("accuracy_cpu"))) == page
    )


def test_plots_of_the_readme_match_the_results():
    for name, theme in (("speed", plot.LIGHT), ("speed-dark", plot.DARK)):
        committed = (DOCS / "_static" / f"{name}.svg").read_text()
        assert committed == plot.as_file(plot.bars(load("n320_h200")), theme), (
            "run report.py with --bars"
        )


@pytest.mark.parametrize("script", [run, report, accuracy])
def test_commands_on_the_pages_are_understood(script):
    shown = [
        words[2:]
        for page in PAGES
        for words in commands(page)
        if f"benchmarks/{script.__name__}.py" in words
    ]
    understood = [script.parse(words) for words in shown]
    assert understood and (
        script is not run or all(problems.select(options.problems) for options in understood)
    )


def test_the_readme_has_the_factors_over_anemoi_models():
    lines = {}
    for line in load("n320_h200")["results"]:
        lines.setdefault((line["problem"], line["pass"]), {})[line["baseline"]] = line

    both, readme = "forward_backward", words_of("README.md")
    drawn = [
        found
        for (name, kind), found in lines.items()
        if kind == both and re.fullmatch(r"\w+-n320-c64", name)
    ]
    faster = [found["anemoi"]["median_ms"] / found["anemoi_gt"]["median_ms"] for found in drawn]
    memory = [
        100 * found["anemoi_gt"]["peak_bytes"] / found["anemoi"]["peak_bytes"] for found in drawn
    ]
    times = f"{min(faster):.1f}-{max(faster):.1f}x faster"
    shown = f"{times} and needs {min(memory):.0f}-{max(memory):.0f}% of the memory"
    assert shown in readme
    bars = {figure(found[name]["median_ms"]) for found in drawn for name in ("anemoi_gt", "anemoi")}
    assert bars <= numbers_in(re.search(r'alt="(Bars: [^"]+)"', readme)[1])


def test_performance_has_the_times_of_a_cpu():
    page = (DOCS / "performance.md").read_text()
    for line in load("cpu_attention")["results"]:
        for kind in ("forward", "forward_backward"):
            time, title = (
                line[kind],
                f"{kind.replace('_', ' and ')}, {line['channels']} channels per head",
            )
            pyg = f"{time['pyg']:.0f} ({time['pyg_over_anemoi_gt']:.1f})"
            assert f"| {title} | {time['anemoi_gt']:.0f} | {pyg} |" in page


def test_page_has_the_configurations_of_the_benchmark():
    page = (DOCS / "anemoi.md").read_text()
    steps = {}
    for name in ("benchmark_h200", "benchmark_install_whole_h200", "benchmark_whole_h200"):
        (case,) = load(f"families_{name}")["cases"]
        steps |= case["variants"]
    assert len(steps) == 9
    for step in steps.values():
        times = (step["median_ms"], step["peak_gb"], step["profile"]["total_ms"])
        assert f"| {' | '.join(f'{time:.1f}' for time in times)} |" in page
    fastest = min(
        (step for name, step in steps.items() if name.startswith("untouched")),
        key=lambda step: step["median_ms"],
    )
    replayed = steps["install, compiled whole, no recomputation, captured"]
    assert f"{fastest['median_ms'] / replayed['median_ms']:.2f}x faster" in page


WITH, WITHOUT = "", ", no recomputation"


@pytest.mark.parametrize(
    ("name", "suffixes"),
    [
        ("benchmark", [WITH]),
        ("benchmark_whole", [WITHOUT]),
        *((name, [WITH, WITHOUT]) for name in ("ensemble", "diffusion", "o96", "o32", "stretched")),
    ],
)
def test_page_has_the_times_of_a_family(name, suffixes):
    page = (DOCS / "anemoi.md").read_text()
    (case,) = load(f"families_{name}_h200")["cases"]
    measured = {key: found for key, found in case["variants"].items() if "median_ms" in found}
    for suffix in suffixes:
        upstream = [found for key, found in measured.items() if is_of(key, "untouched", suffix)]
        fastest = min(upstream, key=lambda found: found["median_ms"], default=None)
        shown = [
            fastest,
            measured[f"install{suffix}"],
            measured.get(f"install{suffix}, captured"),
        ]
        cells = []
        for found in shown:
            if found is not None:
                cells.append(f"{found['median_ms']:.1f}, {found['peak_gb']:.1f} GB")
        if fastest is None:
            cells.insert(0, case["variants"][f"untouched, blocks compiled{suffix}"]["outcome"])
        assert f"| {' | '.join(cells)} |" in page


BLOCKS = ", blocks compiled"
NONE = ", no recomputation"


@pytest.mark.parametrize(
    ("names", "variants"),
    [
        (["transformer_h200"], [f"untouched{BLOCKS}", f"install{BLOCKS}"]),
        (["transformer_h200"], [f"untouched{BLOCKS}{NONE}", f"install{BLOCKS}{NONE}"]),
        (["benchmark_h100", "benchmark_install_h100"], [f"untouched{BLOCKS}", "install"]),
        (
            ["benchmark_h100", "benchmark_install_h100"],
            [
                f"untouched, compiled whole{NONE}",
                f"install{NONE}",
                f"install{NONE}, captured",
            ],
        ),
        (["diffusion_h100", "diffusion_install_h100"], [f"untouched{BLOCKS}", "install"]),
        (
            ["diffusion_h100", "diffusion_install_h100"],
            [f"untouched{BLOCKS}{NONE}", f"install{NONE}"],
        ),
        (["stretched_h100"], ["untouched", "install"]),
        (["stretched_h100"], [f"untouched{BLOCKS}", f"install{BLOCKS}"]),
    ],
)
def test_page_has_the_times_of_variants_of_a_family(names, variants):
    steps = {}
    for name in names:
        (case,) = load(f"families_{name}")["cases"]
        steps |= case["variants"]
    cells = []
    for variant in variants:
        step = steps[variant]
        if "outcome" in step:
            cells.append(step["outcome"])
        else:
            cells.append(f"{step['median_ms']:.1f}, {step['peak_gb']:.1f} GB")
    assert f"| {' | '.join(cells)} |" in (DOCS / "anemoi.md").read_text()


def test_pages_have_the_times_of_hidden_layers_that_are_computed_again():
    page, fitting = ((DOCS / name).read_text() for name in ("anemoi.md", "performance.md"))
    for name in ("benchmark_whole", "ensemble4"):
        (case,) = load(f"families_{name}_h200")["cases"]
        again = case["variants"]["install, hidden recomputed"]
        assert f"| {again['median_ms']:.1f} ms, {again['peak_gb']:.1f} GB |" in page
        assert f"| hidden layers | {again['peak_gb']:.1f} | measured |" in fitting
    (case,) = load("families_ensemble4_untouched_h200")["cases"]
    untouched = case["variants"]["untouched, blocks compiled"]["median_ms"]
    assert f"| {untouched:.0f}, with checkpointing; out of memory without |" in words_of(
        "README.md"
    )


def test_readme_has_the_times_of_the_benchmark_and_of_the_small_grid():
    for name, base in (
        ("benchmark_whole", "untouched, compiled whole"),
        ("o96", "untouched"),
    ):
        (case,) = load(f"families_{name}_h200")["cases"]
        forms = (base + WITHOUT, "install" + WITHOUT, f"install{WITHOUT}, captured")
        times = [case["variants"][form]["median_ms"] for form in forms]
        assert re.search(r" \| ".join(f"{time:.1f}[^|]*" for time in times), words_of("README.md"))


def is_of(name, kind, suffix):
    return name.startswith(kind) and name.endswith("no recomputation") == bool(suffix)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_the_page_of_anemoi_has_the_distances_of_loss_curves(precision):
    found = load("anemoi_curves_h200")[precision]
    apart = (*(max(seeds.values()) for seeds in found["apart"].values()), found["spread_of_seeds"])
    cells = " | ".join(f"{distance:.1e}".replace("e-0", "e-") for distance in apart)
    assert f"| {precision} | {cells} |" in (DOCS / "anemoi.md").read_text() and all(
        found["within"].values()
    )


@pytest.mark.parametrize(
    ("case", "title"), [("ensemble", "ensemble of 2"), ("diffusion", "diffusion model")]
)
def test_the_page_of_anemoi_has_the_distances_of_loss_curves_of_families(case, title):
    found = load("anemoi_curves_families_h200")[case]["16-mixed"]
    distances = max(found["apart"]["install"].values()), found["spread_of_seeds"]
    cells = " | ".join(f"{distance:.1e}".replace("e-0", "e-") for distance in distances)
    assert f"| {title} | {cells} |" in (DOCS / "anemoi.md").read_text()
    assert found["within"] == {"install": True}


def test_the_page_of_pyg_has_the_times_of_its_models():
    for model in load("pyg_models_h200")["models"].values():
        ways = (model[way] for way in ("pyg", "new graph", "one graph"))
        cells = " | ".join(f"{way['median_ms']:.1f} ({way['peak_gb']:.1f})" for way in ways)
        assert f"| {cells} |" in (DOCS / "pyg.md").read_text()
    for way in ("pyg", "one graph"):
        times = [model[way]["median_ms"] for model in load("pyg_models_h200")["models"].values()]
        assert f"| {min(times):.1f}-{max(times):.1f} ms |" in words_of("README.md")


def test_the_page_of_layers_has_the_figures_of_inference_at_9_km():
    page = (DOCS / "layers.md").read_text()
    right = [found for found in load("inference_9km_h200")["runs"] if found["outcome"] == "right"]
    for found in right:
        errors = f"{found['rms_error']:.4f} ({found['rms_error_of_plain']:.4f})"
        cells = (
            f"{found['num_chunks']} | {found['seconds']:.3f} | {found['peak_gib']:.1f} | {errors}"
        )
        assert re.search(rf"\| {found['part']} \| [^|]+ \| {re.escape(cells)} \|", page), found


def test_readme_and_page_have_the_figures_of_training_at_9_km():
    runs = load("train_9km_h200")["runs"]
    timed = [found for found in runs if found["outcome"] == "done" and found["num_chunks"] == 8]
    compiled = {
        found["contender"]: f"{found['seconds']:.2f} s, {found['peak_gb']:.1f} GB"
        for found in timed
        if found["compiled"]
    }
    assert f"| {compiled['anemoi_gt']} | {compiled['anemoi-models']} |" in words_of("README.md")
    assert {f"{found['seconds']:.2f}" for found in timed} <= numbers_in(
        words_of("docs/training.md")
    )


def test_readme_and_pages_have_the_figures_of_two_gpus():
    def shown(one, two, time, memory):
        factor, share = one[time] / two[time], two[memory] / one[memory]
        return rf"{factor:.2f}x faster[^.]* {100 * share:.0f}%"

    halo = [line for line in load("sharding_h200x2")["results"] if "halo" in line["model"]]
    launched, replayed = (
        [line for line in halo if line["replayed"] == way] for way in (False, True)
    )
    one, two = (
        line | {"peak_gb": held["peak_gb"]} for line, held in zip(replayed, launched, strict=True)
    )
    assert re.search(shown(one, two, "ms", "peak_gb"), words_of("README.md"))
    assert {f"{one['ms']:.1f}", f"{two['ms']:.1f}", f"{two['peak_gb']:.0f}"} <= numbers_in(
        words_of("docs/anemoi.md")
    )
    one, two = (line for line in load("train_9km_h200x2")["runs"] if line["outcome"] == "done")
    assert re.search(shown(one, two, "seconds", "peak_gb"), words_of("README.md"))
    assert {f"{line['seconds']:.2f}" for line in (one, two)} <= numbers_in(
        words_of("docs/training.md")
    )
    own = [
        line
        for line in load("sharding_anemoi_h200x2")["results"]
        if line["model"] == "anemoi-models, edges"
    ]
    upstream = f"{own[-1]['ms']:.1f}"  # compiled, on two
    assert all(
        upstream in numbers_in(words_of(f"docs/{page}.md")) for page in ("anemoi", "distributed")
    )


def test_readme_and_page_have_the_figures_of_inference_in_anemoi():
    for name in ("anemoi_inference_h200", "anemoi_inference_0.9.3_h200"):
        found = {
            (line["part"], line["chunks"], line["contender"]): line
            for line in load(name)["results"]
        }
        shown = numbers_in(words_of("docs/anemoi.md"))
        assert {
            f"{line['median_ms']:.1f}" for (_, chunks, _), line in found.items() if chunks != 4
        } <= shown
        for part in {"forecast"} & {part for part, *_ in found}:
            ours, theirs = found[part, 1, "install"], found[part, 1, "untouched"]
            cells = [
                f"{line['median_ms']:.1f} ms, {line['peak_gib'] * 2**30 / 1e9:.1f} GB"
                for line in (ours, theirs)
            ]
            assert f"| {' | '.join(cells)} |" in words_of("README.md")


def test_pages_have_the_scores_of_era5_uk():
    text = (RESULTS / "era5_uk_cpu.txt").read_text()
    runs = re.findall(r"training\.seed=(\d+)\n((?:    .*\n)+)", text)
    line = re.compile(r"^    \S.*? {2,}(-?\d+\.\d{4}) +(-?\d+\.\d{4})$", re.MULTILINE)
    scores = {seed: line.findall(run) for seed, run in runs}
    page = (DOCS / "training.md").read_text()
    rows = [
        f"| {float(rmse):.3f} | {float(bias):.3f} |"
        for run in scores.values()
        for rmse, bias in run
    ]
    assert len(rows) == 10 and [row for row in rows if row not in page] == []
    model = {f"{float(run[0][0]):.2f}" for run in scores.values()}
    assert model <= numbers_in(words_of("README.md"))
