"""Checks on ranks: any module made of our layers, divided by one function, gives what the whole module gives."""

import copy
from functools import partial
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist
from support.operators import Operators
from torch import nn

from anemoi_gt import AttentionConfig, GraphStructure
from anemoi_gt.distributed import reduce_gradients, shard_graph, shard_module
from anemoi_gt.nn import (
    ConditionalLayerNorm,
    GraphTransformerConv,
    GraphTransformerForwardMapper,
    GraphTransformerMapperBlock,
    LayerKernels,
    StaticEdges,
    whole_block,
)
from anemoi_gt.nn import GraphTransformerProcessorBlock as Processor
from anemoi_gt.ops.triton_backend import launch, node_rows
from distributed.problems import CONFIG, data, nearest, structure
from distributed.problems import mesh as points
from distributed.ranks import everywhere, mesh_of, meshes_with_this_rank, on_all_ranks

UP, ALONG = ("data", "mesh"), ("mesh", "mesh")


class Net(nn.Module):
    """A convolution with beta, a mapper, a block on static edges with trained attributes, an embedding of nodes."""

    def __init__(self, chunks):
        super().__init__()
        self.embedding = nn.Embedding(len(points), 4)
        edge_index = nearest(points, points, 4)
        sizes = {"trainable": 2, "num_chunks": chunks}
        self.edges = StaticEdges(edge_index, torch.rand(edge_index.shape[1], 2), (len(points),) * 2, **sizes)
        sizes = {"num_heads": 2, "config": CONFIG}
        self.up = GraphTransformerForwardMapper(
            in_channels_src=3, in_channels_dst=4, num_channels=8, edge_dim=2, gradient_checkpointing=True, **sizes
        )
        self.conv = GraphTransformerConv(8, 4, heads=2, beta=True, config=CONFIG)
        self.block = Processor(in_channels=8, hidden_dim=8, out_channels=8, edge_dim=4, **sizes)

    def forward(self, x, up, edge_attr):
        mesh = self.embedding.weight.expand(x.shape[0], -1, -1)
        graph, along = self.edges()
        mesh = self.up((x, mesh), up, edge_attr)
        return self.block(self.conv(mesh, graph), graph, along)


def make(chunks=1):
    torch.manual_seed(0)
    edge_index = nearest(data, points, 5)
    up = GraphStructure.from_edge_index(edge_index[:, torch.randperm(edge_index.shape[1])], (len(data), len(points)))
    net = Net(chunks).double()
    nn.init.normal_(net.edges.trainable)
    x, edge_attr = torch.randn(2, len(data), 3), torch.rand(edge_index.shape[1], 2)
    return net, up, x.double(), edge_attr.double()


@on_all_ranks
def any_module_gives_output_and_gradients_of_the_whole(group, verdict):
    shapes = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2))
    for (shape, mesh), chunks in product(list(meshes_with_this_rank(*shapes)), (1, 3)):
        net, up, x, edge_attr = make(chunks)
        whole = copy.deepcopy(net)
        expected = whole(x, up, edge_attr)
        expected.square().sum().backward()
        shard = shard_module(net, {UP: up, ALONG: net.edges}, mesh, tables={"embedding.weight": "mesh"},
                             positions={"data": data, "mesh": points})  # fmt: skip
        out = net(shard.nodes("data", x), shard.graphs[UP].split(chunks), shard.edges(UP, edge_attr))
        out.square().sum().backward()
        shared, own = shard.parameters(net)
        reduce_gradients(shared, own, mesh)
        verdict.close(f"output on {shape}", out, shard.nodes("mesh", expected))
        gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
        verdict.that(set(shard.tables) == {"embedding.weight", "edges.trainable"}, f"tables {list(shard.tables)}")
        size = max(gradient.abs().max() for gradient in gradients.values())
        for name, parameter in net.named_parameters():
            gradient = gradients[name]
            if name in shard.tables:
                gradient = gradient[shard.tables[name].index]
            verdict.close(f"{name} on {shape}", parameter.grad, gradient, terms=size)
        lines = str(shard).splitlines()
        verdict.that(lines[0] == f"rank {mesh.get_local_rank('model')} of {shape[1]}", f"said {lines[0]}")


@on_all_ranks
def chunks_of_a_shard_with_few_nodes_or_edges_give_what_the_whole_graph_gives(group, verdict):
    kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=2))
    sizes = {"in_channels": 8, "hidden_dim": 8, "out_channels": 8, "num_heads": 2, "edge_dim": 3}
    torch.manual_seed(0)
    options = {"update_src_nodes": True, "dropout": 0.5, "layer_kernels": kernels, "config": CONFIG}
    block = GraphTransformerMapperBlock(**sizes, **options).double()
    for name, each in product(("two_nodes", "one_end", "no_edges", "isolated"), (True, False)):
        graph, draw = structure(name), partial(torch.randn, dtype=torch.float64, requires_grad=True)
        shard, nodes = shard_graph(graph, group), (graph.num_src, graph.num_dst)
        x, edge_attr = [draw(2, number, 8) for number in nodes], draw(graph.num_edges, 3)
        cond = [draw(number if each else 1, 2) for number in nodes]
        leaves = [*x, *cond, edge_attr, *block.parameters()]
        own = [partition.nodes(shard.rank) for partition in (shard.sources, shard.destinations)]
        own_x = tuple(rows[:, index] for rows, index in zip(x, own, strict=True))
        own_cond = tuple(rows[index] if each else rows for rows, index in zip(cond, own, strict=True))
        block.eval()
        whole = block(x, graph, edge_attr, cond=cond)
        part = block(own_x, shard.split(3), edge_attr[shard.edges], cond=own_cond)
        for side, index in enumerate(own):  # sources are updated too
            verdict.close(f"{name}: output {side}", part[side].detach(), whole[side][:, index].detach())
        expected, gradients = (
            torch.autograd.grad(sum(out.square().sum() for out in outputs), leaves, materialize_grads=True)
            for outputs in (whole, part)
        )
        for n, gradient in enumerate(gradients):
            dist.all_reduce(gradient, group=group)
            verdict.close(f"{name}: gradient {n}", gradient, expected[n], torch.cat([g.flatten() for g in expected]))
        block.train()(own_x, shard.split(3), edge_attr[shard.edges], cond=own_cond)
        verdict.same(f"{name}: next draws", len(set(everywhere(float(torch.rand(1)), group))), 1)


@on_all_ranks
def what_does_not_fit_the_module_is_named(group, verdict):
    net, up, _, _ = make()
    mesh = mesh_of(1, dist.get_world_size())  # all ranks make a mesh together
    for graphs, tables, said in (
        ({}, None, "at least one graph"), ({"up": up}, None, "keys (sources, destinations)"),
        ({UP: up, ("data", "data"): net.edges}, None, "the same number of data"),
        ({ALONG: copy.deepcopy(net.edges)}, None, "part of the module"),
        ({UP: up}, {"weight": "mesh"}, "name parameters or buffers"),
        ({UP: up}, {"embedding.weight": "sea"}, "name a set of nodes or a graph"),
        ({UP: up}, {"embedding.weight": "data"}, "one row for each of the"),
        ({UP: net}, None, "GraphStructures or StaticEdges"),
    ):  # fmt: skip
        verdict.raises(ValueError, said, lambda g=graphs, t=tables: shard_module(net, g, mesh, tables=t))
    verdict.that(net.embedding.weight.shape[0] == len(points), "a refused module was changed")


@on_all_ranks
def blocks_of_a_shard_by_one_operator_give_what_they_give_on_the_whole_graph(group, verdict):
    torch.manual_seed(0)
    sizes = {"in_channels": 8, "hidden_dim": 8, "out_channels": 8, "num_heads": 2, "edge_dim": 3}
    launch.PROGRAMS = node_rows.PROGRAMS = 3  # of the interpreter
    blocks = [kind(**sizes, config=AttentionConfig("triton")) for kind in (Processor, GraphTransformerMapperBlock)]
    watched = ("two_nodes", 1, True)  # a hook on one rank, whose other ranks use the operator
    ways = ("two_nodes", 1, False), ("two_nodes", 3, False), ("one_end", 1, False), ("no_edges", 1, False), watched
    for block, (name, chunks, is_watched) in product(blocks, ways):
        graph, is_mapper = structure(name), isinstance(block, GraphTransformerMapperBlock)
        if not is_mapper and graph.num_src != graph.num_dst:
            continue
        shard, draw = shard_graph(graph, group).split(chunks), partial(torch.randn, requires_grad=True)
        x, edge_attr = [draw(number, 8) for number in (graph.num_src, graph.num_dst)], draw(graph.num_edges, 3)
        own = [partition.nodes(shard.rank) for partition in (shard.sources, shard.destinations)]
        parts = [rows[i] for rows, i in zip(x, own, strict=True)]
        given = [(x, graph, edge_attr), (parts, shard, edge_attr[shard.edges])]
        is_watched &= shard.rank == 0
        hook = block.lin_query.register_forward_hook(lambda *_: None) if is_watched else None
        number = 0 if is_watched else 1 + chunks
        with mock.patch.object(whole_block, "is_proven", lambda *_: True), Operators() as operators:
            whole, part = (block(*side)[1] if is_mapper else block(side[0][1], *side[1:]) for side in given)
        verdict.same(f"{name}: operators", operators.names.count("anemoi_gt.transformer_block.default"), number)
        if hook is not None:
            hook.remove()
        verdict.close(f"{name}: output", part.detach(), whole[own[1]].detach())
        leaves = [*(x if is_mapper else x[1:]), edge_attr, *block.parameters()]
        grad = partial(torch.autograd.grad, inputs=leaves, materialize_grads=True)
        expected, gradients = (grad(out.square().sum()) for out in (whole, part))
        terms = torch.cat([gradient.flatten() for gradient in expected])
        for n, gradient in enumerate(gradients):
            dist.all_reduce(gradient := gradient.clone(), group=group)  # two biases share theirs
            verdict.close(f"{name}: gradient {n}", gradient, expected[n], terms)
