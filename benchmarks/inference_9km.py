"""Encoder and decoder at 9 km without gradients: time, memory and correctness.

    python benchmarks/inference_9km.py --output benchmarks/results/inference_9km_h200.json
    python benchmarks/inference_9km.py --grid O8 --refinement 2 --channels 32 --heads 4 --fields 5

The defaults are O1280 (6,599,680 points) and icosphere 7, with 1024 channels in 16 heads, 11
attributes and bfloat16, so the features of the grid have 3.1 x 2^31 elements. The encoder is a
forward mapper, the decoder a backward mapper with the three nearest hidden nodes. `anemoi_gt` runs
with the numbers of chunks in `--chunks`. `anemoi`, the mapper of anemoi-models with the same
weights, runs with 1, 2, 4, ... chunks until it fits in memory and is correct.

Results are checked against plain PyTorch in float64, at the first, middle and last destinations and
at those that read the last sources. The error may be twice the error of plain PyTorch in the same
dtype. Each run has a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from suite.command_line import make_parser
from suite.environment import describe
from suite.inference import (
    CONTENDERS,
    PARTS,
    Setting,
    build_graphs,
    checked_destinations,
    compare_with_plain,
    unsupported_reason,
)
from suite.results import Results
from suite.timing import seconds_of

PACKAGES = {"torch", "triton", "torch-geometric", "anemoi-models"}
SIZES = {"grid": "O1280", "refinement": 7, "channels": 1024, "heads": 16}
SIZES |= {"fields": 100, "dtype": "bfloat16", "repeats": 3}


def run(setting: Setting, part: str, contender: str, num_chunks: int, folder: Path) -> dict:
    """Run one part with one contender in this process."""
    on_gpu = setting.device == "cuda"
    problem = setting.problem(part, folder)
    try:
        call = CONTENDERS[contender](problem, num_chunks)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        result = []

        def compute() -> None:
            result.clear()  # as large as the fields of the grid
            result.append(call())

        times = seconds_of(compute, 1 + setting.repeats, setting.device)
    except torch.OutOfMemoryError as error:
        return {"outcome": "out of memory", "message": str(error).split(". ")[0]}
    record = {
        "outcome": "right",
        "seconds": statistics.median(times[1:]),
        "first_seconds": times[0],
    }
    if on_gpu:
        record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        record["inputs_gib"] = problem.nbytes / 2**30
    record |= compare_with_plain(problem, *result, checked_destinations(problem))
    return record


def start(part: str, contender: str, num_chunks: int, folder: Path, seconds: float) -> dict:
    """Run in a separate process; failures and timeouts are recorded as results."""
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--worker",
        part,
        contender,
        str(num_chunks),
        str(folder),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        record = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        record = {"outcome": "out of time", "message": f"did not end within {seconds:.0f} s"}
    except (IndexError, json.JSONDecodeError):
        lines = done.stderr.strip().splitlines()
        message = lines[-1] if lines else f"exit {done.returncode}"
        record = {"outcome": "failed", "message": message}
    record = {"part": part, "contender": contender, "num_chunks": num_chunks} | record
    print(json.dumps(record), flush=True)
    return record


def measure(options: argparse.Namespace, results: Results, folder: Path) -> None:
    """Run anemoi_gt with each number of chunks, and baselines with more until they are correct."""
    runs = results.report["runs"] = []

    def add_run(part: str, contender: str, number: int) -> str | None:
        call = partial(start, part, contender, number, folder, options.limit)
        record = results.run(f"{part}, {contender}, {number} chunks", call)
        if record is None:
            return None
        runs.append(record)
        return record["outcome"]

    for part in options.parts:
        if "anemoi_gt" in options.contenders:
            for number in options.chunks:
                add_run(part, "anemoi_gt", number)
    for part in options.parts:
        for contender in [name for name in options.contenders if name != "anemoi_gt"]:
            reason = unsupported_reason(contender)
            if reason is not None:
                runs.append(
                    {"part": part, "contender": contender, "outcome": "not run", "message": reason}
                )
                continue
            number = 1
            while number <= options.most_chunks:
                outcome = add_run(part, contender, number)
                if outcome in ("right", None):  # None: it failed, or no time is left
                    break
                number *= 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, seconds=500, **SIZES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS)
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 8, 32], help="of anemoi_gt")
    parser.add_argument(
        "--most-chunks",
        type=int,
        default=64,
        help="maximum number of chunks of the other contenders",
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds for one run")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Build the graphs, run the parts one after the other, and write the report."""
    options = parse(arguments)
    setting = Setting(**{name: getattr(options, name) for name in (*SIZES, "device")})
    if options.worker:
        part, contender, number, folder = options.worker
        print(json.dumps(run(setting, part, contender, int(number), Path(folder))))
        return
    report = {
        "environment": describe(options.device, PACKAGES, options.commit),
        "setting": vars(setting),
    }
    results = Results(report, options.output, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        report["graphs"] = build_graphs(setting, options.parts, Path(folder))
        report["graphs"]["seconds"] = time.perf_counter() - begin
        print(json.dumps(report["graphs"]), flush=True)
        measure(options, results, Path(folder))
    results.end()


if __name__ == "__main__":
    main()
