"""Small layers and graphs, run whole on one device and sharded among ranks."""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from anemoi_gt import AttentionConfig, GraphStructure, edge_attention
from anemoi_gt.distributed import shard_graph

HEADS, CHANNELS, WIDTH, EDGE_DIM = 5, 4, 6, 3
CONFIG = AttentionConfig(backend="torch")


def on_cpu(seed):
    """Device and generator of random numbers that have to be the same on any device."""
    return {"device": "cpu", "generator": torch.Generator("cpu").manual_seed(seed)}


def sphere_points(size, seed):
    """Points [size, 3] on the unit sphere, from north to south."""
    points = torch.randn(size, 3, dtype=torch.float64, **on_cpu(seed))
    points = points / points.norm(dim=1, keepdim=True)
    return points[points[:, 2].argsort(descending=True)]


def nearest(src, dst, k):
    """Edges from the k nearest sources to each destination: rarely symmetric."""
    neighbours = torch.cdist(dst, src).topk(k, largest=False).indices  # [dst, k]
    edge_index = torch.stack(
        [neighbours.flatten(), torch.arange(len(dst), device="cpu").repeat_interleave(k)]
    )
    return edge_index.to(torch.get_default_device())


def symmetric(edge_index):
    """Edges and their reverse, each once, in random order."""
    both = torch.cat([edge_index, edge_index.flip(0)], dim=1).unique(dim=1)
    return both[:, torch.randperm(both.shape[1], **on_cpu(3)).to(both.device)]


data, mesh = sphere_points(41, seed=1), sphere_points(17, seed=2)
# sources and destinations without edge
# most ranks have no edge
GRAPHS = {  # name: (edge_index, (num_src, num_dst))
    "asymmetric": (nearest(data, data, 4), (41, 41)),
    "symmetric": (symmetric(nearest(mesh, mesh, 3)), (17, 17)),
    "encoder": (nearest(data, mesh, 6).flip(1), (41, 17)),
    "decoder": (nearest(mesh, data, 3), (17, 41)),
    "isolated": (
        torch.tensor([[0, 9, 9, 3, 0], [8, 1, 8, 1, 1]]),
        (11, 13),
    ),
    "one_end": (
        torch.tensor([[7, 6, 5, 4, 0], [0, 0, 0, 0, 0]]),
        (8, 8),
    ),
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
        return tuple(
            projection(x).unflatten(-1, (HEADS, CHANNELS)) for projection in (self.key, self.value)
        )


def attend_whole(graph, query, x_src, key_value, *edges, **options):
    return edge_attention(query, *key_value(x_src), graph, *edges, **{"config": CONFIG} | options)[
        0
    ]


def attend_sharded(shard, query, x_src, *layer, **options):
    """Attention of a layer on the destinations of one rank."""
    return attend_whole(
        shard.structure, query, shard.start_exchange(x_src).wait(), *layer, **options
    )


@dataclass
class Problem:
    """Features, attributes and layer on a graph."""

    graph: GraphStructure
    x_src: torch.Tensor
    x_dst: torch.Tensor
    edge_attr: torch.Tensor
    target: torch.Tensor
    layer: Layer


def make_problem(name, dtype=torch.float64, batch=(), attr_batch=(), same_nodes=False):
    """The problem on a graph of `GRAPHS`, same on all ranks; with `same_nodes` sources and destinations are one."""
    torch.manual_seed(7)
    edge_index, (num_src, num_dst) = GRAPHS[name]
    layer = Layer(dtype)
    x_src, x_dst, target = (
        torch.randn(*batch, size, WIDTH, dtype=dtype) for size in (num_src, num_dst, num_dst)
    )
    edge_attr = torch.randn(*attr_batch, edge_index.shape[1], EDGE_DIM, dtype=dtype)
    return Problem(structure(name), x_src, x_src if same_nodes else x_dst, edge_attr, target, layer)


def run(problem, attend, num_dst):
    """Output, loss and gradients of one layer, by name; the loss is the sum of squares over `num_dst`."""
    names = (
        ("x_src", "edge_attr")
        if problem.x_dst is problem.x_src
        else ("x_src", "x_dst", "edge_attr")
    )
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in names}
    problem.layer.zero_grad()
    out = problem.layer(
        leaves["x_src"], leaves.get("x_dst", leaves["x_src"]), leaves["edge_attr"], attend
    )
    loss = (out - problem.target).square().sum() / max(num_dst, 1)
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    weights = {name: parameter.grad.clone() for name, parameter in problem.layer.named_parameters()}
    return {"out": out.detach(), "loss": loss.detach()} | gradients | weights


def run_whole(problem, **options):
    return run(problem, partial(attend_whole, problem.graph, **options), problem.graph.num_dst)


def run_sharded(problem, group, shard=None, **options):
    """This rank's results, by name, with loss and weight gradients summed over ranks; and the shard."""
    shard = shard or shard_graph(problem.graph, group)
    part = replace(problem, **part_of(vars(problem), shard))
    if problem.x_dst is problem.x_src:
        part.x_dst = part.x_src
    found = run(part, partial(attend_sharded, shard, **options), problem.graph.num_dst)
    for name, value in found.items():
        if name not in rows_of(shard):
            dist.all_reduce(value, group=group)
    return found, shard


def rows_of(shard):
    """Rows of each tensor of the whole problem that a rank owns."""
    own_src, own_dst = shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)
    return {
        "out": own_dst,
        "x_dst": own_dst,
        "target": own_dst,
        "x_src": own_src,
        "edge_attr": shard.edges,
    }


def part_of(whole, shard):
    """Return a rank's share of the results on one device."""
    rows = rows_of(shard)
    return {
        name: value[..., rows[name], :] if name in rows else value for name, value in whole.items()
    }
