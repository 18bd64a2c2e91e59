"""One rank of a job of benchmarks/sharding.py: cases of our model, and messages alone.

Times are medians, over repetitions, of the slowest rank; memory is the largest peak of a rank; rows, bytes and work are those of the
busiest rank, in all layers, forward and backward.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "src", "tests")]

from sharded_model import Case, ShardedModel  # noqa: E402
from suite.timing import CLOCKS  # noqa: E402

from anemoi_gt.distributed import HaloExchange, make_mesh  # noqa: E402
from anemoi_gt.distributed.mesh import exit_without_finalization  # noqa: E402
from anemoi_gt.distributed.partition import NODE_COST  # noqa: E402

AGREE = {"cuda": 3e-2, "cpu": 1e-4}  # relative, of loss and gradients: bfloat16 on a GPU, float32 on a CPU
WARM_UP = 3
MESSAGES = (64, 256, 1024, 4096, 16384, 65536)  # rows that a rank sends to each other one


class World:
    """The ranks of a job, and where they write.

    Parameters
    ----------
    folder : Path
        With `work.json`; rank 0 adds lines to `records.jsonl`, and says in `doing` which task it is at.
    """

    def __init__(self, folder: Path):
        self.folder, self.work = folder, json.loads((folder / "work.json").read_text())
        local = int(os.environ["LOCAL_RANK"])
        self.gpu = torch.cuda.device_count() > local
        self.device = torch.device("cuda", local) if self.gpu else torch.device("cpu")
        self.graphs = {}
        ranks = int(os.environ["WORLD_SIZE"])
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks) if self.gpu else 1)
        if self.gpu:
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=self.work["seconds"])
        dist.init_process_group(
            "nccl" if self.gpu else "gloo", timeout=timeout, device_id=self.device if self.gpu else None
        )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = make_mesh(self.device.type, model=self.size)

    def tasks(self) -> Iterator[dict]:
        """What is to be done, one after the other."""
        for task in self.work["tasks"]:
            if self.rank == 0:
                (self.folder / "doing").write_text(task["name"])
            yield task

    def write(self, task: dict, record: dict) -> None:
        """Add a record of a task, on rank 0."""
        if self.rank == 0:
            with (self.folder / "records.jsonl").open("a") as file:
                file.write(json.dumps({"part": task["part"]} | record) + "\n")

    def graph(self, case: Case):
        """The graph of a case, on the CPU; read once."""
        if case.graph not in self.graphs:
            self.graphs[case.graph] = torch.load(self.work["graphs"][case.graph], weights_only=False)
        return self.graphs[case.graph]

    def judge(self, name: str, found: list[float]) -> None:
        """Raise unless loss and gradients are those of one rank; what one rank finds first is the reference."""
        judge(found, self.work["expected"].get(name), self.device, self.size)
        self.work["expected"].setdefault(name, found)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """bfloat16 where there is a GPU."""
        return torch.bfloat16 if self.gpu else None

    def wait(self) -> None:
        """Until the device is done."""
        if self.gpu:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back the memory that nothing holds any more, CUDA graphs and what is in reference cycles included."""
        self.wait()
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def end(self) -> None:
        """Leave the group together; NCCL must not go before the CUDA graphs that call it."""
        self.free()
        dist.barrier()
        dist.destroy_process_group()

    def largest(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def times(self, call: Callable, repeats: int) -> list[float]:
        """Milliseconds of each repetition on the slowest rank."""
        times = []
        for _ in range(repeats):
            self.wait()
            dist.barrier()
            begin = time.perf_counter()
            call()
            self.wait()
            times.append(1e3 * (time.perf_counter() - begin))
        return self.largest(times)

    def measure(self, step: Callable) -> dict:
        """Times of a step in ms, and the largest peak of memory in GB."""
        for _ in range(WARM_UP):
            step()
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        times = self.times(step, self.work["repeats"])
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.gpu else 0.0
        return {"ms": statistics.median(times), "ms_all": times, "peak_gb": self.largest([peak])[0]}

    def replay(self, step: Callable) -> dict:
        """Times of a step captured in a CUDA graph; the graph is gone when they are known."""
        self.free()
        times = self.times(CLOCKS[self.device.type].record(step, 1), self.work["repeats"])
        return {"ms": statistics.median(times), "ms_all": times, "replayed": True}

    def gathered(self, value) -> list:
        """What every rank has."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def signature(world: World, part: ShardedModel) -> list[float]:
    """Loss and lengths of gradients of the whole run, to compare."""
    loss = part.step(world.autocast_dtype).double()
    dist.all_reduce(loss)
    values = [loss.item()]
    for gradient in part.judged():
        gradient = gradient.double()
        dist.all_reduce(gradient)
        values.append(gradient.norm().item())
    return values


def judge(found: list[float], expected: list[float] | None, device: torch.device, ranks: int) -> None:
    """Raise unless loss and gradients are those of one rank; what one rank finds first is the reference, if it is finite."""
    if expected is None and ranks > 1:
        raise ValueError(f"{ranks} ranks must be judged by what one rank found, which failed or did not run")
    limit = AGREE[device.type]
    wrong = [(a, b) for a, b in zip(found, expected or found, strict=True) if not abs(a - b) <= limit * abs(b)]
    if wrong:
        raise ValueError(f"loss and gradients must be those of one rank within {limit}, got {wrong}")


def traffic(world: World, part: ShardedModel) -> dict:
    """What this rank sends, reads and computes in a pass, forward and backward."""
    case, shards = part.case, part.graphs()
    passes = {"encoder": 1, "processor": case.layers, "decoder": 1}
    element = 2 if world.gpu else 4
    halos = {step: shard.halo for step, shard in shards.items() if hasattr(shard, "halo")}
    rows = {step: (halo.num_sent, halo.num_received) for step, halo in halos.items()}
    owned = {step: shard.destinations.ranges.counts[shard.rank] for step, shard in shards.items()}
    edges = {step: len(shard.edges) for step, shard in shards.items()}
    return {
        "halo_rows": rows,
        "halo_bytes": sum(passes[step] * sum(both) * case.width * element for step, both in rows.items()),
        "owned": owned,
        "edges": edges,
        "work": sum(times * (NODE_COST * owned[step] + edges[step]) for step, times in passes.items()),
        "messages": 2 * sum(passes[step] for step in halos),
        "element_bytes": element,
    }


class Models:
    """The model of one case at a time, for launched and replayed passes; it is freed before the one of another case is made.

    Parameters
    ----------
    world : World
    """

    def __init__(self, world: World):
        self.world = world
        self.part, self.signature = None, []

    def of(self, case: Case) -> ShardedModel:
        """The model of a case, once it is found to compute what one rank computes."""
        if self.part is None or self.part.case != case:
            self.free()
            self.part = ShardedModel(case, self.world.graph(case), self.world.mesh, self.world.device)
            self.signature = signature(self.world, self.part)
            self.world.judge(case.graph, self.signature)
        return self.part

    def free(self) -> None:
        """Hold no model."""
        self.part = None
        self.world.free()


def run_case(world: World, models: Models, task: dict) -> None:
    """Judge and time a case."""
    case = Case(**task["case"])
    part = models.of(case)

    def step():
        return part.step(world.autocast_dtype)

    measured = world.replay(step) if task["replayed"] else world.measure(step)
    everywhere = world.gathered(traffic(world, part))
    busiest = max(everywhere, key=lambda there: there["halo_bytes"]) | {
        "work": max(there["work"] for there in everywhere)
    }
    world.write(task, asdict(case) | measured | busiest | {"signature": models.signature})


def run_exchange(world: World, task: dict) -> None:
    """Time messages alone: each rank sends rows of one layer to every other one."""
    width, dtype = task["width"], torch.bfloat16 if world.gpu else torch.float32
    group, others = world.mesh.get_group("model"), world.size - 1
    for rows in MESSAGES if world.gpu else MESSAGES[:3]:
        counts = tuple(0 if rank == world.rank else rows for rank in range(world.size))
        exchange = HaloExchange(
            group.group_name, torch.arange(rows, device=world.device).repeat(others), counts, counts
        )
        x = torch.randn(rows, width, device=world.device, dtype=dtype)

        def call(exchange=exchange, x=x):
            for _ in range(task["layers"]):  # as the layers of a processor do, one after the other
                exchange(x)

        measured = world.replay(call) if task["replayed"] else world.measure(call)
        message = {"ranks": world.size, "rows": rows, "message_bytes": rows * others * width * x.element_size()}
        world.write(task, message | {"ms": measured["ms"] / task["layers"], "replayed": task["replayed"]})


def main(folder: str) -> None:
    """Do this rank's share of the tasks that the folder describes."""
    world = World(Path(folder))
    models = Models(world)
    for task in world.tasks():
        if "case" in task:
            run_case(world, models, task)
        else:
            models.free()
            run_exchange(world, task)
    models.free()
    world.end()


if __name__ == "__main__":
    main(sys.argv[1])
    exit_without_finalization(0)
