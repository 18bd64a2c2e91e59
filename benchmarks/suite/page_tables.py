"""Tables of the pages, by name, from results files.

A page holds a table between two comments, which `benchmarks/report.py` fills:

    <!-- table: graph-networks -->
    <!-- end of graph-networks -->

Below each table is a line with device, versions, commits and dates.
"""

import re
from collections.abc import Callable
from functools import partial
from math import inf
from operator import itemgetter

import sharding

from suite import readme_tables, table
from suite.results_files import RESULTS, FileFacts, load, sources
from suite.table import EMPTY, markdown
from suite.training_tables import (
    HOST_BOUND,
    MODES,
    differences,
    factor,
    family_table,
    mesh_table,
    overview_table,
)

GIB = 2**30 / 1e9  # GB
SPOT = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end of \1 -->", re.DOTALL)


def fill(page: str) -> str:
    """Return a page with its tables."""
    return SPOT.sub(_filled, page)


def _filled(spot: re.Match) -> str:
    name = spot[1]
    return f"<!-- table: {name} -->\n\n{TABLES[name]()}\n\n<!-- end of {name} -->"


def _with_sources(header: list[str], rows: list[list[str]], *names: str) -> str:
    used = [FileFacts.of(name) for name in names]
    return f"{markdown(header, rows)}\n\n{sources(used)}"


def _ratio(theirs: float, ours: float) -> str:
    return factor(theirs / ours)


# --------------------------------------------------------------------------- models


def inference() -> str:
    """Forecast steps and mappers of Anemoi's models, untouched and under `install`."""
    return _inference(
        {
            ("anemoi_inference_h200.json", "forecast"): "forecast step, N320",
            ("anemoi_inference_0.9.3_encoder_h100.json", "encoder"): "encoder of AIFS Single",
            ("anemoi_inference_0.9.3_h200.json", "decoder"): "decoder of AIFS Single",
        }
    )


def aifs_inference() -> str:
    """A forecast step of AIFS's architecture."""
    return _inference({("anemoi_inference_aifs_h100.json", "aifs"): "forecast step"})


def _inference(titles: dict[tuple[str, str], str]) -> str:
    rows = []
    for (name, part), title in titles.items():
        facts, lines = FileFacts.of(name), {}
        for line in load(name)["results"]:
            if line["part"] == part:
                lines.setdefault(line["chunks"], {})[line["contender"]] = line
        for chunks, by_contender in lines.items():
            theirs, ours = by_contender["untouched"], by_contender["install"]
            row = [title, _gpu(facts), chunks]
            for line in (theirs, ours):
                row += [f"{line['median_ms']:.1f}", f"{line['peak_gib'] * GIB:.1f}"]
            rows.append([*row, _ratio(theirs["median_ms"], ours["median_ms"])])
    header = ["part", "GPU", "chunks", "anemoi-models, ms", "GB", "anemoi_gt, ms", "GB", "faster"]
    return _with_sources(header, rows, *dict.fromkeys(name for name, _ in titles))


def training_9km() -> str:
    """Training steps at 9 km, on one GPU and several."""
    names = (
        "train_9km_h200.json",
        "train_9km_anemoi_chunks_h200.json",
        "train_9km_install_0.2.0_h200.json",
        "train_9km_h200x2.json",
        "train_9km_h200x4.json",
    )
    titles = {"anemoi-models, install": "anemoi-models, `install`"}
    steps = {}  # of eager and compiled blocks, the faster
    for name in names:
        for line in load(name)["runs"]:
            if "num_chunks" not in line or line["outcome"] not in ("done", "out of memory"):
                continue
            contender = line["contender"]
            if "0.2.0" in name and contender == "anemoi_gt":
                continue  # measured again
            key = (line.get("ranks", 1), contender, line["num_chunks"])
            if key not in steps or line.get("seconds", inf) < steps[key].get("seconds", inf):
                steps[key] = line
    rows = []
    for (ranks, contender, chunks), line in sorted(steps.items(), key=itemgetter(0)):
        row = [ranks, titles.get(contender, contender), chunks]
        if "seconds" not in line:
            rows.append([*row, line["outcome"], EMPTY, EMPTY])
            continue
        row += [f"{line['seconds']:.2f}", f"{line['peak_gb']:.1f}"]
        theirs = steps.get((ranks, "anemoi-models", chunks))
        is_compared = theirs and theirs is not line
        rows.append([*row, _ratio(theirs["seconds"], line["seconds"]) if is_compared else EMPTY])
    header = ["GPUs", "library", "chunks", "s", "GB on each", "faster"]
    return f"{_with_sources(header, rows, *names)}\n\n{_scaling_9km(names[0], *names[3:])}"


def _scaling_9km(*names: str) -> str:
    """Return the speedup and the memory of two and four GPUs, with compiled blocks in 8 chunks."""
    by_ranks = {}
    for name in names:
        for line in load(name)["runs"]:
            form = (line.get("contender"), line.get("num_chunks"), line.get("compiled"))
            if line["outcome"] == "done" and form == ("anemoi_gt", 8, True):
                by_ranks.setdefault(line.get("ranks", 1), line)
    one, two, four = (by_ranks[ranks] for ranks in (1, 2, 4))
    return _scaling(
        one["seconds"] / two["seconds"],
        one["seconds"] / four["seconds"],
        two["peak_gb"] / one["peak_gb"],
        four["peak_gb"] / one["peak_gb"],
    )


def _scaling(faster_two: float, faster_four: float, share_two: float, share_four: float) -> str:
    return (
        f"Two GPUs are {faster_two:.2f}x faster than one and need {share_two:.0%} of its memory "
        f"each; four are {faster_four:.2f}x faster and need {share_four:.0%}."
    )


def several_gpus() -> str:
    """Forward and backward of one graph on one, two and four GPUs."""
    name = "sharding_h200x4.json"
    report = load(name)
    by_name = sharding.series(report)
    replayed, eager = by_name["anemoi_gt, CUDA graph"], by_name["anemoi_gt"]
    scaling = _scaling(
        replayed[1]["ms"] / replayed[2]["ms"],
        replayed[1]["ms"] / replayed[4]["ms"],
        eager[2]["peak_gb"] / eager[1]["peak_gb"],
        eager[4]["peak_gb"] / eager[1]["peak_gb"],
    )
    told = f"Replayed from a CUDA graph: {scaling[0].lower()}{scaling[1:]}"
    return (
        f"{_by_gpus(report, 'Forward and backward')}\n\n{sources([FileFacts.of(name)])}\n\n{told}"
    )


def several_gpus_networks() -> str:
    """Return times and memory of a graph network on two GPUs, in sentences."""
    names = ("sharding_gnn_h100x2.json", "sharding_gnn_h200x2.json")
    h100, h200 = (sharding.series(load(name)) for name in names)
    untouched = "anemoi-models, network"
    halo = f"{untouched}, install, halo"
    gathered, exchanged, theirs = (
        h100[name][2] for name in (f"{untouched}, install", halo, untouched)
    )
    return (
        f"A graph network of anemoi-models (O192, 8 layers, 512 channels) takes {theirs['ms']:.1f} "
        f"ms on two H100, {exchanged['ms']:.1f} ms under `install`, in {exchanged['peak_gb']:.1f} "
        f"GB with the halo exchange and {gathered['peak_gb']:.1f} GB with Anemoi's; on two H200, "
        f"{h200[halo][2]['ms']:.1f} ms and, replayed, "
        f"{h200[f'{halo}, CUDA graph'][2]['ms']:.1f} ms (`{names[0]}`, `{names[1]}`)."
    )


def several_gpus_steps() -> str:
    """Training steps with parameters whole and divided among GPUs."""
    name = "sharding_steps_n320_h200x4.json"
    return f"{_by_gpus(load(name), 'N320, 1024 channels')}\n\n{sources([FileFacts.of(name)])}"


def _by_gpus(report: dict, what: str) -> str:
    """Return times and memory of each GPU by the number of GPUs."""
    by_name = sharding.series(report)
    counts = sorted({n for records in by_name.values() for n in records})
    header = [what]
    for n in counts:
        header += [f"{n} GPUs, ms" if n > 1 else "1 GPU, ms", "GB"]
    rows = []
    for name, records in by_name.items():
        row = [name]
        for n in counts:
            record = records.get(n, {})
            gb = record.get("peak_gb")
            row.append(f"{record['ms']:.1f}" if record else EMPTY)
            row.append(EMPTY if gb is None else f"{gb:.1f}")
        rows.append(row)
    return markdown(header, rows)


def pyg_models() -> str:
    """Models of PyTorch Geometric, as they are and with swapped layers."""
    titles = {
        "UnifiedMessagePassing": "unified message passing",
        "TemporalEmbedding": "temporal embedding",
        "TextGraphEncoder": "text and graph encoder",
        "ConditionalProcessor, float32": "weather processor, float32",
        "ConditionalProcessor, bfloat16": "weather processor, bfloat16",
    }
    names = ("pyg_models_h200.json", "pyg_weather_h100.json")
    rows = []
    for name in names:
        facts = FileFacts.of(name)
        for model, line in load(name)["models"].items():
            row = [titles[model], _gpu(facts)]
            for contender in ("pyg", "new graph", "one graph"):
                row += [f"{line[contender]['median_ms']:.1f}", f"{line[contender]['peak_gb']:.1f}"]
            rows.append([*row, _ratio(line["pyg"]["median_ms"], line["one graph"]["median_ms"])])
    header = ["model", "GPU", "PyG, ms", "GB", "new graph each step, ms", "GB"]
    header += ["one graph, ms", "GB", "faster"]
    return _with_sources(header, rows, *names)


def era5_uk() -> str:
    """Scores of the forecasts of era5_uk: the model of two seeds, and baselines."""
    name = "era5_uk_cpu.txt"
    text = (RESULTS / name).read_text()
    runs = re.findall(r"training\.seed=(\d+)\n((?:    .*\n)+)", text)
    line = re.compile(r"^    (\S.*?) {2,}(-?\d+\.\d{4}) +(-?\d+\.\d{4})$", re.MULTILINE)
    rows = {}
    for seed, run in runs:
        for forecast, rmse, bias in line.findall(run):
            title = f"model, seed {seed}" if forecast == "model" else forecast
            rows[title] = [title, f"{float(rmse):.3f}", f"{float(bias):.3f}"]
    del rows["ridge per point, 24 days"]  # the other one knows more days
    ordered = sorted(rows.values(), key=lambda row: float(row[1]))
    return _with_sources(["forecast", "RMSE [K]", "bias [K]"], ordered, name)


def curves() -> str:
    """Distances between loss curves."""
    cases = (
        ("graph transformer", "anemoi_curves_h200.json", "benchmark"),
        ("ensemble of 2", "anemoi_curves_families_h200.json", "ensemble"),
        ("diffusion", "anemoi_curves_families_h200.json", "diffusion"),
    )
    rows = []
    for title, name, case in cases:
        measured = load(name)[case]["16-mixed"]
        apart = max(measured["apart"]["install"].values())
        rows.append([title, f"{apart:.1e}", f"{measured['spread_of_seeds']:.1e}"])
    header = ["model", "`install`, eager", "another seed, untouched"]
    return _with_sources(header, rows, *dict.fromkeys(name for _, name, _ in cases))


def forecasts() -> str:
    """Differences between ten-day forecasts of forms of one model, in a sentence."""
    name = "anemoi_forecasts_h100.json"
    results = load(name)
    last = results["hours"].index(240)
    ours, compiled, error = (
        results["curves"][curve][last]
        for curve in (
            "apart, install and untouched",
            "apart, untouched, compiled whole and untouched",
            "error, untouched",
        )
    )
    return (
        f"After ten days, forecasts with and without `install` differ by {ours:.1e} (RMS over "
        f"normalised fields), those of Anemoi's compiled and eager model by {compiled:.1e}; the "
        f"error of each is {error:.1f} (`{name}`)."
    )


# --------------------------------------------------------------------------- attention


def skewed() -> str:
    """The range of factors on graphs with hubs, in a sentence."""
    lines = {}
    for line in load("skewed_h200.json")["results"]:
        if line["pass"] == "forward_backward" and "median_ms" in line:
            lines.setdefault(line["problem"], {})[line["baseline"]] = line
    pairs = [(by_baseline["pyg"], by_baseline["anemoi_gt"]) for by_baseline in lines.values()]
    times = [pyg["median_ms"] / ours["median_ms"] for pyg, ours in pairs]
    shares = [ours["peak_bytes"] / pyg["peak_bytes"] for pyg, ours in pairs]
    return (
        "On graphs with hubs (a node with one sixth of all edges, or degrees that follow a power "
        f"law), it is {min(times):.0f}-{max(times):.0f}x faster than PyG's `TransformerConv` and "
        f"needs {100 * min(shares):.0f}-{max(shares):.0%} of the memory (`skewed_h200.json`)."
    )


def attention_factors() -> str:
    """The range of factors of encoder, processor and decoder, and of a small graph."""
    lines = {}
    for line in load("n320_h200.json")["results"]:
        lines.setdefault((line["problem"], line["pass"]), {})[line["baseline"]] = line
    pairs = []
    for (problem, kind), by_baseline in lines.items():
        if kind == "forward_backward" and re.fullmatch(r"\w+-n320-c64", problem):
            pairs.append((by_baseline["anemoi_gt"], by_baseline["anemoi"]))
    times = [theirs["median_ms"] / ours["median_ms"] for ours, theirs in pairs]
    shares = [ours["peak_bytes"] / theirs["peak_bytes"] for ours, theirs in pairs]
    ours_ms = table.figure(sum(ours["median_ms"] for ours, _ in pairs))
    theirs_ms = table.figure(sum(theirs["median_ms"] for _, theirs in pairs))
    small = lines["edges1000-c64", "forward_backward"]
    replayed = lines["edges1000-c64", "replay"]
    return (
        f"Forward and backward of the attention are {min(times):.1f}-{max(times):.1f}x faster than "
        f"in anemoi-models and need {100 * min(shares):.0f}-{max(shares):.0%} of the memory "
        f"(encoder, processor and decoder at N320, 64 channels per head; together {ours_ms} ms "
        f"instead of {theirs_ms}). With 1,000 edges, where they are launch-bound, "
        f"they are {_over(small)}x faster, or {_over(replayed)}x with both "
        "replayed from a CUDA graph."
    )


def _over(by_baseline: dict) -> str:
    ratio = by_baseline["anemoi"]["median_ms"] / by_baseline["anemoi_gt"]["median_ms"]
    return f"{ratio:.1f}"


def cpu_batches() -> str:
    """A whole layer on a CPU beside PyG's, on mini-batches of small graphs."""
    name = "cpu_batches.json"
    rows = []
    for batch, line in load(name)["models"].items():
        pyg = line["pyg"]["median_ms"]
        row = [batch, f"{line['edges']:,}", f"{pyg:.2f}"]
        for contender in ("new graph", "one graph"):
            ours = line[contender]["median_ms"]
            row += [f"{ours:.2f}", _ratio(pyg, ours)]
        rows.append(row)
    header = ["mini-batch", "edges", "PyG, ms", "new graph each step, ms", "faster"]
    return _with_sources([*header, "one graph, ms", "faster"], rows, name)


def cpu_model() -> str:
    """A training step of a small Anemoi model on a CPU."""
    name = "families_o32_cpu.json"
    (case,) = load(name)["cases"]
    theirs = case["variants"]["untouched, no recomputation"]["median_ms"]
    ours = case["variants"]["install, no recomputation"]["median_ms"]
    return (
        "A training step of Anemoi's graph transformer (O32, icosphere 4, 64 channels, 2 layers, "
        f"float32) takes {theirs:.0f} ms, under `install` {ours:.0f} ms (`{name}`)."
    )


HOST_BOUND_TASKS = ("step", "one thread", "forecast")  # of host_bound.py


def host_bound() -> str:
    """Steps and forecasts where Python takes the time, launched and replayed."""
    name = HOST_BOUND
    ours = "install, no recomputation"
    forms = {
        "anemoi-models": "untouched, no recomputation",
        "launched": f"{ours}, launched",
        "replayed": ours,
        "step captured": f"{ours}, captured",
    }
    titles = {
        "O96": "graph transformer, O96",
        "gnn": "graph network, O96",
    }
    rows = []
    for case in load(name)["cases"]:
        processes = case["processes"]
        for task in HOST_BOUND_TASKS:
            row = [f"{titles[case['name']]}, {task}", str(len(processes))]
            for variant in forms.values():
                times = [process.get(variant, {}).get(task) for process in processes]
                row.append(table.of_processes(times) if None not in times else EMPTY)
            rows.append(row)
    return _with_sources(["model", "processes", *forms], rows, name)


def accuracy_random() -> str:
    """The largest errors of backend `triton` over random graphs."""
    name = "check_gpu_random_h200.log"
    text = (RESULTS / name).read_text()
    number = sum(int(count) for count in re.findall(r"seed \d+: (\d+) as accurate", text))
    largest = {}
    for dtype, times in re.findall(r"(bfloat16|float16|float32) (\d\.\d\d) \(", text):
        largest[dtype] = max(largest.get(dtype, 0.0), float(times))
    limits = ", ".join(f"{times:.2f} in {dtype}" for dtype, times in sorted(largest.items()))
    facts = FileFacts.of(name)
    return (
        f"Backend `triton`, over {number:,} random graphs ({facts.device}, `{facts.commit}`, "
        f"{facts.date.split()[0]}): the RMS error of every result and gradient, relative to that "
        f"of plain PyTorch, is at most {limits}."
    )


def _gpu(facts: FileFacts) -> str:
    return facts.device.removeprefix("NVIDIA ").split()[0]


TABLES: dict[str, Callable[[], str]] = {
    "readme-training": readme_tables.training_steps,
    "readme-others": readme_tables.other_models,
    "training": overview_table,
    "training-differences": differences,
    "host-bound": host_bound,
    "aifs": partial(family_table, "aifs", "h100", *MODES),
    "aifs-inference": aifs_inference,
    "meshes": mesh_table,
    "training-9km": training_9km,
    "several-gpus": several_gpus,
    "several-gpus-networks": several_gpus_networks,
    "several-gpus-steps": several_gpus_steps,
    "inference": inference,
    "pyg": pyg_models,
    "era5-uk": era5_uk,
    "curves": curves,
    "forecasts": forecasts,
    "attention-factors": attention_factors,
    "attention-skewed": skewed,
    "cpu-batches": cpu_batches,
    "cpu-model": cpu_model,
    "accuracy-random": accuracy_random,
}
