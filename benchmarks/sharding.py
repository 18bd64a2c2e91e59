"""One model on several GPUs: time of forward and backward, memory per GPU, efficiency.

    python benchmarks/sharding.py --ranks 4 --commit HASH --output
    benchmarks/results/sharding_h200x4.json
    python benchmarks/sharding.py --ranks 2 --tiny --output FILE       on a CPU, with gloo
    python benchmarks/sharding.py --table benchmarks/results/sharding_h200x2.json --page
    docs/distributed.md

torchrun starts the ranks, in one job per number of ranks. If a job fails, this is reported, and the
results of its completed tasks are kept. With --alone RANK, a single GPU does the work of one rank,
without communication and without checking results. Parts:

    strong      encoder, processor and decoder on 1, 2, 4, ... ranks, without CUDA graphs
    replay      the same, replayed from a CUDA graph
    compiled    the same, with blocks compiled by Inductor, with and without CUDA graphs
    sizes       smaller grids: weak scaling
    anemoi      the same model in anemoi-models, without CUDA graphs: with its own sharding,
                untouched and under `install`, and with anemoi_gt's halo exchange; on request also
                compiled (not strategy `heads`) and replayed (halo)

    efficiency        t(1) / (n t(n))                          for one graph on n ranks
    share             n memory(n) / memory(1)                  1 if memory scales as 1 / n
    weak efficiency   (t(1) / work(1)) / (t(n) / work(n))      for graphs with equal work per rank
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from suite import ROOT, results
from suite.command_line import make_parser
from suite.environment import describe
from suite.plot import BAR, WIDE, canvas, words
from suite.table import EMPTY, markdown, put_into

PARTS = ("strong", "replay", "compiled", "anemoi", "sizes")
PLOTTED = PARTS[:4]  # the large graph
RANKS = (1, 2, 4, 8)
# O192 on 4 ranks has the same work per rank as O96 on 1
SIZES = (
    ("O96", 5),
    ("O176", 5),
    ("O192", 6),
)
ANEMOI = ("anemoi-models, edges", "anemoi-models, heads", "anemoi-models, edges, install")
HALO = "anemoi-models, edges, install, halo"
TINY = {"grid": "O8", "refinement": 2, "heads": 4, "channels": 4, "layers": 2, "repeats": 2}
TINY_SIZES = (("O4", 1),)
ENDS = 130  # width left for figures behind bars
NEAR = 0.25  # relative: work of a rank that counts as the same


def tasks_of(options: argparse.Namespace, ranks: int) -> list[dict]:
    """Return the tasks of a job with `ranks` ranks."""
    model = {
        "model": "anemoi_gt",
        "grid": options.grid,
        "refinement": options.refinement,
        "compiled": False,
    }
    model |= {name: getattr(options, name) for name in ("heads", "channels", "layers")} | {
        "replayed": False
    }
    every = [{"part": "strong"}, {"part": "replay", "replayed": True}]
    every += [
        {"part": "compiled", "compiled": True, "replayed": replayed} for replayed in (False, True)
    ]
    for name, refinement in TINY_SIZES if options.tiny else SIZES:
        size = {"part": "sizes", "grid": name, "refinement": refinement}
        every += [size, size | {"replayed": True}]
    compiled, replayed = (
        (False, True) if part in options.parts else (False,) for part in ("compiled", "replay")
    )
    # Anemoi's own sharding consists of messages, which a rank alone leaves out
    if ranks == 1 or options.alone is None:
        pairs = [
            (name, c)
            for name in ANEMOI
            for c in compiled
            if "heads" not in name or (ranks > 1 and not c)
        ]
        every += [{"part": "anemoi", "model": name, "compiled": c} for name, c in pairs]
    every += [
        {"part": "anemoi", "model": HALO, "compiled": c, "replayed": r}
        for r in replayed
        for c in compiled
    ]
    asked = [model | task for task in every if task["part"] in options.parts]
    return [task for task in asked if torch.cuda.is_available() or not task["replayed"]]


def run_job(ranks: int, tasks: list[dict], report: dict, options: argparse.Namespace) -> str | None:
    """Run tasks on `ranks` ranks and add their records to the report; return the error, or None."""
    alone = [record for record in report["results"] if record["ranks"] == 1]
    expected = {
        f"{record['model'].partition(',')[0]} {record['grid']} {record['refinement']}": record[
            "signature"
        ]
        for record in reversed(alone)  # the first of a graph is the reference
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = {"tasks": tasks, "repeats": options.repeats, "expected": expected}
        work |= {"ranks": ranks, "alone": options.alone}
        (folder / "work.json").write_text(json.dumps(work))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher = launcher if options.alone is None else []
        command = [sys.executable, *launcher, str(ROOT / "benchmarks" / "sharding_rank.py"), name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
            error = done.stderr[-3000:] if done.returncode else None
        except subprocess.TimeoutExpired:
            error = f"must end within {options.seconds:.0f} s"
        records = folder / "records.jsonl"
        if records.exists():
            report["results"] += [json.loads(line) for line in records.read_text().splitlines()]
    return error


def name_of(record: dict) -> str:
    """Return the name of a record's series."""
    name = graph_of(record) if record["part"] == "sizes" else record["model"]
    return name + ", compiled" * record["compiled"] + ", CUDA graph" * record["replayed"]


def graph_of(record: dict) -> str:
    """Return grid and mesh."""
    return f"{record['grid']}, icosphere {record['refinement']}"


def series(report: dict) -> dict[str, dict[int, dict]]:
    """Return records by name, then by number of ranks."""
    series_by_name = {}
    for record in sorted(report["results"], key=lambda record: PARTS.index(record["part"])):
        series_by_name.setdefault(name_of(record), {})[record["ranks"]] = record
    for name, records in series_by_name.items():  # on one rank, strategies do not differ
        alone = series_by_name.get(name.replace("heads", "edges"), {}).get(1)
        if alone:
            records.setdefault(1, alone)
    return {name: dict(sorted(records.items())) for name, records in series_by_name.items()}


def efficiency(records: dict[int, dict], n: int) -> float | None:
    """Return the efficiency on n ranks, or None if one rank was not measured."""
    return records[1]["ms"] / (n * records[n]["ms"]) if 1 in records and n in records else None


def share(records: dict[int, dict], n: int) -> float | None:
    """Return the total memory of n ranks relative to one rank, or None if not measured."""
    alone, here = (records.get(k, {}).get("peak_gb") for k in (1, n))
    return n * here / alone if alone and here else None


def weak(report: dict) -> list[tuple[dict, dict]]:
    """Pair each pass on one rank with the pass on n ranks that has the nearest work per rank."""
    known = [record for record in report["results"] if "work" in record and not record["compiled"]]
    pairs = []
    for alone in (record for record in known if record["ranks"] == 1):
        for n in sorted({record["ranks"] for record in known} - {1}):
            there = [r for r in known if r["ranks"] == n and r["replayed"] == alone["replayed"]]
            near = min(there, key=lambda r: abs(r["work"] / alone["work"] - 1), default=None)
            if near and abs(near["work"] / alone["work"] - 1) <= NEAR:
                pairs.append((alone, near))
    return pairs


def tables(report: dict) -> str:
    """Return all tables in Markdown."""
    return f"{summary(report)}\n\n{details(report)}"


def summary(report: dict) -> str:
    """Return the environment, times and efficiency."""
    facts, ranks = report["environment"], _ranks(report)
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    where = f"{facts['device']}, {facts['dtype']}, {facts['date'].split()[0]}; {versions}"
    where += f", NCCL {facts['nccl']}."
    times = []
    for name, records in series(report).items():
        row = [name]
        for n in ranks:
            row += [_cell(records.get(n, {}).get("ms"), ".1f")] + [
                _cell(efficiency(records, n), ".3f")
            ] * (n > 1)
        times.append(row)
    columns = [
        word for n in ranks for word in [f"{n} GPU{'s' * (n > 1)}"] + ["efficiency"] * (n > 1)
    ]
    return f"{where}\n\n{markdown(['Forward and backward, ms', *columns], times)}"


def details(report: dict) -> str:
    """Return memory, halo and weak scaling."""
    ranks, memory, parts = _ranks(report), [], []
    several = [n for n in ranks if n > 1]
    for name, records in series(report).items():
        held = [name]
        for n in ranks:
            held += [_cell(records.get(n, {}).get("peak_gb"), ".1f")] + [
                _cell(share(records, n), ".2f")
            ] * (n > 1)
        sent = [records.get(n, {}).get("halo_bytes") for n in several]
        memory += [held + [_cell(size / 1e6 if size else None, ".1f") for size in sent]] * (
            held[1] != EMPTY
        )
    if memory:
        columns = [word for n in ranks for word in [f"GB on {n}"] + ["share"] * (n > 1)]
        parts.append(markdown(["Memory, halo", *columns, *(f"MB on {n}" for n in several)], memory))
    pairs = [
        [name_of(one), graph_of(other), other["ranks"]]
        + [
            f"{record[key] / scale:.1f}"
            for key, scale in (("work", 1e6), ("ms", 1))
            for record in (one, other)
        ]
        + [f"{one['ms'] / one['work'] / (other['ms'] / other['work']):.3f}"]
        for one, other in weak(report)
    ]
    header = [
        "Weak scaling: graph on 1 GPU",
        "graph on n GPUs",
        "n",
        "10^6 edges",
        "per rank",
        "ms on 1",
        "ms on n",
    ]
    return "\n\n".join(parts + [markdown([*header, "efficiency"], pairs)] * bool(pairs))


def _ranks(report: dict) -> list[int]:
    return sorted({n for records in series(report).values() for n in records})


def _cell(value: float | None, form: str) -> str:
    return EMPTY if value is None else format(value, form)


def plot(report: dict) -> str:
    """Return a bar plot of the large graph's times by number of ranks, with ideal scaling."""
    shown = report | {
        "results": [record for record in report["results"] if record["part"] in PLOTTED]
    }
    series_by_name = {
        name: records
        for name, records in series(shown).items()
        if 1 in records and len(records) > 1
    }
    ranks = sorted({n for records in series_by_name.values() for n in records})
    scale = (WIDE - ENDS) / max(
        record["ms"] for records in series_by_name.values() for record in records.values()
    )
    shapes, y = [words(0, 16, "Forward and backward, time in ms", size=15)], 66
    for place, n in enumerate(ranks):
        shapes.append(
            f'<rect class="peer{place}" x="{110 * place}" y="31" width="13" height="13"/>'
        )
        shapes.append(words(110 * place + 19, 42, f"{n} rank{'s' * (n > 1)}", size=14))
    for name, records in series_by_name.items():
        shapes.append(words(0, y + 12, name, size=14))
        y += 20
        for n in records:
            shapes.append(_bar(records, n, ranks.index(n), y, scale))
            y += BAR
        y += 12
    label = "; ".join(
        f"{name}: " + ", ".join(f"{record['ms']:.1f} ms on {n}" for n, record in records.items())
        for name, records in series_by_name.items()
    )
    foot = words(0, y + 8, "in brackets: efficiency; line: ideal scaling", size=14)
    return canvas(WIDE, y + 16, f"Time of forward and backward. {label}", "".join([*shapes, foot]))


def _bar(records: dict[int, dict], n: int, place: int, y: float, scale: float) -> str:
    ms, ideal = records[n]["ms"], scale * records[1]["ms"] / n
    figures = f"{ms:.1f}" + (f" ({efficiency(records, n):.3f})" if n > 1 else "")
    bar = f'<rect class="peer{place}" x="0" y="{y}" width="{scale * ms:.1f}" height="{BAR - 2}"/>'
    bar += words(scale * ms + 7, y + BAR - 5, figures, size=14)
    return bar + (f'<path class="floor" d="M{ideal:.1f},{y - 2}V{y + BAR}"/>' if n > 1 else "")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    sizes = {
        "grid": "N320",
        "refinement": 6,
        "heads": 16,
        "channels": 64,
        "layers": 16,
        "repeats": 10,
    }
    parser = make_parser(__doc__, seconds=600, **sizes)
    parser.add_argument(
        "--ranks", type=int, default=max(torch.cuda.device_count(), 1), help="the most; one a GPU"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--alone",
        type=int,
        metavar="RANK",
        help="of each job this rank by itself: no message is sent",
    )
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument(
        "--table", type=Path, help="results file; make its tables and measure nothing"
    )
    parser.add_argument(
        "--page", type=Path, help="Markdown page with comments that name the file of --table"
    )
    options = parser.parse_args(arguments)
    if options.tiny:
        vars(options).update(TINY)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure or read the results, then write tables; return 1 if a job failed."""
    options, errors = parse(arguments), []
    if options.table:
        report = json.loads(options.table.read_text())
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        facts = describe(device, {"torch", "triton", "anemoi-models"}, options.commit)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None
        facts["dtype"] = "bfloat16 autocast" if device == "cuda" else "float32"
        facts["alone"] = options.alone
        report = {"environment": facts, "errors": errors, "results": []}
        for ranks in (n for n in RANKS if n <= options.ranks):
            error = run_job(ranks, tasks_of(options, ranks), report, options)
            errors += [f"{ranks} ranks: {error}"] * bool(error)
            if options.output:
                results.write(report, options.output)
    print(tables(report), *errors, sep="\n\n")
    if options.page:
        options.page.write_text(
            put_into(options.page.read_text(), options.table.name, summary(report))
        )
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
