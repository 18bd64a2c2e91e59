"""Checks on ranks: all ranks take an optimiser step or none does; gradients reduced by DDP or `fully_shard`."""

import copy
import math
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from anemoi_gt import GraphTransformerConv
from anemoi_gt.distributed import clip_gradients, optimizer_step, reduce_gradients, shard_module
from distributed.problems import CONFIG, mesh, structure
from distributed.ranks import device_type, everywhere, mesh_of, mesh_of_group, on_ranks, seeded

KIND = ("mesh", "mesh")
TABLE = "cities.weight"
LOST = (math.inf, -math.inf, math.nan)


class Net(nn.Module):
    """A convolution on node embeddings and the features of a sample."""

    def __init__(self):
        super().__init__()
        self.cities = nn.Embedding(len(mesh), 4)
        self.conv = GraphTransformerConv(8, 4, heads=2, config=CONFIG)

    def forward(self, x, graph):
        table = self.cities.weight.expand(x.shape[0], -1, -1)
        return self.conv(torch.cat([x, table], dim=-1), graph)


def sharded_net(on):
    torch.manual_seed(0)
    net = Net().double()
    shard = shard_module(net, {KIND: structure("symmetric")}, on, tables={TABLE: "mesh"})
    return net, shard, copy.deepcopy(net)


@on_ranks(2)
def a_table_gradient_that_overflows_on_one_rank_makes_all_skip_the_step(group, verdict):
    on = mesh_of_group(group)
    for lost, max_norm in product(LOST, (1.0, math.inf)):
        net, shard, before = sharded_net(on)
        optimizer = torch.optim.AdamW(net.parameters())
        scaler = torch.amp.GradScaler(device_type(), init_scale=8.0)
        shared, own = shard.parameters(net)
        for is_lost in (True, False):
            optimizer.zero_grad()
            scaler.scale(sum(parameter.sum() for parameter in net.parameters())).backward()
            if is_lost and dist.get_rank() == 1:
                own[0].grad[0, 0] = lost
            norm = optimizer_step(optimizer, shared, own, on, max_norm=max_norm, scaler=scaler)
            label = f"{lost}, max_norm {max_norm}"
            norm_is_finite = everywhere(bool(norm.isfinite()), group)
            verdict.same(f"{label}: is finite", norm_is_finite, [not is_lost] * 2)
            verdict.same(f"{label}: scale", everywhere(scaler.get_scale(), group), [4.0] * 2)
            changed = set()
            for parameter, former in zip(net.parameters(), before.parameters(), strict=True):
                changed.add(not torch.equal(parameter, former))
            verdict.same(f"{label}: changed", changed, {not is_lost})
            weights_are_finite = all(p.isfinite().all() for p in net.parameters())
            verdict.that(weights_are_finite, f"{label}: weights are not finite")


@on_ranks(2)
def a_step_with_a_scaler_equals_a_step_without_and_needs_a_shared_parameter(group, verdict):
    on = mesh_of_group(group)
    results = []
    for scaler in (None, torch.amp.GradScaler(device_type(), init_scale=8.0)):
        net, shard, _ = sharded_net(on)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss = sum(parameter.square().sum() for parameter in net.parameters())
        (loss if scaler is None else scaler.scale(loss)).backward()
        norm = optimizer_step(optimizer, *shard.parameters(net), on, max_norm=0.5, scaler=scaler)
        results.append([norm, *(parameter.detach() for parameter in net.parameters())])
    verdict.that(results[0][0] > 0.5, "the gradients must be clipped")
    for n, (without, scaled) in enumerate(zip(*results, strict=True)):
        # 1e-6 beside the norm
        verdict.that(torch.allclose(scaled, without, rtol=1e-6), f"result {n} differs")
    step = partial(optimizer_step, optimizer, [], list(net.parameters()), on, scaler=scaler)
    verdict.raises(ValueError, "shared must have a parameter to train with a scaler", step)


def trained(net, shard, on, x, wrap):
    """Return the norm and the whole gradients, unclipped and clipped, of a sharded net wrapped over the data axis."""
    wrapped = wrap(net) if wrap else net
    batch = x.chunk(on["data"].size())[on.get_local_rank("data")]
    out = wrapped(shard.nodes("mesh", batch), shard.graphs[KIND])
    (out.square().sum() / batch.shape[0]).backward()
    shared, own = shard.parameters(net)
    reduce_gradients(shared, own, on)
    whole = {name: full(parameter.grad) for name, parameter in net.named_parameters()}
    norm = clip_gradients(shared, own, 0.5, on)
    return norm, whole, {name: full(parameter.grad) for name, parameter in net.named_parameters()}


def full(gradient):
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    return gradient.clone()


@on_ranks(2, 4)
def gradients_that_ddp_or_fully_shard_reduced_over_data_match_one_device(group, verdict):
    on = mesh_of(2, 2) if dist.get_world_size(group) == 4 else mesh_of_group(group)
    x = torch.randn(4, len(mesh), 4, generator=seeded(1), dtype=torch.float64)
    torch.manual_seed(0)
    whole = Net().double()
    whole(x, structure("symmetric")).square().sum().div(len(x)).backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    expected = torch.nn.utils.get_total_norm(gradients.values())
    verdict.that(bool(expected > 0.5), "the gradients must be clipped")
    wrappers = {
        "plain": None,
        "DDP": partial(DistributedDataParallel, process_group=on.get_group("data")),
        "fully_shard": partial(fully_shard, mesh=on["data"]),
    }
    size = torch.cat([gradient.flatten() for gradient in gradients.values()])
    for wrapper, wrap in wrappers.items():
        net, shard, _ = sharded_net(on)
        norm, reduced, clipped = trained(net, shard, on, x, wrap)
        verdict.close(f"{wrapper}: norm", norm, expected)
        for name, gradient in gradients.items():
            rows = gradient[shard.tables[name].index] if name in shard.tables else gradient
            verdict.close(f"{wrapper}: {name}", reduced[name], rows, terms=size)
            clipped_rows = rows * (0.5 / (expected + 1e-6))
            verdict.close(f"{wrapper}: {name}, clipped", clipped[name], clipped_rows, terms=size)
