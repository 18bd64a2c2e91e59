"""One model on several GPUs: does it compute the same, how much faster is it, how much less memory does a GPU need.

    python benchmarks/sharding.py --ranks 4 --commit HASH --out benchmarks/results/sharding_h200x4.json
    python benchmarks/sharding.py --ranks 2 --tiny --out FILE       on a CPU, with gloo: everything but NCCL and CUDA graphs
    python benchmarks/sharding.py --ranks 4 --hosts 2 --parts checks       four ranks on two GPUs, which talk as those of two hosts

A job is processes that belong together, with a limit of time: one for the checks, for each number of ranks one for our model, whose tasks
run one after the other, and one for anemoi-models. A job that fails is reported with the task that it was at; what its earlier tasks found is kept,
and the other jobs go on until the time of all is up. Results are written after each job, the picture (SVG, beside the results, for light
and dark ground) at the end.

    checks      the tests' checks on these ranks
    strong      forward + backward of encoder, processor, decoder on 1, 2, 4 ranks, each way of attending, with overlap and without
    replay      the same captured in a CUDA graph, which leaves the host nothing to do
    exchange    messages of several sizes alone, launched and replayed
    sizes       smaller grids on every number of ranks, launched and replayed: weak scaling, and what the cost model is fitted to
    compiled    the same model with its blocks compiled by Inductor, launched and replayed
    anemoi      the same model of anemoi-models with its own sharding, and with our attention in it

Nothing is timed before its loss and gradients agree with one rank's.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "src", "tests")]

from sharded_model import Case, weather_graph  # noqa: E402
from sharding_records import drawn  # noqa: E402
from sharding_report import draw, summary  # noqa: E402
from suite.environment import describe  # noqa: E402

PARTS = ("checks", "strong", "replay", "exchange", "sizes", "compiled", "anemoi")
CHECKS = ("checks_shard", "checks_attention", "checks_training", "checks_model", "checks_trainer", "checks_cuda_graph")
RANKS = (1, 2, 4, 8)
WAYS = ("after_exchange",)
REPLAYED = WAYS[:2]
ANEMOI = (("edges", "theirs"), ("heads", "theirs"), ("edges", "ours"))  # its strategy, and whose attention
# O192 on 4 ranks is as much work for each as O96 on 1, and N320 as much as O176.
SIZES = (("O96", 5), ("O176", 5), ("O192", 6))
TINY = {"grid": "O8", "refinement": 2, "heads": 4, "channels": 4, "layers": 2, "repeats": 2}
TINY_SIZES = (("O4", 1),)
GRACE = 5.0  # s, for the other ranks to end when one has failed


class Job(NamedTuple):
    """Processes that belong together."""

    name: str
    script: str  # beside this file; "" are checks
    ranks: int
    tasks: list[dict]  # what the ranks read


def jobs(options: argparse.Namespace, replays: bool) -> list[Job]:
    """Everything that was asked for, in the order in which it runs; with replays where there are CUDA graphs."""
    counts = [n for n in RANKS if n <= options.ranks]
    every = [Job("checks", "", options.ranks, [])] if "checks" in options.parts and options.ranks > 1 else []
    every += [Job(f"models on {n}", "sharding_rank.py", n, tasks(options, n, replays)) for n in counts]
    if "anemoi" in options.parts:
        ends = sorted({counts[0], counts[-1]})
        every += [Job(f"anemoi on {n}", "sharding_anemoi.py", n, anemoi_tasks(options, n)) for n in ends]
    return [job for job in every if job.tasks or not job.script]


def tasks(options: argparse.Namespace, ranks: int, replays: bool) -> list[dict]:
    """What so many ranks do with our model; neighbours that differ in nothing but `replayed` share one."""
    every = []
    for way in WAYS if ranks > 1 else WAYS[:1]:
        every.append(_task(options, "strong", ranks, way))
        every += [_task(options, "replay", ranks, way, replayed=True)] * (way in REPLAYED)
    if ranks > 1:
        message = {"part": "exchange", "width": options.heads * options.channels, "layers": options.layers}
        every.append(message | {"name": "exchange", "replayed": False})
        every.append(message | {"name": "exchange, replayed", "replayed": True})
    for grid in TINY_SIZES if options.tiny else SIZES:
        every += [_task(options, "sizes", ranks, WAYS[0], grid, replayed=replayed) for replayed in (False, True)]
    every += [
        _task(options, "compiled", ranks, WAYS[0], replayed=replayed, compiled=True) for replayed in (False, True)
    ]
    return [task for task in every if task["part"] in options.parts and (replays or not task["replayed"])]


def anemoi_tasks(options: argparse.Namespace, ranks: int) -> list[dict]:
    """What so many ranks do with the model of anemoi-models."""
    asked = [(strategy, who) for strategy, who in ANEMOI if ranks > 1 or strategy == "edges"]
    every = [_task(options, "anemoi", ranks, strategy) | {"who": who} for strategy, who in asked]
    return [task | {"name": f"{task['name']}, {task['who']}"} for task in every]


def _task(
    options: argparse.Namespace,
    part: str,
    ranks: int,
    way: str,
    grid: tuple[str, int] | None = None,
    replayed: bool = False,
    compiled: bool = False,
) -> dict:
    """One case of a part, of the large grid unless another is given."""
    shape = {name: getattr(options, name) for name in ("heads", "channels", "layers")}
    case = Case(*(grid or (options.grid, options.refinement)), **shape, ranks=ranks, way=way, compiled=compiled)
    name = f"{part} {way} {case.graph}" + ", replayed" * replayed
    return {"part": part, "name": name, "replayed": replayed, "case": asdict(case)}


class Bench:
    """The jobs of one call, and what has come of them.

    Parameters
    ----------
    options : argparse.Namespace
        What the command line says.
    folder : Path
        For graphs, and what ranks write.
    """

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.deadline = time.monotonic() + options.seconds
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.report = {
            "environment": describe(device, {"torch", "triton", "anemoi-models"}, options.commit)
            | {
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None,
                "dtype": "bfloat16 autocast" if device == "cuda" else "float32",
            },
            "ranks": options.ranks,
            "jobs": [],
            "results": [],
        }

    def run(self, job: Job) -> None:
        """Run a job and keep what it found; its failure is a line of the report, with the task that it was at."""
        begin = time.monotonic()
        seconds = min(self.options.limit, self.deadline - begin)
        if seconds <= 0:
            problem, records = "not run: no time was left", []
        else:
            try:
                problem, records = (self._models if job.script else self._checks)(job, seconds)
            except Exception as error:  # a part that fails is reported, the others go on
                problem, records = f"{type(error).__name__}: {error}", []
        took = time.monotonic() - begin
        self.report["jobs"].append(
            {"name": job.name, "seconds": round(took, 1), "problem": problem, "found": len(records)}
        )
        self.report["results"] += [{"job": job.name} | record for record in records]
        print(f"{took:6.1f} s  {job.name}: {'done' if problem is None else problem}", flush=True)
        self.write()

    def write(self) -> None:
        """Write what there is."""
        if self.options.out:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.options.out.write_text(json.dumps(self.report, indent=1) + "\n")

    def _models(self, job: Job, seconds: float) -> tuple[str | None, list[dict]]:
        work = {"tasks": job.tasks, "repeats": self.options.repeats, "seconds": seconds, "expected": self._signatures()}
        cases = [Case(**task["case"]) for task in job.tasks if "case" in task]
        work["graphs"] = {case.graph: str(self._graph(case)) for case in cases}
        place = Path(tempfile.mkdtemp(dir=self.folder))
        (place / "work.json").write_text(json.dumps(work))
        problem = launch([ROOT / "benchmarks" / job.script, place], job.ranks, place, seconds)
        doing, found = place / "doing", place / "records.jsonl"
        if problem and doing.exists():
            problem = f"in {doing.read_text()}: {problem}"
        return problem, [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []

    def _graph(self, case: Case) -> Path:
        """The file of a case's graph, made once."""
        path = self.folder / f"{case.graph}.pt"
        if not path.exists():
            torch.save(weather_graph(case), path)
        return path

    def _signatures(self) -> dict[str, list[float]]:
        """Loss and lengths of gradients of one rank, by graph."""
        alone = [record for record in self.report["results"] if record.get("ranks") == 1 and "signature" in record]
        prefix = {"anemoi": "anemoi "}
        return {
            f"{prefix.get(record['part'], '')}{record['grid']}-{record['refinement']}": record["signature"]
            for record in reversed(alone)  # the first of a graph is the reference
        }

    def _checks(self, job: Job, seconds: float) -> tuple[str | None, list[dict]]:
        from distributed.ranks import found, spawn_checks

        folder = self.folder / "checks"
        ended = spawn_checks(CHECKS, job.ranks, folder, seconds, self.options.hosts)
        wrong, records = {}, []
        for module in CHECKS:
            said = found(f"distributed.{module}", folder / module, ended)
            problems = {check: problem for check, problem in said.items() if problem}
            wrong |= problems
            records.append({"part": "checks", "name": module, "checks": len(said), "hold": len(said) - len(problems)})
        return (f"wrong: {wrong}" if wrong else None), records


def launch(arguments: list, ranks: int, place: Path, seconds: float) -> str | None:
    """Run `python *arguments` on so many ranks; what went wrong, or None. All end when one fails, or the time is up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    logs = [place / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            variables = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as output:
                command = [sys.executable, *map(str, arguments)]
                processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed:
                end = min(end, time.monotonic() + GRACE)
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not failed and not late:
        return None
    rank = (failed or late)[0]
    what = f"failed with {processes[rank].returncode}" if failed else f"did not end within {seconds:.0f} s"
    return f"rank {rank} {what}: {logs[rank].read_text()[-1500:]}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(torch.cuda.device_count(), 1), help="the most; one a GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--hosts", type=int, default=1, help="told to the checks: ranks of several may share the GPUs of this one"
    )
    parser.add_argument("--grid", default="N320")
    parser.add_argument("--refinement", type=int, default=6)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--channels", type=int, default=64, help="of each head")
    parser.add_argument("--layers", type=int, default=16, help="of the processor")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--seconds", type=float, default=900, help="for everything")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one job")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    options = parser.parse_args(arguments)
    if options.tiny:
        vars(options).update(TINY)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 if any job failed."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for job in jobs(options, replays=torch.cuda.is_available()):
            bench.run(job)
    print(summary(bench.report))
    if options.out and drawn(bench.report):
        draw(bench.report, options.out.with_suffix(".svg"))
    return int(any(job["problem"] for job in bench.report["jobs"]))


if __name__ == "__main__":
    sys.exit(main())
