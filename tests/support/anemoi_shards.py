"""Anemoi's models on several gloo ranks, and on one rank: `python anemoi_shards.py FOLDER CASE..`.

Four ranks start once and run these cases of `CASES` with anemoi_gt. Rank 0 writes FOLDER/CASE.pt: the
loss, the gradients after Anemoi's strategy, and the counts of each step. `one_rank(case)` is the same
with Anemoi's own code.
"""

import copy
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from anemoi_gt import GraphStructure
from anemoi_gt.distributed import HaloExchange
from anemoi_gt.integrations import anemoi as integration
from support.anemoi_model import (
    build,
    draw_conditions,
    graph_between,
    graph_of,
    make_ensemble_options,
    make_family_options,
    make_options,
    make_transformer_options,
    transport_arguments,
)
from support.frames import call_in_one_chunk
from support.garbage import collect_seldom
from support.plans import new_plans
from support.releases import TORCH
from support.weather import KINDS, weather_graph

RANKS = 4
LAYERS = 2
# PyTorch 2.9 breaks its graph where Anemoi passes sizes of shards to `checkpoint`.
TRACES_SHARD_INFO = TORCH >= (2, 10)


@dataclass(frozen=True)
class Case:
    """Options of a case, its number of models, and the number of ranks per model."""

    ranks: int = 2
    models: int = 1
    graph: str = "symmetric"
    batch: int = 1
    ensemble: int = 1
    keep_sharded: bool = True
    options: dict = field(default_factory=dict, hash=False)
    install: dict = field(default_factory=dict, hash=False)
    compiled: str = ""  # "block", of the processor, or "components": encoder and processor
    has_dynamic_sizes: bool = False  # in compiled code, after a batch of another size
    counted: bool = False
    fused: bool = False  # fused blocks, in float32
    # of `make_family_options`; those with noise are fused, and one rank also computes in float32
    family: str | None = None
    divided: bool = False  # parameters, by fully_shard
    has_hooks: bool = (
        False  # on the first rank, on modules that anemoi_gt's attention does not call
    )


# without qk_norm, the gradient of the key bias would be zero
OPTIONS = {"channels": 16, "heads": 2, "layers": LAYERS, "qk_norm": True}
# for cases that take seconds: interpreted kernels, compiled blocks
ONE_LAYER = {"layers": 1, "layer_chunks": 1}
FUSED = {"fused": True, "options": ONE_LAYER | {"mapper_chunks": 1}}
# sharded by Anemoi, which needs two heads per rank
WITHOUT_OURS = {"counted": True, "install": {"sharding": False}}


def make_cases():
    """Return all cases by name."""
    cases = {
        "symmetric-1-batch1": Case(1, counted=True),
        "symmetric-3-batch1": Case(3, counted=True),
        "asymmetric-4-batch2": Case(4, graph="asymmetric", batch=2, counted=True),
        "two models": Case(2, models=2, graph="asymmetric"),
        "ensemble": Case(2, batch=2, ensemble=2, graph="asymmetric"),
        "tiny": Case(4, graph="tiny", batch=2),
        "replicated": Case(3, graph="asymmetric", batch=2, keep_sharded=False),
        "tiny replicated": Case(4, graph="tiny", keep_sharded=False),
        "all activations kept": Case(
            3, options={"checkpointing": False, "mapper_chunks": 1}, batch=2
        ),
        "edges embedded": Case(
            3, options={"edge_pre_mlp": True}, install={"fusion": "none"}, batch=2
        ),
        "hooks on one rank": Case(2, has_hooks=True),
        "divided": Case(3, graph="asymmetric", divided=True),
        "fused divided": Case(2, graph="small", batch=2, divided=True, **FUSED),
        "components compiled, activations kept": Case(
            2,
            graph="small",
            compiled="components",
            options=ONE_LAYER | {"checkpointing": False},
        ),
    }
    options = {"qk_norm": False} | ONE_LAYER
    cases |= {
        "fused-small-2": Case(
            2,
            graph="small",
            batch=2,
            options=options,
            fused=True,
            compiled="block",
            has_dynamic_sizes=True,
        ),
        "fused-tiny-4": Case(4, graph="tiny", batch=2, options=options, fused=True),
    }
    ensemble = {"graph": "small", "ensemble": 2, "family": "ensemble", **FUSED}
    transport = {"graph": "small", "family": "transport", **FUSED}
    cases |= {
        "fused ensemble-3": Case(3, batch=2, **ensemble),
        "fused transport-2": Case(2, batch=1, **transport),
    }
    networks = {"family": "graph network"}
    fused = networks | FUSED
    cases |= {
        "graph network-1": Case(1, graph="asymmetric", counted=True, **networks),
        "graph network-3": Case(3, graph="asymmetric", counted=True, **networks),
        "fused graph network-2": Case(2, graph="small", compiled="components", **fused),
        "fused graph network-4": Case(4, graph="tiny", **fused),
        "fused graph network, gathered": Case(3, graph="small", **WITHOUT_OURS, **fused),
        "fused graph network, hooks on one rank": Case(2, graph="small", has_hooks=True, **fused),
    }
    for strategy in ("edges", "heads"):  # Anemoi shards only a batch of one
        options = {"heads": 8, "shard_strategy": strategy}
        cases[f"Anemoi's {strategy}"] = Case(3, options=options, **WITHOUT_OURS)
    # heads of its attention are exchanged; the backend is named, so the window is computed here
    options = {"heads": 4}
    cases["Anemoi's transformer-2"] = Case(2, graph="grids", family="transformer", options=options)
    return cases


CASES = make_cases()


@cache
def graph(name):
    """Return the graph of a case; in "tiny", two of four ranks have no hidden node, and some nodes have no edge."""
    if name == "small":
        return weather_graph({"data": 13, "hidden": 7}, dict.fromkeys(KINDS, 24))
    if name == "grids":
        return graph_between("O8", "O4")
    if name == "tiny":
        return weather_graph({"data": 7, "hidden": 2}, dict.fromkeys(KINDS, 5))
    graph = graph_of("O8", 2)
    if name == "asymmetric":  # edges from the nearest six nodes of randomly displaced points
        x = graph["hidden"].x
        generator = torch.Generator().manual_seed(0)
        lat, lon = x.unbind(1)
        points = torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], 1)
        moved = points + 0.1 * torch.randn(points.shape, generator=generator)
        edges = graph["hidden", "to", "hidden"]
        sources = torch.cdist(moved, points).topk(6, largest=False).indices
        destinations = torch.arange(len(x)).repeat_interleave(6)
        edges.edge_index = torch.stack([sources.flatten(), destinations])
        edges.edge_length = torch.rand(6 * len(x), 1, generator=generator)
        edges.edge_dirs = torch.rand(6 * len(x), 2, generator=generator)
    return graph


def model_of(case):
    """Return the model of a case; cases share models, and ranks inherit them from the process that forks."""
    has_noise = case.family in ("ensemble", "transport")
    dtype = torch.float32 if case.fused or has_noise else torch.float64
    options = tuple(sorted(case.options.items()))
    is_ensemble = case.ensemble > 1
    compiled = (case.compiled, case.has_dynamic_sizes)
    return make_model(case.graph, case.family, is_ensemble, options, *compiled, dtype)


@cache
def make_model(graph_name, family, is_ensemble, options, compiled, has_dynamic_sizes, dtype):
    """Return a model with random trainable node and edge attributes, parts of which are compiled or not."""
    make = make_ensemble_options if is_ensemble else make_options
    if family == "transformer":
        make = partial(make_transformer_options, window=9)
    elif family is not None:
        make = partial(make_family_options, family)
    model = build(graph(graph_name), make(**OPTIONS | dict(options))).double()
    for name, parameter in model.named_parameters():
        if "trainable" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    if family is not None:
        draw_conditions(model)
    model.to(dtype)
    parts = {
        "": [],
        "block": [model.processor.proc[0]],
        "components": [*model.encoder.values(), model.processor],
    }
    is_one_graph = compiled == "block" or TRACES_SHARD_INFO
    for part in parts[compiled]:
        dynamic = True if has_dynamic_sizes else None  # at once: each size would be compiled first
        part.compile(backend="aot_eager", fullgraph=is_one_graph, dynamic=dynamic)
    if is_ensemble and dtype == torch.float64:  # Anemoi draws noise in float32

        def in_float64(module, arguments, options):
            return arguments, options | {"noise_dtype": torch.float64}

        model.noise_injector.register_forward_pre_hook(in_float64, with_kwargs=True)
    return model


def divide(model, group):
    """Return a copy of a model whose parameters are divided among the ranks of a group, as docs/anemoi.md does."""
    model = copy.deepcopy(model)
    mesh = DeviceMesh.from_group(group, "cpu")
    parts = (*model.encoder.values(), *model.processor.proc, *model.decoder.values(), model)
    for part in parts:
        fully_shard(part, mesh=mesh)
        # parts see rows of their rank; trainable attributes, in the model itself, have whole gradients
        part.set_gradient_divide_factor(group.size() if part is model else 1)
        part.set_force_sum_reduction_for_comms(True)
    return model


def fields(case, model):
    """Draw the input [batch, 2, ensemble, grid, 4] and the target of one of several models."""
    generator = torch.Generator().manual_seed(model)
    grid = graph(case.graph)["data"].x.shape[0]
    shape = (case.batch, 2, case.ensemble, grid, 4)
    target_shape = (case.batch, 1, case.ensemble, grid, 3)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    target = torch.randn(target_shape, generator=generator, dtype=torch.float64)
    return x, target


def run(model, case, index, group):
    """Run forward and backward of model `index` on this rank of a group; return the loss."""
    x, target = (rows.to(next(model.parameters()).dtype) for rows in fields(case, index))
    count = target.numel()
    sizes = None
    if group is not None and group.size() > 1 and case.keep_sharded:  # as in anemoi-training
        sizes = get_shard_sizes(x, 3, group)
        x, target = (rows.split(sizes, 3)[group.rank()] for rows in (x, target))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(index)  # for the noise of an ensemble
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
    """Return the gradients after Anemoi's strategy: sharded ones are scaled, then all are averaged over ranks."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if isinstance(grad, DTensor):
            gradients[name] = grad.full_tensor()
            continue
        # Anemoi's names of parameters whose gradient is whole on every rank
        is_whole = "trainable" in name or "no_gradscaling" in name
        if not is_whole:
            grad.mul_(group.size())
        dist.all_reduce(grad, group=everyone)
        gradients[name] = grad / everyone.size()
    return gradients


def one_rank(case):
    """Return the mean loss and gradients of the models of a case, each on one rank, by Anemoi's own code."""
    model = model_of(replace(case, compiled="", has_dynamic_sizes=False, fused=False))
    losses = []
    total = {}
    for index in range(case.models):
        losses.append(run(model, case, index, None))
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total[name] = total.get(name, 0) + grad / case.models
    return torch.stack(losses).mean(), total


@cache
def conditioned_model():
    """Return a model whose encoder norms are conditioned on four values per node, as in Anemoi's diffusion models."""
    options = make_options(**OPTIONS)
    norm = {
        "_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm",
        "condition_shape": 4,
        "zero_init": False,
    }
    kernels = options["layer_kernels"] | {"LayerNorm": norm}
    options["encoders"]["encoder"]["mapper"]["layer_kernels"] = kernels
    return build(graph("asymmetric"), options).double()


def run_conditioned(group):
    """Return a weighted sum of the encoder output for a batch of two, and gradients of parameters and conditions."""
    model = conditioned_model()
    model.zero_grad(set_to_none=True)
    mapper = model.encoder["encoder"]
    num_src = len(graph("asymmetric")["data"].x)
    num_dst = len(graph("asymmetric")["hidden"].x)
    generator = torch.Generator().manual_seed(0)

    def draw_rows(nodes, channels):
        return torch.randn(2, nodes, channels, generator=generator).double()

    x_src = draw_rows(num_src, mapper.in_channels_src)
    x_dst = draw_rows(num_dst, mapper.in_channels_dst)
    conditions = {
        "sources": draw_rows(num_src, 4).requires_grad_(),
        "destinations": draw_rows(num_dst, 4).requires_grad_(),
    }
    direction = draw_rows(num_dst, mapper.hidden_dim)
    sources = [x_src, conditions["sources"]]
    destinations = [x_dst, conditions["destinations"], direction]
    src_sizes = None
    dst_sizes = None
    if group is not None:
        src_sizes = get_shard_sizes(x_src, 1, group)
        dst_sizes = get_shard_sizes(x_dst, 1, group)
        sources = [rows.split(src_sizes, 1)[group.rank()] for rows in sources]
        destinations = [rows.split(dst_sizes, 1)[group.rank()] for rows in destinations]
    x_src, cond_src = (rows.flatten(0, 1) for rows in sources)
    x_dst, cond_dst, direction = (rows.flatten(0, 1) for rows in destinations)
    provider = model.encoder_graph_provider["data"]
    edge_attr, edge_index, edges = provider.get_edges(2, model_comm_group=group)
    shards = BipartiteGraphShardInfo(src_sizes, dst_sizes, edges)
    cond = (cond_src, cond_dst)
    x = (x_src, x_dst)
    _, out = mapper(x, 2, shards, edge_attr, edge_index, group, keep_x_dst_sharded=True, cond=cond)
    loss = (out * direction).sum()
    loss.backward()
    loss = loss.detach()
    gradients = {name: parameter.grad for name, parameter in mapper.named_parameters()}
    gradients |= {name: condition.grad for name, condition in conditions.items()}
    if group is not None:
        for value in (loss, *gradients.values()):
            dist.all_reduce(value, group=group)
    return loss, gradients, {}


@new_plans(programs=3)  # few, for the interpreter
def run_case(case, group, index, everyone):
    """Return the loss, the gradients, and the counts of each of two steps if `counted`."""
    model = model_of(case)
    if case.divided:
        model = divide(model, group)
    counts = []
    blocks = {"backend": "triton", "fusion": "sublayers"} if case.fused else {"backend": "torch"}
    # One rank compiles, and the others, which would take as long, exchange rows with it eagerly. Of
    # several exchanges in one compiled part, as of chunks, the order in a recomputation is another,
    # before PyTorch 2.13 also of one exchange and one of Anemoi's.
    has_one_exchange = case.compiled == "block" or (
        TORCH >= (2, 13) and case.options.get("mapper_chunks") == 1
    )
    is_eager = has_one_exchange and dist.get_rank() > 0
    torch.compiler.set_stance("force_eager" if is_eager else "default")
    convs = [module.conv for module in model.modules() if hasattr(module, "conv")]
    hooks = []
    if case.has_hooks and dist.get_rank() == 0:
        hooks = [conv.register_forward_hook(lambda *_: None) for conv in convs]
    with integration.install(**blocks, **case.install):
        if case.has_dynamic_sizes:
            run(model, replace(case, batch=case.batch + 1), index, group)
        if case.counted:
            for _ in range(2):
                with counting() as counted:
                    loss = run(model, case, index, group)
                counts.append(counted)
        else:
            loss = run(model, case, index, group)
        if case.fused and not case.has_hooks:
            outcomes = {computed.outcome for computed in integration.installed().computed}
            assert outcomes == {"fused"}, outcomes
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
    """Count sorted edge lists, collectives, and halo exchanges."""
    counts = Counter()

    def counted(name, function):
        def count(*arguments, **options):
            counts[name] += 1
            return function(*arguments, **options)

        return count

    with ExitStack() as patches:
        functions = [(GraphStructure, "from_edge_index"), (HaloExchange, "send")]
        functions += [(dist, name) for name in COLLECTIVES]
        for owner, name in functions:
            patches.enter_context(patch.object(owner, name, counted(name, getattr(owner, name))))
        yield counts


def work(rank, folder, names):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    logging.disable(logging.WARNING)
    groups = {k: dist.new_group(range(k)) for k in range(1, RANKS + 1)}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name in names:
        case = CASES[name]
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
    folder, *names = sys.argv[1:]
    for name in names:
        model_of(CASES[name])
    conditioned_model()
    collect_seldom()
    arguments = (Path(folder), names)
    call_in_one_chunk(
        mp.start_processes, fn=work, args=arguments, nprocs=RANKS, start_method="fork"
    )
