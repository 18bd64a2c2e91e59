"""Checks on ranks: gradients, clipping and checkpoints on a (data, model) mesh do not depend on the mesh."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from anemoi_gt import GraphTransformerConv
from anemoi_gt.distributed import shard_module
from anemoi_gt.distributed.gradients import clip_gradients, reduce_gradients, sum_loss
from anemoi_gt.distributed.model_shard import shard_model
from anemoi_gt.distributed.parameter_shard import shard_parameters
from anemoi_gt.distributed.process_group import make_mesh
from anemoi_gt.distributed.sharded_checkpoint import load_checkpoint, save_checkpoint
from anemoi_gt.nn import StaticEdges
from distributed.checks_model import FIELDS, make_model
from distributed.problems import CONFIG, data, nearest
from distributed.problems import mesh as mesh_points
from distributed.ranks import (
    device_type,
    fitting,
    mesh_of,
    meshes_with_this_rank,
    on_all_ranks,
    on_ranks,
    seeded,
    shared_folder,
    whole_tensor,
)

STEPS = 2
BATCH = 4
MAX_NORM = 0.1
MESHES = ((2, 2), (4, 1))  # (data, model); others: checks_model


def model_to_train():
    """Return a model with frozen key biases, which cancel in the softmax: Adam would amplify their rounding."""
    model = make_model(num_layers=1)
    for name, parameter in model.named_parameters():
        if name.endswith("lin_key.bias"):
            parameter.requires_grad_(requires_grad=False)
    return model


def adamw(model, shard=None):
    """Return an optimiser with tables apart: operations on lists (the default on GPUs) take no DTensors beside tensors."""
    groups = [list(model.parameters())] if shard is None else shard.parameters(model)
    groups = [{"params": group} for group in groups]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=True)


def train(model, x, target, shard=None, mesh=None):
    """Take steps of AdamW; return the losses and the gradient norms."""
    optimizer = adamw(model, shard)
    losses = []
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - target).square().sum() / (len(x) * len(data) * FIELDS)
        loss.backward()
        if mesh is None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
            losses.append(loss.detach())
        else:
            shared, own = shard.parameters(model)
            reduce_gradients(shared, own, mesh)
            norms.append(clip_gradients(shared, own, MAX_NORM, mesh))
            losses.append(sum_loss(loss, mesh))
        optimizer.step()
    return torch.stack(losses), torch.stack(norms)


@on_all_ranks
def steps_are_the_same_on_every_mesh(group, verdict):
    fields = torch.randn(2, BATCH, len(data), FIELDS, generator=seeded(9), dtype=torch.float64)
    whole = model_to_train()
    losses, norms = train(whole, *fields)
    verdict.that(bool((norms > MAX_NORM).any()), "some gradient must be clipped")
    verdict.that(bool(losses[-1] < losses[0]), "the loss must decrease")
    cases = [(False, *found) for found in meshes_with_this_rank(*MESHES)]
    cases += [(True, *found) for found in meshes_with_this_rank((2, 2))]
    for divided, shape, mesh in cases:
        model = model_to_train()
        shard = shard_model(model, mesh)
        if divided:
            shard_parameters(model, shard, mesh)
        label = f"{shape}, divided {divided}"
        batch = fields.chunk(mesh["data"].size(), dim=1)[mesh.get_local_rank("data")]
        nodes = shard.partitions["data"].nodes(shard.rank)
        sharded_losses, sharded_norms = train(model, *batch[:, :, nodes], shard, mesh)
        verdict.close(f"{label}: losses", sharded_losses, losses)
        verdict.close(f"{label}: norms", sharded_norms, norms)
        for name, parameter in model.named_parameters():
            expected = whole.get_parameter(name).detach()
            if name in shard.tables:
                expected = expected[shard.tables[name].index]
            verdict.close(f"{label}: {name}", whole_tensor(parameter.detach()), expected)


@on_ranks(4)
def ranks_of_one_model_are_consecutive(group, verdict):
    mesh = make_mesh(device_type(), model=2)
    verdict.same("mesh", mesh.mesh.tolist(), [[0, 1], [2, 3]])
    verdict.same("axes", mesh.mesh_dim_names, ("data", "model"))
    message = "sharding.model must divide the number of ranks 4, got 3"
    verdict.raises(ValueError, message, partial(make_mesh, device_type(), model=3))
    message = "device_type must be one of cuda, cpu, got 'gpu'"
    verdict.raises(ValueError, message, partial(make_mesh, "gpu", model=2))
    other = mesh_of(2, 2, ("model", "data"))
    loss = torch.tensor(1.0)
    calls = [
        partial(reduce_gradients, [], []),
        partial(clip_gradients, [], [], 1.0),
        partial(sum_loss, loss),
    ]
    axes = "the axes ('data', 'model')"
    for call in calls:
        verdict.raises(ValueError, f"mesh must have {axes}", partial(call, other))
    verdict.same("the norm of no gradients", float(clip_gradients([], [], 1.0, mesh)), 0.0)


@on_ranks(4)
def a_missing_gradient_counts_as_zero(group, verdict):
    mesh = make_mesh(device_type(), model=2)
    shared = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    num_rows = 2 + mesh.get_local_rank("model")
    num_columns = 0 if dist.get_rank() % 2 else 1
    own = [nn.Parameter(torch.zeros(num_rows, num_columns))]
    if dist.get_rank() == 3:
        shared[0].grad = torch.full((3,), 8.0)
    shared[1].grad = torch.full((2,), float(dist.get_rank()), dtype=torch.float64)
    own[0].grad = torch.full_like(own[0], float(dist.get_rank()))
    reduce_gradients(shared, own, mesh)
    # sum over 4 ranks, mean over 2 models
    verdict.same("float32", shared[0].grad, torch.full((3,), 4.0))
    verdict.same("float64", shared[1].grad, torch.full((2,), 3.0, dtype=torch.float64))
    mean = (dist.get_rank() % 2 + dist.get_rank() % 2 + 2) / 2
    verdict.same("own", own[0].grad, torch.full_like(own[0], mean))


@on_all_ranks
def gradients_that_only_one_rank_has_are_clipped_on_all(group, verdict):
    mesh = make_mesh(device_type(), model=2)
    has_own = mesh.get_local_rank("model") == 1
    shared = nn.Parameter(torch.zeros(1))
    own = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    shared.grad = torch.full((1,), 4.0)
    if has_own:
        own.grad = torch.tensor([0.0, 3.0], dtype=torch.float64)
    norm = clip_gradients([shared], [own], 1.0, mesh)
    verdict.close("norm", norm, torch.tensor(5.0, dtype=torch.float64))
    verdict.close("shared", shared.grad, torch.full((1,), 0.8))
    if has_own:
        # as PyTorch clips
        verdict.close("own", own.grad, torch.tensor([0.0, 3.0 / (5.0 + 1e-6)], dtype=torch.float64))
    norm = clip_gradients([shared], [], 9.0, mesh)
    verdict.close("norm without own parameters", norm, torch.tensor(0.8))


class Net(nn.Module):
    """A node embedding, and a convolution on edges with trainable attributes."""

    def __init__(self):
        super().__init__()
        size = len(mesh_points)
        edge_index = nearest(mesh_points, mesh_points, 4)
        attributes = torch.rand(edge_index.shape[1], 2)
        self.nodes = nn.Embedding(size, 4)
        self.edges = StaticEdges(edge_index, attributes, (size, size), trainable=2)
        self.conv = GraphTransformerConv(4, 4, heads=2, edge_dim=4, config=CONFIG)

    def forward(self, scale):
        # with an argument: on a GPU, fully_shard calls no module without one
        return self.conv(scale * self.nodes.weight, *self.edges())


def trained_state(mesh, *, divided=False):
    """Return the state of a sharded module and its optimiser after one step, and the shard."""
    torch.manual_seed(0)
    model = Net().double()
    tables = {"nodes.weight": "mesh"}
    shard = shard_module(model, {("mesh", "mesh"): model.edges}, mesh, tables=tables)
    if divided:
        shard_parameters(model, shard, mesh)
    optimizer = adamw(model, shard)
    model(2.0).square().sum().backward()
    reduce_gradients(*shard.parameters(model), mesh)
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": STEPS,
    }
    return state, shard


def tensors_of(state):
    """Return the weights and moments of a state, by kind and name of the parameter."""
    tensors = {("weight", name): weight for name, weight in state["model"].items()}
    for name, moments in state["optimizer"]["state"].items():
        if "exp_avg" in moments:
            tensors["exp_avg", name] = moments["exp_avg"]
    return tensors


@on_all_ranks
def a_checkpoint_of_all_ranks_is_read_on_any_number_of_ranks(group, verdict):
    folder = shared_folder(group) / "last"
    with pytest.raises(FileNotFoundError, match="must be a checkpoint in .*last, found none"):
        load_checkpoint(folder, {}, {}, group)
    shapes = [(1, 1), (1, 3), (2, 2)]
    members = {shape: dist.new_group(range(shape[0] * shape[1])) for shape in fitting(*shapes)}
    for divided in (False, True):  # the second checkpoint replaces the first
        state, shard = trained_state(mesh_of(1, dist.get_world_size()), divided=divided)
        save_checkpoint(folder, state, shard.tables, group)
        verdict.same("files", [path.name for path in folder.parent.iterdir()], ["last"])
        whole = {}
        for (kind, name), value in tensors_of(state).items():
            if name in shard.tables:
                whole[kind, name] = shard.tables[name].to_dtensor(value).full_tensor()
            else:
                whole[kind, name] = whole_tensor(value)
        moments_of_tables = {("exp_avg", name) for name in shard.tables}
        verdict.that(moments_of_tables < set(whole), "tables must have moments")
        for shape, mesh in meshes_with_this_rank(*(shapes[2:] if divided else shapes)):
            # of whole parameters into divided ones, and the other way round
            state, shard = trained_state(mesh, divided=not divided)
            for tensor in tensors_of(state).values():
                tensor.detach().fill_(-1.0)
            loaded = load_checkpoint(folder, state | {"step": 0}, shard.tables, members[shape])
            verdict.same("step", loaded["step"], STEPS)
            for (kind, name), value in tensors_of(loaded).items():
                expected = whole[kind, name]
                if name in shard.tables:
                    expected = expected[shard.tables[name].index]
                label = f"{shape}, divided {not divided}: {kind} of {name}"
                verdict.same(label, whole_tensor(value), expected)
