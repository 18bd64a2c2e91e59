"""Checks on ranks: the whole model, cut to the rows of a rank, gives what it gives whole."""

import copy
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch_geometric.data import HeteroData

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.sphere import sphere
from anemoi_gt.distributed import ShardingConfig, reduce_gradients, sum_loss
from anemoi_gt.distributed.model import shard_model
from anemoi_gt.distributed.training import ShardedBatches, Silence, shard_trainer, train_on_ranks
from anemoi_gt.training import Trainer, TrainingConfig
from anemoi_gt.training.metrics import MetricsFile
from distributed.problems import data, nearest
from distributed.problems import mesh as mesh_points
from distributed.ranks import everywhere, mesh_of, on_ranks, without_default_device

FIELDS = 3


def lat_lon(points):
    return torch.stack([points[:, 2].asin(), torch.atan2(points[:, 1], points[:, 0])], dim=1)


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
    for name, parameter in model.named_parameters():
        if name.endswith("trainable"):
            torch.nn.init.normal_(parameter)
    return model


MESHES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2))  # (data, model)
CASES = (("edges", True, {}), ("edges", False, {"checkpoint_groups": 2, "qk_norm": True}), ("heads", True, {}))


@on_ranks(4)
def outputs_loss_and_gradients_are_those_of_one_device(group, verdict):
    x, target = torch.randn(2, 2, len(data), FIELDS, dtype=torch.float64)
    for strategy, overlap, options in CASES:
        whole = make_model(**options)
        out = whole(x)
        loss = (out - target).square().sum() / len(data) / 2
        loss.backward()
        expected = dict(whole.named_parameters())
        for shape in MESHES:
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


@on_ranks(4)
def every_trained_row_has_one_owner(group, verdict):
    part, mesh = make_model(), mesh_of(1, 4)
    sizes = {name: len(parameter) for name, parameter in part.named_parameters()}
    cut = shard_model(part, mesh)
    for name, table in cut.tables.items():
        rows = [number for there in everywhere(table.numbers.tolist(), group) for number in there]
        verdict.same(name, sorted(rows), list(range(sizes[name])))
    verdict.same("own", sorted(cut.tables), sorted(name for name in sizes if name.endswith("trainable")))


@on_ranks(4)
def models_that_cannot_be_cut_say_why(group, verdict):
    mesh, model = mesh_of(1, 4), make_model()
    verdict.raises(ValueError, "mapper_chunks must be 1", lambda: shard_model(make_model(mapper_chunks=2), mesh))
    if dist.get_rank() == 2:
        next(model.parameters()).data += 1
    verdict.raises(ValueError, "weights must be the same on all ranks, got", lambda: shard_model(model, mesh))


@on_ranks(4)
def dropout_drops_what_one_device_drops(group, verdict):
    """With overlap asked for: it gives way."""
    whole, part = make_model(dropout=0.5), make_model(dropout=0.5)
    x = torch.randn(2, len(data), FIELDS, dtype=torch.float64)
    torch.manual_seed(3)
    out = whole(x)
    cut = shard_model(part, mesh_of(1, 4))
    own = cut.partitions["data"].nodes(cut.rank)
    torch.manual_seed(3)
    verdict.close("out", part(x[:, own]).detach(), out.detach()[:, own])


@on_ranks(4)
def copies_of_a_model_share_its_graphs(group, verdict):
    part = make_model()
    shard_model(part, mesh_of(1, 4))
    verdict.that(copy.deepcopy(part).processor_edges()[0] is part.processor_edges()[0], "the graph was copied")


class Records:
    """Metrics in memory."""

    def __init__(self):
        self.losses = []

    def write(self, **record):
        self.losses.append((record["split"], record["step"], record["loss"]))

    def sync(self):
        pass


def make_trainer(folder, steps=6):
    """A trainer of a small model on a sphere of 208 points."""
    numbers = {"steps": steps, "batch_size": 4, "warmup_steps": 2, "valid_every": 2, "log_every": 1, "device": "auto"}
    splits = sphere("O4", train_size=8, valid_size=3, test_size=1)
    graph, train = icosphere_graph(splits.train.nodes, refinement=1), splits.train
    torch.manual_seed(0)
    options = {"channels": 8, "heads": 4, "num_layers": 1, "config": AttentionConfig(backend="torch")}
    model = EncoderProcessorDecoder(graph, train.in_channels, train.out_channels, **options)
    return Trainer(model, splits, TrainingConfig(**numbers), folder, {"name": "test"})


def same_losses(verdict, label, actual, expected):
    verdict.same(f"{label}: records", [record[:2] for record in actual], [record[:2] for record in expected])
    for (split, step, loss), (_, _, wanted) in zip(actual, expected, strict=True):
        verdict.close(f"{label}: {split} {step}", torch.tensor(loss), torch.tensor(wanted))


@on_ranks(4)
def a_trainer_records_the_losses_of_one_device_and_continues_on_other_meshes(group, verdict):
    with without_default_device():
        shared = Path(everywhere(tempfile.mkdtemp(), group)[0])
        whole, expected = make_trainer(Path(tempfile.mkdtemp())), Records()
        whole.fit(expected)
        for shape, strategy in (((1, 4), "edges"), ((2, 2), "heads"), ((4, 1), "edges")):
            trainer, records = make_trainer(shared), Records()
            shard_trainer(trainer, mesh_of(*shape), strategy)
            trainer.fit(records)
            same_losses(verdict, f"{shape} {strategy}", records.losses, expected.losses)
        shared = Path(everywhere(tempfile.mkdtemp(), group)[0])
        half = make_trainer(shared)
        shard_trainer(half, mesh_of(1, 4))
        half.config, half.batches.steps = replace(half.config, steps=4), 4  # the schedule stays that of all steps
        with MetricsFile(shared / "metrics.jsonl") if dist.get_rank() == 0 else Silence() as metrics:
            half.fit(metrics)
        for shape, sharding in (((2, 2), ShardingConfig("heads", 2)), ((4, 1), ShardingConfig())):
            folder = shared.with_name(f"{shared.name}_{sharding.strategy}")
            if dist.get_rank() == 0:
                shutil.copytree(shared, folder)
                if shape == (2, 2):
                    (folder / "last").rename(folder / "last.former")  # as if cut off between the two names
            dist.barrier()
            records = train_on_ranks(make_trainer(folder), mesh_of(*shape), sharding, resumes=True)
            losses = [(record["split"], record["step"], record["loss"]) for record in records or []]
            same_losses(verdict, f"resumed on {shape}", losses, expected.losses if dist.get_rank() == 0 else [])
        if dist.get_rank() == 0:
            best = make_trainer(folder).best_model()
            for name, parameter in best.named_parameters():
                verdict.same(f"shape of {name}", parameter.shape, whole.learner.model.get_parameter(name).shape)
        other = replace(ShardingConfig(), timeout=1.0 + dist.get_rank())
        last = partial(train_on_ranks, make_trainer(shared), mesh_of(4, 1), other, resumes=True)
        verdict.raises(ValueError, "sharding must be the same on all ranks", last)


@on_ranks(4)
def ranks_refuse_the_run_of_one_process_before_they_write(group, verdict):
    with without_default_device():
        shared = Path(everywhere(tempfile.mkdtemp(), group)[0])
        (shared / "last.pt").write_bytes(b"a run")
        for resumes in (False, True):
            train = partial(train_on_ranks, make_trainer(shared), mesh_of(4, 1), ShardingConfig(), resumes=resumes)
            verdict.raises(ValueError, "holds a run of one process, in last.pt: resume=true without torchrun", train)
        verdict.same("files", [path.name for path in shared.iterdir()], ["last.pt"])


@on_ranks(4)
def a_batch_that_data_ranks_cannot_share_is_refused(group, verdict):
    options = {"dataset": range(8), "batch_size": 6, "steps": 1, "seed": 0, "device": torch.device("cpu")}
    verdict.raises(
        ValueError,
        "must be a multiple of the 4 ranks of the data axis, got 6",
        lambda: ShardedBatches(mesh_of(4, 1), **options),
    )
