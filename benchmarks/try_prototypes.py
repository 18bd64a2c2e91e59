"""The prototypes beside the package's kernels, kernel by kernel, on a decoder: N320 points of 3 edges each, icosphere 6.

PYTHONPATH=src python benchmarks/try_prototypes.py                the whole trial, a minute on a GPU
PYTHONPATH=src python benchmarks/try_prototypes.py --grid O32 --refinement 4
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from prototypes.equal_degree_launch import take_over
from suite import judge, operands
from suite.graphs import Coo, sort_edges
from suite.peers import ours
from suite.problems import Problem, Weather

from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.graph.order import morton_order
from anemoi_gt.ops.triton_backend import launch, op

ROUNDS = 20
ORIGINAL = launch.attend_rows, op._gradients


def restore() -> None:
    """Use the package's kernels again."""
    launch.attend_rows, op._gradients = ORIGINAL


VARIANTS: dict[str, Callable[[], None]] = {
    "package": restore,
    **{f"prototype, {f} and {b} warps": partial(take_over, f, b) for f, b in ((1, 1), (2, 2), (1, 2))},
}


def decoder(name: str, refinement: int, device: str, *, ordered: bool) -> Coo:
    """Edges of a decoder, by destination; with its sources numbered along a space-filling curve where `ordered`."""
    graph = icosphere_graph(grid(name), refinement=refinement)
    edges = graph["hidden", "to", "data"].edge_index
    sizes = graph["hidden"].num_nodes, graph["data"].num_nodes
    if ordered:
        place = torch.empty(sizes[0], dtype=torch.int64)
        place[morton_order(graph["hidden"].x)] = torch.arange(sizes[0])
        edges = torch.stack([place[edges[0]], edges[1]])
    return sort_edges(edges, sizes).to(device)


def kernel_times(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of each kernel in one step."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(ROUNDS):
            step()
        torch.cuda.synchronize()
    times = defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / 1e3 / ROUNDS
    return dict(times)


def try_variant(problem: Problem, coo: Coo, timed: bool) -> None:
    """Judge a decoder with the kernels in use, then time and print its kernels."""
    drawn = operands.draw(problem, coo)
    judge.judge_attention(problem, drawn, ours.attention)
    if not timed:
        return
    call = ours.attention(drawn)
    times = kernel_times(lambda: torch.autograd.grad(call(), drawn.leaves, drawn.grad_out))
    for name, time in sorted(times.items(), key=lambda item: -item[1])[:11]:
        print(f"    {time:7.3f}  {name[:90]}")
    print(f"    {sum(times.values()):7.3f}  all kernels", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="N320")
    parser.add_argument("--refinement", type=int, default=6)
    parser.add_argument("--channels", type=int, nargs="+", default=[64, 32])
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    graphs = {
        ordered: decoder(options.grid, options.refinement, "cuda" if gpu else "cpu", ordered=ordered)
        for ordered in (False, True)
    }
    for channels in options.channels:
        problem = Problem(
            "decoder", "trial", Weather("decoder", options.grid, options.refinement), channels=channels, heads=16
        )
        for ordered, coo in graphs.items():
            for name, use in VARIANTS.items():
                if not ordered or name == "package":
                    use()
                    print(f"C = {channels}, {name}{', sources along a curve' if ordered else ''}", flush=True)
                    try_variant(problem, coo, timed=gpu)
    restore()


if __name__ == "__main__":
    main()
