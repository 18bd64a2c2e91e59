"""The chosen tile of each kernel beside all others, measured on this device: whether the choice is as good as a search.

    python benchmarks/tiles.py --output benchmarks/results/tiles_h200.json       encoder, processor, decoder of N320
    python benchmarks/tiles.py --problems decoder-n320-c64 --kernels forward

For each problem, each kernel that serves it and has a choice: all tiles that it can have and that are not predicted to spill are
timed with few launches, then the fastest and the chosen one in turns with many. A tile whose results differ from those of the chosen
one, which is judged by the oracle first, ends the search. What has to be compiled is compiled by several processes before.

On a GPU a tile is timed as up to 10 launches in a CUDA graph, replayed, so that the host has no part in it: milliseconds are those
of one launch, one kernel behind the other, on the same tensors. At N320 the tensors of a kernel are 105 MB and more at C = 64, 126 MB
and more at C = 32, but 63 MB for `project` and `embed` over 40,962 nodes at C = 32. So a launch finds little in an L2 cache of 50 MB
that the last one left, and some in those two cases; it does so whatever the tile is.

Results are written after each search. The verdict: chosen over fastest, at most 1.10 in the geometric mean, at most 1.25 anywhere,
everything searched. Exit status 1 otherwise.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from parts import Parts
from suite import environment, graphs, judge, problems
from suite.operands import Operands, draw
from suite.problems import Problem
from suite.timing import CLOCKS

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # to try the script itself; read by triton when it is imported

from tile_cases import KERNELS, OVER_DESTINATIONS, ROWS, Case, make_case, make_small_case

from anemoi_gt import AttentionConfig, GraphStructure, edge_attention
from anemoi_gt.ops.triton_backend.tiles import BUSY_DEGREE, CONTRACTIONS

MEAN, WORST = 1.10, 1.25  # chosen over fastest
FINALISTS, FEW, MANY, WARM_UP = 3, 2, 20, 1  # tiles; replays
LAUNCHES, SPAN = 10, 2.0  # of a recording at most; milliseconds that a recording need not pass
PROCESSES = 15


def attention(operands: Operands) -> Callable[[], torch.Tensor]:
    """Bind the operation with the chosen tiles, for the judge."""
    o, config = operands, AttentionConfig(backend="triton")
    graph = GraphStructure.from_edge_index(*o.coo).with_reverse()
    edges = (o.edge_attr, o.edge_weight, o.edge_bias)
    return lambda: edge_attention(o.query, o.key, o.value, graph, *edges, config=config)[0]


def compile_part(
    problem: Problem, degree: float, fixed_in_degree: int, kernel: str, device: str, part: int, parts: int
) -> None:
    """Compile every `parts`-th tile of a kernel, which leaves it in Triton's cache on disk."""
    search = make_small_case(problem, degree, device, fixed_in_degree=fixed_in_degree).searches()[kernel]
    for tile in [search.chosen, *search.others][part::parts]:
        try:
            search.run(tile)
        except Exception:  # the search meets it again, and says so
            continue


def to_compile(chosen: list[Problem], kernels: list[str], folder: Path) -> list[tuple]:
    """Problem, mean degree, equal degree or 0, and kernel, of all that compiles to something of its own."""
    found = {}
    for problem in chosen:
        coo = graphs.load(problem.graph, folder)
        (num_src, num_dst), num_edges = coo.sizes, coo.edge_index.shape[1]
        equal = GraphStructure.from_edge_index(*coo).fixed_in_degree
        for kernel in kernels:
            degree = num_edges / (num_src if kernel == "sources" else num_dst)
            fixed_in_degree = equal.shape[0] if equal is not None and kernel in OVER_DESTINATIONS else 0
            busy = kernel in ROWS and degree >= BUSY_DEGREE  # of a mean degree only this is compiled
            alike = replace(problem, name="", group="", graph=None), kernel, busy, fixed_in_degree
            found.setdefault(alike, (problem, degree, fixed_in_degree, kernel))
    return list(found.values())


def compile_all(work: list[tuple], device: str) -> None:
    """Compile in several processes what the search will launch."""
    parts = 5
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_part, *job, device, part, parts) for job in work for part in range(parts)]
        for job in jobs:
            job.result()


def assert_alike(found: tuple, expected: tuple, what: str) -> None:
    """Raise unless two tiles give the same but for rounding: RMS difference at most 4 units of the dtype."""
    for mine, theirs in zip(found, expected, strict=True):
        mine, dtype = mine.nan_to_num(posinf=0.0, neginf=0.0).float(), theirs.dtype  # lse of isolated nodes is -inf
        theirs = theirs.nan_to_num(posinf=0.0, neginf=0.0).float()
        unit = 2.5e-5 if dtype == torch.float32 else torch.finfo(dtype).eps  # float32 ones are sums of 16-bit products
        difference, bound = (
            (mine - theirs).square().mean().sqrt().item(),
            4 * unit * theirs.square().mean().sqrt().item(),
        )
        if not difference <= bound:
            raise AssertionError(f"{what}: differs from the chosen tile by {difference:.2e}, allowed {bound:.2e}")


def medians_ms(clock, calls: list[Callable], launches: int, times: int) -> list[float]:
    """Medians of calls that take turns, each recorded `launches` times in a row; the recordings live no longer than this."""
    recordings = [clock.record(call, launches) for call in calls]
    for replay in recordings * WARM_UP:
        replay()
    measured = clock.times(recordings * times)
    return [statistics.median(measured[place :: len(calls)]) / launches for place in range(len(calls))]


def launches_of(clock, call: Callable) -> int:
    """Launches of a recording: enough to take SPAN, by the time of a call that may wait for the host, so rather too few than too many."""
    return max(1, min(LAUNCHES, math.ceil(SPAN / min(clock.times([call] * 2)))))


def search(case: Case, name: str, kernel: str, clock) -> dict:
    """Measure one kernel on one problem with all tiles."""
    found = case.searches()[kernel]
    expected, times, failed = found.run(found.chosen), {}, {}
    launches = launches_of(clock, partial(found.time, found.chosen))
    for tile in [found.chosen, *found.others]:
        try:
            assert_alike(found.run(tile), expected, f"{name} {kernel} {tile}")
        except AssertionError:
            raise
        except Exception as error:  # does not compile, or takes more than the device has
            failed[str(tile)] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        (times[tile],) = medians_ms(clock, [partial(found.time, tile)], launches, FEW)
    finalists = list(dict.fromkeys([found.chosen, *sorted(times, key=times.get)[:FINALISTS]]))
    medians = medians_ms(clock, [partial(found.time, tile) for tile in finalists], launches, MANY)
    final = dict(zip(finalists, medians, strict=True))
    fastest = min(final, key=final.get)
    return {
        "problem": name, "kernel": kernel, "chosen": vars(found.chosen), "chosen_ms": final[found.chosen],
        "fastest": vars(fastest), "fastest_ms": final[fastest], "ratio": final[found.chosen] / final[fastest],
        "all": [{"tile": vars(tile), "ms": times[tile]} for tile in sorted(times, key=times.get)], "failed": failed,
    }  # fmt: skip


def prepare(problem: Problem, folder: Path, device: str) -> Case:
    """Judge the chosen tiles on a problem, and return it for the search."""
    coo = graphs.load(problem.graph, folder).to(device)
    judge.judge_attention(problem, draw(problem, coo), attention)
    return make_case(problem, coo)


def run(chosen: list[Problem], kernels: list[str], device: str, folder: Path, parts: Parts) -> None:
    """Search everything, one problem after the other, as long as there is time; adds to the results of the report."""
    clock, known = CLOCKS[device], set()
    graphs.build([problem.graph for problem in chosen], folder)
    if device == "cuda":
        compile_all(to_compile(chosen, kernels, folder), device)
    for problem in chosen:
        case = parts.run(problem.name, partial(prepare, problem, folder, device))
        if case is None:
            continue
        for kernel in [kernel for kernel in kernels if _is_new(kernel, case, known)]:
            line = parts.run(f"{problem.name} {kernel}", partial(search, case, problem.name, kernel, clock))
            if line is not None:
                parts.report["results"].append(line)
                show(line)
        del case  # before the next one is made
        clock.free()


def show(line: dict) -> None:
    """Print what a search has found."""
    words = ", ".join(f"{key} {value}" for key, value in line["fastest"].items())
    what = f"{line['problem']} {line['kernel']}"
    print(f"{line['ratio']:.3f} {line['chosen_ms']:.4f} ms {what}; fastest: {words}", flush=True)


def _is_new(kernel: str, case: Case, known: set[tuple]) -> bool:
    """Whether a search is not that of a problem before: contractions know of a graph its destinations alone."""
    sizes = case.problem.sizes
    of = (sizes.heads, sizes.channels, sizes.attributes, sizes.dtype, sizes.destinations)
    graph = () if kernel in CONTRACTIONS else (sizes.num_src, sizes.num_edges, sizes.fixed_in_degree)
    key = (kernel, *of, *graph)
    is_new = key not in known
    known.add(key)
    return is_new


def verdict(results: list[dict], missing: dict[str, str]) -> tuple[bool, str]:
    """Whether the choice is as good as it has to be, everything searched, and the sentence that says so."""
    told = f"; not searched to the end: {', '.join(missing)}" if missing else ""
    if not results:
        return False, f"FAIL: nothing was searched{told}"
    ratios = [line["ratio"] for line in results]
    mean, worst = math.exp(statistics.fmean(map(math.log, ratios))), max(results, key=lambda line: line["ratio"])
    passed = mean <= MEAN and worst["ratio"] <= WORST and not missing
    return passed, (
        f"{'PASS' if passed else 'FAIL'}: chosen over fastest {mean:.3f} in the geometric mean of {len(ratios)} "
        f"(at most {MEAN}), worst {worst['ratio']:.3f} (at most {WORST}): {worst['problem']} {worst['kernel']}{told}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["n320"], help="names or groups of benchmarks/run.py --list")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--seconds", type=float, default=540, help="after which no search begins")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Search what the command line asks for; 1 where the choice is not good enough, or not all was searched."""
    options = parse(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = environment.describe(device, {"torch", "triton"}, options.commit)
    parts = Parts({"environment": where, "verdict": "unfinished", "results": []}, options.output, options.seconds)
    chosen = [problem for problem in problems.select(options.problems) if "forward_backward" in problem.passes]
    with tempfile.TemporaryDirectory() as folder:
        run(chosen, options.kernels, device, Path(folder), parts)
    passed, sentence = verdict(parts.report["results"], parts.problems)
    print(sentence)
    parts.report["verdict"] = sentence
    parts.write()
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
