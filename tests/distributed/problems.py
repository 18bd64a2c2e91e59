"""Small layers and graphs, run whole on one device and sharded among ranks."""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from anemoi_gt import GraphStructure, KernelConfig, edge_attention
from anemoi_gt.distributed import shard_graph

HEADS = 5
CHANNELS = 4
WIDTH = 6
EDGE_DIM = 3
CONFIG = KernelConfig(backend="torch")


def on_cpu(seed):
    """Return options to draw random numbers on the CPU, so that they do not depend on the device."""
    return {"device": "cpu", "generator": torch.Generator("cpu").manual_seed(seed)}


def sphere_points(size, seed):
    """Draw points [size, 3] on the unit sphere, from north to south."""
    points = torch.randn(size, 3, dtype=torch.float64, **on_cpu(seed))
    points = points / points.norm(dim=1, keepdim=True)
    return points[points[:, 2].argsort(descending=True)]


def nearest(src, dst, k):
    """Return edges from the k nearest sources to each destination, which are rarely symmetric."""
    neighbours = torch.cdist(dst, src).topk(k, largest=False).indices  # [dst, k]
    destinations = torch.arange(len(dst), device="cpu").repeat_interleave(k)
    edge_index = torch.stack([neighbours.flatten(), destinations])
    return edge_index.to(torch.get_default_device())


def symmetric(edge_index):
    """Return the edges and their reverse, each once, in random order."""
    both = torch.cat([edge_index, edge_index.flip(0)], dim=1).unique(dim=1)
    return both[:, torch.randperm(both.shape[1], **on_cpu(3)).to(both.device)]


data = sphere_points(41, seed=1)
mesh = sphere_points(17, seed=2)
GRAPHS = {  # name: (edge_index, (num_src, num_dst))
    "asymmetric": (nearest(data, data, 4), (41, 41)),
    "symmetric": (symmetric(nearest(mesh, mesh, 3)), (17, 17)),
    "encoder": (nearest(data, mesh, 6).flip(1), (41, 17)),
    "decoder": (nearest(mesh, data, 3), (17, 41)),
    # sources and destinations without edges
    "isolated": (torch.tensor([[0, 9, 9, 3, 0], [8, 1, 8, 1, 1]]), (11, 13)),
    # most ranks have no edge
    "one_end": (torch.tensor([[7, 6, 5, 4, 0], [0, 0, 0, 0, 0]]), (8, 8)),
    "two_nodes": (torch.tensor([[0, 1, 1], [1, 0, 1]]), (2, 2)),  # fewer nodes than ranks
    "no_edges": (torch.zeros(2, 0, dtype=torch.int64), (5, 6)),
    "duplicates": (torch.tensor([[0, 0, 4, 4, 0, 3], [4, 4, 0, 0, 4, 0]]), (5, 5)),
    "twenty": (nearest(mesh[:10], data[:10], 2), (10, 10)),
}


def structure(name):
    return GraphStructure.from_edge_index(*GRAPHS[name])


class Layer(nn.Module):
    """Projections around an attention function, as in any graph transformer layer."""

    def __init__(self, dtype):
        super().__init__()
        inner = HEADS * CHANNELS
        self.query, self.value = (nn.Linear(WIDTH, inner, dtype=dtype) for _ in range(2))
        # No bias: it cancels in the softmax, so its gradient would be rounding.
        self.key = nn.Linear(WIDTH, inner, bias=False, dtype=dtype)
        self.edge = nn.Linear(EDGE_DIM, inner, dtype=dtype)
        self.out = nn.Linear(inner, WIDTH, dtype=dtype)

    def forward(self, x_src, x_dst, edge_attr, attend):
        query = self.query(x_dst).unflatten(-1, (HEADS, CHANNELS))
        out = attend(query, x_src, self.key_value, edge_attr, self.edge.weight, self.edge.bias)
        return x_dst + self.out(out.flatten(-2))

    def key_value(self, x):
        key = self.key(x).unflatten(-1, (HEADS, CHANNELS))
        value = self.value(x).unflatten(-1, (HEADS, CHANNELS))
        return key, value


def attend_whole(graph, query, x_src, key_value, *edges, **options):
    options = {"config": CONFIG} | options
    key, value = key_value(x_src)
    out, _ = edge_attention(query, key, value, graph, *edges, **options)
    return out


def attend_sharded(shard, query, x_src, *layer, **options):
    """Return the attention of a layer at the destinations of one rank."""
    x_src = shard.start_exchange(x_src).wait()
    return attend_whole(shard.structure, query, x_src, *layer, **options)


@dataclass
class Problem:
    """Features, attributes and layer on a graph."""

    graph: GraphStructure
    x_src: torch.Tensor
    x_dst: torch.Tensor
    edge_attr: torch.Tensor
    target: torch.Tensor
    layer: Layer


def make_problem(name, dtype=torch.float64, batch=(), attr_batch=(), *, same_nodes=False):
    """Return the problem on a graph of `GRAPHS`, the same on all ranks; with `same_nodes`, x_dst is x_src."""
    torch.manual_seed(7)
    edge_index, (num_src, num_dst) = GRAPHS[name]
    layer = Layer(dtype)
    x_src, x_dst, target = (
        torch.randn(*batch, size, WIDTH, dtype=dtype) for size in (num_src, num_dst, num_dst)
    )
    edge_attr = torch.randn(*attr_batch, edge_index.shape[1], EDGE_DIM, dtype=dtype)
    if same_nodes:
        x_dst = x_src
    return Problem(structure(name), x_src, x_dst, edge_attr, target, layer)


def run(problem, attend, num_dst):
    """Return output, loss and gradients of one layer by name; the loss is the sum of squares over `num_dst`."""
    names = ["x_src", "edge_attr"]
    if problem.x_dst is not problem.x_src:
        names.append("x_dst")
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in names}
    problem.layer.zero_grad()
    x_src = leaves["x_src"]
    x_dst = leaves.get("x_dst", x_src)
    out = problem.layer(x_src, x_dst, leaves["edge_attr"], attend)
    loss = (out - problem.target).square().sum() / max(num_dst, 1)
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    weights = {name: parameter.grad.clone() for name, parameter in problem.layer.named_parameters()}
    return {"out": out.detach(), "loss": loss.detach()} | gradients | weights


def run_whole(problem, **options):
    return run(problem, partial(attend_whole, problem.graph, **options), problem.graph.num_dst)


def run_sharded(problem, group, shard=None, **options):
    """Return this rank's results by name, with loss and weight gradients summed over ranks, and the shard."""
    shard = shard or shard_graph(problem.graph, group)
    part = replace(problem, **part_of(vars(problem), shard))
    if problem.x_dst is problem.x_src:
        part.x_dst = part.x_src
    results = run(part, partial(attend_sharded, shard, **options), problem.graph.num_dst)
    for name, value in results.items():
        if name not in rows_of(shard):
            dist.all_reduce(value, group=group)
    return results, shard


def rows_of(shard):
    """Return the row indices, in each tensor of the whole problem, that a rank owns."""
    local_src = shard.sources.nodes(shard.rank)
    local_dst = shard.destinations.nodes(shard.rank)
    return {
        "out": local_dst,
        "x_dst": local_dst,
        "target": local_dst,
        "x_src": local_src,
        "edge_attr": shard.edges,
    }


def part_of(whole, shard):
    """Return the rows of one device's results that a rank owns."""
    rows = rows_of(shard)
    part = {}
    for name, value in whole.items():
        part[name] = value[..., rows[name], :] if name in rows else value
    return part
