"""One model on several GPUs: a forward and backward pass of encoder, processor and decoder, strong and weak scaling.

    torchrun --nproc-per-node=4 benchmarks/sharding.py --out benchmarks/results/sharding_h200.json --commit HASH
    torchrun --nproc-per-node=2 benchmarks/sharding.py --tiny         on a CPU, with gloo: does it run

Every case is run on the first n ranks; the others wait. Nothing is timed before its loss and gradients agree with one rank's. Times are
medians, over repetitions, of the slowest rank; memory is the largest peak of a rank; bytes are those that leave the busiest rank, in all
layers, forward and backward. `--checks` first runs the tests' checks on these ranks.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from sharded_model import WAYS, Case, ShardedModel, weather_graph
from suite.environment import describe

ROOT = Path(__file__).parents[1]
AGREE = {"cuda": 3e-2, "cpu": 1e-4}  # relative, of loss and gradients: bfloat16 on a GPU, float32 on a CPU
RANKS = (1, 2, 4)
CHECKS = ("checks_shard", "checks_attention", "checks_training", "checks_model")


class World:
    """The ranks of this run, and the groups of the first n of them."""

    def __init__(self):
        local = int(os.environ["LOCAL_RANK"])
        self.gpu = torch.cuda.device_count() > local
        self.device = torch.device("cuda", local) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.gpu else "gloo", device_id=self.device if self.gpu else None)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        sizes = [n for n in RANKS if n <= self.size]
        self.meshes = {n: self._mesh(n) for n in sizes}
        self.groups = {n: mesh.get_group("model") for n, mesh in self.meshes.items() if self.rank < n}

    def _mesh(self, ranks: int) -> DeviceMesh:
        return DeviceMesh(self.device.type, [list(range(ranks))], mesh_dim_names=("data", "model"))

    def wait(self) -> None:
        """Until the device is done."""
        if self.gpu:
            torch.cuda.synchronize()

    def largest(self, values: list[float], ranks: int) -> list[float]:
        """The largest of each value over the first ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.groups[ranks])
        return tensor.tolist()


class Run:
    """One case on this rank: the model, its rows, and a pass."""

    def __init__(self, case: Case, graph, world: World):
        self.case, self.world = case, world
        self.part = ShardedModel(case, graph, world.meshes[case.ranks], world.device)

    def step(self) -> torch.Tensor:
        """Forward and backward, in bfloat16 where there is a GPU."""
        return self.part.step(torch.autocast("cuda", dtype=torch.bfloat16) if self.world.gpu else nullcontext())

    def signature(self) -> list[float]:
        """Loss and lengths of gradients of the whole run, to compare."""
        loss, group = self.step().double(), self.world.groups[self.case.ranks]
        dist.all_reduce(loss, group=group)
        values = [loss.item()]
        for gradient in self.part.judged():
            gradient = gradient.double()
            dist.all_reduce(gradient, group=group)
            values.append(gradient.norm().item())
        return values

    def traffic(self) -> dict:
        """Rows of the halo that this rank sends and reads, and bytes that leave it in a pass, forward and backward."""
        shards = self.part.graphs()
        halos = {step: shard.halo for step, shard in shards.items() if hasattr(shard, "halo")}
        passes = {"encoder": 1, "processor": self.case.layers, "decoder": 1}
        row = self.case.width * (2 if self.world.gpu else 4)
        rows = {step: (halo.num_sent, halo.num_received) for step, halo in halos.items()}
        owned = {step: shard.destinations.ranges.counts for step, shard in shards.items()}
        return {
            "halo_rows": rows,
            "halo_bytes": sum(passes[step] * sum(both) * row for step, both in rows.items()),
            "owned": owned,
        }

    def measure(self, repeats: int) -> dict:
        """Times of the slowest rank in ms, and the largest peak of memory in GB."""
        for _ in range(2):
            self.step()
        if self.world.gpu:
            torch.cuda.reset_peak_memory_stats()
        times = self._times(self.step, repeats)
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.world.gpu else 0.0
        (memory,) = self.world.largest([peak], self.case.ranks)
        return {"ms": statistics.median(times), "ms_all": times, "peak_gb": memory}

    def replay(self, repeats: int) -> dict:
        """The same captured in a CUDA graph, which leaves the host nothing to do."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # as PyTorch asks for before a capture
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            self.step()
        return {"replay_ms": statistics.median(self._times(captured.replay, repeats))}

    def _times(self, call: Callable, repeats: int) -> list[float]:
        group, times = self.world.groups[self.case.ranks], []
        for _ in range(repeats):
            self.world.wait()
            dist.barrier(group)
            begin = time.perf_counter()
            call()
            self.world.wait()
            times.append(1e3 * (time.perf_counter() - begin))
        return self.world.largest(times, self.case.ranks)


def cases(options: argparse.Namespace, world_size: int) -> list[Case]:
    """Strong scaling of every way; weak scaling of the first: a quarter of the points of N320 on 1 rank, N320 on 4."""
    sizes = [n for n in RANKS if n <= world_size]
    shape = {"heads": options.heads, "channels": options.channels, "layers": options.layers}
    made = [
        Case(options.grid, options.refinement, **shape, ranks=n, way=way)
        for n in sizes
        for way in (options.ways if n > 1 else options.ways[:1])
        if way != "heads" or n <= options.heads
    ]
    weak = [(1, "O176", 5), (4, "N320", 6)] if not options.tiny else []
    made += [Case(name, level, **shape, ranks=n, way=options.ways[0]) for n, name, level in weak if n <= world_size]
    return list(dict.fromkeys(made))


def run_case(case: Case, graph, world: World, options: argparse.Namespace, expected: dict) -> dict | None:
    """Judge and time a case; what it found, on rank 0."""
    record = None
    if world.rank < case.ranks:
        run = Run(case, graph, world)
        signature = run.signature()
        reference = expected.setdefault((case.grid, case.refinement), signature)
        if world.rank == 0:
            limit = AGREE[world.device.type]
            wrong = [(a, b) for a, b in zip(signature, reference, strict=True) if abs(a - b) > limit * abs(b)]
            if wrong:
                raise ValueError(f"loss and gradients must be those of one rank within {limit}, got {wrong} in {case}")
        measured = run.measure(options.repeats) | (run.replay(options.repeats) if options.replay else {})
        sent = [None] * case.ranks
        dist.all_gather_object(sent, run.traffic(), group=world.groups[case.ranks])
        busiest = max(sent, key=lambda traffic: traffic["halo_bytes"])
        record = asdict(case) | measured | busiest | {"signature": signature}
        del run
    if world.gpu:
        torch.cuda.empty_cache()
    dist.barrier()
    return record


def environment(commit: str | None, device: torch.device) -> dict:
    """What the figures belong to."""
    return describe(device.type, {"torch"}, commit) | {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,
        "dtype": "bfloat16 autocast" if device.type == "cuda" else "float32",
    }


def run_checks(world_size: int) -> None:
    """The tests' checks, as many ranks as here; raises when one fails."""
    from distributed.ranks import verdicts

    for name in CHECKS:
        with tempfile.TemporaryDirectory() as folder:
            said = verdicts(f"distributed.{name}", world_size, Path(folder) / name)
        said = {check: problems for check, problems in said.items() if check[1] <= world_size}
        wrong = {f"{check}-{ranks}": problems for (check, ranks), problems in said.items() if problems}
        print(f"{name}: {len(said) - len(wrong)} of {len(said)} checks hold", flush=True)
        if wrong:
            raise ValueError(f"every check must hold before anything is timed, got {wrong}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="N320")
    parser.add_argument("--refinement", type=int, default=6)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--channels", type=int, default=64, help="of each head")
    parser.add_argument("--layers", type=int, default=16, help="of the processor")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--replay", action="store_true", help="time the pass captured in a CUDA graph too")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument(
        "--checks", type=int, metavar="RANKS", help="run the tests' checks instead; start it without torchrun"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    options = parser.parse_args(arguments)
    if options.tiny:
        small = {"grid": "O8", "refinement": 2, "heads": 4, "channels": 4, "layers": 2, "repeats": 2}
        vars(options).update(small)
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = parse(arguments)
    if options.checks:
        run_checks(options.checks)
        return
    world = World()
    graphs, expected, results = {}, {}, []
    for case in cases(options, world.size):
        key = case.grid, case.refinement
        if key not in graphs:
            graphs = {key: weather_graph(case)}  # one at a time
        record = run_case(case, graphs[key], world, options, expected)
        if world.rank == 0:
            results.append(record)
            print(
                f"{case}: {record['ms']:.2f} ms, {record['peak_gb']:.2f} GB, {record['halo_bytes']} bytes", flush=True
            )
            if options.out:
                report = {"environment": environment(options.commit, world.device), "results": results}
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
