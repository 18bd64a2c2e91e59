"""What our kernels move and how fast, from the times of a results file: where the bytes are that the floor does not have.

    python benchmarks/traffic.py benchmarks/results/n320_h200.json
    python benchmarks/traffic.py benchmarks/results/n320_h200.json --tiles benchmarks/results/tiles_h200.json

    moved      sum over launches of a pass of their tensors, each read or written once: rows that are fetched again are not in it
    floor      what no implementation can do without (suite/floor.py)
    achieved   moved / time

A pass that moves at the speed of a copy can only become faster by moving less; one far below it waits for something else. With
the times of benchmarks/tiles.py, the same for each kernel alone. Needs no GPU.
"""

import argparse
import json
from pathlib import Path

import torch
from suite.problems import ATTENTION, GRADIENTS
from suite.table import figure

from anemoi_gt.ops.triton_backend import launch_plan
from anemoi_gt.ops.triton_backend.problem import Sizes

KERNELS = {  # part of a kernel's name: what benchmarks/tiles.py calls it
    "project": "project",
    "embed": "embed",
    "bwd_weight": "weight",
    "bwd_attributes": "attributes",
    "bwd_src": "sources",
    "bwd_dst": "destinations",
    "fwd": "forward",
}


def launches(facts: dict, kind: str) -> list[launch_plan.Planned]:
    """Launches of a pass of a problem, as the results file tells of it."""
    num_src, num_dst, num_edges = facts["sizes"]
    # each point of the data grid reads as many hidden nodes
    degree = num_edges // num_dst if facts["graph"].startswith("decoder") else 0
    sizes = Sizes(
        batch=facts["batch"], num_dst=num_dst, num_src=num_src, num_edges=num_edges, heads=facts["heads"],
        channels=facts["channels"], edge_dim=facts["edge_dim"], bias=1, embedded=False, attr_stride=0,
        dtype=getattr(torch, facts["dtype"]), needs_int64=False, scale=facts["channels"] ** -0.5, dropout_p=0.0, fixed_in_degree=degree,
    )  # fmt: skip
    needs = launch_plan.Needs(**{name: name in facts["gradients"] for name in GRADIENTS})
    backward = [] if kind == "forward" else launch_plan.backward_kernels(sizes, needs)
    return [*launch_plan.forward_kernels(sizes), *backward]


def of_passes(results: dict) -> str:
    """Bytes and speed of each pass of attention that was timed."""
    speed = max(results["environment"]["copy_bytes_per_second"])
    lines = ["| | moved, GB | over the floor | at the speed of a copy, ms | ms | achieved, TB/s | of the copy |"]
    for line in results["results"]:
        facts, kind = results["problems"][line["problem"]], line["pass"]
        if line["peer"] != "ours" or kind not in ATTENTION or "median_ms" not in line:
            continue
        moved, seconds = sum(launch.bytes for launch in launches(facts, kind)), 1e-3 * line["median_ms"]
        lines.append(
            f"| `{line['problem']}`, {kind.replace('_', ' + ')} | {moved / 1e9:.3g} | {moved / facts['bytes'][kind]:.2f} "
            f"| {figure(1e3 * moved / speed)} | {figure(line['median_ms'])} | {moved / seconds / 1e12:.2f} | {moved / seconds / speed:.0%} |"
        )
    return _table(lines)


def of_kernels(results: dict, tiles: dict) -> str:
    """Bytes and speed of each kernel with the tile that is chosen for it."""
    speed = max(results["environment"]["copy_bytes_per_second"])
    lines = ["| | moved, GB | ms | achieved, TB/s | of the copy |"]
    for line in tiles["results"]:
        if line["problem"] not in results["problems"]:
            continue
        planned = launches(results["problems"][line["problem"]], "forward_backward")
        moved = next(launch.bytes for launch in planned if kernel_of(launch.name) == line["kernel"])
        rate = moved / (1e-3 * line["chosen_ms"])
        lines.append(
            f"| `{line['problem']}`, {line['kernel']} | {moved / 1e9:.3g} | {figure(line['chosen_ms'])} "
            f"| {rate / 1e12:.2f} | {rate / speed:.0%} |"
        )
    return _table(lines)


def kernel_of(name: str) -> str:
    """What benchmarks/tiles.py calls a kernel."""
    return next(word for part, word in KERNELS.items() if part in name)


def _table(lines: list[str]) -> str:
    """Markdown, from the lines of a table without the one below its head."""
    head, *rest = lines
    return "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *rest])


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what benchmarks/run.py wrote on a GPU")
    parser.add_argument("--tiles", type=Path, help="what benchmarks/tiles.py wrote there")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    print(of_passes(results))
    if options.tiles:
        print()
        print(of_kernels(results, json.loads(options.tiles.read_text())))


if __name__ == "__main__":
    main()
