"""Anemoi's models on several gloo ranks, and on one rank: `python anemoi_shards.py FOLDER`.

Four ranks are started once and run every case of `CASES` with us; rank 0 writes FOLDER/CASE.pt: the
loss, what Anemoi's strategy makes of the gradients, and what it counted. `one_rank(case)` is the
same with Anemoi's own code.
"""

import logging
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, get_shard_sizes

from anemoi_gt import GraphStructure
from anemoi_gt.distributed import HaloExchange
from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.ops.triton_backend import attention_steps, sublayer_steps
from support.anemoi_model import (
    build,
    draw_conditions,
    graph_of,
    make_ensemble_options,
    make_family_options,
    make_options,
    transport_arguments,
)
from support.garbage import collect_seldom
from support.interpreter import speed_up_interpreter
from support.weather import KINDS, weather_graph

RANKS = 4
LAYERS = 2


@dataclass(frozen=True)
class Case:
    """Options of a case, its number of models and of ranks of each."""

    ranks: int = 2
    models: int = 1
    graph: str = "symmetric"
    batch: int = 1
    ensemble: int = 1
    keep_sharded: bool = True
    options: dict = field(default_factory=dict, hash=False)
    install: dict = field(default_factory=dict, hash=False)
    compiled: bool = False
    counted: bool = False
    fused: bool = False  # blocks by fused sub-layers, in float32
    family: str | None = (
        None  # of `make_family_options`, fused, and on one rank in float32 too, with the same noise
    )
    watched: bool = False  # on the first rank, hooks watch what our attention does not call


TOPOLOGIES = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "4": (4, 1), "2x2": (2, 2)}
# with qk_norm no gradient is zero by nature
OPTIONS = {
    "channels": 16,
    "heads": 2,
    "layers": LAYERS,
    "qk_norm": True,
}
# of what takes seconds: interpreted kernels, compiled blocks
ONE_LAYER = {
    "layers": 1,
    "layer_chunks": 1,
}
FUSED = {"fused": True, "options": ONE_LAYER | {"mapper_chunks": 1}}
# by Anemoi, for which a rank must have two heads
WITHOUT_OURS = {
    "counted": True,
    "install": {"sharding": False},
}
COUNTED = {("symmetric", "1", 1), ("symmetric", "3", 1), ("asymmetric", "4", 2)}
# Batch on the symmetric graph, the other one on the asymmetric graph: each topology meets both
# graphs and both batches, and each graph both batches.
BATCHES = {"1": 1, "2": 2, "3": 1, "4": 1, "2x2": 2}
# Anemoi shards a batch of one
CASES = {
    **{
        f"{graph}-{name}-batch{batch}": Case(
            *TOPOLOGIES[name], graph, batch, counted=(graph, name, batch) in COUNTED
        )
        for name, of_symmetric in BATCHES.items()
        for graph, batch in (("symmetric", of_symmetric), ("asymmetric", 3 - of_symmetric))
    },
    **{
        f"ensemble-{name}": Case(*TOPOLOGIES[name], ensemble=2)
        for name, batch in BATCHES.items()
        if batch == 1
    },
    **{
        f"ensemble-{name}-batch2": Case(*TOPOLOGIES[name], batch=2, ensemble=2, graph="asymmetric")
        for name, batch in BATCHES.items()
        if batch == 2
    },
    **{f"tiny-{batch}": Case(4, graph="tiny", batch=batch) for batch in (1, 2)},
    **{
        f"replicated-{ranks}-{b}": Case(ranks, graph="asymmetric", batch=b, keep_sharded=False)
        for ranks, b in ((2, 1), (3, 2))
    },
    "tiny-replicated": Case(4, graph="tiny", batch=2, keep_sharded=False),
    "all activations kept": Case(3, options={"checkpointing": False, "mapper_chunks": 1}, batch=2),
    "edges embedded": Case(
        3, options={"edge_pre_mlp": True}, install={"fuse_edges": False}, batch=2
    ),
    "hooks on one rank": Case(2, watched=True),
    "compiled": Case(2, graph="asymmetric", batch=2, options=ONE_LAYER, compiled=True),
    **{
        f"fused-{name}-{ranks}": Case(
            ranks,
            graph=name,
            batch=batch,
            options={"qk_norm": False} | ONE_LAYER,
            fused=True,
            compiled=name == "small",
        )
        for name, ranks, batch in (("small", 2, 2), ("tiny", 4, 2))
    },
    **{
        f"fused ensemble-{ranks}": Case(
            ranks, graph="small", batch=batch, ensemble=2, family="ensemble", **FUSED
        )
        for ranks, batch in ((1, 2), (2, 1), (3, 2))
    },
    **{
        f"fused transport-{ranks}": Case(
            ranks, graph="small", batch=batch, family="transport", **FUSED
        )
        for ranks, batch in ((1, 2), (2, 1), (3, 1))
    },
    **{
        f"Anemoi's {strategy}-{ranks}": Case(
            ranks, options={"heads": 8, "shard_strategy": strategy}, **WITHOUT_OURS
        )
        for strategy in ("edges", "heads")
        for ranks in (2, 3)
    },
}


@cache
def graph(name):
    """The graph of a case; of the tiny one two ranks of four have no hidden node, and some nodes no edge."""
    if name == "small":
        return weather_graph({"data": 13, "hidden": 7}, dict.fromkeys(KINDS, 24))
    if name == "tiny":
        return weather_graph({"data": 7, "hidden": 2}, dict.fromkeys(KINDS, 5))
    graph = graph_of("O8", 2)
    if name == "asymmetric":  # the nearest six, seen from nodes that are each moved a little
        x, generator = graph["hidden"].x, torch.Generator().manual_seed(0)
        lat, lon = x.unbind(1)
        points = torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], 1)
        moved = points + 0.1 * torch.randn(points.shape, generator=generator)
        edges = graph["hidden", "to", "hidden"]
        sources = torch.cdist(moved, points).topk(6, largest=False).indices
        edges.edge_index = torch.stack(
            [sources.flatten(), torch.arange(len(x)).repeat_interleave(6)]
        )
        edges.edge_length, edges.edge_dirs = (
            torch.rand(6 * len(x), n, generator=generator) for n in (1, 2)
        )
    return graph


def model_of(case):
    """The model of a case; cases share it, and ranks inherit it from the process that starts them."""
    dtype = torch.float32 if case.fused or case.family else torch.float64
    options = tuple(sorted(case.options.items()))
    return make_model(case.graph, case.family, case.ensemble > 1, options, case.compiled, dtype)


@cache
def make_model(name, family, is_ensemble, options, compiled, dtype):
    """A model, its trained node and edge attributes not zero, and its blocks compiled or not."""
    make = make_ensemble_options if is_ensemble else make_options
    if family is not None:
        make = partial(make_family_options, family)
    model = build(graph(name), make(**OPTIONS | dict(options))).double()
    for name, parameter in model.named_parameters():
        if "trainable" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    if family is not None:
        draw_conditions(model)
    model.to(dtype)
    if compiled:
        for mapper in (*model.encoder.values(), *model.decoder.values()):
            mapper.proc.compile(backend="aot_eager", dynamic=False)
        for block in model.processor.proc:
            block.compile(backend="aot_eager", dynamic=False)
    if is_ensemble and dtype == torch.float64:  # Anemoi draws noise in float32
        in_float64 = lambda module, args, kwargs: (args, kwargs | {"noise_dtype": torch.float64})  # noqa: E731
        model.noise_injector.register_forward_pre_hook(in_float64, with_kwargs=True)
    return model


def fields(case, model):
    """Input [batch, 2, ensemble, grid, 4] and target of one model of several."""
    generator = torch.Generator().manual_seed(model)
    grid = graph(case.graph)["data"].x.shape[0]
    x = torch.randn(case.batch, 2, case.ensemble, grid, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(
        case.batch, 1, case.ensemble, grid, 3, generator=generator, dtype=torch.float64
    )


def run(model, case, index, group):
    """The loss of model `index`, and its backward pass, on this rank of a group."""
    x, target = (rows.to(next(model.parameters()).dtype) for rows in fields(case, index))
    count, sizes = target.numel(), None
    if group is not None and group.size() > 1 and case.keep_sharded:  # as in anemoi-training
        sizes = get_shard_sizes(x, 3, group)
        x, target = (rows.split(sizes, 3)[group.rank()] for rows in (x, target))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(index)  # of the noise
    options = {"fcstep": 1} if case.ensemble > 1 else {}
    if case.family == "transport":
        options = transport_arguments(graph(case.graph), case.batch)
        if sizes is not None:
            noised = options["conditioned_target"]["data"]
            options["conditioned_target"]["data"] = noised.split(sizes, 3)[group.rank()]
    shards = None if sizes is None else {"data": sizes}
    out = model({"data": x}, model_comm_group=group, grid_shard_sizes=shards, **options)["data"]
    loss = (out - target).square().sum() / count
    loss.backward()
    if sizes is not None:
        loss = loss.detach().clone()
        dist.all_reduce(loss, group=group)
    return loss.detach()


def gradients_of_strategy(model, group, everyone):
    """Gradients as Anemoi's strategy makes them: scaled where a rank sees a part, then the mean over all ranks."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        # as Anemoi names what every rank sees whole
        is_whole = "trainable" in name or "no_gradscaling" in name
        dist.all_reduce(grad if is_whole else grad.mul_(group.size()), group=everyone)
        gradients[name] = grad / everyone.size()
    return gradients


def one_rank(case):
    """Mean loss and gradients of the models of a case, each on one rank, by Anemoi's own code."""
    model, losses, total = model_of(replace(case, compiled=False, fused=False)), [], {}
    for index in range(case.models):
        losses.append(run(model, case, index, None))
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total[name] = total.get(name, 0) + grad / case.models
    return torch.stack(losses).mean(), total


@cache
def conditioned_model():
    """A model whose encoder's norms are conditioned on four numbers of each node, as in Anemoi's diffusion models."""
    options = make_options(**OPTIONS)
    norm = {
        "_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm",
        "condition_shape": 4,
    }
    kernels = options["layer_kernels"] | {"LayerNorm": norm | {"zero_init": False}}
    options["encoders"]["encoder"]["mapper"]["layer_kernels"] = kernels
    return build(graph("asymmetric"), options).double()


def run_conditioned(group):
    """A sum over the output of the encoder for a batch of two; gradients of parameters and conditions."""
    model, generator = conditioned_model(), torch.Generator().manual_seed(0)
    model.zero_grad(set_to_none=True)
    mapper, counts = (
        model.encoder["encoder"],
        [len(graph("asymmetric")[name].x) for name in ("data", "hidden")],
    )
    widths = (mapper.in_channels_src, mapper.in_channels_dst, 4, 4, mapper.hidden_dim)
    rows = [
        torch.randn(2, n, c, generator=generator).double()
        for n, c in zip(2 * counts + counts[1:], widths, strict=True)
    ]
    conditions = {"sources": rows[2].requires_grad_(), "destinations": rows[3].requires_grad_()}
    sizes = [None, None]
    if group is not None:
        sizes = [get_shard_sizes(rows[side], 1, group) for side in (0, 1)]
        rows = [
            whole.split(sizes[i % 2 if i < 4 else 1], 1)[group.rank()]
            for i, whole in enumerate(rows)
        ]
    x_src, x_dst, c_src, c_dst, direction = (own.flatten(0, 1) for own in rows)
    edge_attr, edge_index, edges = model.encoder_graph_provider["data"].get_edges(
        2, model_comm_group=group
    )
    shards = BipartiteGraphShardInfo(*sizes, edges)
    _, out = mapper(
        (x_src, x_dst), 2, shards, edge_attr, edge_index, group, True, cond=(c_src, c_dst)
    )
    loss = (out * direction).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in mapper.named_parameters()} | {
        k: c.grad for k, c in conditions.items()
    }
    if group is not None:
        for value in (loss := loss.detach(), *gradients.values()):
            dist.all_reduce(value, group=group)
    return loss.detach(), gradients, {}


def run_case(case, group, index, everyone):
    """Loss, gradients, and what a rank counts in each step: two if `counted`, else one."""
    model, counts = model_of(case), []
    blocks = {"backend": "triton", "blocks": True} if case.fused else {"backend": "torch"}
    attention_steps.PROGRAMS = sublayer_steps.PROGRAMS = 3  # of the interpreter
    convs = [module.conv for module in model.modules() if hasattr(module, "conv")]
    is_watched = case.watched and dist.get_rank() == 0
    hooks = [conv.register_forward_hook(lambda *_: None) for conv in convs if is_watched]
    with integration.install(**blocks, **case.install):
        for _ in range(1 + case.counted):
            with counting() as counted:
                loss = run(model, case, index, group)
            counts.append(counted)
    for hook in hooks:
        hook.remove()
    gradients = gradients_of_strategy(model, group, everyone)
    dist.all_reduce(loss, group=everyone)
    return loss / everyone.size(), gradients, counts


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "all_reduce",
    "isend",
)


@contextmanager
def counting():
    """Counts of sorted edge lists, of collectives, and of our exchanges."""
    counts = Counter()

    def counted(name, function):
        def count(*arguments, **options):
            counts[name] += 1
            return function(*arguments, **options)

        return count

    with ExitStack() as patches:
        ours = ((GraphStructure, "from_edge_index"), (HaloExchange, "send"))
        for owner, name in (*ours, *((dist, name) for name in COLLECTIVES)):
            patches.enter_context(patch.object(owner, name, counted(name, getattr(owner, name))))
        yield counts


def work(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    logging.disable(logging.WARNING)
    groups = {k: dist.new_group(range(k)) for k in range(1, RANKS + 1)}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name, case in CASES.items():
        if rank < case.ranks * case.models:
            index = rank // case.ranks
            group = pairs[index] if case.models > 1 else groups[case.ranks]
            result = run_case(case, group, index, groups[case.ranks * case.models])
            if rank == 0:
                torch.save(result, folder / f"{name}.pt")
    if rank < 3:
        with integration.install(backend="torch"):
            result = run_conditioned(groups[3])
        if rank == 0:
            torch.save(result, folder / "conditioned.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    speed_up_interpreter()
    for case in CASES.values():
        model_of(case)
    conditioned_model()
    collect_seldom()
    mp.start_processes(work, (Path(sys.argv[1]),), nprocs=RANKS, start_method="fork")
