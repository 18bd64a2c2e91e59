"""Anemoi's models on several gloo ranks, and on one rank: `python anemoi_shards.py FOLDER`.

Four ranks are started once and run every case of `CASES` with our sharding; rank 0 writes FOLDER/CASE.pt: the loss and
what Anemoi's strategy makes of the gradients, or what the case counts. `one_rank(case)` is the same with Anemoi's own
code. Ranks with Anemoi's own sharding, on its code and on ours, write FOLDER/WORLD_STRATEGY_WHO.pt: the whole output,
gradients summed over ranks, and how many edge lists each rank sorted in each of two passes.
"""

import logging
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from anemoi.models.distributed.graph import gather_tensor
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, get_shard_sizes
from torch_geometric.data import HeteroData

from anemoi_gt import GraphStructure
from anemoi_gt.distributed import HaloExchange
from anemoi_gt.integrations import anemoi as integration
from support.anemoi_model import build, draw, graph_of, make_ensemble_options, make_options

RANKS = 4
LAYERS = 2
STRATEGIES, WORLDS = ("edges", "heads"), (2, 3)  # of Anemoi's own sharding


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


TOPOLOGIES = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "4": (4, 1), "2x2": (2, 2)}
OPTIONS = {"channels": 16, "heads": 2, "layers": LAYERS, "qk_norm": True}  # with qk_norm no gradient is zero by nature
COUNTED = {("symmetric", "1", 1), ("symmetric", "3", 1), ("asymmetric", "4", 2)}
CASES = {
    **{
        f"{graph}-{name}-batch{batch}": Case(ranks, models, graph, batch, counted=(graph, name, batch) in COUNTED)
        for graph in ("symmetric", "asymmetric")
        for name, (ranks, models) in TOPOLOGIES.items()
        for batch in (1, 2)
    },
    **{f"ensemble-{name}": Case(*TOPOLOGIES[name], ensemble=2) for name in ("1", "2", "3", "2x2")},
    "ensemble-batch2": Case(3, batch=2, ensemble=2, graph="asymmetric"),
    **{f"tiny-{batch}": Case(4, graph="tiny", batch=batch) for batch in (1, 2)},
    **{f"replicated-{ranks}-{b}": Case(ranks, graph="asymmetric", batch=b, keep_sharded=False)
       for ranks, b in ((2, 1), (3, 2))},
    "tiny-replicated": Case(4, graph="tiny", batch=2, keep_sharded=False),
    "all activations kept": Case(3, options={"checkpointing": False, "mapper_chunks": 1}, batch=2),
    "edges embedded": Case(3, options={"edge_pre_mlp": True}, install={"fuse_edges": False}, batch=2),
    "compiled": Case(2, graph="asymmetric", batch=2, compiled=True),
}  # fmt: skip


@cache
def graph(name):
    """The graph of a case; of the tiny one two ranks of four have no hidden node, and some nodes no edge."""
    if name == "tiny":
        return tiny_graph()
    graph = graph_of("O8", 2)
    if name == "asymmetric":  # the nearest six, seen from nodes that are each moved a little
        x, generator = graph["hidden"].x, torch.Generator().manual_seed(0)
        lat, lon = x.unbind(1)
        points = torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], 1)
        moved = points + 0.1 * torch.randn(points.shape, generator=generator)
        edges = graph["hidden", "to", "hidden"]
        sources = torch.cdist(moved, points).topk(6, largest=False).indices
        set_edges(edges, torch.stack([sources.flatten(), torch.arange(len(x)).repeat_interleave(6)]), generator)
    return graph


def tiny_graph():
    """Seven data nodes and two hidden ones."""
    graph, generator = HeteroData(), torch.Generator().manual_seed(0)
    graph["data"].x, graph["hidden"].x = (torch.rand(n, 2, generator=generator) for n in (7, 2))
    for source, destination in (("data", "hidden"), ("hidden", "hidden"), ("hidden", "data")):
        pairs = torch.stack(
            [torch.randint(len(graph[name].x), (5,), generator=generator) for name in (source, destination)]
        )
        set_edges(graph[source, "to", destination], pairs, generator)
    return graph


def set_edges(edges, edge_index, generator):
    edges.edge_index = edge_index
    edges.edge_length, edges.edge_dirs = (
        torch.rand(edge_index.shape[1], n, generator=generator, dtype=torch.float32) for n in (1, 2)
    )


def model_of(case):
    """The model of a case; cases share it, and ranks inherit it from the process that starts them."""
    return make_model(case.graph, case.ensemble > 1, tuple(sorted(case.options.items())), case.compiled)


@cache
def make_model(name, is_ensemble, options, compiled):
    """A model in float64, its trained node and edge attributes not zero, and its blocks compiled or not."""
    make = make_ensemble_options if is_ensemble else make_options
    model = build(graph(name), make(**OPTIONS | dict(options))).double()
    for name, parameter in model.named_parameters():
        if "trainable" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    if compiled:
        for mapper in (*model.encoder.values(), *model.decoder.values()):
            mapper.proc.compile(backend="aot_eager", dynamic=False)
        for block in model.processor.proc:
            block.compile(backend="aot_eager", dynamic=False)
    if is_ensemble:  # Anemoi draws noise in float32
        in_float64 = lambda module, args, kwargs: (args, kwargs | {"noise_dtype": torch.float64})  # noqa: E731
        model.noise_injector.register_forward_pre_hook(in_float64, with_kwargs=True)
    return model


def fields(case, model):
    """Input [batch, 2, ensemble, grid, 4] and target of one model of several."""
    generator = torch.Generator().manual_seed(model)
    grid = graph(case.graph)["data"].x.shape[0]
    x = torch.randn(case.batch, 2, case.ensemble, grid, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(case.batch, 1, case.ensemble, grid, 3, generator=generator, dtype=torch.float64)


def run(model, case, index, group):
    """The loss of model `index`, and its backward pass, on this rank of a group."""
    x, target = fields(case, index)
    count, sizes = target.numel(), None
    if group is not None and group.size() > 1 and case.keep_sharded:  # as in anemoi-training
        sizes = get_shard_sizes(x, 3, group)
        x, target = (rows.split(sizes, 3)[group.rank()] for rows in (x, target))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(index)  # of the noise
    options = {"fcstep": 1} if case.ensemble > 1 else {}
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
        dist.all_reduce(grad if "trainable" in name else grad.mul_(group.size()), group=everyone)
        gradients[name] = grad / everyone.size()
    return gradients


def one_rank(case):
    """Mean loss and gradients of the models of a case, each on one rank, by Anemoi's own code."""
    model, losses, total = model_of(replace(case, compiled=False)), [], {}
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
    norm = {"_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm", "condition_shape": 4}
    kernels = options["layer_kernels"] | {"LayerNorm": norm | {"zero_init": False}}
    options["encoders"]["encoder"]["mapper"]["layer_kernels"] = kernels
    return build(graph("asymmetric"), options).double()


def run_conditioned(group):
    """A sum over the output of the encoder for a batch of two; gradients of parameters and conditions."""
    model, generator = conditioned_model(), torch.Generator().manual_seed(0)
    model.zero_grad(set_to_none=True)
    mapper, counts = model.encoder["encoder"], [len(graph("asymmetric")[name].x) for name in ("data", "hidden")]
    widths = (mapper.in_channels_src, mapper.in_channels_dst, 4, 4, mapper.hidden_dim)
    rows = [
        torch.randn(2, n, c, generator=generator).double() for n, c in zip(2 * counts + counts[1:], widths, strict=True)
    ]
    conditions = {"sources": rows[2].requires_grad_(), "destinations": rows[3].requires_grad_()}
    sizes = [None, None]
    if group is not None:
        sizes = [get_shard_sizes(rows[side], 1, group) for side in (0, 1)]
        rows = [whole.split(sizes[i % 2 if i < 4 else 1], 1)[group.rank()] for i, whole in enumerate(rows)]
    x_src, x_dst, c_src, c_dst, direction = (own.flatten(0, 1) for own in rows)
    edge_attr, edge_index, edges = model.encoder_graph_provider["data"].get_edges(2, model_comm_group=group)
    shards = BipartiteGraphShardInfo(*sizes, edges)
    _, out = mapper((x_src, x_dst), 2, shards, edge_attr, edge_index, group, True, cond=(c_src, c_dst))
    loss = (out * direction).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in mapper.named_parameters()} | {k: c.grad for k, c in conditions.items()}
    if group is not None:
        for value in (loss := loss.detach(), *gradients.values()):
            dist.all_reduce(value, group=group)
    return loss.detach(), gradients, {}


def run_case(case, group, index, everyone):
    """Loss, gradients, and how many edge lists a rank sorts and which collectives it calls, in the second of two steps if `counted`."""
    model = model_of(case)
    with integration.install(backend="torch", **case.install):
        if case.counted:
            run(model, case, index, group)
        with counting() as counts:
            loss = run(model, case, index, group)
    gradients = gradients_of_strategy(model, group, everyone)
    dist.all_reduce(loss, group=everyone)
    return loss / everyone.size(), gradients, counts


def upstream_model(strategy):
    """A model for Anemoi's sharding: 3 ranks have 3, 3 and 2 heads; with one head on a rank its exchange fails."""
    return build(graph("symmetric"), make_options(qk_norm=True, heads=8, shard_strategy=strategy))


def run_upstream(model, group):
    """One pass on this rank's part of the grid, or on the whole without a group; the whole output, summed gradients."""
    x = draw(graph("symmetric"))["data"]
    sizes = None if group is None else get_shard_sizes(x, 3, group)
    split = lambda rows: rows if group is None else rows.split(sizes, 3)[group.rank()]  # noqa: E731
    model.zero_grad(set_to_none=True)
    shards = {} if group is None else {"model_comm_group": group, "grid_shard_sizes": {"data": sizes}}
    out = model({"data": split(x)}, **shards)["data"]
    whole = out.detach() if group is None else gather_tensor(out.detach(), 3, sizes, group)
    (out * split(torch.randn(whole.shape, generator=torch.Generator().manual_seed(3)))).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if group is not None:
            dist.all_reduce(gradients[name], group=group)
            if "trainable" in name:  # cut after they are read: every rank has gathered their whole gradient
                gradients[name] /= group.size()
    return whole, gradients


def work_upstream(group, folder):
    """Write what a group computes with Anemoi's own sharding, on its code and on ours."""
    for strategy in STRATEGIES:
        for who, install in (("theirs", nullcontext), ("ours", partial(integration.install, "torch", sharding=False))):
            model, sorts = upstream_model(strategy), []
            with install():
                for _ in range(2):
                    with counting() as counts:
                        whole, gradients = run_upstream(model, group)
                    sorts.append(counts.get("from_edge_index", 0))
            if group.rank() == 0:
                torch.save((whole, gradients, sorts), folder / f"{group.size()}_{strategy}_{who}.pt")


class counting:
    """Counts of sorted edge lists and of collectives while it is entered."""

    def __enter__(self):
        self.counts, self.former = {}, []
        sort = GraphStructure.from_edge_index.__func__
        self._replace(GraphStructure, "from_edge_index", lambda count: classmethod(count(sort)))
        for name in ("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "all_reduce", "isend"):
            self._replace(dist, name, lambda count, name=name: count(getattr(dist, name)))
        self._replace(HaloExchange, "send", lambda count: count(HaloExchange.send))
        return self.counts

    def _replace(self, owner, name, make):
        def count(function):
            def counted(*args, **kwargs):
                self.counts[name] = self.counts.get(name, 0) + 1
                return function(*args, **kwargs)

            return counted

        self.former.append((owner, name, vars(owner)[name]))
        setattr(owner, name, make(count))

    def __exit__(self, *error):
        for owner, name, value in self.former:
            setattr(owner, name, value)


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
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
    for world in WORLDS:
        if rank < world:
            work_upstream(groups[world], folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for case in CASES.values():
        model_of(case)
    conditioned_model()
    mp.start_processes(work, (Path(sys.argv[1]),), nprocs=RANKS, start_method="fork")
