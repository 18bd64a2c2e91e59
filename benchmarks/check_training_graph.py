"""Training steps from a CUDA graph (`training.cuda_graph`) and with compiled blocks (`training.compile`): have recorded steps the bits
of launched ones, and how much faster is each.

    python benchmarks/check_training_graph.py --commit HASH --out benchmarks/results/training_graph_h200.json
    torchrun --nproc-per-node=4 benchmarks/check_training_graph.py --parts times --grids O96:5 N320:6 --commit HASH --out FILE
    python benchmarks/check_training_graph.py --tiny --out FILE       on a CPU, which records nothing: everything but the graph

    checks      12 steps of a small model, twice launched and once recorded: losses and last weights, bit by bit; in bf16-mixed compiled
                ones as well
    times       steps of a large model in bf16-mixed, launched, recorded, compiled, and both: median of 10, on the slowest rank; the
                largest memory of a rank, while it compiles and records included

The ranks of torchrun share one model, each way of attending, and two models; they compile two ways. Results are written after each part.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing, nullcontext
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "src", "tests")]

from suite.environment import describe  # noqa: E402
from support.capturing import capture_in_place  # noqa: E402

from anemoi_gt import EncoderProcessorDecoder  # noqa: E402
from anemoi_gt.data.datasets import Sample  # noqa: E402
from anemoi_gt.data.graphs import icosphere_graph  # noqa: E402
from anemoi_gt.data.grids import grid  # noqa: E402
from anemoi_gt.distributed import ShardingConfig, init_distributed, is_launched, make_mesh  # noqa: E402
from anemoi_gt.distributed.mesh import local_device  # noqa: E402
from anemoi_gt.distributed.model_shard import shard_model  # noqa: E402
from anemoi_gt.training import TrainingConfig  # noqa: E402
from anemoi_gt.training.parallel.step import ShardedTrainingStep  # noqa: E402
from anemoi_gt.training.step import AUTOCAST, TrainingStep  # noqa: E402

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS, STEPS, WARM_UP, TIMED, DROPOUT = 100, 12, 3, 10, 0.1
TWO_MODELS = "two models"  # each has half of the ranks
WAYS = ("after exchange", TWO_MODELS)
LAUNCHED, RECORDED, COMPILED, BOTH = "launched", "recorded", "compiled", "compiled, recorded"
RUNS = {
    LAUNCHED: {},
    RECORDED: {"cuda_graph": True},
    COMPILED: {"compile": True},
    BOTH: {"compile": True, "cuda_graph": True},
}  # options of training


class Size(NamedTuple):
    """Of a model; channels are all heads' together."""

    grid: str
    refinement: int
    channels: int
    heads: int
    layers: int


class Problem:
    """A graph and random fields on it, for models of one size, on the meshes of the ways of attending."""

    def __init__(self, size: Size, device: torch.device, meshes: dict[str, DeviceMesh]):
        self.size, self.device, self.meshes = size, device, meshes
        self.graph = icosphere_graph(grid(size.grid), refinement=size.refinement)
        self.weights = torch.ones(self.graph["data"].num_nodes)

    def learner(self, way: str | None, precision: str, dropout: float, run: str) -> tuple[TrainingStep, Tensor | slice]:
        """Make a learner for a run of `RUNS`; returns it and the rows of a sample that are this rank's."""
        torch.manual_seed(0)
        sizes = {"channels": self.size.channels, "heads": self.size.heads, "num_layers": self.size.layers}
        model = EncoderProcessorDecoder(self.graph, FIELDS, FIELDS, **sizes, dropout=dropout).to(self.device)
        numbers = {"steps": 1000, "batch_size": 1, "warmup_steps": 2, "precision": precision, "device": DEVICE_TYPE}
        recorded = "cuda_graph" in RUNS[run]
        config = TrainingConfig(**numbers | RUNS[run] | {"cuda_graph": recorded and DEVICE_TYPE == "cuda"})
        if way is None:
            own, learner = slice(None), TrainingStep(model, self.weights, config, self.device)
        else:
            mesh = self.meshes[way]
            shard = shard_model(model, mesh)
            own = shard.partitions["data"].nodes(shard.rank, "cpu")
            group = dist.new_group(backend="gloo")
            whole = {"num_nodes": len(self.weights), "shard": shard, "mesh": mesh, "group": group}
            learner = ShardedTrainingStep(model, self.weights[own], config, self.device, **whole)
        if recorded and DEVICE_TYPE == "cpu":
            learner.capture(capture_in_place)
        return learner, own

    def batch(self, number: int, own: Tensor | slice) -> Sample:
        """Return this rank's rows of a batch of one sample."""
        generator = torch.Generator().manual_seed(number)
        fields = (torch.randn(1, len(self.weights), FIELDS, generator=generator) for _ in range(2))
        return Sample(*(field[:, own].to(self.device) for field in fields))


def trained(problem: Problem, *options) -> list[Tensor]:
    """Losses of some steps, and the weights behind them."""
    learner, own = problem.learner(*options)
    with closing(learner):
        losses = [learner.training_step(problem.batch(number, own)) for number in range(STEPS)]
    return [torch.stack(losses), *(parameter.detach() for parameter in learner.model.parameters())]


def check(problem: Problem, way: str | None, precision: str, dropout: float, launched: str, recorded: str) -> str:
    """What is to be said of recorded steps beside launched ones, two of `RUNS`; the same on all ranks."""
    if way == "heads" and dropout:
        return "left out: by heads, the kernels drop nothing"
    torch.compiler.reset()  # the three share what is compiled: compiled again, it may have other bits
    first, again, replayed = (trained(problem, way, precision, dropout, run) for run in (launched, launched, recorded))
    moves = bool(first[0].isfinite().all()) and len(set(first[0].tolist())) == STEPS
    if any(slowest([other_bits(first, again), not moves])):
        return "FAIL: as it is, a run does not repeat, or its losses are not finite"
    (differ,) = slowest([other_bits(first, replayed)])
    return f"FAIL: other bits in {differ:.0f} of {len(first)} tensors" if differ else "same bits"


def other_bits(expected: list[Tensor], actual: list[Tensor]) -> int:
    """How many tensors differ."""
    return sum(not torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def slowest(values: list[float]) -> list[float]:
    """The largest of each value over the ranks, which wait for each other."""
    if not dist.is_initialized():
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=DEVICE_TYPE)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def median_ms(call: Callable[[], object]) -> float:
    """Of calls one by one, on the slowest rank."""
    synchronize = torch.cuda.synchronize if DEVICE_TYPE == "cuda" else lambda: None
    times = []
    for _ in range(WARM_UP + TIMED):
        slowest([0.0])
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(slowest(times[WARM_UP:]))


def measure(problem: Problem, way: str | None, run: str) -> dict[str, float]:
    """Times of a step and of its forward and backward alone, and memory."""
    gc.collect()  # learners, which refer to themselves
    if DEVICE_TYPE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    learner, own = problem.learner(way, "bf16-mixed", 0.0, run)
    batch = problem.batch(0, own)

    def differentiate():
        learner.optimizer.zero_grad()
        learner.forward_backward(batch)

    with closing(learner):
        measured = {"step_ms": median_ms(lambda: learner.training_step(batch)), "pass_ms": median_ms(differentiate)}
        if DEVICE_TYPE == "cuda":
            memory = slowest([torch.cuda.max_memory_allocated() / 1e9, torch.cuda.memory_reserved() / 1e9])
            measured |= dict(zip(("peak_gb", "reserved_gb"), memory, strict=True))
    return measured


def attempt(call: Callable, *arguments):
    """What a call returns, or its error as text: the others go on."""
    try:
        return call(*arguments)
    except Exception as error:
        traceback.print_exc()
        return f"FAIL: {type(error).__name__}: {error}"


def main(arguments: list[str] | None = None) -> int:
    """Check, time, write; 1 when a check or a time failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", type=named_grid, metavar="GRID:REFINEMENT", help="O96:5 unless told")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--parts", nargs="+", choices=("checks", "times"), default=("checks", "times"))
    parser.add_argument("--precisions", nargs="+", choices=tuple(AUTOCAST), default=tuple(AUTOCAST))
    parser.add_argument("--tiny", action="store_true", help="small models, as a CPU can do")
    parser.add_argument("--commit", help="what to write where git cannot tell")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    device = local_device(DEVICE_TYPE) if is_launched() else torch.device(DEVICE_TYPE)
    checked = Size("O4", 1, 16, 4, 1) if options.tiny else Size("O32", 3, 256, 8, 2)
    timed = checked if options.tiny else Size("O96", 5, 1024, 16, options.layers)
    grids = options.grids or [timed[:2]]
    about = describe(DEVICE_TYPE, {"torch", "triton"}, options.commit)
    with init_distributed(ShardingConfig(timeout=120.0), DEVICE_TYPE) if is_launched() else nullcontext() as mesh:
        size = 1 if mesh is None else mesh.size()
        meshes = {} if mesh is None else meshes_on(size)
        ways, file = list(meshes) or [None], options.out if mesh is None or mesh.get_rank() == 0 else None
        results = {"environment": about, "ranks": size, "checks": [], "times": []}
        if "checks" in options.parts:
            problem = Problem(checked, device, meshes)
            for line in cases(ways, options.precisions):
                results["checks"].append(line | {"said": attempt(check, problem, *line.values())})
                write(results, file)
        for named in grids if "times" in options.parts else ():
            problem = Problem(Size(*named, *timed[2:]), device, meshes)
            for way in ways[:2]:
                torch.compiler.reset()  # as in a run of its own, which has no other sizes
                for run in RUNS:
                    said = attempt(measure, problem, way, run)
                    results["times"].append({"model": problem.size._asdict(), "way": way, "run": run, "said": said})
                    write(results, file)
    return report(results, file)


def named_grid(text: str) -> tuple[str, int]:
    """Read the name of a grid and the refinement of its mesh, such as O96:5."""
    name, _, refinement = text.partition(":")
    return name, int(refinement)


def cases(ways: list, precisions: list[str]) -> list[dict]:
    """What is checked, as `check` takes it; of compiled blocks, which take a while, as little as tells."""
    every = [(*case, LAUNCHED, RECORDED) for case in product(ways, precisions, (0.0, DROPOUT))]
    every += [(*case, COMPILED, BOTH) for case in product(ways[:2], {"bf16-mixed"} & set(precisions), (DROPOUT,))]
    return [dict(zip(("way", "precision", "dropout", "launched", "recorded"), case, strict=True)) for case in every]


def meshes_on(size: int) -> dict[str, DeviceMesh]:
    """The mesh of each way that so many ranks have."""
    whole = make_mesh(DEVICE_TYPE, size)
    meshes = {way: whole for way in WAYS if way != TWO_MODELS}
    return meshes | ({TWO_MODELS: make_mesh(DEVICE_TYPE, size // 2)} if size % 2 == 0 else {})


def write(results: dict, path: Path | None) -> None:
    """Write what there is so far; the first rank has a path."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def report(results: dict, path: Path | None) -> int:
    """Print a table where there is a file; 1 when something failed."""
    lines = []
    for line in results["checks"]:
        case = f"{line['way'] or 'alone':15s} {line['precision']:11s} dropout {line['dropout']:3.1f}"
        lines.append(f"{case}  {line['recorded']:18s} {line['said']}")
    for line in results["times"]:
        said = line["said"]
        numbers = said if isinstance(said, str) else "  ".join(f"{key} {value:8.2f}" for key, value in said.items())
        lines.append(f"{line['way'] or 'alone':15s} {line['model']['grid']:5s} {line['run']:18s} {numbers}")
    if path is not None:
        print("\n".join(lines))
    return int("FAIL" in "".join(lines))


if __name__ == "__main__":
    sys.exit(main())
