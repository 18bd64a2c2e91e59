r"""One model on several GPUs: time of forward and backward, memory per GPU, efficiency.

    python benchmarks/sharding.py --ranks 4 --commit HASH --output \
        benchmarks/results/sharding_h200x4.json
    python benchmarks/sharding.py --ranks 2 --tiny --output FILE       on a CPU, with gloo

torchrun starts the ranks, in one job per number of ranks. If a job fails, this is reported, and the
results of its completed tasks are kept. Parts:

    strong      encoder, processor and decoder on 1, 2, 4, ... ranks, without CUDA graphs
    replay      the same, replayed from a CUDA graph
    compiled    the same, with blocks compiled by Inductor, with and without CUDA graphs
    anemoi      the same model in anemoi-models, without CUDA graphs: with its own sharding,
                untouched and under `install`, and with anemoi_gt's halo exchange; on request also
                compiled (not strategy `heads`) and replayed (halo)
    networks    a graph network of anemoi-models, in the same ways; without strategies
    steps       whole training steps, with AdamW and averages: parameters whole, and divided
                (`shard_parameters`), with and without CUDA graphs

    efficiency        t(1) / (n t(n))                          for one graph on n ranks
    share             n memory(n) / memory(1)                  1 if memory scales as 1 / n
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
from suite import ROOT, results
from suite.command_line import make_parser
from suite.environment import describe
from suite.table import EMPTY, markdown

PARTS = ("strong", "replay", "compiled", "anemoi", "networks", "steps")
RANKS = (1, 2, 4, 8)
ANEMOI = ("anemoi-models, edges", "anemoi-models, heads", "anemoi-models, edges, install")
HALO = "anemoi-models, edges, install, halo"
NETWORKS = ("anemoi-models, network", "anemoi-models, network, install")
HALO_NETWORK = "anemoi-models, network, install, halo"
TINY = {"grid": "O8", "refinement": 2, "heads": 4, "channels": 4, "layers": 2, "repeats": 2}


def tasks_of(options: argparse.Namespace, ranks: int) -> list[dict]:
    """Return the tasks of a job with `ranks` ranks."""
    model = {
        "model": "anemoi_gt",
        "grid": options.grid,
        "refinement": options.refinement,
        "heads": options.heads,
        "channels": options.channels,
        "layers": options.layers,
        "compiled": False,
        "replayed": False,
        "divided": False,
    }
    tasks = [
        {"part": "strong"},
        {"part": "replay", "replayed": True},
        {"part": "compiled", "compiled": True, "replayed": False},
        {"part": "compiled", "compiled": True, "replayed": True},
    ]
    compiled_options = (False, True) if "compiled" in options.parts else (False,)
    replayed_options = (False, True) if "replay" in options.parts else (False,)
    own = {"anemoi": ANEMOI, "networks": NETWORKS}
    halo = {"anemoi": HALO, "networks": HALO_NETWORK}
    for part, name in halo.items():
        for other, compiled in product(own[part], compiled_options):
            # strategy `heads` is measured eager, on several ranks
            if "heads" in other and (ranks == 1 or compiled):
                continue
            tasks.append({"part": part, "model": other, "compiled": compiled})
        for replayed, compiled in product(replayed_options, compiled_options):
            tasks.append({"part": part, "model": name, "compiled": compiled, "replayed": replayed})
    for replayed, divided in product((False, True), (False, True)):
        tasks.append({"part": "steps", "divided": divided, "replayed": replayed})
    selected = [model | task for task in tasks if task["part"] in options.parts]
    return [task for task in selected if torch.cuda.is_available() or not task["replayed"]]


def run_job(ranks: int, tasks: list[dict], report: dict, options: argparse.Namespace) -> str | None:
    """Run tasks on `ranks` ranks and add their records to the report; return the error, or None."""
    expected = {}
    for record in report["results"]:
        if record["ranks"] == 1:
            # the first of a kind of model on a graph is the reference
            expected.setdefault(compared_with(record), record["signature"])
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        work = {
            "tasks": tasks,
            "expected": [expected.get(compared_with(task)) for task in tasks],
            "repeats": options.repeats,
        }
        (folder / "work.json").write_text(json.dumps(work))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        script = str(ROOT / "benchmarks" / "sharding_rank.py")
        command = [sys.executable, *torchrun, script, folder_name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
            error = done.stderr[-10000:] if done.returncode else None
        except subprocess.TimeoutExpired:
            error = f"must end within {options.seconds:.0f} s"
        records = folder / "records.jsonl"
        if records.exists():
            report["results"] += [json.loads(line) for line in records.read_text().splitlines()]
    return error


def compared_with(task: dict) -> tuple:
    """Return what tasks have in common whose losses and gradients must agree."""
    library = task["model"].partition(",")[0]
    return library, task["model"] in (*NETWORKS, HALO_NETWORK), task["grid"], task["refinement"]


def name_of(record: dict) -> str:
    """Return the name of a record's series."""
    name = record["model"]
    if record["part"] == "steps":
        name += ", step, parameters divided" if record["divided"] else ", step"
    if record["compiled"]:
        name += ", compiled"
    if record["replayed"]:
        name += ", CUDA graph"
    return name


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
    if 1 not in records or n not in records:
        return None
    return records[1]["ms"] / (n * records[n]["ms"])


def share(records: dict[int, dict], n: int) -> float | None:
    """Return the total memory of n ranks relative to one rank, or None if not measured."""
    one_rank = records.get(1, {}).get("peak_gb")
    n_ranks = records.get(n, {}).get("peak_gb")
    return n * n_ranks / one_rank if one_rank and n_ranks else None


def tables(report: dict) -> str:
    """Return all tables in Markdown."""
    return f"{times(report)}\n\n{memory(report)}"


def times(report: dict) -> str:
    """Return times and efficiency."""
    ranks = _ranks(report)
    header = ["Forward and backward, ms"]
    for n in ranks:
        header += ["1 GPU"] if n == 1 else [f"{n} GPUs", "efficiency"]
    rows = []
    for name, records in series(report).items():
        row = [name]
        for n in ranks:
            row.append(_cell(records.get(n, {}).get("ms"), ".1f"))
            if n > 1:
                row.append(_cell(efficiency(records, n), ".3f"))
        rows.append(row)
    return markdown(header, rows)


def memory(report: dict) -> str:
    """Return memory and halo of the tasks whose memory was measured."""
    ranks = _ranks(report)
    several = [n for n in ranks if n > 1]
    header = ["Memory, halo"]
    for n in ranks:
        header += ["GB on 1"] if n == 1 else [f"GB on {n}", "share"]
    header += [f"MB on {n}" for n in several]
    rows = []
    for name, records in series(report).items():
        row = [name]
        for n in ranks:
            row.append(_cell(records.get(n, {}).get("peak_gb"), ".1f"))
            if n > 1:
                row.append(_cell(share(records, n), ".2f"))
        for n in several:
            halo_bytes = records.get(n, {}).get("halo_bytes")
            row.append(_cell(halo_bytes / 1e6 if halo_bytes else None, ".1f"))
        if row[1] != EMPTY:
            rows.append(row)
    return markdown(header, rows) if rows else ""


def _ranks(report: dict) -> list[int]:
    return sorted({n for records in series(report).values() for n in records})


def _cell(value: float | None, form: str) -> str:
    return EMPTY if value is None else format(value, form)


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
        "--ranks",
        type=int,
        default=max(torch.cuda.device_count(), 1),
        help="maximum number of ranks, one per GPU",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    options = parser.parse_args(arguments)
    if options.tiny:
        vars(options).update(TINY)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, then print tables; return 1 if a job failed."""
    options = parse(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = describe(device, {"torch", "triton", "anemoi-models"}, options.commit)
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None
    facts["dtype"] = "bfloat16 autocast" if device == "cuda" else "float32"
    errors = []
    report = {"environment": facts, "errors": errors, "results": []}
    for ranks in (n for n in RANKS if n <= options.ranks):
        error = run_job(ranks, tasks_of(options, ranks), report, options)
        if error:
            errors.append(f"{ranks} ranks: {error}")
        if options.output:
            results.write(report, options.output)
    print(tables(report), *errors, sep="\n\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
