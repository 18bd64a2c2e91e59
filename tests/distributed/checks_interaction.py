"""Checks on ranks: a graph network on a sharded graph equals the one on the whole graph."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from support.plans import new_plans
from torch import nn

from anemoi_gt import InteractionBlock, InteractionConv, KernelConfig
from anemoi_gt.distributed import reduce_gradients, shard_graph, shard_module
from anemoi_gt.nn import StaticEdges
from distributed.checks_module import close_gradients
from distributed.problems import GRAPHS, mesh, nearest, rows_of, structure
from distributed.ranks import mesh_of_group, meshes_with_this_rank, on_all_ranks, on_ranks

FEATURES = 6
EDGE_DIM = 5


def differentiate(block, inputs, graph):
    """Return the results of two blocks in turn, and the gradients of inputs and parameters."""
    leaves = {name: rows.clone().requires_grad_() for name, rows in inputs.items()}
    block.zero_grad()
    x_src, edges = leaves["x_src"], leaves["edge_attr"]
    x = (x_src, leaves["x_dst"]) if "x_dst" in leaves else x_src
    out, edges = block(x, graph, edges)
    if "x_dst" not in leaves:
        out, edges = block(out, graph, edges)
    (out.square().sum() + edges.square().sum()).backward()
    results = {"out": out.detach(), "edges": edges.detach()}
    results |= {name: leaf.grad for name, leaf in leaves.items()}
    return results | {name: value.grad.clone() for name, value in block.named_parameters()}


def compare(verdict, group, name, backend="torch", dtype=torch.float64, batch=()):
    """Compare the results of a rank with one device."""
    torch.manual_seed(7)
    edge_index, (num_src, num_dst) = GRAPHS[name]
    block = InteractionBlock(FEATURES, EDGE_DIM, config=KernelConfig(backend)).to(dtype)
    inputs = {
        "x_src": torch.randn(*batch, num_src, FEATURES, dtype=dtype),
        "edge_attr": torch.randn(edge_index.shape[1], EDGE_DIM, dtype=dtype),
    }
    if num_src != num_dst:
        inputs["x_dst"] = torch.randn(*batch, num_dst, FEATURES, dtype=dtype)
    whole = differentiate(block, inputs, structure(name))
    shard = shard_graph(structure(name), group)
    rows = rows_of(shard)
    rows["edges"] = rows["edge_attr"]
    own = {key: value[..., rows[key], :] for key, value in inputs.items()}
    sharded = differentiate(block, own, shard)
    for key, expected in whole.items():
        label = f"{name} {backend} {batch}: {key}"
        if key in rows:
            verdict.close(label, sharded[key], expected[..., rows[key], :], terms=expected)
        else:
            dist.all_reduce(sharded[key], group=group)
            verdict.close(label, sharded[key], expected)


@on_ranks(1, 2, 3, 4)
def output_and_gradients_match_one_device(group, verdict):
    for name in GRAPHS:
        compare(verdict, group, name)


@on_ranks(2)
@new_plans(programs=3)  # few, for the interpreter
def a_batch_and_the_kernels_agree_with_one_device(group, verdict):
    """Kernels are interpreted if there is no GPU."""
    for batch in ((), (2,)):
        compare(verdict, group, "encoder", batch=batch)
        compare(verdict, group, "twenty", "triton", torch.float32, batch)


class Net(nn.Module):
    """A node embedding, edges with trainable attributes, and two blocks that update both."""

    def __init__(self):
        super().__init__()
        sizes = (len(mesh), len(mesh))
        edge_index = nearest(mesh, mesh, 4)
        attributes = torch.rand(edge_index.shape[1], 2)
        self.nodes = nn.Embedding(len(mesh), FEATURES)
        self.edges = StaticEdges(edge_index, attributes, sizes, trainable=2)
        self.embed = nn.Linear(4, EDGE_DIM)
        config = KernelConfig("torch")
        self.blocks = nn.ModuleList(
            [InteractionBlock(FEATURES, EDGE_DIM, config=config) for _ in range(2)]
        )

    def forward(self):
        graph, attributes = self.edges()
        x, edges = self.nodes.weight, self.embed(attributes)
        for block in self.blocks:
            x, edges = block(x, graph, edges)
        return x


@on_all_ranks
def a_sharded_module_of_graph_networks_matches_the_whole_module(group, verdict):
    kind = ("mesh", "mesh")
    for shape, device_mesh in meshes_with_this_rank((1, 1), (1, 2), (1, 3), (1, 4), (2, 2)):
        torch.manual_seed(0)
        net = Net().double()
        nn.init.normal_(net.edges.trainable)
        whole = copy.deepcopy(net)
        expected = whole()
        expected.square().sum().backward()
        shard = shard_module(
            net,
            {kind: net.edges},
            device_mesh,
            tables={"nodes.weight": "mesh"},
            positions={"mesh": mesh},
        )
        out = net()
        out.square().sum().backward()
        reduce_gradients(*shard.parameters(net), device_mesh)
        verdict.close(f"output on {shape}", out, shard.nodes("mesh", expected))
        close_gradients(verdict, shape, net, whole, shard)


class OwnConv(InteractionConv):
    """A user's layer."""


@on_ranks(2)
def options_of_a_users_layer_that_differ_between_ranks_are_named(group, verdict):
    torch.manual_seed(0)
    conv = OwnConv(FEATURES, EDGE_DIM)
    conv.config = KernelConfig(("torch", "auto")[dist.get_rank(group)])
    graphs = {("mesh", "mesh"): structure("symmetric")}
    shard = partial(shard_module, conv, graphs, mesh_of_group(group))
    verdict.raises(ValueError, "config must be the same on all ranks", shard)
