"""Checks on ranks: the whole model, cut to the rows of a rank, gives what it gives whole."""

import copy
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch_geometric.data import HeteroData

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder
from anemoi_gt.distributed import model_shard, reduce_gradients, sum_loss
from anemoi_gt.distributed.model_shard import scatter_model, shard_model
from anemoi_gt.distributed.shard_plan import edges_of_model
from distributed.problems import data, nearest
from distributed.problems import mesh as mesh_points
from distributed.ranks import everywhere, fitting, mesh_of, on_all_ranks

FIELDS = 3


def lat_lon(points):
    radians = torch.stack([points[:, 2].asin(), torch.atan2(points[:, 1], points[:, 0])], dim=1)
    return radians.to(torch.get_default_device())  # points are drawn on the CPU, the model is where its edges are


def weather_graph():
    graph = HeteroData()
    graph["data"].x, graph["hidden"].x = lat_lon(data), lat_lon(mesh_points)
    edges = {
        ("data", "hidden"): nearest(data, mesh_points, 6),
        ("hidden", "hidden"): nearest(mesh_points, mesh_points, 4),
    }
    edges["hidden", "data"] = nearest(mesh_points, data, 3)
    torch.manual_seed(1)
    for (source, destination), edge_index in edges.items():
        store = graph[source, "to", destination]
        store.edge_index = edge_index[:, torch.randperm(edge_index.shape[1])]
        store.edge_length, store.edge_dirs = torch.rand(edge_index.shape[1], 1), torch.rand(edge_index.shape[1], 2)
    return graph


def make_model(**options):
    torch.manual_seed(2)
    options = {"channels": 12, "heads": 4, "num_layers": 2, "config": AttentionConfig(backend="torch")} | options
    model = EncoderProcessorDecoder(weather_graph(), FIELDS, FIELDS, **options).double()
    for name, parameter in model_shard.named_parameters():
        if name.endswith("trainable"):
            torch.nn.init.normal_(parameter)
    return model


WAYS = ("attend_after_exchange", "attend_overlapped")
MESHES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2))  # (data, model)
CASES = (("edges", True, {}), ("edges", False, {"checkpoint_groups": 2, "qk_norm": True}), ("heads", True, {}))


def one_model():
    """All ranks on one model."""
    return mesh_of(1, dist.get_world_size())


@on_all_ranks
def outputs_loss_and_gradients_are_those_of_one_device(group, verdict):
    x, target = torch.randn(2, 2, len(data), FIELDS, dtype=torch.float64)
    for strategy, overlap, options in CASES:
        whole = make_model(**options)
        out = whole(x)
        loss = (out - target).square().sum() / len(data) / 2
        loss.backward()
        expected = dict(whole.named_parameters())
        for shape in fitting(*MESHES):
            mesh = mesh_of(*shape)
            if mesh.get_coordinate() is None:
                continue
            label, part = f"{shape} {strategy} {overlap} {options}", make_model(**options)
            cut = shard_model(part, mesh, strategy, overlap=overlap)
            own = cut.partitions["data"].nodes(cut.rank)
            samples = slice(mesh.get_local_rank("data"), None, mesh["data"].size())
            here = part(x[samples][:, own])
            part_of_loss = (here - target[samples][:, own]).square().sum() / len(data) / len(x[samples])
            part_of_loss.backward()
            reduce_gradients(*cut.parameters(part), mesh)
            verdict.close(f"{label}: out", here.detach(), out.detach()[samples][:, own])
            verdict.close(f"{label}: loss", sum_loss(part_of_loss, mesh), loss.detach())
            for name, parameter in part.named_parameters():
                gradient = expected[name].grad
                gradient = gradient[cut.tables[name].numbers] if name in cut.tables else gradient
                verdict.close(f"{label}: {name}", parameter.grad, gradient)


@on_all_ranks
def attention_waits_for_the_halo_unless_overlap_is_asked_for(group, verdict):
    x = torch.randn(1, len(data), FIELDS, dtype=torch.float64)
    for options, (used, other) in (({}, WAYS), ({"overlap": False}, WAYS), ({"overlap": True}, WAYS[::-1])):
        part = make_model()
        cut = shard_model(part, one_model(), **options)
        with (
            patch.object(model_shard, used, wraps=getattr(model_shard, used)) as called,
            patch.object(model_shard, other) as idle,
        ):
            part(x[:, cut.partitions["data"].nodes(cut.rank)])
        verdict.same(f"{options}: calls of {used} and {other}", (called.call_count, idle.call_count), (4, 0))


@on_all_ranks
def every_trained_row_has_one_owner(group, verdict):
    part, mesh = make_model(), one_model()
    sizes = {name: len(parameter) for name, parameter in part.named_parameters()}
    cut = shard_model(part, mesh)
    for name, table in cut.tables.items():
        rows = [number for there in everywhere(table.numbers.tolist(), group) for number in there]
        verdict.same(name, sorted(rows), list(range(sizes[name])))
    verdict.same("own", sorted(cut.tables), sorted(name for name in sizes if name.endswith("trainable")))


@on_all_ranks
def models_that_cannot_be_cut_say_why(group, verdict):
    mesh, model = one_model(), make_model()
    verdict.raises(ValueError, "mapper_chunks must be 1", lambda: shard_model(make_model(mapper_chunks=2), mesh))
    verdict.raises(ValueError, "strategy must be one of edges, heads", lambda: shard_model(model, mesh, "nodes"))
    if dist.get_rank() == dist.get_world_size() - 1:
        next(model_shard.parameters()).data += 1
    for other in (one_model(), mesh_of(dist.get_world_size(), 1)):
        cut = partial(shard_model, model, other)
        verdict.raises(ValueError, "weights must be the same on all ranks, got", cut)
    model = make_model()
    if dist.get_rank() == 1:
        model_shard.decoder_edges["data"].edge_attr += 1
    verdict.raises(ValueError, "graphs must be the same on all ranks, got", partial(shard_model, model, mesh))


@on_all_ranks
def a_model_that_cannot_be_divided_by_heads_says_so_before_its_first_step(group, verdict):
    mesh, world = one_model(), dist.get_world_size()
    few = make_model(heads=world - 1, channels=12 * (world - 1))
    said = f"got {world - 1} heads and {world} ranks; use strategy 'edges'"
    verdict.raises(ValueError, said, lambda: shard_model(few, mesh, "heads"))
    kernels = make_model(heads=world, channels=4 * world, dropout=0.5, config=AttentionConfig(backend="triton")).float()
    said = "kernels count heads from 0, got 0.5; use attention backend 'torch', or strategy 'edges'"
    verdict.raises(ValueError, said, lambda: shard_model(kernels, mesh, "heads"))
    shard_model(kernels, mesh, "edges")


@on_all_ranks
def ranks_whose_layers_differ_beside_their_weights_are_found(group, verdict):
    is_other, backend = dist.get_rank() == 1, AttentionConfig(backend="torch")
    for other in ({"heads": 2}, {"dropout": 0.5}, {"config": AttentionConfig(backend="torch", precision="bf16")}):
        model = make_model(**({"config": backend} | other if is_other else {}))
        said = "heads, dropout and config of the layers must be the same on all ranks, got "
        verdict.raises(ValueError, said, partial(shard_model, model, one_model()))


@on_all_ranks
def rows_that_are_not_trained_stay_so(group, verdict):
    whole = make_model()
    whole.nodes["data"].trainable.requires_grad_(False)
    shard_model(whole, one_model())
    kept = [whole.nodes[name].trainable.requires_grad for name in ("data", "hidden")]
    verdict.same("requires_grad", kept, [False, True])


@on_all_ranks
def what_is_not_trained_gets_no_gradient_that_an_optimiser_would_let_decay(group, verdict):
    model, mesh = make_model(), one_model()
    cut = shard_model(model, mesh)
    frozen, *others = cut.parameters(model)[0]
    frozen.requires_grad_(False)
    model(torch.randn(1, len(data), FIELDS).double()[:, cut.partitions["data"].nodes(cut.rank)]).sum().backward()
    reduce_gradients(*cut.parameters(model), mesh)
    verdict.that(frozen.grad is None, "what is frozen has a gradient")
    verdict.that(all(parameter.grad is not None for parameter in others), "what is trained has no gradient")


@on_all_ranks
def dropout_drops_what_one_device_drops(group, verdict):
    x = torch.randn(2, len(data), FIELDS, dtype=torch.float64)
    for strategy, overlap in (("edges", True), ("edges", False), ("heads", True)):
        whole, part = make_model(dropout=0.5), make_model(dropout=0.5)
        torch.manual_seed(3)
        out = whole(x)
        cut = shard_model(part, one_model(), strategy, overlap=overlap)
        own = cut.partitions["data"].nodes(cut.rank)
        torch.manual_seed(3)
        verdict.close(f"{strategy} {overlap}: out", part(x[:, own]).detach(), out.detach()[:, own])


@on_all_ranks
def copies_of_a_model_share_its_graphs(group, verdict):
    part = make_model()
    shard_model(part, one_model())
    verdict.that(copy.deepcopy(part).processor_edges()[0] is part.processor_edges()[0], "the graph was copied")


def scattered(mesh, strategy="edges", overlap=False, **options):
    """A part of the model that the first rank makes, and how it is divided."""
    group = dist.new_group(backend="gloo")
    whole = make_model(**options).cpu() if dist.get_rank() == 0 else None
    return scatter_model(whole, mesh, group, strategy, overlap=overlap)


@on_all_ranks
def a_model_that_one_rank_made_is_that_of_one_device_on_all(group, verdict):
    x = torch.randn(2, 2, len(data), FIELDS, dtype=torch.float64)
    world = dist.get_world_size()
    ways = ((1, world), "edges", True), ((world // 2, 2), "edges", False), ((world // 2, 2), "heads", False)
    for shape, strategy, overlap in ways:
        for options in ({}, {"dropout": 0.5}):
            mesh, whole, label = mesh_of(*shape), make_model(**options), f"{shape} {strategy} {overlap} {options}"
            part, cut = scattered(mesh, strategy, overlap, **options)
            own = cut.partitions["data"].nodes(cut.rank)
            torch.manual_seed(3)
            out = whole(x[0])
            torch.manual_seed(3)
            here = part(x[0][:, own])
            verdict.close(f"{label}: out", here.detach(), out.detach()[:, own])
            (out.square().sum()).backward()
            here.square().sum().backward()
            reduce_gradients(*cut.parameters(part), mesh)
            for name, parameter in part.named_parameters():
                gradient = whole.get_parameter(name).grad
                gradient = gradient[cut.tables[name].numbers] if name in cut.tables else gradient
                verdict.close(f"{label}: {name}", parameter.grad, gradient)


@on_all_ranks
def a_model_that_one_rank_made_stays_whole_there_and_no_other_rank_gets_all_edges(group, verdict):
    whole = make_model().cpu() if dist.get_rank() == 0 else None
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()} if whole else {}
    part, _ = scatter_model(whole, one_model(), dist.new_group(backend="gloo"))
    for name, tensor in before.items():
        verdict.same(f"{name} of the whole", whole.state_dict()[name], tensor)
    for path, (module, _, _) in edges_of_model(part).items():
        graph = module.structure().shard.graph
        edges = sum(everywhere(graph.num_edges, group))
        verdict.same(path, edges, len(dict(edges_of_model(make_model()))[path][0].edge_attr))
        verdict.that(
            graph.num_edges < 2 * edges / dist.get_world_size(), f"{path}: {graph.num_edges} of {edges} edges are here"
        )
        held = sum(tensor.shape[0] for tensor in (module.edge_attr, module.trainable))
        verdict.same(f"rows of {path}", held, 2 * graph.num_edges)


@on_all_ranks
def a_model_that_cannot_be_cut_is_refused_by_all_ranks_when_one_made_it(group, verdict):
    refused = lambda: scattered(one_model(), mapper_chunks=2)  # noqa: E731
    verdict.raises(ValueError, "rank 0: mapper_chunks must be 1", refused)


@on_all_ranks
def a_model_must_come_from_the_first_rank_alone(group, verdict):
    mesh, cpu, first = one_model(), dist.new_group(backend="gloo"), dist.get_rank() == 0
    verdict.raises(
        ValueError,
        "model must be given on the first rank",
        lambda: scatter_model(None if first else make_model().cpu(), mesh, cpu),
    )
    verdict.raises(ValueError, "rank 0: model must be given", lambda: scatter_model(None, mesh, cpu))
