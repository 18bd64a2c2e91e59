"""Checks on ranks: all ranks take an optimiser step or none does; gradients reduced by DDP or `shard_parameters`."""

import math
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from anemoi_gt import GraphTransformerConv
from anemoi_gt.distributed import (
    clip_gradients,
    optimizer_step,
    reduce_gradients,
    shard_module,
    shard_parameters,
)
from distributed.problems import CONFIG, mesh, structure
from distributed.ranks import (
    device_type,
    everywhere,
    mesh_of,
    mesh_of_group,
    on_ranks,
    seeded,
    whole_tensor,
)

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


def sharded_net(on, *, divided=False):
    """Return a sharded net, with parameters divided among ranks or not, its shard, and the initial weights."""
    torch.manual_seed(0)
    net = Net().double()
    shard = shard_module(net, {KIND: structure("symmetric")}, on, tables={TABLE: "mesh"})
    before = [parameter.detach().clone() for parameter in net.parameters()]
    if divided:
        shard_parameters(net, shard, on)
    return net, shard, before


def take_pass(net, shard, scale=1.0):
    """Set gradients of a loss of this rank."""
    x = torch.ones(1, len(mesh), 4, dtype=torch.float64)
    out = net(shard.nodes("mesh", x), shard.graphs[KIND])
    (scale * out.square().sum()).backward()


@on_ranks(2)
def a_table_gradient_that_overflows_on_one_rank_makes_all_skip_the_step(group, verdict):
    on = mesh_of_group(group)
    for lost, max_norm, divided in product(LOST, (1.0, math.inf), (False, True)):
        net, shard, before = sharded_net(on, divided=divided)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=True)  # the default on GPUs
        scaler = torch.amp.GradScaler(device_type(), init_scale=8.0)
        shared, own = shard.parameters(net)
        for is_lost in (True, False):
            optimizer.zero_grad()
            take_pass(net, shard, scaler.scale(torch.ones((), dtype=torch.float64)))
            if is_lost and dist.get_rank() == 1:
                own[0].grad[0, 0] = lost
            norm = optimizer_step(optimizer, shared, own, on, max_norm=max_norm, scaler=scaler)
            label = f"{lost}, max_norm {max_norm}, divided {divided}"
            norm_is_finite = everywhere(bool(norm.isfinite()), group)
            verdict.same(f"{label}: is finite", norm_is_finite, [not is_lost] * 2)
            verdict.same(f"{label}: scale", everywhere(scaler.get_scale(), group), [4.0] * 2)
            after = [whole_tensor(parameter.detach()) for parameter in net.parameters()]
            changed = {not torch.equal(*pair) for pair in zip(after, before, strict=True)}
            verdict.same(f"{label}: changed", changed, {not is_lost})
            weights_are_finite = all(weight.isfinite().all() for weight in after)
            verdict.that(weights_are_finite, f"{label}: weights are not finite")


@on_ranks(2)
def a_step_with_a_scaler_equals_a_step_without(group, verdict):
    on = mesh_of_group(group)
    for divided in (False, True):
        results = []
        for scaler in (None, torch.amp.GradScaler(device_type(), init_scale=8.0)):
            net, shard, _ = sharded_net(on, divided=divided)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            one = torch.ones((), dtype=torch.float64)
            take_pass(net, shard, one if scaler is None else scaler.scale(one))
            parameters = shard.parameters(net)
            norm = optimizer_step(optimizer, *parameters, on, max_norm=0.5, scaler=scaler)
            results.append(
                [norm, *(whole_tensor(parameter.detach()) for parameter in net.parameters())]
            )
        verdict.that(results[0][0] > 0.5, "the gradients must be clipped")
        for n, (without, scaled) in enumerate(zip(*results, strict=True)):
            # 1e-6 beside the norm
            same = torch.allclose(scaled, without, rtol=1e-6)
            verdict.that(same, f"divided {divided}: result {n} differs")


def trained(net, shard, on, x):
    """Return the norm and the whole gradients, unclipped and clipped, of a net that is wrapped or not."""
    batch = x.chunk(on["data"].size())[on.get_local_rank("data")]
    out = net(shard.nodes("mesh", batch), shard.graphs[KIND])
    (out.square().sum() / batch.shape[0]).backward()
    net = getattr(net, "module", net)  # of DDP
    shared, own = shard.parameters(net)
    reduce_gradients(shared, own, on)
    reduced = {name: whole_tensor(parameter.grad) for name, parameter in net.named_parameters()}
    norm = clip_gradients(shared, own, 0.5, on)
    return (
        norm,
        reduced,
        {name: whole_tensor(parameter.grad) for name, parameter in net.named_parameters()},
    )


@on_ranks(2, 4)
def gradients_that_ddp_or_shard_parameters_reduced_match_one_device(group, verdict):
    on = mesh_of(2, 2) if dist.get_world_size(group) == 4 else mesh_of_group(group)
    x = torch.randn(4, len(mesh), 4, generator=seeded(1), dtype=torch.float64)
    torch.manual_seed(0)
    alone = Net().double()
    alone(x, structure("symmetric")).square().sum().div(len(x)).backward()
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters()}
    expected = torch.nn.utils.get_total_norm(gradients.values())
    verdict.that(bool(expected > 0.5), "the gradients must be clipped")
    size = torch.cat([gradient.flatten() for gradient in gradients.values()])
    for wrapper in ("plain", "DDP", "divided"):
        net, shard, _ = sharded_net(on, divided=wrapper == "divided")
        if wrapper == "DDP":
            net = DistributedDataParallel(net, process_group=on.get_group("data"))
        norm, reduced, clipped = trained(net, shard, on, x)
        verdict.close(f"{wrapper}: norm", norm, expected)
        for name, gradient in gradients.items():
            rows = gradient[shard.tables[name].index] if name in shard.tables else gradient
            verdict.close(f"{wrapper}: {name}", reduced[name], rows, terms=size)
            clipped_rows = rows * (0.5 / (expected + 1e-6))
            verdict.close(f"{wrapper}: {name}, clipped", clipped[name], clipped_rows, terms=size)


@on_ranks(4)
def parameters_that_only_data_ranks_share_are_refused(group, verdict):
    on = mesh_of(2, 2)
    net, shard, _ = sharded_net(on)
    fully_shard(net, mesh=on["data"], ignored_params=set(shard.parameters(net)[1]))
    reduce = partial(reduce_gradients, *shard.parameters(net), on)
    verdict.raises(ValueError, "shared must be divided among all 4 ranks", reduce)


class Tied(nn.Module):
    """Convolutions of which two share a weight and one is applied twice, a frozen one, and a layer outside."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(GraphTransformerConv(4, 4, config=CONFIG) for _ in range(4))
        self.convs[1].lin_query = self.convs[0].lin_query
        self.convs.append(self.convs[2])
        self.convs[3].requires_grad_(requires_grad=False)
        self.linear = nn.Linear(4, 4)

    def forward(self, x, graph):
        for conv in self.convs:
            x = x + conv(self.linear(x), graph)
        return x


@on_ranks(2)
def tied_and_frozen_parameters_have_the_gradients_of_whole_ones_twice_bit_for_bit(group, verdict):
    on = mesh_of_group(group)
    results = []
    for divided in (False, True, True):
        torch.manual_seed(0)
        net = Tied().double()
        shard = shard_module(net, {KIND: structure("symmetric")}, on)
        if divided:
            shard_parameters(net, shard, on)
            units = [name for name, part in net.named_modules() if isinstance(part, FSDPModule)]
            verdict.same("units", units, ["", "convs.3"])
        for _ in range(2):  # gradients are accumulated
            take_pass(net, shard)
        reduce_gradients(*shard.parameters(net), on)
        names = dict(net.named_parameters())
        results.append({n: whole_tensor(p.grad) for n, p in names.items() if p.grad is not None})
    expected, first, second = results
    verdict.same("names", list(first), list(expected))
    size = torch.cat([gradient.flatten() for gradient in expected.values()])
    for name, gradient in expected.items():
        verdict.close(name, first[name], gradient, terms=size)
        verdict.same(f"{name} again", second[name], first[name])
