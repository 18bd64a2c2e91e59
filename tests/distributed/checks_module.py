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
    fused_block,
)
from anemoi_gt.nn import GraphTransformerProcessorBlock as Processor
from anemoi_gt.ops.triton_backend import attention_steps, sublayer_steps
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

UP, ALONG = ("data", "mesh"), ("mesh", "mesh")


class Net(nn.Module):
    """A convolution with beta, a mapper, a block on static edges with trained attributes, an embedding of nodes."""

    def __init__(self, chunks):
        super().__init__()
        self.embedding = nn.Embedding(len(points), 4)
        edge_index = nearest(points, points, 4)
        sizes = {"trainable": 2, "num_chunks": chunks}
        self.edges = StaticEdges(
            edge_index, torch.rand(edge_index.shape[1], 2), (len(points),) * 2, **sizes
        )
        sizes = {"num_heads": 2, "config": CONFIG}
        self.up = GraphTransformerForwardMapper(
            in_channels_src=3,
            in_channels_dst=4,
            num_channels=8,
            edge_dim=2,
            gradient_checkpointing=True,
            **sizes,
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
    up = GraphStructure.from_edge_index(
        edge_index[:, torch.randperm(edge_index.shape[1])], (len(data), len(points))
    )
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
        shard = shard_module(
            net,
            {UP: up, ALONG: net.edges},
            mesh,
            tables={"embedding.weight": "mesh"},
            positions={"data": data, "mesh": points},
        )
        out = net(
            shard.nodes("data", x), shard.graphs[UP].split(chunks), shard.edges(UP, edge_attr)
        )
        out.square().sum().backward()
        shared, own = shard.parameters(net)
        reduce_gradients(shared, own, mesh)
        verdict.close(f"output on {shape}", out, shard.nodes("mesh", expected))
        gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
        verdict.that(
            set(shard.tables) == {"embedding.weight", "edges.trainable"},
            f"tables {list(shard.tables)}",
        )
        size = max(gradient.abs().max() for gradient in gradients.values())
        for name, parameter in net.named_parameters():
            gradient = gradients[name]
            if name in shard.tables:
                gradient = gradient[shard.tables[name].index]
            verdict.close(f"{name} on {shape}", parameter.grad, gradient, terms=size)
        lines = str(shard).splitlines()
        verdict.that(
            lines[0] == f"rank {mesh.get_local_rank('model')} of {shape[1]}", f"said {lines[0]}"
        )


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
        own_cond = tuple(
            rows[index] if each else rows for rows, index in zip(cond, own, strict=True)
        )
        block.eval()
        whole = block(x, graph, edge_attr, cond=cond)
        part = block(own_x, shard.split(3), edge_attr[shard.edges], cond=own_cond)
        for side, index in enumerate(own):  # sources are updated too
            verdict.close(
                f"{name}: output {side}", part[side].detach(), whole[side][:, index].detach()
            )
        expected, gradients = (
            torch.autograd.grad(
                sum(out.square().sum() for out in outputs), leaves, materialize_grads=True
            )
            for outputs in (whole, part)
        )
        for n, gradient in enumerate(gradients):
            dist.all_reduce(gradient, group=group)
            verdict.close(
                f"{name}: gradient {n}",
                gradient,
                expected[n],
                torch.cat([g.flatten() for g in expected]),
            )
        block.train()(own_x, shard.split(3), edge_attr[shard.edges], cond=own_cond)
        verdict.same(f"{name}: next draws", len(set(everywhere(float(torch.rand(1)), group))), 1)


@on_all_ranks
def what_does_not_fit_the_module_is_named(group, verdict):
    net, up, _, _ = make()
    mesh = mesh_of(1, dist.get_world_size())  # all ranks make a mesh together
    for graphs, tables, said in (
        ({}, None, "at least one graph"),
        ({"up": up}, None, "keys (sources, destinations)"),
        ({UP: up, ("data", "data"): net.edges}, None, "the same number of data"),
        ({ALONG: copy.deepcopy(net.edges)}, None, "part of the module"),
        ({UP: up}, {"weight": "mesh"}, "name parameters or buffers"),
        ({UP: up}, {"embedding.weight": "sea"}, "name a set of nodes or a graph"),
        ({UP: up}, {"embedding.weight": "data"}, "one row for each of the"),
        ({UP: net}, None, "GraphStructures or StaticEdges"),
    ):
        verdict.raises(
            ValueError, said, lambda g=graphs, t=tables: shard_module(net, g, mesh, tables=t)
        )
    verdict.that(net.embedding.weight.shape[0] == len(points), "a refused module was changed")


@on_all_ranks
def blocks_of_a_shard_by_fused_sublayers_give_what_they_give_on_the_whole_graph(group, verdict):
    torch.manual_seed(0)
    sizes = {"in_channels": 8, "hidden_dim": 8, "out_channels": 8, "num_heads": 2, "edge_dim": 3}
    attention_steps.PROGRAMS = sublayer_steps.PROGRAMS = 3  # of the interpreter
    blocks = [
        kind(**sizes, config=AttentionConfig("triton"))
        for kind in (Processor, GraphTransformerMapperBlock)
    ]
    watched = ("two_nodes", 1, True)  # a hook on one rank, whose other ranks use the operator
    ways = (
        ("two_nodes", 1, False),
        ("two_nodes", 3, False),
        ("one_end", 1, False),
        ("no_edges", 1, False),
        watched,
    )
    for block, (name, chunks, is_watched) in product(blocks, ways):
        graph, is_mapper = structure(name), isinstance(block, GraphTransformerMapperBlock)
        if not is_mapper and graph.num_src != graph.num_dst:
            continue
        shard, draw = (
            shard_graph(graph, group).split(chunks),
            partial(torch.randn, requires_grad=True),
        )
        x, edge_attr = (
            [draw(number, 8) for number in (graph.num_src, graph.num_dst)],
            draw(graph.num_edges, 3),
        )
        own = [partition.nodes(shard.rank) for partition in (shard.sources, shard.destinations)]
        parts = [rows[i] for rows, i in zip(x, own, strict=True)]
        given = [(x, graph, edge_attr), (parts, shard, edge_attr[shard.edges])]
        is_watched &= shard.rank == 0
        hook = block.lin_query.register_forward_hook(lambda *_: None) if is_watched else None
        number = 0 if is_watched else 1 + chunks
        faster = fused_block.Computation.of(x[1], block.config)._replace(is_faster_fused=True)
        computation = mock.patch.object(fused_block.Computation, "of", return_value=faster)
        with computation, Operators() as operators:
            whole, part = (
                block(*side)[1] if is_mapper else block(side[0][1], *side[1:]) for side in given
            )
        verdict.same(
            f"{name}: operators",
            operators.names.count("anemoi_gt.attention_sublayer_triton.default"),
            number,
        )
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


@on_ranks(2)
def an_optimizer_made_before_sharding_trains_the_rows_and_ties_stay_ties(group, verdict):
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
        verdict.that(parameter is before[name], f"{name} is another object than the optimiser has")
    for model, optimizer in zip((net, whole), optimizers, strict=True):
        (model.embedding.weight.square().sum() + model.head.weight.square().sum()).backward()
        optimizer.step()
    rows = shard.tables["embedding.weight"].index
    verdict.that(alive.requires_grad, "the result must be alive")
    verdict.close(
        "trained rows", net.embedding.weight.detach(), whole.embedding.weight[rows].detach()
    )


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
    verdict.same(
        "own", {id(parameter) for parameter in own}, {id(net.head.weight), id(net.edges.trainable)}
    )
    verdict.same("shared", len(shared), number - 2)


@on_ranks(2)
def a_module_with_gradients_of_the_whole_is_refused(group, verdict):
    mesh = mesh_of_group(group)
    net, _, _, _ = make()
    net.embedding.weight.sum().backward()
    shard = partial(
        shard_module, net, {ALONG: net.edges}, mesh, tables={"embedding.weight": "mesh"}
    )
    verdict.raises(
        ValueError,
        "must have no gradient when their module is sharded, got one of embedding.weight",
        shard,
    )
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
    mesh, is_last = mesh_of_group(group), dist.get_rank(group) == 1
    graph = structure("symmetric")
    options = {
        "heads": (2, 4),
        "dropout": (0.0, 0.5),
        "beta": (False, True),
        "concat": (True, False),
        "config": (CONFIG, AttentionConfig("torch", precision="bf16")),
    }
    for name, values in options.items():
        sizes = {"out_channels": 8} | ({"heads": 1} if name == "concat" else {})
        torch.manual_seed(0)
        conv = GraphTransformerConv(8, **sizes, edge_dim=3)  # the same weights on all ranks
        setattr(conv, name, values[is_last])
        net = nn.Sequential(nn.Dropout(0.1), conv)
        shard = partial(shard_module, net, {ALONG: graph}, mesh)
        verdict.raises(
            ValueError,
            f"1.{name} must be the same on all ranks, got {values[1]!r} on rank 1",
            shard,
        )
    net = nn.Sequential(nn.Dropout(0.1 + is_last / 2), conv)
    verdict.raises(
        ValueError, "0.p must be the same", partial(shard_module, net, {ALONG: graph}, mesh)
    )
