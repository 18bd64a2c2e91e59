"""One model on several ranks under gloo with Anemoi's own sharding: `python anemoi_ranks.py FOLDER`.

Writes FOLDER/WORLD_STRATEGY_WHO.pt for 2 and 3 ranks, both strategies, Anemoi's code and ours: the whole output,
gradients summed over ranks, and how many edge lists each rank sorted in each of two passes.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from anemoi.models.distributed.graph import gather_tensor
from anemoi.models.distributed.shapes import get_shard_sizes

from anemoi_gt import GraphStructure
from anemoi_gt.integrations import anemoi as integration
from support.anemoi_model import build, draw, graph_of, make_options

STRATEGIES = ("edges", "heads")
WORLDS = (2, 3)
# 3 ranks have 3, 3 and 2 heads; with one head on a rank Anemoi's own exchange fails.
OPTIONS = {"qk_norm": True, "heads": 8}


def make_model(strategy):
    return build(graph_of("O8", 2), make_options(**OPTIONS, shard_strategy=strategy))


def direction_of(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(3))


def run_pass(model, group):
    """One forward and backward pass on this rank's part of the grid; the whole output and summed gradients."""
    x = draw(graph_of("O8", 2))["data"]
    sizes = get_shard_sizes(x, 3, group)
    model.zero_grad(set_to_none=True)
    part = {"data": x.split(sizes, 3)[group.rank()]}
    out = model(part, model_comm_group=group, grid_shard_sizes={"data": sizes})["data"]
    whole = gather_tensor(out.detach(), 3, sizes, group)
    (out * direction_of(whole).split(sizes, 3)[group.rank()]).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(gradients[name], group=group)
        if "trainable" in name:  # cut after they are read: every rank has gathered their whole gradient
            gradients[name] /= group.size()
    return whole, gradients


def count_sorts():
    """A list that grows by one for each edge list that is sorted."""
    sorts, sort = [], GraphStructure.from_edge_index.__func__

    def record(cls, *arguments, **options):
        sorts.append(None)
        return sort(cls, *arguments, **options)

    GraphStructure.from_edge_index = classmethod(record)
    return sorts


def work(rank, world, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{world}", rank=rank, world_size=world)
    sorts = count_sorts()
    for strategy in STRATEGIES:
        for who in ("theirs", "ours"):
            model = make_model(strategy)
            if who == "ours":
                integration.install(backend="torch", sharding=False)  # named, so that nothing falls back unseen
            counts = []
            for _ in range(2):
                sorts.clear()
                whole, gradients = run_pass(model, dist.group.WORLD)
                counts.append(len(sorts))
            integration.uninstall()
            if rank == 0:
                torch.save((whole, gradients, counts), folder / f"{world}_{strategy}_{who}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    for world in WORLDS:
        mp.start_processes(work, (world, Path(sys.argv[1])), nprocs=world, start_method="fork")
