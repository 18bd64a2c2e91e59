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

RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"


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
def test_commands_on_the_pages_are_valid(script):
    parsed = []
    for page in PAGES:
        for words in commands(page):
            if f"benchmarks/{script.__name__}.py" in words:
                parsed.append(script.parse(words[2:]))
    assert parsed
    if script is run:
        assert all(problems.select(options.problems) for options in parsed)


def test_the_readme_has_the_factors_over_anemoi_models():
    lines = {}
    for line in load("n320_h200")["results"]:
        lines.setdefault((line["problem"], line["pass"]), {})[line["baseline"]] = line

    readme = words_of("README.md")
    drawn = []
    for (name, kind), by_baseline in lines.items():
        if kind == "forward_backward" and re.fullmatch(r"\w+-n320-c64", name):
            drawn.append((by_baseline["anemoi_gt"], by_baseline["anemoi"]))
    faster = [theirs["median_ms"] / ours["median_ms"] for ours, theirs in drawn]
    memory = [100 * ours["peak_bytes"] / theirs["peak_bytes"] for ours, theirs in drawn]
    times = f"{min(faster):.1f}-{max(faster):.1f}x faster"
    shown = f"{times} and needs {min(memory):.0f}-{max(memory):.0f}% of the memory"
    assert shown in readme
    bars = {figure(line["median_ms"]) for pair in drawn for line in pair}
    assert bars <= numbers_in(re.search(r'alt="(Bars: [^"]+)"', readme)[1])


def test_performance_has_the_times_of_a_cpu():
    page = (DOCS / "performance.md").read_text()
    for line in load("cpu_attention")["results"]:
        for kind in ("forward", "forward_backward"):
            time = line[kind]
            title = f"{kind.replace('_', ' and ')}, {line['channels']} channels per head"
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


WITH = ""
WITHOUT = ", no recomputation"


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
    measured = {key: variant for key, variant in case["variants"].items() if "median_ms" in variant}
    for suffix in suffixes:
        upstream = [variant for key, variant in measured.items() if is_of(key, "untouched", suffix)]
        fastest = min(upstream, key=lambda variant: variant["median_ms"], default=None)
        shown = [
            fastest,
            measured[f"install{suffix}"],
            measured.get(f"install{suffix}, captured"),
        ]
        cells = []
        for variant in shown:
            if variant is not None:
                cells.append(f"{variant['median_ms']:.1f}, {variant['peak_gb']:.1f} GB")
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
        (["ensemble_h100"], [f"untouched{BLOCKS}", "install"]),
        (["ensemble_h100"], [f"untouched{BLOCKS}{NONE}", "install, hidden recomputed"]),
        (["ensemble_h100"], [f"untouched{BLOCKS}{NONE}", f"install{NONE}"]),
        (["transformer_h100"], [f"untouched{BLOCKS}", f"install{BLOCKS}"]),
        (["transformer_h100"], [f"untouched{BLOCKS}{NONE}", f"install{BLOCKS}{NONE}"]),
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


def test_pages_have_the_times_of_recomputed_hidden_layers():
    page = (DOCS / "anemoi.md").read_text()
    fitting = (DOCS / "performance.md").read_text()
    for name in ("benchmark_whole", "ensemble4"):
        (case,) = load(f"families_{name}_h200")["cases"]
        recomputed = case["variants"]["install, hidden recomputed"]
        assert f"| {recomputed['median_ms']:.1f} ms, {recomputed['peak_gb']:.1f} GB |" in page
        assert f"| hidden layers | {recomputed['peak_gb']:.1f} | measured |" in fitting
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


@pytest.mark.parametrize(
    ("file", "case", "title"),
    [
        ("anemoi_curves_h200", "benchmark", "graph transformer"),
        ("anemoi_curves_families_h200", "ensemble", "ensemble of 2"),
        ("anemoi_curves_families_h200", "diffusion", "diffusion model"),
    ],
)
def test_the_page_of_anemoi_has_the_distances_of_loss_curves(file, case, title):
    curves = load(file)[case]["16-mixed"]
    distances = max(curves["apart"]["install"].values()), curves["spread_of_seeds"]
    cells = " | ".join(f"{distance:.1e}".replace("e-0", "e-") for distance in distances)
    assert f"| {title} | {cells} |" in (DOCS / "anemoi.md").read_text()
    assert all(curves["within"].values())


def test_replayed_losses_are_those_of_launched_steps_bit_by_bit():
    losses = load("anemoi_curves_h200")["benchmark"]["16-mixed"]["losses"]
    for seed in (0, 1):
        launched, replayed = (losses[f"install{how}, seed {seed}"] for how in ("", ", captured"))
        assert replayed == launched


def test_the_page_of_pyg_has_the_times_of_its_models():
    models = load("pyg_models_h200")["models"].values()
    for model in models:
        records = (model[name] for name in ("pyg", "new graph", "one graph"))
        cells = " | ".join(f"{line['median_ms']:.1f} ({line['peak_gb']:.1f})" for line in records)
        assert f"| {cells} |" in (DOCS / "pyg.md").read_text()
    for name in ("pyg", "one graph"):
        times = [model[name]["median_ms"] for model in models]
        assert f"| {min(times):.1f}-{max(times):.1f} ms |" in words_of("README.md")


def test_the_page_of_layers_has_the_figures_of_inference_at_9_km():
    page = (DOCS / "layers.md").read_text()
    for line in load("inference_9km_h200")["runs"]:
        if line["outcome"] != "right":
            continue
        errors = f"{line['rms_error']:.4f} ({line['rms_error_of_plain']:.4f})"
        cells = f"{line['num_chunks']} | {line['seconds']:.3f} | {line['peak_gib']:.1f} | {errors}"
        assert re.search(rf"\| {line['part']} \| [^|]+ \| {re.escape(cells)} \|", page), line


def test_readme_and_page_have_the_figures_of_training_at_9_km():
    runs = load("train_9km_h200")["runs"]
    timed = [line for line in runs if line["outcome"] == "done" and line["num_chunks"] == 8]
    compiled = {}
    for line in timed:
        if line["compiled"]:
            compiled[line["contender"]] = f"{line['seconds']:.2f} s, {line['peak_gb']:.1f} GB"
    assert f"| {compiled['anemoi_gt']} | {compiled['anemoi-models']} |" in words_of("README.md")
    seconds = {f"{line['seconds']:.2f}" for line in timed}
    assert seconds <= numbers_in(words_of("docs/training.md"))


def test_readme_and_pages_have_the_figures_of_two_gpus():
    def shown(one, two, time, memory):
        factor = one[time] / two[time]
        share = two[memory] / one[memory]
        return rf"{factor:.2f}x faster[^.]* {100 * share:.0f}%"

    halo = [line for line in load("sharding_h200x2")["results"] if "halo" in line["model"]]
    launched = [line for line in halo if not line["replayed"]]
    replayed = [line for line in halo if line["replayed"]]
    # memory is measured without CUDA graphs
    one = replayed[0] | {"peak_gb": launched[0]["peak_gb"]}
    two = replayed[1] | {"peak_gb": launched[1]["peak_gb"]}
    assert len(launched) == len(replayed) == 2
    assert re.search(shown(one, two, "ms", "peak_gb"), words_of("README.md"))
    figures = {f"{one['ms']:.1f}", f"{two['ms']:.1f}", f"{two['peak_gb']:.0f}"}
    assert figures <= numbers_in(words_of("docs/anemoi.md"))
    one, two = (line for line in load("train_9km_h200x2")["runs"] if line["outcome"] == "done")
    assert re.search(shown(one, two, "seconds", "peak_gb"), words_of("README.md"))
    seconds = {f"{one['seconds']:.2f}", f"{two['seconds']:.2f}"}
    assert seconds <= numbers_in(words_of("docs/training.md"))
    lines = load("sharding_anemoi_h200x2")["results"]
    untouched = [line for line in lines if line["model"] == "anemoi-models, edges"]
    upstream = f"{untouched[-1]['ms']:.1f}"  # compiled, on two GPUs
    for page in ("anemoi", "distributed"):
        assert upstream in numbers_in(words_of(f"docs/{page}.md"))


def test_readme_and_page_have_the_figures_of_inference_in_anemoi():
    for name in ("anemoi_inference_h200", "anemoi_inference_0.9.3_h200"):
        lines = load(name)["results"]
        medians = {f"{line['median_ms']:.1f}" for line in lines if line["chunks"] != 4}
        assert medians <= numbers_in(words_of("docs/anemoi.md"))
        forecasts = {}
        for line in lines:
            if line["part"] == "forecast" and line["chunks"] == 1:
                memory_gb = line["peak_gib"] * 2**30 / 1e9
                forecasts[line["contender"]] = f"{line['median_ms']:.1f} ms, {memory_gb:.1f} GB"
        if forecasts:
            cells = [forecasts["install"], forecasts["untouched"]]
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
    assert len(rows) == 10
    assert [row for row in rows if row not in page] == []
    model = {f"{float(run[0][0]):.2f}" for run in scores.values()}
    assert model <= numbers_in(words_of("README.md"))
