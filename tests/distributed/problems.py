"""Small layers and graphs, run whole on one device and divided among ranks."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from anemoi_gt import AttentionConfig, GraphStructure, edge_attention
from anemoi_gt.distributed import (
    attend_after_exchange,
    attend_by_heads,
    attend_overlapped,
    shard_graph,
)

HEADS, CHANNELS, WIDTH, EDGE_DIM = 5, 4, 6, 3
WAYS = {
    "edges, overlapped": ("edges", attend_overlapped),
    "edges, after exchange": ("edges", attend_after_exchange),
    "heads": ("heads", attend_by_heads),
}


def on_cpu(seed):
    """Where and of what random numbers are drawn that have to be the same on any device."""
    return {"device": "cpu", "generator": torch.Generator("cpu").manual_seed(seed)}


def sphere_points(size, seed):
    """Points [size, 3] on the unit sphere, from north to south."""
    points = torch.randn(size, 3, dtype=torch.float64, **on_cpu(seed))
    points = points / points.norm(dim=1, keepdim=True)
    return points[points[:, 2].argsort(descending=True)]


def nearest(src, dst, k):
    """Each destination reads its k nearest sources: an edge there is rarely an edge back."""
    neighbours = torch.cdist(dst, src).topk(k, largest=False).indices  # [dst, k]
    edge_index = torch.stack([neighbours.flatten(), torch.arange(len(dst), device="cpu").repeat_interleave(k)])
    return edge_index.to(torch.get_default_device())


def symmetric(edge_index):
    """With every edge its way back, each once, in random order."""
    both = torch.cat([edge_index, edge_index.flip(0)], dim=1).unique(dim=1)
    return both[:, torch.randperm(both.shape[1], **on_cpu(3)).to(both.device)]


data, mesh = sphere_points(41, seed=1), sphere_points(17, seed=2)
GRAPHS = {  # name: (edge_index, (num_src, num_dst))
    "asymmetric": (nearest(data, data, 4), (41, 41)),
    "symmetric": (symmetric(nearest(mesh, mesh, 3)), (17, 17)),
    "encoder": (nearest(data, mesh, 6).flip(1), (41, 17)),
    "decoder": (nearest(mesh, data, 3), (17, 41)),
    "isolated": (torch.tensor([[0, 9, 9, 3, 0], [8, 1, 8, 1, 1]]), (11, 13)),  # sources and destinations without edge
    "one_end": (torch.tensor([[7, 6, 5, 4, 0], [0, 0, 0, 0, 0]]), (8, 8)),  # most ranks have no edge
    "two_nodes": (torch.tensor([[0, 1, 1], [1, 0, 1]]), (2, 2)),  # fewer nodes than ranks
    "no_edges": (torch.zeros(2, 0, dtype=torch.int64), (5, 6)),
    "duplicates": (torch.tensor([[0, 0, 4, 4, 0, 3], [4, 4, 0, 0, 4, 0]]), (5, 5)),
    "twenty": (nearest(mesh[:10], data[:10], 2), (10, 10)),
}


class Layer(nn.Module):
    """Projections around an attention that is given: what any layer of graph transformers hands over."""

    def __init__(self, dtype):
        super().__init__()
        inner = HEADS * CHANNELS
        self.query, self.value = (nn.Linear(WIDTH, inner, dtype=dtype) for _ in range(2))
        self.key = nn.Linear(
            WIDTH, inner, bias=False, dtype=dtype
        )  # a bias here cancels in the softmax, its gradient is rounding
        self.edge = nn.Linear(EDGE_DIM, inner, dtype=dtype)
        self.out = nn.Linear(inner, WIDTH, dtype=dtype)

    def forward(self, x_src, x_dst, edge_attr, attend):
        out = attend(self.heads(self.query(x_dst)), x_src, self.key_value, edge_attr, self.edge.weight, self.edge.bias)
        return x_dst + self.out(out.flatten(-2))

    def key_value(self, x):
        return self.heads(self.key(x)), self.heads(self.value(x))

    def heads(self, x):
        return x.unflatten(-1, (HEADS, CHANNELS))


def attend_whole(graph, query, x_src, key_value, *edges, **options):
    """Attention on one device, as a layer hands it over."""
    return edge_attention(query, *key_value(x_src), graph, *edges, **options)[0]


@dataclass
class Problem:
    """Features, attributes and layers on a graph."""

    graph: GraphStructure
    x_src: torch.Tensor
    x_dst: torch.Tensor
    edge_attr: torch.Tensor
    target: torch.Tensor
    layer: Layer


def make_problem(name, dtype=torch.float64, batch=(), same_nodes=False):
    """The problem on a graph of `GRAPHS`, the same on every rank; with `same_nodes`, sources and destinations are one tensor."""
    torch.manual_seed(7)
    edge_index, (num_src, num_dst) = GRAPHS[name]
    layer = Layer(dtype)
    x_src, x_dst, target = (torch.randn(*batch, size, WIDTH, dtype=dtype) for size in (num_src, num_dst, num_dst))
    edge_attr = torch.randn(edge_index.shape[1], EDGE_DIM, dtype=dtype)
    graph = GraphStructure.from_edge_index(edge_index, (num_src, num_dst))
    return Problem(graph, x_src, x_src if same_nodes else x_dst, edge_attr, target, layer)


def run(problem, attend, loss_scale):
    """Output, loss and gradients of one layer; the loss is the sum of squares times `loss_scale`."""
    leaves = {
        name: getattr(problem, name).clone().requires_grad_()
        for name in ("x_src", "x_dst", "edge_attr")
        if not (name == "x_dst" and problem.x_dst is problem.x_src)
    }
    problem.layer.zero_grad()
    out = problem.layer(leaves["x_src"], leaves.get("x_dst", leaves["x_src"]), leaves["edge_attr"], attend)
    loss = (out - problem.target).square().sum() * loss_scale
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return out.detach(), loss.detach(), gradients


def run_whole(problem):
    """Everything of the run on one device, by name."""
    attend = partial(attend_whole, problem.graph, config=AttentionConfig(backend="torch"))
    out, loss, gradients = run(problem, attend, 1.0 / max(problem.graph.num_dst, 1))
    return {"out": out, "loss": loss} | gradients | _parameters(problem.layer)


def run_sharded(problem, group, way, backend="torch", **partitions):
    """This rank's part of the run on all ranks, by name, and the shard."""
    strategy, attend = WAYS[way]
    shard = shard_graph(problem.graph, group, strategy, **partitions)
    own_src, own_dst = shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)
    x_src = problem.x_src[..., own_src, :]
    part = Problem(
        graph=shard.graph,
        x_src=x_src,
        x_dst=x_src if problem.x_dst is problem.x_src else problem.x_dst[..., own_dst, :],
        edge_attr=problem.edge_attr[shard.edges],
        target=problem.target[..., own_dst, :],
        layer=problem.layer,
    )
    attend = partial(attend, shard, config=AttentionConfig(backend=backend))
    out, loss, gradients = run(part, attend, 1.0 / max(problem.graph.num_dst, 1))
    dist.all_reduce(loss, group=group)
    sum_over(problem.layer.parameters(), group)
    return {"out": out, "loss": loss} | gradients | _parameters(problem.layer), shard


def sum_over(parameters, group):
    """Sum gradients over the ranks of one model."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)


def part_of(whole, shard):
    """What of the run on one device a rank should find."""
    own_src, own_dst = shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)
    rows = {"out": own_dst, "x_dst": own_dst, "target": own_dst, "x_src": own_src, "edge_attr": shard.edges}
    return {name: value[..., rows[name], :] if name in rows else value for name, value in whole.items()}


def _parameters(layer):
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
