"""Checks on ranks: a checkpoint keeps all rows of a table, whatever wraps its module, or it is refused."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel

from anemoi_gt.distributed import load_checkpoint, reduce_gradients, save_checkpoint, shard_module
from distributed.checks_module import ALONG, Net
from distributed.ranks import mesh_of_group, on_ranks, shared_folder

NAME = "embedding.weight"


def sharded_net(mesh):
    """Return a sharded net with a node table and an edge table, its shard, and the whole net."""
    torch.manual_seed(0)
    net = Net(1).double()
    nn.init.normal_(net.edges.trainable)
    whole = copy.deepcopy(net)
    shard = shard_module(net, {ALONG: net.edges}, mesh, tables={NAME: "mesh"})
    return net, shard, whole


def stepped(net, shard, mesh):
    """Return the optimiser of a net after one step."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    sum(parameter.square().sum() for parameter in net.parameters()).backward()
    reduce_gradients(*shard.parameters(net), mesh)
    optimizer.step()
    return optimizer


@on_ranks(2)
def rows_in_the_state_of_a_wrapper_are_saved_as_the_whole_table(group, verdict):
    mesh = mesh_of_group(group)
    wrappers = {
        "average": AveragedModel,
        "compiled": partial(torch.compile, backend="eager"),
        "DDP": partial(nn.parallel.DistributedDataParallel, process_group=mesh.get_group("data")),
        "inside": lambda net: nn.ModuleDict({"net": net, "average": AveragedModel(net)}),
    }
    for name, wrap in wrappers.items():
        net, shard, whole = sharded_net(mesh)
        folder = shared_folder(group) / "last"
        wrapped = wrap(net)
        save_checkpoint(folder, {"model": wrapped.state_dict()}, shard.tables, group)
        expected = {key: tensor.clone() for key, tensor in wrapped.state_dict().items()}
        for parameter in wrapped.parameters():
            parameter.data.fill_(-1.0)
        state = {"model": wrapped.state_dict()}
        loaded = load_checkpoint(folder, state, shard.tables, group)
        for key, tensor in expected.items():
            verdict.same(f"{name}: {key}", loaded["model"][key], tensor)
        key = next(key for key in expected if key.endswith(NAME))
        table = {"model": {key: torch.zeros_like(whole.embedding.weight)}}
        torch.distributed.checkpoint.load(table, checkpoint_id=folder, process_group=group)
        verdict.same(f"{name}: table", table["model"][key], whole.embedding.weight.detach())


@on_ranks(2)
def a_table_is_saved_whole_and_a_layer_of_its_name_inside_stays_shared(group, verdict):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            # a table with three dimensions
            self.weight = nn.Parameter(torch.arange(34.0).view(17, 2, 1))
            self.linear = nn.Linear(2, 9)  # linear.weight ends in the name of the table

    mesh = mesh_of_group(group)
    net = Root()
    net.edges = Net(1).edges
    shard = shard_module(net, {ALONG: net.edges}, mesh, tables={"weight": "mesh"})
    folder = shared_folder(group) / "last"
    wrapped = AveragedModel(net)
    save_checkpoint(str(folder), wrapped.state_dict(), shard.tables, group)
    whole = {"module.weight": torch.zeros(17, 2, 1), "module.linear.weight": torch.zeros(9, 2)}
    torch.distributed.checkpoint.load(whole, checkpoint_id=folder, process_group=group)
    verdict.same("table", whole["module.weight"], torch.arange(34.0).view(17, 2, 1))
    verdict.same("shared", whole["module.linear.weight"], net.linear.weight.detach())
    net.weight.data.fill_(-1.0)
    loaded = load_checkpoint(str(folder), wrapped.state_dict(), shard.tables, group)
    rows = whole["module.weight"][shard.tables["weight"].index]
    verdict.same("rows", loaded["module.weight"], rows)


@on_ranks(2)
def a_state_in_which_rows_would_be_lost_is_refused_before_anything_is_written(group, verdict):
    mesh = mesh_of_group(group)
    net, shard, _ = sharded_net(mesh)
    optimizer = stepped(net, shard, mesh)
    folder = shared_folder(group) / "last"
    model = net.state_dict()
    by_name = get_optimizer_state_dict(net, optimizer)
    rank = dist.get_rank()
    refused = {
        "the state must have a key that ends in the name of each table, got none for "
        "edges.trainable, embedding.weight": {"model": {"other": torch.zeros(2)}},
        "optimizer.state.0.exp_avg must be the same on all ranks": {
            "model": model,
            "optimizer": optimizer.state_dict(),
        },
        "rank must be the same on all ranks": {"model": model, "rank": torch.tensor(rank)},
        "parts.1 must be the same on all ranks": {
            "model": model,
            "parts": [torch.zeros(2), torch.full((2,), rank)],
        },
        "embedding.weight must have the": {"model": model | {NAME: torch.zeros(17, 4)}},
        "only must be the same on all ranks": {"model": model, "only": torch.zeros(1)},
    }
    if rank == 0:
        del refused["only must be the same on all ranks"]["only"]
    for message, state in refused.items():
        save = partial(save_checkpoint, folder, state, shard.tables, group)
        verdict.raises(ValueError, message, save)
        dist.barrier(group)
        verdict.same(f"files after {message}", list(folder.parent.iterdir()), [])
    state = {"model": model, "optimizer": by_name, "rank": rank}
    save_checkpoint(folder, state, shard.tables, group)
    without_tables = {"optimizer": {"state": {}}}
    load = partial(load_checkpoint, folder, without_tables, shard.tables, group)
    verdict.raises(ValueError, "got none for", load)
