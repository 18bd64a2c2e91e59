"""Checks on ranks: a module of anemoi_gt layers that `shard_module` shards agrees with the whole module."""

import copy
from functools import partial
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist
from support.operators import BLOCK, Operators
from support.plans import new_plans
from torch import nn

from anemoi_gt import GraphStructure, KernelConfig
from anemoi_gt.distributed import reduce_gradients, shard_graph, shard_module
from anemoi_gt.nn import (
    ConditionalLayerNorm,
    GraphTransformerConv,
    GraphTransformerForwardMapper,
    GraphTransformerMapperBlock,
    LayerKernels,
    StaticEdges,
    fused_block,
)
from anemoi_gt.nn import GraphTransformerProcessorBlock as Processor
from distributed.problems import CONFIG, data, nearest, structure
from distributed.problems import mesh as points
from distributed.ranks import (
    everywhere,
    mesh_of,
    mesh_of_group,
    meshes_with_this_rank,
    on_all_ranks,
    on_ranks,
)

UP = ("data", "mesh")
ALONG = ("mesh", "mesh")


class Net(nn.Module):
    """A convolution with beta, a mapper, a block on static edges with trainable attributes, a node embedding."""

    def __init__(self, chunks):
        super().__init__()
        self.embedding = nn.Embedding(len(points), 4)
        edge_index = nearest(points, points, 4)
        self.edges = StaticEdges(
            edge_index,
            torch.rand(edge_index.shape[1], 2),
            (len(points), len(points)),
            trainable=2,
            num_chunks=chunks,
        )
        options = {"num_heads": 2, "config": CONFIG}
        self.up = GraphTransformerForwardMapper(
            in_channels_src=3,
            in_channels_dst=4,
            num_channels=8,
            edge_dim=2,
            gradient_checkpointing=True,
            **options,
        )
        self.conv = GraphTransformerConv(8, 4, heads=2, beta=True, config=CONFIG)
        self.block = Processor(in_channels=8, hidden_dim=8, out_channels=8, edge_dim=4, **options)

    def forward(self, x, up, edge_attr):
        mesh = self.embedding.weight.expand(x.shape[0], -1, -1)
        graph, along = self.edges()
        mesh = self.up((x, mesh), up, edge_attr)
        return self.block(self.conv(mesh, graph), graph, along)


def make(chunks=1):
    torch.manual_seed(0)
    edge_index = nearest(data, points, 5)
    shuffled = edge_index[:, torch.randperm(edge_index.shape[1])]
    up = GraphStructure.from_edge_index(shuffled, (len(data), len(points)))
    net = Net(chunks).double()
    nn.init.normal_(net.edges.trainable)
    x = torch.randn(2, len(data), 3)
    edge_attr = torch.rand(edge_index.shape[1], 2)
    return net, up, x.double(), edge_attr.double()


def close_gradients(verdict, shape, net, whole, shard):
    """Record gradients of a sharded module that differ from those of the whole one."""
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    size = max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in net.named_parameters():
        gradient = gradients[name]
        if name in shard.tables:
            gradient = gradient[shard.tables[name].index]
        verdict.close(f"{name} on {shape}", parameter.grad, gradient, terms=size)


@on_all_ranks
def output_and_gradients_of_any_module_match_the_whole_module(group, verdict):
    number_of_chunks = {(1, 1): 3, (1, 2): 1, (1, 3): 3, (1, 4): 1, (2, 2): 3}
    for shape, mesh in meshes_with_this_rank(*number_of_chunks):
        chunks = number_of_chunks[shape]
        net, up, x, edge_attr = make(chunks)
        whole = copy.deepcopy(net)
        expected = whole(x, up, edge_attr)
        expected.square().sum().backward()
        shard = shard_module(
            net,
            {UP: up, ALONG: net.edges},
            mesh,
            tables={"embedding.weight": "mesh"},
            positions={"data": data, "mesh": points},
        )
        local_graph = shard.graphs[UP].split(chunks)
        out = net(shard.nodes("data", x), local_graph, shard.edges(UP, edge_attr))
        out.square().sum().backward()
        shared, own = shard.parameters(net)
        reduce_gradients(shared, own, mesh)
        verdict.close(f"output on {shape}", out, shard.nodes("mesh", expected))
        verdict.same("tables", set(shard.tables), {"embedding.weight", "edges.trainable"})
        close_gradients(verdict, shape, net, whole, shard)


@on_all_ranks
def chunks_of_a_shard_with_few_nodes_or_edges_match_the_whole_graph(group, verdict):
    kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=2))
    sizes = {"in_channels": 8, "hidden_dim": 8, "out_channels": 8, "num_heads": 2, "edge_dim": 3}
    torch.manual_seed(0)
    options = {"update_src_nodes": True, "dropout": 0.5, "layer_kernels": kernels, "config": CONFIG}
    block = GraphTransformerMapperBlock(**sizes, **options).double()
    draw = partial(torch.randn, dtype=torch.float64, requires_grad=True)
    cases = {"two_nodes": True, "one_end": False, "no_edges": False, "isolated": True}
    for name, has_cond_per_node in cases.items():
        graph = structure(name)
        shard = shard_graph(graph, group)
        nodes = (graph.num_src, graph.num_dst)
        x = [draw(2, number, 8) for number in nodes]
        edge_attr = draw(graph.num_edges, 3)
        cond = [draw(number if has_cond_per_node else 1, 2) for number in nodes]
        leaves = [*x, *cond, edge_attr, *block.parameters()]
        local_nodes = [shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)]
        local_x = tuple(rows[:, index] for rows, index in zip(x, local_nodes, strict=True))
        local_cond = cond
        if has_cond_per_node:
            local_cond = [rows[index] for rows, index in zip(cond, local_nodes, strict=True)]
        local_edge_attr = edge_attr[shard.edges]
        block.eval()
        whole = block(x, graph, edge_attr, cond=cond)
        part = block(local_x, shard.split(3), local_edge_attr, cond=local_cond)
        for side, index in enumerate(local_nodes):  # sources are updated too
            expected = whole[side][:, index].detach()
            verdict.close(f"{name}: output {side}", part[side].detach(), expected)
        whole_loss = sum(out.square().sum() for out in whole)
        expected = torch.autograd.grad(whole_loss, leaves, materialize_grads=True)
        part_loss = sum(out.square().sum() for out in part)
        gradients = torch.autograd.grad(part_loss, leaves, materialize_grads=True)
        terms = torch.cat([gradient.flatten() for gradient in expected])
        for n, gradient in enumerate(gradients):
            dist.all_reduce(gradient, group=group)
            verdict.close(f"{name}: gradient {n}", gradient, expected[n], terms)
        block.train()(local_x, shard.split(3), edge_attr[shard.edges], cond=local_cond)
        verdict.same(f"{name}: next draws", len(set(everywhere(float(torch.rand(1)), group))), 1)


@on_all_ranks
def graphs_and_tables_that_do_not_fit_the_module_are_refused(group, verdict):
    net, up, _, _ = make()
    mesh = mesh_of(1, dist.get_world_size())  # all ranks make a mesh together
    cases = [
        ({"up": up}, None, "keys (sources, destinations)"),
        ({UP: up, ("data", "data"): net.edges}, None, "the same number of data"),
        ({ALONG: copy.deepcopy(net.edges)}, None, "part of the module"),
        ({UP: up}, {"embedding.weight": "data"}, "one row for each of the"),
    ]
    for graphs, tables, message in cases:
        call = partial(shard_module, net, graphs, mesh, tables=tables)
        verdict.raises(ValueError, message, call)
    verdict.that(net.embedding.weight.shape[0] == len(points), "a refused module was changed")


@on_all_ranks
@new_plans(programs=3)  # few, for the interpreter
def fused_blocks_on_a_shard_match_the_whole_graph(group, verdict):
    torch.manual_seed(0)
    sizes = {"in_channels": 8, "hidden_dim": 8, "out_channels": 8, "num_heads": 2, "edge_dim": 3}
    config = KernelConfig("triton")
    blocks = [
        Processor(**sizes, config=config),
        GraphTransformerMapperBlock(**sizes, config=config),
    ]
    cases = [  # graph, chunks, whether rank 0 has a hook
        ("two_nodes", 3, False),
        ("one_end", 1, False),
        ("no_edges", 1, False),
        ("two_nodes", 1, True),  # the other ranks use the fused operator
    ]
    draw = partial(torch.randn, requires_grad=True)
    for block, (name, chunks, rank_0_has_hook) in product(blocks, cases):
        graph = structure(name)
        is_mapper = isinstance(block, GraphTransformerMapperBlock)
        if not is_mapper and graph.num_src != graph.num_dst:
            continue
        shard = shard_graph(graph, group).split(chunks)
        x = [draw(number, 8) for number in (graph.num_src, graph.num_dst)]
        edge_attr = draw(graph.num_edges, 3)
        local_nodes = [shard.sources.nodes(shard.rank), shard.destinations.nodes(shard.rank)]
        local_x = [rows[index] for rows, index in zip(x, local_nodes, strict=True)]
        local_edge_attr = edge_attr[shard.edges]
        hook = None
        fused_calls = chunks
        if rank_0_has_hook and shard.rank == 0:
            hook = block.lin_query.register_forward_hook(lambda *_: None)
            fused_calls = 0
        plain = copy.deepcopy(block)
        plain.config = CONFIG
        whole = plain(x if is_mapper else x[1], graph, edge_attr)
        computation = mock.patch.object(fused_block.Computation, "is_faster_fused", new=True)
        with computation, Operators() as operators:
            part = block(local_x if is_mapper else local_x[1], shard, local_edge_attr)
        if is_mapper:
            (_, whole), (_, part) = whole, part
        calls = operators.names.count(BLOCK)
        verdict.same(f"{name}: operators", calls, fused_calls)
        if hook is not None:
            hook.remove()
        verdict.close(f"{name}: output", part.detach(), whole[local_nodes[1]].detach())
        inputs = x if is_mapper else [x[1]]
        grads = []
        for module, out in ((plain, whole), (block, part)):
            leaves = [*inputs, edge_attr, *module.parameters()]
            loss = out.square().sum()
            grads.append(torch.autograd.grad(loss, leaves, materialize_grads=True))
        expected, gradients = grads
        terms = torch.cat([gradient.flatten() for gradient in expected])
        for n, gradient in enumerate(gradients):
            summed = gradient.clone()  # two biases may share one gradient tensor
            dist.all_reduce(summed, group=group)
            verdict.close(f"{name}: gradient {n}", summed, expected[n], terms)


@on_ranks(2)
def an_optimizer_made_before_sharding_trains_the_rows_and_ties_are_kept(group, verdict):
    mesh = mesh_of_group(group)
    net, _, _, _ = make()
    net.head = nn.Linear(4, len(points), bias=False).double()
    net.head.weight = net.embedding.weight  # the table has two names
    whole = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (net, whole)]
    before = dict(net.named_parameters())
    alive = net.embedding.weight.sum()  # a result of the whole table
    shard = shard_module(net, {ALONG: net.edges}, mesh, tables={"embedding.weight": "mesh"})
    verdict.that(net.head.weight is net.embedding.weight, "the tie is cut")
    for name, parameter in net.named_parameters():
        verdict.that(parameter is before[name], f"{name} is not the parameter of the optimiser")
    for model, optimizer in zip((net, whole), optimizers, strict=True):
        (model.embedding.weight.square().sum() + model.head.weight.square().sum()).backward()
        optimizer.step()
    rows = shard.tables["embedding.weight"].index
    verdict.that(alive.requires_grad, "the result must be alive")
    expected = whole.embedding.weight[rows].detach()
    verdict.close("trained rows", net.embedding.weight.detach(), expected)


@on_ranks(2)
def one_name_of_a_tied_table_is_enough(group, verdict):
    mesh = mesh_of_group(group)
    net, _, _, _ = make()
    net.head = nn.Linear(4, len(points), bias=False).double()
    net.head.weight = net.embedding.weight
    number = len(list(net.parameters()))
    # its second name
    shard = shard_module(net, {ALONG: net.edges}, mesh, tables={"head.weight": "mesh"})
    names = {"head.weight", "embedding.weight", "edges.trainable"}
    verdict.same("tables", set(shard.tables), names)
    shared, own = shard.parameters(net)
    expected = {id(net.head.weight), id(net.edges.trainable)}
    verdict.same("own", {id(parameter) for parameter in own}, expected)
    verdict.same("shared", len(shared), number - 2)


@on_ranks(2)
def a_module_with_gradients_of_the_whole_is_refused(group, verdict):
    mesh = mesh_of_group(group)
    net, _, _, _ = make()
    net.embedding.weight.sum().backward()
    tables = {"embedding.weight": "mesh"}
    shard = partial(shard_module, net, {ALONG: net.edges}, mesh, tables=tables)
    message = "must have no gradient when their module is sharded, got one of embedding.weight"
    verdict.raises(ValueError, message, shard)
    net.zero_grad()
    shard()


@on_ranks(2)
def a_saved_buffer_with_a_row_per_node_is_a_table_and_the_callers_tensor_is_kept(group, verdict):
    mesh = mesh_of_group(group)
    net, _, _, _ = make()
    levels = torch.arange(float(len(points)))
    net.register_buffer("levels", levels)
    net.block.register_buffer("levels", levels)  # tied
    shard = shard_module(net, {ALONG: net.edges}, mesh, tables={"levels": "mesh"})
    index = shard.tables["levels"].index
    verdict.same("rows", net.levels, levels[index])
    verdict.that(net.block.levels is net.levels, "the tie is cut")
    verdict.same("table", shard.tables["block.levels"].to_dtensor(net.levels).full_tensor(), levels)


@on_ranks(2)
def options_of_any_layer_that_differ_between_ranks_are_named(group, verdict):
    mesh = mesh_of_group(group)
    is_last = dist.get_rank(group) == 1
    graph = structure("symmetric")
    options = {
        "heads": (2, 4),
        "dropout": (0.0, 0.5),
        "beta": (False, True),
        "concat": (True, False),
        "config": (CONFIG, KernelConfig("torch", precision="bf16")),
    }
    for name, values in options.items():
        sizes = {"out_channels": 8}
        if name == "concat":
            sizes["heads"] = 1
        torch.manual_seed(0)
        conv = GraphTransformerConv(8, **sizes, edge_dim=3)  # the same weights on all ranks
        setattr(conv, name, values[is_last])
        net = nn.Sequential(nn.Dropout(0.1), conv)
        shard = partial(shard_module, net, {ALONG: graph}, mesh)
        message = f"1.{name} must be the same on all ranks, got {values[1]!r} on rank 1"
        verdict.raises(ValueError, message, shard)
    net = nn.Sequential(nn.Dropout(0.1 + is_last / 2), conv)
    shard = partial(shard_module, net, {ALONG: graph}, mesh)
    verdict.raises(ValueError, "0.p must be the same", shard)
