r"""Training steps at 9 km on one GPU, with Anemoi's own model: correctness, time, peak memory.

    python benchmarks/train_9km.py --output benchmarks/results/train_9km_h200.json
    python benchmarks/train_9km.py --grid O4 --refinement 1 --channels 32 --heads 2 --layers 2 \
        --fields 8 3 --device cpu

The defaults are O1280 (6,599,680 points) and icosphere 7, with 1024 channels in 16 heads, 16
processor layers, 200 fields in and 90 out, bf16-mixed, and one sample. A step of anemoi_gt is a
step of the application: forward, backward, clipping, AdamW and weight averaging. A step of
anemoi-models is forward, backward and AdamW.

The parts run in this order, each in a process of its own. `check_model` compares loss and all
gradients on `--check-grid` with float32 in many chunks. `check_mappers` compares rows and gradients
of some destinations of the large grid with float64. `ours`, `anemoi` and `install` (Anemoi's model
with fused blocks) time steps. Errors are judged by the errors of plain PyTorch in the same
precision. `sharded`, only on request, trains one model on `--ranks` GPUs: it compares loss and all
gradients with one GPU, then times steps.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from suite.command_line import make_parser
from suite.environment import describe
from suite.results import Results
from suite.training import WORKERS

PACKAGES = {"torch", "triton", "torch-geometric", "anemoi-models"}
PARTS = {"encoder": ("data", "hidden"), "decoder": ("hidden", "data")}  # source, destination


def write_graphs(options: argparse.Namespace, folder: Path) -> dict:
    """Write the graphs of both grids, and encoder and decoder of the large one; return sizes."""
    from anemoi_gt.data.graphs import icosphere_graph
    from anemoi_gt.data.grids import grid

    begin = time.perf_counter()
    small = icosphere_graph(grid(options.check_grid), refinement=options.check_refinement)
    torch.save(small, folder / "check.graph")
    graph = icosphere_graph(grid(options.grid), refinement=options.refinement)
    torch.save(graph, folder / "9km.graph")
    for part, (source, destination) in PARTS.items():
        edges = graph[source, "to", destination]
        sizes = graph[source].num_nodes, graph[destination].num_nodes
        attributes = torch.cat([edges.edge_length, edges.edge_dirs], dim=1)
        torch.save((edges.edge_index, attributes, sizes), folder / f"{part}.graph")
    sizes = {str(kind): graph[kind].num_edges for kind in graph.edge_types}
    sizes |= {name: graph[name].num_nodes for name in graph.node_types}
    return sizes | {"seconds": time.perf_counter() - begin}


def start(part: str, options: argparse.Namespace, results: Results, folder: Path) -> None:
    """Run a part in its own process and record its results; raise RuntimeError if it fails."""
    lines = folder / f"{part}.jsonl"
    errors = folder / f"{part}.err"
    with lines.open("w") as out, errors.open("w") as err:
        launcher: tuple[str, ...] = ()
        if part == "sharded":
            torchrun = ("-m", "torch.distributed.run", "--standalone")
            launcher = (*torchrun, f"--nproc-per-node={options.ranks}")
        command = [
            sys.executable,
            *launcher,
            __file__,
            *options.arguments,
            "--worker",
            part,
            str(folder),
        ]
        process = subprocess.Popen(command, stdout=out, stderr=err)
        try:
            status = process.wait(timeout=options.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = f"not ended within {options.limit:.0f} s"
    for line in lines.read_text().splitlines():
        if line.startswith("{"):
            results.report["runs"].append(json.loads(line))
            print(line[:400], flush=True)
    results.write()
    if status != 0:
        raise RuntimeError(f"{status}: {errors.read_text()[-1500:]}")


def table(runs: list[dict]) -> str:
    """Return the runs as a short table."""
    rows = []
    for run in runs:
        name = run.get("check") or run["contender"]
        values = []
        for key, unit in COLUMNS.items():
            if isinstance(run.get(key), float):
                values.append(f"{run[key]:.4g} {unit}")
        options = f"{run.get('num_chunks', '')} chunks"
        if run.get("compiled"):
            options += ", compiled"
        if "ranks" in run:
            options += f", {run['ranks']} ranks"
        message = run.get("message", "")[:60]
        rows.append(f"{name:22} {options:20} {run['outcome']:14} {', '.join(values)} {message}")
    return "\n".join(rows)


COLUMNS = {
    "seconds": "s",
    "warmup_seconds": "s warm-up",
    "peak_gb": "GB",
    "total_ms": "ms of kernels",
    "off": "off",
    "off_of_plain": "off plain",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    sizes = {"grid": "O1280", "refinement": 7, "check_grid": "O320", "check_refinement": 6}
    sizes |= {"channels": 1024, "heads": 16, "layers": 16, "precision": "bf16-mixed"}
    parser = make_parser(__doc__, seconds=500, warmup=2, steps=3, **sizes)
    parser.add_argument(
        "--fields", type=int, nargs=2, default=[200, 90], help="input and output fields at a point"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=WORKERS,
        default=[part for part in WORKERS if part != "sharded"],
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="ranks that share the model, for the part `sharded`"
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 8, 4], help="of anemoi_gt")
    parser.add_argument("--anemoi-chunks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument(
        "--check-chunks", type=json.loads, default=[[2, 8], [5, 8]], help="of encoder and decoder"
    )
    parser.add_argument(
        "--compiled", type=int, nargs="+", default=[0, 1], help="0: eager, 1: blocks compiled"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds for one part")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments, argparse.Namespace(arguments=arguments))


def main(arguments: list[str] | None = None) -> None:
    """Build the graphs, run the parts one after the other, and write the report."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.worker:
        for record in WORKERS[options.worker[0]](options, Path(options.worker[1])):
            print(json.dumps(record), flush=True)
        return
    sizes = {
        key: value
        for key, value in vars(options).items()
        if key not in ("output", "worker", "arguments")
    }
    report = {
        "environment": describe(options.device, PACKAGES, options.commit),
        "setting": sizes,
        "runs": [],
    }
    results = Results(report, options.output, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        report["graph"] = write_graphs(options, Path(folder))
        print(json.dumps(report["graph"]), flush=True)
        for part in options.parts:
            results.run(part, partial(start, part, options, results, Path(folder)))
    print(table(report["runs"]))
    results.end()


if __name__ == "__main__":
    main()
