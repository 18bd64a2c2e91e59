"""One rank of a job of benchmarks/sharding.py: models of anemoi-models of the same sizes, with their own sharding.

`way` of a case is its strategy, edges or heads; `who` says whose attention is in it: theirs, or ours by `integrations.anemoi.install`.
"""

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "src", "tests")]

from anemoi.models.distributed.shapes import get_shard_sizes  # noqa: E402
from sharded_model import FIELDS, Case  # noqa: E402
from sharding_rank import World  # noqa: E402
from support.anemoi_model import build, draw, make_options  # noqa: E402

from anemoi_gt.distributed.mesh import exit_without_finalization  # noqa: E402
from anemoi_gt.integrations import anemoi as integration  # noqa: E402

JUDGED = ("lin_edge.weight", "lin_key.weight", "lin_value.weight")


class AnemoiModel:
    """The model of a case on this rank, and its part of one sample.

    Parameters
    ----------
    case : Case
    graph : HeteroData
    world : World
    """

    def __init__(self, case: Case, graph, world: World):
        names = tuple(f"field_{i}" for i in range(FIELDS // 2))  # of two steps in time, as many fields go in
        backend = "triton" if world.gpu else "pyg"
        sizes = {"channels": case.width, "heads": case.heads, "layers": case.layers, "layer_chunks": 1}
        sizes |= {"mapper_chunks": 1, "checkpointing": False, "graph_attention_backend": backend}
        options = make_options(**sizes, shard_strategy=case.way)
        self.model = build(graph, options, names).to(world.device)
        whole = draw(graph, variables=names)["data"]
        self.scale = 1 / whole[:, 0, ..., :-1].numel()
        self.group = world.mesh.get_group("model") if world.size > 1 else None
        self.sizes = get_shard_sizes(whole, 3, self.group) if self.group else None
        own = whole.split(self.sizes, 3)[world.rank] if self.group else whole
        self.x = {"data": own.to(world.device)}

    def step(self, dtype: torch.dtype | None) -> torch.Tensor:
        """Forward and backward, under autocast to a dtype or as it is; returns this rank's part of the loss, the mean square of what comes out."""
        self.model.zero_grad(set_to_none=True)
        shards = {"grid_shard_sizes": {"data": self.sizes}} if self.group else {}
        with torch.autocast(self.x["data"].device.type, dtype=dtype, enabled=dtype is not None):
            out = self.model(self.x, model_comm_group=self.group, **shards)["data"]
        loss = out.float().square().sum() * self.scale
        loss.backward()
        return loss.detach()

    def signature(self, dtype: torch.dtype | None) -> list[float]:
        """Loss and lengths of some gradients of the whole run, to compare."""
        loss = self.step(dtype).double()
        dist.all_reduce(loss)
        values = [loss.item()]
        for name, parameter in self.model.named_parameters():
            if name.startswith("processor.") and name.endswith(JUDGED) and ".0." in name:
                gradient = parameter.grad.double()
                dist.all_reduce(gradient)
                values.append(gradient.norm().item())
        return values


def run(world: World, task: dict) -> None:
    """Judge and time a case."""
    case, who = Case(**task["case"]), task["who"]
    part = AnemoiModel(case, world.graph(case), world)
    with integration.install() if who == "ours" else nullcontext():
        found = part.signature(world.autocast_dtype)
        world.judge(f"anemoi {case.graph}", found)
        measured = world.measure(lambda: part.step(world.autocast_dtype))
    world.write(task, asdict(case) | measured | {"model": "anemoi-models", "who": who, "signature": found})


def main(folder: str) -> None:
    """Do this rank's share of the tasks that the folder describes."""
    world = World(Path(folder))
    for task in world.tasks():
        run(world, task)
        world.free()  # before the next model is made
    world.end()


if __name__ == "__main__":
    main(sys.argv[1])
    exit_without_finalization(0)
