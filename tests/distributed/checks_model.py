"""Checks on ranks: a sharded model agrees with the whole model."""

import copy
from functools import cache, partial

import torch
import torch.distributed as dist
from support.weather import KINDS, weather_graph
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from anemoi_gt import EncoderProcessorDecoder, KernelConfig
from anemoi_gt.distributed import reduce_gradients, sum_loss
from anemoi_gt.distributed.model_shard import edges_of_model, scatter_model, shard_model
from anemoi_gt.distributed.parameter_shard import shard_parameters
from anemoi_gt.nn import GNNMapper, GNNProcessor
from anemoi_gt.nn.plain import BLOCK, why_not_plain
from distributed.problems import CONFIG, data
from distributed.problems import mesh as mesh_points
from distributed.ranks import (
    cpu_group,
    everywhere,
    mesh_of,
    meshes_with_this_rank,
    on_all_ranks,
    whole_tensor,
)

FIELDS = 3
CHUNKED = {"mapper_chunks": 3, "checkpoint_groups": 2}
GRAPH_NETWORK = {"processor": GNNProcessor, "mapper": GNNMapper, "heads": 8}
MESHES = ((1, 1), (1, 3), (1, 4), (2, 2))  # (data, model); others: checks_training


def graph():
    """Return a weather graph with the nodes of the problems, the same on any device."""
    with torch.device("cpu"):
        nodes = {"data": len(data), "hidden": len(mesh_points)}
        graph = weather_graph(nodes, dict.fromkeys(KINDS, 120))
    return graph.to(torch.get_default_device())


def make_model(**options):
    torch.manual_seed(2)
    options = {"channels": 12, "heads": 4, "num_layers": 2, "config": CONFIG} | options
    model = EncoderProcessorDecoder(graph(), FIELDS, FIELDS, **options).double()
    for name, parameter in model.named_parameters():
        if name.endswith("trainable"):
            torch.nn.init.normal_(parameter)
    return model


def one_model():
    return mesh_of(1, dist.get_world_size())


def scattered(mesh, **options):
    """Return this rank's shard of a model that only the first rank holds."""
    whole = make_model(**options).cpu() if dist.get_rank() == 0 else None
    return scatter_model(whole, mesh, cpu_group())


def sharded(mesh, **options):
    """Return this rank's shard of a model that every rank holds."""
    model = make_model(**options)
    return model, shard_model(model, mesh)


def divided(mesh, **options):
    """Return this rank's shard of a model, with parameters divided among the ranks."""
    model, shard = sharded(mesh, **options)
    shard_parameters(model, shard, mesh)
    return model, shard


def draw_fields():
    """Draw the input and the target [batch, nodes, fields] of one model."""
    torch.manual_seed(4)
    return torch.randn(2, 2, len(data), FIELDS, dtype=torch.float64)


@cache
def one_device(**options):
    """Return the output, the loss and the gradients by name on one device, the reference for every mesh."""
    x, target = draw_fields()
    whole = make_model(**options)
    torch.manual_seed(3)
    out = whole(x)
    loss = (out - target).square().sum() / len(data) / len(x)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    return out.detach(), loss.detach(), gradients


def compare(verdict, label, make, mesh, **options):
    """Compare output, loss and gradients of a sharded model with one device."""
    x, target = draw_fields()
    out, loss, gradients = one_device(**options)
    model, shard = make(mesh, **options)
    nodes = shard.partitions["data"].nodes(shard.rank)
    batch = slice(mesh.get_local_rank("data"), None, mesh["data"].size())
    if options.get("dropout"):
        batch = slice(None)  # masks depend on the position in the batch
    torch.manual_seed(3)
    local = model(x[batch][:, nodes])
    local_loss = (local - target[batch][:, nodes]).square().sum() / len(data) / len(x[batch])
    local_loss.backward()
    reduce_gradients(*shard.parameters(model), mesh)
    verdict.close(f"{label}: out", local.detach(), out[batch][:, nodes])
    verdict.close(f"{label}: loss", sum_loss(local_loss, mesh), loss)
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        if name in shard.tables:
            gradient = gradient[shard.tables[name].index]
        # A bias of the key cancels in the softmax: its gradient sums to 0, and its terms are as
        # large as in the gradient of the weight.
        terms = None
        if "lin_key.bias" in name:
            terms = gradients[name.replace("bias", "weight")]
        verdict.close(f"{label}: {name}", whole_tensor(parameter.grad), gradient, terms)


@on_all_ranks
def output_loss_and_gradients_match_one_device(group, verdict):
    cases = [
        ((2, 2), {"checkpoint_groups": 2, "qk_norm": True}),
        ((2, 2), {"dropout": 0.5}),
        ((2, 2), CHUNKED),
        ((1, 4), GRAPH_NETWORK | {"mapper_chunks": 3, "checkpoint_groups": 1}),
        ((1, 4), {"mapper_chunks": 7}),  # of 17 nodes on 4 ranks: some chunks are empty
    ]
    for shape, mesh in meshes_with_this_rank(*MESHES):
        compare(verdict, f"{shape}", sharded, mesh)
    for shape, options in cases:
        for _, mesh in meshes_with_this_rank(shape):
            compare(verdict, f"{shape} {options}", sharded, mesh, **options)
    for shape, mesh in meshes_with_this_rank((1, 3)):  # uneven parts
        compare(verdict, f"{shape} {CHUNKED}, divided", divided, mesh, **CHUNKED)


@on_all_ranks
def a_model_that_one_rank_made_matches_one_device_on_all_ranks(group, verdict):
    world = dist.get_world_size()
    cases = [((1, world), {"mapper_chunks": 2}), ((world // 2, 2), {"dropout": 0.5})]
    for shape, options in cases:
        compare(verdict, f"{shape} {options}", scattered, mesh_of(*shape), **options)


@on_all_ranks
def a_model_that_one_rank_made_stays_whole_there_and_no_other_rank_gets_all_edges(group, verdict):
    whole = None
    before = {}
    if dist.get_rank() == 0:
        whole = make_model().cpu()
        before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    model, _ = scatter_model(whole, one_model(), cpu_group())
    for parameter in model.parameters():
        parameter.data.fill_(-1.0)
    for name, tensor in before.items():
        verdict.same(f"{name} of the whole", whole.state_dict()[name], tensor)
    sizes = {kind: len(edges.edge_attr) for kind, edges in edges_of_model(make_model()).items()}
    for kind, edges in edges_of_model(model).items():
        local = edges.structure().structure.num_edges
        verdict.same(str(kind), sum(everywhere(local, group)), sizes[kind])
        limit = 2 * sizes[kind] / dist.get_world_size()
        verdict.that(local < limit, f"{kind}: this rank has {local} of {sizes[kind]} edges")
        verdict.same(f"attributes of {kind}", len(edges.edge_attr), local)
        verdict.same(f"trainable rows of {kind}", len(edges.trainable), local)


@on_all_ranks
def each_layer_of_a_divided_model_is_gathered_alone_and_its_blocks_stay_plain(group, verdict):
    model, shard = divided(one_model())
    units = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    layers = ["processor.proc.0", "processor.proc.1", "encoder.data", "decoder.data"]
    verdict.same("units", units, ["", *layers])
    for name, parameter in model.named_parameters():
        has_part = isinstance(parameter, DTensor)
        verdict.that(has_part != (name in shard.tables), f"{name} is divided: {has_part}")
    for block in model.processor.proc:
        verdict.same("refusal", why_not_plain(("", block, (BLOCK,))), None)


@on_all_ranks
def every_trainable_row_has_one_owner(group, verdict):
    sizes = {name: len(parameter) for name, parameter in make_model().named_parameters()}
    _, shard = sharded(one_model())
    for name, table in shard.tables.items():
        rows = []
        for rows_of_rank in everywhere(table.index.tolist(), group):
            rows += rows_of_rank
        verdict.same(name, sorted(rows), list(range(sizes[name])))
    trainable = [name for name in sizes if name.endswith("trainable")]
    verdict.same("tables", sorted(shard.tables), sorted(trainable))


@on_all_ranks
def frozen_parameters_stay_frozen_and_get_no_gradient(group, verdict):
    model, mesh = make_model(), one_model()
    model.nodes["data"].trainable.requires_grad_(requires_grad=False)
    model.processor.proc[0].lin_query.weight.requires_grad_(requires_grad=False)
    shard = shard_model(model, mesh)
    nodes = shard.partitions["data"].nodes(shard.rank)
    x = torch.randn(1, len(data), FIELDS).double()
    model(x[:, nodes]).sum().backward()
    reduce_gradients(*shard.parameters(model), mesh)
    frozen = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    expected = ["nodes.data.trainable", "processor.proc.0.lin_query.weight"]
    verdict.same("without gradient", sorted(frozen), expected)


@on_all_ranks
def copies_of_a_model_share_its_graphs(group, verdict):
    model, _ = sharded(one_model())
    verdict.that(
        copy.deepcopy(model).processor_edges()[0] is model.processor_edges()[0],
        "the graph was copied",
    )


@on_all_ranks
def models_that_cannot_be_sharded_are_refused(group, verdict):
    mesh, model = one_model(), make_model()
    if dist.get_rank() == dist.get_world_size() - 1:
        next(model.parameters()).data += 1
    for other in (mesh, mesh_of(dist.get_world_size(), 1)):
        verdict.raises(
            ValueError,
            "weights must be the same on all ranks, got",
            partial(shard_model, model, other),
        )
    model = make_model()
    if dist.get_rank() == 1:
        model.decoder_edges["data"].edge_attr += 1
    verdict.raises(
        ValueError, "graphs must be the same on all ranks, got", partial(shard_model, model, mesh)
    )


@on_all_ranks
def layer_options_that_differ_between_ranks_are_refused(group, verdict):
    config = KernelConfig(backend="torch", precision="bf16")
    changes = {
        "num_heads": {"heads": 2},
        "dropout": {"dropout": 0.5},
        "config": {"config": config},
    }
    for name, change in changes.items():
        options = change if dist.get_rank() == 1 else {}
        message = f"processor.proc.0.{name} must be the same on all ranks, got "
        verdict.raises(ValueError, message, partial(sharded, one_model(), **options))


@on_all_ranks
def a_scattered_model_must_come_from_the_first_rank_only(group, verdict):
    mesh = one_model()
    cpu = cpu_group()
    model = None if dist.get_rank() == 0 else make_model().cpu()
    message = "model must be on the first rank of the mesh"
    verdict.raises(ValueError, message, lambda: scatter_model(model, mesh, cpu))
    verdict.raises(ValueError, f"rank 0: {message}", lambda: scatter_model(None, mesh, cpu))
