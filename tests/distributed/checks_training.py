"""Checks on ranks: a model on a (data, model) mesh learns what it learns on one device, whatever the mesh."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from anemoi_gt import AttentionConfig, GraphStructure
from anemoi_gt.distributed import (
    Partition,
    ShardedTable,
    attend_overlapped,
    clip_gradients,
    destination_cost,
    load_checkpoint,
    make_mesh,
    reduce_gradients,
    save_checkpoint,
    shard_graph,
    sum_loss,
)
from distributed.problems import EDGE_DIM, GRAPHS, WAYS, WIDTH, Layer, attend_whole
from distributed.ranks import device_type, fitting, mesh_of, on_all_ranks, on_ranks, seeded, shared_folder

CONFIG = AttentionConfig(backend="torch")
SIZES = {"data": 41, "mesh": 17}
EDGES = {"encoder": ("data", "mesh"), "processor": ("mesh", "mesh"), "decoder": ("mesh", "data")}
STEPS, SAMPLES = 10, 4
MESHES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 1))  # (data, model)
ALL_WAYS = ((1, 3), (2, 2))  # where the other ways are tried too
NAMES = {"encoder": "encoder", "processor": "symmetric", "decoder": "decoder"}


class Model(nn.Module):
    """Encoder, processor, decoder, with trained features of nodes and edges: all of them, or those of one rank."""

    def __init__(self, shards=None):
        super().__init__()
        torch.manual_seed(5)
        rows = {name: torch.randn(size, 2, dtype=torch.float64) for name, size in SIZES.items()}
        rows |= {name: torch.randn(GRAPHS[NAMES[name]][0].shape[1], EDGE_DIM, dtype=torch.float64) for name in EDGES}
        if shards is not None:
            owned = {"data": shards["decoder"].destinations, "mesh": shards["encoder"].destinations}
            rank = shards["encoder"].rank
            rows |= {name: rows[name][partition.nodes(rank)] for name, partition in owned.items()}
            rows |= {name: rows[name][shards[name].edges] for name in EDGES}
        self.rows = nn.ParameterDict(rows)  # after the draws, which are the same everywhere
        self.layers = nn.ModuleDict({name: Layer(torch.float64) for name in EDGES})

    def forward(self, x, attend):
        data = torch.cat([x, self.rows["data"].expand(len(x), -1, -1)], dim=-1)
        nodes = {"data": data, "mesh": torch.zeros(len(x), *self.rows["mesh"].shape[:1], WIDTH, dtype=x.dtype)}
        nodes["mesh"] = nodes["mesh"] + self.rows["mesh"].repeat(1, WIDTH // 2)
        for name, (source, destination) in EDGES.items():
            nodes[destination] = self.layers[name](nodes[source], nodes[destination], self.rows[name], attend[name])
        return nodes["data"]

    def parameters_of(self):
        """(shared by the ranks of a model, own rows)."""
        return list(self.layers.parameters()), list(self.rows.parameters())


def samples():
    generator = seeded(9)
    x = torch.randn(SAMPLES, SIZES["data"], WIDTH - 2, generator=generator, dtype=torch.float64)
    target = torch.randn(SAMPLES, SIZES["data"], WIDTH, generator=generator, dtype=torch.float64)
    return x, target


def structure(name):
    edge_index, sizes = GRAPHS[NAMES[name]]
    return GraphStructure.from_edge_index(edge_index, sizes)


def learn(model, x, target, attend, mesh):
    """Ten steps of AdamW; the losses, and the lengths of the gradients."""
    shared, own = model.parameters_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scale = 1 / (len(x) * SIZES["data"] * WIDTH)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x, attend) - target).square().sum() * scale
        loss.backward()
        if mesh is None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            losses.append(loss.detach())
        else:
            reduce_gradients(shared, own, mesh)
            norms.append(clip_gradients(shared, own, 0.1, mesh))
            losses.append(sum_loss(loss, mesh))
        optimizer.step()
    return torch.stack(losses), torch.stack(norms)


def partitions(parts):
    """Who owns which nodes, the same for all three graphs."""
    costs = {
        name: destination_cost(structure(graph).colptr.diff())
        for name, graph in (("data", "decoder"), ("mesh", "processor"))
    }
    return {name: Partition.balanced(cost, parts) for name, cost in costs.items()}


def learn_on(mesh, way):
    """The same on this rank's part of a mesh: the losses, lengths, and the model."""
    strategy, attend = WAYS[way]
    group, owners = mesh.get_group("model"), partitions(mesh["model"].size())
    shards = {
        name: shard_graph(structure(name), group, strategy, sources=owners[source], destinations=owners[destination])
        for name, (source, destination) in EDGES.items()
    }
    model = Model(shards)
    x, target = (
        part.chunk(mesh["data"].size())[mesh.get_local_rank("data")][
            :, owners["data"].nodes(mesh.get_local_rank("model"))
        ]
        for part in samples()
    )
    attend = {name: partial(attend, shard, config=CONFIG) for name, shard in shards.items()}
    return *learn(model, x, target, attend, mesh), model, shards


@on_all_ranks
def ten_steps_are_the_same_on_every_mesh(group, verdict):
    whole = Model()
    losses, norms = learn(
        whole, *samples(), {name: partial(attend_whole, structure(name), config=CONFIG) for name in EDGES}, None
    )
    verdict.that(bool((norms > 0.1).any()), "some gradient must be clipped")
    verdict.that(bool(losses[-1] < losses[0]), "something must be learned")
    for data, model in fitting(*MESHES):
        mesh = mesh_of(data, model)
        if mesh.get_coordinate() is None:
            continue  # a rank that has no place in this mesh
        for way in WAYS if (data, model) in ALL_WAYS else ("edges, overlapped",):
            label = f"{data} x {model}, {way}"
            here, lengths, part, shards = learn_on(mesh, way)
            verdict.close(f"{label}: losses", here, losses)
            verdict.close(f"{label}: lengths of gradients", lengths, norms)
            for (name, parameter), expected in zip(
                part.layers.named_parameters(), whole.layers.parameters(), strict=True
            ):
                verdict.close(f"{label}: {name}", parameter.detach(), expected.detach())
            for name in EDGES:
                verdict.close(
                    f"{label}: {name}", part.rows[name].detach(), whole.rows[name].detach()[shards[name].edges]
                )


@on_ranks(4)
def ranks_are_laid_out_with_those_of_one_model_side_by_side(group, verdict):
    mesh = make_mesh(device_type(), model=2)
    verdict.same("mesh", mesh.mesh.tolist(), [[0, 1], [2, 3]])
    verdict.same("axes", mesh.mesh_dim_names, ("data", "model"))
    verdict.raises(
        ValueError, "sharding.model must divide the number of ranks 4, got 3", lambda: make_mesh(device_type(), model=3)
    )
    other = mesh_of(2, 2, ("model", "data"))
    loss = torch.tensor(1.0)
    for call in (partial(reduce_gradients, [], []), partial(clip_gradients, [], [], 1.0), partial(sum_loss, loss)):
        verdict.raises(ValueError, "mesh must have the axes ('data', 'model')", partial(call, other))
        verdict.raises(ValueError, "mesh must be a DeviceMesh with the axes ('data', 'model')", partial(call, group))
    verdict.raises(ValueError, "device_type must be one of cuda, cpu, got 'gpu'", lambda: make_mesh("gpu", model=2))
    verdict.same("the length of no gradients", float(clip_gradients([], [], 1.0, mesh)), 0.0)


@on_ranks(4)
def a_missing_gradient_counts_as_zero(group, verdict):
    mesh = make_mesh(device_type(), model=2)
    shared = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    own = [nn.Parameter(torch.zeros(2 + mesh.get_local_rank("model"), 0 if dist.get_rank() % 2 else 1))]
    if dist.get_rank() == 3:
        shared[0].grad = torch.full((3,), 8.0)
    shared[1].grad = torch.full((2,), float(dist.get_rank()), dtype=torch.float64)
    own[0].grad = torch.full_like(own[0], float(dist.get_rank()))
    reduce_gradients(shared, own, mesh)
    verdict.same("float32", shared[0].grad, torch.full((3,), 4.0))  # the sum over 4 ranks by 2 samples
    verdict.same("float64", shared[1].grad, torch.full((2,), 3.0, dtype=torch.float64))
    mean = (dist.get_rank() % 2 + dist.get_rank() % 2 + 2) / 2
    verdict.same("own", own[0].grad, torch.full_like(own[0], mean))


@on_all_ranks
def gradients_that_one_rank_alone_has_are_clipped_on_all(group, verdict):
    mesh = make_mesh(device_type(), model=2)
    has_own = mesh.get_local_rank("model") == 1
    shared, own = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    shared.grad = torch.full((1,), 4.0)
    if has_own:
        own.grad = torch.tensor([0.0, 3.0], dtype=torch.float64)
    verdict.close("length", clip_gradients([shared], [own], 1.0, mesh), torch.tensor(5.0, dtype=torch.float64))
    verdict.close("shared", shared.grad, torch.full((1,), 0.8))
    if has_own:
        verdict.close("own", own.grad, torch.tensor([0.0, 3.0 / (5.0 + 1e-6)], dtype=torch.float64))  # as PyTorch clips
    verdict.close("nothing of its own", clip_gradients([shared], [], 9.0, mesh), torch.tensor(0.8))


def state_of(model, optimizer):
    """The state of a run as a checkpoint holds it, optimiser by name of parameter."""
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": STEPS}


def tables_of(shards, mesh):
    """Which rows of the whole tables a rank's parameters hold."""
    owned = {"data": shards["decoder"].destinations, "mesh": shards["encoder"].destinations}
    rank = mesh.get_local_rank("model")
    tables = {f"rows.{name}": ShardedTable(owned[name].nodes(rank), SIZES[name], mesh) for name in SIZES}
    edges = {name: GRAPHS[NAMES[name]][0].shape[1] for name in EDGES}
    return tables | {f"rows.{name}": ShardedTable(shards[name].edges, edges[name], mesh) for name in EDGES}


def trained(shards, attend, x, target, mesh):
    """A model and its optimiser after one step."""
    model = Model(shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (model(x, attend) - target).square().sum().backward()
    reduce_gradients(*model.parameters_of(), mesh)
    optimizer.step()
    return model, optimizer


@on_all_ranks
def a_checkpoint_of_all_ranks_is_read_on_any_number(group, verdict):
    folder = shared_folder(group) / "last"

    def on(data, ranks):
        mesh = mesh_of(data, ranks)
        members = dist.new_group(range(data * ranks))
        if mesh.get_coordinate() is None:
            return None
        owners = partitions(ranks)
        shards = {
            name: shard_graph(structure(name), mesh.get_group("model"), sources=owners[src], destinations=owners[dst])
            for name, (src, dst) in EDGES.items()
        }
        x, target = (part[:, owners["data"].nodes(mesh.get_local_rank("model"))] for part in samples())
        attend = {name: partial(attend_overlapped, shard, config=CONFIG) for name, shard in shards.items()}
        return members, tables_of(shards, mesh), partial(trained, shards, attend, x, target, mesh), shards

    members, tables, train, _ = on(1, dist.get_world_size())
    with pytest.raises(FileNotFoundError, match="must be a checkpoint in .*last, found none"):
        load_checkpoint(folder, {}, {}, members)
    for _ in range(2):  # the second takes the place of the first
        model, optimizer = train()
        save_checkpoint(folder, state_of(model, optimizer), tables, members)
    verdict.same("files", [path.name for path in folder.parent.iterdir()], ["last"])
    rows = dict(model.rows.named_parameters())
    whole = {name: tables[f"rows.{name}"].whole(rows[name]).full_tensor() for name in rows}
    for data, ranks in fitting((1, 1), (1, 2), (1, 3), (2, 2), (4, 1)):
        here = on(data, ranks)
        if here is None:
            continue
        members, tables, train, shards = here
        other, optimizer = train()
        state = state_of(other, optimizer)
        for part in (*state["model"].values(), *(v for s in state["optimizer"]["state"].values() for v in s.values())):
            part.detach().fill_(-1.0)
        state["step"] = 0
        loaded = load_checkpoint(folder, state, tables, members)
        verdict.same("step", loaded["step"], STEPS)
        for name in rows:
            numbers = shards[name].edges if name in EDGES else None
            if numbers is None:
                owner = shards["decoder" if name == "data" else "encoder"]
                numbers = owner.destinations.nodes(owner.rank)
            verdict.same(f"{data} x {ranks}: {name}", loaded["model"][f"rows.{name}"], whole[name][numbers])
            moment = loaded["optimizer"]["state"][f"rows.{name}"]
            verdict.same(f"{data} x {ranks}: step of {name}", float(moment["step"]), 1.0)
            verdict.same(f"{data} x {ranks}: moment of {name}", moment["exp_avg"].shape, whole[name][numbers].shape)
            verdict.that(bool((moment["exp_avg"] != -1.0).all()), f"{data} x {ranks}: moment of {name} is not read")
        for name, value in model.layers.state_dict().items():
            verdict.same(f"{data} x {ranks}: {name}", loaded["model"][f"layers.{name}"], value)
